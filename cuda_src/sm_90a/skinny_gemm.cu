// Grouped GEMM on Hopper for a few tokens per group: bound by reading the weights. As in
// grouped_gemm.cu the weights are decoded in registers as the 16-row operand, here of mma.sync (at
// N = 8 wgmma spends more on its descriptors than on the product), and 16 consumer warps each own
// 16 weight rows of a stage.
//
// A stage is kRowBlocks x 128 weight rows x 256 K and the tokens of the same K, which the CTA expands
// itself: a few rows cost less than another kernel in front would. CTAs have equal shares of the
// tiles (balanced_scheduler.cuh), numbered as they start to run: in one whose share ends inside a
// tile the consumers leave their sums to the next. With two K slices in a CTA, and with a cluster of kSplits CTAs that divide every
// tile along K, the partial sums are added in a fixed order: slices first, then rank 0 + rank 1.
//
//   producer warp            4 expander warps            16 consumer warps
//   tile record --- tile_full --+----------------------> place of the tile, stages
//               <-- tile_empty -+----------------------- once it has been read
//   weights     --- full -------+----------------------> LDS codes and scales, ldmatrix tokens
//               rows -> tokens -- full ----------------> -> decode -> mma
//               <-- empty ------+----------------------- once the stage has been read
//   in a cluster: rank 1's sums -- st.async, sums_full --> rank 0 <- sums_empty -> rank 1
//
// There is no `prepare`. With programmatic dependent launch a CTA starts while the kernel before is
// still running, and its producer waits for that to finish.
//
// Macros: ROW_BLOCKS, SLICES (their product is 2), SPLITS (CTAs per tile, 1 or 2), STAGES,
// BFLOAT16.
#include <stdint.h>

#include "../common/balanced_scheduler.cuh"
#include "../common/epilogue.cuh"
#include "../common/raw_rows.cuh"
#include "../common/ring.cuh"
#include "../generated/abi.h"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/mma_sync.cuh"
#include "../ptx/tma.cuh"
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
constexpr int kExpanders = 4;  // warps
constexpr int kThreads = (kConsumerWarps + 1 + kExpanders) * 32;
constexpr int kColumns = kRowBlocks * kBlockColumns;
constexpr int kAtomBytes = 1024;  // 8 rows x 64 K
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
  int share;
  bool resumes, finishes;  // see Piece
  // For the expanders:
  int first_stage;  // of the tile's
  int k;
  int64_t a_row;  // of A, the tile's first
};

struct SharedStorage {
  uint8_t tokens[kStages][kStageSteps][kOctets][kAtomBytes];
  uint8_t weights[kStages][kRowBlocks][kStageSteps][kBlockBytes];
  float slice_sums[kSlices > 1 ? kStrips : 1][kOctets][32][4];  // of the second K slice
  float split_sums[kSplits > 1 ? kStrips : 1][kOctets][32][4];  // of the cluster's rank 1
  TileRecord tiles[kTileSlots];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t full[kStages], empty[kStages];
  uint64_t sums_full, sums_empty;
};
static_assert(sizeof(SharedStorage) <= 232448, "227 KiB of shared memory per CTA");

// ------------------------------------------------------------------------------------ producer

struct Shares {  // see BalancedScheduler
  static constexpr int kColumns = ::fp4rt::kColumns;
  static constexpr int kStepK = kStageSteps * kBlockK;
  static constexpr bool kCut = kSplits == 1;
  static constexpr int kMinSteps = 1;
  static constexpr uint32_t kTileCost = 3;
  static __device__ uint32_t step_cost(int rows) { return rows > 8 ? 10 : 8; }
  static __device__ int64_t a_extent(int rows, int) { return rows; }
};

__device__ __forceinline__ void produce(const Params& p, SharedStorage& s, int rank) {
  const int lane = threadIdx.x % 32;
  const uint64_t once = ptx::createpolicy_evict_first();
  const uint64_t again = ptx::createpolicy_evict_normal();
  ptx::griddepcontrol_wait();
  uint32_t share = blockIdx.x / kSplits;
  if constexpr (Shares::kCut) {  // CTAs may start in any order: see BalancedScheduler
    if (lane == 0) share = atomicInc(p.schedule, gridDim.x - 1);
  }
  BalancedScheduler<Shares> scheduler(p, share, gridDim.x / kSplits);
  RingCursor<kTileSlots> slot;
  RingCursor<kStages> stage;
  while (true) {
    Piece piece;
    const bool found = scheduler.next(piece);
    ptx::mbarrier_wait(&s.tile_empty[slot.slot()], slot.phase() ^ 1);
    TileRecord& record = s.tiles[slot.slot()];
    if (!found) {
      if (lane == 0) {
        record.stages = -1;
        ptx::mbarrier_arrive(&s.tile_full[slot.slot()]);
      }
      return;
    }
    const Group group = p.groups[piece.group];
    const int steps = (group.k + kBlockK - 1) / kBlockK;
    const int blocks_n = (group.n + kBlockColumns - 1) / kBlockColumns;
    const int first = kSplits == 1 ? piece.first_step : piece.steps * rank / kSplits;
    const int stages = kSplits == 1 ? piece.steps : piece.steps * (rank + 1) / kSplits - first;
    const int block_n = piece.column_block * kRowBlocks;
    const uint8_t* weights =
        group.weight_values + (int64_t{block_n} * steps + first * kStageSteps) * kBlockBytes;
    // A tile's second block may not exist: the first is read again, its columns are not stored.
    const int64_t next = block_n + 1 < blocks_n ? int64_t{steps} * kBlockBytes : 0;
    const uint64_t policy = piece.shares_weights ? again : once;
    if (lane == 0) {
      record.stages = stages;
      record.steps = steps - first * kStageSteps;
      record.rows = piece.rows;
      record.columns = group.n - piece.column_block * kColumns;
      record.pitch = group.n;
      record.scale = p.alpha[piece.group];
      record.share = share;
      record.resumes = piece.resumes;
      record.finishes = piece.finishes;
      record.first_stage = first;
      record.k = group.k;
      record.a_row = piece.a_start + piece.first_row;
      const int64_t offset = piece.d_start + int64_t{piece.first_row} * group.n +
                             int64_t{piece.column_block} * kColumns;
      record.d = static_cast<char*>(p.d) + offset * (p.output_type == kOutputFloat32 ? 4 : 2);
      ptx::mbarrier_arrive(&s.tile_full[slot.slot()]);
    }
    slot.advance();
    for (int i = 0; i < stages; ++i) {
      const int stage_steps = min(kStageSteps, steps - (first + i) * kStageSteps);
      ptx::mbarrier_wait(&s.empty[stage.slot()], stage.phase() ^ 1);
      if (lane == 0) {
        uint64_t* full = &s.full[stage.slot()];
        ptx::mbarrier_arrive_expect_tx(full, stage_steps * kRowBlocks * kBlockBytes);
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          ptx::cp_async_bulk(s.weights[stage.slot()][b], weights + b * next,
                             stage_steps * kBlockBytes, full, policy);
        }
      }
      __syncwarp();
      weights += kStageSteps * kBlockBytes;
      stage.advance();
    }
  }
}

// Expands each stage's tokens; `worker` is one of kExpanders warps, which take an octet at a time.
template <typename Values>
__device__ __forceinline__ void expand_tokens(const Params& p, SharedStorage& s, int worker) {
  constexpr int kAhead = Values::kAhead;  // octets whose loads are in flight
  const int lane = threadIdx.x % 32;
  const int part = lane % 16;  // 16 of 256 K
  const int row = worker * 2 + lane / 16;
  static_assert(kExpanders * 2 == 8, "two rows a warp");
  const int64_t value_pitch = p.a_pitch / 16 * Values::kBytes, scale_pitch = p.a_pitch / 16;
  const int64_t octet_values = 8 * value_pitch, octet_scales = 8 * scale_pitch;
  RingCursor<kTileSlots> slot;
  RingCursor<kStages> stage;
  while (true) {
    ptx::mbarrier_wait(&s.tile_full[slot.slot()], slot.phase());
    const TileRecord& record = s.tiles[slot.slot()];
    const int stages = record.stages;
    if (stages < 0) return;
    const int rows = record.rows;
    const int octets = (rows + 7) / 8;
    const int64_t a_row = record.a_row + row;
    const int64_t part_start = record.first_stage * 16 + part;  // in units of 16 K
    const uint8_t* values = p.a_values + a_row * value_pitch + part_start * Values::kBytes;
    const uint8_t* scales = p.a_scales + a_row * scale_pitch + part_start;
    const int inside = min((record.k / 16 - int(part_start) + 15) / 16, stages);  // stages within K
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&s.tile_empty[slot.slot()]);
    slot.advance();

    int load_stage = 0, load_octet = 0;
    const auto load = [&](Values& raw) {
      raw.load(values + load_octet * octet_values, scales + load_octet * octet_scales,
               load_stage < inside && row + load_octet * 8 < rows);
      if (++load_octet == octets) {
        load_octet = 0;
        ++load_stage;
        values += 16 * Values::kBytes;
        scales += 16;
      }
    };
    Values raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(raw[i]);
    int done = 0, octet = 0;
    while (done < stages) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (done >= stages) break;
        if (octet == 0) ptx::mbarrier_wait(&s.empty[stage.slot()], stage.phase() ^ 1);
        uint8_t* to = s.tokens[stage.slot()][part / 4][octet] + row * 128;
        const int piece = part % 4 * 2;  // of 8 values; 128-byte swizzle: piece XOR row
        *reinterpret_cast<uint4*>(to + (piece ^ row) * 16) = raw[i].template expand<0>();
        *reinterpret_cast<uint4*>(to + ((piece + 1) ^ row) * 16) = raw[i].template expand<1>();
        load(raw[i]);
        if (++octet == octets) {
          octet = 0;
          ++done;
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(&s.full[stage.slot()]);
          stage.advance();
        }
      }
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
                                               const float (&acc)[kOctets][4], float power,
                                               Store store) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = o * 8 + lane % 4 * 2 + i % 2;
      const int column = strip * 16 + i / 2 * 8 + lane / 4;
      if (row < record.rows && column < record.columns) {
        store(int64_t{row} * record.pitch + column, acc[o][i] * power * record.scale);
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

// The sums of a tile that two shares have parts of: a warp's own, which its twin in the next share
// goes on from.
__device__ __forceinline__ float4* shared_sums(const Params& p, int share) {
  return reinterpret_cast<float4*>(p.partial_sums) +
         (int64_t{share} * kConsumerWarps + threadIdx.x / 32) * (2 * kOctets * 32) +
         threadIdx.x % 32;
}

__device__ __forceinline__ void load_sums(const Params& p, int share, Sums& acc) {
  uint32_t* ready = &p.schedule[1 + share * kConsumerWarps + threadIdx.x / 32];
  while (ptx::ld_acquire_gpu(ready) == 0) {
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) *ready = 0;
  const float4* from = shared_sums(p, share);
#pragma unroll
  for (int i = 0; i < 2 * kOctets; ++i) {
    *reinterpret_cast<float4*>(acc[i / kOctets][i % kOctets]) = from[i * 32];
  }
}

__device__ __forceinline__ void store_sums(const Params& p, int share, const Sums& acc) {
  float4* to = shared_sums(p, share);
#pragma unroll
  for (int i = 0; i < 2 * kOctets; ++i) {
    const float* sums = acc[i / kOctets][i % kOctets];
    to[i * 32] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    ptx::st_release_gpu(&p.schedule[1 + share * kConsumerWarps + threadIdx.x / 32], 1u);
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
    if (kSplits == 1 && record.resumes) load_sums(p, record.share - 1, sums_of_steps);
    if (record.rows <= 8) {
      accumulate<1>(s, strip, slice, record.stages, record.steps, stage, sums_of_steps);
    } else {
      accumulate<2>(s, strip, slice, record.stages, record.steps, stage, sums_of_steps);
    }
    if (kSplits == 1 && !record.finishes) {
      store_sums(p, record.share, sums_of_steps);
      continue;
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

    const float power = kWeightPower * activation_power(p);
    if (p.output_type == kOutputFloat32) {
      float* d = reinterpret_cast<float*>(record.d);
      store_fragment(record, strip, acc, power, [d](int64_t i, float value) { d[i] = value; });
    } else {
      uint16_t* d = reinterpret_cast<uint16_t*>(record.d);
      const bool bf16 = p.output_type == kOutputBfloat16;
      store_fragment(record, strip, acc, power, [d, bf16](int64_t i, float value) {
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
  ptx::griddepcontrol_launch_dependents();
  static_assert(kTileSlots + kStages < kThreads / 32, "a warp for each slot of both rings");
  if (threadIdx.x % 32 == 0) {
    if (warp < kTileSlots) {
      ptx::mbarrier_init(&s.tile_full[warp], 1);
      ptx::mbarrier_init(&s.tile_empty[warp], kConsumerWarps + kExpanders);
    } else if (warp < kTileSlots + kStages) {
      ptx::mbarrier_init(&s.full[warp - kTileSlots], 1 + kExpanders);
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
  if (warp == kConsumerWarps) {
    produce(p, s, rank);
  } else if (warp > kConsumerWarps) {
    const int worker = warp - kConsumerWarps - 1;
    if (!kBf16 && p.activation_type == kActivationNvfp4) {
      expand_tokens<Nvfp4Values>(p, s, worker);
    } else {
      expand_tokens<PlainValues>(p, s, worker);
    }
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
