"""One spelling for each opcode: ptxas takes most modifiers in any order, decoders know one.

``add.f32.rn`` is ``add.rn.f32``, and nvcc's own headers write ``min.s32.relu``. Only the order
changes; what the modifiers mean is the business of the instruction families.
"""

from __future__ import annotations

from functools import lru_cache

from .records import TYPE_BYTES

_TYPES = frozenset(TYPE_BYTES) | {
    "tf32", "f32x2", "u16x2", "s16x2", "e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2",
    "e4m3x4", "e5m2x4", "e2m1x4", "e2m3x4", "e3m2x4", "u4", "s4", "u2", "s2",
}  # fmt: skip
_COMPARISONS = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu",
    "geu", "num", "nan",
})  # fmt: skip
_SPACES = frozenset({"global", "shared", "shared::cta", "shared::cluster"})
_SYNC = (frozenset({"sync"}), frozenset({"aligned"}))
_MATRIX = (*_SYNC, frozenset({"m8n8", "m16n16", "m8n16", "m16n8"}), frozenset({"x1", "x2", "x4"}))
_COMPARE = (_COMPARISONS, frozenset({"and", "or", "xor"}), frozenset({"ftz"}))

_FIRST: dict[str, tuple[frozenset[str], ...]] = {
    "setp": _COMPARE,
    "set": _COMPARE,
    "shfl": _SYNC,
    "vote": _SYNC,
    "redux": _SYNC,
    "match": (frozenset({"any", "all"}), *_SYNC),
    "ldmatrix": _MATRIX,
    "stmatrix": _MATRIX,
    "movmatrix": _MATRIX,
    "mma": (frozenset({"sp", "sp::ordered_metadata"}), *_SYNC),
}
"""Which modifiers come first, group by group."""

_TYPES_LAST = (frozenset(_FIRST) - {"mma"}) | {
    "add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max", "neg", "abs", "sqrt", "rsqrt",
    "rcp", "sin", "cos", "lg2", "ex2", "tanh", "addc", "subc", "madc", "mul24", "mad24", "sad",
    "bfind", "szext", "bmsk", "testp", "copysign", "cvt", "cvta", "mapa", "getctarank", "shf",
    "slct",
}  # fmt: skip
"""Opcodes whose types come last, in their own order."""


def _copy_groups(parts: tuple[str, ...]) -> tuple[frozenset[str], ...]:
    if "bulk" not in parts:
        return (frozenset({"ca", "cg"}),)
    ranks = frozenset(f"{n}d" for n in range(1, 6))
    return (
        *(frozenset({word}) for word in ("bulk", "prefetch", "tensor")),
        ranks,
        frozenset({"L2"}),
        _SPACES,
    )


@lru_cache(maxsize=4096)
def canonical(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts of an opcode in the order that its decoder knows.

    Examples
    --------
    >>> canonical(("min", "s32", "relu"))
    ('min', 'relu', 's32')
    >>> canonical(("setp", "s32", "and", "lt"))
    ('setp', 'lt', 'and', 's32')
    """
    opcode, *rest = parts
    if opcode == "prmt":
        return opcode, *sorted(rest, key=lambda part: part != "b32")
    groups = _FIRST.get(opcode, ())
    if parts[:2] == ("cp", "async"):
        opcode, rest = "cp.async", rest[1:]
        groups = _copy_groups(parts)
    found: list[str] = []
    for group in groups:
        found.extend(part for part in rest if part in group)
        rest = [part for part in rest if part not in group]
    if opcode in _TYPES_LAST:
        rest = sorted(rest, key=lambda part: part in _TYPES)
    return (*opcode.split("."), *found, *rest)
