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

// kStarts: whether it is to know where a group's rows begin in A and in D.
template <int kColumns, int kMaxRows, bool kStarts = false>
class GroupScheduler {
  static_assert(kMaxRows % 8 == 0 && kMaxRows <= 256, "heights are bits of one 32-bit mask");

 public:
  __device__ explicit GroupScheduler(const Params& p) : p_(p) {
    if (few()) {  // one step for all heights: a kernel's first tile waits for this
      load(0);
      heights_ = 1;
    } else {
      const int lane = threadIdx.x % 32;
      uint32_t heights = 0;
      for (int g = lane; g < p_.num_groups; g += 32) {
        const int size = p_.group_sizes[g];
        if (size > 0 && p_.groups[g].n > 0) {
          heights |= 1u << (tile_rows(size, p_.max_tile_rows) / 8 - 1);
        }
      }
      heights_ = __reduce_or_sync(~0u, heights);
    }
  }

  // Finds tile `index`; false if there are fewer tiles. `index` may not fall from call to call.
  __device__ bool find(uint32_t index, Tile& tile) {
    while (index >= end_) {
      if (!next_chunk()) return false;
    }
    const uint32_t own = index - start_;
    const int owner = __ffs(__ballot_sync(~0u, own < count_)) - 1;
    const uint32_t within = __shfl_sync(~0u, own, owner);
    const int size = __shfl_sync(~0u, size_, owner);
    const int rows = __shfl_sync(~0u, rows_, owner);
    tile.group = chunk_ + owner;
    tile.shares_weights = size > rows;
    tile.column_block = within;
    tile.first_row = 0;
    if (tile.shares_weights) {
      const uint32_t token_tiles = ceil_div(size, rows);
      tile.column_block = within / token_tiles;
      tile.first_row = (within - tile.column_block * token_tiles) * rows;
    }
    tile.rows = min(rows, size - tile.first_row);
    return true;
  }

  // Rows of A, and elements of D, before the group of the tile that was found last.
  __device__ int64_t rows_before(const Tile& tile) const {
    static_assert(kStarts);
    return rows_before_ + __reduce_add_sync(~0u, lane_is_below(tile) ? size_ : 0);
  }
  __device__ int64_t elements_before(const Tile& tile) const {
    static_assert(kStarts);
    return elements_before_ + sum(lane_is_below(tile) ? int64_t{size_} * n_ : 0);
  }

 private:
  __device__ bool lane_is_below(const Tile& tile) const {
    return static_cast<int>(threadIdx.x % 32) < tile.group - chunk_;
  }

  static __device__ int64_t sum(int64_t value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }

  // Whether all groups fit in a warp.
  __device__ bool few() const { return p_.num_groups <= 32; }

  // Loads this lane's group of the 32 from `chunk` on: its rows, its tiles.
  __device__ void load(int chunk) {
    const int g = chunk + threadIdx.x % 32;
    n_ = g < p_.num_groups ? p_.groups[g].n : 0;
    size_ = g < p_.num_groups ? max(p_.group_sizes[g], 0) : 0;
    uint32_t token_tiles = size_ > 0;
    if (size_ <= p_.max_tile_rows) {
      rows_ = (size_ + 7) & ~7;
    } else {
      rows_ = tile_rows(size_, p_.max_tile_rows);
      token_tiles = ceil_div(size_, rows_);
    }
    count_ = token_tiles * ceil_div(n_, kColumns);
  }

  // Moves to the next 32 groups, or to the next height; false at the end.
  __device__ bool next_chunk() {
    const int lane = threadIdx.x % 32;
    chunk_ += 32;
    if (chunk_ >= p_.num_groups) {
      if (heights_ != 0) heights_ &= ~(1u << (31 - __clz(heights_)));
      chunk_ = 0;
      rows_before_ = elements_before_ = 0;
    } else if (kStarts && chunk_ > 0) {
      rows_before_ += __reduce_add_sync(~0u, size_);
      elements_before_ += sum(int64_t{size_} * n_);
    }
    if (heights_ == 0) return false;
    start_ = end_;
    if (few()) {  // every group's tiles come after those of taller ones and of earlier as tall ones
      for (int g = 0; g < p_.num_groups; ++g) {
        const int rows = __shfl_sync(~0u, rows_, g);
        const uint32_t count = __shfl_sync(~0u, count_, g);
        if (rows > rows_ || (rows == rows_ && g < lane)) start_ += count;
      }
      end_ += __reduce_add_sync(~0u, count_);
      return true;
    }
    load(chunk_);
    if (rows_ != (32 - __clz(heights_)) * 8) count_ = 0;
    uint32_t end = count_;  // inclusive prefix sum
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t below = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += below;
    }
    start_ += end - count_;
    end_ += __shfl_sync(~0u, end, 31);
    return true;
  }

  const Params& p_;
  uint32_t heights_;    // heights (rows / 8 - 1) to come, one bit each; the top one is the present
  int chunk_ = -32;     // first group of the present 32
  uint32_t end_ = 0;    // tiles up to the end of the present chunk
  int64_t rows_before_ = 0, elements_before_ = 0;  // of A and of D, in the groups before `chunk_`
  // Of group chunk_ + lane:
  int size_ = 0, rows_ = 0, n_ = 0;  // rows, those of its tiles, columns of D
  uint32_t count_ = 0, start_ = 0;  // its tiles of the present height, and all tiles before them
};

}  // namespace fp4rt
