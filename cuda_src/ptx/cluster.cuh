// Order between CTAs and between grids: one wrapper per PTX instruction.
// PTX ISA, "Parallel Synchronization: barrier, barrier.cluster, griddepcontrol", "setmaxnreg".
#pragma once
#include <stdint.h>

namespace fp4rt::ptx {

// Waits until the grid before this one in the stream has finished and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next grid in the stream start (it still waits in griddepcontrol_wait).
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Whole warp. True in one lane, the same one at every call.
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads of the CTA.
__device__ __forceinline__ void barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Makes earlier accesses of this thread visible to the cluster and counts it as arrived.
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the shared memory of CTA `rank` of the cluster, of what `address` is in this one.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ void st_shared_cluster(uint32_t remote_address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote_address), "f"(value) : "memory");
}

// Arrives at a barrier of another CTA of the cluster, given by its `mapa` address.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t remote_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
}

// Stores 16 bytes in the shared memory of another CTA and reports them to a barrier there.
__device__ __forceinline__ void st_async(uint32_t remote_address, const float (&value)[4],
                                         uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote_address),
      "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(remote_barrier)
      : "memory");
}

}  // namespace fp4rt::ptx
