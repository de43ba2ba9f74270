"""The allocation map and the cells of Tensor Memory."""

from __future__ import annotations

import numpy as np
import pytest

from fp4rt.emulator.memory import Violation
from fp4rt.emulator.tmem import Store, TensorMemory


def allocate(tmem, columns):
    tmem.check_alloc(columns)
    places = tmem.places(columns)
    if places:
        tmem.take(places[0], columns)
    return places


def test_allocations_share_the_columns_of_a_multiprocessor():
    store = Store()
    one, two = TensorMemory(store), TensorMemory(store)
    assert allocate(one, 256)[0] == 0
    assert allocate(two, 128)[0] == 256
    assert allocate(two, 128) == [384]
    assert allocate(one, 32) == []
    two.free(256, 128)
    assert allocate(one, 32) == [256, 288, 320, 352]
    with pytest.raises(Violation, match="256-287 are not allocated"):
        two.check("mma", 0, 128, 256, 32)


@pytest.mark.parametrize("columns", [0, 16, 33, 96, 1024])
def test_illegal_sizes(columns):
    with pytest.raises(Violation, match="power of 2"):
        allocate(TensorMemory(), columns)


def test_allocations_must_not_grow():
    tmem = TensorMemory()
    allocate(tmem, 32)
    with pytest.raises(Violation, match="must not grow"):
        allocate(tmem, 64)


def test_relinquished_permit():
    tmem = TensorMemory()
    tmem.permit = False
    with pytest.raises(Violation, match="relinquish"):
        allocate(tmem, 32)


@pytest.mark.parametrize(("address", "columns"), [(0, 64), (32, 128), (1 << 16, 128)])
def test_dealloc_must_match_its_alloc(address, columns):
    tmem = TensorMemory()
    allocate(tmem, 128)
    with pytest.raises(Violation, match=r"allocated are 128 columns \(0-127\)"):
        tmem.free(address, columns)


def test_columns_outside_the_allocation_are_named():
    tmem = TensorMemory()
    allocate(tmem, 256)
    tmem.check("mma", 0, 128, 128, 128)
    with pytest.raises(Violation, match=r"columns 248-263, of which 256-263 are not allocated"):
        tmem.check("mma", 0, 128, 248, 16)
    with pytest.raises(Violation, match="512 columns"):
        tmem.check("mma", 0, 128, 504, 16)


def test_cells_must_be_written_before_they_are_read_and_after_each_alloc():
    tmem = TensorMemory()
    allocate(tmem, 512)
    lanes, columns = np.arange(128)[:, None], np.arange(4)[None, :]
    with pytest.raises(Violation, match="512 Tensor Memory cells that were never written"):
        tmem.read("ld", lanes, columns)
    tmem.write(lanes, columns, np.full((128, 4), 7, np.uint32))
    assert (tmem.read("ld", lanes, columns) == 7).all()
    tmem.free(0, 512)
    allocate(tmem, 512)
    with pytest.raises(Violation, match="lane 0, column 0"):
        tmem.read("ld", lanes, columns)
