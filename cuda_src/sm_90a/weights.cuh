// The weight layout of the Hopper kernels (fp4rt/layout.py, `hopper_blocks`) and its decoding.
//
// Blocks of 128 columns of D x 64 K, 4608 bytes each, those along K behind each other: any number of
// K steps is one linear copy. A block has for each half of its columns and thread t of a warpgroup
// 16 bytes of codes, word j being its A fragment of k16 step j, and then for each half and each pair
// of rows r, r + 8 of a warp four pairs of scale bytes, one per k16 step.
#pragma once
#include <stdint.h>

#include "../common/nvfp4.cuh"

namespace fp4rt {

constexpr int kBlockColumns = 128;
constexpr int kBlockK = 64;
constexpr int kBlockBytes = kBlockColumns * kBlockK * 9 / 16;
constexpr int kBlockScales = kBlockColumns * kBlockK / 2;  // offset of the scales
constexpr float kWeightPower = 16384.0f;  // decoded weights are the true ones times 2^-14

// Codes and scales of `thread` of a warpgroup, from one half of a block's columns.
__device__ __forceinline__ void load_weight_fragment(const uint8_t* block, int half, int thread,
                                                     uint4& codes, uint2& scales) {
  codes = *reinterpret_cast<const uint4*>(block + half * 2048 + thread * 16);
  scales = *reinterpret_cast<const uint2*>(block + kBlockScales + half * 256 + thread / 4 * 8);
}

// A word of codes and a pair of scale bytes (rows r and r + 8; the low or the high half of
// `scale_bytes`) -> the A fragment of one k16 step, times 2^-14. bf16 holds every product exactly.
template <bool kBf16, int kHalf>
__device__ __forceinline__ void decode_fragment(uint32_t word, uint32_t scale_bytes,
                                                uint32_t (&a)[4]) {
  uint32_t pairs[4];
  decode_weight_word(word, pairs);
  const uint32_t scales = e4m3x2_to_f16x2<kHalf>(scale_bytes);
  const uint32_t low = broadcast_low(scales), high = broadcast_high(scales);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = mul_f16x2(pairs[i], i % 2 == 0 ? low : high);
    if constexpr (kBf16) a[i] = f16x2_to_bf16x2(a[i]);
  }
}

}  // namespace fp4rt
