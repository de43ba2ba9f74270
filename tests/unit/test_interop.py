"""DLPack capsules and stream handles, without a GPU."""

import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from fp4rt import interop

_api = ctypes.pythonapi
_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", _api)
)


class Owner:
    pass


def capsule_of(owner, shape=(2, 3), dtype=np.float32, version=(1, 0), **options):
    given = {"readonly": False, "copied": False, "address": 0x1000} | options
    return interop.export_device(
        owner, shape=shape, dtype=np.dtype(dtype), device=(2, 0), max_version=version, **given
    )


def tensor_of(capsule, *, keep=True):
    """The managed tensor of a capsule, which it keeps alive by default."""
    name = _name(capsule)
    kind = interop._ManagedVersioned if name.endswith(b"versioned") else interop._Managed
    managed = kind.from_address(_pointer(capsule, name))
    managed.capsule = capsule if keep else None
    return managed


def test_capsule_describes_the_memory():
    managed = tensor_of(capsule_of(Owner(), (2, 3, 4), np.int16, (1, 0), copied=True))
    tensor = managed.tensor
    assert (managed.major, managed.minor, managed.flags) == (1, 0, 2)
    assert (tensor.data, tensor.device_type, tensor.device_id) == (0x1000, 2, 0)
    assert tensor.shape[:3] == [2, 3, 4]
    assert tensor.strides[:3] == [12, 4, 1]
    assert (tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset) == (0, 16, 1, 0)


def test_old_consumers_get_the_old_capsule():
    capsule = capsule_of(Owner(), version=None)
    assert _name(capsule) == b"dltensor"
    assert tensor_of(capsule).tensor.ndim == 2
    with pytest.raises(BufferError, match="read-only"):
        capsule_of(Owner(), version=None, readonly=True)
    assert tensor_of(capsule_of(Owner(), readonly=True)).flags == 1


@pytest.mark.parametrize(
    ("dtype", "version", "expected"),
    [
        (np.float16, None, (2, 16)),
        (np.bool_, None, (6, 8)),
        (np.complex64, None, (5, 64)),
        (np.uint64, None, (1, 64)),
        (ml_dtypes.bfloat16, None, (4, 16)),
        (ml_dtypes.float8_e4m3fn, (1, 0), (1, 8)),
        (ml_dtypes.float8_e4m3fn, (1, 1), (10, 8)),
        (ml_dtypes.float8_e8m0fnu, (1, 1), (14, 8)),
        (ml_dtypes.float4_e2m1fn, (1, 1), (1, 8)),
    ],
)
def test_type_codes(dtype, version, expected):
    tensor = tensor_of(capsule_of(Owner(), dtype=dtype, version=version)).tensor
    assert (tensor.code, tensor.bits) == expected


def test_structured_memory_has_no_name():
    with pytest.raises(BufferError, match=r"view\(np\.uint8\)"):
        capsule_of(Owner(), dtype=[("a", "u1"), ("b", "f4")])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_empty_and_scalar_shapes(shape):
    tensor = tensor_of(capsule_of(Owner(), shape, address=0)).tensor
    assert tensor.ndim == len(shape)
    assert tuple(tensor.shape[: len(shape)]) == shape
    assert tensor.data is None


def test_an_unused_capsule_lets_the_owner_go():
    owner = Owner()
    alive, exported = weakref.ref(owner), len(interop._exported)
    capsule = capsule_of(owner)
    del owner
    gc.collect()
    assert alive() is not None
    del capsule
    assert alive() is None
    assert len(interop._exported) == exported


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_consumer_keeps_the_owner_until_its_deleter(version):
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = capsule_of(owner, version=version)
    del owner
    managed = tensor_of(capsule, keep=False)
    name = b"used_dltensor" if version is None else b"used_dltensor_versioned"
    _rename(capsule, name)
    del capsule
    gc.collect()
    assert alive() is not None
    managed.deleter(ctypes.addressof(managed))
    assert alive() is None


def test_host_export_is_numpys_own():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    class Wrapped:
        def __dlpack__(self, **options):
            return interop.export_host(array, options.get("max_version"))

        def __dlpack_device__(self):
            return (1, 0)

    assert np.shares_memory(np.from_dlpack(Wrapped()), array)


class Protocol:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


def test_stream_handles():
    assert interop.stream_handle(1) == 1
    assert interop.stream_handle(np.int64(0x7F00)) == 0x7F00
    assert interop.stream_handle(Protocol((0, 0x7F00))) == 0x7F00
    assert interop.stream_handle(Protocol((0, 0))) == 1


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        ("stream", TypeError),
        (Protocol((1, 5)), ValueError),
        (Protocol(5), TypeError),
    ],
)
def test_what_is_no_stream(stream, error):
    with pytest.raises(error):
        interop.stream_handle(stream)
