// tcgen05, the tensor cores and Tensor Memory of Blackwell: one wrapper per PTX instruction.
// PTX ISA, "TensorCore 5th Generation Instructions". kCtas is the instruction's cta_group, the same
// in a whole kernel: 1, or 2 for pairs of CTAs (ranks 2i, 2i + 1 of a cluster) that multiply together.
//
// A Tensor Memory address has the lane in bits 31-16 and the 32-bit column in bits 15-0.
// `.sync.aligned` instructions must be executed by all 32 lanes of a warp together; mma, cp and
// commit by one and the same lane, since order among them is kept per thread.
#pragma once
#include <stdint.h>

#include "mbarrier.cuh"

namespace fp4rt::ptx {

// Whole warp, in each CTA of a pair. Allocates `columns` (a power of 2 from 32 to 512) of all 128
// lanes, waiting until they are free, and writes the address of the first to `result` in shared
// memory.
template <int kCtas>
__device__ __forceinline__ void tcgen05_alloc(uint32_t* result, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                   shared_address(result)),
               "r"(columns), "n"(kCtas)
               : "memory");
}

// Whole warp, in each CTA of a pair. Frees what tcgen05_alloc gave; required before the CTA exits.
template <int kCtas>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address),
               "r"(columns), "n"(kCtas)
               : "memory");
}

// Whole warp. This CTA will not allocate again, so that another one on the SM may.
template <int kCtas>
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kCtas)
               : "memory");
}

// Orders this thread's earlier tcgen05 operations before a following barrier or arrival.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// Orders this thread's later tcgen05 operations after an earlier barrier or wait.
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// Arrives once on `barrier`, of both CTAs of a pair, when all earlier mma and cp of this thread have
// completed; implies fence::before_thread_sync.
template <int kCtas>
__device__ __forceinline__ void tcgen05_commit(uint64_t* barrier) {
  if constexpr (kCtas == 1) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
            shared_address(barrier))
        : "memory");
  } else {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%0], %1;" ::"r"(shared_address(barrier)),
        "h"(static_cast<uint16_t>(3))
        : "memory");
  }
}

// Copies 32 rows of 16 bytes to 4 columns of lanes 0-31 and again to each other 32 lanes; in a pair,
// each CTA's rows to its own Tensor Memory.
template <int kCtas>
__device__ __forceinline__ void tcgen05_cp_32x128b_warpx4(uint32_t address, uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::%2.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor),
               "n"(kCtas)
               : "memory");
}

// D = A * B^T, plus D if `accumulate`: E2M1 elements from shared memory, one UE4M3 scale per 16 of
// them from Tensor Memory, K = 64, fp32 D in Tensor Memory. In a pair each CTA holds half the rows
// of A with their scales and of D, half the rows of B, and all of B's scales.
template <int kCtas>
__device__ __forceinline__ void tcgen05_mma_mxf4nvf4_block16(uint32_t d, uint64_t a, uint64_t b,
                                                             uint32_t instruction,
                                                             uint32_t a_scales, uint32_t b_scales,
                                                             bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::%7.kind::mxf4nvf4.block_scale.block16 "
      "[%0], %1, %2, %3, [%4], [%5], p;\n"
      "}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales),
      "r"(static_cast<uint32_t>(accumulate)), "n"(kCtas)
      : "memory");
}

// Whole warp. Lane t gets columns c .. c + 7 of Tensor Memory lane L + t, where `address` holds c
// and L = 32 * (warp in CTA % 4). The registers are valid after tcgen05_wait_ld.
__device__ __forceinline__ void tcgen05_ld_32x32b_x8(uint32_t (&r)[8], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7])
      : "r"(address)
      : "memory");
}

// The same for columns c .. c + 31.
__device__ __forceinline__ void tcgen05_ld_32x32b_x32(uint32_t (&r)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]),
        "=r"(r[14]), "=r"(r[15]), "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]),
        "=r"(r[21]), "=r"(r[22]), "=r"(r[23]), "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]),
        "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
      : "r"(address)
      : "memory");
}

// Whole warp. Lane t gets, of the 16 Tensor Memory lanes from L on and 8 columns from c on (`address`
// holds L, a multiple of 16 among this warp's, and c), those of lane L + t / 4 (registers kFirst and
// kFirst + 1) and of lane L + t / 4 + 8 (the next two): columns c + 2 (t % 4) and one further.
template <int kFirst, int kCount>
__device__ __forceinline__ void tcgen05_ld_16x256b_x1(uint32_t (&r)[kCount], uint32_t address) {
  static_assert(kFirst + 4 <= kCount);
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[kFirst]), "=r"(r[kFirst + 1]), "=r"(r[kFirst + 2]), "=r"(r[kFirst + 3])
               : "r"(address)
               : "memory");
}

// The same of four times 8 columns, four registers for each 8.
template <int kFirst, int kCount>
__device__ __forceinline__ void tcgen05_ld_16x256b_x4(uint32_t (&r)[kCount], uint32_t address) {
  static_assert(kFirst + 16 <= kCount);
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
      : "=r"(r[kFirst]), "=r"(r[kFirst + 1]), "=r"(r[kFirst + 2]), "=r"(r[kFirst + 3]),
        "=r"(r[kFirst + 4]), "=r"(r[kFirst + 5]), "=r"(r[kFirst + 6]), "=r"(r[kFirst + 7]),
        "=r"(r[kFirst + 8]), "=r"(r[kFirst + 9]), "=r"(r[kFirst + 10]), "=r"(r[kFirst + 11]),
        "=r"(r[kFirst + 12]), "=r"(r[kFirst + 13]), "=r"(r[kFirst + 14]), "=r"(r[kFirst + 15])
      : "r"(address)
      : "memory");
}

// Whole warp. Waits for this thread's earlier tcgen05 loads. The values are passed through, so that
// the compiler cannot use them earlier.
template <int kCount>
__device__ __forceinline__ void tcgen05_wait_ld(uint32_t (&r)[kCount]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i]));
}

// Shared-memory descriptor of K-major rows in 128-byte swizzled atoms of 8 rows x 128 bytes, 1024
// bytes apart. PTX ISA, "Shared memory descriptor": address and strides in units of 16 bytes, bits
// 46-48 constant 0b001, bits 61-63 = 2 mean 128-byte swizzle; the leading stride is ignored.
__device__ __forceinline__ uint64_t tcgen05_descriptor_128b(uint32_t shared_address) {
  constexpr uint64_t kStride = 1024 >> 4;
  return (uint64_t{2} << 61) | (uint64_t{1} << 46) | (kStride << 32) |
         ((shared_address & 0x3FFFF) >> 4);
}

// The same for rows of 16 bytes, 8 of them contiguous and 128 bytes apart, not swizzled: what
// tcgen05_cp_32x128b_warpx4 reads from 512 contiguous bytes.
__device__ __forceinline__ uint64_t tcgen05_descriptor_rows16(uint32_t shared_address) {
  constexpr uint64_t kStride = 128 >> 4;
  return (uint64_t{1} << 46) | (kStride << 32) | ((shared_address & 0x3FFFF) >> 4);
}

// Instruction descriptor of kind::mxf4nvf4 with E2M1 operands (type code 1), UE4M3 scales (bit 23
// is 0), M = 128 for each CTA (M / 128 at bit 27) and N a multiple of 8 for each, from 8 to 256 in
// all (N / 8 at bit 17).
template <int kCtas>
__device__ __forceinline__ uint32_t tcgen05_instruction_mxf4nvf4(uint32_t n) {
  return (uint32_t{kCtas} << 27) | (n >> 3 << 17) | (1u << 10) | (1u << 7);
}

}  // namespace fp4rt::ptx
