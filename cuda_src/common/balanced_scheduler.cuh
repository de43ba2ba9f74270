// Equal shares of all tiles, cut along K where need be.
//
// The tiles of all groups lie behind each other on a line, each as long as it takes (its cost).
// Share s of the line is [s, s + 1) * length. Where a cut falls inside a tile, share s multiplies
// the first K of it and share s + 1 goes on from those sums: a row's bits do not depend on the cuts.
// Every share begins with the tile that its end cuts and ends with the one that its start cuts, and
// no tile is longer than a share, so the sums are there when they are needed. Share s waits for
// the first piece of share s - 1, which waits for nobody, so whoever has share s - 1 must be running:
// CTAs take shares by ticket, not by blockIdx, since CUDA may start them in any order and there may
// be more than fit on the SMs beside other kernels.
//
// Only group_sizes (in device memory) decides, so sizes may change between launches with no work on
// the host. All methods are warp-collective.
#pragma once
#include <stdint.h>

#include "../generated/abi.h"

namespace fp4rt {

// A tile, or a part of one along K.
struct Piece {
  int group;
  int column_block;  // in units of the tile's columns
  int first_row;     // within the group
  int rows;          // at least 1
  int size;          // rows of the group
  int64_t a_start;   // Plan::a_extent of the groups before
  int64_t d_start;   // elements of D before the group's
  int first_step;    // along K
  int steps;
  bool shares_weights;  // another token tile of the group reads the same weights
  bool resumes;         // goes on from the sums of the share before
  bool finishes;        // is the last of its tile
};

// Plan: kColumns and kStepK of a tile, kCut (whether tiles may be cut), kMinSteps (of a part),
// kTileCost and step_cost(rows) in any unit, a_extent(rows, k): what a group takes up in A.
template <typename Plan>
class BalancedScheduler {
 public:
  // `share` is that of lane 0.
  __device__ BalancedScheduler(const Params& p, uint32_t share, uint32_t shares) : p_(p) {
    uint64_t line = 0;
    uint32_t tiles = 0, longest = 0;
    for (int chunk = 0; chunk == 0 || chunk < p_.num_groups; chunk += 32) {
      load(chunk);
      line += sum(uint64_t{count_} * cost_);
      tiles += sum(count_);
      longest = max(longest, __reduce_max_sync(~0u, count_ > 0 ? cost_ : 0));
    }
    even_ = !Plan::kCut || tiles <= shares;
    unit_ = uint32_t(line >> 31) + 1;  // of cost: the line has less than 2^32 of them
    if (even_) {
      set_cost();
      line = tiles;
      longest = 1;
    } else if (unit_ > 1) {
      line = 0;
      longest = longest / unit_ + 1;
      for (int chunk = 0; chunk < p_.num_groups; chunk += 32) {
        load(chunk);
        set_cost();
        line += sum(count_ * cost_);
      }
    }
    const uint32_t length = max((uint32_t(line) + shares - 1) / shares, longest);
    share = __shfl_sync(~0u, share, 0);
    low_ = place(uint64_t{share} * length, line);
    at_ = place(uint64_t{share + 1} * length, line);
  }

  // The next piece of the share; false if there are no more.
  __device__ bool next(Piece& piece) {
    piece.finishes = at_.step == 0;
    if (piece.finishes && !previous()) return false;
    const int owner = at_.group - chunk_;
    const int size = __shfl_sync(~0u, size_, owner);
    const int rows = __shfl_sync(~0u, rows_, owner);
    const int steps = __shfl_sync(~0u, steps_, owner);
    const uint32_t token_tiles = uint32_t(size + rows - 1) / uint32_t(rows);
    piece.resumes = at_.group == low_.group && at_.tile == low_.tile && low_.step > 0;
    piece.first_step = piece.resumes ? low_.step : 0;
    piece.steps = (piece.finishes ? steps : at_.step) - piece.first_step;
    piece.group = at_.group;
    piece.column_block = at_.tile / token_tiles;
    piece.first_row = (at_.tile - piece.column_block * token_tiles) * rows;
    piece.size = size;
    piece.rows = min(rows, size - piece.first_row);
    piece.shares_weights = token_tiles > 1;
    piece.a_start = __shfl_sync(~0u, a_start_, owner);
    piece.d_start = __shfl_sync(~0u, d_start_, owner);
    at_.step = 0;
    return true;
  }

 private:
  struct Place {
    int group;
    uint32_t tile;  // of the group
    int step;       // of the tile
  };

  template <typename T>
  static __device__ T sum(T value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }

  // Inclusive prefix sum over lanes.
  template <typename T>
  static __device__ T scan(T value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const T below = __shfl_up_sync(~0u, value, step);
      if (threadIdx.x % 32 >= step) value += below;
    }
    return value;
  }

  __device__ void set_cost() {
    if (even_) {
      cost_ = 1;
    } else {
      cost_ = Plan::kTileCost + steps_ * Plan::step_cost(rows_);
      if (unit_ > 1) cost_ = cost_ / unit_ + 1;
    }
  }

  // Makes `chunk` the present 32 groups: the first ones, or neighbours of those before.
  __device__ void load(int chunk) {
    if (chunk == chunk_) return;
    const bool back = chunk < chunk_;
    if (!back) a_before_ += a_here_, d_before_ += d_here_;  // 0 at first
    if (chunk == 0) a_before_ = 0, d_before_ = 0;
    const int g = chunk + threadIdx.x % 32;
    size_ = 0;
    int n = 0, k = 0;
    if (g < p_.num_groups) {
      size_ = max(p_.group_sizes[g], 0);
      n = p_.groups[g].n;
      k = p_.groups[g].k;
    }
    steps_ = (k + Plan::kStepK - 1) / Plan::kStepK;
    rows_ = 8;
    count_ = 0;
    if (size_ > 0) {
      const uint32_t tiles = uint32_t(size_ + p_.max_tile_rows - 1) / uint32_t(p_.max_tile_rows);
      rows_ = int((uint32_t(size_) + tiles - 1) / tiles + 7) & ~7;
      const uint32_t token_tiles =
          tiles == 1 ? 1 : uint32_t(size_ + rows_ - 1) / uint32_t(rows_);
      count_ = token_tiles * (uint32_t(n + Plan::kColumns - 1) / Plan::kColumns);
    }
    set_cost();
    const int64_t a = Plan::a_extent(size_, k), d = int64_t{size_} * n;
    const int64_t a_end = scan(a), d_end = scan(d);
    a_here_ = __shfl_sync(~0u, a_end, 31);
    d_here_ = __shfl_sync(~0u, d_end, 31);
    if (back && chunk > 0) a_before_ -= a_here_, d_before_ -= d_here_;
    a_start_ = a_before_ + a_end - a;
    d_start_ = d_before_ + d_end - d;
    chunk_ = chunk;
  }

  // Where the line is cut at `x`; its end if that lies beyond.
  __device__ Place place(uint64_t where, uint64_t line) {
    if (where >= line) {
      for (int chunk = 0; chunk < p_.num_groups; chunk += 32) load(chunk);
      return {p_.num_groups, 0, 0};
    }
    uint32_t x = where;
    for (int chunk = 0;; chunk += 32) {
      load(chunk);
      const uint32_t own = count_ * cost_;
      const uint32_t end = scan(own);
      const uint32_t total = __shfl_sync(~0u, end, 31);
      if (x >= total) {
        x -= total;
        continue;
      }
      const int owner = __ffs(__ballot_sync(~0u, x < end)) - 1;
      const uint32_t within = x - __shfl_sync(~0u, end - own, owner);
      const uint32_t cost = __shfl_sync(~0u, cost_, owner);
      const int steps = __shfl_sync(~0u, steps_, owner);
      uint32_t tile = within / cost;
      int step = float(within - tile * cost) * float(steps) / float(cost) + 0.5f;
      if (step < Plan::kMinSteps || step > steps - Plan::kMinSteps) {
        if (2 * step > steps) ++tile;
        step = 0;
      }
      return {chunk + owner, tile, step};
    }
  }

  // Moves back to the tile before; false if that lies before the share.
  __device__ bool previous() {
    while (at_.tile == 0) {
      const int g = chunk_ + threadIdx.x % 32;
      const uint32_t filled = __ballot_sync(~0u, count_ > 0 && g < at_.group);
      if (filled != 0) {
        at_.group = chunk_ + 31 - __clz(filled);
        at_.tile = __shfl_sync(~0u, count_, at_.group - chunk_);
      } else if (chunk_ == 0 || chunk_ <= low_.group) {
        return false;
      } else {
        load(chunk_ - 32);
      }
    }
    if (at_.group < low_.group || (at_.group == low_.group && at_.tile <= low_.tile)) return false;
    --at_.tile;
    return true;
  }

  const Params& p_;
  bool even_ = false;  // every tile costs the same and is not cut
  uint32_t unit_ = 1;  // of cost
  Place low_;          // the share's start
  Place at_;           // the start of the last piece
  int chunk_ = -32;    // first of the present 32 groups
  int64_t a_before_ = 0, d_before_ = 0, a_here_ = 0, d_here_ = 0;  // in the groups
  // Of group chunk_ + lane:
  int size_, rows_;             // rows, and of them in a tile
  int steps_;                   // of a tile
  uint32_t count_, cost_;       // tiles, and what one costs
  int64_t a_start_, d_start_;   // what is before it
};

}  // namespace fp4rt
