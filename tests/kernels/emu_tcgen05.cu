// NVFP4 tile on tcgen05, one CTA or a pair: TMA -> cp -> mma -> commit -> ld, with switches that
// each break one rule. Warps 0-3 are the epilogue, warp 4 loads, warp 5 issues the matrix work.
// Written for the emulator's tests; never run on a GPU.
#include <cstdint>

struct alignas(64) Map {
  uint8_t bytes[128];
};

struct Params {
  Map a, b;
  const uint8_t* sfa;  // 128x4 tile order, 512 bytes per 64 of K
  const uint8_t* sfb;
  float* d;            // (tiles, 128, n)
  int n, k, tiles, columns, fault;
};

enum Fault {
  kNone,
  kNoAccumulatorWait,
  kDeallocByOneLane,
  kNoFenceBefore,       // epilogue -> MMA: producer side
  kNoFenceAfter,        // epilogue -> MMA: consumer side
  kNoEpilogueFence,     // MMA -> epilogue: consumer side
  kNoWaitLd,
  kNoFullWait,
  kNoEmptyWait,
  kWrongBytes,
  kNoInitFence,
  kNoDealloc,
  kNoCommit,
  kWrongLane,
  kNoAccumulatorEmptyWait,
  kDeallocEarly,
};

__device__ __forceinline__ uint32_t shared(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void mbarrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;\n}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void tma_2d(uint32_t dst, const Map* map, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
__device__ __forceinline__ bool elect() {
  uint32_t leader;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(leader));
  return leader != 0;
}
__device__ __forceinline__ void fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

constexpr int kStages = 2;
constexpr int kA = 128 * 128, kB = 256 * 128, kSfa = 2048;
constexpr int kStage = kA + kB + 8192;
constexpr uint64_t kSwizzled = 0x4000404000000000ull, kScales = 0x0000400800000000ull;

extern "C" __global__ void __launch_bounds__(192)
    nvfp4_tile(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t full_[kStages], empty_[kStages], acc_full_, acc_empty_;
  __shared__ uint32_t tmem_;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t full = shared(full_), empty = shared(empty_);
  const uint32_t acc_full = shared(&acc_full_), acc_empty = shared(&acc_empty_);
  const int steps = p.k / 256, blocks = (p.n + 127) / 128;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, 1);
    }
    mbarrier_init(acc_full, 1);
    mbarrier_init(acc_empty, 4);
    if (p.fault != kNoInitFence) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 0) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                     shared(&tmem_)),
                 "r"(p.columns)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
  }
  fence_before();
  __syncthreads();
  fence_after();
  const uint32_t tmem = tmem_;
  const uint32_t sfa_col = tmem + p.n, sfb_col = sfa_col + 16;

  if (warp == 4 && elect()) {
    int i = 0;
    const uint32_t bytes = kA + p.n * 128 + kSfa + kSfa * blocks;
    for (int t = 0; t < p.tiles; t++) {
      for (int step = 0; step < steps; step++, i++) {
        const int s = i % kStages;
        const uint32_t stage = shared(smem) + s * kStage, bar = full + 8 * s;
        if (p.fault != kNoEmptyWait) mbarrier_wait(empty + 8 * s, (i / kStages + 1) & 1);
        mbarrier_expect(bar, bytes - (p.fault == kWrongBytes ? 16 : 0));
        tma_2d(stage, &p.a, step * 256, 0, bar);
        tma_2d(stage + kA, &p.b, step * 256, 0, bar);
        bulk(stage + kA + kB, p.sfa + step * kSfa, kSfa, bar);
        for (int b = 0; b < blocks; b++)
          bulk(stage + kA + kB + kSfa + b * kSfa, p.sfb + (b * steps + step) * kSfa, kSfa, bar);
      }
    }
  } else if (warp == 5 && elect()) {
    const uint32_t idesc = 1u << 27 | (p.n >> 3) << 17 | 1 << 10 | 1 << 7;
    int i = 0;
    for (int t = 0; t < p.tiles; t++) {
      if (p.fault != kNoAccumulatorEmptyWait) mbarrier_wait(acc_empty, (t + 1) & 1);
      if (p.fault != kNoFenceAfter) fence_after();
      for (int step = 0; step < steps; step++, i++) {
        const int s = i % kStages;
        const uint32_t stage = shared(smem) + s * kStage;
        if (p.fault != kNoFullWait) mbarrier_wait(full + 8 * s, i / kStages & 1);
        for (int ks = 0; ks < 4; ks++) {
          const uint64_t sfa = kScales | ((stage + kA + kB + 512 * ks) >> 4);
          asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(sfa_col + 4 * ks),
                       "l"(sfa)
                       : "memory");
          for (int b = 0; b < blocks; b++) {
            const uint64_t sfb =
                kScales | ((stage + kA + kB + kSfa + b * kSfa + 512 * ks) >> 4);
            asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(
                             sfb_col + 4 * blocks * ks + 4 * b),
                         "l"(sfb)
                         : "memory");
          }
        }
        for (int ks = 0; ks < 4; ks++) {
          const uint64_t a = kSwizzled | ((stage + 32 * ks) >> 4);
          const uint64_t b = kSwizzled | ((stage + kA + 32 * ks) >> 4);
          asm volatile(
              "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
              "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 "
              "[%0], %1, %2, %3, [%4], [%5], p;\n}\n" ::"r"(tmem),
              "l"(a), "l"(b), "r"(idesc), "r"(sfa_col + 4 * ks), "r"(sfb_col + 4 * blocks * ks),
              "r"(step | ks)
              : "memory");
        }
        asm volatile(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                empty + 8 * s)
            : "memory");
      }
      if (p.fault == kNoCommit)
        mbarrier_arrive(acc_full);
      else
        asm volatile(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                acc_full)
            : "memory");
    }
  } else if (warp < 4) {
    for (int t = 0; t < p.tiles; t++) {
      if (p.fault != kNoAccumulatorWait) mbarrier_wait(acc_full, t & 1);
      if (p.fault != kNoEpilogueFence) fence_after();
      const uint32_t row = tmem + ((warp * 32u) << 16) + (p.fault == kWrongLane ? 1u << 21 : 0);
      for (int c = 0; c < p.n; c += 8) {
        uint32_t r[8];
        asm volatile(
            "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
              "=r"(r[7])
            : "r"(row + c));
        if (p.fault != kNoWaitLd)
          asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        float* out = p.d + ((size_t)t * 128 + warp * 32 + lane) * p.n + c;
        for (int i = 0; i < 8; i++) out[i] = __uint_as_float(r[i]);
      }
      if (p.fault != kNoFenceBefore) fence_before();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(acc_empty);
    }
  }
  if (p.fault != kDeallocEarly) __syncthreads();
  if (warp == 0) {
    if (p.fault == kDeallocByOneLane) {
      if (lane == 0)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem),
                     "r"(p.columns));
    } else if (p.fault != kNoDealloc) {
      asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem),
                   "r"(p.columns));
    }
  }
}
