// Grouped GEMM on Blackwell, D_g = scale_g * A_g * B_g^T, all NVFP4: tcgen05 block-scaled matrix
// instructions with the accumulators in Tensor Memory. Emulated, never run on hardware.
//
// A CTA is persistent and takes one tile of GroupScheduler in every round of gridDim.x tiles: tile
// blockIdx.x of the even rounds, and of the odd rounds the one as far from the end. Tiles come tallest
// first, so who has a tall one in one round has a low one in the next. Eight to ten warps; each walks
// the same tiles with a scheduler of its own. Barrier diagram:
//
//   producer (warp 4)                        MMA (warp 5)                      epilogue (warps 0-3)
//   bulk copies, TMA --- full[kStages] ----> cp scales, mma
//   scales (warps 6 ...)                     |
//   ld, st, fence ------ full[kStages] ------+
//                    <-- empty[kStages] ---- commit, when they have finished
//                                            mma ... commit --- acc_full ----> tcgen05.ld
//                                                           <-- acc_empty ---- once it is in registers
//
//   Clusters add: rank 1's stages -- full of rank 0 --> MMA (CTAS = 2);  sums of ranks above 0 --
//   parts_full --> rank 0's epilogue -- parts_empty --> their epilogues (SPLITS > 1).
//
// Operands. One side of the matrix instruction has 128 rows (M), the other 8, 16, ..., TILE_N (N):
//   TOKENS_ON_M = 0: 128 weight rows (columns of D) are M, up to TILE_N tokens are N. Any number of
//                    tokens costs only itself, rounded up to 8.
//   TOKENS_ON_M = 1: up to 128 tokens are M, TILE_N columns of D are N: for many tokens and few
//                    columns, which would not fill 128 rows of M.
//   CTAS = 2:        a pair of CTAs (a cluster) multiplies 256 weight rows, half of them each, by the
//                    tokens, of which each holds half: less to bring into shared memory per product.
//                    Scales of tokens both need whole.
//                    Rank 0 issues for both; rank 1's MMA warp passes on that its stage is full.
//   SPLITS > 1:      a cluster of SPLITS CTAs shares a tile along K, for problems of few tiles. Ranks
//                    above 0 put their sums into rank 0's shared memory (`parts`); rank 0 adds them
//                    in the order of ranks, so results do not depend on timing, and stores.
// A stage is 256 K of a tile:
//   weights  128 rows x 128 bytes in 128-byte-swizzled order, one linear bulk copy per block: the
//            layout "blackwell_blocks" made at upload. No tensor map, so groups may lie anywhere and
//            differ in N and K; a tile reads one contiguous run of memory. Scales apart, 2 KiB.
//   tokens   boxes of 32 rows by tensor map from A as the caller gave it (uint8, 128 bytes of a row;
//            the bytes in shared memory are those of a 4-bit map). One map for all groups: their
//            rows lie behind each other at one pitch. A box may reach into the next group or beyond
//            the end of A (zeros); those rows' results are never stored. Scales from their linear
//            order through registers (scales.cuh), two stages at a time: 32 bytes of a row are one
//            sector of L2. The scale warps take turns, so that about a ring of stages is under way.
// K beyond a group's own is multiplied by zero scales on both sides; E2M1 has no NaN or infinity.
//
// Tensor Memory. N above 128 is done as two units of at most 128, each an accumulator of its own:
// as fast as N = 256, and it leaves room. Columns: kAccumulators * kUnitN for a ring of units (two
// tiles; TILE_N = 256: three units, so that a tile can start when half of the last one is drained),
// then kScaleSlots * kScaleColumns for a ring of scale slots. tcgen05.cp may not overwrite scales
// that a matrix instruction still reads, and mma -> cp is not an ordered pair: a slot is reused only
// after `empty` has told that the instructions of its last use have finished.
//
// There is no kernel in front: the scheduler finds where a group's rows begin in A and in D, and no
// scale needs to be anywhere but in its stage. With programmatic dependent launch a CTA starts while
// the kernel before is still running; it sets up, and waits for that to finish before it reads any
// memory. It lets the kernel behind start in the same way.
#include <stdint.h>

#include "../common/epilogue.cuh"
#include "../common/group_scheduler.cuh"
#include "../common/ring.cuh"
#include "../generated/abi.h"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tcgen05.cuh"
#include "../ptx/tma.cuh"
#include "scales.cuh"

namespace fp4rt {

constexpr bool kTokensOnM = TOKENS_ON_M;
constexpr int kTileM = 128;
constexpr int kTileN = TILE_N;
constexpr int kStages = STAGES;
constexpr int kCtas = CTAS;
constexpr int kSplits = SPLITS;
constexpr int kCluster = kCtas * kSplits;  // CTAs that work on one tile

constexpr int kUnitN = kTileN < 128 ? kTileN : 128;  // N of one accumulator
constexpr int kUnits = kTileN / kUnitN;
constexpr int kUnitRows = kUnitN / kCtas;  // rows of N of a unit that a CTA holds
constexpr int kColumns = kTokensOnM ? kTileN : kTileM * kCtas;  // of D (weight rows) per tile
constexpr int kMaxRows = kTokensOnM ? kTileM : kTileN;          // of D (tokens) per tile
constexpr int kRowBytes = kBlockK / 2;                  // 256 K of one row: one swizzled line
constexpr int kBlockRows = 128;                         // layout.py: blackwell_blocks
constexpr int kBlockBytes = kBlockRows * kRowBytes;
constexpr int kWeightBytes = (kColumns < kBlockRows ? kColumns : kBlockRows) * kRowBytes;  // a block
constexpr int kAtoms = kBlockK / 64;  // matrix instructions per stage and unit
constexpr int kBoxRows = 32;
constexpr int kBoxBytes = kBoxRows * kRowBytes;

constexpr int kEpilogueWarps = 4;  // warp w reads lanes 32 w ..: tcgen05.ld's rule for warp w % 4
constexpr int kProducerWarp = 4;
constexpr int kMmaWarp = 5;
constexpr int kFirstScaleWarp = 6;
constexpr int kScaleStages = 2;  // that a scale warp loads at once
constexpr int kScaleWarps = kStages < 7 ? (kStages + 1) / kScaleStages : 4;
constexpr int kThreads = (kFirstScaleWarp + kScaleWarps) * 32;
constexpr int kScaleRows = (kMaxRows + 31) / 32;  // of tokens, in a lane

constexpr int kAccumulators = kUnits == 1 ? 2 : 3;
constexpr int kScaleColumns = 16 + 16 * kUnits;  // 4 per 64 K for M and for each unit of N
constexpr int kScaleBase = kAccumulators * kUnitN;
constexpr int kFreeSlots = (512 - kScaleBase) / kScaleColumns;
constexpr int kScaleSlots = kFreeSlots < kStages ? kFreeSlots : kStages;
constexpr int kUsedColumns = kScaleBase + kScaleSlots * kScaleColumns;
constexpr int kTmemColumns = 512;  // a power of 2; shared memory allows one CTA per SM anyway

static_assert(kTileN == 32 || kTileN == 64 || kTileN == 128 || kTileN == 256);
static_assert(!kTokensOnM || kTileN >= 64, "half a block of weights is the least");
static_assert(kCtas == 1 || (kCtas == 2 && !kTokensOnM && kTileN >= 64), "pairs share the tokens");
static_assert(kSplits == 1 || (kCtas == 1 && !kTokensOnM && kTileN <= 128), "a unit to add up");
static_assert(kScaleStages * (kScaleWarps - 1) < kStages,
              "a scale warp that waits for a stage knows that it was free once in the round before: "
              "parity tells no more");
static_assert(kScaleSlots >= 2, "cp of one stage under the matrix instructions of the last");
static_assert(kUsedColumns <= kTmemColumns, "Tensor Memory has 512 columns");

struct Stage {
  uint8_t m_values[kTileM * kRowBytes];
  uint8_t n_values[kUnits * kUnitRows * kRowBytes];
  uint8_t m_scales[kScaleBlockBytes];
  uint8_t n_scales[kUnits][kScaleBlockBytes];
};

constexpr int kFragmentTokens = 32;                      // of D that a warp stages at a time:
constexpr int kFragmentBytes = kFragmentTokens * 32 * 2;  // 32 columns of 16 bits

struct SharedStorage {
  Stage stages[kStages];
  float parts[kSplits - 1 ? kSplits - 1 : 1][kSplits > 1 ? kTileN : 1][kTileM];  // of ranks 1 ...
  alignas(16) uint8_t staging[kTokensOnM ? 1 : kEpilogueWarps][kTokensOnM ? 16 : kFragmentBytes];
  uint64_t full[kStages], empty[kStages];
  uint64_t acc_full[kAccumulators], acc_empty[kAccumulators];
  uint64_t parts_full, parts_empty;  // rank 0's: all parts are there; the others': theirs was read
  uint32_t tmem;                     // base address of this CTA's Tensor Memory
};
static_assert(sizeof(Stage) % 1024 == 0, "swizzle atoms of 8 rows x 128 bytes are 1024-aligned");
static_assert(sizeof(SharedStorage) <= 232448, "a CTA has 227 KiB of shared memory");
static_assert(sizeof(SharedStorage) > 228 * 1024 / 2, "one CTA of this kernel on an SM: TMEM");

// Rank of this CTA in its pair.
__device__ __forceinline__ int pair_rank() {
  return kCtas == 1 ? 0 : static_cast<int>(ptx::cluster_ctarank());
}

// Rank of this CTA among those that share a tile along K.
__device__ __forceinline__ int split_rank() {
  return kSplits == 1 ? 0 : static_cast<int>(ptx::cluster_ctarank());
}

// A barrier of all threads of the CTA, or of the cluster: its barriers, shared and Tensor Memory must
// be ready before another CTA uses them, and stay until it no longer does.
__device__ __forceinline__ void sync_cluster() {
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

using Scheduler = GroupScheduler<kColumns, kMaxRows, true>;

// Number of the tile that this CTA (or its cluster) takes in a round.
__device__ __forceinline__ uint32_t tile_of_round(uint32_t round) {
  return back_and_forth(round, blockIdx.x / kCluster, gridDim.x / kCluster);
}

// Waits for a barrier at which the other CTA of a pair may arrive, or its multiplications.
__device__ __forceinline__ void wait_pair(uint64_t* barrier, uint32_t parity) {
  if constexpr (kCtas == 1) {
    ptx::mbarrier_wait(barrier, parity);
  } else {
    ptx::mbarrier_wait_cluster(barrier, parity);
  }
}

// Arrives at the barrier of rank 0, which issues the matrix instructions.
__device__ __forceinline__ void arrive_at_issuer(uint64_t* barrier) {
  if constexpr (kCtas == 1) {
    ptx::mbarrier_arrive(barrier);
  } else {
    ptx::mbarrier_arrive_cluster(ptx::mapa(ptx::shared_address(barrier), 0));
  }
}

// How a tile uses the N side.
struct TileN {
  int total;  // rows of N, a multiple of 8 for each CTA
  int units;

  __device__ __forceinline__ TileN(const Tile& tile, int n) {
    const int valid = kTokensOnM ? min(kColumns, n - tile.column_block * kColumns) : tile.rows;
    total = (valid + 8 * kCtas - 1) & ~(8 * kCtas - 1);
    units = (total + kUnitN - 1) / kUnitN;
  }
  __device__ __forceinline__ int of_unit(int u) const { return min(kUnitN, total - u * kUnitN); }
};

__device__ __forceinline__ int k_blocks(const Group& group) {
  return ceil_div(group.k, kBlockK);
}

// The K blocks of a tile that this CTA multiplies; a rank above 0 may have none.
struct KRange {
  int first, count;

  __device__ __forceinline__ explicit KRange(int blocks) {
    const int share = (blocks + kSplits - 1) / kSplits;
    first = split_rank() * share;
    count = max(min(share, blocks - first), 0);
  }
};

// ------------------------------------------------------------------------------------ producer

constexpr int kTokenUnits = kTokensOnM ? 1 : kUnits;
constexpr int kWeightBlocks = kTokensOnM ? kUnits : 1;

// Rows of A that this CTA loads for one unit.
struct TokenRows {
  int32_t first;  // in A
  int boxes;      // of 32 rows
};

struct TileSource {
  const uint8_t* weight_values;  // first block of the tile at K = 0
  const uint8_t* weight_scales;
  TokenRows tokens[kTokenUnits];
  int k_blocks;
  int weight_blocks;  // of 128 rows (or the half of one), 1 to kWeightBlocks
  uint64_t weight_policy;
};

// Announces the bytes of a stage and loads K block `kb`: weights, their scales, and tokens.
__device__ __forceinline__ void load_stage(const Params& p, Stage& stage, uint64_t* full,
                                           const TileSource& tile, int kb, uint64_t policy) {
  int bytes = tile.weight_blocks * (kWeightBytes + kScaleBlockBytes);
#pragma unroll
  for (int u = 0; u < kTokenUnits; ++u) bytes += tile.tokens[u].boxes * kBoxBytes;
  ptx::mbarrier_arrive_expect_tx(full, bytes);
  uint8_t* weights = kTokensOnM ? stage.n_values : stage.m_values;
  uint8_t* scales = kTokensOnM ? stage.n_scales[0] : stage.m_scales;
#pragma unroll
  for (int b = 0; b < kWeightBlocks; ++b) {
    if (b > 0 && b >= tile.weight_blocks) break;
    const int64_t block = int64_t{b} * tile.k_blocks + kb;
    ptx::cp_async_bulk(weights + b * kBlockBytes, tile.weight_values + block * kBlockBytes,
                       kWeightBytes, full, tile.weight_policy);
    ptx::cp_async_bulk(scales + b * kScaleBlockBytes,
                       tile.weight_scales + block * kScaleBlockBytes, kScaleBlockBytes, full,
                       tile.weight_policy);
  }
  uint8_t* tokens = kTokensOnM ? stage.m_values : stage.n_values;
#pragma unroll
  for (int u = 0; u < kTokenUnits; ++u) {
#pragma unroll 1
    for (int b = 0; b < tile.tokens[u].boxes; ++b) {
      ptx::cp_async_bulk_tensor_2d(tokens + u * (kUnitRows * kRowBytes) + b * kBoxBytes,
                                   &p.tensor_map_a, kb * kRowBytes,
                                   tile.tokens[u].first + b * kBoxRows, full, policy);
    }
  }
}

__device__ __forceinline__ void produce(const Params& p, SharedStorage& s, Scheduler& scheduler) {
  const bool leader = ptx::elect_sync();
  const int rank = pair_rank();
  const uint64_t keep = ptx::createpolicy_evict_last();
  RingCursor<kStages> ring;
  Tile tile;
  for (uint32_t round = 0; scheduler.find(tile_of_round(round), tile); ++round) {
    const Group group = p.groups[tile.group];
    const TileN tile_n(tile, group.n);
    TileSource source;
    source.k_blocks = k_blocks(group);
    const KRange range(source.k_blocks);
    source.weight_blocks = kTokensOnM ? tile_n.units : 1;
    const int first_row = static_cast<int>(scheduler.rows_before(tile)) + tile.first_row;
#pragma unroll
    for (int u = 0; u < kTokenUnits; ++u) {  // rank 1 has the second half of each unit
      const int rows = kTokensOnM ? kTileM : max(tile_n.of_unit(u), 0) / kCtas;
      source.tokens[u].first = first_row + u * kUnitN + rank * rows;
      source.tokens[u].boxes = (rows + kBoxRows - 1) / kBoxRows;
    }
    // A pair's second block may not exist: the first is read again, its columns are not stored.
    const int last_block = (group.n - 1) / kBlockRows;
    const int block = min(tile.column_block * kColumns / kBlockRows + rank, last_block);
    const int half = tile.column_block * kColumns % kBlockRows;  // row within the block
    const int64_t first_block = int64_t{block} * source.k_blocks;
    source.weight_values = group.weight_values + first_block * kBlockBytes + half * kRowBytes;
    source.weight_scales = group.weight_scales + first_block * kScaleBlockBytes;
    source.weight_policy =
        tile.shares_weights ? ptx::createpolicy_evict_normal() : ptx::createpolicy_evict_first();

    for (int i = 0; i < range.count; ++i) {
      wait_pair(&s.empty[ring.slot()], ring.phase() ^ 1);
      if (leader) {
        load_stage(p, s.stages[ring.slot()], &s.full[ring.slot()], source, range.first + i, keep);
      }
      __syncwarp();
      ring.advance();
    }
  }
  // The last arrivals of `empty` must not come after this CTA has gone.
  for (int i = 0; i < kStages; ++i) {
    wait_pair(&s.empty[ring.slot()], ring.phase() ^ 1);
    ring.advance();
  }
}

// ------------------------------------------------------------------------------------ scales

// One of the scale warps: takes every kScaleWarps-th pair of stages, whatever their tiles. The loads
// are asked for before the stage is known to be free.
__device__ __forceinline__ void order_scales(const Params& p, SharedStorage& s,
                                             Scheduler& scheduler) {
  const int warp = threadIdx.x / 32 - kFirstScaleWarp;
  const int64_t pitch = p.a_pitch / 16;
  RingCursor<kStages> ring;
  int turn = 0;  // of warp 0 ... kScaleWarps - 1
  Tile tile;
  for (uint32_t round = 0; scheduler.find(tile_of_round(round), tile); ++round) {
    const int k = p.groups[tile.group].k;
    const KRange range(ceil_div(k, kBlockK));
    const int64_t first_row = scheduler.rows_before(tile) + tile.first_row;
    const ScaleRows from(p.a_scales + first_row * pitch, pitch, tile.rows);
    for (int i = 0; i < range.count; i += kScaleStages) {
      const bool mine = turn == warp;
      turn = turn + 1 == kScaleWarps ? 0 : turn + 1;
      uint4 rows[kScaleStages][kScaleRows];
      if (mine) {
#pragma unroll
        for (int j = 0; j < kScaleStages; ++j) {
          const int block = range.first + i + j;
          if (i + j < range.count) load_scales(rows[j], from, block, k / 16 - block * 16);
        }
      }
#pragma unroll
      for (int j = 0; j < kScaleStages; ++j) {
        if (i + j >= range.count) break;
        if (mine) {
          Stage& stage = s.stages[ring.slot()];
          wait_pair(&s.empty[ring.slot()], ring.phase() ^ 1);
          store_scales(kTokensOnM ? stage.m_scales : stage.n_scales[0], rows[j], 0);
          if (kTokenUnits > 1 && tile.rows > 128) store_scales(stage.n_scales[1], rows[j], 1);
          ptx::fence_proxy_async_shared();  // tcgen05.cp reads through the async proxy
          __syncwarp();
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s.full[ring.slot()]);
        }
        ring.advance();
      }
    }
  }
}

// ------------------------------------------------------------------------------------ MMA

// Scales to Tensor Memory, then the matrix instructions of one stage; one thread.
__device__ __forceinline__ void issue_stage(const Stage& stage, uint32_t scales, uint32_t tmem,
                                            const int (&accumulator)[kUnits], const TileN& tile_n,
                                            int half, int atoms, bool first) {
  const uint64_t m_scales = ptx::tcgen05_descriptor_rows16(ptx::shared_address(stage.m_scales));
  const uint64_t n_scales = ptx::tcgen05_descriptor_rows16(ptx::shared_address(stage.n_scales));
  const uint64_t m_values = ptx::tcgen05_descriptor_128b(ptx::shared_address(stage.m_values));
  const uint64_t n_values = ptx::tcgen05_descriptor_128b(ptx::shared_address(stage.n_values));
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {  // 512 bytes are 32 units of a descriptor's address
    if (atom >= atoms) break;
    ptx::tcgen05_cp_32x128b_warpx4<kCtas>(scales + atom * 4, m_scales + atom * 32);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u == 0 || u < tile_n.units) {
        ptx::tcgen05_cp_32x128b_warpx4<kCtas>(scales + 16 + (u * 4 + atom) * 4,
                                       n_scales + (u * 4 + atom) * 32);
      }
    }
  }
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {  // 64 K are 32 bytes of the swizzled line
    if (atom >= atoms) break;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u == 0 || u < tile_n.units) {
        ptx::tcgen05_mma_mxf4nvf4_block16<kCtas>(
            tmem + accumulator[u] * kUnitN, m_values + atom * 2,
            n_values + u * (kUnitRows * kRowBytes / 16) + atom * 2,
            ptx::tcgen05_instruction_mxf4nvf4<kCtas>(tile_n.of_unit(u)), scales + atom * 4,
            scales + 16 + (u * 4 + atom) * 4 + half, !(first && atom == 0));
      }
    }
  }
}

__device__ __forceinline__ void multiply(const Params& p, SharedStorage& s, Scheduler& scheduler,
                                         uint32_t tmem) {
  const bool leader = ptx::elect_sync();
  RingCursor<kStages> ring;
  RingCursor<kAccumulators> acc;
  RingCursor<kScaleSlots> scale_ring;
  RingCursor<kStages> last_use;  // the stage that used the scale slot before: kScaleSlots behind
  int started = 0;               // stages so far, up to kScaleSlots
  Tile tile;
  for (uint32_t round = 0; scheduler.find(tile_of_round(round), tile); ++round) {
    const Group group = p.groups[tile.group];
    const TileN tile_n(tile, group.n);
    const KRange range(k_blocks(group));
    if (range.count == 0) continue;
    // Scales of rows 64.. of a block are two columns further.
    const int half = tile.column_block * kColumns % kBlockRows / 32;
    int accumulator[kUnits] = {};
    uint64_t* acc_full[kUnits] = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u == 0 || u < tile_n.units) {
        wait_pair(&s.acc_empty[acc.slot()], acc.phase() ^ 1);
        accumulator[u] = acc.slot();
        acc_full[u] = &s.acc_full[acc.slot()];
        acc.advance();
      }
    }
    for (int i = 0; i < range.count; ++i) {
      if constexpr (kScaleSlots < kStages) {
        if (started == kScaleSlots) {
          wait_pair(&s.empty[last_use.slot()], last_use.phase());
          last_use.advance();
        } else {
          ++started;
        }
      }
      wait_pair(&s.full[ring.slot()], ring.phase());
      ptx::tcgen05_fence_after_thread_sync();  // orders all of the waits above
      if (leader) {
        const int atoms = min(kAtoms, (group.k - (range.first + i) * kBlockK + 63) / 64);
        issue_stage(s.stages[ring.slot()], tmem + kScaleBase + scale_ring.slot() * kScaleColumns, tmem,
                    accumulator, tile_n, half, atoms, i == 0);
        ptx::tcgen05_commit<kCtas>(&s.empty[ring.slot()]);
        if (i + 1 == range.count) {
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
            if (u == 0 || u < tile_n.units) ptx::tcgen05_commit<kCtas>(acc_full[u]);
          }
        }
      }
      __syncwarp();
      ring.advance();
      scale_ring.advance();
    }
  }
}

// Rank 1's part: tells rank 0 of every stage that has arrived here. The fence takes about as long as
// the multiplications of a stage, so one serves all stages that are full by then.
__device__ __forceinline__ void pass_on(const Params& p, SharedStorage& s, Scheduler& scheduler) {
  const bool leader = ptx::elect_sync();
  RingCursor<kStages> ring;
  Tile tile;
  for (uint32_t round = 0; scheduler.find(tile_of_round(round), tile); ++round) {
    int blocks = k_blocks(p.groups[tile.group]);
    while (leader && blocks > 0) {
      ptx::mbarrier_wait(&s.full[ring.slot()], ring.phase());
      int found = 1;
      RingCursor<kStages> next = ring;
      for (next.advance(); found < min(blocks, kStages); next.advance(), ++found) {
        if (!ptx::mbarrier_test_wait(&s.full[next.slot()], next.phase())) break;
      }
      ptx::fence_acq_rel_cluster();
      for (int i = 0; i < found; ++i, ring.advance()) {
        ptx::mbarrier_arrive_cluster_relaxed(
            ptx::mapa(ptx::shared_address(&s.full[ring.slot()]), 0));
      }
      blocks -= found;
    }
    __syncwarp();
  }
}

// ------------------------------------------------------------------------------------ epilogue

// Where the sums of a lane's warp go. Two ways to hold kCount N columns in registers:
//   rows       a lane has one row of M (kCount values), stored one by one, or 16 bytes at once where
//              N are columns of D. With weights on M the 32 lanes store 32 columns of a row of D.
//   fragments  (16-bit types, weights on M, aligned rows of D) 8 x 8 matrices as stmatrix takes them,
//              transposed in shared memory: a lane stores 8 columns of every eighth row of D.
struct LaneOutput {
  char* d;         // what the lane stores first
  int64_t step;    // bytes from there to the next: one N column, or 8 of them (fragments)
  int count;       // N columns to store, or that times 8 (fragments); 0 if the lane has none
  bool fragments;  // the same in all lanes of a cluster
  bool vector;     // rows: 16-byte stores, as N columns are neighbours in D and all aligned
  float scale;
};

// Stores N columns first .. first + kCount - 1, converted to the output type.
template <int kCount>
__device__ __forceinline__ void store_columns(const uint32_t (&acc)[kCount], int first,
                                              const LaneOutput& out, int output_type) {
  const auto value = [&](int j) { return __uint_as_float(acc[j]) * out.scale; };
  char* to = out.d + first * out.step;
  const int count = out.count - first;
  if (output_type == kOutputFloat32) {
    if (out.vector && count >= kCount) {
#pragma unroll
      for (int j = 0; j < kCount; j += 4) {
        *reinterpret_cast<float4*>(to + j * 4) = {value(j), value(j + 1), value(j + 2),
                                                  value(j + 3)};
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j < count) *reinterpret_cast<float*>(to) = value(j);
      to += out.step;
    }
    return;
  }
  uint32_t pairs[kCount / 2];
  if (output_type == kOutputFloat16) {
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) pairs[j] = pack_pair<false>(value(2 * j), value(2 * j + 1));
  } else {
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) pairs[j] = pack_pair<true>(value(2 * j), value(2 * j + 1));
  }
  if (out.vector && count >= kCount) {
#pragma unroll
    for (int j = 0; j < kCount / 2; j += 4) {
      *reinterpret_cast<uint4*>(to + j * 4) = {pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]};
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount / 2; ++j) {
    if (2 * j < count) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(pairs[j]);
    to += out.step;
    if (2 * j + 1 < count) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(pairs[j] >> 16);
    to += out.step;
  }
}

// The same from fragments: acc[h * kCount / 2 + 4 * b + 2 * a + i] is row 16 h + 8 a + lane / 4 of the
// warp's 32 and N column 8 b + 2 (lane % 4) + i.
template <int kCount>
__device__ __forceinline__ void store_fragments(const uint32_t (&acc)[kCount], int first,
                                                const LaneOutput& out, int output_type,
                                                uint8_t* staging) {
  static_assert(kCount <= kFragmentTokens);
  uint32_t pairs[kCount / 2];
  const auto value = [&](int j) { return __uint_as_float(acc[j]) * out.scale; };
  if (output_type == kOutputFloat16) {
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) pairs[j] = pack_pair<false>(value(2 * j), value(2 * j + 1));
  } else {
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) pairs[j] = pack_pair<true>(value(2 * j), value(2 * j + 1));
  }
  // A staged row of D is 64 bytes; its piece i lies at piece i ^ (row / 2): no bank conflicts.
  const int lane = threadIdx.x % 32;
  const uint32_t write =
      ptx::shared_address(staging) + lane % 8 * 64 + ((lane / 8) ^ (lane % 8 / 2)) * 16;
  const uint8_t* read = staging + lane / 4 * 64 + ((lane % 4) ^ (lane / 8)) * 16;
#pragma unroll
  for (int b = 0; b < kCount / 8; ++b) {
    ptx::stmatrix_x4_trans(write + b * 512, pairs[2 * b], pairs[2 * b + 1],
                           pairs[kCount / 4 + 2 * b], pairs[kCount / 4 + 2 * b + 1]);
  }
  __syncwarp();
  char* to = out.d + first / 8 * out.step;
#pragma unroll
  for (int b = 0; b < kCount / 8; ++b) {
    if (first + 8 * b < out.count) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(read + b * 512);
    }
    to += out.step;
  }
}

// Parts of a split tile, N columns `first` to first + kCount - 1: a rank above 0 sends them to rank 0,
// rank 0 adds the others' to its own.
template <int kCount>
__device__ __forceinline__ void send_columns(SharedStorage& s, const uint32_t (&acc)[kCount],
                                             int first) {
  const float* own = &s.parts[split_rank() - 1][first][threadIdx.x];
  const uint32_t remote = ptx::mapa(ptx::shared_address(own), 0);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    ptx::st_shared_cluster(remote + j * kTileM * sizeof(float), __uint_as_float(acc[j]));
  }
}

template <int kCount>
__device__ __forceinline__ void add_columns(const SharedStorage& s, uint32_t (&acc)[kCount],
                                            int first) {
#pragma unroll
  for (int r = 0; r < kSplits - 1; ++r) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      acc[j] = __float_as_uint(__uint_as_float(acc[j]) + s.parts[r][first + j][threadIdx.x]);
    }
  }
}

// Loads kCount columns of an accumulator, gives it back to the MMA warp if they are its last, and
// stores them or passes them on. A rank without K blocks has no accumulator: zeros.
template <int kCount>
__device__ __forceinline__ void drain_columns(SharedStorage& s, uint32_t address,
                                              uint64_t* acc_empty, int first, bool last,
                                              bool has_part, const LaneOutput& out,
                                              int output_type) {
  uint32_t acc[kCount] = {};
  if (has_part) {
    const uint32_t lower_half = uint32_t{16} << 16;  // lanes 16 .. of the warp's
    if (!kTokensOnM && out.fragments) {
      if constexpr (kCount == 32) {
        ptx::tcgen05_ld_16x256b_x4<0>(acc, address);
        ptx::tcgen05_ld_16x256b_x4<16>(acc, address + lower_half);
      } else {
        ptx::tcgen05_ld_16x256b_x1<0>(acc, address);
        ptx::tcgen05_ld_16x256b_x1<4>(acc, address + lower_half);
      }
    } else if constexpr (kCount == 32) {
      ptx::tcgen05_ld_32x32b_x32(acc, address);
    } else {
      ptx::tcgen05_ld_32x32b_x8(acc, address);
    }
    ptx::tcgen05_wait_ld(acc);
    if (last) {
      ptx::tcgen05_fence_before_thread_sync();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive_at_issuer(acc_empty);
    }
  }
  if constexpr (kSplits > 1) {
    if (split_rank() > 0) {
      send_columns<kCount>(s, acc, first);
      return;
    }
    add_columns<kCount>(s, acc, first);
  }
  if (!kTokensOnM && out.fragments) {
    store_fragments<kCount>(acc, first, out, output_type, s.staging[threadIdx.x / 32]);
  } else {
    store_columns<kCount>(acc, first, out, output_type);
  }
  __syncwarp();
}

// Around the exchange of one tile's parts: rank 0 waits until they are there and says when they are
// read; the others wait until the last ones were read and say when new ones are there.
__device__ __forceinline__ void begin_parts(SharedStorage& s, uint32_t phase) {
  if constexpr (kSplits > 1) {
    if (split_rank() == 0) {
      ptx::mbarrier_wait_cluster(&s.parts_full, phase);
    } else {
      ptx::mbarrier_wait_cluster(&s.parts_empty, phase ^ 1);
    }
    __syncwarp();
  }
}

__device__ __forceinline__ void end_parts(SharedStorage& s) {
  if constexpr (kSplits > 1) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (split_rank() == 0) {
        for (int r = 1; r < kSplits; ++r) {
          ptx::mbarrier_arrive_cluster(ptx::mapa(ptx::shared_address(&s.parts_empty), r));
        }
      } else {
        ptx::mbarrier_arrive_cluster(ptx::mapa(ptx::shared_address(&s.parts_full), 0));
      }
    }
  }
}

// `elements` of D are before the tile's group.
__device__ __forceinline__ LaneOutput lane_output(const Params& p, const Tile& tile,
                                                  int64_t elements, int64_t n, int output_type) {
  const int m = threadIdx.x, lane = m % 32;  // m: the lane of Tensor Memory, a row of M
  const int element = output_type == kOutputFloat32 ? 4 : 2;
  const int column = tile.column_block * kColumns + pair_rank() * kTileM;
  const int columns = min(int64_t{kTokensOnM ? kColumns : kTileM}, n - column);
  char* block = static_cast<char*>(p.d) +
                (elements + tile.first_row * n + column) * element;
  const bool aligned = (reinterpret_cast<uint64_t>(block) | (n * element)) % 16 == 0;
  LaneOutput out;
  out.scale = p.alpha[tile.group];
  out.fragments = !kTokensOnM && element == 2 && aligned;
  if (out.fragments) {
    const int piece = m / 32 * 32 + lane % 4 * 8;  // first of 8 columns
    out.d = block + (lane / 4 * n + piece) * element;
    out.step = 8 * n * element;
    out.count = piece < columns ? tile.rows - lane / 4 : 0;
  } else {
    out.d = block + (kTokensOnM ? m * n : m) * element;
    out.step = kTokensOnM ? element : n * element;
    out.count = m < (kTokensOnM ? tile.rows : columns) ? (kTokensOnM ? columns : tile.rows) : 0;
  }
  out.vector = kTokensOnM && aligned;
  return out;
}

__device__ __forceinline__ void drain(const Params& p, SharedStorage& s, Scheduler& scheduler,
                                      uint32_t tmem) {
  const int warp = threadIdx.x / 32;
  RingCursor<kAccumulators> acc;
  uint32_t parts_phase = 0;
  Tile tile;
  for (uint32_t round = 0; scheduler.find(tile_of_round(round), tile); ++round) {
    const Group group = p.groups[tile.group];
    const TileN tile_n(tile, group.n);
    const bool has_part = KRange(k_blocks(group)).count > 0;
    const LaneOutput out =
        lane_output(p, tile, scheduler.elements_before(tile), group.n, p.output_type);
    for (int u = 0; u < tile_n.units; ++u) {
      const int n_u = tile_n.of_unit(u);
      const uint32_t address = tmem + (uint32_t{32} * warp << 16) + acc.slot() * kUnitN;
      uint64_t* acc_empty = &s.acc_empty[acc.slot()];
      if (has_part) {
        wait_pair(&s.acc_full[acc.slot()], acc.phase());
        __syncwarp();
        ptx::tcgen05_fence_after_thread_sync();
      }
      begin_parts(s, parts_phase);
      int c = 0;
      for (; c + 32 <= n_u; c += 32) {
        drain_columns<32>(s, address + c, acc_empty, u * kUnitN + c, c + 32 == n_u, has_part, out,
                          p.output_type);
      }
      for (; c < n_u; c += 8) {
        drain_columns<8>(s, address + c, acc_empty, u * kUnitN + c, c + 8 == n_u, has_part, out,
                         p.output_type);
      }
      end_parts(s);
      parts_phase ^= 1;
      if (has_part) acc.advance();
    }
  }
}

}  // namespace fp4rt

#if CTAS * SPLITS > 1
#define FP4RT_CLUSTER __cluster_dims__(CTAS * SPLITS)
#else
#define FP4RT_CLUSTER
#endif

extern "C" __global__ void FP4RT_CLUSTER __launch_bounds__(fp4rt::kThreads, 1)
    grouped_gemm(const __grid_constant__ fp4rt::Params p) {
  using namespace fp4rt;
  extern __shared__ __align__(1024) uint8_t shared[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(shared);
  const int warp = threadIdx.x / 32;
  // 1. Barriers and Tensor Memory.
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.tensor_map_a);
    for (int i = 0; i < kStages; ++i) {  // copies, scales, and in a pair rank 1's stage
      ptx::mbarrier_init(&s.full[i], kCtas == 2 && pair_rank() == 0 ? 3 : 2);
      ptx::mbarrier_init(&s.empty[i], 1);
    }
    for (int i = 0; i < kAccumulators; ++i) {
      ptx::mbarrier_init(&s.acc_full[i], 1);
      ptx::mbarrier_init(&s.acc_empty[i], kEpilogueWarps * kCtas);
    }
    if constexpr (kSplits > 1) {
      ptx::mbarrier_init(&s.parts_full, kEpilogueWarps * (kSplits - 1));
      ptx::mbarrier_init(&s.parts_empty, kEpilogueWarps);
    }
    ptx::fence_mbarrier_init();
  }
  if (warp == kMmaWarp) {
    ptx::tcgen05_alloc<kCtas>(&s.tmem, kTmemColumns);
    ptx::tcgen05_relinquish_alloc_permit<kCtas>();
  }
  // 2. Sizes of the groups are on their way while the CTAs of a cluster wait for each other.
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  Scheduler scheduler(p);
  ptx::tcgen05_fence_before_thread_sync();
  sync_cluster();
  ptx::tcgen05_fence_after_thread_sync();
  const uint32_t tmem = s.tmem;
  // 3. Roles.
  if (warp == kProducerWarp) {
    produce(p, s, scheduler);
  } else if (warp >= kFirstScaleWarp) {
    order_scales(p, s, scheduler);
  } else if (warp != kMmaWarp) {
    drain(p, s, scheduler, tmem);
  } else if (pair_rank() == 0) {
    multiply(p, s, scheduler, tmem);
  } else {
    pass_on(p, s, scheduler);
  }
  // 4. The epilogue has waited for every accumulator, so no matrix instruction is left.
  __syncwarp();
  ptx::tcgen05_fence_before_thread_sync();
  sync_cluster();
  if (warp == kMmaWarp) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc<kCtas>(tmem, kTmemColumns);
    __syncwarp();
  }
  if constexpr (kCtas == 2) sync_cluster();  // a pair frees together: neither may be gone
}
FP4RT_SMEM_BYTES(grouped_gemm, sizeof(fp4rt::SharedStorage));
