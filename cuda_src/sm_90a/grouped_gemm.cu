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
// Consumer, for each step of 64 K: decode its four k16 steps; start their wgmma; read the codes of
// the next step; wait for the wgmma; release the slot. Within a warpgroup decoding and matrix work
// alternate, the other warpgroups of the SM fill the gaps. Keeping nothing in flight from one step to
// the next leaves registers for a second team, and lets ptxas keep a loop for every tile height
// (with wgmma in flight round the loop it serialises them as soon as there are a few heights).
// What is the same in all lanes of a consumer warp goes through a shuffle, which tells the compiler so:
// it can then keep wgmma's descriptors in uniform registers, instead of moving them there between two
// wgmma.
// Weights do not depend on `prepare`: the first stages' are loaded before that grid has finished
// (programmatic dependent launch); only the token warp and the tile counter wait for it.
//
// Macros: TEAMS, MAX_ROWS (tokens in a tile), STAGES, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
// BFLOAT16 (1: decode to bf16).
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
constexpr int kMaxRows = MAX_ROWS;
constexpr int kStages = STAGES;
constexpr bool kBf16 = BFLOAT16;

constexpr int kWarpgroups = 2;  // consumers of a team
constexpr int kConsumers = kTeams * kWarpgroups * 128;
constexpr int kThreads = kConsumers + 128;  // setmaxnreg is for whole warpgroups
constexpr int kColumns = kWarpgroups * 64;  // columns of D (weight rows) per tile
constexpr int kTokenBytes = kMaxRows * kBlockK * 2;
constexpr int kTileSlots = 4;

static_assert(kTeams == 1 || kTeams == 2, "four producer warps: two for each team");
static_assert(kMaxRows % 8 == 0 && kMaxRows <= 256, "N of wgmma: 8, 16, ..., 256");
static_assert(kColumns == kBlockColumns, "a tile is one weight block wide");
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
  uint8_t weights[kStages][kBlockBytes];
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

    const uint8_t* from = p.groups[tile.group].weight_values +
                          int64_t{tile.column_block} * steps * kBlockBytes;
    const uint64_t policy =
        tile.shares_weights ? ptx::createpolicy_evict_normal() : ptx::createpolicy_evict_first();
    for (int i = 0; i < steps; ++i) {
      ptx::mbarrier_wait(&s.empty[stage.slot()], stage.phase() ^ 1);
      if (lane == 0) {
        uint64_t* full = &s.full[stage.slot()];
        ptx::mbarrier_arrive_expect_tx(full, kBlockBytes);
        ptx::cp_async_bulk(s.weights[stage.slot()], from, kBlockBytes, full, policy);
      }
      __syncwarp();
      from += kBlockBytes;
      stage.advance();
    }
    // `prepare` resets the ticket counter: wait for it after the first tile.
    if (index < kTeams * gridDim.x) ptx::griddepcontrol_wait();
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
    const uint32_t bytes = (record.rows + 7) / 8 * kAtomBytes;
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

// Waits for a stage and reads this thread's codes (word j is k16 step j) and scales (byte pair j).
__device__ __forceinline__ void read_stage(TeamStorage& s, const RingCursor<kStages>& stage,
                                           uint4& codes, uint2& scales) {
  ptx::mbarrier_wait(&s.full[stage.slot()], stage.phase());
  load_weight_fragment(s.weights[stage.slot()], threadIdx.x / 128 % kWarpgroups, threadIdx.x % 128,
                       codes, scales);
}

// acc = the tile's sums over `steps` of 64 K for kN tokens.
template <int kN>
__device__ __forceinline__ void multiply_tile(TeamStorage& s, RingCursor<kStages>& stage, int steps,
                                              float (&acc)[kMaxRows / 2]) {
#pragma unroll
  for (int i = 0; i < kMaxRows / 2; ++i) acc[i] = 0.0f;
  uint4 codes;
  uint2 scales;
  read_stage(s, stage, codes, scales);
  for (int step = 0; step < steps; ++step) {
    const int slot = stage.slot();
    const uint32_t at = __shfl_sync(~0u, ptx::shared_address(s.tokens[slot]), 0);
    uint32_t a[4][4];  // A fragments of four k16 steps
    decode_fragment<kBf16, 0>(codes.x, scales.x, a[0]);
    decode_fragment<kBf16, 1>(codes.y, scales.x, a[1]);
    decode_fragment<kBf16, 0>(codes.z, scales.y, a[2]);
    decode_fragment<kBf16, 1>(codes.w, scales.y, a[3]);
    const uint64_t tokens = ptx::wgmma_descriptor_128b(at);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::Wgmma<kN>::template mma<kBf16>(acc, a[j], tokens + j * 2);
    ptx::wgmma_commit_group();
    stage.advance();
    if (step + 1 < steps) read_stage(s, stage, codes, scales);
    ptx::wgmma_wait_group<0>();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s.empty[slot]);
  }
}

// multiply_tile for 8 * octets tokens, kLow <= octets <= kHigh.
template <int kLow, int kHigh>
__device__ __forceinline__ void multiply_tile(int octets, TeamStorage& s,
                                              RingCursor<kStages>& stage, int steps,
                                              float (&acc)[kMaxRows / 2]) {
  if constexpr (kLow == kHigh) {
    multiply_tile<8 * kLow>(s, stage, steps, acc);
  } else {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (octets > kMiddle) {
      multiply_tile<kMiddle + 1, kHigh>(octets, s, stage, steps, acc);
    } else {
      multiply_tile<kLow, kMiddle>(octets, s, stage, steps, acc);
    }
  }
}

__device__ __forceinline__ void consume(const Params& p, TeamStorage& s) {
  const int warpgroup = threadIdx.x / 128 % kWarpgroups, thread = threadIdx.x % 128;
  const int barrier = 1 + threadIdx.x / 128;
  RingCursor<kTileSlots> slot;
  RingCursor<kStages> stage;
  float acc[kMaxRows / 2];
  while (true) {
    ptx::mbarrier_wait(&s.tile_full[slot.slot()], slot.phase());
    const TileRecord& record = s.tiles[slot.slot()];
    const int steps = __shfl_sync(~0u, record.steps, 0);
    if (steps == 0) return;
    const int octets = __shfl_sync(~0u, (record.rows + 7) / 8, 0);
    multiply_tile<1, kMaxRows / 8>(octets, s, stage, steps, acc);

    const int column = warpgroup * 64;
    const int element = p.output_type == kOutputFloat32 ? 4 : 2;
    const OutputBlock out{record.d + int64_t{column} * element, record.pitch, record.rows,
                          record.columns - column, record.scale,
                          kWeightPower * activation_power(p)};
    if (out.columns > 0) {
      store_block<kMaxRows / 8>(acc, p.output_type, s.epilogue[warpgroup], out, thread, barrier);
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
    const int team = __shfl_sync(~0u, threadIdx.x / (kWarpgroups * 128), 0);
    consume(p, storage.teams[kTeams == 1 ? 0 : team]);
  }
}
FP4RT_SMEM_BYTES(grouped_gemm, sizeof(fp4rt::SharedStorage));
