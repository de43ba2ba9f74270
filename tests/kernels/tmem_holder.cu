// A small kernel that keeps columns of Tensor Memory for a while: a stranger on the same SM.
#include <stdint.h>

#include "ptx/tcgen05.cuh"

extern "C" __global__ void __launch_bounds__(32) hold(uint32_t columns, int turns, uint32_t* out) {
  using namespace fp4rt::ptx;
  __shared__ uint32_t base;
  tcgen05_alloc<1>(&base, columns);
  tcgen05_relinquish_alloc_permit<1>();
  __syncwarp();
  uint32_t state = threadIdx.x;
  for (int i = 0; i < turns; ++i) state = state * 1664525 + 1013904223;
  out[blockIdx.x * 32 + threadIdx.x] = state;
  __syncwarp();
  tcgen05_dealloc<1>(base, columns);
}
