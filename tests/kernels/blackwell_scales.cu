// How Blackwell's kernel puts scales in order, alone: it uses nothing that Hopper lacks, so Hopper
// can check it. One warp per block of K of one tile; KROWS rows in a lane.
#include "sm_100a/scales.cuh"

struct Tile {
  const uint8_t* scales;  // of the first row
  uint8_t* blocks;        // for each 256 K, one for each 128 rows
  int64_t pitch;
  int rows, k;
};

extern "C" __global__ void __launch_bounds__(32) order(const __grid_constant__ Tile tile) {
  using namespace fp4rt;
  const ScaleRows from(tile.scales, tile.pitch, tile.rows);
  uint4 rows[KROWS];
  const int k_block = blockIdx.x;
  load_scales(rows, from, k_block, tile.k / 16 - k_block * 16);
  constexpr int kBlocks = (KROWS + 3) / 4;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    store_scales(tile.blocks + (k_block * kBlocks + b) * kScaleBlockBytes, rows, b);
  }
}
