"""The allocation map and the cells of Tensor Memory."""

from __future__ import annotations

import numpy as np
import pytest

from fp4rt.emulator.memory import Violation
from fp4rt.emulator.tmem import TensorMemory


def test_allocations_share_the_columns():
    tmem = TensorMemory()
    assert tmem.allocate(256) == 0
    assert tmem.allocate(128) == 256
    assert tmem.allocate(128) == 384
    assert tmem.allocate(32) is None
    tmem.free(256, 128)
    assert tmem.allocate(32, high=True) == 352


@pytest.mark.parametrize("columns", [0, 16, 33, 96, 1024])
def test_illegal_sizes(columns):
    with pytest.raises(Violation, match="power of 2"):
        TensorMemory().allocate(columns)


def test_allocations_must_not_grow():
    tmem = TensorMemory()
    tmem.allocate(32)
    with pytest.raises(Violation, match="must not grow"):
        tmem.allocate(64)


def test_relinquished_permit():
    tmem = TensorMemory()
    tmem.permit = False
    with pytest.raises(Violation, match="relinquish"):
        tmem.allocate(32)


@pytest.mark.parametrize(("address", "columns"), [(0, 64), (32, 128), (1 << 16, 128)])
def test_dealloc_must_match_its_alloc(address, columns):
    tmem = TensorMemory()
    tmem.allocate(128)
    with pytest.raises(Violation, match=r"allocated are 128 columns \(0-127\)"):
        tmem.free(address, columns)


def test_columns_outside_the_allocation_are_named():
    tmem = TensorMemory()
    tmem.allocate(256)
    tmem.check("mma", 0, 128, 128, 128)
    with pytest.raises(Violation, match=r"columns 248-263, of which 256-263 are not allocated"):
        tmem.check("mma", 0, 128, 248, 16)
    with pytest.raises(Violation, match="512 columns"):
        tmem.check("mma", 0, 128, 504, 16)


def test_cells_must_be_written_before_they_are_read_and_after_each_alloc():
    tmem = TensorMemory()
    tmem.allocate(512)
    lanes, columns = np.arange(128)[:, None], np.arange(4)[None, :]
    with pytest.raises(Violation, match="512 Tensor Memory cells that were never written"):
        tmem.read("ld", lanes, columns)
    tmem.write(lanes, columns, np.full((128, 4), 7, np.uint32))
    assert (tmem.read("ld", lanes, columns) == 7).all()
    tmem.free(0, 512)
    tmem.allocate(512)
    with pytest.raises(Violation, match="lane 0, column 0"):
        tmem.read("ld", lanes, columns)
