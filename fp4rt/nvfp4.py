"""The NVFP4 operand: `Nvfp4Array`, `quantize` and `dequantize`, saving and loading.

An operand is three arrays. ``values`` holds E2M1 numbers, two per byte along K with element 2i in
the low nibble; ``scales`` holds one E4M3 number per scale block of 16 elements along K;
``global_scale`` is one float32 (or one per group). An element is the product of all three::

    element = e2m1 · e4m3 · global_scale

Every e2m1 · e4m3 has at most 6 significant bits, so it is exact in float16, bfloat16 and float32.
`quantize` is defined in IEEE float32 operations in a stated order, so that a GPU kernel compiled
without flush-to-zero and without approximate division produces the same bytes.
"""

from __future__ import annotations

import errno
import lzma
import math
import operator
import struct
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal
from zipfile import BadZipFile

import ml_dtypes
import numpy as np

from fp4rt import html
from fp4rt.codes import (
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    E4M3_VALUES,
    FLOATS,
    NAN_SCALE,
    checked_float_dtype,
    index_text,
    real_numbers,
    refuse_masked,
    round_e2m1,
    round_e4m3,
    round_to,
    scale_bytes,
    scale_high_bytes,
    scaled_pairs,
    unpack,
    view_hint,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

SCALE_BLOCK = 16
"""Elements along K that share one scale."""
GLOBAL_SCALE_MIN = np.float32(2.0**-126)
"""Smallest global scale `quantize` makes or takes: float32's smallest normal number."""
GLOBAL_SCALE_MAX = np.finfo(np.float32).max / np.float32(E2M1_MAX * E4M3_MAX)
"""Largest global scale `quantize` makes or takes: 6 · 448 times it is still finite in float32."""

_TILE = 1 << 16  # elements worked on at a time: the float32 scratch stays in the L2 cache
_DECODE_TILE = 1 << 17  # larger, so that threads that decode side by side seldom want the GIL


# --- the operand ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Nvfp4Array:
    """An NVFP4 operand in logical order: (rows, K), or (G, rows, K) for G stacked groups.

    Made by `quantize`, or from existing bytes by `Nvfp4Array.from_parts`; both go through the same
    checks. The arrays are read-only views (bytes that came in contiguous are not copied).

    Attributes
    ----------
    values
        uint8 of shape (..., rows, ceil16(K) / 2): E2M1, element 2i in the low nibble of byte i.
    scales
        float8_e4m3fn of shape (..., rows, ceil16(K) / 16), always in linear order; scales in
        another order have a type of their own (`fp4rt.layout.SwizzledScales`).
    global_scale
        numpy.float32, or float32 of shape (G,) for a stack with one per group.
    k
        Logical K. If it is not a multiple of 16, the last block is padded with zero codes.

    Examples
    --------
    >>> q = quantize(np.ones((2, 40), np.float32))
    >>> q.shape, q.values.shape, q.scales.shape
    ((2, 40), (2, 24), (2, 3))
    >>> q
    Nvfp4Array(shape=(2, 40), global_scale=0.000372024, 58 bytes)
    """

    values: NDArray[np.uint8]
    scales: NDArray[Any]
    global_scale: np.float32 | NDArray[np.float32]
    k: int

    def __post_init__(self) -> None:
        values = _checked_values(self.values)
        k = _checked_k(self.k, values.shape[-1])
        scales = _checked_scales(self.scales, values.shape)
        num_groups = values.shape[0] if values.ndim == 3 else None
        global_scale = checked_global_scale(self.global_scale, num_groups)
        padding = unpack(values[..., k // 2 :])[..., k % 2 :]
        if (padding & 7).any():
            index = np.argwhere(padding & 7)[0]
            index[-1] += k
            raise ValueError(
                f"element {index_text(index)} of values is not zero, but K is {k}: the elements "
                f"from {k} on only pad the last scale block; set their codes to 0, or pass "
                f"k={2 * values.shape[-1]}"
            )
        self._set(values, scales, global_scale, k)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts, so that a copy's arrays are read-only as well."""
        return Nvfp4Array._trusted, (self.values, self.scales, self.global_scale, self.k)

    def _set(self, values: NDArray[Any], scales: NDArray[Any], global_scale: Any, k: int) -> None:
        for name, part in (("values", values), ("scales", scales), ("global_scale", global_scale)):
            if isinstance(part, np.ndarray):
                part = np.ascontiguousarray(part).view()
                part.flags.writeable = False
            object.__setattr__(self, name, part)
        object.__setattr__(self, "k", k)

    @classmethod
    def _trusted(
        cls, values: NDArray[Any], scales: NDArray[Any], global_scale: Any, k: int
    ) -> Nvfp4Array:
        """Make an operand from parts that fit together already, such as parts of an operand."""
        self = object.__new__(cls)
        self._set(values, scales, global_scale, k)
        return self

    @classmethod
    def from_parts(
        cls, values: ArrayLike, scales: ArrayLike, global_scale: ArrayLike, k: int | None = None
    ) -> Nvfp4Array:
        """Make an operand from bytes that are already NVFP4.

        Parameters
        ----------
        values
            uint8, (rows, K / 2) or (G, rows, K / 2), element 2i in the low nibble. (For codes one
            per byte, see `pack`; for the other nibble order, ``pack(unpack(v, even="high"))``.)
        scales
            E4M3 bytes as uint8 or float8_e4m3fn, (..., rows, K / 16), linear order. The bytes are
            taken as they are, never value-cast.
        global_scale
            One positive number, or (G,) of them for a stack. It multiplies (ModelOpt's
            ``weight_scale_2``); `global_scale_from_divisor` converts the other convention.
        k
            Logical K where the last scale block is only padding beyond it; by default all of
            ``2 * values.shape[-1]``.

        Raises
        ------
        TypeError
            If a part has the wrong dtype.
        ValueError
            If shapes disagree, K is no whole number of scale blocks, or a global scale is not
            positive and finite.

        Examples
        --------
        >>> values, scales = np.full((2, 8), 0x11, np.uint8), np.full((2, 1), 0x38, np.uint8)
        >>> dequantize(Nvfp4Array.from_parts(values, scales, 2.0))[0, :4]
        array([1., 1., 1., 1.], dtype=float32)
        """
        if k is None:
            k = 2 * np.shape(values)[-1] if np.ndim(values) else 0
        return cls(values, scales, global_scale, k)  # type: ignore[arg-type]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: (rows, K) or (G, rows, K)."""
        return (*self.values.shape[:-1], self.k)

    @property
    def ndim(self) -> int:
        """Number of axes: 2, or 3 for a stack."""
        return self.values.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and global scale together."""
        return self.values.nbytes + self.scales.nbytes + self.global_scale.nbytes

    def __len__(self) -> int:
        """Length of the first axis: groups of a stack, rows otherwise."""
        return int(self.values.shape[0])

    def __getitem__(self, index: Any) -> Nvfp4Array:
        """Select along the first axis.

        An integer picks one group of a stack, as a 2-D operand. A slice, or a 1-D array of
        integers or booleans, picks groups of a stack or rows of a 2-D operand.
        """
        if isinstance(index, tuple):
            raise TypeError(f"index {index} has several axes; an Nvfp4Array takes one: q[g][i:j]")
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.size == 0:
                index = index.astype(np.intp)
            if index.dtype.kind not in "iub"[: 2 + index.ndim] or index.ndim > 1:
                raise TypeError(
                    f"index is {index.dtype} of shape {index.shape}; use an integer, a slice, or "
                    "a 1-D array of integers or booleans"
                )
            if index.ndim == 0 and self.ndim == 2:
                raise TypeError(
                    f"index {index} would leave one row without its axis; use q[i : i + 1]"
                )
            if index.ndim == 0:
                index = int(index)  # an array, even of no axes, would copy
        global_scale: Any = self.global_scale
        if global_scale.ndim == 1:
            global_scale = global_scale[index]
        return Nvfp4Array._trusted(self.values[index], self.scales[index], global_scale, self.k)

    def __iter__(self) -> Iterator[Nvfp4Array]:
        """Iterate over the groups of a stack."""
        if self.ndim == 2:
            raise TypeError(f"{self!r} is one group; iterate over slices of its rows instead")
        return (self[g] for g in range(len(self)))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Refuse to become a plain array unasked: quantized data would pass for ordinary data."""
        raise TypeError(f"{self!r} is no plain array; call fp4rt.dequantize on it")

    def __repr__(self) -> str:
        """Give logical shape, global scale and size."""
        scale: Any = self.global_scale
        text = f"{scale:.6g}" if scale.ndim == 0 else f"{scale.size} numbers"
        if scale.ndim and scale.size:
            text += f" in {scale.min():.6g}..{scale.max():.6g}"
        return f"Nvfp4Array(shape={self.shape}, global_scale={text}, {self.nbytes} bytes)"

    def _repr_html_(self) -> str:
        """Show it in a notebook: shapes, orders, sizes, and a strip of its scales."""
        scale: Any = self.global_scale
        scales = self.scales.view(np.uint8).reshape(-1, self.scales.shape[-1])
        return html.card(
            "NVFP4 operand",
            {
                "shape": f"{self.shape}, in host memory",
                "values": f"E2M1, two per byte: uint8 {self.values.shape}",
                "scales": f"E4M3, one per {SCALE_BLOCK} along K: {self.scales.shape}, linear order",
                "global_scale": f"{scale:.6g}" if scale.ndim == 0 else f"float32 {scale.shape}",
                "bytes": f"{html.size(self.nbytes)} (float32: {html.size(4 * self._elements)})",
            },
            html.strip(*scales.shape, lambda r, c: E4M3_VALUES[scales[r, c]]),
        )

    @property
    def _elements(self) -> int:
        return self.k * math.prod(self.values.shape[:-1])


def stack(operands: Sequence[Nvfp4Array]) -> Nvfp4Array:
    """Stack 2-D operands of one shape along a new first axis, one group each.

    Parameters
    ----------
    operands
        At least one `Nvfp4Array` of shape (rows, K), all alike.

    Returns
    -------
    Nvfp4Array, shape (G, rows, K)
        With one global scale per group.

    Raises
    ------
    TypeError, ValueError
        If there is none, one is no 2-D operand, or shapes differ.

    Examples
    --------
    >>> stack([quantize(np.full((4, 16), float(v))) for v in (1, 2, 3)]).shape
    (3, 4, 16)
    """
    if not isinstance(operands, Iterable):
        raise TypeError(f"operands is {operands!r}; give a list of 2-D operands")
    operands = list(operands)
    if not operands:
        raise ValueError("there is nothing to stack; give at least one operand")
    for g, operand in enumerate(operands):
        if not isinstance(operand, Nvfp4Array):
            raise TypeError(f"operands[{g}] is a {type(operand).__name__}; call quantize on it")
        if operand.ndim != 2:
            raise ValueError(
                f"operands[{g}] has shape {operand.shape}; only 2-D operands stack: iterate over "
                "it for its groups"
            )
        if operand.shape != operands[0].shape:
            raise ValueError(
                f"operands[{g}] has shape {operand.shape} and operands[0] {operands[0].shape}; "
                "only 2-D operands of one shape stack: pass the others as a list instead"
            )
    return Nvfp4Array._trusted(
        np.stack([q.values for q in operands]),
        np.stack([q.scales for q in operands]),
        np.array([q.global_scale for q in operands], np.float32),
        operands[0].k,
    )


def global_scale_from_divisor(divisor: ArrayLike) -> np.float32 | NDArray[np.float32]:
    """Turn a global scale that divides into the one that multiplies, which fp4rt uses.

    compressed-tensors stores ``weight_global_scale = 2688 / amax`` and divides by it; ModelOpt
    stores ``weight_scale_2 = amax / 2688`` and multiplies, as fp4rt does.

    Parameters
    ----------
    divisor
        One positive number, or an array (G,) of them.

    Raises
    ------
    TypeError, ValueError
        If a divisor is no positive finite number.

    Examples
    --------
    >>> float(global_scale_from_divisor(4.0))
    0.25
    """
    num_groups = None if np.ndim(divisor) == 0 else len(np.ravel(np.asarray(divisor)))
    divisor = checked_global_scale(divisor, num_groups, "divisor")
    with np.errstate(over="ignore"):
        return checked_global_scale(1 / divisor, num_groups, "1 / divisor")


def save(file: str | Path | IO[bytes], operand: Nvfp4Array) -> None:
    """Write an operand to an .npz file that `load` reads back unchanged.

    numpy loses the dtype of an E4M3 array on the way to a file; here the scales are stored as
    bytes, beside their order, the global scale and the logical K.

    Parameters
    ----------
    file
        A path (used exactly as given) or a binary file open for writing.
    operand
        What to write.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     save(file, quantize(np.ones((2, 40), np.float32)))
    ...     _ = file.seek(0)
    ...     load(file).shape
    (2, 40)
    """
    if not isinstance(operand, Nvfp4Array):
        raise TypeError(f"operand is a {type(operand).__name__}; call quantize on it first")
    if isinstance(file, str | Path):
        with Path(file).open("wb") as opened:
            return save(opened, operand)
    return np.savez(
        file,
        format=np.array("nvfp4"),
        order=np.array("linear"),
        values=operand.values,
        scales=operand.scales.view(np.uint8),
        global_scale=operand.global_scale,
        k=np.int64(operand.k),
    )


# NotImplementedError and RuntimeError are zipfile's, for bits that say how a part is stored.
_DAMAGED = (
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    BadZipFile,
    NotImplementedError,
    RuntimeError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    tokenize.TokenError,
    SyntaxError,
    MemoryError,
)


def load(file: str | Path | IO[bytes]) -> Nvfp4Array:
    """Read an operand that `save` wrote.

    Raises
    ------
    ValueError
        If the file is no such .npz file.

    Examples
    --------
    >>> import io
    >>> file = io.BytesIO()
    >>> save(file, quantize(np.ones((2, 40), np.float32)))
    >>> _ = file.seek(0)
    >>> load(file)
    Nvfp4Array(shape=(2, 40), global_scale=0.000372024, 58 bytes)
    """
    names = ("format", "order", "values", "scales", "global_scale", "k")
    try:
        with Path(file).open("rb") if isinstance(file, str | Path) else nullcontext(file) as opened:
            archive = np.load(opened, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("this is an .npy file of one array")
            parts = {name: archive[name] for name in names}
    except (OSError, *_DAMAGED) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is a bad offset
            raise
        raise ValueError(f"{file} is no operand file; write one with fp4rt.save") from error
    kind, order, values, scales, global_scale, k = parts.values()
    if any(part.ndim or part.dtype.kind != "U" for part in (kind, order)):
        raise ValueError(f"{file} is no operand file: format and order are no text")
    if (kind, order) != ("nvfp4", "linear"):
        raise ValueError(
            f"{file} holds {kind} in {order} order; this version reads nvfp4 in linear order"
        )
    if k.ndim or k.dtype.kind not in "iu":
        raise ValueError(f"{file} is no operand file: its k is {k!r}, and must be one integer")
    try:
        return Nvfp4Array.from_parts(values, scales, global_scale, int(k))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is a damaged operand file: {error}") from error


# --- quantize and dequantize -------------------------------------------------------------------


def quantize(
    x: ArrayLike,
    *,
    global_scale: ArrayLike | None = None,
    two_level: bool = True,
    scope: Literal["tensor", "group"] = "tensor",
    nan: Literal["raise", "propagate"] = "raise",
) -> Nvfp4Array:
    """Quantize to NVFP4.

    In IEEE float32 arithmetic, each operation rounded once to nearest even, in this order::

        global_scale = max(amax / 2688, 2**-126)            # 2688 = 6 · 448; 1 where amax is 0
        scale = e4m3(min(block_amax / (6 · global_scale), 448))
        value = e2m1(x / (scale · global_scale))            # all codes 0 where scale is 0

    with e4m3 and e2m1 rounding to nearest, ties to even. The floor of 2**-126 keeps the global
    scale a normal number: where amax is below about 3e-35 the scales take up the rest of the
    range, and scale blocks below about 7e-41 become zero.

    Parameters
    ----------
    x
        (rows, K) or (G, rows, K); float32, float64, float16 or bfloat16, any strides. float64 is
        rounded to float32 first. A K that is no multiple of 16 is padded to whole scale blocks
        with zeros, and remembered. There may be no rows or no groups, but K must be at least 1.
    global_scale
        Use this one, or (G,) of these, instead of deriving it from x. Between 2**-126 and
        1.2659313e35 (so that 2688 times it is finite); elements beyond 2688 times it saturate.
    two_level
        False means single-level scaling: ``global_scale = 1``, ``scale = block_amax / 6``.
    scope
        What shares a derived global scale: the whole tensor, or each group of a stack.
    nan
        ``"raise"`` refuses NaN and infinity. ``"propagate"`` gives every scale block that holds
        one a NaN scale and ignores it elsewhere, so that it shows in every result it reaches.

    Returns
    -------
    Nvfp4Array
        Of the shape of x.

    Raises
    ------
    TypeError
        If x is integer, complex, object, big-endian or of another type that is not listed above.
    ValueError
        If x has no K, the wrong number of axes, a NaN or infinity (the first index is named), or
        if global_scale is out of range.

    Examples
    --------
    >>> q = quantize(np.array([[0.0, 1.0, 2.0, 3.0, 6.0] * 4], np.float32), two_level=False)
    >>> q.shape, float(q.global_scale), dequantize(q)[0, :5]
    ((1, 20), 1.0, array([0., 1., 2., 3., 6.], dtype=float32))
    """
    array = _checked_floats(x)
    num_groups = len(array) if array.ndim == 3 else None
    for name, value, choices in (
        ("scope", scope, ("tensor", "group")),
        ("nan", nan, ("raise", "propagate")),
    ):
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name} is {value!r}; it is one of {choices}")
    if scope == "group" and num_groups is None:
        raise ValueError(f"scope is 'group' but x has shape {array.shape}; stack it to 3-D")
    if not isinstance(two_level, bool | np.bool_):
        raise TypeError(f"two_level must be True or False, got {two_level!r}")
    if global_scale is not None and not two_level:
        raise ValueError("two_level=False means a global scale of 1; leave global_scale out")

    groups = _grouped(array)
    num_blocks = -(-groups.shape[2] // SCALE_BLOCK)
    values = np.empty((*groups.shape[:2], num_blocks * SCALE_BLOCK // 2), np.uint8)
    scales = np.empty((*groups.shape[:2], num_blocks), np.uint8)

    used: np.float32 | NDArray[np.float32] = np.float32(1)
    if global_scale is not None:
        used = checked_global_scale(global_scale, num_groups)
        if not np.all((used >= GLOBAL_SCALE_MIN) & (used <= GLOBAL_SCALE_MAX)):
            raise ValueError(
                f"global_scale is {used}; quantize takes {GLOBAL_SCALE_MIN} to "
                f"{GLOBAL_SCALE_MAX}: multiply x by a power of two first"
            )
    elif two_level:
        amax = _group_amax(groups, array.ndim, nan)
        used = _derived_global_scale(amax if scope == "group" else amax.max(initial=0))

    per_group = np.broadcast_to(used, len(groups))
    for tile, blocks in _tiles(groups.shape):
        group, row, _ = tile
        global_scales = per_group[group, np.newaxis, np.newaxis]
        tile_values, tile_scales = _quantize_tile(_float32_tile(groups[tile]), global_scales)
        if nan == "raise" and (tile_scales == NAN_SCALE).any():
            _raise_nonfinite(groups, array.ndim)
        values[group, row, blocks.start * 8 : blocks.stop * 8] = tile_values
        scales[group, row, blocks] = tile_scales
    if array.ndim == 2:
        values, scales = values[0], scales[0]
    return Nvfp4Array._trusted(values, scales.view(E4M3), used, groups.shape[2])


def dequantize(q: Nvfp4Array, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Give the numbers that an operand stands for.

    Parameters
    ----------
    q
        The operand.
    dtype
        float32, float64 (always exact), float16 or bfloat16: the exact product e2m1 · e4m3 ·
        global_scale, rounded once to nearest even. Beyond the range of dtype it is ±infinity.

    Returns
    -------
    ndarray of dtype, of q's logical shape

    Raises
    ------
    TypeError
        If q is no `Nvfp4Array`, or dtype is another one.

    Examples
    --------
    >>> dequantize(quantize(np.array([[0.0, -1.0, 448.0]])))
    array([[  0.,  -0., 448.]], dtype=float32)
    """
    if not isinstance(q, Nvfp4Array):
        raise TypeError(f"q is a {type(q).__name__}; dequantize takes what quantize returns")
    dtype = checked_float_dtype(np.float32 if dtype is None else dtype)  # None: float64 to numpy
    out = np.empty(q.shape, dtype)
    values, scales, groups = (_grouped(part) for part in (q.values, q.scales, out))
    per_group = np.broadcast_to(q.global_scale, len(groups))
    shape = (*groups.shape[:2], 2 * values.shape[-1])  # K with the padding of its last scale block
    scratch = _DecodeScratch(min(values.size, _TILE // 2))
    decoded = np.empty(min(values.size, _TILE // 2), np.uint64)
    for tile, blocks in _tiles(shape):
        packed = values[tile[0], tile[1], blocks.start * 8 : blocks.stop * 8]
        pairs = decoded[: packed.size].reshape(packed.shape)
        _decode_pairs(packed, scales.view(np.uint8)[tile[0], tile[1], blocks], pairs, scratch)
        x = pairs.view(np.float32)[..., : groups[tile].shape[-1]]
        global_scale = per_group[tile[0], np.newaxis, np.newaxis]
        if dtype == np.float32:  # e2m1 · e4m3 is exact in float32, so this is the one rounding
            with np.errstate(over="ignore", under="ignore"):
                np.multiply(x, global_scale, out=groups[tile])
        else:  # at most 6 + 24 significant bits: exact in float64
            groups[tile] = round_to(x * global_scale.astype(np.float64), dtype)
    return out


def decode(
    values: NDArray[np.uint8], scales: NDArray[Any], *, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Give e2m1 · e4m3 of an operand's arrays, leaving out the global scale: exact in float32.

    Parameters
    ----------
    values, scales
        As in `Nvfp4Array`: (rows, K / 2) and (rows, K / 16), or with a leading axis G.
    out
        float32 of shape (..., rows, K) to write into; by default a new array.

    Returns
    -------
    ndarray of float32, shape (..., rows, K)
        K counts the padding of the last scale block too.

    Raises
    ------
    TypeError, ValueError
        If an array has the wrong dtype or shape.

    Examples
    --------
    >>> decode(np.full((1, 8), 0x21, np.uint8), np.full((1, 1), 0x40, np.uint8))[0, :4]
    array([1., 2., 1., 2.], dtype=float32)
    """
    values = _checked_values(values)
    scales = _checked_scales(scales, values.shape)
    shape = (*values.shape[:-1], 2 * values.shape[-1])
    if out is None:
        out = np.empty(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32:
        raise ValueError(f"out is {out.dtype} of shape {out.shape}; it must be float32, {shape}")
    groups, values, scales = _grouped(out), _grouped(values), _grouped(scales.view(np.uint8))
    scratch = _DecodeScratch(min(values.size, _DECODE_TILE // 2))
    for tile, blocks in _tiles(groups.shape, _DECODE_TILE):
        packed = values[tile[0], tile[1], blocks.start * 8 : blocks.stop * 8]
        target = groups[tile]
        pairs = target if target.flags.c_contiguous else np.empty_like(target, order="C")
        _decode_pairs(packed, scales[tile[0], tile[1], blocks], pairs.view(np.uint64), scratch)
        if pairs is not target:
            target[...] = pairs
    return out


def fold_scale_signs(q: Nvfp4Array) -> Nvfp4Array:
    """Give an equal operand whose scales are all ≥ 0, by negating the values of those that are not.

    `quantize` never makes a negative scale, but foreign bytes may hold some. Tensor cores read
    the scale as unsigned E4M3, so its sign must be moved to the values before they see it.

    Parameters
    ----------
    q
        Any operand.

    Returns
    -------
    Nvfp4Array
        q itself where there is nothing to do. A NaN scale stays one.

    Examples
    --------
    >>> q = Nvfp4Array.from_parts(np.full((1, 8), 0x11, np.uint8), np.array([[0xB8]], np.uint8), 1)
    >>> folded = fold_scale_signs(q)
    >>> hex(folded.scales.view(np.uint8)[0, 0]), hex(folded.values[0, 0])
    ('0x38', '0x99')
    """
    scales = q.scales.view(np.uint8)
    negative = scales >> 7
    if not negative.any():
        return q
    values = q.values ^ np.repeat(negative * np.uint8(0x88), SCALE_BLOCK // 2, axis=-1)
    return Nvfp4Array._trusted(values, (scales & 0x7F).view(E4M3), q.global_scale, q.k)


# --- one tile ----------------------------------------------------------------------------------

_Tile = tuple[slice, slice, slice]


def _grouped(x: NDArray[Any]) -> NDArray[Any]:
    """View (rows, …) as a stack of one group."""
    return x if x.ndim == 3 else x[np.newaxis]


def _tiles(shape: tuple[int, ...], elements: int = _TILE) -> Iterator[tuple[_Tile, slice]]:
    """Cut (G, rows, K) into tiles of at most `elements` or a row, in logical order.

    Each comes with the slice of its scale blocks along K.
    """
    num_groups, rows, k = shape
    width = min(k, elements)
    height = max(1, min(rows, elements // width))
    depth = max(1, elements // (rows * k)) if rows else 1
    for g in range(0, num_groups, depth):
        for r in range(0, rows, height):
            for c in range(0, k, width):
                tile = slice(g, g + depth), slice(r, r + height), slice(c, min(c + width, k))
                yield tile, slice(c // SCALE_BLOCK, -(-tile[2].stop // SCALE_BLOCK))


class _DecodeScratch:
    """Arrays for `num_bytes` packed bytes: fresh ones a tile would cost page faults.

    Indices are intp, since take would convert any other type to it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.words = np.empty(num_bytes, np.uint16)
        self.index = np.empty(num_bytes, np.intp)
        self.scale_index = np.empty(num_bytes // 8, np.intp)
        self.high_bytes = np.empty((num_bytes // 8, 2), np.uint64)


def _decode_pairs(
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    out: NDArray[np.uint64],
    scratch: _DecodeScratch,
) -> None:
    """Fill `out` with two float32 e2m1 · e4m3 for each byte of `packed`.

    `packed` is (g, rows, 8 · blocks), `scales` their bytes (g, rows, blocks).
    """
    words = scratch.words[: packed.size].reshape(packed.shape)
    index = scratch.index[: packed.size].reshape(packed.shape)
    scale_index = scratch.scale_index[: scales.size].reshape(scales.shape)
    high_bytes = scratch.high_bytes[: scales.size].reshape(*scales.shape, 2)
    scale_index[...] = scales
    scale_high_bytes().take(scale_index, axis=0, out=high_bytes, mode="clip")
    words[...] = packed
    quads = words.view(np.uint64).reshape(high_bytes.shape)  # the eight bytes of a scale block
    quads |= high_bytes
    index[...] = words
    scaled_pairs().take(index, out=out, mode="clip")  # "raise" would go through a copy of out


def _float32_tile(x: NDArray[Any]) -> NDArray[np.float32]:
    """Give a C-contiguous float32 tile, its last axis padded with zeros to whole scale blocks."""
    with np.errstate(over="ignore", under="ignore"):
        if x.shape[-1] % SCALE_BLOCK == 0:
            return np.ascontiguousarray(x, np.float32)
        width = -(-x.shape[-1] // SCALE_BLOCK) * SCALE_BLOCK
        tile = np.zeros((*x.shape[:-1], width), np.float32)
        tile[..., : x.shape[-1]] = x
        return tile


def _quantize_tile(
    x: NDArray[np.float32], global_scale: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Quantize a contiguous (g, rows, k) tile; global_scale is (g, 1, 1).

    Gives packed values (g, rows, k / 2) and scale bytes (g, rows, k / 16). A scale block with a
    NaN or an infinity gets the scale NaN and zero values.
    """
    magnitude = np.abs(x)
    block_amax = magnitude.reshape(-1)
    while block_amax.size > x.size // SCALE_BLOCK:  # halving runs at vector speed, axis=-1 does not
        block_amax = np.maximum(block_amax[0::2], block_amax[1::2])
    block_amax = block_amax.reshape(*x.shape[:2], -1)
    with np.errstate(all="ignore"):
        scales = round_e4m3(np.minimum(block_amax / (6 * global_scale), np.float32(E4M3_MAX)))
        step = E4M3_VALUES[scales] * global_scale
        blocks = magnitude.reshape(*step.shape, SCALE_BLOCK)
        codes = round_e2m1(np.divide(blocks, step[..., np.newaxis], out=blocks))
    codes |= np.signbit(x).view(np.uint8).reshape(codes.shape) << 3
    nonfinite = ~np.isfinite(block_amax)
    zero = nonfinite | (scales == 0)
    if zero.any():
        codes[zero] = 0
        scales[nonfinite] = NAN_SCALE
    # A pair of codes is a 16-bit word e0 + 256 · e1; its packed byte is e0 + 16 · e1.
    pairs = codes.reshape(-1).view("<u2")
    values = (pairs | pairs >> 4).astype(np.uint8)
    return values.reshape(*x.shape[:2], -1), scales


def _group_amax(groups: NDArray[Any], ndim: int, nan: str) -> NDArray[np.float32]:
    """Give the largest magnitude of each group, as float32; 0 for an empty one."""
    amax = np.zeros(len(groups), np.float32)
    for tile, _ in _tiles(groups.shape):
        magnitude = np.abs(_float32_tile(groups[tile]))
        if nan == "propagate":
            magnitude[~np.isfinite(magnitude)] = 0
        tile_amax = magnitude.reshape(len(magnitude), -1).max(axis=1)
        amax[tile[0]] = np.maximum(amax[tile[0]], tile_amax)
    if not np.isfinite(amax).all():
        _raise_nonfinite(groups, ndim)
    return amax


def _derived_global_scale(amax: Any) -> np.float32 | NDArray[np.float32]:
    with np.errstate(under="ignore"):
        scale = np.maximum(amax / np.float32(E2M1_MAX * E4M3_MAX), GLOBAL_SCALE_MIN)
    result: np.float32 | NDArray[np.float32] = np.where(amax == 0, np.float32(1), scale)[()]
    return result


# --- checks ------------------------------------------------------------------------------------


def _raise_nonfinite(groups: NDArray[Any], ndim: int) -> None:
    """Raise the ValueError that names the first element without a finite float32 value."""
    for tile, _ in _tiles(groups.shape):
        x = groups[tile]
        bad = ~np.isfinite(_float32_tile(x)[..., : x.shape[-1]])
        if bad.any():
            first = np.argwhere(bad)[0]
            value = float(x[tuple(first)])
            index = index_text((first + [part.start for part in tile])[-ndim:])
            if np.isfinite(value):
                raise ValueError(
                    f"x{index} is {value}, beyond float32 (3.4e38); scale x down by a power of two"
                )
            raise ValueError(
                f"x{index} is {value}; NVFP4 data must be finite: replace it, as in "
                "np.where(np.isfinite(x), x, 0), or pass nan='propagate' to give its scale block "
                "a NaN scale"
            )


def _checked_floats(x: ArrayLike) -> NDArray[Any]:
    """Take x as a native array of a float type, (rows, K) or (G, rows, K) with K ≥ 1."""
    if isinstance(x, Nvfp4Array):
        raise TypeError("x is an Nvfp4Array, which is quantized already; pass it on as it is")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("x is a masked array, whose mask would be lost; use x.filled(0)")
    try:
        x = np.asarray(x)
    except ValueError as error:
        raise ValueError(
            "x is a list whose rows differ in length; it must be (rows, K) or (G, rows, K): pad "
            "the rows with zeros"
        ) from error
    if not x.dtype.isnative:
        raise TypeError(
            f"x is {x.dtype.str!r}, not in this machine's byte order; use "
            "x.astype(x.dtype.newbyteorder('='))"
        )
    if x.dtype not in FLOATS:
        fix = view_hint(x.dtype, "ml_dtypes.bfloat16") if x.dtype.itemsize == 2 else ""
        if x.dtype.kind == "c":
            fix = "quantize x.real and x.imag apart"
        raise TypeError(
            f"x is {x.dtype}; quantize takes float32, float64, float16 or bfloat16: "
            f"{fix or 'use x.astype(np.float32)'}"
        )
    if x.ndim not in (2, 3):
        fix = "x.reshape(1, -1)" if x.ndim < 2 else "x.reshape(-1, *x.shape[-2:])"
        raise ValueError(f"x has shape {x.shape}; it must be (rows, K) or (G, rows, K): use {fix}")
    if x.shape[-1] == 0:
        raise ValueError(
            f"x has shape {x.shape}, so K is 0; K must be at least 1 (rows and groups may be 0)"
        )
    return x


def _checked_values(values: ArrayLike) -> NDArray[np.uint8]:
    refuse_masked(values, "values")
    values = np.asarray(values)
    if values.dtype != np.uint8:
        how = "view" if values.dtype.itemsize == 1 else "astype"
        fix = f"use .{how}(np.uint8) if these are packed bytes, or quantize for numbers"
        if values.dtype == ml_dtypes.float4_e2m1fn:
            fix = "its elements take a byte each, so use pack(values)"
        raise TypeError(f"values is {values.dtype}; packed E2M1 values are uint8: {fix}")
    if values.ndim not in (2, 3) or values.shape[-1] == 0:
        raise ValueError(
            f"values has shape {values.shape}; it must be (rows, K / 2) or (G, rows, K / 2) "
            "with K at least 16: use .reshape"
        )
    if values.shape[-1] % (SCALE_BLOCK // 2):
        k, padded = 2 * values.shape[-1], -(-values.shape[-1] // 8) * 8
        raise ValueError(
            f"values has {values.shape[-1]} bytes per row, so K is {k}; K must be a multiple of "
            f"{SCALE_BLOCK}: append zero bytes up to {padded} per row and pass k={k}"
        )
    return values


def _checked_k(k: int, row_bytes: int) -> int:
    try:
        k = operator.index(k)
    except TypeError:
        raise TypeError(f"k is {k!r}; K is an integer, such as {2 * row_bytes}") from None
    if not 2 * row_bytes - SCALE_BLOCK < k <= 2 * row_bytes:
        what = " (that is the packed K, in bytes)" if k == row_bytes else ""
        raise ValueError(
            f"k is {k}{what}, but values has {row_bytes} bytes per row, which is "
            f"{2 * row_bytes} elements; K is {2 * row_bytes}, or up to 15 less where the last "
            f"scale block is padding: pass k={2 * row_bytes}"
        )
    return k


def _checked_scales(scales: ArrayLike, values_shape: tuple[int, ...]) -> NDArray[Any]:
    scales = scale_bytes(scales)
    *leading, row_bytes = values_shape
    wanted = (*leading, row_bytes // (SCALE_BLOCK // 2))
    if scales.shape != wanted:
        fix = f"give scales of shape {wanted}"
        padded = (-(-wanted[-2] // 128) * 128) * (-(-wanted[-1] // 4) * 4)
        if scales.shape == (*leading, row_bytes // SCALE_BLOCK):
            fix = "values looks unpacked, one code per byte: use pack(values)"
        elif scales.size == padded * (leading[0] if len(leading) == 2 else 1):
            fix = "if these are in swizzled (128x4 tile) order, use layout.unswizzle_scales"
        elif scales.size == np.prod(wanted):
            fix = f"if these are in linear order, use .reshape({wanted})"
        raise ValueError(
            f"scales has shape {scales.shape}, but one per {SCALE_BLOCK} elements of values "
            f"{values_shape} makes {wanted}: {fix}"
        )
    return scales.view(E4M3)


def checked_global_scale(
    value: ArrayLike, num_groups: int | None, name: str = "global_scale"
) -> np.float32 | NDArray[np.float32]:
    """Take one positive finite number, or (num_groups,) of them, as float32."""
    given = real_numbers(value, name, "a positive number, such as 1.0")
    if given.shape not in ((), (1,), (num_groups,)):
        wanted = "1 number" if num_groups is None else f"1 number or {num_groups} of them"
        raise ValueError(f"{name} has shape {given.shape}; this operand takes {wanted}")
    given = given.reshape(()) if given.size == 1 else given
    with np.errstate(over="ignore", under="ignore"):
        scale = given.astype(np.float32)
    bad = ~(np.isfinite(scale) & (scale > 0))
    if bad.any():
        index = np.argwhere(bad)[0]
        raise ValueError(
            f"{name}{index_text(index)} is {given[tuple(index)]}; it must be "
            "positive and finite in float32: 1.0 stands for no global scale"
        )
    result: np.float32 | NDArray[np.float32] = scale[()]
    return result
