// Programs in other people's style: CUB, cooperative groups and libcu++, as nvcc compiles them.
// Every kernel takes (const unsigned* in, unsigned* out, unsigned n) in one struct.
#pragma nv_diag_suppress 20054  // __shared__ objects of libcu++ are initialised by init()
#include <cub/cub.cuh>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cooperative_groups/memcpy_async.h>
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/atomic>
#include <cuda/std/complex>
#include <cuda_fp8.h>
#include <cuda_fp4.h>
#include <cuda_fp16.h>

namespace cg = cooperative_groups;

struct P {
  const unsigned* in;
  unsigned* out;
  unsigned n;
  unsigned pad;
};

#define K(name) extern "C" __global__ void name(const __grid_constant__ P p)
#define T (blockIdx.x * blockDim.x + threadIdx.x)

K(cub_reduce) {
  typedef cub::BlockReduce<unsigned, 128> R;
  __shared__ typename R::TempStorage t;
  unsigned s = R(t).Sum(p.in[T]);
  if (threadIdx.x == 0) p.out[blockIdx.x] = s;
}

K(cub_scan) {
  typedef cub::BlockScan<unsigned, 128> R;
  __shared__ typename R::TempStorage t;
  unsigned v[4];
  for (int i = 0; i < 4; i++) v[i] = p.in[T * 4 + i] & 0xff;
  R(t).InclusiveSum(v, v);
  for (int i = 0; i < 4; i++) p.out[T * 4 + i] = v[i];
}

K(cub_sort) {
  typedef cub::BlockRadixSort<unsigned, 128, 4> R;
  __shared__ typename R::TempStorage t;
  unsigned v[4];
  for (int i = 0; i < 4; i++) v[i] = p.in[T * 4 + i];
  R(t).Sort(v);
  for (int i = 0; i < 4; i++) p.out[T * 4 + i] = v[i];
}

K(cub_merge) {
  typedef cub::BlockMergeSort<unsigned, 128, 4> R;
  __shared__ typename R::TempStorage t;
  unsigned v[4];
  for (int i = 0; i < 4; i++) v[i] = p.in[T * 4 + i];
  R(t).Sort(v, [](unsigned a, unsigned b) { return a < b; });
  for (int i = 0; i < 4; i++) p.out[T * 4 + i] = v[i];
}

K(cub_hist) {
  typedef cub::BlockHistogram<unsigned char, 128, 4, 256> R;
  __shared__ typename R::TempStorage t;
  __shared__ unsigned h[256];
  unsigned char v[4];
  for (int i = 0; i < 4; i++) v[i] = p.in[T * 4 + i];
  R(t).Histogram(v, h);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += 128) p.out[i] = h[i];
}

K(cub_load) {
  typedef cub::BlockLoad<unsigned, 128, 4, cub::BLOCK_LOAD_TRANSPOSE> L;
  typedef cub::BlockStore<unsigned, 128, 4, cub::BLOCK_STORE_WARP_TRANSPOSE> S;

  __shared__ union {
    typename L::TempStorage l;
    typename S::TempStorage s;
  } t;

  unsigned v[4];
  L(t.l).Load(p.in, v);
  __syncthreads();
  for (int i = 0; i < 4; i++) v[i] = v[i] * 3 + i;
  S(t.s).Store(p.out, v);
}

K(cg_all) {
  auto b = cg::this_thread_block();
  auto w = cg::tiled_partition<32>(b);
  auto q = cg::tiled_partition<8>(w);
  unsigned v = p.in[T];
  unsigned r = cg::reduce(w, v, cg::plus<unsigned>());
  r += cg::reduce(q, v, cg::greater<unsigned>());
  r ^= cg::inclusive_scan(w, v & 0xff);
  r ^= cg::exclusive_scan(q, v & 15);
  auto c = cg::coalesced_threads();
  r += c.size();
  if (v & 1) {
    auto d = cg::coalesced_threads();
    r += d.thread_rank() * 7 + d.size() * 100 + d.shfl(v, 0);
  }
  auto l = cg::labeled_partition(w, v & 3);
  r += l.size();
  auto bp = cg::binary_partition(w, (v & 4) != 0);
  r += bp.size() + cg::reduce(bp, 1u, cg::plus<unsigned>());
  p.out[T] = r;
}

K(cg_memcpy) {
  __shared__ unsigned s[128];
  auto b = cg::this_thread_block();
  cg::memcpy_async(b, s, p.in + blockIdx.x * 128, sizeof(s));
  cg::wait(b);
  p.out[T] = s[127 - threadIdx.x];
}

K(cuda_barrier) {
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  __shared__ unsigned s[128];
  if (threadIdx.x == 0) init(&bar, 128);
  __syncthreads();
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    s[threadIdx.x] = p.in[T] + i * r;
    auto tok = bar.arrive();
    bar.wait(std::move(tok));
    r += s[(threadIdx.x * 3 + i) & 127];
    bar.arrive_and_wait();
  }
  p.out[T] = r;
}

K(cuda_bulk) {
  __shared__ alignas(128) unsigned s[128];
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  if (threadIdx.x == 0) {
    init(&bar, 128);
  }
  __syncthreads();
  cuda::barrier<cuda::thread_scope_block>::arrival_token t;
  if (threadIdx.x == 0) {
    cuda::memcpy_async(s, p.in + blockIdx.x * 128, cuda::aligned_size_t<16>(512), bar);
  }
  t = bar.arrive();
  bar.wait(std::move(t));
  p.out[T] = s[127 - threadIdx.x];
}

K(cuda_pipe) {
  __shared__ unsigned s[2][128];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> st;
  auto b = cg::this_thread_block();
  auto pipe = cuda::make_pipeline(b, &st);
  unsigned r = 0;
  for (int i = 0; i < 5; i++) {
    pipe.producer_acquire();
    cuda::memcpy_async(b, s[i & 1], p.in + i * 128, sizeof(s[0]), pipe);
    pipe.producer_commit();
    pipe.consumer_wait();
    r = r * 3 + s[i & 1][127 - threadIdx.x];
    pipe.consumer_release();
  }
  p.out[T] = r;
}

K(cuda_atomic) {
  __shared__ cuda::atomic<unsigned, cuda::thread_scope_block> a;
  if (threadIdx.x == 0) a.store(0);
  __syncthreads();
  unsigned o = a.fetch_add(p.in[T] & 7, cuda::std::memory_order_relaxed);
  a.fetch_max(o & 3);
  __syncthreads();
  p.out[T] = a.load() > 0;
  cuda::atomic_ref<unsigned, cuda::thread_scope_device> g(p.out[256]);
  g.fetch_add(1);
}

K(fp8) {
  float x = (int)p.in[T] * 1e-8f;
  __nv_fp8_e4m3 a(x);
  __nv_fp8_e5m2 b(x);
  __nv_fp8x4_e4m3 c(make_float4(x, -x, x * 2, x * 3));
  __nv_fp4_e2m1 d(x);
  __nv_fp4x2_e2m1 e(make_float2(x, -x));
  float r = float(a) + float(b) + float(d);
  p.out[T] = __float_as_uint(r) + c.__x + d.__x + e.__x;
}

K(complexes) {
  cuda::std::complex<float> z((int)p.in[T] * 1e-9f, 0.5f);
  auto r = z * z + exp(z) / z;
  p.out[T] = __float_as_uint(r.real()) ^ __float_as_uint(r.imag());
}

K(i128) {
  unsigned __int128 a = ((unsigned __int128)p.in[T] << 70) | p.in[T + 1],
                    b = ((unsigned __int128)p.in[T + 2] << 3) | 1;
  unsigned __int128 q = a / b + a * b;
  p.out[T] = (unsigned)(q >> 64) ^ (unsigned)q;
}

template <int N>
struct Tree {
  __device__ static unsigned f(unsigned x) {
    return Tree<N - 1>::f(x * 3) + Tree<N - 1>::f(x ^ N);
  }
};

template <>
struct Tree<0> {
  __device__ static unsigned f(unsigned x) {
    return x;
  }
};

K(tree) {
  p.out[T] = Tree<6>::f(p.in[T]);
}

K(bitfields) {
  struct B {
    unsigned a : 5;
    int b : 7;
    unsigned c : 20;
  } b;

  b.a = p.in[T];
  b.b = p.in[T] >> 3;
  b.c = p.in[T] * 7;
  unsigned long long s = 0;
  for (int i = 0; i < (int)(p.in[T] & 31); i++) {
    s += (b.a << i) ^ (b.b * i);
    b.c >>= 1;
    s += b.c;
  }
  p.out[T] = s;
}

K(longloop) {
  unsigned long long x = p.in[T];
  int n = 0;
  while (x != 1 && n < 100) {
    x = (x & 1) ? 3 * x + 1 : x / 2;
    n++;
  }
  p.out[T] = n;
}

K(small_arrays) {
  unsigned short h[8];
  for (int i = 0; i < 8; i++) h[i] = (p.in[T] >> i);
  unsigned r = 0;
  for (int i = 0; i < 8; i++) r = r * 5 + h[(i * 3 + threadIdx.x) & 7];
  p.out[T] = r;
}
