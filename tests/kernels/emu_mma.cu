// mma.sync of every type: registers go in and out raw. The block-scaled forms need sm_120a.
#include <cstdint>

struct Params {
  const uint32_t* a;  // 32 lanes x registers each
  const uint32_t* b;
  const uint32_t* c;
  uint32_t* d;
  const uint32_t* scales;  // A's, then B's
  uint16_t byte_a, thread_a, byte_b, thread_b;
};

#define MMA(name, opcode, nd, na, nb, ctype, text)                                         \
  extern "C" __global__ void name(const __grid_constant__ Params p) {                      \
    uint32_t a[4] = {}, b[2] = {}, c[4] = {}, d[4] = {};                                   \
    for (int i = 0; i < na; i++) a[i] = p.a[threadIdx.x * na + i];                         \
    for (int i = 0; i < nb; i++) b[i] = p.b[threadIdx.x * nb + i];                         \
    for (int i = 0; i < nd; i++) c[i] = p.c[threadIdx.x * nd + i];                         \
    text(opcode);                                                                          \
    for (int i = 0; i < nd; i++) p.d[threadIdx.x * nd + i] = d[i];                         \
  }
#define D4(d) "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
#define IN4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define IN2(b) "r"(b[0]), "r"(b[1])
#define X442(opcode)                                                                       \
  asm("mma.sync.aligned." opcode " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};" \
      : D4(d)                                                                              \
      : IN4(a), IN2(b), IN4(c))
#define F442(opcode)                                                                       \
  float* f = reinterpret_cast<float*>(d);                                                  \
  const float* g = reinterpret_cast<const float*>(c);                                      \
  asm("mma.sync.aligned." opcode " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};" \
      : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])                                     \
      : IN4(a), IN2(b), "f"(g[0]), "f"(g[1]), "f"(g[2]), "f"(g[3]))
#define F421(opcode)                                                                       \
  float* f = reinterpret_cast<float*>(d);                                                  \
  const float* g = reinterpret_cast<const float*>(c);                                      \
  asm("mma.sync.aligned." opcode " {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"             \
      : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])                                     \
      : IN2(a), "r"(b[0]), "f"(g[0]), "f"(g[1]), "f"(g[2]), "f"(g[3]))
#define X421(opcode)                                                                       \
  asm("mma.sync.aligned." opcode " {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"             \
      : D4(d)                                                                              \
      : IN2(a), "r"(b[0]), IN4(c))
#define H242(opcode)                                                                       \
  asm("mma.sync.aligned." opcode " {%0,%1},{%2,%3,%4,%5},{%6,%7},{%8,%9};"                 \
      : "=r"(d[0]), "=r"(d[1])                                                             \
      : IN4(a), IN2(b), IN2(c))
#define H221(opcode)                                                                       \
  asm("mma.sync.aligned." opcode " {%0,%1},{%2,%3},{%4},{%5,%6};"                          \
      : "=r"(d[0]), "=r"(d[1])                                                             \
      : IN2(a), "r"(b[0]), IN2(c))

MMA(f16_k16, "m16n8k16.row.col.f32.f16.f16.f32", 4, 4, 2, float, F442)
MMA(bf16_k16, "m16n8k16.row.col.f32.bf16.bf16.f32", 4, 4, 2, float, F442)
MMA(f16_k8, "m16n8k8.row.col.f32.f16.f16.f32", 4, 2, 1, float, F421)
MMA(f16_k16_f16, "m16n8k16.row.col.f16.f16.f16.f16", 2, 4, 2, half, H242)
MMA(f16_k8_f16, "m16n8k8.row.col.f16.f16.f16.f16", 2, 2, 1, half, H221)
MMA(tf32_k8, "m16n8k8.row.col.f32.tf32.tf32.f32", 4, 4, 2, float, F442)
MMA(tf32_k4, "m16n8k4.row.col.f32.tf32.tf32.f32", 4, 2, 1, float, F421)
MMA(s8_k32, "m16n8k32.row.col.s32.s8.s8.s32", 4, 4, 2, int, X442)
MMA(u8_s8_k16, "m16n8k16.row.col.s32.u8.s8.s32", 4, 2, 1, int, X421)
MMA(s8_k32_sat, "m16n8k32.row.col.satfinite.s32.s8.s8.s32", 4, 4, 2, int, X442)
MMA(e4m3_k32, "m16n8k32.row.col.f32.e4m3.e4m3.f32", 4, 4, 2, float, F442)
MMA(e5m2_e4m3_k32, "m16n8k32.row.col.f32.e5m2.e4m3.f32", 4, 4, 2, float, F442)

extern "C" __global__ void f64_k4(const __grid_constant__ Params p) {
  const double* a = reinterpret_cast<const double*>(p.a);
  const double* b = reinterpret_cast<const double*>(p.b);
  const double* c = reinterpret_cast<const double*>(p.c);
  double* d = reinterpret_cast<double*>(p.d) + 2 * threadIdx.x;
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%4,%5};"
      : "=d"(d[0]), "=d"(d[1])
      : "d"(a[threadIdx.x]), "d"(b[threadIdx.x]), "d"(c[2 * threadIdx.x]),
        "d"(c[2 * threadIdx.x + 1]));
}

#define DK(name, shape, na, nb, A, B)                                                      \
  extern "C" __global__ void name(const __grid_constant__ Params p) {                      \
    const double* a = reinterpret_cast<const double*>(p.a) + na * threadIdx.x;             \
    const double* b = reinterpret_cast<const double*>(p.b) + nb * threadIdx.x;             \
    const double* c = reinterpret_cast<const double*>(p.c) + 4 * threadIdx.x;              \
    double* d = reinterpret_cast<double*>(p.d) + 4 * threadIdx.x;                          \
    asm("mma.sync.aligned." shape ".row.col.f64.f64.f64.f64 {%0,%1,%2,%3}," A B            \
        : "=d"(d[0]), "=d"(d[1]), "=d"(d[2]), "=d"(d[3])                                   \
        : "d"(c[0]), "d"(c[1]), "d"(c[2]), "d"(c[3]), "d"(a[0]), "d"(a[1]), "d"(a[2 % na]), \
          "d"(a[3 % na]), "d"(b[0]), "d"(b[1 % nb]));                                      \
  }
DK(f64_m16_k4, "m16n8k4", 2, 1, "{%8,%9},{%12},", "{%4,%5,%6,%7};")
DK(f64_m16_k8, "m16n8k8", 4, 2, "{%8,%9,%10,%11},{%12,%13},", "{%4,%5,%6,%7};")

#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || !defined(__CUDA_ARCH__)
#define S442(opcode)                                                                       \
  float* f = reinterpret_cast<float*>(d);                                                  \
  const float* g = reinterpret_cast<const float*>(c);                                      \
  const uint32_t sa = p.scales[threadIdx.x], sb = p.scales[32 + threadIdx.x];              \
  asm("mma.sync.aligned." opcode                                                           \
      " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13},{%14},{%15,%16},{%17},{%18,%19};" \
      : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])                                     \
      : IN4(a), IN2(b), "f"(g[0]), "f"(g[1]), "f"(g[2]), "f"(g[3]), "r"(sa), "h"(p.byte_a), \
        "h"(p.thread_a), "r"(sb), "h"(p.byte_b), "h"(p.thread_b))
MMA(f8f6f4, "kind::f8f6f4.m16n8k32.row.col.f32.e2m1.e3m2.f32", 4, 4, 2, float, F442)
MMA(nvfp4, "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3", 4,
    4, 2, float, S442)
MMA(mxfp4, "kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0", 4, 4,
    2, float, S442)
MMA(mxfp8, "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e5m2.f32.ue8m0", 4,
    4, 2, float, S442)
#endif
