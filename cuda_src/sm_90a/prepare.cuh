// prepare: the first of a plan's two kernels on Hopper.
//
//   1. Prefix sums over group_sizes: where each group's rows are in A, in the prepared A and in D.
//   2. A -> fp16 (or the given 16-bit values) in wgmma's 128-byte swizzled atoms of 8 rows x 64 K.
//      A group is padded to a multiple of 8 rows and 64 K, with zeros. Its atoms lie K-block by
//      K-block, rows innermost, so a token tile of T rows x 64 K is one contiguous run of T * 128
//      bytes: one bulk copy, no tensor map, 64-bit addresses.
//   3. The tile counter of grouped_gemm is reset.
//
// Every CTA walks all groups in chunks of one per thread and expands its share of each chunk.
#pragma once
#include <stdint.h>

#include "../common/nvfp4.cuh"
#include "../common/raw_rows.cuh"
#include "../generated/abi.h"
#include "../ptx/cluster.cuh"

namespace fp4rt {

constexpr int kPrepareThreads = 256;
constexpr int kPrepareCtasPerSm = 3;
constexpr int kItemAtoms = 4;  // atoms that a warp expands in one go: 8 rows x 256 K
constexpr int kAtomBytes = 1024;

// Running totals over groups.
struct Extent {
  int64_t items;     // work items of this kernel
  int64_t rows;      // rows of A as given
  int64_t atoms;     // atoms of the prepared A
  int64_t elements;  // elements of D

  __device__ Extent operator+(const Extent& other) const {
    return {items + other.items, rows + other.rows, atoms + other.atoms,
            elements + other.elements};
  }
};

__device__ __forceinline__ Extent shuffle_up(const Extent& e, int step) {
  return {__shfl_up_sync(~0u, e.items, step), __shfl_up_sync(~0u, e.rows, step),
          __shfl_up_sync(~0u, e.atoms, step), __shfl_up_sync(~0u, e.elements, step)};
}

__device__ __forceinline__ Extent group_extent(int64_t size, int n, int k) {
  const int64_t row_atoms = (size + 7) / 8;
  const int k_atoms = (k + 63) / 64;
  return {row_atoms * ((k_atoms + kItemAtoms - 1) / kItemAtoms), size, row_atoms * k_atoms,
          size * n};
}

struct PrepareStorage {
  Extent warp_totals[kPrepareThreads / 32];
  int64_t item_start[kPrepareThreads + 1];  // before each group of the chunk, and the end
  int64_t row_start[kPrepareThreads];
  int64_t atom_start[kPrepareThreads];
  int size[kPrepareThreads];
  int k[kPrepareThreads];
};

// Eight elements of A as given, NVFP4 or 16-bit values, that become one 16-byte piece.
template <bool kNvfp4>
struct RawPiece;

template <>
struct RawPiece<true> {
  uint32_t codes = 0;
  uint32_t scale = 0;

  __device__ __forceinline__ void load(const Params& p, int64_t piece) {
    codes = reinterpret_cast<const uint32_t*>(p.a_values)[piece];
    scale = p.a_scales[piece / 2];
  }
  // The values times Nvfp4Values::kPower, as there.
  __device__ __forceinline__ uint4 expand() const { return expand_codes(codes, scale); }
};

template <>
struct RawPiece<false> {
  uint4 values = {0, 0, 0, 0};

  __device__ __forceinline__ void load(const Params& p, int64_t piece) {
    values = reinterpret_cast<const uint4*>(p.a_values)[piece];
  }
  __device__ __forceinline__ uint4 expand() const { return values; }
};

// Expands 8 rows x 256 K of a group. Lane = piece of 8 elements in a row of 64 K + 8 * row, for rows
// 0-3 and 4-7 of an atom in turn, so that every store writes whole 128-byte lines.
template <bool kNvfp4>
__device__ __forceinline__ void expand_item(const Params& p, uint32_t item, int64_t row_start,
                                            int64_t atom_start, int size, int k) {
  const int lane = threadIdx.x % 32;
  const uint32_t row_atoms = (uint32_t(size) + 7) / 8;
  const int k_atoms = (k + 63) / 64;
  const uint32_t column = item / row_atoms;
  const uint32_t row_atom = item - column * row_atoms;
  const int in_piece = lane % 8;
  const int row_pieces = k / 8;
  for (int first = column * kItemAtoms; first < (column + 1) * kItemAtoms; first += kItemAtoms) {
    RawPiece<kNvfp4> raw[kItemAtoms][2];
#pragma unroll
    for (int i = 0; i < kItemAtoms; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t row = row_atom * 8 + half * 4 + lane / 8;
        const int piece = (first + i) * 8 + in_piece;
        if (row < uint32_t(size) && piece < row_pieces) {
          raw[i][half].load(p, (row_start + row) * (p.a_pitch / 8) + piece);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kItemAtoms; ++i) {
      if (first + i >= k_atoms) return;
      const int64_t atom = atom_start + int64_t{row_atoms} * (first + i) + row_atom;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int in_row = half * 4 + lane / 8;
        uint4* to = reinterpret_cast<uint4*>(p.a_prepared + atom * kAtomBytes + in_row * 128);
        to[in_piece ^ in_row] = raw[i][half].expand();  // 128-byte swizzle: piece XOR row
      }
    }
  }
}

template <bool kNvfp4>
__device__ __forceinline__ void prepare_activations(const Params& p, PrepareStorage& s) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x == 0 && thread == 0) p.schedule[0] = 0;

  Extent before{};
  for (int chunk = 0; chunk < p.num_groups; chunk += kPrepareThreads) {
    // 1. Exclusive prefix sums of the chunk, one group per thread.
    const int g = chunk + thread;
    int size = 0, k = 0;
    Extent own{};
    if (g < p.num_groups) {
      size = max(p.group_sizes[g], 0);
      k = p.groups[g].k;
      own = group_extent(size, p.groups[g].n, k);
    }
    Extent sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const Extent below = shuffle_up(sum, step);
      if (lane >= step) sum = sum + below;
    }
    if (lane == 31) s.warp_totals[warp] = sum;
    __syncthreads();
    Extent start = before;
    for (int w = 0; w < kPrepareThreads / 32; ++w) {
      if (w < warp) start = start + s.warp_totals[w];
      before = before + s.warp_totals[w];
    }
    const int64_t end_items = start.items + sum.items;
    start = {end_items - own.items, start.rows + sum.rows - own.rows,
             start.atoms + sum.atoms - own.atoms, start.elements + sum.elements - own.elements};
    s.item_start[thread] = start.items;
    s.row_start[thread] = start.rows;
    s.atom_start[thread] = start.atoms;
    s.size[thread] = size;
    s.k[thread] = k;
    if (thread == kPrepareThreads - 1) s.item_start[kPrepareThreads] = end_items;
    if (blockIdx.x == 0 && g < p.num_groups) {
      p.group_starts[g] = {start.atoms * kAtomBytes, start.elements, start.rows};
    }
    __syncthreads();

    // 2. This CTA's share of the chunk's items, one per warp, round robin over all warps.
    const int64_t warps = int64_t{gridDim.x} * (kPrepareThreads / 32);
    const int64_t first = s.item_start[0], last = s.item_start[kPrepareThreads];
    const int64_t self = int64_t{blockIdx.x} + int64_t{gridDim.x} * warp;
    int64_t item = first + (self + warps - first % warps) % warps;
    for (; item < last; item += warps) {
      int low = 0;  // the last group that starts at or before the item
#pragma unroll
      for (int step = kPrepareThreads / 2; step > 0; step /= 2) {
        if (s.item_start[low + step] <= item) low += step;
      }
      expand_item<kNvfp4>(p, item - s.item_start[low], s.row_start[low], s.atom_start[low],
                          s.size[low], s.k[low]);
    }
    __syncthreads();
  }
}

}  // namespace fp4rt

extern "C" __global__ void __launch_bounds__(fp4rt::kPrepareThreads, fp4rt::kPrepareCtasPerSm)
    prepare(const __grid_constant__ fp4rt::Params p) {
  __shared__ fp4rt::PrepareStorage storage;
  if (p.activation_type == fp4rt::kActivationNvfp4) {
    fp4rt::prepare_activations<true>(p, storage);
  } else {
    fp4rt::prepare_activations<false>(p, storage);
  }
}
FP4RT_SMEM_BYTES(prepare, 0);
