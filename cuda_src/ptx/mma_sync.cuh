// Warp-level matrix instructions: one wrapper per PTX instruction.
// PTX ISA, "Warp Level Matrix Instructions: mma, ldmatrix, stmatrix".
#pragma once
#include <stdint.h>

namespace fp4rt::ptx {

// d += a * b with A 16 x 16 (fragment as in wgmma.cuh), B 16 x 8, D 16 x 8, lane l, c = l % 4:
// b[0] = rows 2c, 2c + 1 of column l / 4, b[1] = rows 2c + 8, 2c + 9.
template <bool kBf16>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Loads four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix
// l / 8 and gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements, each transposed; addresses as for ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared_address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same for two matrices; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t shared_address, uint32_t r0,
                                                  uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                   shared_address),
               "r"(r0), "r"(r1)
               : "memory");
}

}  // namespace fp4rt::ptx
