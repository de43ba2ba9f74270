"""Matrix descriptors: where wgmma and tcgen05 find their operands, and what they compute.

A shared-memory descriptor (64 bits) places a matrix in shared memory; an instruction descriptor
(32 bits) gives shapes and types of a tcgen05.mma. Layouts are those of the PTX ISA, "Matrix
Descriptor Format", "Canonical Layouts" (wgmma) and "Shared memory descriptor", "Instruction
descriptor" (tcgen05). Reserved bits that are set, and values that the tables do not list, raise
`Violation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .memory import Violation

Mode = Literal["none", "32B", "64B", "128B", "128B_atom32B"]
Major = Literal["K", "MN"]

# mode -> (bits, base, shift): bits [base, base + bits) ^= the same number of bits `shift` higher.
_SWIZZLES: dict[str, tuple[int, int, int]] = {
    "none": (0, 4, 3),
    "32B": (1, 4, 3),
    "64B": (2, 4, 3),
    "128B": (3, 4, 3),
    "128B_atom32B": (2, 5, 2),
}
SPAN: dict[str, int] = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_atom32B": 128}
_WGMMA_MODES: dict[int, Mode] = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
_TCGEN05_MODES: dict[int, Mode] = {0: "none", 1: "128B_atom32B", 2: "128B", 4: "64B", 6: "32B"}


def swizzle(address: NDArray[np.int64], mode: str, base_offset: int = 0) -> NDArray[np.int64]:
    """Apply a swizzle mode to shared-memory byte addresses.

    The exclusive-or acts on the address itself, not on an offset within a tile, so that a start
    address inside the pattern needs no correction (blackwell: descriptor + 32 bytes per k-step).

    Parameters
    ----------
    address
        Byte addresses in shared memory.
    mode
        A tensor map's or descriptor's swizzle mode.
    base_offset
        Where the pattern starts in units of 128 bytes, modulo 8. Inferred from "base offset =
        (pattern start >> 7) & 7": the row number within the pattern is counted from there.

    Examples
    --------
    >>> hex(int(swizzle(np.array([0x6A0]), "128B")[0]))
    '0x6f0'
    """
    bits, base, shift = _SWIZZLES[mode]
    row = address - (base_offset << 7)
    return address ^ ((row >> shift) & (((1 << bits) - 1) << base))


@dataclass(frozen=True)
class SharedDescriptor:
    """A decoded shared-memory matrix descriptor; byte units throughout."""

    start: int
    lbo: int
    sbo: int
    mode: Mode
    base_offset: int = 0


def _encoded(descriptor: int, low: int) -> int:
    return ((descriptor >> low) & 0x3FFF) << 4


def _reserved(descriptor: int, low: int, high: int, what: str) -> None:
    field = (descriptor >> low) & ((1 << (high - low + 1)) - 1)
    if field:
        raise Violation(f"{what}: reserved bits {low}-{high} are {field:#x}; they must be 0")


def _decode_common(descriptor: int, mode: Mode, what: str) -> SharedDescriptor:
    base_offset = (descriptor >> 49) & 7
    if base_offset and mode == "none":
        raise Violation(f"{what}: base offset {base_offset} with no swizzle; it must be 0")
    return SharedDescriptor(
        _encoded(descriptor, 0), _encoded(descriptor, 16), _encoded(descriptor, 32), mode,
        base_offset,
    )  # fmt: skip


def decode_wgmma(descriptor: int) -> SharedDescriptor:
    """Decode the descriptor of a wgmma operand.

    Examples
    --------
    >>> decode_wgmma(0x4000004000010040)
    SharedDescriptor(start=1024, lbo=16, sbo=1024, mode='128B', base_offset=0)
    """
    what = f"wgmma matrix descriptor {descriptor:#018x}"
    for low, high in ((14, 15), (30, 31), (46, 48), (52, 61)):
        _reserved(descriptor, low, high, what)
    return _decode_common(descriptor, _WGMMA_MODES[descriptor >> 62], what)


def decode_tcgen05(descriptor: int) -> SharedDescriptor:
    """Decode the descriptor of a tcgen05.mma or tcgen05.cp operand.

    Examples
    --------
    >>> decode_tcgen05(0x4000404000000000 | 0x42)
    SharedDescriptor(start=1056, lbo=0, sbo=1024, mode='128B', base_offset=0)
    """
    what = f"tcgen05 shared-memory descriptor {descriptor:#018x}"
    for low, high in ((14, 15), (30, 31), (53, 60)):
        _reserved(descriptor, low, high, what)
    if (descriptor >> 46) & 7 != 1:
        raise Violation(f"{what}: bits 46-48 are {(descriptor >> 46) & 7:#05b}; they must be 0b001")
    if (descriptor >> 52) & 1:
        raise Violation(
            f"{what}: bit 52 asks for an absolute leading-dimension address, which only sm_103a "
            "with K = 96 has"
        )
    code = descriptor >> 61
    if code not in _TCGEN05_MODES:
        raise Violation(f"{what}: swizzle mode {code} is not one of 0, 1, 2, 4, 6")
    return _decode_common(descriptor, _TCGEN05_MODES[code], what)


def addresses(
    descriptor: SharedDescriptor, rows: int, k_bytes: int, major: Major, element: int = 1
) -> NDArray[np.int64]:
    """Return the shared-memory address of every byte of a matrix operand.

    Parameters
    ----------
    descriptor
        Where the matrix lies.
    rows
        Extent along M (or N).
    k_bytes
        Extent along K in bytes.
    major
        ``"K"``: K is contiguous; ``"MN"``: M (or N) is.
    element
        Bytes of an element; matters for ``"MN"`` only.

    Returns
    -------
    ndarray, shape (rows, k_bytes)
        Address of byte `b` of row `r` in row-major, K-contiguous order of the operand.

    Raises
    ------
    Violation
        If the layout has no such form, or the strides are not usable with it.
    """
    if major == "K":
        linear = _k_major(descriptor, rows, k_bytes)
    else:
        linear = _mn_major(descriptor, rows, k_bytes, element)
    return swizzle(linear, descriptor.mode, descriptor.base_offset)


def _k_major(d: SharedDescriptor, rows: int, k_bytes: int) -> NDArray[np.int64]:
    """Canonical K-major layouts, in bytes: ``((8, m), (16, 2k)) : ((span, SBO), (1, 16 | LBO))``.

    With a swizzle the leading-dimension offset is ignored and K is contiguous up to the span.
    """
    if d.mode == "128B_atom32B":
        raise Violation("swizzle mode 128B with 32-byte atoms exists for MN-major operands only")
    span = SPAN[d.mode]
    if d.mode != "none" and d.start % span + k_bytes > span:
        raise Violation(
            f"K-major operand of {k_bytes} bytes along K at {d.start:#x} runs over the "
            f"{span}-byte row of its swizzle pattern; start it at most {span - k_bytes} bytes in"
        )
    r = np.arange(rows, dtype=np.int64)[:, None]
    b = np.arange(k_bytes, dtype=np.int64)[None, :]
    outer = (r >> 3) * d.sbo + (r & 7) * span
    inner = b if d.mode != "none" else (b >> 4) * d.lbo + (b & 15)
    return np.asarray(d.start + outer + inner)


def _mn_major(d: SharedDescriptor, rows: int, k_bytes: int, element: int) -> NDArray[np.int64]:
    """Canonical MN-major layouts, in bytes.

    No swizzle ``((16, m), (8, k)) : ((1, SBO), (16, LBO))``; swizzled
    ``((span, m), (8, k)) : ((1, LBO), (span, SBO))``; 32-byte atoms have 4 rows instead of 8.
    """
    span = SPAN[d.mode]
    i = np.arange(rows, dtype=np.int64)[:, None] * element
    b = np.arange(k_bytes, dtype=np.int64)[None, :]
    k, within = b // element, b % element
    if d.mode == "none":
        mn_stride, k_stride, deep = d.sbo, d.lbo, 8
    else:
        mn_stride, k_stride, deep = d.lbo, d.sbo, 4 if d.mode == "128B_atom32B" else 8
    across = (i // span) * mn_stride + i % span
    along = (k // deep) * k_stride + (k % deep) * span
    return np.asarray(d.start + across + along + within)


# ---------------------------------------------------------------------------------------------
# Instruction descriptors

Kind = Literal["f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"]
KINDS: tuple[str, ...] = ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")
_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_OPERANDS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "mxf8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_RESULTS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
_K: dict[str, int] = {
    "f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64,
}  # fmt: skip


@dataclass(frozen=True)
class InstructionDescriptor:
    """A decoded tcgen05.mma instruction descriptor.

    ``m``, ``n``, ``k`` are those of the whole operation (both CTAs with ``cta_group::2``);
    ``scale_type`` is ``""`` for kinds without block scaling; ``a_scale_id`` and ``b_scale_id``
    pick the byte of a scale-factor cell.
    """

    kind: str
    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    d_type: str
    negate_a: bool
    negate_b: bool
    a_major: Major
    b_major: Major
    saturate: bool = False
    scale_type: str = ""
    a_scale_id: int = 0
    b_scale_id: int = 0


def _field(value: int, low: int, high: int) -> int:
    return (value >> low) & ((1 << (high - low + 1)) - 1)


def decode_instruction(
    value: int, kind: str, cta_group: int = 1, block: int = 0
) -> InstructionDescriptor:
    """Decode and check an instruction descriptor.

    Parameters
    ----------
    value
        The 32-bit descriptor.
    kind
        The instruction's ``.kind::`` qualifier.
    cta_group
        1 or 2.
    block
        Elements per scale factor (16 or 32) for the block-scaled kinds; 0 for the others.

    Raises
    ------
    Violation
        If a reserved bit is set or a field has a value, or a shape, that the PTX tables do not
        list for this kind.

    Examples
    --------
    >>> d = decode_instruction(0x08200480, "mxf4nvf4", block=16)
    >>> d.m, d.n, d.k, d.a_type, d.scale_type
    (128, 128, 64, 'e2m1', 'ue4m3')
    """
    what = f"instruction descriptor {value:#010x} of kind::{kind}"
    if kind not in KINDS:
        raise Violation(f"tcgen05.mma kind::{kind} is unknown")
    if _field(value, 2, 2):
        raise Violation(f"{what}: bit 2 asks for sparsity, which is not emulated")
    scaled = kind.startswith("mx")
    decoded = (_decode_scaled if scaled else _decode_plain)(value, kind, block, what)
    _check_shape(decoded, cta_group, what)
    return decoded


def _operand(table: dict[int, str], code: int, name: str, what: str) -> str:
    if code not in table:
        listed = ", ".join(f"{k} ({v})" for k, v in table.items())
        raise Violation(f"{what}: {name} type is {code}; it must be one of {listed}")
    return table[code]


def _decode_plain(value: int, kind: str, block: int, what: str) -> InstructionDescriptor:
    """Kinds f16, tf32, f8f6f4, i8 (PTX ISA, table "Instruction descriptor format")."""
    for low, high in ((0, 1), (6, 6), (23, 23), (29, 29), (30, 31)):
        _reserved(value, low, high, what)
    integer = kind == "i8"
    if _field(value, 3, 3) and not integer:
        raise Violation(f"{what}: bit 3 (saturate) is for kind::i8 only")
    if _field(value, 13, 14) and integer:
        raise Violation(f"{what}: bits 13-14 (negate) are not for kind::i8")
    transposed = _field(value, 15, 16)
    return InstructionDescriptor(
        kind,
        _field(value, 24, 28) << 4,
        _field(value, 17, 22) << 3,
        _K[kind],
        _operand(_OPERANDS[kind], _field(value, 7, 9), "A", what),
        _operand(_OPERANDS[kind], _field(value, 10, 12), "B", what),
        _operand(_RESULTS[kind], _field(value, 4, 5), "D", what),
        bool(_field(value, 13, 13)),
        bool(_field(value, 14, 14)),
        "MN" if transposed & 1 else "K",
        "MN" if transposed & 2 else "K",
        saturate=bool(_field(value, 3, 3)),
    )


def _decode_scaled(value: int, kind: str, block: int, what: str) -> InstructionDescriptor:
    """Kinds mxf8f6f4, mxf4, mxf4nvf4; M is in units of 128 here, 16 in the plain kinds."""
    reserved = [(0, 1), (3, 3), (6, 6), (24, 26)]
    four_bit = kind != "mxf8f6f4"
    if four_bit:
        reserved += [(12, 12), (15, 16)]
    else:
        reserved += [(31, 31)]
    for low, high in reserved:
        _reserved(value, low, high, what)
    if four_bit and _field(value, 31, 31):
        raise Violation(f"{what}: bit 31 asks for K = 96, which only sm_103a has")
    scale_type = "ue8m0" if _field(value, 23, 23) else "ue4m3"
    legal = {"mxf8f6f4": (32,), "mxf4": (32,), "mxf4nvf4": (16, 32)}[kind]
    if block not in legal:
        raise Violation(
            f"kind::{kind} takes one scale per {' or '.join(map(str, legal))} elements, "
            f"the instruction says {block}"
        )
    if scale_type == "ue4m3" and not (kind == "mxf4nvf4" and block == 16):
        raise Violation(
            f"{what}: bit 23 is 0 (UE4M3 scales), which only kind::mxf4nvf4 with block16 has; "
            "set it for UE8M0"
        )
    a_id, b_id = _field(value, 29, 30), _field(value, 4, 5)
    ids = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[_K[kind] // block]
    for name, number in (("A", a_id), ("B", b_id)):
        if number not in ids:
            raise Violation(
                f"{what}: scale factor {name} ID is {number}; it must be "
                f"{' or '.join(map(str, ids))} here"
            )
    transposed = _field(value, 15, 16)
    b_bits = 11 if four_bit else 12
    return InstructionDescriptor(
        kind,
        _field(value, 27, 28) << 7,
        _field(value, 17, 22) << 3,
        _K[kind],
        _operand(_OPERANDS[kind], _field(value, 7, 9), "A", what),
        _operand(_OPERANDS[kind], _field(value, 10, b_bits), "B", what),
        "f32",
        bool(_field(value, 13, 13)),
        bool(_field(value, 14, 14)),
        "MN" if transposed & 1 else "K",
        "MN" if transposed & 2 else "K",
        scale_type=scale_type,
        a_scale_id=a_id,
        b_scale_id=b_id,
    )


def _check_shape(d: InstructionDescriptor, cta_group: int, what: str) -> None:
    """Check M and N (PTX ISA, table "Various combinations of .kind and shapes", dense, no .ws)."""
    scaled = d.kind.startswith("mx")
    legal_m = (128, 256) if cta_group == 2 else (128,) if scaled else (64, 128)
    if d.m not in legal_m:
        raise Violation(
            f"{what}: M is {d.m}; with cta_group::{cta_group} it must be "
            f"{' or '.join(map(str, legal_m))}"
        )
    # kind::i8: N is 8, 16, 24, 32 and then multiples of 16 (PTX ISA table of shapes).
    steps = 16 if cta_group == 2 or (d.kind == "i8" and d.n > 32) else 8
    if cta_group == 2 and d.kind == "i8":
        steps = 32
    if not steps <= d.n <= 256 or d.n % steps:
        raise Violation(
            f"{what}: N is {d.n}; with cta_group::{cta_group} it must be a multiple of {steps} "
            "up to 256"
        )
    if d.a_major == "MN" and d.a_type in ("e2m1", "e2m3", "e3m2"):
        raise Violation(f"{what}: A of type {d.a_type} cannot be transposed")
    if d.b_major == "MN" and d.b_type in ("e2m1", "e2m3", "e3m2"):
        raise Violation(f"{what}: B of type {d.b_type} cannot be transposed")
