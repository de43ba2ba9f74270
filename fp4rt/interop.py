"""Exchange of arrays and streams with other libraries, without a copy.

Foreign arrays are read through ``cuda.core.utils.StridedMemoryView`` (part of cuda-python,
imported when first needed). Buffers are offered as DLPack capsules, which are made here: the
protocol (https://dmlc.github.io/dlpack/latest/) is one struct, and cuda.core offers bytes only.
"""

from __future__ import annotations

import ctypes
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DL_CPU, DL_CUDA = 1, 2
_READ_ONLY, _IS_COPIED = 1, 2
_VERSION = (1, 1)

# DLPack's type codes; numpy's kind -> code, and the names that came with version 1.1.
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_NEWER_CODES = {
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BFLOAT16_CODE = 4


def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return `dtype` if every array protocol can name it, else unsigned integers of its size.

    Examples
    --------
    >>> plain_dtype(np.dtype(ml_dtypes.float8_e4m3fn)), plain_dtype(np.dtype(np.float16))
    (dtype('uint8'), dtype('float16'))
    """
    if dtype.kind in _CODES and dtype.isbuiltin == 1:
        return dtype
    if dtype.itemsize in (1, 2, 4, 8) and dtype.fields is None:
        return np.dtype(f"u{dtype.itemsize}")
    raise BufferError(f"no array protocol can name {dtype}; hand over .view(np.uint8)")


def _dlpack_type(dtype: np.dtype[Any], version: tuple[int, int]) -> tuple[int, int]:
    """Return the type code and the bits of one element."""
    if dtype == _BFLOAT16:
        return _BFLOAT16_CODE, 16
    code = _NEWER_CODES.get(dtype.name)
    if code is not None and version >= (1, 1):
        return code, 8
    plain = plain_dtype(dtype)
    return _CODES[plain.kind], plain.itemsize * 8


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# What capsules point to, by the address of the managed tensor. Each entry holds the owner of the
# memory and goes when the consumer, or the unused capsule, calls the deleter.
_exported: dict[int, tuple[Any, ...]] = {}


def _forget(managed: int) -> None:
    _exported.pop(managed, None)


_delete = _Deleter(_forget)


_DestroyCapsule = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Prototypes of our own: the functions of ctypes.pythonapi are shared, types and all, with every
# other library in the process.
_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _DestroyCapsule
)(("PyCapsule_New", _api))

_NAMES = (b"dltensor", b"dltensor_versioned")  # a consumer renames the capsule that it takes


def _forget_unused(capsule: int) -> None:
    for name in _NAMES:
        if _is_valid(capsule, name):
            _exported.pop(_get_pointer(capsule, name), None)


_destroy_capsule = _DestroyCapsule(_forget_unused)


def export_device(
    owner: object,
    *,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: tuple[int, int],
    readonly: bool,
    copied: bool,
    max_version: tuple[int, int] | None,
) -> Any:
    """Return a DLPack capsule of C-contiguous memory that keeps `owner` alive.

    Raises
    ------
    BufferError
        If the consumer's version can't express read-only memory, or no version the dtype.
    """
    version = (0, 8) if max_version is None else (int(max_version[0]), int(max_version[1]))
    versioned = version >= (1, 0)
    if readonly and not versioned:
        raise BufferError(
            "the memory is read-only, which DLPack before version 1.0 can't say; "
            "ask with max_version=(1, 0), or with copy=True"
        )
    code, bits = _dlpack_type(dtype, min(version, _VERSION))
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    strides = (ctypes.c_int64 * max(len(shape), 1))()
    step = 1
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    tensor = _Tensor(address or None, *device, len(shape), code, bits, 1, extents, strides, 0)
    managed: _Managed | _ManagedVersioned
    if versioned:
        flags = _READ_ONLY * readonly | _IS_COPIED * copied
        managed = _ManagedVersioned(*min(version, _VERSION), None, _delete, flags, tensor)
    else:
        managed = _Managed(tensor, None, _delete)
    key = ctypes.addressof(managed)
    _exported[key] = (managed, extents, strides, owner)
    return _new_capsule(key, _NAMES[versioned], _destroy_capsule)


def export_host(array: NDArray[Any], max_version: tuple[int, int] | None) -> Any:
    """Return a DLPack capsule of a numpy array, unsigned integers standing in as `plain_dtype`."""
    plain = array.view(plain_dtype(array.dtype))
    return plain.__dlpack__(max_version=max_version)


@dataclass(frozen=True)
class ForeignArray:
    """A foreign array's memory; `owner` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    readonly: bool
    owner: object


def import_array(array: object, stream: int, device_id: int) -> ForeignArray:
    """Return the memory of a device array of another library.

    Parameters
    ----------
    array
        Anything with ``__dlpack__`` or ``__cuda_array_interface__``.
    stream
        Handle of the stream that will use it; it is made to wait for the array's producer.
    device_id
        Number of the GPU that the memory must be on.

    Raises
    ------
    TypeError
        If the array offers neither protocol, or its dtype has no numpy counterpart.
    ValueError
        If it is on the host or another GPU, or isn't C-contiguous.
    """
    if not (hasattr(array, "__dlpack__") or hasattr(array, "__cuda_array_interface__")):
        raise TypeError(
            f"expected a numpy array, a buffer, or an object with __dlpack__ or "
            f"__cuda_array_interface__, got {type(array).__name__}"
        )
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(array, stream_ptr=stream)
    if not view.is_device_accessible:
        raise ValueError("the array is in host memory; convert it with numpy.asarray")
    try:
        dtype = view.dtype
    except (NotImplementedError, TypeError) as error:
        raise TypeError(
            f"the array's dtype has no numpy name ({error}); view it as uint8"
        ) from error
    if dtype is None:
        raise TypeError("the array's dtype has no numpy name; view it as uint8")
    shape = tuple(view.shape)
    size = int(np.prod(shape, dtype=object))
    if size and view.device_id != device_id:
        raise ValueError(f"the array is on GPU {view.device_id}, the device is GPU {device_id}")
    if size and not _contiguous(shape, view.strides):
        raise ValueError(
            f"the array of shape {shape} has strides {view.strides}; fp4rt takes C-contiguous "
            "memory: make a contiguous copy first"
        )
    return ForeignArray(int(view.ptr or 0), shape, np.dtype(dtype), bool(view.readonly), view)


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether `strides`, in elements, are those of C order."""
    if strides is None:
        return True
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def stream_handle(stream: object) -> int:
    """Return the handle of a CUDA stream of other code.

    Parameters
    ----------
    stream
        An int, or an object with ``__cuda_stream__``, whose handle 0 is the legacy default stream.

    Raises
    ------
    TypeError, ValueError
        If it is neither, or the protocol's version is unknown.

    Examples
    --------
    >>> stream_handle(2)
    2
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise TypeError(f"__cuda_stream__ must give (version, handle), got {answer!r}")
        version, handle = answer
        if version != 0:
            raise ValueError(f"__cuda_stream__ has version {version}; fp4rt knows version 0")
        return int(handle) or 1
    if isinstance(stream, bool):
        raise TypeError(f"expected a stream, got {stream!r}")
    try:
        handle = operator.index(stream)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"expected None, a stream handle, or an object with __cuda_stream__, got {stream!r}"
        ) from None
    if handle <= 0:
        raise ValueError(
            f"stream {handle} is ambiguous; use 1 (legacy default), 2 (per thread) or a handle"
        )
    return handle
