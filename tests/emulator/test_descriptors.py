"""Matrix descriptors against the worked examples of the PTX ISA and of CUTLASS."""

from __future__ import annotations

import numpy as np
import pytest

from fp4rt.emulator.descriptors import (
    SharedDescriptor,
    addresses,
    decode_instruction,
    decode_tcgen05,
    decode_wgmma,
    swizzle,
)
from fp4rt.emulator.memory import Violation

SW128 = 0x4000404000000000
SCALES = 0x0000400800000000


def test_constants_of_public_kernels_decode():
    d = decode_tcgen05(SW128 | 0x1234)
    assert (d.start, d.sbo, d.mode, d.base_offset) == (0x12340, 1024, "128B", 0)
    d = decode_tcgen05(SCALES | 0x40)
    assert (d.start, d.lbo, d.sbo, d.mode) == (0x400, 0, 128, "none")


def test_worked_example_of_a_start_address_inside_the_pattern():
    d = decode_tcgen05(SW128 | (0x420 >> 4))
    table = addresses(d, 128, 32, "K")
    assert table[5, 0] == 0x6F0
    row, byte = np.mgrid[0:128, 0:32]
    chunk = 2 + byte // 16
    expected = 0x400 + row * 128 + ((chunk ^ (row & 7)) << 4) + byte % 16
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 47, 48, 52, 53, 60])
def test_each_reserved_or_fixed_bit_of_the_tcgen05_descriptor(bit):
    with pytest.raises(Violation, match="descriptor"):
        decode_tcgen05(SW128 ^ (1 << bit))


@pytest.mark.parametrize("mode", [3, 5, 7])
def test_illegal_tcgen05_swizzle_mode(mode):
    with pytest.raises(Violation, match=f"swizzle mode {mode}"):
        decode_tcgen05((SW128 & ~(7 << 61)) | mode << 61)


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 47, 48, 52, 61])
def test_each_reserved_bit_of_the_wgmma_descriptor(bit):
    with pytest.raises(Violation, match="reserved bits"):
        decode_wgmma(1 << 62 | 1 << bit)


def test_wgmma_and_tcgen05_number_the_modes_differently():
    assert [decode_wgmma(c << 62).mode for c in range(4)] == ["none", "128B", "64B", "32B"]
    codes = {0: "none", 1: "128B_atom32B", 2: "128B", 4: "64B", 6: "32B"}
    assert {c: decode_tcgen05(c << 61 | 1 << 46).mode for c in codes} == codes


def test_base_offset_needs_a_swizzle():
    with pytest.raises(Violation, match="base offset 3"):
        decode_tcgen05(SCALES | 3 << 49)


@pytest.mark.parametrize(("mode", "span"), [("32B", 32), ("64B", 64), ("128B", 128)])
def test_k_major_swizzle_permutes_chunks_within_each_row(mode, span):
    d = SharedDescriptor(0x800, 0, 8 * span, mode)
    table = addresses(d, 64, span, "K")
    assert sorted(table.ravel()) == list(range(0x800, 0x800 + 64 * span))
    row, byte = np.mgrid[0:64, 0:span]
    np.testing.assert_array_equal((table - 0x800) // span, row)
    pattern = (row * span // 128) % (span // 16)  # 128-byte line within the pattern
    np.testing.assert_array_equal((table % span) // 16, (byte // 16) ^ pattern)


def test_ptx_example_k_major_no_swizzle_tf32():
    # Exact layout ((8,2),(4,4)):((4,32),(1,64)) in elements of 4 bytes, LBO 64, SBO 32 of them.
    table = addresses(SharedDescriptor(0, 64 * 4, 32 * 4, "none"), 16, 64, "K")
    for row in range(16):
        for k in range(16):
            element = (row % 8) * 4 + (row // 8) * 32 + k % 4 + (k // 4) * 64
            assert table[row, 4 * k] == 4 * element


@pytest.mark.parametrize(
    ("mode", "shape", "strides", "lbo", "sbo"),
    [
        ("none", (8, 1, 2), ((1, 8, 64), (8, 128)), 128, 64),
        ("32B", (8, 2, 2), ((1, 8, 128), (16, 256)), 128, 256),
        ("64B", (8, 4, 2), ((1, 8, 256), (32, 512)), 256, 512),
    ],
)
def test_ptx_examples_mn_major_bf16(mode, shape, strides, lbo, sbo):
    rows = int(np.prod(shape))
    table = addresses(SharedDescriptor(0, 2 * lbo, 2 * sbo, mode), rows, 32, "MN", 2)
    for i in range(rows):
        parts = i % shape[0], i // shape[0] % shape[1], i // (shape[0] * shape[1])
        for k in range(16):
            element = sum(p * s for p, s in zip(parts, strides[0], strict=True))
            element += (k % 8) * strides[1][0] + (k // 8) * strides[1][1]
            expected = swizzle(np.array([2 * element]), mode)[0]
            assert table[i, 2 * k] == expected
            assert table[i, 2 * k + 1] == expected + 1


def test_k_major_operand_may_not_leave_the_swizzle_row():
    with pytest.raises(Violation, match="start it at most 96 bytes in"):
        addresses(SharedDescriptor(0x470, 0, 1024, "128B"), 8, 32, "K")


# -- instruction descriptors -------------------------------------------------------------------

GOOD = [
    (0x08100480, 1, 128, 64),
    (0x08200480, 1, 128, 128),
    (0x08400480, 1, 128, 256),
    (0x10200480, 2, 256, 128),
    (0x10400480, 2, 256, 256),
]


@pytest.mark.parametrize(("value", "group", "m", "n"), GOOD)
def test_nvfp4_instruction_descriptors(value, group, m, n):
    d = decode_instruction(value, "mxf4nvf4", group, 16)
    assert (d.m, d.n, d.k, d.a_type, d.b_type, d.d_type) == (m, n, 64, "e2m1", "e2m1", "f32")
    assert (d.scale_type, d.a_scale_id, d.b_scale_id) == ("ue4m3", 0, 0)


@pytest.mark.parametrize("bit", [0, 1, 2, 3, 6, 12, 15, 16, 24, 25, 26, 31])
def test_reserved_bits_of_the_nvfp4_instruction_descriptor(bit):
    with pytest.raises(Violation, match="0x"):
        decode_instruction(0x08200480 | 1 << bit, "mxf4nvf4", 1, 16)


@pytest.mark.parametrize(
    ("value", "group", "block", "words"),
    [
        (0x08200480 & ~(7 << 7) | 5 << 7, 1, 16, "A type is 5"),
        (0x08200480 & ~(3 << 10) | 2 << 10, 1, 16, "B type is 2"),
        (0x08200480 | 1 << 29, 1, 16, "scale factor A ID is 1"),
        (0x08200480 | 2 << 4, 1, 16, "scale factor B ID is 2"),
        (0x08200480, 1, 32, "UE4M3"),
        (0x08200480, 2, 64, "one scale per 16 or 32"),
        (0x10200480, 1, 16, "M is 256"),
        (0x00200480, 1, 16, "M is 0"),
        (0x08000480, 1, 16, "N is 0"),
        (0x08420480, 1, 16, "N is 264"),
        (0x10020480, 2, 16, "N is 8"),
    ],
)
def test_illegal_nvfp4_instruction_descriptors(value, group, block, words):
    with pytest.raises(Violation, match=words):
        decode_instruction(value, "mxf4nvf4", group, block)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_multiple_of_8_is_a_legal_n(n):
    value = 1 << 27 | (n >> 3) << 17 | 1 << 10 | 1 << 7
    assert decode_instruction(value, "mxf4nvf4", 1, 16).n == n


def test_f16_descriptor():
    value = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 13 | 1 << 16 | (64 >> 3) << 17 | (64 >> 4) << 24
    d = decode_instruction(value, "f16")
    assert (d.m, d.n, d.k, d.a_type, d.d_type) == (64, 64, 16, "bf16", "f32")
    assert (d.negate_a, d.negate_b, d.a_major, d.b_major) == (True, False, "K", "MN")


@pytest.mark.parametrize("bit", [0, 1, 2, 3, 6, 23, 29, 30, 31])
def test_reserved_bits_of_the_f16_descriptor(bit):
    with pytest.raises(Violation, match="0x"):
        decode_instruction(1 << 4 | 8 << 17 | 4 << 24 | 1 << bit, "f16")


def test_mxf4_takes_half_word_scale_ids():
    value = 0x08200480 | 1 << 23 | 2 << 29 | 2 << 4
    d = decode_instruction(value, "mxf4", 1, 32)
    assert (d.scale_type, d.a_scale_id, d.b_scale_id) == ("ue8m0", 2, 2)
