// Grouped GEMM on Hopper for a few tokens per group: bound by reading the weights. As in
// grouped_gemm.cu the weights are decoded in registers as the 16-row operand, here of mma.sync (at
// N = 8 wgmma spends more on its descriptors than on the product), and 16 consumer warps each own
// 16 weight rows of a stage.
//
// A stage is kRowBlocks x 128 weight rows x 256 K and the tokens of the same K. With two K slices in a CTA, and with a cluster of kSplits CTAs that share a tile along K, the partial
// sums are added in a fixed order: slices first, then rank 0 + rank 1.
//
//   producer warp                        16 consumer warps
//   tile record --- tile_full ---------> place of the tile, stages
//               <-- tile_empty --------- after the epilogue
//   stage       --- full --------------> LDS codes and scales, ldmatrix tokens -> decode -> mma
//               <-- empty -------------- once the stage has been read
//   in a cluster: rank 1's sums -- st.async, sums_full --> rank 0 <- sums_empty -> rank 1
//
// The weights of the first stages are loaded before `prepare` has finished (programmatic dependent
// launch); their tokens follow.
//
// Macros: ROW_BLOCKS, SLICES (their product is 2), SPLITS (CTAs per tile, 1 or 2), STAGES,
// BFLOAT16.
#include <stdint.h>

#include "../common/epilogue.cuh"
#include "../common/group_scheduler.cuh"
#include "../common/ring.cuh"
#include "../generated/abi.h"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/mma_sync.cuh"
#include "../ptx/tma.cuh"
#include "prepare.cuh"
#include "weights.cuh"

namespace fp4rt {

constexpr int kRowBlocks = ROW_BLOCKS;
constexpr int kSlices = SLICES;
constexpr int kSplits = SPLITS;
constexpr int kStages = STAGES;
constexpr bool kBf16 = BFLOAT16;

constexpr int kMaxRows = 16;
constexpr int kOctets = kMaxRows / 8;
constexpr int kStrips = kRowBlocks * 8;  // of 16 weight rows
constexpr int kConsumerWarps = kStrips * kSlices;
constexpr int kThreads = kConsumerWarps * 32 + 32;
constexpr int kColumns = kRowBlocks * kBlockColumns;
constexpr int kStageSteps = 4;                      // of 64 K, a weight block each
constexpr int kSliceSteps = kStageSteps / kSlices;  // of them a warp's own
constexpr int kTileSlots = 4;

static_assert(kConsumerWarps == 16, "four warps on each scheduler hide the decoding latency");
static_assert(kSplits == 1 || kSplits == 2, "sums of at most two CTAs");

struct TileRecord {
  int stages;  // of this CTA; -1 ends the kernel
  int steps;   // of 64 K from this CTA's first to the last of the tile
  int rows;
  int columns;  // of D from the tile's first on
  int pitch;
  float scale;
  char* d;
};

struct SharedStorage {
  uint8_t tokens[kStages][kStageSteps][kOctets][kAtomBytes];
  uint8_t weights[kStages][kRowBlocks][kStageSteps][kBlockBytes];
  float slice_sums[kSlices > 1 ? kStrips : 1][kOctets][32][4];  // of the second K slice
  float split_sums[kSplits > 1 ? kStrips : 1][kOctets][32][4];       // of the cluster's rank 1
  TileRecord tiles[kTileSlots];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t full[kStages], empty[kStages];
  uint64_t sums_full, sums_empty;
};
static_assert(sizeof(SharedStorage) <= 232448, "227 KiB of shared memory per CTA");

// ------------------------------------------------------------------------------------ producer

__device__ __forceinline__ void produce(const Params& p, SharedStorage& s, int rank) {
  const int lane = threadIdx.x % 32;
  const uint64_t once = ptx::createpolicy_evict_first();
  const uint64_t again = ptx::createpolicy_evict_normal();
  const uint64_t keep = ptx::createpolicy_evict_last();
  GroupScheduler<kColumns, kMaxRows> scheduler(p);
  RingCursor<kTileSlots> slot;
  RingCursor<kStages> weight, token;
  uint32_t index = blockIdx.x / kSplits;
  bool waited = false;
  while (true) {
    Tile tile;
    const bool found = scheduler.find(index, tile);
    ptx::mbarrier_wait(&s.tile_empty[slot.slot()], slot.phase() ^ 1);
    TileRecord& record = s.tiles[slot.slot()];
    if (!found) {
      if (lane == 0) {
        record.stages = -1;
        ptx::mbarrier_arrive(&s.tile_full[slot.slot()]);
      }
      return;
    }
    const Group group = p.groups[tile.group];
    const int steps = (group.k + kBlockK - 1) / kBlockK;
    const int blocks_n = (group.n + kBlockColumns - 1) / kBlockColumns;
    const int all_stages = (steps + kStageSteps - 1) / kStageSteps;
    const int first = all_stages * rank / kSplits;
    const int stages = all_stages * (rank + 1) / kSplits - first;
    const int block_n = tile.column_block * kRowBlocks;
    const uint8_t* weights =
        group.weight_values + (int64_t{block_n} * steps + first * kStageSteps) * kBlockBytes;
    // A tile's second block may not exist: the first is read again, its columns are not stored.
    const int64_t next = block_n + 1 < blocks_n ? int64_t{steps} * kBlockBytes : 0;
    const uint64_t policy = tile.shares_weights ? again : once;
    const uint32_t atoms = (tile.rows + 7) / 8;
    const uint8_t* tokens = nullptr;
    int64_t stride = 0;

    const auto load_weights = [&](int i) {
      const int stage_steps = min(kStageSteps, steps - (first + i) * kStageSteps);
      ptx::mbarrier_wait(&s.empty[weight.slot()], weight.phase() ^ 1);
      if (lane == 0) {
        uint64_t* full = &s.full[weight.slot()];
        ptx::mbarrier_arrive_expect_tx(
            full, stage_steps * (kRowBlocks * kBlockBytes + atoms * kAtomBytes));
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          ptx::cp_async_bulk(s.weights[weight.slot()][b], weights + b * next,
                             stage_steps * kBlockBytes, full, policy);
        }
      }
      __syncwarp();
      weights += kStageSteps * kBlockBytes;
      weight.advance();
    };
    const auto load_tokens = [&](int i) {
      const int stage_steps = min(kStageSteps, steps - (first + i) * kStageSteps);
      if (lane == 0) {
        for (int t = 0; t < stage_steps; ++t) {
          ptx::cp_async_bulk(s.tokens[token.slot()][t], tokens + t * stride, atoms * kAtomBytes,
                             &s.full[token.slot()], keep);
        }
      }
      __syncwarp();
      tokens += kStageSteps * stride;
      token.advance();
    };

    const int early = waited ? 0 : min(stages, kStages);  // weights before `prepare` has finished
    for (int i = 0; i < early; ++i) load_weights(i);
    if (!waited) ptx::griddepcontrol_wait();
    waited = true;
    const GroupStart start = p.group_starts[tile.group];
    stride = int64_t{(p.group_sizes[tile.group] + 7) / 8} * kAtomBytes;
    tokens = p.a_prepared + start.a_prepared + int64_t{tile.first_row} * 128 +
             first * kStageSteps * stride;
    if (lane == 0) {
      record.stages = stages;
      record.steps = steps - first * kStageSteps;
      record.rows = tile.rows;
      record.columns = group.n - tile.column_block * kColumns;
      record.pitch = group.n;
      record.scale = p.alpha[tile.group];
      const int64_t offset = start.d + int64_t{tile.first_row} * group.n +
                             int64_t{tile.column_block} * kColumns;
      record.d = static_cast<char*>(p.d) + offset * (p.output_type == kOutputFloat32 ? 4 : 2);
      ptx::mbarrier_arrive(&s.tile_full[slot.slot()]);
    }
    slot.advance();
    for (int i = 0; i < early; ++i) load_tokens(i);
    for (int i = early; i < stages; ++i) {
      load_weights(i);
      load_tokens(i);
    }
    if constexpr (kSplits > 1) {
      index += gridDim.x / kSplits;  // both CTAs of a cluster must take the same tile
    } else {
      if (lane == 0) index = gridDim.x + atomicAdd(p.schedule, 1u);
      index = __shfl_sync(~0u, index, 0);
    }
  }
}

// ------------------------------------------------------------------------------------ consumer

// Two sums per element: k16 steps alternate, so that products do not wait for each other.
using Sums = float[2][kOctets][4];

// This warp's 16 rows x `steps` * 64 K of a stage; all kSliceSteps of them if kWhole.
template <int kUsedOctets, bool kWhole>
__device__ __forceinline__ void multiply(const uint8_t (*blocks)[kBlockBytes],
                                         const uint8_t (*tokens)[kOctets][kAtomBytes], int strip,
                                         int steps, Sums& acc) {
  const int lane = threadIdx.x % 32;
  const int row = lane % 8;
#pragma unroll
  for (int step = 0; step < kSliceSteps; ++step) {
    if (!kWhole && step >= steps) break;
    uint4 codes;
    uint2 scales;
    load_weight_fragment(blocks[step], strip / 4, strip % 4 * 32 + lane, codes, scales);
    uint32_t b[kUsedOctets][2][4];  // [tokens][32 K]: two k16 steps each
#pragma unroll
    for (int o = 0; o < kUsedOctets; ++o) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int piece = (i * 4 + lane / 8) ^ row;  // 128-byte swizzle
        ptx::ldmatrix_x4(b[o][i], ptx::shared_address(tokens[step][o]) + row * 128 + piece * 16);
      }
    }
    uint32_t a[4][4];
    decode_fragment<kBf16, 0>(codes.x, scales.x, a[0]);
    decode_fragment<kBf16, 1>(codes.y, scales.x, a[1]);
    decode_fragment<kBf16, 0>(codes.z, scales.y, a[2]);
    decode_fragment<kBf16, 1>(codes.w, scales.y, a[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int o = 0; o < kUsedOctets; ++o) {
        ptx::mma_m16n8k16<kBf16>(acc[j % 2][o], a[j], b[o][j / 2][j % 2 * 2],
                                 b[o][j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

// All stages of a tile.
template <int kUsedOctets>
__device__ __forceinline__ void accumulate(SharedStorage& s, int strip, int slice, int stages,
                                           int steps, RingCursor<kStages>& stage, Sums& acc) {
  const int first = slice * kSliceSteps;
  steps -= first;
  for (int i = 0; i < stages; ++i) {
    ptx::mbarrier_wait(&s.full[stage.slot()], stage.phase());
    const auto* blocks = &s.weights[stage.slot()][strip / 8][first];
    const auto* tokens = &s.tokens[stage.slot()][first];
    if (steps >= kSliceSteps) {
      multiply<kUsedOctets, true>(blocks, tokens, strip % 8, steps, acc);
    } else {
      multiply<kUsedOctets, false>(blocks, tokens, strip % 8, steps, acc);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s.empty[stage.slot()]);
    stage.advance();
    steps -= kStageSteps;
  }
}

template <typename Store>
__device__ __forceinline__ void store_fragment(const TileRecord& record, int strip,
                                               const float (&acc)[kOctets][4], Store store) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = o * 8 + lane % 4 * 2 + i % 2;
      const int column = strip * 16 + i / 2 * 8 + lane / 4;
      if (row < record.rows && column < record.columns) {
        store(int64_t{row} * record.pitch + column, acc[o][i] * kWeightPower * record.scale);
      }
    }
  }
}

__device__ __forceinline__ void add(float (&acc)[kOctets][4], const float (&sums)[kOctets][32][4]) {
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    const float4 other = *reinterpret_cast<const float4*>(sums[o][threadIdx.x % 32]);
    acc[o][0] += other.x;
    acc[o][1] += other.y;
    acc[o][2] += other.z;
    acc[o][3] += other.w;
  }
}

__device__ __forceinline__ void consume(const Params& p, SharedStorage& s, int rank) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int strip = warp % kStrips, slice = warp / kStrips;
  RingCursor<kTileSlots> slot;
  RingCursor<kStages> stage;
  RingCursor<1> sums;
  while (true) {
    ptx::mbarrier_wait(&s.tile_full[slot.slot()], slot.phase());
    if (s.tiles[slot.slot()].stages < 0) return;  // nothing else of the record is written then
    const TileRecord record = s.tiles[slot.slot()];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&s.tile_empty[slot.slot()]);
    slot.advance();
    if (kSplits > 1 && rank == 0 && threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(&s.sums_full, sizeof(s.split_sums));
    }
    Sums sums_of_steps = {};
    if (record.rows <= 8) {
      accumulate<1>(s, strip, slice, record.stages, record.steps, stage, sums_of_steps);
    } else {
      accumulate<2>(s, strip, slice, record.stages, record.steps, stage, sums_of_steps);
    }
    float acc[kOctets][4];
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[o][i] = sums_of_steps[0][o][i] + sums_of_steps[1][o][i];
    }

    if constexpr (kSlices > 1) {  // slice 0 += slice 1
      float4* own = reinterpret_cast<float4*>(s.slice_sums[strip]);
      if (slice == 1) {
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          own[o * 32 + lane] = make_float4(acc[o][0], acc[o][1], acc[o][2], acc[o][3]);
        }
      }
      ptx::barrier_sync(1 + strip, 64);
      if (slice == 0) add(acc, s.slice_sums[strip]);
      ptx::barrier_sync(1 + strip, 64);
      if (slice == 1) continue;
    }
    if constexpr (kSplits > 1) {  // rank 0 += rank 1
      if (rank == 1) {
        ptx::mbarrier_wait(&s.sums_empty, sums.phase() ^ 1);
        const uint32_t barrier = ptx::mapa(ptx::shared_address(&s.sums_full), 0);
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          ptx::st_async(ptx::mapa(ptx::shared_address(s.split_sums[strip][o][lane]), 0), acc[o],
                        barrier);
        }
        sums.advance();
        continue;
      }
      ptx::mbarrier_wait(&s.sums_full, sums.phase());
      add(acc, s.split_sums[strip]);
      sums.advance();
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive_remote(ptx::mapa(ptx::shared_address(&s.sums_empty), 1));
      }
    }

    if (p.output_type == kOutputFloat32) {
      float* d = reinterpret_cast<float*>(record.d);
      store_fragment(record, strip, acc, [d](int64_t i, float value) { d[i] = value; });
    } else {
      uint16_t* d = reinterpret_cast<uint16_t*>(record.d);
      const bool bf16 = p.output_type == kOutputBfloat16;
      store_fragment(record, strip, acc, [d, bf16](int64_t i, float value) {
        d[i] = static_cast<uint16_t>(bf16 ? pack_pair<true>(value, 0) : pack_pair<false>(value, 0));
      });
    }
  }
}

}  // namespace fp4rt

#if SPLITS > 1
#define FP4RT_CLUSTER __cluster_dims__(SPLITS, 1, 1)
#else
#define FP4RT_CLUSTER
#endif

extern "C" __global__ void FP4RT_CLUSTER __launch_bounds__(fp4rt::kThreads, 1)
    grouped_gemm(const __grid_constant__ fp4rt::Params p) {
  using namespace fp4rt;
  extern __shared__ __align__(1024) uint8_t shared[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(shared);
  const int rank = kSplits > 1 ? ptx::cluster_ctarank() : 0;
  const int warp = threadIdx.x / 32;
  static_assert(kTileSlots + kStages < kThreads / 32, "a warp for each slot of both rings");
  if (threadIdx.x % 32 == 0) {
    if (warp < kTileSlots) {
      ptx::mbarrier_init(&s.tile_full[warp], 1);
      ptx::mbarrier_init(&s.tile_empty[warp], kConsumerWarps);
    } else if (warp < kTileSlots + kStages) {
      ptx::mbarrier_init(&s.full[warp - kTileSlots], 1);
      ptx::mbarrier_init(&s.empty[warp - kTileSlots], kConsumerWarps);
    } else if (warp == kTileSlots + kStages) {
      ptx::mbarrier_init(&s.sums_full, 1);
      ptx::mbarrier_init(&s.sums_empty, kStrips);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (kSplits > 1) {  // the other CTA's barriers and memory must exist before use
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
  if (threadIdx.x >= kConsumerWarps * 32) {
    produce(p, s, rank);
  } else {
    consume(p, s, rank);
  }
  if constexpr (kSplits > 1) {  // and outlive it
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}
FP4RT_SMEM_BYTES(grouped_gemm, sizeof(fp4rt::SharedStorage));
