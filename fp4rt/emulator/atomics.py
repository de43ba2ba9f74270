"""What atomic operations compute: (memory, operands) -> memory, on uint arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .program import DTYPES

Operation = Callable[..., Any]
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "f16x2": np.float16}


def _float_add(type_: str) -> Operation:
    from .rounding import add_bf16

    if type_.startswith("bf16"):
        return lambda a, b: add_bf16(a.view(np.uint16), b.view(np.uint16)).view(a.dtype)
    dtype = _FLOATS[type_]

    def add(a: Any, b: Any) -> Any:
        total = a.view(dtype) + b.view(dtype)
        return np.ascontiguousarray(total).view(a.dtype)

    return add


def _add(type_: str) -> Operation:
    if type_[0] in "fb" and type_ not in ("b32", "b64"):
        return _float_add(type_)
    return lambda a, b: a + b


def _extreme(least: bool) -> Callable[[str], Operation]:
    def make(type_: str) -> Operation:
        if type_ in ("f16", "f16x2", "f32", "f64"):
            dtype: Any = _FLOATS[type_]
            pick: Any = np.fmin if least else np.fmax
        elif type_.startswith("bf16"):
            from .rounding import bf16_to_f32, f32_to_bf16

            fpick = np.fmin if least else np.fmax
            return lambda a, b: f32_to_bf16(
                fpick(bf16_to_f32(a.view(np.uint16)), bf16_to_f32(b.view(np.uint16)))
            ).view(a.dtype)
        else:
            dtype = DTYPES[type_]
            pick = np.minimum if least else np.maximum
        return lambda a, b: np.ascontiguousarray(pick(a.view(dtype), b.view(dtype))).view(a.dtype)

    return make


def _cas(type_: str) -> Operation:
    def swap(a: Any, compare: Any, value: Any) -> Any:
        return np.where((a == compare).all(axis=1, keepdims=True), value, a)

    return swap


OPERATIONS: dict[str, Callable[[str], Operation]] = {
    "add": _add,
    "min": _extreme(True),
    "max": _extreme(False),
    "and": lambda t: lambda a, b: a & b,
    "or": lambda t: lambda a, b: a | b,
    "xor": lambda t: lambda a, b: a ^ b,
    "exch": lambda t: lambda a, b: b.copy(),
    "cas": _cas,
    "inc": lambda t: lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
    "dec": lambda t: lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
}
