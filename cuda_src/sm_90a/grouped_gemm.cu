// Grouped GEMM on Hopper, D_g = scale_g * A_g * B_g^T: NVFP4 weights are decoded to fp16 in
// registers as wgmma's 64-row operand, the tokens that `prepare` expanded are its N operand.
//
// One persistent CTA per SM holds kTeams independent teams, each with its own ring and tiles: two
// consumer warpgroups, a weight warp and a token warp. (Two teams overlap one's decoding and
// epilogue with the other's matrix work.) Barriers of a team; full = the bytes have landed, empty =
// every consumer warp is done with the slot:
//
//   weight warp: takes tiles        token warp                       consumer warpgroups
//   tile --- tile_taken ----------> completes it --- tile_full ----> (both)
//        <----------------------------------------- tile_empty ----- after the epilogue
//   64 K of weights ---+-- full --------------------+--------------> LDS codes, scales -> decode
//                      +-- 64 K of tokens -- full --+                wgmma reads the tokens
//        <----------------+<------------------------ empty --------- once the wgmma have retired
//
// Consumer, for each step of 64 K (its first two k16 steps are in a0 already):
//   1. start two k16 steps of wgmma from a0; wait for the two before; decode the next two into a1
//   2. release the slot of the step before
//   3. start these; read the codes of the next step; wait for those of 1; decode two into a0
// Weights do not depend on `prepare`: the first stages' are loaded before that grid has finished
// (programmatic dependent launch); only the token warp and the tile counter wait for it.
//
// Macros: TEAMS, WARPGROUP_BLOCKS (m64 blocks per warpgroup), MAX_ROWS (tokens in a tile),
// HEIGHT_STEP (granularity of wgmma's N), STAGES, CONSUMER_REGISTERS, PRODUCER_REGISTERS, BFLOAT16
// (1: decode to bf16).
#include <stdint.h>

#include "../common/epilogue.cuh"
#include "../common/group_scheduler.cuh"
#include "../common/ring.cuh"
#include "../generated/abi.h"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "prepare.cuh"
#include "weights.cuh"

namespace fp4rt {

constexpr int kTeams = TEAMS;
constexpr int kWarpgroupBlocks = WARPGROUP_BLOCKS;
constexpr int kMaxRows = MAX_ROWS;
constexpr int kStages = STAGES;
constexpr int kHeightStep = HEIGHT_STEP;
constexpr int kChunk = CHUNK;
constexpr bool kBf16 = BFLOAT16;

constexpr int kWarpgroups = 2;  // consumers of a team
constexpr int kConsumers = kTeams * kWarpgroups * 128;
constexpr int kThreads = kConsumers + 128;  // setmaxnreg is for whole warpgroups
constexpr int kColumns = kWarpgroups * kWarpgroupBlocks * 64;  // columns of D (weight rows) per tile
constexpr int kBlocksPerStage = kColumns / kBlockColumns;
constexpr int kTokenBytes = kMaxRows * kBlockK * 2;
constexpr int kTileSlots = 4;

static_assert(kTeams == 1 || kTeams == 2, "four producer warps: two for each team");
static_assert(kWarpgroupBlocks == 1 || kWarpgroupBlocks == 2);
static_assert(kHeightStep % 8 == 0 && kMaxRows % kHeightStep == 0 && kMaxRows <= 256,
              "N of wgmma: 8, 16, ..., 256");
static_assert(CONSUMER_REGISTERS * kConsumers + PRODUCER_REGISTERS * 128 <=
                  65536 / kThreads / 8 * 8 * kThreads,
              "setmaxnreg can only share out what the launch allocated");

// What a consumer needs to know about a tile; steps == 0 ends the kernel.
struct TileRecord {
  // Written by the weight warp:
  int steps;  // of 64 K
  int group;
  int first_row;
  int rows;
  int columns;  // of D from the tile's first on
  int pitch;    // elements of a row of D
  // Written by the token warp:
  float scale;
  char* d;  // element (first row, first column)
};

struct alignas(1024) TeamStorage {
  uint8_t tokens[kStages][kTokenBytes];  // 128-byte swizzled atoms of 1024 bytes
  uint8_t weights[kStages][kBlocksPerStage][kBlockBytes];
  char epilogue[kWarpgroups][kEpilogueBytes];
  TileRecord tiles[kTileSlots];
  uint64_t tile_taken[kTileSlots], tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t full[kStages], empty[kStages];
};

struct SharedStorage {
  TeamStorage teams[kTeams];
};
static_assert(sizeof(SharedStorage) <= 232448, "227 KiB of shared memory per CTA");

// ----------------------------------------------------------------------------------- producers

// Takes tiles (first this team's own, then by ticket) and loads their weights.
__device__ __forceinline__ void load_weights(const Params& p, TeamStorage& s, int team) {
  const int lane = threadIdx.x % 32;
  GroupScheduler<kColumns, kMaxRows> scheduler(p);
  RingCursor<kTileSlots> slot;
  RingCursor<kStages> stage;
  uint32_t index = team * gridDim.x + blockIdx.x;
  bool first = true;
  while (true) {
    Tile tile;
    const bool found = scheduler.find(index, tile);
    ptx::mbarrier_wait(&s.tile_empty[slot.slot()], slot.phase() ^ 1);
    TileRecord& record = s.tiles[slot.slot()];
    if (!found) {
      if (lane == 0) {
        record.steps = 0;
        ptx::mbarrier_arrive(&s.tile_taken[slot.slot()]);
      }
      return;
    }
    const int n = p.groups[tile.group].n;
    const int steps = (p.groups[tile.group].k + kBlockK - 1) / kBlockK;
    if (lane == 0) {
      record.steps = steps;
      record.group = tile.group;
      record.first_row = tile.first_row;
      record.rows = tile.rows;
      record.columns = n - tile.column_block * kColumns;
      record.pitch = n;
      ptx::mbarrier_arrive(&s.tile_taken[slot.slot()]);
    }
    slot.advance();

    const int block = tile.column_block * kBlocksPerStage;
    const uint8_t* from = p.groups[tile.group].weight_values + int64_t{block} * steps * kBlockBytes;
    // A tile's second block may not exist: the first is read again, its columns are not stored.
    const int64_t next = block + 1 < (n + kBlockColumns - 1) / kBlockColumns
                             ? int64_t{steps} * kBlockBytes
                             : 0;
    const uint64_t policy =
        tile.shares_weights ? ptx::createpolicy_evict_normal() : ptx::createpolicy_evict_first();
    for (int i = 0; i < steps; ++i) {
      ptx::mbarrier_wait(&s.empty[stage.slot()], stage.phase() ^ 1);
      if (lane == 0) {
        uint64_t* full = &s.full[stage.slot()];
        ptx::mbarrier_arrive_expect_tx(full, kBlocksPerStage * kBlockBytes);
#pragma unroll
        for (int b = 0; b < kBlocksPerStage; ++b) {
          ptx::cp_async_bulk(s.weights[stage.slot()][b], from + b * next, kBlockBytes, full, policy);
        }
      }
      __syncwarp();
      from += kBlockBytes;
      stage.advance();
    }
    if (first) ptx::griddepcontrol_wait();  // `prepare` resets the ticket counter
    first = false;
    if (lane == 0) index = kTeams * gridDim.x + atomicAdd(p.schedule, 1u);
    index = __shfl_sync(~0u, index, 0);
  }
}

// Completes each tile's record and loads its tokens.
__device__ __forceinline__ void load_tokens(const Params& p, TeamStorage& s) {
  const int lane = threadIdx.x % 32;
  const uint64_t policy = ptx::createpolicy_evict_last();
  RingCursor<kTileSlots> slot;
  RingCursor<kStages> stage;
  ptx::griddepcontrol_wait();
  while (true) {
    ptx::mbarrier_wait(&s.tile_taken[slot.slot()], slot.phase());
    TileRecord& record = s.tiles[slot.slot()];
    const int steps = record.steps;
    if (steps == 0) {
      if (lane == 0) ptx::mbarrier_arrive(&s.tile_full[slot.slot()]);
      return;
    }
    const GroupStart start = p.group_starts[record.group];
    const int64_t stride = int64_t{(p.group_sizes[record.group] + 7) / 8} * kAtomBytes;
    const uint8_t* from = p.a_prepared + start.a_prepared + int64_t{record.first_row} * 128;
    // Whole heights: rows beyond the group's last are those of its next 64 K, their results unused.
    const uint32_t bytes = (record.rows + kHeightStep - 1) / kHeightStep * (kHeightStep * 128);
    if (lane == 0) {
      const int64_t offset = start.d + int64_t{record.first_row} * record.pitch +
                             (record.pitch - record.columns);
      record.d = static_cast<char*>(p.d) + offset * (p.output_type == kOutputFloat32 ? 4 : 2);
      record.scale = p.alpha[record.group];
      ptx::mbarrier_arrive(&s.tile_full[slot.slot()]);
    }
    slot.advance();
    for (int i = 0; i < steps; ++i) {
      ptx::mbarrier_wait(&s.empty[stage.slot()], stage.phase() ^ 1);
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(&s.full[stage.slot()], bytes);
        ptx::cp_async_bulk(s.tokens[stage.slot()], from, bytes, &s.full[stage.slot()], policy);
      }
      __syncwarp();
      from += stride;
      stage.advance();
    }
  }
}

// ------------------------------------------------------------------------------------ consumer

using Accumulators = float[kWarpgroupBlocks][kMaxRows / 2];
using Fragments = uint32_t[kWarpgroupBlocks][kChunk][4];  // kChunk k16 steps of each m64 block

// Codes and scales of 64 K that a consumer has read.
struct Codes {
  uint4 words[kWarpgroupBlocks];   // word j is k16 step j
  uint2 scales[kWarpgroupBlocks];  // byte pair j is k16 step j, rows r and r + 8
};

__device__ __forceinline__ void read_codes(const TeamStorage& s, int slot, Codes& codes) {
  const int warpgroup = threadIdx.x / 128 % kWarpgroups;
#pragma unroll
  for (int b = 0; b < kWarpgroupBlocks; ++b) {
    const uint8_t* block = s.weights[slot][kWarpgroupBlocks == 1 ? 0 : warpgroup];
    load_weight_fragment(block, kWarpgroupBlocks == 1 ? warpgroup : b, threadIdx.x % 128,
                         codes.words[b], codes.scales[b]);
  }
}

// Decodes kChunk k16 steps from step kFirst (0 or 2) on.
template <int kFirst>
__device__ __forceinline__ void decode_steps(const Codes& codes, Fragments& a) {
#pragma unroll
  for (int b = 0; b < kWarpgroupBlocks; ++b) {
    const uint4 words = codes.words[b];
    const uint2 scales = codes.scales[b];
    if constexpr (kFirst == 0) {
      decode_fragment<kBf16, 0>(words.x, scales.x, a[b][0]);
      decode_fragment<kBf16, 1>(words.y, scales.x, a[b][1]);
    }
    if constexpr (kFirst + kChunk == 4) {
      decode_fragment<kBf16, 0>(words.z, scales.y, a[b][kChunk - 2]);
      decode_fragment<kBf16, 1>(words.w, scales.y, a[b][kChunk - 1]);
    }
  }
}

// Starts kChunk k16 steps with kN tokens.
template <int kN>
__device__ __forceinline__ void start_mma(Accumulators& acc, const Fragments& a,
                                          uint64_t descriptor) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kChunk; ++step) {
#pragma unroll
    for (int b = 0; b < kWarpgroupBlocks; ++b) {
      ptx::Wgmma<kN>::template mma<kBf16>(acc[b], a[b][step], descriptor + step * 2);
    }
  }
  ptx::wgmma_commit_group();
}

// Waits for a stage and reads its codes.
__device__ __forceinline__ void read_stage(TeamStorage& s, const RingCursor<kStages>& stage,
                                           Codes& codes) {
  ptx::mbarrier_wait(&s.full[stage.slot()], stage.phase());
  read_codes(s, stage.slot(), codes);
}

__device__ __forceinline__ void release_stage(TeamStorage& s, int slot) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s.empty[slot]);
}

// acc = the tile's sums over `steps` of 64 K for kN tokens.
template <int kN>
__device__ __forceinline__ void multiply_tile(TeamStorage& s, RingCursor<kStages>& stage, int steps,
                                              Accumulators& acc) {
  Codes codes;
#pragma unroll
  for (int b = 0; b < kWarpgroupBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kMaxRows / 2; ++i) acc[b][i] = 0.0f;
  }
  read_stage(s, stage, codes);
  if constexpr (kChunk == 4) {
    // The other warpgroups' wgmma run while this one decodes. Within a warpgroup nothing is in
    // flight across an iteration: with that, ptxas accepts a loop for each of 16 heights.
    Fragments a;
    for (int step = 0; step < steps; ++step) {
      decode_steps<0>(codes, a);
      const int slot = stage.slot();
      start_mma<kN>(acc, a, ptx::wgmma_descriptor_128b(ptx::shared_address(s.tokens[slot])));
      stage.advance();
      if (step + 1 < steps) read_stage(s, stage, codes);
      ptx::wgmma_wait_group<0>();
      release_stage(s, slot);
    }
  } else {
    Fragments a0, a1;
    decode_steps<0>(codes, a0);
    for (int step = 0; step < steps; ++step) {
      const int slot = stage.slot();
      const uint64_t tokens = ptx::wgmma_descriptor_128b(ptx::shared_address(s.tokens[slot]));
      start_mma<kN>(acc, a0, tokens);
      ptx::wgmma_wait_group<1>();
      if (step > 0) release_stage(s, slot == 0 ? kStages - 1 : slot - 1);
      decode_steps<2>(codes, a1);
      start_mma<kN>(acc, a1, tokens + 4);
      stage.advance();
      if (step + 1 < steps) read_stage(s, stage, codes);
      ptx::wgmma_wait_group<1>();
      decode_steps<0>(codes, a0);
    }
    ptx::wgmma_wait_group<0>();
    release_stage(s, stage.slot() == 0 ? kStages - 1 : stage.slot() - 1);
  }
}

// multiply_tile for kHeightStep * height tokens, kLow <= height <= kHigh.
template <int kLow, int kHigh>
__device__ __forceinline__ void multiply_tile(int height, TeamStorage& s,
                                              RingCursor<kStages>& stage, int steps,
                                              Accumulators& acc) {
  if constexpr (kLow == kHigh) {
    multiply_tile<kHeightStep * kLow>(s, stage, steps, acc);
  } else {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (height > kMiddle) {
      multiply_tile<kMiddle + 1, kHigh>(height, s, stage, steps, acc);
    } else {
      multiply_tile<kLow, kMiddle>(height, s, stage, steps, acc);
    }
  }
}

__device__ __forceinline__ void consume(const Params& p, TeamStorage& s) {
  const int warpgroup = threadIdx.x / 128 % kWarpgroups, thread = threadIdx.x % 128;
  const int barrier = 1 + threadIdx.x / 128;
  RingCursor<kTileSlots> slot;
  RingCursor<kStages> stage;
  Accumulators acc;
  while (true) {
    ptx::mbarrier_wait(&s.tile_full[slot.slot()], slot.phase());
    const TileRecord& record = s.tiles[slot.slot()];
    const int steps = record.steps;
    if (steps == 0) return;
    const int height = (record.rows + kHeightStep - 1) / kHeightStep;
    multiply_tile<1, kMaxRows / kHeightStep>(height, s, stage, steps, acc);
#pragma unroll
    for (int b = 0; b < kWarpgroupBlocks; ++b) {
      const int column = (warpgroup * kWarpgroupBlocks + b) * 64;
      const int element = p.output_type == kOutputFloat32 ? 4 : 2;
      const OutputBlock out{record.d + int64_t{column} * element, record.pitch, record.rows,
                            record.columns - column, record.scale, kWeightPower};
      if (out.columns > 0) {
        store_block<kMaxRows / 8>(acc[b], p.output_type, s.epilogue[warpgroup], out, thread,
                                  barrier);
      }
    }
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(&s.tile_empty[slot.slot()]);
    slot.advance();
  }
}

}  // namespace fp4rt

extern "C" __global__ void __launch_bounds__(fp4rt::kThreads, 1)
    grouped_gemm(const __grid_constant__ fp4rt::Params p) {
  using namespace fp4rt;
  extern __shared__ __align__(1024) uint8_t shared[];
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared);
  // Every warp initialises a few barriers: one after the other they would take half a microsecond.
  constexpr int kConsumerWarps = kWarpgroups * 4;
  const int warp = threadIdx.x / 32;
  static_assert(kTileSlots + kStages <= kThreads / 32, "a warp for each slot of both rings");
  if (threadIdx.x % 32 == 0) {
    for (int team = 0; team < kTeams; ++team) {
      TeamStorage& s = storage.teams[team];
      if (warp < kTileSlots) {
        ptx::mbarrier_init(&s.tile_taken[warp], 1);
        ptx::mbarrier_init(&s.tile_full[warp], 1);
        ptx::mbarrier_init(&s.tile_empty[warp], kConsumerWarps);
      } else if (warp < kTileSlots + kStages) {
        ptx::mbarrier_init(&s.full[warp - kTileSlots], 2);  // the weight warp and the token warp
        ptx::mbarrier_init(&s.empty[warp - kTileSlots], kConsumerWarps);
      }
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    const int producer = warp - kConsumers / 32;
    if (producer / 2 < kTeams) {
      TeamStorage& s = storage.teams[producer / 2];
      if (producer % 2 == 0) {
        load_weights(p, s, producer / 2);
      } else {
        load_tokens(p, s);
      }
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, storage.teams[threadIdx.x / (kWarpgroups * 128)]);
  }
}
FP4RT_SMEM_BYTES(grouped_gemm, sizeof(fp4rt::SharedStorage));
