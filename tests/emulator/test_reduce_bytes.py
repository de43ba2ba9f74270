"""The arithmetic of bulk reductions, element by element."""

import ml_dtypes
import numpy as np
import pytest

from fp4rt.emulator.async_copy import reduce_bytes
from fp4rt.emulator.memory import Violation

BYTES = np.uint8


def reduce(operation, name, old, new):
    result = reduce_bytes(operation, name, old.view(BYTES), new.view(BYTES))
    return result.view(old.dtype)


@pytest.mark.parametrize(
    ("operation", "want"),
    [("add", [4, 1, 0]), ("min", [1, 2, 5]), ("max", [3, 0xFFFFFFFF, 0xFFFFFFFB]),
     ("and", [1, 2, 1]), ("or", [3, 0xFFFFFFFF, 0xFFFFFFFF]), ("xor", [2, 0xFFFFFFFD, 0xFFFFFFFE]),
     ("inc", [2, 3, 0]), ("dec", [0, 1, 5])],
)  # fmt: skip
def test_unsigned(operation, want):
    old = np.array([1, 2, 0xFFFFFFFB], np.uint32)
    new = np.array([3, 0xFFFFFFFF, 5], np.uint32)
    np.testing.assert_array_equal(reduce(operation, "u32", old, new), np.array(want, np.uint32))


def test_decrement_from_zero_wraps_to_the_limit():
    old, new = np.array([0, 9], np.uint32), np.array([5, 5], np.uint32)
    assert reduce("dec", "u32", old, new).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("s32", np.int32), ("s64", np.int64), ("u64", np.uint64), ("f16", np.float16),
     ("bf16", ml_dtypes.bfloat16), ("f32", np.float32), ("f64", np.float64)],
)  # fmt: skip
def test_every_type_adds_and_compares(name, dtype):
    old, new = np.array([1, 7, 3], dtype), np.array([2, 3, 3], dtype)
    assert reduce("add", name, old, new).tolist() == [3, 10, 6]
    assert reduce("min", name, old, new).tolist() == [1, 3, 3]
    assert reduce("max", name, old, new).tolist() == [2, 7, 3]


def test_minimum_of_floats_ignores_nan():
    old, new = np.array([np.nan, 1.0], np.float32), np.array([2.0, np.nan], np.float32)
    assert reduce("min", "f32", old, new).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("operation", ["and", "or", "xor", "inc", "dec"])
def test_bit_operations_are_for_integers(operation):
    with pytest.raises(Violation, match="does not exist for type f32"):
        reduce(operation, "f32", np.zeros(1, np.float32), np.zeros(1, np.float32))
