"""The rules that Python checks are the driver's own: both refuse the same tensor maps.

One rule is stricter: a box must fit into shared memory, where the driver allows a little more.
"""

import numpy as np
import pytest

import fp4rt
from fp4rt import tensor_map
from fp4rt.device import TensorMap

pytestmark = pytest.mark.gpu


def random_map(rng, address):
    """A map that often breaks a rule, and often none."""

    def pick(*values):
        return values[rng.integers(len(values))]

    def rarely(bad, *good):
        return pick(*bad) if rng.random() < 0.02 else pick(*good)

    rank = int(rng.integers(1, 6))
    dtype = pick(*tensor_map.ELEMENT_TYPES)
    bits = tensor_map.ELEMENT_TYPES[dtype].global_bits
    inner = rarely((8, 24, 300), 16, 32, 48, 64, 128, 256) * 8 // bits
    others = [rarely((0, 257), 1, 2, 3, 16, 64, 227, 228, 256) for _ in range(rank - 1)]
    steps = tuple(rarely((0, 9), 1, 1, 2, 8) for _ in range(rank))
    return TensorMap(
        address=address + rarely((8,), 0, 16, 32, 64),
        dtype=dtype,
        global_dim=tuple(rarely((0, (1 << 32) + 1), 1, 7, 200, 1 << 32) for _ in range(rank)),
        global_strides=tuple(
            rarely((24, 1 << 40), 0, 16, 32, 512, 4096, (1 << 40) - 16) for _ in range(rank - 1)
        ),
        box_dim=(max(inner, 1), *others),
        element_strides=pick((), steps),
        swizzle=pick("none", "32B", "64B", "128B"),
        l2_promotion=pick("none", "64B", "128B", "256B"),
        oob_fill=pick("zero", "zero", "nan"),
    )


def test_python_and_driver_agree(gpu, rng, monkeypatch):
    buffer = gpu.alloc(1 << 16)
    check, answers = tensor_map.check, np.zeros((2, 2), int)
    too_large = 0
    for _ in range(4000):
        given = random_map(rng, buffer.address)
        try:
            check(given, gpu.arch)
            allowed, reason = True, ""
        except ValueError as error:
            allowed, reason = False, str(error)
        with monkeypatch.context() as patch:
            patch.setattr(tensor_map, "check", lambda *_: None)
            try:
                gpu.encode_tensor_map(given)
                accepted = True
            except fp4rt.DriverError as error:
                assert error.code == "CUDA_ERROR_INVALID_VALUE"
                accepted = False
        if "bytes of shared memory" in reason:
            too_large += 1
            continue
        answers[int(allowed), int(accepted)] += 1
        assert allowed == accepted, f"Python says {allowed}, the driver {accepted}: {given}"
    assert answers[0, 0] > 500
    assert answers[1, 1] > 500
    assert too_large > 100


def test_largest_box_is_all_the_shared_memory(gpu):
    buffer = gpu.alloc(1 << 16)
    fits = TensorMap(buffer.address, "uint8", (16, 256, 256), (16, 4096), (16, 227, 64))
    assert len(gpu.encode_tensor_map(fits)) == 128
