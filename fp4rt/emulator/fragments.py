"""Which matrix element sits in which register of which lane.

One rule covers every shape of mma.sync and wgmma: a 32-bit register holds `per` neighbours along
K, four lanes of a group continue along K, eight groups run along M (or N). Source: PTX ISA,
"Matrix fragments for mma.m16n8k*" and "Register Fragments" of wgmma. The tcgen05.ld/st shapes
follow the PTX figures as spelled out in CUTLASS copy_traits_sm100.hpp.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .memory import Violation

Index = NDArray[np.int64]
_LANE = np.arange(32)


@lru_cache(maxsize=64)
def a_fragment(registers: int, per: int) -> tuple[Index, Index]:
    """Return (row, k) of each element of A, shape (32 lanes, registers, per).

    Examples
    --------
    >>> row, k = a_fragment(4, 2)          # m16n8k16, f16
    >>> int(row[5, 3, 1]), int(k[5, 3, 1])
    (9, 11)
    """
    lane, reg, i = _LANE[:, None, None], np.arange(registers)[None, :, None], np.arange(per)
    row = lane // 4 + 8 * (reg & 1) + 0 * i
    k = per * (lane % 4) + i + 4 * per * (reg >> 1)
    return row, k


@lru_cache(maxsize=64)
def b_fragment(registers: int, per: int) -> tuple[Index, Index]:
    """Return (n, k) of each element of B, shape (32 lanes, registers, per)."""
    lane, reg, i = _LANE[:, None, None], np.arange(registers)[None, :, None], np.arange(per)
    return lane // 4 + 0 * reg + 0 * i, per * (lane % 4) + i + 4 * per * reg


@lru_cache(maxsize=64)
def d_fragment(values: int) -> tuple[Index, Index]:
    """Return (row, column) of each of a lane's accumulator values, shape (32 lanes, values).

    Values 4j .. 4j+3 lie in columns 8j .. 8j+7: mma.sync has 4, wgmma N/2. The rows are those of
    one warp; warp q of a warpgroup adds 16 q.
    """
    lane, i = _LANE[:, None], np.arange(values)[None, :]
    return lane // 4 + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)


_LD_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_LD_MAX = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}


def tmem_registers(shape: str, num: int) -> int:
    """Return the 32-bit registers per lane of a tcgen05.ld/st shape."""
    if shape not in _LD_REGISTERS or num not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise Violation(f"tcgen05.ld/st shape .{shape}.x{num} does not exist")
    if num > _LD_MAX[shape]:
        raise Violation(f"tcgen05.ld/st .{shape} goes up to .x{_LD_MAX[shape]}, got .x{num}")
    return _LD_REGISTERS[shape] * num


@lru_cache(maxsize=256)
def tmem_fragment(
    shape: str, num: int, split: int = 0, packed: bool = False
) -> tuple[Index, Index]:
    """Return (lane, column) offsets of every 32-bit word that a tcgen05.ld/st moves.

    Parameters
    ----------
    shape, num
        ``"32x32b"`` … and the repetition count.
    split
        Column distance of the two halves of ``16x32bx2``.
    packed
        ``.pack::16b`` / ``.unpack::16b``: each register holds the low halves of two neighbouring
        columns.

    Returns
    -------
    tuple of ndarray
        Offsets of shape (32 lanes, registers), or (32, registers, 2) if packed.

    Examples
    --------
    >>> lane, column = tmem_fragment("16x256b", 8)
    >>> int(lane[9, 7]), int(column[9, 7])
    (10, 11)
    """
    count = tmem_registers(shape, num)
    t, j = _LANE[:, None], np.arange(count)[None, :]
    if shape == "32x32b":
        lane, column = t + 0 * j, j + 0 * t
    elif shape == "16x64b":
        lane, column = t // 4 + 8 * (t & 1) + 0 * j, 2 * j + ((t >> 1) & 1)
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (j & 1), 4 * (j >> 1) + t % 4
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * ((j >> 1) & 1), 8 * (j >> 2) + 2 * (t % 4) + (j & 1)
    else:
        lane, column = t % 16 + 0 * j, j + 0 * t
    second = split * (t // 16) if shape == "16x32bx2" else 0
    if not packed:
        return lane, column + second
    halves = 2 * column[..., None] + np.arange(2)
    second = split * (t[..., None] // 16) if shape == "16x32bx2" else 0
    return np.broadcast_to(lane[..., None], halves.shape), halves + second


# tcgen05.cp shapes: rows of the source, bytes per row, and the lanes each row goes to.
_CP_SHAPES: dict[tuple[str, str], tuple[int, int]] = {
    ("128x256b", ""): (128, 32),
    ("4x256b", ""): (4, 32),
    ("128x128b", ""): (128, 16),
    ("64x128b", "warpx2::02_13"): (64, 16),
    ("64x128b", "warpx2::01_23"): (64, 16),
    ("32x128b", "warpx4"): (32, 16),
}


@lru_cache(maxsize=16)
def cp_lanes(shape: str, multicast: str) -> tuple[int, Index]:
    """Return (bytes per row, lanes) of a tcgen05.cp, lanes of shape (copies, rows).

    ``4x256b`` refreshes the first lane of each 32-lane partition (inferred from the "4 datapath"
    traits of CUTLASS: rows are 32 lanes apart).
    """
    if (shape, multicast) not in _CP_SHAPES:
        forms = ", ".join(f".{s}{'.' + m if m else ''}" for s, m in _CP_SHAPES)
        given = f".{shape}{'.' + multicast if multicast else ''}"
        raise Violation(f"tcgen05.cp{given} does not exist; the shapes are {forms}")
    rows, width = _CP_SHAPES[shape, multicast]
    r = np.arange(rows)
    if multicast == "warpx4":
        lanes = r[None, :] + 32 * np.arange(4)[:, None]
    elif multicast == "warpx2::02_13":
        lanes = r[None, :] + 64 * np.arange(2)[:, None]
    elif multicast == "warpx2::01_23":
        lanes = (r % 32 + 64 * (r // 32))[None, :] + 32 * np.arange(2)[:, None]
    elif rows == 4:
        lanes = (32 * r)[None, :]
    else:
        lanes = r[None, :]
    return width, lanes
