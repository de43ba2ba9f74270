// Asynchronous bulk copies and their cache policies: one wrapper per PTX instruction.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk".
#pragma once
#include <stdint.h>

#include "mbarrier.cuh"

namespace fp4rt::ptx {

// Cache policy for data that is read once: the first to leave L2.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t createpolicy_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Cache policy for data that is read again soon.
__device__ __forceinline__ uint64_t createpolicy_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies `bytes` (a multiple of 16; both addresses aligned to 16) from global to this CTA's shared
// memory and reports them to `barrier`.
__device__ __forceinline__ void cp_async_bulk(void* shared, const void* global, uint32_t bytes,
                                              uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Copies the box at (c0, c1) of a 2-D tensor map, elements outside it as zeros, to this CTA's shared
// memory and reports the whole box's bytes to `barrier`. 128-byte swizzle: align to 1024.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(void* shared, const void* tensor_map,
                                                        int32_t c0, int32_t c1, uint64_t* barrier,
                                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(tensor_map), "r"(c0), "r"(c1), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Makes this thread's earlier writes to shared memory visible to the async proxy, through which bulk
// copies and tcgen05 read it.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Fetches a tensor map ahead of its first use.
__device__ __forceinline__ void prefetch_tensormap(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

}  // namespace fp4rt::ptx
