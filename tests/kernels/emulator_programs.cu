// Small programs that run alike on a GPU and in the emulator; the results must be equal bit for bit.
// Every kernel takes (const uint32_t* in, uint32_t* out, uint32_t n) in one struct.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct Params {
  const uint32_t* in;
  uint32_t* out;
  uint32_t n;
  uint32_t pad;
};
#define KERNEL(name) extern "C" __global__ void name(const __grid_constant__ Params p)
#define TID (blockIdx.x * blockDim.x + threadIdx.x)

static __device__ __forceinline__ uint32_t smem(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

KERNEL(vector_loads) {
  const uint4 v = reinterpret_cast<const uint4*>(p.in)[TID];
  const ushort2 h = reinterpret_cast<const ushort2*>(p.in)[TID];
  const uchar4 b = reinterpret_cast<const uchar4*>(p.in)[TID + 1];
  const signed char s = reinterpret_cast<const signed char*>(p.in)[TID];
  const short t = reinterpret_cast<const short*>(p.in)[TID];
  reinterpret_cast<uint2*>(p.out)[TID] =
      make_uint2(v.x + v.y * 3 + v.z * 5 + v.w * 7, h.x + h.y * 9 + b.x + b.y * 3 + b.z * 5 + b.w + s + t);
}

KERNEL(byte_stores) {
  uint8_t* out = reinterpret_cast<uint8_t*>(p.out);
  uint16_t* half = reinterpret_cast<uint16_t*>(p.out + 256);
  out[TID] = p.in[TID] >> 3;
  half[TID] = p.in[TID] * 77;
}

KERNEL(shared_reverse) {
  __shared__ uint32_t s[256];
  s[threadIdx.x] = p.in[TID];
  __syncthreads();
  p.out[TID] = s[255 - threadIdx.x] ^ s[(threadIdx.x * 7) & 255];
}

KERNEL(shuffles) {
  uint32_t v = p.in[TID], r = 0;
  for (int width = 2; width <= 32; width *= 2) {
    r = r * 31 + __shfl_sync(~0u, v, threadIdx.x * 5, width);
    r = r * 31 + __shfl_up_sync(~0u, v, 3, width);
    r = r * 31 + __shfl_down_sync(~0u, v, 2, width);
    r = r * 31 + __shfl_xor_sync(~0u, v, 1, width);
  }
  const unsigned long long wide = __shfl_xor_sync(~0u, (static_cast<unsigned long long>(v) << 32) | r, 5);
  if (threadIdx.x & 8) r += __shfl_sync(__activemask(), v, 9);
  p.out[TID] = r + static_cast<uint32_t>(wide >> 32) + static_cast<uint32_t>(wide);
}

KERNEL(votes) {
  const uint32_t v = p.in[TID];
  uint32_t r = __ballot_sync(~0u, v & 1);
  r ^= __any_sync(~0u, v == 3) << 1;
  r ^= __all_sync(~0u, v < 0xFFFFFFF0u) << 2;
  r ^= __uni_sync(~0u, (v & 1) == (v & 1)) << 3;
  if (v & 2) {
    r += __ballot_sync(__activemask(), v & 4);
  }
  p.out[TID] = r + __popc(__match_any_sync(~0u, v & 7)) * 1000 + __match_any_sync(~0u, v & 3);
  int equal = 0;
  const uint32_t all = __match_all_sync(~0u, v >> 31 & (threadIdx.x >> 6), &equal);
  p.out[TID] += all + equal;
}

KERNEL(reductions) {
  const uint32_t v = p.in[TID];
  const int s = static_cast<int>(v);
  uint32_t r = __reduce_add_sync(~0u, v) + __reduce_min_sync(~0u, v) * 3 + __reduce_max_sync(~0u, v) * 5;
  r += __reduce_min_sync(~0u, s) + __reduce_max_sync(~0u, s) * 7;
  r ^= __reduce_and_sync(~0u, v | 0xFF) ^ __reduce_or_sync(~0u, v & 0xF0F) ^ __reduce_xor_sync(~0u, v);
  if (threadIdx.x % 3 == 0) r += __reduce_add_sync(__activemask(), v);
  p.out[TID] = r;
}

KERNEL(divergence) {
  uint32_t v = p.in[TID], r = 0;
  for (uint32_t i = 0; i < (v & 15); ++i) {
    if ((v >> i) & 1) {
      if (i == 9) continue;
      r += i * v;
      if (r % 11 == 3) break;
    } else {
      for (uint32_t j = i; j < 6; ++j) r ^= j << (i & 7);
    }
    if (r == 77) {
      p.out[TID] = r;
      return;
    }
  }
  do {
    r = r / 3 + 1;
  } while (r & 12);
  p.out[TID] = r;
}

KERNEL(switches) {
  uint32_t v = p.in[TID], r = v;
  switch (v % 13) {
    case 0: r = v + 1; break;
    case 1: r = v * 3; break;
    case 2: r = v ^ 0x55; [[fallthrough]];
    case 3: r += 9; break;
    case 4: r = __brev(v); break;
    case 5: r = __clz(v); break;
    case 6: r = __ffs(v); break;
    case 7: r = v / 7; break;
    case 8: r = v % 1001; break;
    case 9: r = v << 3; break;
    case 10: r = ~v; break;
    case 11: r = 0; break;
    default: r = 42; break;
  }
  p.out[TID] = r;
}

__device__ __noinline__ uint32_t ackermann(uint32_t m, uint32_t n) {
  if (m == 0) return n + 1;
  if (n == 0) return ackermann(m - 1, 1);
  return ackermann(m - 1, ackermann(m, n - 1));
}
KERNEL(recursion) { p.out[TID] = ackermann(p.in[TID] % 3, p.in[TID] / 3 % 3); }

__device__ __noinline__ uint32_t op_add(uint32_t a, uint32_t b) { return a + b; }
__device__ __noinline__ uint32_t op_mul(uint32_t a, uint32_t b) { return a * b; }
__device__ __noinline__ uint32_t op_sub(uint32_t a, uint32_t b) { return a - b; }
__device__ uint32_t (*const table[3])(uint32_t, uint32_t) = {op_add, op_mul, op_sub};
KERNEL(function_pointers) {
  const uint32_t v = p.in[TID];
  p.out[TID] = table[v % 3](v, 17) + table[(v >> 8) % 3](v, threadIdx.x);
}

struct Shape {
  __device__ virtual uint32_t area(uint32_t x) const { return x; }
};
struct Square : Shape {
  uint32_t side;
  __device__ explicit Square(uint32_t s) : side(s) {}
  __device__ uint32_t area(uint32_t x) const override { return side * side + x; }
};
KERNEL(virtual_calls) {
  Shape plain;
  Square square(p.in[TID]);
  const Shape* shape = (p.in[TID] & 1) ? &plain : &square;
  p.out[TID] = shape->area(threadIdx.x);
}

KERNEL(local_arrays) {
  uint32_t a[24];
  for (int i = 0; i < 24; ++i) a[i] = p.in[(TID + i) % p.n] + i;
  uint32_t at = p.in[TID] % 24, r = 0;
  for (int i = 0; i < 40; ++i) {
    r += a[at];
    a[(at * 5 + i) % 24] ^= r;
    at = a[at] % 24;
  }
  p.out[TID] = r;
}

__constant__ uint32_t primes[16] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53};
__device__ uint16_t squares[4][3] = {{1, 4, 9}, {16, 25, 36}, {49, 64, 81}, {100, 121, 144}};
KERNEL(tables) {
  const uint32_t v = p.in[TID];
  p.out[TID] = primes[v & 15] * 1000 + squares[v >> 4 & 3][v % 3];
}

struct Big {
  uint32_t a[5];
  double d;
};
__device__ __noinline__ Big mix(Big x, const uint32_t k) {
  x.a[k % 5] += k;
  x.d = x.d * 0.5 + x.a[2];
  return x;
}
KERNEL(struct_arguments) {
  Big b{{1, 2, 3, 4, p.in[TID]}, 3.25};
  b = mix(mix(b, threadIdx.x), p.in[TID] & 0xFF);
  p.out[TID] = b.a[0] + b.a[1] * 3 + b.a[2] * 5 + b.a[3] * 7 + b.a[4] + static_cast<uint32_t>(b.d);
}

KERNEL(wide_integers) {
  const uint64_t a = (static_cast<uint64_t>(p.in[TID]) << 32) | p.in[(TID + 7) % p.n];
  const uint64_t b = (static_cast<uint64_t>(p.in[(TID + 3) % p.n] & 0xFFF) << 20) | (p.in[(TID + 5) % p.n] | 1);
  const int64_t s = static_cast<int64_t>(a), t = -static_cast<int64_t>(b);
  const uint64_t r = a / b + a % b * 3 + static_cast<uint64_t>(s / t) + static_cast<uint64_t>(s % t) + __umul64hi(a, b) +
                     static_cast<uint64_t>(__mul64hi(s, t)) + (a << (b & 63)) + (s >> (a & 63)) + __popcll(a) + __clzll(b);
  p.out[TID] = static_cast<uint32_t>(r) ^ static_cast<uint32_t>(r >> 32);
}

KERNEL(simd_video) {
  const uint32_t a = p.in[TID], b = p.in[(TID + 1) % p.n];
  uint32_t r = __vadd4(a, b) ^ __vsub2(a, b) ^ __vabsdiffu4(a, b) ^ __vcmpgtu2(a, b) ^ __vmaxs4(a, b) ^ __vavgu4(a, b);
  r += __dp4a(a, b, r) + __byte_perm(a, b, b & 0x7777) + __sad(a, b, 3) + __usad(a, b, 5);
  r += __funnelshift_lc(a, b, r) + __funnelshift_r(a, b, r) + __brev(r) + __fns(a, 5, 3);
  p.out[TID] = r;
}

KERNEL(half_math) {
  const __half2 a = reinterpret_cast<const __half2*>(p.in)[TID], b = reinterpret_cast<const __half2*>(p.in)[(TID + 1) % p.n];
  __half2 r = __hfma2(a, b, a);
  r = __hadd2_rn(r, __hmul2_rn(b, b));
  r = __hmax2(r, __hneg2(a));
  const __nv_bfloat162 c = reinterpret_cast<const __nv_bfloat162*>(p.in)[TID];
  const __nv_bfloat162 e = __hfma2(c, c, c);
  const uint32_t mask = __hgt2_mask(a, b) ^ __hle2_mask(r, a);
  p.out[TID] = reinterpret_cast<const uint32_t&>(r) ^ reinterpret_cast<const uint32_t&>(e) ^ mask;
}

KERNEL(double_math) {
  const double a = static_cast<int>(p.in[TID]) * 0.37, b = static_cast<int>(p.in[(TID + 1) % p.n]) * 1e-3;
  double r = a / b + sqrt(fabs(a)) + fma(a, b, -a) + floor(b) + rint(a) + (a > b ? fmod(a, 17.0) : b);
  if (!isfinite(r)) r = 1.0;
  const uint64_t bits = __double_as_longlong(r);
  p.out[TID] = static_cast<uint32_t>(bits) ^ static_cast<uint32_t>(bits >> 32);
}

KERNEL(shared_atomics) {
  __shared__ uint32_t s[12];
  __shared__ unsigned long long wide;
  if (threadIdx.x < 12) s[threadIdx.x] = threadIdx.x == 1 || threadIdx.x == 3 ? ~0u : 0;
  if (threadIdx.x == 0) wide = 5;
  __syncthreads();
  const uint32_t v = p.in[TID];
  atomicAdd(&s[0], v);
  atomicMin(&s[1], v);
  atomicMax(&s[2], v);
  atomicAnd(&s[3], v | 0xFF);
  atomicOr(&s[4], v & 0xF0F0);
  atomicXor(&s[5], v);
  atomicInc(&s[6], 100);
  atomicDec(&s[7], 50);
  atomicMax(reinterpret_cast<int*>(&s[8]), static_cast<int>(v));
  atomicAdd(reinterpret_cast<float*>(&s[9]), static_cast<float>(v & 255));
  atomicAdd(&wide, static_cast<unsigned long long>(v) * 3);
  uint32_t old = reinterpret_cast<volatile uint32_t*>(s)[10], seen;
  do {
    seen = old;
    old = atomicCAS(&s[10], seen, seen + (v & 7));
  } while (old != seen);
  __syncthreads();
  if (threadIdx.x < 11) p.out[blockIdx.x * 16 + threadIdx.x] = s[threadIdx.x];
  if (threadIdx.x == 11) p.out[blockIdx.x * 16 + 11] = static_cast<uint32_t>(wide) ^ static_cast<uint32_t>(wide >> 32);
}

KERNEL(global_atomics) {
  uint32_t* s = p.out;
  const uint32_t v = p.in[TID];
  atomicAdd(&s[0], v);
  atomicMin(&s[1], v);
  atomicMax(&s[2], v);
  atomicAnd(&s[3], v | 0xFF);
  atomicXor(&s[5], v);
  atomicAdd(reinterpret_cast<float*>(&s[6]), static_cast<float>(v & 255));
  atomicAdd(reinterpret_cast<double*>(&s[8]), static_cast<double>(v & 255));
  atomicAdd(reinterpret_cast<__half2*>(&s[10]), __floats2half2_rn(v & 1, v >> 1 & 1));
  atomicAdd(reinterpret_cast<__nv_bfloat162*>(&s[11]), __floats2bfloat162_rn(v & 1, 0.0f));
  float* f = reinterpret_cast<float*>(&s[12]);
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(f), "f"(1.0f), "f"(static_cast<float>(v & 3)),
               "f"(2.0f), "f"(0.5f) : "memory");
  atomicAdd(&s[16 + (v & 15)], 1);
}

KERNEL(block_reduction) {
  const uint32_t v = p.in[TID];
  const uint32_t count = __syncthreads_count(v & 1);
  const uint32_t any = __syncthreads_or(v == 12345), all = __syncthreads_and(v != 54321);
  p.out[TID] = count * 100 + any * 10 + all;
}

KERNEL(named_barriers) {
  __shared__ uint32_t s[2][64];
  const uint32_t warp = threadIdx.x / 32;
  uint32_t r = 0;
  for (uint32_t i = 0; i < 6; ++i) {
    const uint32_t b = i & 1;
    if (warp < 2) {
      if (i >= 2) asm volatile("bar.sync %0, 128;" ::"r"(3 + b) : "memory");
      s[b][threadIdx.x] = p.in[(TID + i) % p.n] + i;
      asm volatile("bar.arrive %0, 128;" ::"r"(1 + b) : "memory");
    } else {
      asm volatile("bar.sync %0, 128;" ::"r"(1 + b) : "memory");
      r = r * 3 + s[b][threadIdx.x - 64] + s[b][(threadIdx.x * 3) & 63];
      if (i < 4) asm volatile("bar.arrive %0, 128;" ::"r"(3 + b) : "memory");
    }
  }
  p.out[TID] = r;
}

KERNEL(warp_sync) {
  __shared__ uint32_t s[128];
  s[threadIdx.x] = p.in[TID];
  __syncwarp();
  uint32_t v = s[threadIdx.x ^ 1];
  __syncwarp();
  if (threadIdx.x & 16) {
    s[threadIdx.x] = v * 3;
    __syncwarp(0xFFFF0000u);
    v = s[threadIdx.x ^ 2];
  }
  __syncwarp();
  p.out[TID] = v;
}

KERNEL(last_block) {
  __shared__ uint32_t total, ticket;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  atomicAdd(&total, p.in[TID]);
  __syncthreads();
  if (threadIdx.x == 0) {
    p.out[8 + blockIdx.x] = total;
    __threadfence();
    ticket = atomicAdd(&p.out[0], 1);
  }
  __syncthreads();
  if (ticket == gridDim.x - 1 && threadIdx.x == 0) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < gridDim.x; ++i) sum += reinterpret_cast<volatile uint32_t*>(p.out)[8 + i];
    p.out[1] = sum;
  }
}

KERNEL(spin_flag) {  // both CTAs are resident: CTA 1 waits for CTA 0
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    p.out[1] = p.in[0] * 3;
    asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p.out), "r"(1) : "memory");
  } else {
    uint32_t seen = 0;
    do {
      asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(p.out) : "memory");
      __nanosleep(20);
    } while (seen != 1);
    p.out[2] = *reinterpret_cast<volatile uint32_t*>(p.out + 1) + 1;
  }
}

KERNEL(scan) {
  __shared__ uint32_t sums[8];
  uint32_t v = p.in[TID] & 0xFFFF;
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t up = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += up;
  }
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  for (uint32_t i = 0; i < warp; ++i) v += sums[i];
  p.out[TID] = v;
}

KERNEL(bitonic_sort) {
  extern __shared__ uint32_t keys[];
  keys[threadIdx.x] = p.in[TID];
  for (uint32_t k = 2; k <= blockDim.x; k *= 2) {
    for (uint32_t j = k / 2; j > 0; j /= 2) {
      __syncthreads();
      const uint32_t other = threadIdx.x ^ j;
      if (other > threadIdx.x) {
        const uint32_t a = keys[threadIdx.x], b = keys[other];
        if ((a > b) == ((threadIdx.x & k) == 0)) {
          keys[threadIdx.x] = b;
          keys[other] = a;
        }
      }
    }
  }
  __syncthreads();
  p.out[TID] = keys[threadIdx.x];
}

KERNEL(transpose) {
  __shared__ uint32_t tile[32][33];
  const uint32_t x = threadIdx.x & 31, y = threadIdx.x / 32;
  for (uint32_t r = y; r < 32; r += 8) tile[r][x] = p.in[r * 32 + x];
  __syncthreads();
  for (uint32_t r = y; r < 32; r += 8) p.out[r * 32 + x] = tile[x][r];
}

KERNEL(generic_addresses) {
  __shared__ uint32_t s[128];
  uint32_t local[4] = {1, 2, 3, p.in[TID]};
  s[threadIdx.x] = p.in[TID] + 5;
  __syncthreads();
  const uint32_t v = p.in[TID];
  const uint32_t* ptr = v % 3 == 0 ? &s[v & 127] : v % 3 == 1 ? &local[v & 3] : &p.in[v % p.n];
  p.out[TID] = *ptr + __isShared(ptr) * 1000 + __isLocal(ptr) * 2000 + __isGlobal(ptr) * 4000;
}

KERNEL(partial_warps) {  // launched with 40 threads
  uint32_t v = p.in[TID];
  const uint32_t mask = threadIdx.x < 32 ? ~0u : 0xFF;
  v += __shfl_xor_sync(mask, v, 1);
  __syncthreads();
  p.out[TID] = v + __popc(__ballot_sync(mask, v & 1));
}

KERNEL(copy_async) {
  __shared__ __align__(16) uint32_t s[3][128 * 4];
  const uint32_t t = threadIdx.x;
  for (int g = 0; g < 3; ++g) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem(&s[g][t * 4])),
                 "l"(p.in + (g * 128 + t) * 4 % p.n) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  uint32_t r = 0;
  asm volatile("cp.async.wait_group 2;" ::: "memory");
  __syncthreads();
  r += s[0][(t * 7) & 511];
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  r += s[1][(t * 5) & 511] * 3 + s[2][(t * 3) & 511] * 5;
  __syncthreads();
  const uint32_t size = t & 4 ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem(&s[0][t])), "l"(p.in + t), "r"(size) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  p.out[TID] = r + s[0][(t + 1) & 127];
}

KERNEL(copy_async_mbarrier) {
  __shared__ __align__(16) uint32_t s[128];
  __shared__ __align__(8) uint64_t bar;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 128;" ::"r"(smem(&bar)) : "memory");
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem(&s[threadIdx.x])), "l"(p.in + TID) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem(&bar)) : "memory");
  asm volatile(
      "{ .reg .pred q; L: mbarrier.try_wait.parity.shared.b64 q, [%0], 0; @!q bra L; }" ::"r"(smem(&bar)) : "memory");
  p.out[TID] = s[127 - threadIdx.x];
}

KERNEL(matrix_loads) {
  __shared__ __align__(16) uint32_t s[512];
  const uint32_t lane = threadIdx.x;
  for (int i = lane; i < 512; i += 32) s[i] = p.in[i];
  __syncwarp();
  uint32_t a, b, c, d, r = 0;
  const uint32_t row = smem(s) + lane * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(row));
  r = a + b * 3 + c * 5 + d * 7;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(row + 512));
  r = r * 31 + a + b * 3 + c * 5 + d * 7;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(row + 32));
  r = r * 31 + a + b * 3;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(a) : "r"(row));
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(c));
  r = r * 31 + a + b * 3;
  __syncwarp();
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(r) : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(row + 512), "r"(c), "r"(r) : "memory");
  __syncwarp();
  for (int i = 0; i < 16; ++i) p.out[lane + 32 * i] = s[lane + 32 * i] + r;
}

KERNEL(mma_half) {
  const uint32_t lane = threadIdx.x;
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    __half2 h = __floats2half2_rn(static_cast<int>(p.in[lane * 4 + i] % 9) - 4, static_cast<int>(p.in[lane * 4 + i] / 9 % 9) - 4);
    a[i] = reinterpret_cast<uint32_t&>(h);
  }
  for (int i = 0; i < 2; ++i) {
    __half2 h = __floats2half2_rn(static_cast<int>(p.in[lane * 2 + i + 128] % 7) - 3, static_cast<int>(p.in[lane * 2 + i] / 7 % 7) - 3);
    b[i] = reinterpret_cast<uint32_t&>(h);
  }
  float d[4], c[4] = {1.0f, 2.0f, static_cast<float>(lane), -3.0f};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  uint32_t h[2];
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9};"
               : "=r"(h[0]), "=r"(h[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0), "r"(0x3C003C00));
  for (int i = 0; i < 4; ++i) p.out[lane * 6 + i] = __float_as_uint(d[i]);
  p.out[lane * 6 + 4] = h[0];
  p.out[lane * 6 + 5] = h[1];
}

KERNEL(mma_bfloat_and_integer) {
  const uint32_t lane = threadIdx.x;
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162 h = __floats2bfloat162_rn(static_cast<int>(p.in[lane * 4 + i] % 9) - 4, static_cast<int>(p.in[lane * 4 + i] / 9 % 9) - 4);
    a[i] = reinterpret_cast<uint32_t&>(h);
  }
  for (int i = 0; i < 2; ++i) {
    __nv_bfloat162 h = __floats2bfloat162_rn(static_cast<int>(p.in[lane * 2 + i + 128] % 7) - 3, 2.0f);
    b[i] = reinterpret_cast<uint32_t&>(h);
  }
  float d[4];
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.5f));
  for (int i = 0; i < 4; ++i) p.out[lane * 8 + i] = __float_as_uint(d[i]);
  int e[4];
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3])
               : "r"(p.in[lane]), "r"(p.in[lane + 32]), "r"(p.in[lane + 64]), "r"(p.in[lane + 96]), "r"(p.in[lane + 128]), "r"(p.in[lane + 160]), "r"(7));
  for (int i = 0; i < 4; ++i) p.out[lane * 8 + 4 + i] = e[i];
}

static __device__ __forceinline__ void wait_parity(uint32_t bar, uint32_t parity) {
  asm volatile("{ .reg .pred q; L: mbarrier.try_wait.parity.shared::cta.b64 q, [%0], %1; @!q bra L; }" ::"r"(bar), "r"(parity) : "memory");
}

KERNEL(bulk_copies) {
  __shared__ __align__(128) uint32_t s[1024], t[1024];
  __shared__ __align__(8) uint64_t bar;
  const uint32_t b = smem(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(b) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" ::"r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(smem(s)), "l"(p.in), "r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 3072, [%2];" ::"r"(smem(s) + 1024), "l"(p.in + 256), "r"(b) : "memory");
  }
  wait_parity(b, 0);
  for (uint32_t i = threadIdx.x; i < 1024; i += blockDim.x) t[i] = s[1023 - i] + i;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 4096;" ::"l"(p.out), "r"(smem(t)) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 4096;" ::"l"(p.out + 1024), "r"(smem(t)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

KERNEL(mbarrier_ring) {  // one producer warp, three consumer warps, two stages
  __shared__ __align__(16) uint32_t s[2][128];
  __shared__ __align__(8) uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(smem(&full[i])) : "memory");
      asm volatile("mbarrier.init.shared.b64 [%0], 3;" ::"r"(smem(&empty[i])) : "memory");
    }
  }
  __syncthreads();
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  uint32_t r = 0;
  for (uint32_t i = 0; i < 7; ++i) {
    const uint32_t b = i & 1, phase = i / 2 & 1;
    if (warp == 0) {
      wait_parity(smem(&empty[b]), phase ^ 1);
      for (int k = 0; k < 4; ++k) s[b][lane + 32 * k] = p.in[(lane * 4 + k + i * 13) % p.n];
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(smem(&full[b])) : "memory");
    } else {
      wait_parity(smem(&full[b]), phase);
      r = r * 7 + s[b][(threadIdx.x * 5 + i) & 127];
      __syncwarp();
      if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(smem(&empty[b])) : "memory");
    }
  }
  p.out[TID] = r;
}

KERNEL(elect_one) {
  uint32_t leader, chosen;
  asm volatile("{ .reg .pred q; elect.sync %0|q, 0xFFFFFFFF; selp.u32 %1, 1, 0, q; }" : "=r"(leader), "=r"(chosen));
  p.out[TID] = leader * 10 + chosen;
}

extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_memory(const __grid_constant__ Params p) {
  __shared__ uint32_t s[64];
  uint32_t rank, size;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  s[threadIdx.x] = p.in[TID] + rank;
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  uint32_t peer, value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(smem(&s[63 - threadIdx.x])), "r"((rank + 1) % size));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(peer));
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(peer) : "r"(smem(&s[threadIdx.x & 7])));
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(peer), "r"(value) : "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  p.out[TID] = value * 3 + s[threadIdx.x & 15] + size;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_multicast(const __grid_constant__ Params p) {
  __shared__ __align__(128) uint32_t s[256];
  __shared__ __align__(8) uint64_t bar;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const uint32_t b = smem(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(b) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(b) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (threadIdx.x == 0) {
    const uint16_t mask = 3;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 512, [%2], %3;" ::
                     "r"(smem(s) + rank * 512), "l"(p.in + blockIdx.x * 128), "r"(b), "h"(mask) : "memory");
  }
  wait_parity(b, 0);
  p.out[TID] = s[threadIdx.x] * 3 + s[255 - threadIdx.x];
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

KERNEL(registers_of_warpgroups) {
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    p.out[TID] = p.in[TID] + 1;
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    p.out[TID] = p.in[TID] * 3;
  }
}
KERNEL(special_registers) {
  uint32_t r = threadIdx.x + blockIdx.x * 100 + blockDim.x * 3 + gridDim.x * 5, v;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(v));
  r = r * 31 + v;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(v));
  r = r * 31 + v;
  asm volatile("mov.u32 %0, %%lanemask_ge;" : "=r"(v));
  r = r * 31 + v;
  asm volatile("mov.u32 %0, %%lanemask_gt;" : "=r"(v));
  r = r * 31 + v;
  asm volatile("mov.u32 %0, %%lanemask_le;" : "=r"(v));
  r = r * 31 + v;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(v));
  p.out[TID] = r * 31 + v;
}
