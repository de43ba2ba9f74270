"""Memory orders: named bijections between logical order and the order a kernel reads.

A layout is a pair of functions side by side, forward and inverse, each with the source of its
formula; a test walks every pair there and back over odd and empty shapes. `Nvfp4Array` is always
in logical order: a layout is applied in one place, at upload, and bytes in another order have a
type of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import html
from fp4rt.codes import E4M3, E4M3_VALUES, scale_bytes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

TILE_ROWS = 128
TILE_COLS = 4
TILE_BYTES = TILE_ROWS * TILE_COLS


# --- swizzled scales: tiles of 128 rows × 4 scale columns, 512 bytes each --------------------
#
# The order that tcgen05.cp and cuBLAS read ("1D block scaling factors layout" in the cuBLAS
# documentation; CUTLASS, cutlass/detail/sm100_blockscaled_layout.hpp, SfAtom). Rows are padded to
# 128 and scale columns to 4, with zero bytes. Inside a tile, byte 16 · (r % 32) + 4 · (r / 32) + c:
# the four 32-row quarters of a tile lie side by side.


@dataclass(frozen=True, eq=False)
class SwizzledScales:
    """Scales in swizzled (128×4 tile) order: the type says so, and no other type takes the bytes.

    Made by `swizzle_scales`, or from foreign bytes by the constructor.

    Parameters
    ----------
    data
        E4M3 bytes as uint8 (or float8_e4m3fn), of shape (..., ceil128(rows) · ceil4(cols)): a flat
        run of whole tiles for one operand, with a leading axis G for a stack. Kept as uint8.
    rows, cols
        Logical shape: rows of the operand, and scale columns (K / 16).

    Raises
    ------
    TypeError
        If data has another dtype, or rows or cols is no integer.
    ValueError
        If rows or cols is negative, or data has another length.

    Examples
    --------
    >>> SwizzledScales(np.zeros(1024, np.uint8), rows=200, cols=3)
    SwizzledScales(rows=200, cols=3, 1024 bytes)
    """

    data: NDArray[np.uint8]
    rows: int
    cols: int

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("cols", self.cols)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name} is {value!r}; it must be an integer")
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
            object.__setattr__(self, name, int(value))
        data = scale_bytes(self.data)
        size = swizzled_size(self.rows, self.cols)
        if data.ndim not in (1, 2) or data.shape[-1] != size:
            raise ValueError(
                f"data has shape {data.shape}; {self.rows} rows and {self.cols} scale columns, "
                f"padded to multiples of {TILE_ROWS} and {TILE_COLS}, take ({size},) bytes, or "
                f"(G, {size}) for a stack: pad with zeros before swizzling, then use .reshape"
            )
        data = np.ascontiguousarray(data).view()
        data.flags.writeable = False
        object.__setattr__(self, "data", data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Refuse to become a plain array: its order would be lost."""
        raise TypeError(f"{self!r} are in swizzled order; call unswizzle_scales on them first")

    def __repr__(self) -> str:
        """Give logical shape and size."""
        groups = f"{len(self.data)} groups, " if self.data.ndim == 2 else ""
        shape = f"rows={self.rows}, cols={self.cols}"
        return f"SwizzledScales({groups}{shape}, {self.data.nbytes} bytes)"

    def _repr_html_(self) -> str:
        """Show it in a notebook: logical shape, order, size, and a strip of the scales."""
        runs = self.data.reshape(-1, self.data.shape[-1])

        def scale_at(row: Any, col: Any) -> NDArray[np.float32]:
            group, row = row // self.rows, row % self.rows
            found = runs[group, swizzled_offset(row, col, self.cols)]
            return np.asarray(E4M3_VALUES[found])

        groups = f"{len(runs)} groups of " if self.data.ndim == 2 else ""
        padded = self.data.nbytes - len(runs) * self.rows * self.cols
        return html.card(
            "NVFP4 scales",
            {
                "shape": f"{groups}{self.rows} rows × {self.cols} scale columns, in host memory",
                "order": f"swizzled: tiles of {TILE_ROWS} × {TILE_COLS}, {TILE_BYTES} bytes each",
                "bytes": f"{html.size(self.data.nbytes)}, of which padding {html.size(padded)}",
            },
            html.strip(len(runs) * self.rows, self.cols, scale_at),
        )


def swizzled_size(rows: int, cols: int) -> int:
    """Give the bytes that rows × cols scales take in swizzled order, padding included.

    Examples
    --------
    >>> swizzled_size(200, 3)
    1024
    """
    return math.ceil(rows / TILE_ROWS) * math.ceil(cols / TILE_COLS) * TILE_BYTES


def swizzled_offset(row: Any, col: Any, cols: int) -> Any:
    """Give the byte at which the scale of (row, col) lies; the formula in one line.

    Parameters
    ----------
    row, col
        Integers, or integer arrays that broadcast together.
    cols
        Scale columns of the operand.

    Examples
    --------
    >>> [swizzled_offset(row, col, 8) for row, col in ((1, 0), (32, 0), (0, 4), (128, 0))]
    [16, 4, 512, 1024]
    """
    tile = row // TILE_ROWS * math.ceil(cols / TILE_COLS) + col // TILE_COLS
    return tile * TILE_BYTES + row % 32 * 16 + row % TILE_ROWS // 32 * 4 + col % TILE_COLS


def swizzle_scales(scales: ArrayLike) -> SwizzledScales:
    """Put scales in swizzled order; `unswizzle_scales` is the inverse.

    Parameters
    ----------
    scales
        E4M3 in linear order, float8_e4m3fn or uint8: (rows, cols), or (G, rows, cols) for a stack,
        each group padded on its own.

    Returns
    -------
    SwizzledScales
        With zero bytes as padding.

    Raises
    ------
    TypeError, ValueError
        If scales is in swizzled order already, or has another dtype or number of axes.

    Examples
    --------
    >>> swizzle_scales(np.array([[1, 2], [3, 4]], np.uint8)).data[[0, 1, 16, 17]]
    array([1, 2, 3, 4], dtype=uint8)
    """
    linear = scale_bytes(scales)
    if linear.ndim not in (2, 3):
        raise ValueError(
            f"scales has shape {linear.shape}; in linear order they are (rows, cols) or "
            "(G, rows, cols): use .reshape, or SwizzledScales(data, rows, cols) for swizzled bytes"
        )
    *leading, rows, cols = linear.shape
    row_tiles, col_tiles = math.ceil(rows / TILE_ROWS), math.ceil(cols / TILE_COLS)
    padded = np.zeros((*leading, row_tiles * TILE_ROWS, col_tiles * TILE_COLS), np.uint8)
    padded[..., :rows, :cols] = linear
    # (row tile, quarter, row, column tile, column) -> (row tile, column tile, row, quarter, column)
    tiles = padded.reshape(*leading, row_tiles, 4, 32, col_tiles, TILE_COLS)
    data = np.moveaxis(tiles, (-2, -3, -4), (-4, -3, -2)).reshape(
        *leading, swizzled_size(rows, cols)
    )
    return SwizzledScales(data, rows, cols)


def unswizzle_scales(swizzled: SwizzledScales) -> NDArray[Any]:
    """Put scales back in linear order, leaving out the padding; the inverse of `swizzle_scales`.

    Parameters
    ----------
    swizzled
        What `swizzle_scales` returns. For foreign bytes, make a `SwizzledScales` first.

    Returns
    -------
    ndarray of float8_e4m3fn, shape (rows, cols) or (G, rows, cols)

    Raises
    ------
    TypeError
        If swizzled is a plain array, whose order nobody can tell.

    Examples
    --------
    >>> scales = np.arange(12, dtype=np.uint8).reshape(4, 3)
    >>> bool((unswizzle_scales(swizzle_scales(scales)).view(np.uint8) == scales).all())
    True
    """
    if not isinstance(swizzled, SwizzledScales):
        raise TypeError(
            f"swizzled is a {type(swizzled).__name__}; say that its bytes are in swizzled order, "
            "and what shape they stand for: SwizzledScales(data, rows, cols)"
        )
    rows, cols = swizzled.rows, swizzled.cols
    leading = swizzled.data.shape[:-1]
    row_tiles, col_tiles = math.ceil(rows / TILE_ROWS), math.ceil(cols / TILE_COLS)
    tiles = swizzled.data.reshape(*leading, row_tiles, col_tiles, 32, 4, TILE_COLS)
    padded = np.moveaxis(tiles, (-4, -3, -2), (-2, -3, -4)).reshape(
        *leading, row_tiles * TILE_ROWS, col_tiles * TILE_COLS
    )
    return np.ascontiguousarray(padded[..., :rows, :cols]).view(E4M3)


# --- Blackwell's weights: blocks of 128 rows × 256 K, as one copy brings them to shared memory --
#
# A block holds 128 rows of 128 bytes (256 values) in the 128-byte swizzle that tcgen05 descriptors
# name (PTX ISA, "Swizzling modes"): the 16-byte chunk i of row r lies at chunk i ^ (r % 8).
# Blocks follow each other along K, then along rows; padding is zero. The scales of a block are its
# four 128×4 tiles, so they are swizzled scales with their columns padded to 16.

BLACKWELL_ROWS = 128
BLACKWELL_K = 256
BLACKWELL_BYTES = BLACKWELL_ROWS * BLACKWELL_K * 9 // 16
_LINE = BLACKWELL_K // 2


def blackwell_blocks(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Put packed weights in blocks of 128 rows × 256 K; `from_blackwell_blocks` is the inverse.

    Parameters
    ----------
    values
        Packed E2M1 in logical order, uint8, shape (rows, K / 2).

    Returns
    -------
    ndarray of uint8, shape (ceil(rows / 128) · ceil(K / 256), 128, 128)

    Examples
    --------
    >>> blocks = blackwell_blocks(np.arange(32, dtype=np.uint8).reshape(2, 16))
    >>> blocks.shape, blocks[0, 1, :16].tolist() == [0] * 16, blocks[0, 1, 16:20].tolist()
    ((1, 128, 128), True, [16, 17, 18, 19])
    """
    rows, width = values.shape
    row_blocks, k_blocks = math.ceil(rows / BLACKWELL_ROWS), math.ceil(width / _LINE)
    padded = np.zeros((row_blocks * BLACKWELL_ROWS, k_blocks * _LINE), np.uint8)
    padded[:rows, :width] = values
    lines = padded.reshape(row_blocks, BLACKWELL_ROWS, k_blocks, _LINE).swapaxes(1, 2)
    return _swizzle_lines(lines.reshape(-1, BLACKWELL_ROWS, _LINE))


def from_blackwell_blocks(blocks: NDArray[np.uint8], rows: int, width: int) -> NDArray[np.uint8]:
    """Take packed weights out of their blocks, leaving out the padding.

    Parameters
    ----------
    blocks
        What `blackwell_blocks` returns.
    rows, width
        Shape of the packed weights: rows, and K / 2.

    Examples
    --------
    >>> values = np.arange(260 * 24, dtype=np.uint64).astype(np.uint8).reshape(260, 24)
    >>> bool((from_blackwell_blocks(blackwell_blocks(values), 260, 24) == values).all())
    True
    """
    row_blocks, k_blocks = math.ceil(rows / BLACKWELL_ROWS), math.ceil(width / _LINE)
    lines = _swizzle_lines(blocks.reshape(-1, BLACKWELL_ROWS, _LINE))
    padded = lines.reshape(row_blocks, k_blocks, BLACKWELL_ROWS, _LINE).swapaxes(1, 2)
    values = padded.reshape(row_blocks * BLACKWELL_ROWS, k_blocks * _LINE)[:rows, :width]
    return np.ascontiguousarray(values)


def _swizzle_lines(lines: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Swap the 16-byte chunks of each 128-byte line, (n, rows, 128); its own inverse."""
    row, chunk = np.arange(BLACKWELL_ROWS)[:, None], np.arange(8)[None, :]
    chunks = lines.reshape(-1, BLACKWELL_ROWS, 8, 16)
    return chunks[:, row, chunk ^ row % 8].reshape(-1, BLACKWELL_ROWS, _LINE)


def blackwell_scales(scales: ArrayLike) -> SwizzledScales:
    """Put the scales of `blackwell_blocks` in swizzled order, their columns padded to 16.

    `unswizzle_scales` is the inverse, but for the zero columns added.

    Parameters
    ----------
    scales
        E4M3 in linear order, float8_e4m3fn or uint8, shape (rows, K / 16).

    Examples
    --------
    >>> blackwell_scales(np.zeros((200, 3), np.uint8))
    SwizzledScales(rows=200, cols=16, 4096 bytes)
    """
    linear = scale_bytes(scales)
    rows, cols = linear.shape
    padded = np.zeros((rows, math.ceil(cols / 16) * 16), np.uint8)
    padded[:, :cols] = linear
    return swizzle_scales(padded)


# --- Hopper's weights: blocks of 128 rows × 64 K, each lane's operands side by side ------------
#
# A block (4608 bytes) has two halves of 64 rows: first the codes of both (2048 bytes each), then
# their scales (256 bytes each); blocks follow each other along K, then along rows; padding is zero.
# In a half, row = 16 w + 8 h + r and K = 16 j + 8 i + 2 c + e belong to warp w, lane 4 r + c, k16
# step j and register a[h + 2 i] of the A fragment that wgmma and mma.sync share (PTX ISA, "Register
# Fragments for wgmma.mma_async.m64nNk16").
#   codes   byte 16 · (32 w + 4 r + c) + 4 j + 2 e + 1 - h; in it, i = 0 has its sign at bit 7 and
#           the rest at bits 3..1, i = 1 its sign at bit 0 and the rest at bits 6..4: few masks and
#           shifts then decode eight codes (cuda_src/common/nvfp4.cuh)
#   scales  byte 64 w + 8 r + 2 j + h

HOPPER_ROWS = 128
HOPPER_K = 64
HOPPER_BYTES = HOPPER_ROWS * HOPPER_K * 9 // 16
_CODES = HOPPER_ROWS * HOPPER_K // 2
_SCALES = HOPPER_ROWS * HOPPER_K // 16


def hopper_blocks(values: NDArray[np.uint8], scales: ArrayLike) -> NDArray[np.uint8]:
    """Put weights in blocks of 128 rows × 64 K; `from_hopper_blocks` is the inverse.

    Parameters
    ----------
    values
        Packed E2M1 in logical order, uint8, shape (rows, K / 2).
    scales
        E4M3 in linear order, float8_e4m3fn or uint8, shape (rows, K / 16).

    Returns
    -------
    ndarray of uint8, shape (ceil(rows / 128) · ceil(K / 64), 4608)

    Examples
    --------
    >>> blocks = hopper_blocks(np.full((2, 8), 0x0F, np.uint8), np.array([[1], [2]], np.uint8))
    >>> blocks.shape, blocks[0, :2].tolist(), blocks[0, [4096, 4104]].tolist()
    ((1, 4608), [0, 255], [1, 2])
    """
    linear = scale_bytes(scales)
    rows, width = values.shape
    row_blocks, k_blocks = math.ceil(rows / HOPPER_ROWS), math.ceil(2 * width / HOPPER_K)
    padded = np.zeros((row_blocks * HOPPER_ROWS, k_blocks * HOPPER_K // 2), np.uint8)
    padded[:rows, :width] = values
    padded_scales = np.zeros((row_blocks * HOPPER_ROWS, k_blocks * HOPPER_K // 16), np.uint8)
    padded_scales[:rows, : linear.shape[1]] = linear

    # (block, half, w, h, r, block, j, i, c) -> (..., e), then pairs of i in one byte
    bytes_ = padded.reshape(row_blocks, 2, 4, 2, 8, k_blocks, 4, 2, 4)
    first, second = (
        np.stack([bytes_[..., i, :] & 15, bytes_[..., i, :] >> 4], axis=-1) for i in range(2)
    )
    codes = (first & 8) << 4 | (first & 7) << 1 | second >> 3 | (second & 7) << 4
    # -> (block, block, half, w, r, c, j, e, 1 - h)
    codes = codes[:, :, :, ::-1].transpose(0, 5, 1, 2, 4, 7, 6, 8, 3)
    # (block, half, w, h, r, block, j) -> (block, block, half, w, r, j, h)
    parts = padded_scales.reshape(row_blocks, 2, 4, 2, 8, k_blocks, 4)
    parts = parts.transpose(0, 5, 1, 2, 4, 6, 3)
    count = row_blocks * k_blocks
    return np.concatenate([codes.reshape(count, _CODES), parts.reshape(count, _SCALES)], axis=1)


def from_hopper_blocks(
    blocks: NDArray[np.uint8], rows: int, width: int
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Take weights out of their blocks, leaving out the padding.

    Parameters
    ----------
    blocks
        What `hopper_blocks` returns.
    rows, width
        Shape of the packed weights: rows, and K / 2.

    Returns
    -------
    values : ndarray of uint8, shape (rows, width)
    scales : ndarray of float8_e4m3fn, shape (rows, width / 8)

    Examples
    --------
    >>> values = np.arange(130 * 72, dtype=np.uint64).astype(np.uint8).reshape(130, 72)
    >>> scales = values[:, :9]
    >>> found = from_hopper_blocks(hopper_blocks(values, scales), 130, 72)
    >>> bool((found[0] == values).all() and (found[1].view(np.uint8) == scales).all())
    True
    """
    row_blocks, k_blocks = math.ceil(rows / HOPPER_ROWS), math.ceil(2 * width / HOPPER_K)
    codes = blocks[:, :_CODES].reshape(row_blocks, k_blocks, 2, 4, 8, 4, 4, 2, 2)
    codes = codes.transpose(0, 2, 3, 8, 4, 1, 6, 5, 7)[:, :, :, ::-1]
    first = codes >> 4 & 8 | codes >> 1 & 7
    second = codes << 3 & 8 | codes >> 4 & 7
    values = np.stack([nibbles[..., 0] | nibbles[..., 1] << 4 for nibbles in (first, second)], -2)
    values = values.reshape(row_blocks * HOPPER_ROWS, k_blocks * HOPPER_K // 2)
    parts = blocks[:, _CODES:].reshape(row_blocks, k_blocks, 2, 4, 8, 4, 2)
    scales = parts.transpose(0, 2, 3, 6, 4, 1, 5)
    scales = scales.reshape(row_blocks * HOPPER_ROWS, k_blocks * HOPPER_K // 16)
    return (
        np.ascontiguousarray(values[:rows, :width]),
        np.ascontiguousarray(scales[:rows, : width // 8]).view(E4M3),
    )


def hopper_prepared_bytes(max_m: int, num_groups: int, max_k: int) -> int:
    """Give the most bytes that Hopper's `prepare` writes: A as 16-bit atoms of 8 rows × 64 K.

    And 16 KiB to spare: a tile whose height is rounded up reads beyond its last row.

    Examples
    --------
    >>> hopper_prepared_bytes(max_m=9, num_groups=2, max_k=80) - 16384
    4096
    """
    row_atoms = (max_m + 7 * min(num_groups, max_m)) // 8
    return row_atoms * math.ceil(max_k / 64) * 1024 + 16384
