// nvcuda::wmma in each type and layout, from global and from shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include <cstdint>

using namespace nvcuda;

struct Params {
  const void* a;
  const void* b;
  const void* c;
  void* d;
  int lda, ldb, ldc;
};

template <int M, int N, int K, class T, class Acc, class LayoutA, class LayoutB, bool kShared>
__device__ void multiply(const Params& p, wmma::layout_t layout) {
  using In = typename wmma::fragment<wmma::matrix_a, M, N, K, T, LayoutA>::storage_element_type;
  __shared__ __align__(128) In staged[kShared ? M * K : 1];
  const In* a = static_cast<const In*>(p.a);
  int lda = p.lda;
  if (kShared) {
    for (int i = threadIdx.x; i < M * K; i += 32) staged[i] = a[i / K * p.lda + i % K];
    __syncwarp();
    a = staged;
    lda = K;
  }
  wmma::fragment<wmma::matrix_a, M, N, K, T, LayoutA> fa;
  wmma::fragment<wmma::matrix_b, M, N, K, T, LayoutB> fb;
  wmma::fragment<wmma::accumulator, M, N, K, Acc> acc;
  wmma::load_matrix_sync(fa, a, lda);
  wmma::load_matrix_sync(fb, static_cast<const In*>(p.b), p.ldb);
  wmma::load_matrix_sync(acc, static_cast<const Acc*>(p.c), p.ldc, layout);
  for (int i = 0; i < acc.num_elements; i++) acc.x[i] = acc.x[i] + acc.x[i];
  wmma::mma_sync(acc, fa, fb, acc);
  wmma::store_matrix_sync(static_cast<Acc*>(p.d), acc, p.ldc, layout);
}

#define ENTRY(name, m, n, k, type, acc, la, lb, shared, layout)                             \
  extern "C" __global__ void name(const __grid_constant__ Params p) {                       \
    multiply<m, n, k, type, acc, wmma::la, wmma::lb, shared>(p, wmma::layout);              \
  }
ENTRY(half_row_col, 16, 16, 16, __half, float, row_major, col_major, false, mem_row_major)
ENTRY(half_col_row, 16, 16, 16, __half, float, col_major, row_major, false, mem_col_major)
ENTRY(half_shared, 16, 16, 16, __half, float, row_major, row_major, true, mem_row_major)
ENTRY(half_half, 32, 8, 16, __half, __half, row_major, col_major, false, mem_row_major)
ENTRY(bfloat, 8, 32, 16, __nv_bfloat16, float, row_major, col_major, false, mem_row_major)
ENTRY(tf32, 16, 16, 8, wmma::precision::tf32, float, row_major, col_major, false, mem_row_major)
ENTRY(integers, 16, 16, 16, signed char, int, row_major, col_major, false, mem_row_major)
