// Rows of A as given -> fp16 or bf16 in 128-byte swizzled atoms of shared memory, for kernels that
// expand A themselves. A lane takes 16 values of a row: one scale block.
#pragma once
#include <stdint.h>

#include "../generated/abi.h"
#include "nvfp4.cuh"

namespace fp4rt {

// Eight codes of a row and their scale -> the values times 2^-7 as fp16, in their order:
// (v * 2^-14) * (s * 2^7) is exact in fp16 for every E2M1 v and E4M3 s.
__device__ __forceinline__ uint4 expand_codes(uint32_t codes, uint32_t scale) {
  constexpr uint32_t kTwoTo7 = 0x58005800u;
  const uint32_t factor = mul_f16x2(broadcast_low(e4m3x2_to_f16x2<0>(scale)), kTwoTo7);
  uint32_t pairs[4];
  decode_plain_word(codes, pairs);
  return make_uint4(mul_f16x2(pairs[0], factor), mul_f16x2(pairs[1], factor),
                    mul_f16x2(pairs[2], factor), mul_f16x2(pairs[3], factor));
}

// One lane's 16 values of NVFP4 rows.
struct Nvfp4Values {
  static constexpr float kPower = 128.0f;  // makes expanded values the true ones
  static constexpr int kBytes = 8;         // of 16 values
  static constexpr int kAhead = 6;         // loads to have in flight
  uint2 codes;
  uint32_t scale;

  // Zeros if not `valid`.
  __device__ __forceinline__ void load(const uint8_t* values, const uint8_t* scales, bool valid) {
    codes = make_uint2(0, 0);
    scale = 0;
    if (valid) {
      codes = *reinterpret_cast<const uint2*>(values);
      scale = *scales;
    }
  }
  // Eight of them (half 0 or 1) as 16-bit numbers.
  template <int kHalf>
  __device__ __forceinline__ uint4 expand() const {
    return expand_codes(kHalf == 0 ? codes.x : codes.y, scale);
  }
};

// The same of 16-bit rows, which stay as they are.
struct PlainValues {
  static constexpr float kPower = 1.0f;
  static constexpr int kBytes = 32;
  static constexpr int kAhead = 3;
  uint4 halves[2];

  __device__ __forceinline__ void load(const uint8_t* values, const uint8_t*, bool valid) {
    halves[0] = halves[1] = make_uint4(0, 0, 0, 0);
    if (valid) {
      halves[0] = reinterpret_cast<const uint4*>(values)[0];
      halves[1] = reinterpret_cast<const uint4*>(values)[1];
    }
  }
  template <int kHalf>
  __device__ __forceinline__ uint4 expand() const {
    return halves[kHalf];
  }
};

// What makes the expanded values of A, whichever they are, the true ones.
__device__ __forceinline__ float activation_power(const Params& p) {
  return p.activation_type == kActivationNvfp4 ? Nvfp4Values::kPower : PlainValues::kPower;
}

}  // namespace fp4rt
