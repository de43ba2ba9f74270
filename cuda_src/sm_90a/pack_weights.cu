// pack_weights: B as numpy has it -> the blocks that the Hopper kernels read (fp4rt/layout.py,
// `hopper_blocks`; weights.cuh), so that weights travel to the GPU unchanged.
//
// A CTA makes one block, 128 rows x 64 K: the rows' values and scales through shared memory, then
// each thread writes 16 bytes of codes and 2 bytes of scales. Rows beyond N and K beyond the
// logical one become zeros. Grid: x = blocks of a group, y = groups, all of one shape.
//
// Of Params: groups (where each group's blocks go, n and k), a_values and a_scales (B as given, the
// groups behind each other, rows of k / 2 and of k / 16 bytes).
#include <stdint.h>

#include "../generated/abi.h"
#include "weights.cuh"

namespace fp4rt {

constexpr int kPackThreads = 256;
constexpr int kValueWords = kBlockK / 16;  // 8-byte words of a row's values, one per scale block
constexpr int kPitchWords = kValueWords + 1;  // against bank conflicts between rows

struct PackStorage {
  uint2 values[kBlockColumns * kPitchWords];
  uint8_t scales[kBlockColumns * kValueWords];
};

}  // namespace fp4rt

extern "C" __global__ void __launch_bounds__(fp4rt::kPackThreads)
    pack_weights(const __grid_constant__ fp4rt::Params p) {
  using namespace fp4rt;
  __shared__ PackStorage s;
  const Group group = p.groups[blockIdx.y];
  const int row_words = group.k / 16;
  const int k_blocks = (group.k + kBlockK - 1) / kBlockK;
  const int row_block = blockIdx.x / k_blocks, k_block = blockIdx.x % k_blocks;
  const int64_t first_row = int64_t{blockIdx.y} * group.n;
  const uint2* given = reinterpret_cast<const uint2*>(p.a_values) + first_row * row_words;
  const uint8_t* given_scales = p.a_scales + first_row * row_words;

  // 1. Word w of row r holds the 16 values of one scale block.
  for (int i = threadIdx.x; i < kBlockColumns * kValueWords; i += kPackThreads) {
    const int row = i / kValueWords, word = i % kValueWords;
    const int from_row = row_block * kBlockColumns + row, from_word = k_block * kValueWords + word;
    const bool inside = from_row < group.n && from_word < row_words;
    const int64_t from = int64_t{from_row} * row_words + from_word;
    s.values[row * kPitchWords + word] = inside ? given[from] : uint2{0, 0};
    s.scales[i] = inside ? given_scales[from] : uint8_t{0};
  }
  __syncthreads();

  // 2. Thread (half, warp w, lane 4 r + c) has rows 8 h + r and K = 16 j + 8 i + 2 c + e: the byte
  //    c + 4 i of word j. Output byte 4 j + 2 e + 1 - h is made of the codes i = 0 and i = 1.
  const int half = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4, byte = thread % 4;
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t packed = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint2 word = s.values[(row + 8 * h) * kPitchWords + j];
      const uint32_t low = word.x >> (8 * byte), high = word.y >> (8 * byte);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t first = (low >> (4 * e)) & 15, second = (high >> (4 * e)) & 15;
        const uint32_t code =
            (first & 8) << 4 | (first & 7) << 1 | second >> 3 | (second & 7) << 4;
        packed |= code << (8 * (2 * e + 1 - h));
      }
    }
    words[j] = packed;
  }
  uint8_t* block = const_cast<uint8_t*>(group.weight_values) + int64_t{blockIdx.x} * kBlockBytes;
  *reinterpret_cast<uint4*>(block + half * 2048 + thread * 16) = {words[0], words[1], words[2],
                                                                words[3]};

  // 3. Scales of rows r and r + 8, k16 step j: byte 64 w + 8 r + 2 j + h of their half.
  const int j = threadIdx.x % 4, r = threadIdx.x / 4 % 8, w = threadIdx.x / 32 % 4;
  const int scale_row = half * 64 + w * 16 + r;
  const uint32_t low = s.scales[scale_row * kValueWords + j];
  const uint32_t high = s.scales[(scale_row + 8) * kValueWords + j];
  *reinterpret_cast<uint16_t*>(block + kBlockScales + threadIdx.x * 2) = low | high << 8;
}
FP4RT_SMEM_BYTES(pack_weights, 0);
