// wgmma: one wrapper per PTX instruction. A (64 rows x 16) comes from registers, B (16 x N) from
// shared memory, fp32 accumulators. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// Fragment of lane l of warp w in the warpgroup, r = l / 4, c = l % 4:
//   A: a[0] = row 16w + r, k = 2c, 2c + 1     a[1] = row 16w + r + 8, the same k
//      a[2] = row 16w + r, k = 2c + 8, 2c + 9 a[3] = row 16w + r + 8, the same k
//   D: d[4j + 0, 1] = row 16w + r, columns 8j + 2c, 8j + 2c + 1     d[4j + 2, 3] = row 16w + r + 8
#pragma once
#include <stdint.h>

namespace fp4rt::ptx {

// Orders register and shared-memory accesses of this warpgroup before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared-memory descriptor of a K-major operand in 128-byte swizzled atoms of 8 rows x 128 bytes
// that lie 1024 bytes apart. PTX ISA, "Matrix Descriptor Format": start address and strides in
// units of 16 bytes; bits 62-63 = 1 mean 128-byte swizzle; swizzled modes ignore the leading stride.
__device__ __forceinline__ uint64_t wgmma_descriptor_128b(uint32_t shared_address) {
  constexpr uint64_t kStride = 1024 >> 4;
  return (uint64_t{1} << 62) | (kStride << 32) | (uint64_t{1} << 16) |
         ((shared_address & 0x3FFFF) >> 4);
}

// wgmma_m64nNk16_f16 / _bf16: d += a * b, for N = 8, 16, ..., 256.
template <int kN>
struct Wgmma;

#define FP4RT_ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FP4RT_TEXT_8 "%0, %1, %2, %3"
#define FP4RT_TEXT_16 FP4RT_TEXT_8 ", %4, %5, %6, %7"
#define FP4RT_TEXT_24 FP4RT_TEXT_16 ", %8, %9, %10, %11"
#define FP4RT_TEXT_32 FP4RT_TEXT_24 ", %12, %13, %14, %15"
#define FP4RT_TEXT_40 FP4RT_TEXT_32 ", %16, %17, %18, %19"
#define FP4RT_TEXT_48 FP4RT_TEXT_40 ", %20, %21, %22, %23"
#define FP4RT_TEXT_56 FP4RT_TEXT_48 ", %24, %25, %26, %27"
#define FP4RT_TEXT_64 FP4RT_TEXT_56 ", %28, %29, %30, %31"
#define FP4RT_TEXT_72 FP4RT_TEXT_64 ", %32, %33, %34, %35"
#define FP4RT_TEXT_80 FP4RT_TEXT_72 ", %36, %37, %38, %39"
#define FP4RT_TEXT_88 FP4RT_TEXT_80 ", %40, %41, %42, %43"
#define FP4RT_TEXT_96 FP4RT_TEXT_88 ", %44, %45, %46, %47"
#define FP4RT_TEXT_104 FP4RT_TEXT_96 ", %48, %49, %50, %51"
#define FP4RT_TEXT_112 FP4RT_TEXT_104 ", %52, %53, %54, %55"
#define FP4RT_TEXT_120 FP4RT_TEXT_112 ", %56, %57, %58, %59"
#define FP4RT_TEXT_128 FP4RT_TEXT_120 ", %60, %61, %62, %63"
#define FP4RT_TEXT_136 FP4RT_TEXT_128 ", %64, %65, %66, %67"
#define FP4RT_TEXT_144 FP4RT_TEXT_136 ", %68, %69, %70, %71"
#define FP4RT_TEXT_152 FP4RT_TEXT_144 ", %72, %73, %74, %75"
#define FP4RT_TEXT_160 FP4RT_TEXT_152 ", %76, %77, %78, %79"
#define FP4RT_TEXT_168 FP4RT_TEXT_160 ", %80, %81, %82, %83"
#define FP4RT_TEXT_176 FP4RT_TEXT_168 ", %84, %85, %86, %87"
#define FP4RT_TEXT_184 FP4RT_TEXT_176 ", %88, %89, %90, %91"
#define FP4RT_TEXT_192 FP4RT_TEXT_184 ", %92, %93, %94, %95"
#define FP4RT_TEXT_200 FP4RT_TEXT_192 ", %96, %97, %98, %99"
#define FP4RT_TEXT_208 FP4RT_TEXT_200 ", %100, %101, %102, %103"
#define FP4RT_TEXT_216 FP4RT_TEXT_208 ", %104, %105, %106, %107"
#define FP4RT_TEXT_224 FP4RT_TEXT_216 ", %108, %109, %110, %111"
#define FP4RT_TEXT_232 FP4RT_TEXT_224 ", %112, %113, %114, %115"
#define FP4RT_TEXT_240 FP4RT_TEXT_232 ", %116, %117, %118, %119"
#define FP4RT_TEXT_248 FP4RT_TEXT_240 ", %120, %121, %122, %123"
#define FP4RT_TEXT_256 FP4RT_TEXT_248 ", %124, %125, %126, %127"
#define FP4RT_ACC_8 FP4RT_ACC4(0)
#define FP4RT_ACC_16 FP4RT_ACC_8, FP4RT_ACC4(4)
#define FP4RT_ACC_24 FP4RT_ACC_16, FP4RT_ACC4(8)
#define FP4RT_ACC_32 FP4RT_ACC_24, FP4RT_ACC4(12)
#define FP4RT_ACC_40 FP4RT_ACC_32, FP4RT_ACC4(16)
#define FP4RT_ACC_48 FP4RT_ACC_40, FP4RT_ACC4(20)
#define FP4RT_ACC_56 FP4RT_ACC_48, FP4RT_ACC4(24)
#define FP4RT_ACC_64 FP4RT_ACC_56, FP4RT_ACC4(28)
#define FP4RT_ACC_72 FP4RT_ACC_64, FP4RT_ACC4(32)
#define FP4RT_ACC_80 FP4RT_ACC_72, FP4RT_ACC4(36)
#define FP4RT_ACC_88 FP4RT_ACC_80, FP4RT_ACC4(40)
#define FP4RT_ACC_96 FP4RT_ACC_88, FP4RT_ACC4(44)
#define FP4RT_ACC_104 FP4RT_ACC_96, FP4RT_ACC4(48)
#define FP4RT_ACC_112 FP4RT_ACC_104, FP4RT_ACC4(52)
#define FP4RT_ACC_120 FP4RT_ACC_112, FP4RT_ACC4(56)
#define FP4RT_ACC_128 FP4RT_ACC_120, FP4RT_ACC4(60)
#define FP4RT_ACC_136 FP4RT_ACC_128, FP4RT_ACC4(64)
#define FP4RT_ACC_144 FP4RT_ACC_136, FP4RT_ACC4(68)
#define FP4RT_ACC_152 FP4RT_ACC_144, FP4RT_ACC4(72)
#define FP4RT_ACC_160 FP4RT_ACC_152, FP4RT_ACC4(76)
#define FP4RT_ACC_168 FP4RT_ACC_160, FP4RT_ACC4(80)
#define FP4RT_ACC_176 FP4RT_ACC_168, FP4RT_ACC4(84)
#define FP4RT_ACC_184 FP4RT_ACC_176, FP4RT_ACC4(88)
#define FP4RT_ACC_192 FP4RT_ACC_184, FP4RT_ACC4(92)
#define FP4RT_ACC_200 FP4RT_ACC_192, FP4RT_ACC4(96)
#define FP4RT_ACC_208 FP4RT_ACC_200, FP4RT_ACC4(100)
#define FP4RT_ACC_216 FP4RT_ACC_208, FP4RT_ACC4(104)
#define FP4RT_ACC_224 FP4RT_ACC_216, FP4RT_ACC4(108)
#define FP4RT_ACC_232 FP4RT_ACC_224, FP4RT_ACC4(112)
#define FP4RT_ACC_240 FP4RT_ACC_232, FP4RT_ACC4(116)
#define FP4RT_ACC_248 FP4RT_ACC_240, FP4RT_ACC4(120)
#define FP4RT_ACC_256 FP4RT_ACC_248, FP4RT_ACC4(124)

#define FP4RT_WGMMA_TEXT(n, type, text, a0, a1, a2, a3, b)                                        \
  "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                     \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" text "}, "                 \
  "{" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, 0;\n}"

#define FP4RT_WGMMA(n, text, acc, a0, a1, a2, a3, b)                                              \
  template <>                                                                                     \
  struct Wgmma<n> {                                                                               \
    template <bool kBf16>                                                                         \
    static __device__ __forceinline__ void mma(float* d, const uint32_t (&a)[4], uint64_t desc) { \
      if constexpr (kBf16) {                                                                      \
        asm volatile(FP4RT_WGMMA_TEXT(n, "bf16", text, a0, a1, a2, a3, b)                         \
                     : acc                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc));                    \
      } else {                                                                                    \
        asm volatile(FP4RT_WGMMA_TEXT(n, "f16", text, a0, a1, a2, a3, b)                          \
                     : acc                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc));                    \
      }                                                                                           \
    }                                                                                             \
  };

FP4RT_WGMMA(8, FP4RT_TEXT_8, FP4RT_ACC_8, "%4", "%5", "%6", "%7", "%8")
FP4RT_WGMMA(16, FP4RT_TEXT_16, FP4RT_ACC_16, "%8", "%9", "%10", "%11", "%12")
FP4RT_WGMMA(24, FP4RT_TEXT_24, FP4RT_ACC_24, "%12", "%13", "%14", "%15", "%16")
FP4RT_WGMMA(32, FP4RT_TEXT_32, FP4RT_ACC_32, "%16", "%17", "%18", "%19", "%20")
FP4RT_WGMMA(40, FP4RT_TEXT_40, FP4RT_ACC_40, "%20", "%21", "%22", "%23", "%24")
FP4RT_WGMMA(48, FP4RT_TEXT_48, FP4RT_ACC_48, "%24", "%25", "%26", "%27", "%28")
FP4RT_WGMMA(56, FP4RT_TEXT_56, FP4RT_ACC_56, "%28", "%29", "%30", "%31", "%32")
FP4RT_WGMMA(64, FP4RT_TEXT_64, FP4RT_ACC_64, "%32", "%33", "%34", "%35", "%36")
FP4RT_WGMMA(72, FP4RT_TEXT_72, FP4RT_ACC_72, "%36", "%37", "%38", "%39", "%40")
FP4RT_WGMMA(80, FP4RT_TEXT_80, FP4RT_ACC_80, "%40", "%41", "%42", "%43", "%44")
FP4RT_WGMMA(88, FP4RT_TEXT_88, FP4RT_ACC_88, "%44", "%45", "%46", "%47", "%48")
FP4RT_WGMMA(96, FP4RT_TEXT_96, FP4RT_ACC_96, "%48", "%49", "%50", "%51", "%52")
FP4RT_WGMMA(104, FP4RT_TEXT_104, FP4RT_ACC_104, "%52", "%53", "%54", "%55", "%56")
FP4RT_WGMMA(112, FP4RT_TEXT_112, FP4RT_ACC_112, "%56", "%57", "%58", "%59", "%60")
FP4RT_WGMMA(120, FP4RT_TEXT_120, FP4RT_ACC_120, "%60", "%61", "%62", "%63", "%64")
FP4RT_WGMMA(128, FP4RT_TEXT_128, FP4RT_ACC_128, "%64", "%65", "%66", "%67", "%68")
FP4RT_WGMMA(136, FP4RT_TEXT_136, FP4RT_ACC_136, "%68", "%69", "%70", "%71", "%72")
FP4RT_WGMMA(144, FP4RT_TEXT_144, FP4RT_ACC_144, "%72", "%73", "%74", "%75", "%76")
FP4RT_WGMMA(152, FP4RT_TEXT_152, FP4RT_ACC_152, "%76", "%77", "%78", "%79", "%80")
FP4RT_WGMMA(160, FP4RT_TEXT_160, FP4RT_ACC_160, "%80", "%81", "%82", "%83", "%84")
FP4RT_WGMMA(168, FP4RT_TEXT_168, FP4RT_ACC_168, "%84", "%85", "%86", "%87", "%88")
FP4RT_WGMMA(176, FP4RT_TEXT_176, FP4RT_ACC_176, "%88", "%89", "%90", "%91", "%92")
FP4RT_WGMMA(184, FP4RT_TEXT_184, FP4RT_ACC_184, "%92", "%93", "%94", "%95", "%96")
FP4RT_WGMMA(192, FP4RT_TEXT_192, FP4RT_ACC_192, "%96", "%97", "%98", "%99", "%100")
FP4RT_WGMMA(200, FP4RT_TEXT_200, FP4RT_ACC_200, "%100", "%101", "%102", "%103", "%104")
FP4RT_WGMMA(208, FP4RT_TEXT_208, FP4RT_ACC_208, "%104", "%105", "%106", "%107", "%108")
FP4RT_WGMMA(216, FP4RT_TEXT_216, FP4RT_ACC_216, "%108", "%109", "%110", "%111", "%112")
FP4RT_WGMMA(224, FP4RT_TEXT_224, FP4RT_ACC_224, "%112", "%113", "%114", "%115", "%116")
FP4RT_WGMMA(232, FP4RT_TEXT_232, FP4RT_ACC_232, "%116", "%117", "%118", "%119", "%120")
FP4RT_WGMMA(240, FP4RT_TEXT_240, FP4RT_ACC_240, "%120", "%121", "%122", "%123", "%124")
FP4RT_WGMMA(248, FP4RT_TEXT_248, FP4RT_ACC_248, "%124", "%125", "%126", "%127", "%128")
FP4RT_WGMMA(256, FP4RT_TEXT_256, FP4RT_ACC_256, "%128", "%129", "%130", "%131", "%132")

}  // namespace fp4rt::ptx
