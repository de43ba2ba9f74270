"""Tensor Memory of one CTA: cells, the allocation map, and which cells were ever written.

128 lanes by 512 columns of 32-bit cells (PTX ISA, "Tensor Memory"). An address has the lane in
bits 31-16 and the column in bits 15-0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .memory import Violation

LANES = 128
COLUMNS = 512
GRANULE = 32


def split_address(address: int) -> tuple[int, int]:
    """Return (lane, column) of a Tensor Memory address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


def _spans(columns: NDArray[np.int64]) -> str:
    """Write sorted column numbers as ranges: ``0-31, 64``."""
    breaks = np.flatnonzero(np.diff(columns) > 1)
    starts = np.concatenate([columns[:1], columns[breaks + 1]])
    ends = np.concatenate([columns[breaks], columns[-1:]])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))


class Store:
    """The cells of one multiprocessor, which its resident CTAs share.

    Attributes
    ----------
    cells
        uint32, shape (128, 512).
    written
        bool, same shape: whether a cell was ever written since it was allocated.
    taken
        bool, shape (512,): which columns are allocated by some CTA.
    """

    def __init__(self) -> None:
        self.cells = np.full((LANES, COLUMNS), 0x7FBADBAD, np.uint32)
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.taken = np.zeros(COLUMNS, bool)


class TensorMemory:
    """What one CTA has of the Tensor Memory.

    Attributes
    ----------
    store
        The multiprocessor's cells.
    owned
        bool, shape (512,): this CTA's columns.
    allocations
        Number of columns of each live allocation by its base column.
    strict
        Whether only this CTA's columns may be used.
    """

    def __init__(self, store: Store | None = None, *, strict: bool = True) -> None:
        self.strict = strict
        self.store = store or Store()
        self.owned = np.zeros(COLUMNS, bool)
        self.allocations: dict[int, int] = {}
        self.last_size = COLUMNS
        self.permit = True

    def check_size(self, columns: int) -> None:
        """Check the column count of an alloc or dealloc."""
        if not GRANULE <= columns <= COLUMNS or columns & (columns - 1):
            raise Violation(
                f"{columns} Tensor Memory columns; the number must be a power of 2 in "
                f"{GRANULE} .. {COLUMNS}"
            )

    def check_alloc(self, columns: int) -> None:
        """Check that an alloc is legal, whether or not there is room for it now."""
        self.check_size(columns)
        if not self.permit:
            raise Violation("tcgen05.alloc after tcgen05.relinquish_alloc_permit of the same CTA")
        if columns > self.last_size:
            raise Violation(
                f"tcgen05.alloc of {columns} columns after one of {self.last_size}; successive "
                "allocations of a CTA must not grow"
            )

    def places(self, columns: int) -> list[int]:
        """Return the base columns at which an allocation would fit now."""
        taken = self.store.taken
        return [
            base
            for base in range(0, COLUMNS - columns + 1, GRANULE)
            if not taken[base : base + columns].any()
        ]

    def take(self, base: int, columns: int) -> None:
        """Allocate columns that `places` offered."""
        part = slice(base, base + columns)
        self.store.taken[part] = self.owned[part] = True
        self.store.written[:, part] = False
        self.allocations[base] = columns
        self.last_size = columns

    def free(self, address: int, columns: int) -> None:
        """Release an allocation; address and size must be those of its alloc."""
        lane, base = split_address(address)
        self.check_size(columns)
        if lane or self.allocations.get(base) != columns:
            raise Violation(
                f"tcgen05.dealloc of {columns} columns at {address:#x}; {self.describe()}"
            )
        del self.allocations[base]
        self.owned[base : base + columns] = self.store.taken[base : base + columns] = False

    def describe(self) -> str:
        """Say what is allocated, for messages."""
        if not self.allocations:
            return "nothing is allocated"
        live = (f"{n} columns ({b}-{b + n - 1})" for b, n in sorted(self.allocations.items()))
        return "allocated are " + " and ".join(live)

    def check(self, what: str, lane: int, lanes: int, column: int, columns: int) -> None:
        """Check that a rectangle of cells exists and is allocated."""
        if lane + lanes > LANES or column + columns > COLUMNS:
            raise Violation(
                f"{what} covers Tensor Memory lanes {lane}-{lane + lanes - 1}, columns "
                f"{column}-{column + columns - 1}; there are {LANES} lanes and {COLUMNS} columns"
            )
        missing = np.flatnonzero(~self.owned[column : column + columns]) + column
        if len(missing) and self.strict:
            raise Violation(
                f"{what} uses Tensor Memory columns {column}-{column + columns - 1}, of which "
                f"{_spans(missing)} are not allocated; {self.describe()}: "
                "allocate as many columns as are used"
            )

    def read(
        self, what: str, lanes: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        """Return cells, which must have been written."""
        ok = self.store.written[lanes, columns]
        if not ok.all():
            where = np.argwhere(~ok)[0]
            lane = np.broadcast_to(lanes, ok.shape)[tuple(where)]
            column = np.broadcast_to(columns, ok.shape)[tuple(where)]
            raise Violation(
                f"{what} reads {int((~ok).sum())} Tensor Memory cells that were never written, "
                f"the first at lane {lane}, column {column}"
            )
        return np.asarray(self.store.cells[lanes, columns])

    def write(
        self, lanes: NDArray[np.int64], columns: NDArray[np.int64], values: NDArray[np.uint32]
    ) -> None:
        """Set cells."""
        self.store.cells[lanes, columns] = values
        self.store.written[lanes, columns] = True
