// E2M1 and E4M3 decoding in registers, for hardware without an FP4 matrix unit.
//
// The fp16 pattern s000eem0'00000000 is the E2M1 number times 2^-14, zero and the subnormal 0.5
// included. Times an E4M3 scale it stays exact: the product has at most 6 significant bits and fp16
// holds down to 2^-24.
#pragma once
#include <stdint.h>

namespace fp4rt {

// Low (kHalf = 0) or high half of `bytes`, an E4M3 pair (low byte first) -> fp16 pair, exact; NaN
// stays NaN.
template <int kHalf>
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint32_t bytes) {
  uint32_t result;
  asm("{\n"
      ".reg .b16 half0, half1;\n"
      "mov.b32 {half0, half1}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, half%2;\n"
      "}"
      : "=r"(result)
      : "r"(bytes), "n"(kHalf));
  return result;
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Both halves of the result are the low (or high) half of `pair`: an operand modifier of HMUL2, not
// an instruction, if it is written as moves of halves.
__device__ __forceinline__ uint32_t broadcast_low(uint32_t pair) {
  uint32_t result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
      : "=r"(result)
      : "r"(pair));
  return result;
}
__device__ __forceinline__ uint32_t broadcast_high(uint32_t pair) {
  uint32_t result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
      : "=r"(result)
      : "r"(pair));
  return result;
}

// fp16 pair -> bf16 pair; exact for at most 8 significant bits.
__device__ __forceinline__ uint32_t f16x2_to_bf16x2(uint32_t pair) {
  uint32_t result;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .f32 x, y;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.f32.f16 x, low;\n"
      "cvt.f32.f16 y, high;\n"
      "cvt.rn.bf16x2.f32 %0, y, x;\n"
      "}"
      : "=r"(result)
      : "r"(pair));
  return result;
}

// Byte with two codes (first in the low nibble) -> fp16 pair times 2^-14.
__device__ __forceinline__ uint32_t e2m1x2_to_f16x2(uint32_t byte) {
  const uint32_t spread = byte | (byte << 12);  // codes at bits 0 and 16
  return ((spread << 12) & 0x80008000u) | ((spread << 9) & 0x0E000E00u);
}

// Eight codes as users give them (the first in the lowest nibble) -> four fp16 pairs in their order,
// times 2^-14.
__device__ __forceinline__ void decode_plain_word(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t even = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0E0E0E0Eu);
  const uint32_t odd = (word & 0x80808080u) | ((word >> 3) & 0x0E0E0E0Eu);
  const uint32_t low = __byte_perm(even, odd, 0x5140);   // codes 0 to 3
  const uint32_t high = __byte_perm(even, odd, 0x7362);  // codes 4 to 7
  pairs[0] = __byte_perm(low, 0, 0x1404);
  pairs[1] = __byte_perm(low, 0, 0x3424);
  pairs[2] = __byte_perm(high, 0, 0x1404);
  pairs[3] = __byte_perm(high, 0, 0x3424);
}

// One word of the weight layout (layout.py, `hopper_blocks`) -> four fp16 pairs times 2^-14.
// In each byte the first code is at bits 7, 3..1 (sign first) and the second at bits 0, 6..4.
__device__ __forceinline__ void decode_weight_word(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t second = ((word << 7) & 0x80808080u) | ((word >> 3) & 0x0E0E0E0Eu);
  pairs[0] = word & 0x8E008E00u;         // first codes of bytes 1 and 3
  pairs[1] = (word << 8) & 0x8E008E00u;  // first codes of bytes 0 and 2
  pairs[2] = second & 0xFF00FF00u;       // second codes of bytes 1 and 3
  pairs[3] = __byte_perm(second, 0, 0x2404);  // second codes of bytes 0 and 2
}

}  // namespace fp4rt
