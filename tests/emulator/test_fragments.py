"""Register fragments against the formulas of the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest

from fp4rt.emulator.fragments import (
    a_fragment,
    b_fragment,
    cp_lanes,
    d_fragment,
    tmem_fragment,
    tmem_registers,
)
from fp4rt.emulator.memory import Violation


def test_f16_a_fragment_is_the_isa_formula():
    row, k = a_fragment(4, 2)
    for lane in range(32):
        for i in range(8):
            group, thread = lane >> 2, lane % 4
            want = group if i < 2 or 4 <= i < 6 else group + 8
            assert row[lane, i // 2, i % 2] == want
            assert k[lane, i // 2, i % 2] == thread * 2 + (i & 1) + (8 if i >= 4 else 0)


def test_s8_a_fragment_of_m16n8k16_is_the_isa_formula():
    row, k = a_fragment(2, 4)
    for lane in range(32):
        for i in range(8):
            assert row[lane, i // 4, i % 4] == (lane >> 2) + (8 if i >= 4 else 0)
            assert k[lane, i // 4, i % 4] == (lane % 4) * 4 + (i & 3)


@pytest.mark.parametrize("per", [1, 2, 4, 8, 32])
def test_fragments_are_bijections(per):
    row, k = a_fragment(4, per)
    assert len(set(zip(row.ravel(), k.ravel(), strict=True))) == 16 * 8 * per
    n, k = b_fragment(2, per)
    assert len(set(zip(n.ravel(), k.ravel(), strict=True))) == 8 * 8 * per


@pytest.mark.parametrize("values", [4, 12, 128])
def test_accumulator_fragment(values):
    row, column = d_fragment(values)
    assert len(set(zip(row.ravel(), column.ravel(), strict=True))) == 32 * values
    assert row.max() == 15
    assert column.max() == 2 * values - 1
    assert (int(row[6, 3]), int(column[6, 3])) == (9, 5)


SHAPES = {"32x32b": (32, 1), "16x64b": (16, 2), "16x128b": (16, 4), "16x256b": (16, 8)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num", [1, 2, 8, 32])
def test_tmem_shapes_cover_their_rectangle_once(shape, num):
    lanes, width = SHAPES[shape]
    lane, column = tmem_fragment(shape, num)
    assert lane.shape == (32, tmem_registers(shape, num))
    cells = set(zip(lane.ravel().tolist(), column.ravel().tolist(), strict=True))
    assert cells == {(i, j) for i in range(lanes) for j in range(width * num)}


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_shapes_cover_twice_the_columns(shape):
    lanes, width = SHAPES[shape]
    lane, column = tmem_fragment(shape, 2, packed=True)
    cells = set(zip(lane.ravel().tolist(), column.ravel().tolist(), strict=True))
    assert cells == {(i, j) for i in range(lanes) for j in range(4 * width)}
    assert (column[..., 1] == column[..., 0] + 1).all()


def test_split_shape():
    lane, column = tmem_fragment("16x32bx2", 4, split=64)
    assert (lane[17] == 1).all()
    assert column[1].tolist() == [0, 1, 2, 3]
    assert column[17].tolist() == [64, 65, 66, 67]


def test_worked_shapes():
    lane, column = tmem_fragment("16x256b", 8)
    t, j = 13, 22  # lane t/4 + 8 ((j>>1)&1), column 8 (j>>2) + 2 (t%4) + (j&1)
    assert (lane[t, j], column[t, j]) == (3 + 8, 8 * 5 + 2)
    lane, column = tmem_fragment("16x128b", 4)
    assert (lane[13, 5], column[13, 5]) == (3 + 8, 4 * 2 + 1)
    lane, column = tmem_fragment("16x64b", 2)
    assert (lane[7, 1], column[7, 1]) == (1 + 8, 2 + 1)


@pytest.mark.parametrize(
    ("shape", "num"), [("16x256b", 64), ("16x128b", 128), ("8x8b", 1), ("32x32b", 3)]
)
def test_shapes_that_do_not_exist(shape, num):
    with pytest.raises(Violation):
        tmem_registers(shape, num)


def test_cp_multicasts():
    width, lanes = cp_lanes("32x128b", "warpx4")
    assert width == 16
    assert lanes[:, 5].tolist() == [5, 37, 69, 101]
    assert cp_lanes("64x128b", "warpx2::02_13")[1][:, 40].tolist() == [40, 104]
    assert cp_lanes("64x128b", "warpx2::01_23")[1][:, 40].tolist() == [72, 104]
    assert cp_lanes("128x256b", "")[0] == 32
    with pytest.raises(Violation, match="32x128b does not exist"):
        cp_lanes("32x128b", "")
    assert np.array_equal(cp_lanes("4x256b", "")[1], [[0, 32, 64, 96]])
