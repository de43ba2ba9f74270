// A ring of shared-memory slots guarded by full and empty barriers.
#pragma once
#include <stdint.h>

namespace fp4rt {

// A position in the ring. `phase` is the parity to wait for on a full barrier, its complement that
// for an empty one (the first round of a ring passes at once). One register: where kSlots is a power
// of two the count of steps, otherwise slot + 32 * phase.
template <int kSlots>
struct RingCursor {
  static_assert(kSlots < 32, "slot and phase share a register");
  static constexpr bool kPowerOfTwo = (kSlots & (kSlots - 1)) == 0;
  uint32_t state = 0;
  __device__ __forceinline__ int slot() const { return state % (kPowerOfTwo ? kSlots : 32); }
  __device__ __forceinline__ uint32_t phase() const {
    return state / (kPowerOfTwo ? kSlots : 32) % 2;
  }
  __device__ __forceinline__ void advance() {
    ++state;
    if (!kPowerOfTwo && slot() == kSlots) state = (state ^ 32) & 32;
  }
};

}  // namespace fp4rt
