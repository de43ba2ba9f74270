// One 16x16x16 product through nvcuda::wmma: half, bfloat16 and int8 inputs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;

struct Params {
  const void* a;
  const void* b;
  void* d;
};

template <typename In, typename Out>
static __device__ void multiply(const Params& p) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, In, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, In, wmma::col_major> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, Out> c;
  wmma::fill_fragment(c, Out(1));
  wmma::load_matrix_sync(a, static_cast<const In*>(p.a), 16);
  wmma::load_matrix_sync(b, static_cast<const In*>(p.b), 16);
  wmma::mma_sync(c, a, b, c);
  wmma::store_matrix_sync(static_cast<Out*>(p.d), c, 16, wmma::mem_row_major);
}

extern "C" __global__ void half_inputs(const __grid_constant__ Params p) { multiply<half, float>(p); }
extern "C" __global__ void half_sums(const __grid_constant__ Params p) { multiply<half, half>(p); }
extern "C" __global__ void bfloat_inputs(const __grid_constant__ Params p) { multiply<__nv_bfloat16, float>(p); }
extern "C" __global__ void byte_inputs(const __grid_constant__ Params p) { multiply<signed char, int>(p); }
