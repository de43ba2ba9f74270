"""What host and kernels must agree on: parameter structs, shared constants, kernel variants.

Each fact is declared once, here. Python packs records with the numpy dtypes (``PARAMS.dtype``);
``build.py`` writes the same declarations to ``cuda_src/generated/abi.h`` with a static_assert on
every size, alignment and offset. The ABI hash goes into the manifest of the built kernels, so a
kernel that was built against other declarations is refused instead of misread.

To add a struct, declare a `Struct` and append it to `STRUCTS` (one that contains another comes
after it). To add a field, append a `Field`: its type is a key of `C_TYPES`, ``"tensor_map"``,
``"ptr<T>"`` for a device address (uint64 in numpy, ``T*`` in C++), or a `Struct`. To share an
integer, add it to `CONSTANTS`. To add a kernel, append a `Variant` to `VARIANTS`. Then run
``python build.py``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

C_TYPES: dict[str, tuple[str, type[np.generic]]] = {
    "i8": ("int8_t", np.int8),
    "u8": ("uint8_t", np.uint8),
    "i16": ("int16_t", np.int16),
    "u16": ("uint16_t", np.uint16),
    "i32": ("int32_t", np.int32),
    "u32": ("uint32_t", np.uint32),
    "i64": ("int64_t", np.int64),
    "u64": ("uint64_t", np.uint64),
    "f32": ("float", np.float32),
    "f64": ("double", np.float64),
}
"""Name of a scalar field type -> (C++ type, numpy type); C aligns each to its own size."""

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64


@dataclass(frozen=True)
class Field:
    """A member of a `Struct`.

    Parameters
    ----------
    name
        Name on both sides.
    type
        A key of `C_TYPES`, ``"tensor_map"``, ``"ptr<T>"`` with a C++ type T, or a `Struct`.
    comment
        What it holds; goes into the generated header.
    count
        Length of an array member; None for a single one.
    """

    name: str
    type: str | Struct
    comment: str = ""
    count: int | None = None

    @property
    def pointee(self) -> str | None:
        """The T of ``"ptr<T>"``, otherwise None."""
        if isinstance(self.type, str) and self.type.startswith("ptr<") and self.type[-1] == ">":
            return self.type[4:-1]
        return None

    @property
    def cpp_type(self) -> str:
        """The C++ type of one element."""
        if isinstance(self.type, Struct):
            return self.type.name
        if self.pointee is not None:
            return f"{self.pointee}*"
        return "TensorMap" if self.type == "tensor_map" else C_TYPES[self.type][0]

    @property
    def alignment(self) -> int:
        """Alignment in bytes."""
        if isinstance(self.type, Struct):
            return self.type.alignment
        if self.type == "tensor_map":
            return TENSOR_MAP_ALIGNMENT
        return self._element.itemsize

    @property
    def _element(self) -> np.dtype[Any]:
        if isinstance(self.type, Struct):
            return self.type.dtype
        if self.pointee is not None:
            return np.dtype(np.uint64)
        if self.type == "tensor_map":
            return np.dtype((np.uint8, (TENSOR_MAP_BYTES,)))
        if self.type not in C_TYPES:
            known = ", ".join([*C_TYPES, "tensor_map", "ptr<T>"])
            raise ValueError(f"field {self.name!r} has type {self.type!r}; use one of {known}")
        return np.dtype(C_TYPES[self.type][1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype, a subarray for an array member."""
        if self.count is None:
            return self._element
        if self.count < 1:
            raise ValueError(f"field {self.name!r} has count {self.count}; C++ needs at least 1")
        return np.dtype((self._element, (self.count,)))


@dataclass(frozen=True)
class Struct:
    """A struct with the C layout, for numpy and for C++.

    Parameters
    ----------
    name
        Name of the C++ struct, in namespace ``fp4rt``.
    fields
        Members in order.
    comment
        What it is; goes into the generated header.

    Examples
    --------
    >>> pair = Struct("Pair", (Field("tag", "u8"), Field("rows", "ptr<const float>")))
    >>> pair.dtype.fields["rows"], pair.size, pair.alignment
    ((dtype('uint64'), 8), 16, 8)
    """

    name: str
    fields: tuple[Field, ...]
    comment: str = ""

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each member, by the C rule: the next multiple of its alignment."""
        offsets: dict[str, int] = {}
        end = 0
        for member in self.fields:
            if member.name in offsets:
                raise ValueError(f"struct {self.name} has two fields named {member.name!r}")
            offsets[member.name] = -(-end // member.alignment) * member.alignment
            end = offsets[member.name] + member.dtype.itemsize
        return offsets

    @property
    def alignment(self) -> int:
        """Alignment in bytes: that of the strictest member."""
        if not self.fields:
            raise ValueError(f"struct {self.name} has no fields; C++ forbids a size of 0")
        return max(member.alignment for member in self.fields)

    @property
    def size(self) -> int:
        """``sizeof`` in bytes, tail padding included."""
        return self.dtype.itemsize

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numpy structured dtype; its itemsize is ``sizeof`` in C++.

        numpy knows no alignment above 8, so ``np.dtype(..., align=True)`` would misplace tensor
        maps: the offsets are explicit.
        """
        alignment = self.alignment
        last = self.fields[-1]
        end = self.offsets[last.name] + last.dtype.itemsize
        return np.dtype(
            {
                "names": list(self.offsets),
                "formats": [member.dtype for member in self.fields],
                "offsets": list(self.offsets.values()),
                "itemsize": -(-end // alignment) * alignment,
            }
        )

    def cpp(self) -> str:
        """Return the C++ definition followed by its static_asserts."""
        lines = [f"// {self.comment}"] if self.comment else []
        lines.append(f"struct {self.name} {{")
        for member in self.fields:
            array = "" if member.count is None else f"[{member.count}]"
            comment = f"  // {member.comment}" if member.comment else ""
            lines.append(f"  {member.cpp_type} {member.name}{array};{comment}")
        lines.append("};")
        lines.append(f"static_assert(sizeof({self.name}) == {self.size});")
        lines.append(f"static_assert(alignof({self.name}) == {self.alignment});")
        for name, offset in self.offsets.items():
            lines.append(f"static_assert(offsetof({self.name}, {name}) == {offset});")
        return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------- declarations

CONSTANTS: dict[str, int] = {
    "kOutputFloat16": 0,
    "kOutputBfloat16": 1,
    "kOutputFloat32": 2,
    "kActivationNvfp4": 0,
    "kActivation16Bit": 1,
}
"""Integers that both sides use, e.g. the codes in ``Params.output_type``."""

GROUP = Struct(
    "Group",
    (
        Field("weight_values", "ptr<const uint8_t>", "B in the variant's layout"),
        Field("weight_scales", "ptr<const uint8_t>", "its scales, where the layout has them apart"),
        Field("n", "i32", "columns of D"),
        Field("k", "i32", "logical K, a multiple of 16"),
    ),
    "What never changes about one group of a plan; an array of num_groups in device memory.",
)

GROUP_START = Struct(
    "GroupStart",
    (
        Field("a_prepared", "i64", "byte offset of the group's rows in a_prepared"),
        Field("d", "i64", "element offset of its rows in d"),
        Field("row", "i64", "its first row in A"),
    ),
    "Where a group's rows begin, by the present group_sizes; written by prepare.",
)

PARAMS = Struct(
    "Params",
    (
        Field("tensor_map_a", "tensor_map"),
        Field("tensor_map_b", "tensor_map"),
        Field("groups", "ptr<const Group>", "num_groups entries"),
        Field("group_sizes", "ptr<const int32_t>", "rows of A and D in each group"),
        Field("alpha", "ptr<const float>", "alpha * both global scales, by group"),
        Field("a_values", "ptr<const uint8_t>", "A as given: packed E2M1, rows of all groups"),
        Field("a_scales", "ptr<const uint8_t>", "scales of A as given, linear order"),
        Field("a_prepared", "ptr<uint8_t>", "what prepare makes of A: 16-bit rows (Hopper)"),
        Field("group_starts", "ptr<GroupStart>", "num_groups entries"),
        Field("partial_sums", "ptr<float>", "of tiles that two CTAs have parts of, by CTA"),
        Field("schedule", "ptr<uint32_t>", "tiles taken; whether partial sums are there; ..."),
        Field("d", "ptr<void>", "rows of all groups, of output_type"),
        Field("total_m", "i64", "rows that A and D have room for"),
        Field("num_groups", "i32"),
        Field("output_type", "i32", "kOutput..."),
        Field("activation_type", "i32", "kActivation..."),
        Field("max_tile_rows", "i32", "most rows of A in one tile, a multiple of 8"),
        Field("a_pitch", "i64", "elements from row to row of A as given, one for all groups"),
    ),
    "The one argument of every kernel: `const __grid_constant__ Params p`.",
)

STRUCTS: tuple[Struct, ...] = (GROUP, GROUP_START, PARAMS)


@dataclass(frozen=True)
class Variant:
    """One image: a source compiled for one architecture with one set of macros.

    Parameters
    ----------
    name
        Unique; the image is ``_kernels/{name}.cubin`` and ``.ptx``.
    arch
        As nvcc spells it: ``"sm_90a"``, ``"sm_100f"``.
    source
        Path below ``cuda_src``.
    kernels
        Entry points that the image must have, and no others.
    macros
        ``-D`` flags, e.g. ``{"TILE_M": 128}``. Python reads tile facts here too. The values are
        integers (nvcc splits a ``-D`` value at commas).
    """

    name: str
    arch: str
    source: str
    kernels: tuple[str, ...] = ("prepare", "grouped_gemm")
    macros: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class KernelFacts:
    """What the compiler reports about one kernel of an image; the manifest holds them.

    Parameters
    ----------
    registers
        Registers per thread.
    spill_bytes, local_bytes
        Bytes spilled (stores and loads) and stack frame, per thread; 0 in every shipped kernel.
    static_shared_bytes, dynamic_shared_bytes
        Shared memory per CTA; the dynamic part is what ``FP4RT_SMEM_BYTES`` exports, or 0.
    max_threads
        Threads per CTA along x, y, z from ``__launch_bounds__``; None without it.
    cluster
        CTAs per cluster along x, y, z from ``__cluster_dims__``; (1, 1, 1) without it.
    """

    registers: int
    spill_bytes: int
    local_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    max_threads: tuple[int, int, int] | None
    cluster: tuple[int, int, int]

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> KernelFacts:
        """Return the facts of a kernel in the manifest, which `to_json` wrote."""
        own = {name: facts[name] for name in cls.__dataclass_fields__}
        lists = {name: tuple(value) for name, value in own.items() if isinstance(value, list)}
        return cls(**{**own, **lists})

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest holds: the facts, and the occupancy that follows."""
        return {**asdict(self), "ctas_per_sm": self.ctas_per_sm}

    @property
    def ctas_per_sm(self) -> int | None:
        """CTAs that fit on a multiprocessor at once; None where any number of threads is allowed.

        Of compute capability 9.0 and 10.x alike: 64 K registers in four parts, given to each warp
        in units of 256; 228 KiB of shared memory, of which a CTA takes 1 KiB more than it sees;
        2048 threads and 32 CTAs (CUDA Programming Guide, "Compute Capabilities").

        Examples
        --------
        >>> KernelFacts(168, 0, 0, 1024, 100_000, (384, 1, 1), (1, 1, 1)).ctas_per_sm
        1
        """
        if self.max_threads is None:
            return None
        warps = -(-math.prod(self.max_threads) // 32)
        registers = max(-(-self.registers // 8) * 256, 256)
        shared = self.static_shared_bytes + self.dynamic_shared_bytes + 1024
        by_registers = 16384 // registers * 4 // warps
        return min(by_registers, 228 * 1024 // shared, 64 // warps, 32)


ARCHS: dict[str, tuple[str, ...]] = {
    "sm_90a": ("sm_90", "9.0"),
    "sm_100f": ("sm_100", "sm_100a", "10.0", "sm_103", "sm_103a", "sm_103f", "10.3"),
}
"""Architecture of an image, as nvcc spells it -> other spellings of the GPUs that run it.

sm_100f is the family of compute capability 10.0 (B200) and 10.3 (B300). An "a" image runs on its
own compute capability only.
"""


def image_arch(spelling: str) -> str | None:
    """Return the architecture of the images that run on a GPU, or None if there are none.

    Examples
    --------
    >>> image_arch("sm_103a"), image_arch("9.0"), image_arch("sm_120a")
    ('sm_100f', 'sm_90a', None)
    """
    return next((arch for arch, also in ARCHS.items() if spelling in (arch, *also)), None)


MANIFEST_FORMAT = 1
"""Changes with the meaning of ``_kernels/manifest.json``, which build.py writes."""

_HOPPER = tuple(
    Variant(
        f"grouped_gemm_sm_90a_{name}{'_bf16' if bf16 else ''}",
        "sm_90a",
        f"sm_90a/{source}.cu",
        kernels=("grouped_gemm",) if source == "skinny_gemm" else ("prepare", "grouped_gemm"),
        macros={**macros, "BFLOAT16": bf16},
    )
    for bf16 in (0, 1)
    for name, source, macros in (
        (
            "skinny",
            "skinny_gemm",
            {"ROW_BLOCKS": 2, "SLICES": 1, "SPLITS": 1, "STAGES": 5},
        ),
        (
            "skinny_split",
            "skinny_gemm",
            {"ROW_BLOCKS": 1, "SLICES": 2, "SPLITS": 2, "STAGES": 8},
        ),
        (
            "medium",
            "grouped_gemm",
            {
                "TEAMS": 1,
                "MAX_ROWS": 256,
                "STAGES": 5,
                "CONSUMER_REGISTERS": 232,
                "PRODUCER_REGISTERS": 40,
            },
        ),
        (
            "large",
            "grouped_gemm",
            {
                "TEAMS": 2,
                "MAX_ROWS": 128,
                "STAGES": 5,
                "CONSUMER_REGISTERS": 112,
                "PRODUCER_REGISTERS": 32,
            },
        ),
    )
)

VARIANTS: tuple[Variant, ...] = (
    *_HOPPER,
    Variant("pack_weights_sm_90a", "sm_90a", "sm_90a/pack_weights.cu", ("pack_weights",)),
    *(
        Variant(
            f"grouped_gemm_sm_100f_{name}",
            "sm_100f",
            "sm_100a/grouped_gemm.cu",
            ("grouped_gemm",),
            macros={
                "TOKENS_ON_M": on_m,
                "TILE_N": tile_n,
                "CTAS": ctas,
                "SPLITS": splits,
                "STAGES": stages,
            },
        )
        for name, on_m, tile_n, ctas, splits, stages in (
            ("n32", 0, 32, 1, 1, 9),
            ("n64", 0, 64, 1, 1, 7),
            ("n128", 0, 128, 1, 1, 6),
            ("n256", 0, 256, 1, 1, 4),
            ("pair_n128", 0, 128, 2, 1, 7),
            ("pair_n256", 0, 256, 2, 1, 5),
            ("split2_n32", 0, 32, 1, 2, 8),
            ("split4_n32", 0, 32, 1, 4, 7),
            ("m128x64", 1, 64, 1, 1, 8),
            ("m128x128", 1, 128, 1, 1, 6),
            ("m128x256", 1, 256, 1, 1, 4),
        )
    ),
)


# ----------------------------------------------------------------------------- generated text

_HEADER = """\
// Generated by build.py from fp4rt/abi.py: edit that file, not this one.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Exports the dynamic shared memory that `kernel` is launched with; build.py reads it from the PTX.
// Beside the kernel, at namespace scope: FP4RT_SMEM_BYTES(grouped_gemm, sizeof(SharedStorage));
#define FP4RT_SMEM_BYTES(kernel, bytes) \\
  extern "C" __device__ __constant__ const unsigned kernel##_smem_bytes = (bytes)

namespace fp4rt {

// A TMA tensor map as cuTensorMapEncodeTiled writes it.
struct alignas(%d) TensorMap {
  uint8_t opaque[%d];
};
"""


def header_text() -> str:
    """Return the text of ``cuda_src/generated/abi.h``."""
    parts = [_HEADER % (TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES)]
    parts.append("".join(f"constexpr int {name} = {value};\n" for name, value in CONSTANTS.items()))
    parts.extend(struct.cpp() for struct in STRUCTS)
    parts.append("}  // namespace fp4rt\n")
    return "\n".join(parts)


def abi_hash(variant: Variant) -> str:
    """Return a hex digest of all that the host assumes about the image of `variant`.

    It covers the structs, the constants, and the variant's own facts.
    """
    facts = [variant.name, variant.arch, list(variant.kernels), dict(variant.macros)]
    text = header_text() + json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
