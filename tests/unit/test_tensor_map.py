"""Every rule of ``cuTensorMapEncodeTiled``, one broken map each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp4rt.device import TensorMap
from fp4rt.tensor_map import box_bytes, box_shape, check

GOOD = TensorMap(
    address=0x10000,
    dtype="uint8",
    global_dim=(128, 64, 4),
    global_strides=(128, 8192),
    box_dim=(128, 8, 1),
    swizzle="128B",
)
NIBBLES = replace(GOOD, dtype="16u4_align8b", global_dim=(256, 64, 4), box_dim=(256, 8, 1))
PADDED = replace(NIBBLES, dtype="16u4_align16b", box_dim=(128, 8, 1))


@pytest.mark.parametrize("good", [GOOD, NIBBLES, PADDED])
def test_good_maps_pass(good):
    check(good, "sm_100a")


def test_box_may_exceed_the_tensor_and_strides_need_not_grow():
    check(replace(GOOD, global_dim=(64, 3, 4), global_strides=(128, 64)))


def test_256_wide_box_and_full_rank():
    box = (256, 256, 3, 1, 1)
    check(TensorMap(0, "uint8", (1 << 32, 1, 1, 1, 1), ((1 << 40) - 16,) * 4, box))


def test_a_box_fits_into_shared_memory():
    biggest = TensorMap(0, "uint8", (16, 256, 256), (16, 4096), (16, 227, 64))
    check(biggest)
    check(replace(biggest, box_dim=(16, 228, 128), element_strides=(1, 2, 2)))
    with pytest.raises(ValueError, match=r"233472 bytes.*232448 bytes of shared memory"):
        check(replace(biggest, box_dim=(16, 228, 64)))


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (GOOD, {"dtype": "uint7"}, "'uint7' is unknown"),
        (GOOD, {"swizzle": "256B"}, "'256B' is unknown"),
        (GOOD, {"l2_promotion": "1B"}, "'1B' is unknown"),
        (GOOD, {"oob_fill": "one"}, "'one' is unknown"),
        (GOOD, {"oob_fill": "nan"}, "needs a floating-point dtype"),
        (NIBBLES, {"oob_fill": "nan"}, "needs a floating-point dtype"),
        (GOOD, {"global_dim": ()}, "the rank must be in 1 .. 5"),
        (GOOD, {"global_dim": (1,) * 6}, "the rank must be in 1 .. 5"),
        (GOOD, {"address": 0x10008}, "use 0x10000 or 0x10010"),
        (PADDED, {"address": 0x10010}, "multiple of 32 bytes"),
        (GOOD, {"global_dim": (128, 0, 4)}, r"global_dim\[1\] is 0"),
        (GOOD, {"global_dim": (128, (1 << 32) + 1, 4)}, r"global_dim\[1\]"),
        (NIBBLES, {"global_dim": (255, 64, 4)}, "use 256"),
        (PADDED, {"global_dim": (192, 64, 4)}, "multiple of 128: use 256"),
        (GOOD, {"global_strides": (128,)}, "global_strides has 1 entries"),
        (GOOD, {"global_strides": (120, 8192)}, "use 128"),
        (GOOD, {"global_strides": (128, 1 << 40)}, r"global_strides\[1\]"),
        (PADDED, {"global_strides": (128, 8208)}, "multiples of 32 bytes"),
        (GOOD, {"box_dim": (128, 8)}, "box_dim has 2 entries"),
        (GOOD, {"box_dim": (128, 0, 1)}, r"box_dim\[1\] is 0"),
        (GOOD, {"box_dim": (128, 257, 1)}, r"box_dim\[1\] is 257"),
        (GOOD, {"box_dim": (120, 8, 1)}, "multiple of 16 bytes: use 128"),
        (NIBBLES, {"box_dim": (16, 8, 1)}, "multiple of 16 bytes: use 32"),
        (GOOD, {"swizzle": "64B"}, "swizzle '64B' allows 64: use 64"),
        (GOOD, {"dtype": "float32"}, "swizzle '128B' allows 128: use 32"),
        (PADDED, {"swizzle": "64B"}, "use 'none' or '128B'"),
        (PADDED, {"box_dim": (64, 8, 1)}, "must be 128"),
        (GOOD, {"element_strides": (1, 9, 1)}, r"element_strides\[1\] is 9"),
        (GOOD, {"element_strides": (1, 1)}, "element_strides has 2 entries"),
    ],
)
def test_broken_rule_is_named(base, change, words):
    with pytest.raises(ValueError, match=words):
        check(replace(base, **change), "sm_100a")


def test_4_bit_types_are_refused_on_hopper_with_the_way_out():
    with pytest.raises(ValueError, match=r"sm_100 or newer.*use 'uint8'"):
        check(NIBBLES, "sm_90a")


def test_extent_that_is_no_integer_is_a_type_error():
    with pytest.raises(TypeError, match=r"box_dim\[1\] is 8.0"):
        check(replace(GOOD, box_dim=(128, 8.0, 1)))


def test_element_strides_thin_every_dimension_but_the_first():
    thin = replace(GOOD, box_dim=(128, 8, 3), element_strides=(2, 3, 2))
    assert box_shape(thin) == (128, 3, 2)
    assert box_bytes(thin) == 128 * 3 * 2


def test_box_bytes_of_4_bit_types():
    assert box_bytes(NIBBLES) == 128 * 8
    assert box_bytes(PADDED) == 128 * 8
