"""Buffers, copies and views on every device."""

import gc

import ml_dtypes
import numpy as np
import pytest

import fp4rt

DTYPES = [
    np.uint8,
    np.bool_,
    np.int16,
    np.float16,
    np.float32,
    np.complex64,
    np.float64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float4_e2m1fn,
    np.dtype([("first", "u2"), ("second", "f2")]),
]


def random_array(rng, shape, dtype):
    """An array of random bytes; 4-bit values keep to their low nibble."""
    dtype = np.dtype(dtype)
    raw = rng.integers(0, 256, (*np.atleast_1d(shape), dtype.itemsize), dtype=np.uint8)
    if dtype in (np.bool_, ml_dtypes.float4_e2m1fn):
        raw &= 1
    return raw.view(dtype).reshape(shape)


def same_bytes(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(), 7, (3, 0), (2, 3, 5)], ids=str)
def test_upload_and_to_numpy_keep_the_bytes(device, dtype, shape, rng):
    shape = (shape,) if isinstance(shape, int) else shape
    array = random_array(rng, (*shape, 1), dtype).reshape(shape)
    buffer = device.upload(array)
    assert buffer.shape == shape
    assert buffer.nbytes == array.nbytes
    assert same_bytes(buffer.to_numpy(), array)
    assert same_bytes(np.asarray(buffer), array)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2],
        lambda x: x[:, ::-1],
        np.asfortranarray,
        lambda x: np.broadcast_to(x[0], (4, x.shape[1])),
        lambda x: x[3:, 1:4],
    ],
    ids=["transposed", "stepped", "reversed", "fortran", "broadcast", "offset"],
)
def test_upload_takes_any_strides(device, view, rng):
    source = view(random_array(rng, (8, 6), np.float32))
    source.flags.writeable = False
    assert same_bytes(device.upload(source).to_numpy(), np.ascontiguousarray(source))
    buffer = device.alloc(source.shape, source.dtype)
    device.stream.upload(buffer, source)
    assert same_bytes(buffer.to_numpy(), np.ascontiguousarray(source))


@pytest.mark.parametrize("count", [100, 3_000_000])
def test_source_may_change_as_soon_as_upload_returns(device, count):
    source = np.arange(count, dtype=np.uint32)
    buffer = device.alloc(count, np.uint32)
    device.stream.upload(buffer, source)
    source[:] = 0
    assert np.array_equal(buffer.to_numpy(), np.arange(count, dtype=np.uint32))


def test_pinned_arrays_round_trip(device, rng):
    source = device.empty_pinned((5, 7), ml_dtypes.bfloat16)
    source[...] = random_array(rng, (5, 7), ml_dtypes.bfloat16)
    target = device.empty_pinned((5, 7), ml_dtypes.bfloat16)
    buffer = device.alloc((5, 7), ml_dtypes.bfloat16)
    device.stream.upload(buffer, source)
    device.stream.download(target, buffer)
    device.stream.synchronize()
    assert same_bytes(target, source)
    assert device.empty_pinned((0, 3), np.float32).shape == (0, 3)


def test_to_numpy_into_out(device, rng):
    array = random_array(rng, (4, 4), np.float32)
    buffer = device.upload(array)
    out = np.full((4, 4), np.nan, np.float32)
    assert buffer.to_numpy(out=out) is out
    assert same_bytes(out, array)


def test_fill_and_copy(device):
    first, second = device.alloc(10, np.uint16), device.alloc(20)
    device.stream.fill(first, 0xA5)
    assert np.all(first.to_numpy() == 0xA5A5)
    device.stream.copy(second, first)
    assert np.all(second.to_numpy() == 0xA5)
    device.stream.fill(second[5:7], 1)
    assert second.to_numpy().tolist() == [0xA5] * 5 + [1, 1] + [0xA5] * 13


def test_views_share_the_memory(device, rng):
    array = random_array(rng, (6, 8), np.uint16)
    buffer = device.upload(array)
    assert same_bytes(buffer[2].to_numpy(), array[2])
    assert same_bytes(buffer[-1].to_numpy(), array[-1])
    assert same_bytes(buffer[1:4].to_numpy(), array[1:4])
    assert buffer[4:1].shape == (0, 8)
    assert same_bytes(buffer.view(np.uint8).to_numpy(), array.view(np.uint8))
    assert same_bytes(buffer.view(ml_dtypes.bfloat16).to_numpy(), array.view(ml_dtypes.bfloat16))
    assert same_bytes(buffer.reshape(4, -1).to_numpy(), array.reshape(4, -1))
    words = array.view(np.uint32).ravel()
    assert same_bytes(buffer.sub(16, (2, 3), "u4").to_numpy(), words[4:10].reshape(2, 3))
    assert buffer.sub(96, 0, np.uint8).size == 0
    device.stream.fill(buffer[2:4], 0)
    array[2:4] = 0
    assert same_bytes(buffer.to_numpy(), array)
    assert len(buffer) == 6


def test_a_view_keeps_the_memory_alive(device):
    view = device.upload(np.arange(1000, dtype=np.uint32))[500:]
    gc.collect()
    junk = [device.upload(np.zeros(1000, np.uint32)) for _ in range(5)]
    assert np.array_equal(view.to_numpy(), np.arange(500, 1000, dtype=np.uint32))
    del junk


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda b: b.sub(-4, 1, np.uint8), ValueError),
        (lambda b: b.sub(0, 49, np.uint8), ValueError),
        (lambda b: b.sub(40, 3, np.float32), ValueError),
        (lambda b: b.sub(2, 1, np.float32), ValueError),
        (lambda b: b.sub(0, -1, np.uint8), ValueError),
        (lambda b: b.sub(0, 1.0, np.uint8), TypeError),
        (lambda b: b.view(np.dtype("V5")), ValueError),
        (lambda b: b.reshape(5, 5), ValueError),
        (lambda b: b[3], IndexError),
        (lambda b: b[::2], ValueError),
        (lambda b: b.to_numpy(np.zeros(12, np.int32)), ValueError),
        (lambda b: b.to_numpy(np.zeros(11, np.float32)), ValueError),
        (lambda b: b.to_numpy([0.0] * 12), TypeError),
        (lambda b: b.to_numpy(np.broadcast_to(np.float32(0), (3, 4))), ValueError),
    ],
)
def test_bad_window_or_target_raises_and_changes_nothing(device, use, error):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffer = device.upload(array)
    with pytest.raises(error):
        use(buffer)
    assert same_bytes(buffer.to_numpy(), array)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        (-1, np.uint8, ValueError),
        ((3, -2), np.uint8, ValueError),
        (2.5, np.uint8, TypeError),
        ((1 << 33, 1 << 33), np.uint8, (ValueError, MemoryError)),
        (True, np.uint8, TypeError),
        (3, object, TypeError),
        (3, ">f4", ValueError),
    ],
    ids=str,
)
def test_bad_shape_or_dtype_allocates_nothing(device, shape, dtype, error):
    before = device.mem_info().used
    with pytest.raises(error):
        device.alloc(shape, dtype)
    assert device.mem_info().used == before


def test_bad_copies_change_nothing(device):
    stream, array = device.stream, np.arange(16, dtype=np.uint8)
    buffer, other = device.upload(array), device.upload(array)
    for use, error in [
        (lambda: stream.copy(buffer[:8], buffer[4:12]), ValueError),
        (lambda: stream.copy(buffer, buffer), ValueError),
        (lambda: stream.copy(buffer, other[:8]), ValueError),
        (lambda: stream.upload(buffer, array[:8]), ValueError),
        (lambda: stream.upload(buffer, array.astype(np.int8)), ValueError),
        (lambda: stream.upload(buffer, [1] * 16), TypeError),
        (lambda: stream.upload(array, array), TypeError),
        (lambda: stream.copy(buffer, array), TypeError),
        (lambda: stream.fill(buffer, 256), ValueError),
        (lambda: stream.fill(buffer, -1), ValueError),
    ]:
        with pytest.raises(error):
            use()
    assert same_bytes(buffer.to_numpy(), array)


def test_closed_buffer_is_refused_everywhere(device):
    array = np.arange(16, dtype=np.uint8)
    buffer = device.upload(array)
    view, other = buffer[4:8], device.upload(array)
    view.close()
    with pytest.raises(fp4rt.ClosedError):
        view.to_numpy()
    assert same_bytes(buffer.to_numpy(), array)
    view = buffer[4:8]
    buffer.close()
    buffer.close()
    for use in (
        buffer.to_numpy,
        view.to_numpy,
        lambda: buffer[1:],
        lambda: device.stream.upload(buffer, array),
        lambda: device.stream.fill(view, 0),
        lambda: device.stream.copy(other, buffer),
        lambda: device.as_buffer(buffer),
    ):
        with pytest.raises(fp4rt.ClosedError):
            use()
    assert same_bytes(other.to_numpy(), array)


def test_buffer_of_another_device_is_refused(device):
    array = np.arange(16, dtype=np.uint8)
    with fp4rt.device(device.name) as second:
        foreign, own = second.upload(array), device.upload(array)
        with pytest.raises(ValueError, match=r"open|through the host"):
            device.stream.copy(own, foreign)
        with pytest.raises(ValueError, match=r"is on|belongs"):
            device.as_buffer(foreign)
        with pytest.raises(ValueError, match=r"belongs|does not"):
            device.as_stream(second.stream)
    with pytest.raises(fp4rt.ClosedError):
        foreign.to_numpy()
    with pytest.raises(fp4rt.ClosedError):
        second.alloc(1)
    second.close()
    assert same_bytes(own.to_numpy(), array)


def test_as_buffer_and_as_stream(device):
    buffer = device.as_buffer(np.arange(5))
    assert device.as_buffer(buffer) is buffer
    assert np.array_equal(buffer.to_numpy(), np.arange(5))
    with pytest.raises(TypeError):
        device.as_buffer([1, 2, 3])
    assert device.as_stream() is device.stream
    assert device.as_stream(device.stream) is device.stream
    with pytest.raises(TypeError):
        device.as_stream("stream")


def test_mem_info_counts_live_buffers(device):
    before = device.mem_info().used
    buffer = device.alloc(1 << 20)
    assert device.mem_info().used == before + (1 << 20)
    view = buffer[:10]
    del buffer
    assert device.mem_info().used == before + (1 << 20)
    del view
    device.synchronize()
    assert device.mem_info().used == before
    device.trim()


BAD_VERBS = {
    "shape is a float": (
        lambda d, b: d.alloc(2.5),
        TypeError,
        "integer or a tuple of them, got 2.5",
    ),
    "shape is None": (lambda d, b: d.alloc(None), TypeError, "got None"),
    "shape holds a bool": (
        lambda d, b: d.alloc((2, True)),
        TypeError,
        "must hold integers, got True",
    ),
    "dtype": (lambda d, b: d.alloc(3, "foo"), TypeError, "dtype is 'foo', which numpy"),
    "offset is a float": (
        lambda d, b: b.sub(4.0, 1, np.uint8),
        TypeError,
        "offset must be an integer",
    ),
    "row beyond": (lambda d, b: b[9], IndexError, "row 9 of a buffer of 4 rows"),
    "row before": (lambda d, b: b[-5], IndexError, "row -5 of a buffer of 4 rows"),
    "row is a tuple": (lambda d, b: b[0, 1], TypeError, "one integer or slice"),
    "row is a float": (lambda d, b: b[1.0], TypeError, "one integer or slice"),
    "byte is a float": (
        lambda d, b: d.stream.fill(b, 1.5),
        TypeError,
        "byte must be an int, got 1.5",
    ),
    "byte is a str": (lambda d, b: d.stream.fill(b, "x"), TypeError, "byte must be an int"),
    "an array is no buffer": (
        lambda d, b: d.stream.fill(np.zeros(1000), 1),
        TypeError,
        "expected a buffer of .*, got ndarray$",
    ),
    "a list is no array": (lambda d, b: d.as_buffer([1] * 1000), TypeError, "list"),
}


@pytest.mark.parametrize("name", BAD_VERBS)
def test_bad_arguments_of_the_verbs(device, name):
    call, error, match = BAD_VERBS[name]
    buffer = device.upload(np.ones((4, 8), np.float32))
    used = device.mem_info().used
    with pytest.raises(error, match=match) as caught:
        call(device, buffer)
    assert len(str(caught.value)) < 400
    del caught  # its traceback holds this frame, so the buffer would wait for a collection
    assert device.mem_info().used == used
    np.testing.assert_array_equal(buffer.to_numpy(), 1)


@pytest.mark.parametrize("bad", [[1, 2], "text", None, 3, np.ma.array([1, 2])])
def test_what_is_no_array_is_not_uploaded(device, bad):
    if device.name.startswith("cuda") and isinstance(bad, np.ma.MaskedArray):
        pytest.skip("not looked for there")
    with pytest.raises(TypeError, match=r"numpy array|masked array"):
        device.upload(bad)


def test_a_view_without_bytes(device):
    with pytest.raises(ValueError, match="which has no bytes"):
        device.alloc(8).view("V0")
