// One wgmma of each type, shape and operand source. The host lays out shared memory and gives the
// descriptors; registers go in and out raw, so that the fragment layouts are what is tested.
#include <cstdint>

struct Params {
  const uint4* image;      // shared memory content
  const uint32_t* a;       // 128 x 4 registers of A, for kernels that take A from registers
  const uint32_t* d_in;    // 128 x registers of D
  uint32_t* d_out;
  uint64_t a_desc, b_desc;  // relative to the start of the image
  uint32_t image_bytes, use_d, steps, a_step, b_step;
};

__device__ __forceinline__ uint32_t shared(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void put(float& d, uint32_t bits) { d = __uint_as_float(bits); }
__device__ __forceinline__ void put(uint32_t& d, uint32_t bits) { d = bits; }
__device__ __forceinline__ uint32_t get(float d) { return __float_as_uint(d); }
__device__ __forceinline__ uint32_t get(uint32_t d) { return d; }

#define D4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define D16(c, i) D4(c, i), D4(c, i + 4), D4(c, i + 8), D4(c, i + 12)
#define F(x) "+f"(x)
#define R(x) "+r"(x)
#define T4 "%0,%1,%2,%3"
#define T2 "%0,%1"
#define T8 T4 ",%4,%5,%6,%7"
#define T12 T8 ",%8,%9,%10,%11"
#define T32                                                                                \
  T12 ",%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define T64                                                                                \
  T32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51"   \
      ",%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define T128                                                                               \
  T64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83"   \
      ",%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102"    \
      ",%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118"   \
      ",%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define OUT2(c) c(d[0]), c(d[1])
#define OUT4(c) D4(c, 0)
#define OUT8(c) OUT4(c), D4(c, 4)
#define OUT12(c) OUT8(c), D4(c, 8)
#define OUT32(c) D16(c, 0), D16(c, 16)
#define OUT64(c) OUT32(c), D16(c, 32), D16(c, 48)
#define OUT128(c) OUT64(c), D16(c, 64), D16(c, 80), D16(c, 96), D16(c, 112)

#define PROLOGUE(type, count)                                                              \
  extern __shared__ __align__(1024) uint8_t smem[];                                        \
  for (uint32_t i = threadIdx.x; i < p.image_bytes / 16; i += 128)                         \
    reinterpret_cast<uint4*>(smem)[i] = p.image[i];                                        \
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                             \
  __syncthreads();                                                                         \
  type d[count];                                                                           \
  for (int i = 0; i < count; i++) put(d[i], p.d_in[threadIdx.x * count + i]);              \
  const uint64_t base = shared(smem) >> 4;                                                 \
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");

#define EPILOGUE(count)                                                                    \
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");                           \
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");                           \
  for (int i = 0; i < count; i++) p.d_out[threadIdx.x * count + i] = get(d[i]);

// A and B from shared memory, `steps` instructions on one accumulator.
#define SS(name, opcode, type, c, count, na, nb, np, tail)                                 \
  extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ Params p) { \
    PROLOGUE(type, count)                                                                  \
    for (uint32_t s = 0; s < p.steps; s++)                                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " np ", 0;\n"                         \
                   "wgmma.mma_async.sync.aligned." opcode " {" T##count "}, " na ", " nb   \
                   ", p" tail ";\n}\n"                                                     \
                   : OUT##count(c)                                                         \
                   : "l"(p.a_desc + base + s * p.a_step),                                    \
                     "l"(p.b_desc + base + s * p.b_step),                                  \
                     "r"(p.use_d | s));                                                    \
    EPILOGUE(count)                                                                        \
  }

// A from registers.
#define RS(name, opcode, type, c, count, a0t, a1t, a2t, a3t, nb, np, tail)                 \
  extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ Params p) { \
    const uint32_t* a = p.a + threadIdx.x * 4;                                             \
    const uint32_t a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];                             \
    PROLOGUE(type, count)                                                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " np ", 0;\n"                           \
                 "wgmma.mma_async.sync.aligned." opcode " {" T##count "}, {" a0t ", " a1t  \
                 ", " a2t ", " a3t "}, " nb ", p" tail ";\n}\n"                            \
                 : OUT##count(c)                                                           \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(p.b_desc + base),             \
                   "r"(p.use_d));         \
    EPILOGUE(count)                                                                        \
  }

SS(f16_n8, "m64n8k16.f32.f16.f16", float, F, 4, "%4", "%5", "%6", ", 1, 1, 0, 0")
SS(f16_n24, "m64n24k16.f32.f16.f16", float, F, 12, "%12", "%13", "%14", ", 1, 1, 0, 0")
SS(f16_n64, "m64n64k16.f32.f16.f16", float, F, 32, "%32", "%33", "%34", ", 1, 1, 0, 0")
SS(f16_n64_ta, "m64n64k16.f32.f16.f16", float, F, 32, "%32", "%33", "%34", ", 1, 1, 1, 0")
SS(f16_n64_tb, "m64n64k16.f32.f16.f16", float, F, 32, "%32", "%33", "%34", ", -1, 1, 0, 1")
SS(f16_n128, "m64n128k16.f32.f16.f16", float, F, 64, "%64", "%65", "%66", ", 1, -1, 0, 0")
SS(bf16_n256, "m64n256k16.f32.bf16.bf16", float, F, 128, "%128", "%129", "%130", ", 1, 1, 0, 0")
SS(f16_n8_f16, "m64n8k16.f16.f16.f16", uint32_t, R, 2, "%2", "%3", "%4", ", 1, 1, 0, 0")
SS(tf32_n64, "m64n64k8.f32.tf32.tf32", float, F, 32, "%32", "%33", "%34", ", 1, 1")
SS(e4m3_n64, "m64n64k32.f32.e4m3.e4m3", float, F, 32, "%32", "%33", "%34", ", 1, 1")
SS(e5m2_e4m3_n8, "m64n8k32.f32.e5m2.e4m3", float, F, 4, "%4", "%5", "%6", ", 1, 1")
SS(s8_n64, "m64n64k32.s32.s8.s8", uint32_t, R, 32, "%32", "%33", "%34", "")
SS(u8_s8_n8, "m64n8k32.s32.u8.s8", uint32_t, R, 4, "%4", "%5", "%6", "")
RS(rs_f16_n64, "m64n64k16.f32.f16.f16", float, F, 32, "%32", "%33", "%34", "%35", "%36", "%37",
   ", 1, 1, 0")
RS(rs_f16_n64_tb, "m64n64k16.f32.f16.f16", float, F, 32, "%32", "%33", "%34", "%35", "%36", "%37",
   ", 1, 1, 1")
RS(rs_e4m3_n64, "m64n64k32.f32.e4m3.e4m3", float, F, 32, "%32", "%33", "%34", "%35", "%36", "%37",
   ", 1, 1")
RS(rs_tf32_n8, "m64n8k8.f32.tf32.tf32", float, F, 4, "%4", "%5", "%6", "%7", "%8", "%9", ", 1, 1")
RS(rs_s8_n8, "m64n8k32.s32.s8.s8", uint32_t, R, 4, "%4", "%5", "%6", "%7", "%8", "%9", "")

// Broken rules, one at a time.
extern "C" __global__ void __launch_bounds__(128) broken(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t fault = p.steps;
  for (uint32_t i = threadIdx.x; i < p.image_bytes / 16; i += 128)
    reinterpret_cast<uint4*>(smem)[i] = p.image[i];
  if (fault != 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (fault != 2) __syncthreads();
  float d[4];
  for (int i = 0; i < 4; i++) d[i] = __uint_as_float(p.d_in[threadIdx.x * 4 + i]);
  const uint64_t a = p.a_desc + (shared(smem) >> 4), b = p.b_desc + (shared(smem) >> 4);
  if (fault != 3) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if (fault != 4 || threadIdx.x < 96)
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  if (fault != 5 && fault != 6) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (fault == 6) reinterpret_cast<uint32_t*>(smem)[threadIdx.x] = 0;
  for (int i = 0; i < 4; i++) p.d_out[threadIdx.x * 4 + i] = __float_as_uint(d[i]);
}
