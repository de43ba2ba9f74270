"""Box copies against a plain loop over elements, and the tensor-map image."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4rt.device import TensorMap
from fp4rt.emulator.memory import Violation
from fp4rt.emulator.tensor_box import box, decode_tensor_map, encode_tensor_map, replace_field
from fp4rt.tensor_map import ELEMENT_TYPES

BASE = 0x1000
ITEM = {"uint8": 1, "uint16": 2, "float16": 2, "float32": 4, "float64": 8}


def load(tensor_map, memory, coordinates, address=0x800, rows=()):
    """Do one box load; return the shared memory after it."""
    plan = box(tensor_map, coordinates, address, rows)
    image = plan.background()
    span = np.arange(plan.first, plan.last)
    starts = plan.rows[plan.inside] - plan.first * 0
    data = memory[starts[:, None] - BASE + (span - plan.first)[None, :]]
    plan.place(image, data)
    shared = np.full(1 << 16, 0xEE, np.uint8)
    shared[plan.offsets] = image.reshape(-1)
    return shared, plan


def expected_image(tensor_map, memory, coordinates):
    """The dense image by a loop over elements: whole-byte types."""
    size = ITEM[tensor_map.dtype]
    steps = tensor_map.element_strides or (1,) * len(tensor_map.box_dim)
    counts = [
        b if i == 0 else -(-b // s)
        for i, (b, s) in enumerate(zip(tensor_map.box_dim, steps, strict=True))
    ]
    fill = b"\xf7\x7f" * (size // 2) if tensor_map.oob_fill == "nan" else bytes(size)
    out = bytearray()
    for index in product(*(range(n) for n in reversed(counts))):
        position = [
            c + j * (1 if i == 0 else steps[i])
            for i, (c, j) in enumerate(zip(coordinates, reversed(index), strict=True))
        ]
        if all(0 <= p < d for p, d in zip(position, tensor_map.global_dim, strict=True)):
            at = position[0] * size + sum(
                p * s for p, s in zip(position[1:], tensor_map.global_strides, strict=True)
            )
            out += memory[at : at + size].tobytes()
        else:
            out += fill
    return np.frombuffer(bytes(out), np.uint8)


MAPS = [
    TensorMap(BASE, "uint8", (100,), (), (32,)),
    TensorMap(BASE, "uint16", (20, 7), (48,), (16, 4)),
    TensorMap(BASE, "float32", (9, 5, 3), (48, 256), (8, 3, 2), oob_fill="nan"),
    TensorMap(BASE, "float16", (17, 4, 3, 2), (48, 208, 640), (8, 2, 2, 2), (1, 1, 2, 1)),
    TensorMap(BASE, "uint8", (20, 3, 2, 2, 2), (32, 96, 192, 384), (16, 2, 2, 1, 2)),
    TensorMap(BASE, "float64", (6, 9), (64,), (2, 9), (3, 4)),
]


@given(st.sampled_from(MAPS), st.lists(st.integers(-20, 20), min_size=5, max_size=5))
@settings(max_examples=150, deadline=None)
def test_every_rank_in_and_out_of_bounds(tensor_map, coordinates):
    memory = np.arange(4096, dtype=np.uint32).view(np.uint8)[: 1 << 12] % 251
    step = 128 // ELEMENT_TYPES[tensor_map.dtype].global_bits  # 16 bytes along dimension 0
    where = (coordinates[0] * step, *coordinates[1 : len(tensor_map.global_dim)])
    shared, plan = load(tensor_map, memory, where)
    want = expected_image(tensor_map, memory, where)
    assert plan.nbytes == len(want)
    np.testing.assert_array_equal(shared[0x800 : 0x800 + len(want)], want)
    assert (shared[0x800 + len(want) :] == 0xEE).all()


@pytest.mark.parametrize(("mode", "span"), [("32B", 32), ("64B", 64), ("128B", 128)])
def test_swizzles_follow_the_measured_pattern(mode, span):
    memory = np.random.default_rng(3).integers(0, 256, 1 << 13, dtype=np.uint8)
    tensor_map = TensorMap(BASE, "uint8", (128, 64), (128,), (span, 32), swizzle=mode)
    shared, _ = load(tensor_map, memory, (0, 2), 0x400)
    for row in range(32):
        for b in range(span):
            address = 0x400 + row * span + b
            chunk = (address >> 4) ^ ((address >> 7) & (span // 16 - 1))
            assert shared[chunk << 4 | b & 15] == memory[(row + 2) * 128 + b]


def test_rows_narrower_than_the_swizzle_start_a_span_each():
    memory = np.random.default_rng(5).integers(0, 256, 1 << 13, dtype=np.uint8)
    tensor_map = TensorMap(BASE, "uint8", (128, 64), (128,), (64, 8), swizzle="128B")
    shared, plan = load(tensor_map, memory, (32, 5), 0x400)
    assert plan.nbytes == 512
    for row in range(8):
        for chunk in range(4):
            at = 0x400 + row * 128 + ((chunk ^ row) << 4)
            want = memory[(row + 5) * 128 + 32 + 16 * chunk :][:16]
            np.testing.assert_array_equal(shared[at : at + 16], want)


def test_stores_clip_whole_units_of_16_bytes():
    tensor_map = TensorMap(BASE, "uint8", (200,), (), (64,))
    plan = box(tensor_map, (160,), 0x400)
    assert plan.take(np.zeros((1, 64), np.uint8)).shape == (1, 48)


def test_box_entirely_outside_still_counts_and_zeroes():
    tensor_map = TensorMap(BASE, "uint8", (64, 8), (64,), (64, 8))
    shared, plan = load(tensor_map, np.ones(512, np.uint8), (0, 9))
    assert plan.nbytes == 512
    assert (shared[0x800:0xA00] == 0).all()


def test_three_dimensional_trick_stacks_slabs_of_128_bytes():
    rows, k = 16, 512
    memory = np.random.default_rng(4).integers(0, 256, rows * k // 2, dtype=np.uint8)
    tensor_map = TensorMap(
        BASE, "16u4_align8b", (256, rows, k // 256), (k // 2, 128), (256, rows, 2), swizzle="128B"
    )
    same = TensorMap(
        BASE, "uint8", (128, rows, k // 256), (k // 2, 128), (128, rows, 2), swizzle="128B"
    )
    shared, plan = load(tensor_map, memory, (0, 0, 0), 0x400)
    as_bytes, _ = load(same, memory, (0, 0, 0), 0x400)
    np.testing.assert_array_equal(shared, as_bytes)
    assert plan.nbytes == rows * k // 2
    r, b = 5, 200  # byte 200 of row 5: slab 1, chunk 4 ^ 5
    assert shared[0x400 + rows * 128 + r * 128 + ((4 ^ 5) << 4) + b % 16] == memory[r * 256 + b]


def test_padded_4_bit_type_has_8_bytes_of_values_in_16():
    memory = np.arange(256, dtype=np.uint8)
    tensor_map = TensorMap(BASE, "16u4_align16b", (128, 2), (64,), (128, 2))
    shared, plan = load(tensor_map, memory, (0, 0))
    assert plan.nbytes == 256
    image = shared[0x800:0x900].reshape(2, 8, 16)
    np.testing.assert_array_equal(image[:, :, :8].reshape(2, 64), memory[:128].reshape(2, 64))


def test_gather4_takes_four_rows():
    memory = np.arange(64, dtype=np.uint8).repeat(32)
    tensor_map = TensorMap(BASE, "uint8", (32, 64), (32,), (32, 1))
    shared, plan = load(tensor_map, memory, (0,), rows=(5, 63, 64, 0))
    assert plan.nbytes == 128
    assert shared[0x800:0x880:32].tolist() == [5, 63, 0, 0]
    with pytest.raises(Violation, match="box of one row"):
        box(replace(tensor_map, box_dim=(32, 2)), (0,), 0, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("tensor_map", "coordinates", "address", "words"),
    [
        (MAPS[0], (0,), 0x810, "multiple of 128: use 0x800 or 0x880"),
        (MAPS[1], (0,), 0x800, "1 coordinates for a tensor map of rank 2"),
        (TensorMap(BASE, "16u4_align8b", (64, 2), (32,), (32, 1)), (2, 0), 0x800, "multiple of 32"),
        (TensorMap(BASE, "uint16", (64, 2), (128,), (32, 1)), (-4, 0), 0x800, "multiple of 8"),
        (TensorMap(BASE, "16u4_align16b", (256, 1), (128,), (128, 1)), (64, 0), 0x800, "of 128"),
    ],
)
def test_rules_of_a_copy(tensor_map, coordinates, address, words):
    with pytest.raises(Violation, match=words):
        box(tensor_map, coordinates, address)


@pytest.mark.parametrize("tensor_map", MAPS)
def test_image_round_trip(tensor_map):
    image = encode_tensor_map(tensor_map)
    assert len(image) == 128
    full = tensor_map.element_strides or (1,) * len(tensor_map.global_dim)
    assert decode_tensor_map(image) == replace(tensor_map, element_strides=full)


def test_foreign_bytes_are_no_tensor_map():
    with pytest.raises(Violation, match="no tensor map"):
        decode_tensor_map(bytes(128))


def test_encode_refuses_what_the_driver_refuses():
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        encode_tensor_map(replace(MAPS[1], global_strides=(40,)))


def test_replace_changes_one_field_each():
    image = encode_tensor_map(MAPS[2])
    for field, ordinal, value in (
        ("global_address", 0, 0x2000),
        ("global_stride", 1, 512),
        ("global_dim", 2, 7),
        ("box_dim", 1, 5),
        ("element_stride", 2, 2),
        ("swizzle_mode", 0, 1),
        ("fill_mode", 0, 0),
    ):
        image = replace_field(image, field, ordinal, value)
    assert decode_tensor_map(image) == TensorMap(
        0x2000, "float32", (9, 5, 7), (48, 512), (8, 5, 2), (1, 1, 2), "32B", "none", "zero"
    )


def test_replaced_field_is_checked_at_use():
    image = replace_field(encode_tensor_map(MAPS[2]), "global_stride", 0, 40)
    with pytest.raises(Violation, match="multiples of 16"):
        decode_tensor_map(image)
    with pytest.raises(Violation, match="ordinal is 4"):
        replace_field(image, "global_stride", 4, 16)
    with pytest.raises(Violation, match="no tensor map can hold"):
        replace_field(image, "box_dim", 0, 257)
