// From a tile's number to its group and place: every kernel walks its tiles through this.
//
// A group of `size` rows is cut into the fewest token tiles of at most `max_rows` rows, all equal up
// to a multiple of 8; D's columns into blocks of kColumns. Tiles are numbered from the tallest to
// the lowest, so that CTAs which take them in order finish together; within one height by group,
// column block and token tile (innermost: neighbours share their weights).
//
// Only group_sizes (in device memory) decides, so sizes may change between launches with no work on
// the host. All methods are warp-collective. A CTA asks for rising numbers; the cost of a walk over
// all groups is a few instructions per 32 groups and height.
#pragma once
#include <stdint.h>

#include "../generated/abi.h"

namespace fp4rt {

struct Tile {
  int group;
  int first_row;      // within the group
  int rows;           // in this tile, at least 1
  int column_block;   // in units of kColumns
  bool shares_weights;  // another token tile of the group reads the same weights
};

// Quotient, rounded up, of numbers whose sum may not fit in an int.
__device__ __forceinline__ int ceil_div(int a, int b) {
  return (static_cast<uint32_t>(a) + b - 1) / b;
}

// Rows of one token tile of a group of `size` rows.
__device__ __forceinline__ int tile_rows(int size, int max_rows) {
  return (ceil_div(size, ceil_div(size, max_rows)) + 7) & ~7;
}

// Number of the tile that worker `worker` of `workers` takes in a round. Rounds go back and forth:
// tiles come tallest first, and who had the tallest of one round gets the lowest of the next.
__device__ __forceinline__ uint32_t back_and_forth(uint32_t round, uint32_t worker,
                                                   uint32_t workers) {
  return round * workers + (round % 2 == 0 ? worker : workers - 1 - worker);
}

template <int kColumns, int kMaxRows>
class GroupScheduler {
  static_assert(kMaxRows % 8 == 0 && kMaxRows <= 256, "heights are bits of one 32-bit mask");

 public:
  __device__ explicit GroupScheduler(const Params& p)
      : p_(p), chunk_(p.num_groups) {  // the first step selects the tallest height and chunk 0
    const int lane = threadIdx.x % 32;
    uint32_t heights = 0;
    for (int g = lane; g < p_.num_groups; g += 32) {
      const int size = p_.group_sizes[g];
      if (size > 0 && p_.groups[g].n > 0) heights |= 1u << (tile_rows(size, p_.max_tile_rows) / 8 - 1);
    }
    heights_ = __reduce_or_sync(~0u, heights);
  }

  // Finds tile `index`; false if there are fewer tiles. `index` may not fall from call to call.
  __device__ bool find(uint32_t index, Tile& tile) {
    while (index >= base_ + total_) {
      base_ += total_;
      if (!next_chunk()) return false;
    }
    const uint32_t local = index - base_;
    const int owner = 31 - __clz(__ballot_sync(~0u, start_ <= local));
    const uint32_t within = local - __shfl_sync(~0u, start_, owner);
    const int size = __shfl_sync(~0u, size_, owner);
    const int rows = (height_ + 1) * 8;
    const uint32_t token_tiles = ceil_div(size, rows);
    tile.group = chunk_ + owner;
    tile.column_block = within / token_tiles;
    tile.first_row = (within - tile.column_block * token_tiles) * rows;
    tile.rows = min(rows, size - tile.first_row);
    tile.shares_weights = token_tiles > 1;
    return true;
  }

 private:
  // Moves to the next 32 groups, or to the next height; false at the end.
  __device__ bool next_chunk() {
    const int lane = threadIdx.x % 32;
    chunk_ += 32;
    if (chunk_ >= p_.num_groups) {
      total_ = 0;
      if (heights_ == 0) return false;
      height_ = 31 - __clz(heights_);
      heights_ &= ~(1u << height_);
      chunk_ = 0;
    }
    const int g = chunk_ + lane;
    const int n = g < p_.num_groups ? p_.groups[g].n : 0;
    size_ = g < p_.num_groups ? max(p_.group_sizes[g], 0) : 0;
    uint32_t count = 0;
    if (size_ > 0 && tile_rows(size_, p_.max_tile_rows) == (height_ + 1) * 8) {
      count = ceil_div(size_, (height_ + 1) * 8) * static_cast<uint32_t>(ceil_div(n, kColumns));
    }
    uint32_t end = count;  // inclusive prefix sum
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t below = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += below;
    }
    start_ = end - count;
    total_ = __shfl_sync(~0u, end, 31);
    return true;
  }

  const Params& p_;
  uint32_t heights_;     // heights (rows / 8 - 1) still to come, one bit each
  int height_ = 0;       // the present one
  int chunk_;            // first group of the present 32
  uint32_t base_ = 0;    // tiles before the present chunk
  uint32_t total_ = 0;   // tiles in it
  int size_ = 0;         // by lane: rows of group chunk_ + lane,
  uint32_t start_ = 0;   // and tiles of the present height in the lanes before
};

}  // namespace fp4rt
