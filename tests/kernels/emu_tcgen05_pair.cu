// NVFP4 tile by a pair of CTAs (cta_group::2): each CTA loads half of A's rows, half of B's rows,
// its own A scales and all B scales; CTA 0 issues the matrix work for both. Written for the
// emulator's tests; never run on a GPU.
#include <cstdint>

struct alignas(64) Map {
  uint8_t bytes[128];
};

struct Params {
  Map a, b;
  const uint8_t* sfa;  // tile order, rows of CTA 0 then of CTA 1
  const uint8_t* sfb;
  float* d;            // (2 CTAs, 128 lanes, columns)
  int m, n, k, fault;
};

enum Fault { kNone, kNoReady, kNoMulticast, kNoClusterSync, kOwnBarrier, kOneAlloc };

__device__ __forceinline__ uint32_t shared(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void mbarrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;\n}\n" ::
          "r"(bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ uint32_t peer(uint32_t address, uint32_t rank) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t bar) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar)
               : "memory");
}
__device__ __forceinline__ void tma_2d(uint32_t dst, const Map* map, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
__device__ __forceinline__ bool elect() {
  uint32_t leader;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(leader));
  return leader != 0;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit(uint32_t bar, uint16_t mask) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0], %1;" ::"r"(bar),
      "h"(mask)
      : "memory");
}

constexpr int kStages = 2;
constexpr int kA = 128 * 128, kB = 128 * 128, kSf = 2048;
constexpr int kStage = kA + kB + 3 * kSf + 2048;
constexpr uint64_t kSwizzled = 0x4000404000000000ull, kScales = 0x0000400800000000ull;

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192)
    nvfp4_pair(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t full_[kStages], empty_[kStages], sf_[kStages], ready_[kStages];
  __shared__ __align__(8) uint64_t acc_full_;
  __shared__ uint32_t tmem_;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const uint32_t full = shared(full_), empty = shared(empty_), sf = shared(sf_);
  const uint32_t ready = shared(ready_), acc_full = shared(&acc_full_);
  const int steps = p.k / 256, rows = p.m / 2, half = p.n / 2, blocks = (p.n + 127) / 128;
  const int columns = p.m == 256 ? p.n : half;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, 1);
      mbarrier_init(sf + 8 * s, 1);
      mbarrier_init(ready + 8 * s, 1);
    }
    mbarrier_init(acc_full, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 0 && (p.fault != kOneAlloc || rank == 0)) {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 512;" ::"r"(
                     shared(&tmem_))
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  if (p.fault == kNoClusterSync)
    __syncthreads();
  else
    cluster_sync();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const uint32_t tmem = tmem_, sfa_col = tmem + 256, sfb_col = sfa_col + 16;

  if (warp == 4 && elect()) {
    for (int i = 0; i < steps; i++) {
      const int s = i % kStages;
      const uint32_t stage = shared(smem) + s * kStage, scales = stage + kA + kB;
      mbarrier_wait(empty + 8 * s, (i / kStages + 1) & 1);
      if (rank == 0) mbarrier_expect(full + 8 * s, 2 * (rows * 128 + half * 128));
      // The pair's loads all signal CTA 0.
      const uint32_t bar = p.fault == kOwnBarrier ? full + 8 * s : peer(full + 8 * s, 0);
      tma_2d(stage, &p.a, i * 256, rank * rows, bar);
      tma_2d(stage + kA, &p.b, i * 256, rank * half, bar);
      mbarrier_expect(sf + 8 * s, kSf * (1 + blocks));
      bulk(scales, p.sfa + (rank * steps + i) * kSf, kSf, sf + 8 * s);
      for (int b = 0; b < blocks; b++)
        bulk(scales + kSf * (1 + b), p.sfb + (b * steps + i) * kSf, kSf, sf + 8 * s);
    }
  } else if (warp == 5 && rank == 1 && elect()) {
    for (int i = 0; i < steps; i++) {  // tell CTA 0 that this CTA's scales are there
      const int s = i % kStages;
      mbarrier_wait(sf + 8 * s, i / kStages & 1);
      mbarrier_arrive_cluster(peer(ready + 8 * s, 0));
    }
  } else if (warp == 5 && rank == 0 && elect()) {
    const uint32_t idesc = (uint32_t)(p.m >> 7) << 27 | (p.n >> 3) << 17 | 1 << 10 | 1 << 7;
    for (int i = 0; i < steps; i++) {
      const int s = i % kStages;
      const uint32_t stage = shared(smem) + s * kStage, scales = stage + kA + kB;
      mbarrier_wait(full + 8 * s, i / kStages & 1);
      mbarrier_wait(sf + 8 * s, i / kStages & 1);
      if (p.fault != kNoReady) mbarrier_wait(ready + 8 * s, i / kStages & 1);
      for (int ks = 0; ks < 4; ks++) {
        const uint64_t from = kScales | ((scales + 512 * ks & 0x3FFFF) >> 4);
        asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(sfa_col + 4 * ks),
                     "l"(from)
                     : "memory");
        for (int b = 0; b < blocks; b++)
          asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(
                           sfb_col + 4 * blocks * ks + 4 * b),
                       "l"(from + (kSf * (1 + b) >> 4))
                       : "memory");
        const uint64_t a = kSwizzled | ((stage + 32 * ks & 0x3FFFF) >> 4);
        const uint64_t b = kSwizzled | ((stage + kA + 32 * ks & 0x3FFFF) >> 4);
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 "
            "[%0], %1, %2, %3, [%4], [%5], p;\n}\n" ::"r"(tmem),
            "l"(a), "l"(b), "r"(idesc), "r"(sfa_col + 4 * ks), "r"(sfb_col + 4 * blocks * ks),
            "r"(i | ks)
            : "memory");
      }
      commit(empty + 8 * s, p.fault == kNoMulticast ? 1 : 3);
    }
    commit(acc_full, 3);
  } else if (warp < 4) {
    mbarrier_wait(acc_full, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (int c = 0; c < columns; c += 8) {
      uint32_t r[8];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]),
                     "=r"(r[6]), "=r"(r[7])
                   : "r"(tmem + ((warp * 32u) << 16) + c));
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      float* out = p.d + ((size_t)rank * 128 + warp * 32 + lane) * columns + c;
      for (int i = 0; i < 8; i++) out[i] = __uint_as_float(r[i]);
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  }
  __syncwarp();
  cluster_sync();
  if (warp == 0)
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 512;" ::"r"(tmem));
}
