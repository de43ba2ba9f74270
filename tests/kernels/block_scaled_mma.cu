// The block-scaled FP4 MMA by itself: shows that an sm_100f image may carry it.
#include <stdint.h>

extern "C" __global__ void block_scaled_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc,
                                            uint32_t scales_a, uint32_t scales_b) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.u32 accumulate, %3, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16"
      " [%0], %1, %2, %3, [%4], [%5], accumulate;\n"
      "}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(idesc), "r"(scales_a), "r"(scales_b));
}
