// Bulk copies and mbarriers: tensor copies of every rank and swizzle, one-dimensional copies,
// reductions, multicast and distributed shared memory, and each mbarrier instruction.
#include <cstdint>

struct alignas(64) Map {
  uint8_t bytes[128];
};

struct Params {
  Map src, dst;
  int c[5], to[5];
  int rank, bytes, mode, fault;
  uint8_t* dump;  // the box as it lies in shared memory, 0xee where it has gaps
  const uint8_t* global;
  uint64_t* words;
  int extent;
};

__device__ __forceinline__ uint32_t shared(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;\n}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :::
                   "memory");
}
__device__ __forceinline__ uint32_t peer(uint32_t address, uint32_t rank) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

#define LOAD(dim, coords)                                                                  \
  asm volatile("cp.async.bulk.tensor." dim                                                 \
               ".shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {" coords \
               "}], [%2];" ::"r"(dst),                                                     \
               "l"(map), "r"(bar), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])   \
               : "memory")
__device__ void load(uint32_t dst, const Map* map, uint32_t bar, const int* c, int rank) {
  if (rank == 1) LOAD("1d", "%3");
  if (rank == 2) LOAD("2d", "%3, %4");
  if (rank == 3) LOAD("3d", "%3, %4, %5");
  if (rank == 4) LOAD("4d", "%3, %4, %5, %6");
  if (rank == 5) LOAD("5d", "%3, %4, %5, %6, %7");
}
#define STORE(op, dim, coords)                                                             \
  asm volatile(op ".tensor." dim ".global.shared::cta" MODE ".tile.bulk_group [%0, {" coords \
               "}], [%1];" ::"l"(map),                                                     \
               "r"(src), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])             \
               : "memory")
#define MODE
__device__ void store(const Map* map, uint32_t src, const int* c, int rank) {
  if (rank == 1) STORE("cp.async.bulk", "1d", "%2");
  if (rank == 2) STORE("cp.async.bulk", "2d", "%2, %3");
  if (rank == 3) STORE("cp.async.bulk", "3d", "%2, %3, %4");
  if (rank == 4) STORE("cp.async.bulk", "4d", "%2, %3, %4, %5");
  if (rank == 5) STORE("cp.async.bulk", "5d", "%2, %3, %4, %5, %6");
}
#undef MODE
#define MODE ".add"
__device__ void reduce_add(const Map* map, uint32_t src, const int* c, int rank) {
  if (rank == 1) STORE("cp.reduce.async.bulk", "1d", "%2");
  if (rank == 2) STORE("cp.reduce.async.bulk", "2d", "%2, %3");
  if (rank == 3) STORE("cp.reduce.async.bulk", "3d", "%2, %3, %4");
}

// Loads a box, dumps it raw, and stores (mode 1) or adds (mode 2) it somewhere else.
extern "C" __global__ void __launch_bounds__(128) tensor(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t bar_;
  const uint32_t bar = shared(&bar_);
  for (int i = threadIdx.x; i < p.extent; i += 128) smem[i] = 0xee;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (threadIdx.x == 0) {
    init(bar, 1);
    if (p.fault != 1) init_fence();
  }
  if (p.fault != 2) __syncthreads();
  if (threadIdx.x == (p.fault == 2 ? 32 : 0)) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.src) : "memory");
    expect(bar, p.bytes + (p.fault == 3 ? 16 : 0));
    load(shared(smem), &p.src, bar, p.c, p.rank);
  }
  if (p.fault != 4) wait(bar, 0);
  for (int i = threadIdx.x; i < p.extent; i += 128) p.dump[i] = smem[i];
  if (p.mode) {
    if (p.fault == 5) smem[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
      if (p.mode == 1) store(&p.dst, shared(smem), p.to, p.rank);
      if (p.mode == 2) reduce_add(&p.dst, shared(smem), p.to, p.rank);
      if (p.fault != 6) {
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      }
      if (p.fault == 7) *reinterpret_cast<volatile uint8_t*>(smem) = 1;
    }
  }
}

// One-dimensional ring of three stages: words[i] = sum of the i-th 1 KiB of `global`, then the
// ring's last stage goes back to `dump` by bulk copy and bulk reduction.
extern "C" __global__ void __launch_bounds__(64) ring(const __grid_constant__ Params p) {
  constexpr int kStages = 3, kBytes = 1024;
  __shared__ __align__(128) uint32_t buffer[kStages][kBytes / 4];
  __shared__ __align__(8) uint64_t full_[kStages], empty_[kStages];
  const uint32_t full = shared(full_), empty = shared(empty_);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) init(full + 8 * s, 1), init(empty + 8 * s, 32);
    init_fence();
  }
  __syncthreads();
  const int chunks = p.bytes / kBytes;
  if (threadIdx.x == 32) {
    for (int i = 0; i < chunks; i++) {
      const int s = i % kStages;
      if (p.fault != 1) wait(empty + 8 * s, (i / kStages + 1) & 1);
      expect(full + 8 * s, kBytes);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(shared(buffer[s])),
          "l"(p.global + i * kBytes), "r"(kBytes), "r"(full + 8 * s)
          : "memory");
    }
  } else if (threadIdx.x < 32) {
    for (int i = 0; i < chunks; i++) {
      const int s = i % kStages;
      if (p.fault != 2) wait(full + 8 * s, (i / kStages + (p.fault == 3)) & 1);
      uint32_t sum = 0;
      for (int j = threadIdx.x; j < kBytes / 4; j += 32) sum += buffer[s][j];
      for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
      if (threadIdx.x == 0) p.words[i] = sum;
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * s) : "memory");
    }
    __syncwarp();
    if (threadIdx.x == 0 && p.mode) {
      const uint32_t last = shared(buffer[(chunks - 1) % kStages]);
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(p.dump),
                   "r"(last), "r"(kBytes)
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(
                       p.dump),
                   "r"(last), "r"(kBytes)
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
    }
  }
}

// Two CTAs: each loads half of a block and multicasts it to both; then each copies its own first
// 256 bytes into the peer's tail by DSMEM bulk copy, and both dump everything.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64)
    multicast(const __grid_constant__ Params p) {
  __shared__ __align__(1024) uint8_t data[2 * 2048 + 256];
  __shared__ __align__(8) uint64_t bars[2];
  const uint32_t rank = cluster_rank(), bar = shared(bars), bar2 = shared(bars + 1);
  if (threadIdx.x == 0) {
    init(bar, 1);
    init(bar2, 1);
    init_fence();
  }
  if (p.fault != 1) cluster_sync();
  if (threadIdx.x == 0) {
    expect(bar, 4096);
    expect(bar2, 256);
    const uint16_t mask = p.fault == 2 ? 8 : 3;
    const int y = rank * 16;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared(data) + rank * 2048),
        "l"(&p.src), "r"(0), "r"(y), "r"(bar), "h"(mask)
        : "memory");
  }
  wait(bar, 0);
  if (threadIdx.x == 0) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(peer(shared(data) + 4096, rank ^ 1)),
        "r"(shared(data) + rank * 2048), "r"(256), "r"(peer(bar2, rank ^ 1))
        : "memory");
  }
  wait(bar2, 0);
  for (int i = threadIdx.x; i < 4096 + 256; i += 64) p.dump[rank * 4352 + i] = data[i];
  if (p.fault != 3) cluster_sync();
}

// Every mbarrier instruction, by one warp of one CTA; results in `words`.
extern "C" __global__ void __launch_bounds__(32) barriers(const __grid_constant__ Params p) {
  __shared__ __align__(8) uint64_t bar_;
  const uint32_t bar = shared(&bar_);
  if (threadIdx.x) return;
  uint64_t* out = p.words;
  uint64_t token, token2;
  uint32_t flag;
  init(bar, p.fault == 1 ? 0 : 3);
#define TEST(dst, t)                                                                        \
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.shared::cta.b64 p, [%1], %2;\n"       \
               "selp.u32 %0, 1, 0, p;\n}\n"                                                \
               : "=r"(dst)                                                                 \
               : "r"(bar), "l"(t)                                                          \
               : "memory")
#define PARITY(dst, t)                                                                     \
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n" \
               "selp.u32 %0, 1, 0, p;\n}\n"                                                \
               : "=r"(dst)                                                                 \
               : "r"(bar), "r"(t)                                                          \
               : "memory")
#define COUNT(dst, t) asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(dst) : "l"(t))
  PARITY(flag, 0);
  out[0] = flag;  // the first phase is not complete
  PARITY(flag, 1);
  out[1] = flag;  // the one before it is
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(bar) : "memory");
  TEST(flag, token);
  out[2] = flag;
  COUNT(flag, token);
  out[3] = flag;
  asm volatile("mbarrier.arrive.noComplete.shared::cta.b64 %0, [%1], %2;"
               : "=l"(token2)
               : "r"(bar), "r"(p.fault == 2 ? 2 : 1)
               : "memory");
  COUNT(flag, token2);
  out[4] = flag;
  asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];" : "=l"(token2) : "r"(bar) : "memory");
  TEST(flag, token2);
  out[5] = flag;  // third arrival: complete
  PARITY(flag, 0);
  out[6] = flag;
  PARITY(flag, 1);
  out[7] = flag;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(token2) : "r"(bar) : "memory");
  COUNT(flag, token2);
  out[8] = flag;  // one participant dropped out
  TEST(flag, token2);
  out[9] = flag;
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 64;" ::"r"(bar) : "memory");
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(token2) : "r"(bar) : "memory");
  TEST(flag, token2);
  out[10] = flag;  // bytes are still due
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar),
               "r"(p.fault == 3 ? 80 : 64)
               : "memory");
  TEST(flag, token2);
  out[11] = flag;
  if (p.fault == 4)
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 3;" : "=l"(token2) : "r"(bar) : "memory");
  if (p.fault == 5) TEST(flag, token);
  if (p.fault == 6) init(bar, 1);
  if (p.fault == 7) {
    *reinterpret_cast<volatile uint64_t*>(&bar_) = 1;
    PARITY(flag, 0);
  }
  if (p.fault == 8) TEST(flag, 17ull);
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
  if (p.fault == 9) PARITY(flag, 0);
  out[12] = 1;
}

// tensormap.replace in shared memory, published to global memory, then used.
extern "C" __global__ void __launch_bounds__(32) patch(const __grid_constant__ Params p) {
  __shared__ __align__(128) uint8_t map[128];
  __shared__ __align__(1024) uint8_t data[4096];
  __shared__ __align__(8) uint64_t bar_;
  const uint32_t bar = shared(&bar_), m = shared(map);
  reinterpret_cast<uint32_t*>(map)[threadIdx.x] = reinterpret_cast<const uint32_t*>(&p.src)[threadIdx.x];
  __syncwarp();
  if (threadIdx.x == 0) {
    init(bar, 1);
    init_fence();
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(m),
                 "l"(p.global)
                 : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(m),
                 "r"(p.c[2])
                 : "memory");
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" ::"r"(m),
                 "l"(static_cast<uint64_t>(p.c[3]))
                 : "memory");
  }
  __syncwarp();
  const uint64_t target = reinterpret_cast<uint64_t>(p.words);
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
      "[%0], [%1], 128;" ::"l"(target),
      "r"(m)
      : "memory");
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(target) : "memory");
  if (threadIdx.x == 0) {
    expect(bar, p.bytes);
    load(shared(data), reinterpret_cast<const Map*>(target), bar, p.c, 2);
  }
  wait(bar, 0);
  for (int i = threadIdx.x; i < p.bytes; i += 32) p.dump[i] = data[i];
}
