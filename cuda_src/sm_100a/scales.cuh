// Scales of A: from linear order in global memory to what tcgen05.cp takes from shared memory.
//
// The scales of 128 rows x 256 K are a block of 2 KiB, four atoms of 128 x 4: scale (row r, column j)
// is byte (j / 4) * 512 + (r % 32) * 16 + (r / 32) * 4 + j % 4. So the rows r, r + 32, r + 64 and
// r + 96 have neighbouring words in each atom, and a lane that holds these four stores 16 bytes.
//
// Rows beyond the tile and columns beyond K are zeros: what lies behind a group in A (another group,
// or garbage) is not even read.
#pragma once
#include <stdint.h>

namespace fp4rt {

constexpr int kScaleBlockBytes = 2048;  // 128 rows x 256 K
constexpr int kBlockK = 256;

// Where a lane's rows lie.
struct ScaleRows {
  const uint8_t* first;  // scales of the lane's first row
  int64_t step;          // bytes from there to the next one, 32 rows further
  int count;             // rows of the tile from the lane's first on, may be <= 0
  bool aligned;          // all rows begin at multiples of 16 bytes

  __device__ __forceinline__ ScaleRows(const uint8_t* tile, int64_t pitch, int rows) {
    const int lane = threadIdx.x % 32;
    first = tile + lane * pitch;
    step = 32 * pitch;
    count = rows - lane;
    aligned = (reinterpret_cast<uint64_t>(tile) | pitch) % 16 == 0;
  }
};

// Sixteen scales of one row, columns beyond `valid` as zeros, whatever the alignment.
__device__ __forceinline__ uint4 load_part(const uint8_t* from, int valid) {
  uint4 row = {0, 0, 0, 0};
  if ((reinterpret_cast<uint64_t>(from) | valid) % 4 == 0) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
    if (valid > 0) row.x = words[0];
    if (valid > 4) row.y = words[1];
    if (valid > 8) row.z = words[2];
    if (valid > 12) row.w = words[3];
    return row;
  }
#pragma unroll 1
  for (int column = 0; column < 16; column += 4) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column + j < valid) word |= uint32_t{from[column + j]} << (8 * j);
    }
    row = {row.y, row.z, row.w, word};
  }
  return row;
}

// Loads a lane's rows at one block of K, of which `valid` columns exist.
template <int kRows>
__device__ __forceinline__ void load_scales(uint4 (&rows)[kRows], const ScaleRows& from, int k_block,
                                            int valid) {
  const uint8_t* first = from.first + k_block * 16;
  if (from.aligned && valid >= 16) {
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      rows[q] = {0, 0, 0, 0};
      if (32 * q < from.count) rows[q] = *reinterpret_cast<const uint4*>(first + q * from.step);
    }
  } else {
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      rows[q] = {0, 0, 0, 0};
      if (32 * q < from.count) rows[q] = load_part(first + q * from.step, valid);
    }
  }
}

// Stores block `b` of a lane's rows: those from 128 b on.
template <int kRows>
__device__ __forceinline__ void store_scales(uint8_t* block, const uint4 (&rows)[kRows], int b) {
  const auto row = [&](int q) { return 4 * b + q < kRows ? rows[4 * b + q] : uint4{0, 0, 0, 0}; };
  uint4* to = reinterpret_cast<uint4*>(block) + threadIdx.x % 32;
  to[0] = {row(0).x, row(1).x, row(2).x, row(3).x};
  to[32] = {row(0).y, row(1).y, row(2).y, row(3).y};
  to[64] = {row(0).z, row(1).z, row(2).z, row(3).z};
  to[96] = {row(0).w, row(1).w, row(2).w, row(3).w};
}

}  // namespace fp4rt
