"""Activations: rows of A as callers give them, on the host or on a device."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from fp4rt import abi, html
from fp4rt.codes import refuse_masked
from fp4rt.device import Buffer, ClosedError, Device
from fp4rt.nvfp4 import SCALE_BLOCK, Nvfp4Array, checked_global_scale, fold_scale_signs

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROW_DTYPES = (np.dtype(np.float16), BFLOAT16)

Rows = Nvfp4Array | np.ndarray
"""Activations of one group or of all: an NVFP4 operand, or fp16 or bf16 rows."""

ROW_STEP = 32
"""Elements: rows of A lie at multiples of 16 bytes (of 64 where they have 16 bits)."""


def row_pitch(k: int) -> int:
    """Return the elements from row to row of A on a device."""
    return -(-max(k, 1) // ROW_STEP) * ROW_STEP


def padded_rows(parts: Sequence[NDArray[Any]], pitch: int) -> NDArray[Any]:
    """Return rows of all `parts` behind each other, each padded with zeros to `pitch` elements.

    One part whose rows have that pitch is returned as it is.
    """
    if len(parts) == 1 and parts[0].shape[1] == pitch:
        return parts[0]
    out = np.zeros((sum(part.shape[0] for part in parts), pitch), parts[0].dtype)
    row = 0
    for part in parts:
        out[row : row + part.shape[0], : part.shape[1]] = part
        row += part.shape[0]
    return out


def checked_rows(a: object, name: str) -> Rows:
    """Return `a`, (M, K); TypeError or ValueError if it can't be rows of A."""
    if isinstance(a, Nvfp4Array):
        if len(a.shape) != 2:
            raise ValueError(f"{name} must have shape (M, K), got {a.shape}")
        return a
    if not isinstance(a, np.ndarray):
        raise TypeError(
            f"{name} must be an Nvfp4Array or a float16 or bfloat16 array, got {type(a).__name__}"
        )
    refuse_masked(a, name)
    if not a.dtype.isnative:
        raise TypeError(
            f"{name} is {a.dtype.str!r}, not in this machine's byte order; use "
            "a.astype(a.dtype.newbyteorder('='))"
        )
    if a.dtype not in ROW_DTYPES:
        raise TypeError(
            f"{name} is {a.dtype}; quantize it (fp4rt.quantize) or cast it to float16 or bfloat16"
        )
    if a.ndim != 2:
        raise ValueError(f"{name} must have shape (M, K), got {a.shape}")
    return a


def copied(rows: Rows) -> Rows:
    """Return equal rows in memory of their own."""
    if isinstance(rows, np.ndarray):
        return rows.copy()
    return Nvfp4Array(rows.values.copy(), rows.scales.copy(), rows.global_scale, rows.k)


class DeviceRows:
    """Activations on a device: rows of all groups, concatenated.

    Made by `fp4rt.upload_rows` from rows on the host, or by `from_parts` from arrays that other
    code has on the same device. Nothing is copied when a plan is given them: it reads them when it
    is launched, in the order of the stream, and keeps them until it is given others.

    Attributes
    ----------
    values
        `Buffer`: packed E2M1, uint8 (M, pitch / 2); or float16 or bfloat16 (M, pitch).
    scales
        `Buffer` of E4M3 bytes, uint8 (M, pitch / 16), linear order; None for 16-bit rows.
    global_scale
        numpy.float32; 1 for 16-bit rows.
    k
        Logical K.
    """

    __slots__ = (
        "__weakref__",
        "activations",
        "at",
        "buffers",
        "device",
        "global_scale",
        "k",
        "kind",
        "pitch",
        "scales",
        "shape",
        "spans",
        "values",
    )

    def __init__(
        self, values: Buffer, scales: Buffer | None, global_scale: np.float32, k: int
    ) -> None:
        self.device: Device = values.device
        self.values, self.scales, self.global_scale, self.k = values, scales, global_scale, k
        self.shape: tuple[int, int] = (values.shape[0], k)
        self.activations = "nvfp4" if scales is not None else values.dtype.name
        self.pitch = values.shape[1] * (2 if scales is not None else 1)
        self.buffers = (values,) if scales is None else (values, scales)
        # What launches compare and use: asked for once, since every call counts microseconds.
        self.kind = (self.device, k, self.activations)
        at = 0 if scales is None else scales.address
        self.at = (values.address, at, self.pitch, self.shape[0])
        # Where they are: first address and the one after the last.
        self.spans = tuple((part.address, part.address + part.nbytes) for part in self.buffers)

    @classmethod
    def from_parts(
        cls,
        device: Device,
        values: object,
        scales: object = None,
        global_scale: ArrayLike = 1.0,
        k: int | None = None,
        *,
        stream: object = None,
    ) -> DeviceRows:
        """Take arrays that are on a device, without a copy where their rows lie as kernels read.

        Parameters
        ----------
        device
            Where they are and will be used.
        values, scales
            uint8 (M, K / 2) and uint8 or float8_e4m3fn (M, K / 16); or only `values`, float16 or
            bfloat16 (M, K). Each is a `Buffer`, or what `Device.as_buffer` takes. Rows whose K is
            no multiple of 32 are copied, through the host.
        global_scale
            One positive number.
        k
            Logical K where the last scale block is only padding beyond it. Codes there must be 0.
        stream
            The stream that will use the arrays first: it waits for their producer.

        Raises
        ------
        TypeError, ValueError
            If the arrays do not fit together, or are not on the device.

        Examples
        --------
        >>> import fp4rt
        >>> with fp4rt.device("cpu") as dev:
        ...     values = dev.upload(np.full((3, 16), 0x11, np.uint8))
        ...     scales = dev.upload(np.full((3, 2), 0x38, np.uint8))
        ...     DeviceRows.from_parts(dev, values, scales)
        <nvfp4 rows (3, 32) on cpu>
        """
        check_open_device(device)
        refuse_masked(values, "values")
        refuse_masked(scales, "scales")
        found = device.as_buffer(values, stream)
        if found.dtype == np.uint16 and scales is None:
            raise TypeError("values is uint16; view it as float16 or bfloat16")
        parts = None if scales is None else device.as_buffer(scales, stream)
        if parts is None and found.dtype not in ROW_DTYPES:
            raise TypeError(
                f"values is {found.dtype} and there are no scales; give float16 or bfloat16 rows, "
                "or uint8 values and their scales"
            )
        if parts is not None and found.dtype != np.uint8:
            raise TypeError(f"values is {found.dtype}; packed E2M1 values are uint8")
        if len(found.shape) != 2:
            raise ValueError(f"values must have two axes, (M, K), got {found.shape}")
        m, width = found.shape
        extent = width if parts is None else 2 * width
        if parts is not None and (extent % SCALE_BLOCK or parts.shape != (m, extent // 16)):
            raise ValueError(
                f"values {found.shape} and scales {parts.shape} do not fit; they must be "
                "(M, K / 2) and (M, K / 16)"
            )
        scale: Any
        if parts is None:
            k, scale = _checked_width(k, extent), checked_global_scale(global_scale, None)
            if scale != 1:
                raise ValueError(
                    f"global_scale is {scale}, but 16-bit rows have none: leave it out, and "
                    "multiply alpha by it"
                )
        else:  # the same operand without a row has the same types, K and global scale
            no_values, no_scales = (np.empty((0, p.shape[1]), p.dtype) for p in (found, parts))
            operand = Nvfp4Array.from_parts(no_values, no_scales, global_scale, k)
            k, scale, parts = operand.k, operand.global_scale, parts.view(np.uint8)
        if k == extent and extent % ROW_STEP == 0 and not _needs_folding(device, parts):
            return cls(found, parts, scale, k)
        host = found.to_numpy()
        if parts is None:
            return cls.upload(device, host[:, :k])
        return cls.upload(device, Nvfp4Array.from_parts(host, parts.to_numpy(), scale, k))

    @classmethod
    def upload(cls, device: Device, a: Rows) -> DeviceRows:
        """Copy rows to a device; see `fp4rt.upload_rows`."""
        rows = checked_rows(a, "a")
        if isinstance(rows, Nvfp4Array):
            rows = fold_scale_signs(rows)  # Blackwell's tensor cores ignore the sign of scales
        if isinstance(rows, np.ndarray):
            values = device.upload(padded_rows([rows], row_pitch(rows.shape[1])))
            return cls(values, None, np.float32(1), rows.shape[1])
        pitch = row_pitch(2 * rows.values.shape[1])
        scales = padded_rows([rows.scales.view(np.uint8)], pitch // SCALE_BLOCK)
        return cls(
            device.upload(padded_rows([rows.values], pitch // 2)),
            device.upload(scales),
            np.float32(rows.global_scale),
            rows.k,
        )

    def check_open(self) -> None:
        """Raise ClosedError if a buffer of theirs, or the device, was closed."""
        for buffer in self.buffers:
            buffer._check_open()

    @property
    def closed(self) -> bool:
        """Whether a buffer of theirs, or the device, was closed."""
        try:
            self.check_open()
        except ClosedError:
            return True
        return False

    def to_host(self) -> Rows:
        """Return them as an operand, or an array, on the host."""
        return self.as_operand(*[part.to_numpy() for part in self.buffers])

    def as_operand(self, values: NDArray[Any], scales: NDArray[np.uint8] | None = None) -> Rows:
        """Return an operand made of what their buffers hold."""
        if scales is None:
            return values[:, : self.k]
        blocks = -(-self.k // SCALE_BLOCK)
        return Nvfp4Array.from_parts(
            values[:, : 8 * blocks], scales[:, :blocks], self.global_scale, self.k
        )

    def __repr__(self) -> str:
        closed = ", closed" * self.closed
        return f"<{self.activations} rows {self.shape} on {self.device.name}{closed}>"

    def _repr_html_(self) -> str:
        """Show them in a notebook."""
        nvfp4 = self.scales is not None
        nbytes = sum(buffer.nbytes for buffer in self.buffers)
        return html.card(
            "Rows of A on a device",
            {
                "shape": self.shape,
                "type": self.activations,
                "scales": "linear order" if nvfp4 else None,
                "global_scale": f"{self.global_scale:.6g}" if nvfp4 else None,
                "device": self.device.name,
                "bytes": "closed" if self.closed else html.size(nbytes),
            },
        )


def upload_rows(device: Device, a: Rows) -> DeviceRows:
    """Copy activations to a device.

    Parameters
    ----------
    device
        Where they will be used; an open `Device`.
    a
        Rows of all groups, concatenated: an `Nvfp4Array` (M, K), or float16 or bfloat16 rows.

    Raises
    ------
    TypeError, ValueError
        If they are none of these.

    Examples
    --------
    >>> import fp4rt
    >>> with fp4rt.device("cpu") as dev:
    ...     fp4rt.upload_rows(dev, fp4rt.quantize(np.ones((3, 32), np.float32)))
    <nvfp4 rows (3, 32) on cpu>
    """
    check_open_device(device)
    return DeviceRows.upload(device, a)


def check_open_device(device: object) -> None:
    """Raise TypeError unless it is a `Device`: what is put on one needs it longer than a call."""
    if not isinstance(device, Device):
        raise TypeError(f"device must be an open Device, got {device!r}; use fp4rt.device(name)")


def _checked_width(k: object, extent: int) -> int:
    """Return the logical K of 16-bit rows that have `extent` elements."""
    if k is None:
        return extent
    try:
        width = operator.index(k)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"k is {k!r}; K is an integer, such as {extent}") from None
    if not extent - SCALE_BLOCK < width <= extent:
        raise ValueError(
            f"k is {width}, but a row of values has {extent} elements; K is {extent}, or up to 15 "
            f"less: pass k={extent}"
        )
    return width


def _needs_folding(device: Device, scales: Buffer | None) -> bool:
    """Whether there are signs in scales, which Blackwell's tensor cores ignore."""
    if scales is None or abi.image_arch(device.arch) != "sm_100f":
        return False
    return bool((scales.to_numpy() >> 7).any())
