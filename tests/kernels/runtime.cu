// Small kernels that exercise a device: memory, parameters, launches, tensor maps.
#include "generated/abi.h"
#include "ptx/mbarrier.cuh"

using namespace fp4rt::ptx;

__device__ __forceinline__ uint64_t thread_index() {
  return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

struct AddParams {
  const uint32_t* in;
  uint32_t* out;
  uint64_t count;
  uint32_t increment;
};

// out[i] = in[i] + increment.
extern "C" __global__ void add(const __grid_constant__ AddParams p) {
  const uint64_t i = thread_index();
  if (i < p.count) p.out[i] = p.in[i] + p.increment;
}

struct SpinParams {
  uint64_t nanoseconds;
  uint32_t* out;
  uint64_t count;
  uint32_t value;
};

// Waits, then sets out[0 .. count) to value: a slow producer. One CTA.
extern "C" __global__ void spin(const __grid_constant__ SpinParams p) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < p.nanoseconds);
  __syncthreads();
  for (uint64_t i = threadIdx.x; i < p.count; i += blockDim.x) p.out[i] = p.value;
}

struct PokeParams {
  uint8_t* base;
  uint64_t offset;
  uint32_t value;
};

// base[offset] = value, with a 64-bit offset; also the way to touch an address that isn't mapped.
extern "C" __global__ void poke(const __grid_constant__ PokeParams p) {
  if (threadIdx.x == 0) p.base[p.offset] = static_cast<uint8_t>(p.value);
}

struct SharedParams {
  uint32_t* out;
  uint32_t words;
};

// Writes all of the dynamic shared memory and reads it back, shifted by one.
extern "C" __global__ void shared_words(const __grid_constant__ SharedParams p) {
  extern __shared__ uint32_t words[];
  for (uint32_t i = threadIdx.x; i < p.words; i += blockDim.x) words[i] = i ^ 0x5a5a5a5au;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < p.words; i += blockDim.x) p.out[i] = words[(i + 1) % p.words];
}

struct ClusterParams {
  uint32_t* out;
};

// out[CTA] = rank of the CTA in its cluster + 256 · size of the cluster.
extern "C" __global__ void cluster_rank(const __grid_constant__ ClusterParams p) {
  uint32_t rank, size;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) p.out[blockIdx.x] = rank + 256 * size;
}

// add, ordered behind its predecessor only by griddepcontrol.
extern "C" __global__ void add_dependent(const __grid_constant__ AddParams p) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const uint64_t i = thread_index();
  if (i < p.count) p.out[i] = p.in[i] + p.increment;
}

struct BoxParams {
  fp4rt::TensorMap map;
  int32_t coords[5];
  int32_t rank;
  uint8_t* out;
  uint32_t bytes;
};

// Loads one box with the tensor map and writes its shared-memory image to out.
extern "C" __global__ void load_box(const __grid_constant__ BoxParams p) {
  extern __shared__ __align__(1024) uint8_t box[];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&barrier, p.bytes);
    const uint32_t to = shared_address(box), on = shared_address(&barrier);
    const int32_t* c = p.coords;
#define FP4RT_LOAD(rank, ...)                                                                     \
  asm volatile("cp.async.bulk.tensor." #rank                                                      \
               "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" __VA_ARGS__ "}], [%2];" \
               ::"r"(to), "l"(&p.map), "r"(on), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]),        \
               "r"(c[4]) : "memory")
    switch (p.rank) {
      case 1: FP4RT_LOAD(1, "%3"); break;
      case 2: FP4RT_LOAD(2, "%3, %4"); break;
      case 3: FP4RT_LOAD(3, "%3, %4, %5"); break;
      case 4: FP4RT_LOAD(4, "%3, %4, %5, %6"); break;
      default: FP4RT_LOAD(5, "%3, %4, %5, %6, %7"); break;
    }
  }
  __syncthreads();
  mbarrier_wait(&barrier, 0);
  for (uint32_t i = threadIdx.x; i < p.bytes; i += blockDim.x) p.out[i] = box[i];
}

extern "C" __global__ void no_parameters() {}

extern "C" __global__ void two_parameters(uint32_t* out, uint32_t value) { *out = value; }
