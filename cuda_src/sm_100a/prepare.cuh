// prepare: the first of a plan's two kernels on Blackwell.
//
//   1. Prefix sums over group_sizes: where each group's rows are in A, in D and in a_prepared.
//   2. Scales of A, from linear order to what tcgen05.cp takes: for each token tile of a group, each
//      128 of its rows and each 256 K, four 128 x 4 atoms of 512 bytes. Scale (row r, column j) of
//      such a block is byte (j / 4) * 512 + (r % 32) * 16 + (r / 32) * 4 + j % 4; the blocks of 128
//      rows follow each other along K. Rows beyond the tile and columns beyond K are zeros: what
//      lies behind a group in A (another group, or garbage) never gets into the scales.
//
// The tiles are those of GroupScheduler, so every tile starts at a block of its own. A's values need
// no preparation: grouped_gemm takes them by tensor map from where they are.
//
// Every CTA walks all groups in chunks of one per thread and converts its share of each chunk, one
// block per warp. No state is kept between launches.
#pragma once
#include <stdint.h>

#include "../common/group_scheduler.cuh"
#include "../generated/abi.h"
#include "../ptx/cluster.cuh"

namespace fp4rt {

constexpr int kPrepareThreads = 256;
constexpr int kScaleBlockBytes = 2048;  // 128 rows x 256 K
constexpr int kBlockK = 256;

// Blocks of 128 rows in a token tile of a group of `size` rows.
__device__ __forceinline__ int tile_row_blocks(int size, int max_rows) {
  return (tile_rows(size, max_rows) + 127) / 128;
}

// Running totals over groups.
struct Extent {
  int64_t blocks;    // scale blocks
  int64_t rows;      // of A
  int64_t elements;  // of D

  __device__ Extent operator+(const Extent& other) const {
    return {blocks + other.blocks, rows + other.rows, elements + other.elements};
  }
};

struct PrepareStorage {
  Extent warp_totals[kPrepareThreads / 32];
  int64_t block_start[kPrepareThreads + 1];  // before each group of the chunk, and the end
  int64_t row_start[kPrepareThreads];
  int size[kPrepareThreads];
  int k[kPrepareThreads];
};

// Sixteen scales of one row, columns beyond `valid` replaced by zeros.
__device__ __forceinline__ uint4 load_scales(const uint8_t* from, int valid) {
  if (valid >= 16 && reinterpret_cast<uint64_t>(from) % 16 == 0) {
    return *reinterpret_cast<const uint4*>(from);
  }
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j < valid) words[j / 4] |= uint32_t{from[j]} << (8 * (j % 4));
  }
  return {words[0], words[1], words[2], words[3]};
}

// Converts block `index` of a group: (tile, 128 rows, 256 K), K innermost. A warp holds rows lane,
// lane + 32, lane + 64, lane + 96, whose words are neighbours in the atoms.
__device__ __forceinline__ void convert_block(const Params& p, int64_t index, int64_t block_start,
                                              int64_t row_start, int size, int k) {
  const int lane = threadIdx.x % 32;
  const int k_blocks = ceil_div(k, kBlockK);
  const int height = tile_rows(size, p.max_tile_rows);
  const int row_blocks = (height + 127) / 128;
  const int k_block = static_cast<int>(index % k_blocks);
  const int row_block = static_cast<int>(index / k_blocks % row_blocks);
  const int64_t tile = index / k_blocks / row_blocks;
  const int valid = k / 16 - k_block * 16;
  const int64_t pitch = p.a_pitch / 16;
  uint4 rows[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = row_block * 128 + q * 32 + lane;
    rows[q] = {0, 0, 0, 0};
    if (row < height && tile * height + row < size) {
      rows[q] = load_scales(
          p.a_scales + (row_start + tile * height + row) * pitch + k_block * 16, valid);
    }
  }
  uint4* to = reinterpret_cast<uint4*>(p.a_prepared + (block_start + index) * kScaleBlockBytes) +
              lane;
  to[0] = {rows[0].x, rows[1].x, rows[2].x, rows[3].x};
  to[32] = {rows[0].y, rows[1].y, rows[2].y, rows[3].y};
  to[64] = {rows[0].z, rows[1].z, rows[2].z, rows[3].z};
  to[96] = {rows[0].w, rows[1].w, rows[2].w, rows[3].w};
}

__device__ __forceinline__ void prepare_scales(const Params& p, PrepareStorage& s) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  ptx::griddepcontrol_launch_dependents();

  Extent before{};
  for (int chunk = 0; chunk < p.num_groups; chunk += kPrepareThreads) {
    // 1. Exclusive prefix sums of the chunk, one group per thread.
    const int g = chunk + thread;
    int size = 0, k = 0;
    Extent own{};
    if (g < p.num_groups) {
      size = max(p.group_sizes[g], 0);
      k = p.groups[g].k;
      if (size > 0) {
        const int height = tile_rows(size, p.max_tile_rows);
        const int64_t tiles = ceil_div(size, height);
        own = {tiles * tile_row_blocks(size, p.max_tile_rows) * ceil_div(k, kBlockK), size,
               int64_t{size} * p.groups[g].n};
      }
    }
    Extent sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const Extent below = {__shfl_up_sync(~0u, sum.blocks, step),
                            __shfl_up_sync(~0u, sum.rows, step),
                            __shfl_up_sync(~0u, sum.elements, step)};
      if (lane >= step) sum = sum + below;
    }
    if (lane == 31) s.warp_totals[warp] = sum;
    __syncthreads();
    Extent start = before;
#pragma unroll
    for (int w = 0; w < kPrepareThreads / 32; ++w) {
      if (w < warp) start = start + s.warp_totals[w];
      before = before + s.warp_totals[w];
    }
    const Extent end = start + sum;
    s.block_start[thread] = end.blocks - own.blocks;
    s.row_start[thread] = end.rows - own.rows;
    s.size[thread] = size;
    s.k[thread] = k;
    if (thread == kPrepareThreads - 1) s.block_start[kPrepareThreads] = end.blocks;
    if (blockIdx.x == 0 && g < p.num_groups) {
      p.group_starts[g] = {(end.blocks - own.blocks) * kScaleBlockBytes,
                           end.elements - own.elements, end.rows - own.rows};
    }
    __syncthreads();

    // 2. This CTA's share of the chunk's blocks, one per warp, round robin over all warps.
    const int64_t warps = int64_t{gridDim.x} * (kPrepareThreads / 32);
    const int64_t first = s.block_start[0], last = s.block_start[kPrepareThreads];
    for (int64_t block = first + blockIdx.x + int64_t{gridDim.x} * warp; block < last;
         block += warps) {
      int low = 0;  // the last group that starts at or before the block
#pragma unroll
      for (int step = kPrepareThreads / 2; step > 0; step /= 2) {
        if (s.block_start[low + step] <= block) low += step;
      }
      convert_block(p, block - s.block_start[low], s.block_start[low], s.row_start[low],
                    s.size[low], s.k[low]);
    }
    __syncthreads();
  }
}

}  // namespace fp4rt

extern "C" __global__ void __launch_bounds__(fp4rt::kPrepareThreads)
    prepare(const __grid_constant__ fp4rt::Params p) {
  __shared__ fp4rt::PrepareStorage storage;
  fp4rt::prepare_scales(p, storage);
}
FP4RT_SMEM_BYTES(prepare, 0);
