"""Sets of lanes as bool[32] and as integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .warp import Warp

_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
FULL = 0xFFFFFFFF


def bits_of(mask: Any) -> int:
    """Return bool[32] as an integer."""
    return int(np.packbits(mask, bitorder="little").view("<u4")[0])


def lanes_of(bits: int) -> Any:
    """Return an integer as bool[32]."""
    return (np.uint32(bits) & _BITS) != 0


def member(w: Warp, lanes: Any, want: int) -> None:
    """Raise the fault unless all of `lanes` are in the membermask `want`."""
    outside = bits_of(lanes) & ~want
    if outside:
        raise w.fault(
            f"lanes {outside:#010x} execute a .sync instruction whose membermask {want:#010x} does "
            "not name them"
        )
