// Kernels with known launch facts, for the tests of build.py.
#include <cuda_fp16.h>

#include "generated/abi.h"

struct SharedStorage {
  uint8_t bytes[100 * 1024];
};
FP4RT_SMEM_BYTES(staged, sizeof(SharedStorage));

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    staged(const __grid_constant__ fp4rt::Params p) {
  extern __shared__ uint8_t storage[];
  storage[threadIdx.x] = static_cast<uint8_t>(p.num_groups);
  __syncthreads();
  static_cast<__half*>(p.d)[threadIdx.x] = __half(storage[384 - 1 - threadIdx.x]);
}

extern "C" __global__ void plain(const __grid_constant__ fp4rt::Params p) {
  __shared__ float sums[256];
  sums[threadIdx.x % 256] = p.alpha[threadIdx.x];
  __syncthreads();
  static_cast<float*>(p.d)[threadIdx.x] = sums[255 - threadIdx.x % 256];
}
