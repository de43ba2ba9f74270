"""Global and local memory: bounds, alignment and initialisation of every access are checked.

Global memory is a map of allocations, local memory one strip per thread. Each byte has a *valid*
flag: fresh memory is poison. Shared memory is in `shared`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from .launch import AsyncOp
    from .overlap import Overlap
    from .warp import Warp

SHARED_WINDOW = 0x7FFF << 32
LOCAL_WINDOW = 0x7FFE << 32
PARAM_WINDOW = 0x7FFD << 32

UINT: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
VALID = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}
_TRUE = 1


class Violation(Exception):
    """A rule was broken; whoever knows the instruction turns it into an EmulatorFault."""


# ------------------------------------------------------------------------------ global memory


class Allocation:
    """A range of device memory: its bytes and, for each, whether it was ever written."""

    __slots__ = ("base", "data", "live", "name", "readonly", "size", "valid", "valids", "views")

    def __init__(
        self, base: int, size: int, name: str, *, valid: bool = False, readonly: bool = False
    ) -> None:
        padded = (size + 31) // 16 * 16
        self.base, self.size, self.name = base, size, name
        self.data = np.full(padded, 0xCB, np.uint8)
        self.valid = np.full(padded, 1 if valid else 0, np.uint8)
        self.readonly, self.live = readonly, True
        self.views = {n: self.data.view(t) for n, t in UINT.items()}
        self.valids = {n: self.valid.view(t) for n, t in UINT.items()}


class GlobalMemory:
    """The device's address space: global and constant variables, buffers, kernel parameters."""

    FIRST = 0x2_0000_0000
    GUARD = 4096

    def __init__(self, *, check_valid: bool = True) -> None:
        self.check_valid = check_valid
        self.allocations: list[Allocation] = []
        self.bases: list[int] = []
        self.next = self.FIRST
        self.recent: Allocation | None = None
        self.overlap: Overlap | None = None
        self.actor: Warp | AsyncOp | None = None

    def alloc(self, size: int, name: str, *, valid: bool = False, align: int = 256) -> Allocation:
        """Return a new range; at least `GUARD` unmapped bytes lie between any two."""
        align = max(align, 256)
        base = -(-self.next // align) * align
        self.next = base + size + self.GUARD
        return self.map(Allocation(base, size, name, valid=valid))

    def map(self, allocation: Allocation) -> Allocation:
        """Add an allocation that brings its own address."""
        at = bisect_right(self.bases, allocation.base)
        self.bases.insert(at, allocation.base)
        self.allocations.insert(at, allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Unmap; a later access is a fault that names the allocation."""
        at = bisect_right(self.bases, allocation.base) - 1
        del self.bases[at], self.allocations[at]
        allocation.live = False
        if self.recent is allocation:
            self.recent = None

    def find(self, address: int, size: int = 1) -> Allocation:
        """Return the allocation that holds the bytes, or raise `Violation`."""
        at = bisect_right(self.bases, address) - 1
        if at >= 0:
            hit = self.allocations[at]
            if address + size <= hit.base + hit.size:
                return hit
            if address < hit.base + hit.size + self.GUARD:
                raise Violation(
                    f"global access of {size} bytes at {address:#x} is out of bounds: {hit.name} "
                    f"has {hit.size} bytes at {hit.base:#x}, the access starts at byte "
                    f"{address - hit.base}"
                )
        if at + 1 < len(self.bases) and self.bases[at + 1] - address <= self.GUARD:
            hit = self.allocations[at + 1]
            raise Violation(
                f"global access at {address:#x} is out of bounds: it starts "
                f"{hit.base - address} bytes before {hit.name} ({hit.size} bytes at {hit.base:#x})"
            )
        raise Violation(f"global access of {size} bytes at {address:#x} hits no live allocation")

    # -- lane accesses: addresses uint64[n], one naturally aligned element of `size` bytes each

    def _note(self, hit: Allocation, offsets: Any, size: int, write: bool) -> None:
        if self.overlap is not None and self.actor is not None:
            self.overlap.note(self.actor, hit, offsets, size, write)

    def _locate(self, addresses: Any, size: int) -> tuple[Allocation, Any] | None:
        """Return the allocation and offsets if all lanes hit one, otherwise None."""
        hit = self.recent
        if hit is None or not hit.base <= int(addresses[0]) < hit.base + hit.size:
            hit = self.recent = self.find(int(addresses[0]), size)
        offsets = addresses - np.uint64(hit.base)
        if hit.size < size or _TRUE in (offsets > np.uint64(hit.size - size)).tobytes():
            return None
        return hit, offsets

    def _each(self, addresses: Any, size: int) -> Iterable[tuple[Allocation, Any, Any]]:
        located = self._locate(addresses, size)
        if located is not None:
            yield located[0], located[1], slice(None)
            return
        left = np.ones(len(addresses), bool)
        while left.any():
            hit = self.find(int(addresses[left.argmax()]), size)
            offsets = addresses - np.uint64(hit.base)
            inside = left & (offsets <= np.uint64(max(hit.size - size, 0)))
            yield hit, offsets[inside], inside
            left &= ~inside

    def load(self, addresses: Any, size: int, unit: int) -> Any:
        """Return the elements as uint[n, size/unit]; `size` is also the alignment."""
        if _TRUE in ((addresses & np.uint64(size - 1)) != 0).tobytes():
            misaligned("global", addresses, size)
        out = np.empty((len(addresses), size // unit), UINT[unit])
        wide = unit if size == unit else min(size, 8)
        for hit, offsets, where in self._each(addresses, size):
            index = (offsets // np.uint64(wide)).astype(np.int64)
            if size > wide:
                index = index[:, None] + np.arange(size // wide)
            if self.overlap is not None:
                self._note(hit, offsets, size, False)
            if _TRUE in (hit.valids[wide][index] != VALID[wide]).tobytes():
                self._uninitialised(hit, offsets, size)
            got = hit.views[wide][index]
            out[where] = got.reshape(len(got), -1).view(UINT[unit])
        return out

    def store(self, addresses: Any, values: Any, size: int) -> None:
        """Store uint[n, size/unit] elements."""
        if _TRUE in ((addresses & np.uint64(size - 1)) != 0).tobytes():
            misaligned("global", addresses, size)
        wide = min(size, 8)
        data = np.ascontiguousarray(values).view(UINT[wide])
        for hit, offsets, where in self._each(addresses, size):
            if hit.readonly:
                raise Violation(f"store to {hit.name}, which is read-only")
            index = (offsets // np.uint64(wide)).astype(np.int64)
            if size > wide:
                index = index[:, None] + np.arange(size // wide)
            if self.overlap is not None:
                self._note(hit, offsets, size, True)
            part = data[where]
            hit.views[wide][index] = part.reshape(index.shape)
            hit.valids[wide][index] = VALID[wide]

    def _uninitialised(self, hit: Allocation, offsets: Any, size: int) -> None:
        if not self.check_valid:
            return
        for lane, offset in enumerate(offsets):
            bad = hit.valid[int(offset) : int(offset) + size] == 0
            if bad.any():
                raise Violation(
                    f"read of uninitialised global memory: byte {int(offset) + int(bad.argmax())} "
                    f"of {hit.name} ({hit.size} bytes), active lane number {lane}"
                )

    # -- blocks

    def read(self, w: Warp | None, address: int, nbytes: int) -> Any:
        """Return a copy of `nbytes` initialised bytes."""
        del w
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        hit = self.find(address, nbytes)
        at = address - hit.base
        self._note(hit, [at], nbytes, False)
        if 0 in hit.valid[at : at + nbytes].tobytes():
            self._uninitialised(hit, [at], nbytes)
        return hit.data[at : at + nbytes].copy()

    def write(self, w: Warp | None, address: int, values: Any) -> None:
        """Write bytes."""
        del w
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        if len(data) == 0:
            return
        hit = self.find(address, len(data))
        if hit.readonly:
            raise Violation(f"store to {hit.name}, which is read-only")
        at = address - hit.base
        self._note(hit, [at], len(data), True)
        hit.data[at : at + len(data)] = data
        hit.valid[at : at + len(data)] = 1

    def gather(self, w: Warp | None, addresses: Any, size: int) -> Any:
        """Return uint8[n, size]: `size` bytes at each address, of any alignment."""
        del w
        addresses = np.asarray(addresses, np.uint64)
        out = np.empty((len(addresses), size), np.uint8)
        steps = np.arange(size)
        if not len(addresses):
            return out
        for hit, offsets, where in self._each(addresses, size):
            index = offsets.astype(np.int64)[:, None] + steps
            self._note(hit, offsets, size, False)
            if 0 in hit.valid[index].tobytes():
                self._uninitialised(hit, offsets, size)
            out[where] = hit.data[index]
        return out

    def scatter(self, w: Warp | None, addresses: Any, values: Any) -> None:
        """Write uint8[n, size] at each address."""
        del w
        addresses = np.asarray(addresses, np.uint64)
        if not len(addresses):
            return
        steps = np.arange(values.shape[1])
        for hit, offsets, where in self._each(addresses, values.shape[1]):
            if hit.readonly:
                raise Violation(f"store to {hit.name}, which is read-only")
            index = offsets.astype(np.int64)[:, None] + steps
            self._note(hit, offsets, values.shape[1], True)
            hit.data[index] = values[where]
            hit.valid[index] = 1


def misaligned(space: str, addresses: Any, size: int) -> NoReturn:
    """Raise `Violation` for the first address that is no multiple of `size`."""
    address = next(int(a) for a in addresses if int(a) % size)
    raise Violation(f"misaligned {space} access: address {address:#x} is no multiple of {size}")


# ------------------------------------------------------------------------------- local memory


class Local:
    """Local (and function parameter) memory of a warp: `size` bytes for each lane."""

    def __init__(self, size: int, name: str = "local", *, check_valid: bool = True) -> None:
        self.size, self.name, self.check_valid = size, name, check_valid
        self.stride = (size + 15) // 16 * 16
        self.data = np.full(32 * self.stride, 0xCB, np.uint8)
        self.valid = np.zeros(32 * self.stride, np.uint8)
        self.views = {n: self.data.view(t) for n, t in UINT.items()}
        self.valids = {n: self.valid.view(t) for n, t in UINT.items()}
        self.lane_base = np.arange(32, dtype=np.int64) * self.stride

    def _index(self, lanes: Any, offsets: Any, size: int, wide: int) -> Any:
        if _TRUE in ((offsets < 0) | (offsets > self.size - size)).tobytes():
            bad = next(int(o) for o in offsets if not 0 <= o <= self.size - size)
            raise Violation(
                f"{self.name} access of {size} bytes at offset {bad} is out of bounds: a thread "
                f"has {self.size} bytes"
            )
        if _TRUE in (offsets % size != 0).tobytes():
            misaligned(self.name, offsets, size)
        index = (self.lane_base[lanes] + offsets) // wide
        return index[:, None] + np.arange(size // wide) if size > wide else index

    def load(self, lanes: Any, offsets: Any, size: int, unit: int) -> Any:
        """Return uint[n, size/unit] for the lanes, each at its own offset."""
        wide = min(size, 8)
        index = self._index(lanes, offsets, size, wide)
        if self.check_valid and _TRUE in (self.valids[wide][index] != VALID[wide]).tobytes():
            raise Violation(f"read of uninitialised {self.name} memory at offset {int(offsets[0])}")
        got = self.views[wide][index]
        return got.reshape(len(got), -1).view(UINT[unit])

    def store(self, lanes: Any, offsets: Any, values: Any, size: int) -> None:
        """Store uint[n, size/unit]."""
        wide = min(size, 8)
        index = self._index(lanes, offsets, size, wide)
        self.views[wide][index] = np.ascontiguousarray(values).view(UINT[wide]).reshape(index.shape)
        self.valids[wide][index] = VALID[wide]
