// Accumulators -> times scale -> output type -> rows of D.
//
// A warpgroup holds a block of 64 columns of D (wgmma's rows: the weights are operand A) by up to
// 8 * kBlocks rows of D (tokens). It goes through shared memory in passes so that global stores are
// whole 16-byte pieces of a row. Rows beyond `rows` and columns beyond `columns` are not written.
#pragma once
#include <stdint.h>

#include "../generated/abi.h"
#include "../ptx/cluster.cuh"
#include "../ptx/mma_sync.cuh"
#include "../ptx/mbarrier.cuh"

namespace fp4rt {

constexpr int kEpilogueBytes = 4096;  // shared memory per warpgroup

// Where a tile's block of D goes.
struct OutputBlock {
  char* d;          // address of its first element
  int64_t pitch;    // elements from row to row
  int rows;         // valid rows (tokens)
  int columns;      // valid columns, may be <= 0 or > 64
  float scale;      // multiplies the accumulator after `power`
  float power;      // a power of two, multiplied first: exact
};

// (low, high) -> a pair of 16-bit floats, round to nearest even, overflow to infinity.
template <bool kBf16>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t pair;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// Copies kRows staged rows (first is row `row0` of the block) to D. The staged row t is 64 elements;
// its 16-byte piece i lies at piece i ^ swizzle(t).
template <typename Element, int kRows, typename Swizzle>
__device__ __forceinline__ void copy_rows(const char* staging, const OutputBlock& out, int row0,
                                          int thread, Swizzle swizzle) {
  constexpr int kPieces = 64 * sizeof(Element) / 16;  // of 16 bytes in a row
  constexpr int kPerPiece = 16 / sizeof(Element);
  const bool vector = (reinterpret_cast<uint64_t>(out.d) | (out.pitch * sizeof(Element))) % 16 == 0 &&
                      (out.columns >= 64 || out.columns % kPerPiece == 0);
#pragma unroll
  for (int i = 0; i < kRows * kPieces / 128; ++i) {
    const int t = (i * 128 + thread) / kPieces;
    const int piece = (i * 128 + thread) % kPieces;
    const int row = row0 + t;
    const int column = piece * kPerPiece;
    if (row >= out.rows || column >= out.columns) continue;
    const char* from = staging + t * (64 * sizeof(Element)) + ((piece ^ swizzle(t)) * 16);
    Element* to = reinterpret_cast<Element*>(out.d) + row * out.pitch + column;
    if (vector) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      const int count = min(kPerPiece, out.columns - column);
      for (int e = 0; e < count; ++e) to[e] = reinterpret_cast<const Element*>(from)[e];
    }
  }
}

// One m64 block of accumulators (wgmma.cuh gives the fragment) as 16-bit floats.
template <bool kBf16, int kBlocks>
__device__ __forceinline__ void store_16bit(const float (&acc)[kBlocks * 4], char* staging,
                                            const OutputBlock& out, int thread, int barrier) {
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int pass = 0; pass < (kBlocks + 3) / 4; ++pass) {
    if (pass * 32 >= out.rows) break;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t r[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {  // tokens 8 (2 pair + m / 2) .., columns 16 warp + 8 (m % 2) ..
        const int j = pass * 4 + pair * 2 + m / 2;
        r[m] = 0;
        if (j >= kBlocks) continue;
        const float* a = &acc[j * 4 + (m % 2) * 2];
        r[m] = pack_pair<kBf16>(a[0] * out.power * out.scale, a[1] * out.power * out.scale);
      }
      const int t = pair * 16 + (lane / 16) * 8 + lane % 8;
      const int piece = (warp * 2 + (lane / 8) % 2) ^ (t % 8);
      ptx::stmatrix_x4_trans(ptx::shared_address(staging) + t * 128 + piece * 16, r[0], r[1], r[2],
                             r[3]);
    }
    ptx::barrier_sync(barrier, 128);
    copy_rows<uint16_t, 32>(staging, out, pass * 32, thread, [](int t) { return t % 8; });
    ptx::barrier_sync(barrier, 128);
  }
}

// The same as fp32.
template <int kBlocks>
__device__ __forceinline__ void store_float(const float (&acc)[kBlocks * 4], char* staging,
                                            const OutputBlock& out, int thread, int barrier) {
  const int warp = thread / 32, lane = thread % 32;
  const auto swizzle = [](int t) { return (t / 2 % 4) * 2; };
  float* tile = reinterpret_cast<float*>(staging);
#pragma unroll
  for (int pass = 0; pass < (kBlocks + 1) / 2; ++pass) {
    if (pass * 16 >= out.rows) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // acc[4j + i % 4], j = 2 pass + i / 4
      if (pass * 8 + i >= kBlocks * 4) break;
      const int t = (i / 4) * 8 + (lane % 4) * 2 + i % 2;
      const int column = warp * 16 + (i / 2 % 2) * 8 + lane / 4;
      tile[t * 64 + ((column / 4) ^ swizzle(t)) * 4 + column % 4] =
          acc[pass * 8 + i] * out.power * out.scale;
    }
    ptx::barrier_sync(barrier, 128);
    copy_rows<float, 16>(staging, out, pass * 16, thread, swizzle);
    ptx::barrier_sync(barrier, 128);
  }
}

// Stores one m64 block as `output_type` (kOutput...). Called by the 128 threads of a warpgroup, which
// own `staging` (kEpilogueBytes, 16-byte aligned) and barrier number `barrier`.
template <int kBlocks>
__device__ __forceinline__ void store_block(const float (&acc)[kBlocks * 4], int output_type,
                                            char* staging, const OutputBlock& out, int thread,
                                            int barrier) {
  if (output_type == kOutputFloat16) {
    store_16bit<false, kBlocks>(acc, staging, out, thread, barrier);
  } else if (output_type == kOutputBfloat16) {
    store_16bit<true, kBlocks>(acc, staging, out, thread, barrier);
  } else {
    store_float<kBlocks>(acc, staging, out, thread, barrier);
  }
}

}  // namespace fp4rt
