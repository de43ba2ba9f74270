"""One process with CuPy and PyTorch: zero copy both ways, streams in order, nothing leaked."""

import gc

import ml_dtypes
import numpy as np
import pytest
import runtime_kernels as rk
from helpers import exact_operand, oracle

import fp4rt
from fp4rt.device import LaunchConfig

pytestmark = pytest.mark.gpu
ONE = LaunchConfig((1, 1, 1), (128, 1, 1))
MILLISECOND = 1_000_000


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not module.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return module


def current():
    from cuda.bindings import driver

    return int(driver.cuCtxGetCurrent()[1])


def cupy_address(array):
    return array.data.ptr


def torch_address(tensor):
    return tensor.data_ptr()


class FromInterface:
    """Offers the CUDA array interface of another object, and nothing else."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


def test_cupy_array_in_without_a_copy(gpu, cupy):
    array = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    context = current()
    for given in (array, FromInterface(array)):
        buffer = gpu.as_buffer(given)
        assert buffer.address == cupy_address(array)
        assert (buffer.shape, buffer.dtype) == ((3, 4), np.float32)
        assert np.array_equal(buffer.to_numpy(), np.arange(12, dtype=np.float32).reshape(3, 4))
        gpu.stream.fill(buffer[0], 0)
        gpu.synchronize()
        assert not array[0].get().any()
        array[0] = cupy.arange(4)
    assert current() == context


def test_torch_tensor_in_without_a_copy(gpu, torch):
    tensor = torch.arange(12, dtype=torch.bfloat16, device="cuda:0").reshape(3, 4)
    context = current()
    buffer = gpu.as_buffer(tensor)
    assert buffer.address == torch_address(tensor)
    assert (buffer.shape, buffer.dtype) == ((3, 4), np.dtype(ml_dtypes.bfloat16))
    assert np.array_equal(buffer.to_numpy().astype(np.float32).ravel(), np.arange(12))
    assert current() == context


def test_buffer_out_without_a_copy(gpu, cupy, torch):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffer = gpu.upload(array)
    context = current()
    for taken in (cupy.from_dlpack(buffer), cupy.asarray(buffer)):
        assert cupy_address(taken) == buffer.address
        assert np.array_equal(cupy.asnumpy(taken), array)
    tensor = torch.from_dlpack(buffer)
    assert torch_address(tensor) == buffer.address
    assert np.array_equal(tensor.cpu().numpy(), array)
    tensor[0] = 7
    torch.cuda.synchronize()
    assert np.all(buffer[0].to_numpy() == 7)
    assert torch_address(torch.as_tensor(buffer, device="cuda:0")) == buffer.address
    assert current() == context


def test_narrow_types_cross_the_border(gpu, cupy, torch, rng):
    raw = rng.integers(0, 120, (4, 8), dtype=np.uint8)
    bfloat = gpu.upload(np.arange(8).astype(ml_dtypes.bfloat16))
    tensor = torch.from_dlpack(bfloat)
    assert tensor.dtype == torch.bfloat16
    assert tensor.float().tolist() == list(range(8))
    scales = gpu.upload(raw.view(ml_dtypes.float8_e4m3fn))
    assert np.array_equal(cupy.asnumpy(cupy.asarray(scales)), raw)
    taken = torch.from_dlpack(scales)
    assert np.array_equal(taken.view(torch.uint8).cpu().numpy(), raw)
    back = gpu.as_buffer(taken.view(torch.uint8)).view(ml_dtypes.float8_e4m3fn)
    assert back.address == scales.address
    assert cupy.asarray(bfloat).dtype == np.uint16


def test_empty_and_scalar_arrays(gpu, cupy, torch):
    for shape in ((0,), (3, 0), ()):
        ours = gpu.upload(np.zeros(shape, np.float32))
        assert cupy.asarray(ours).shape == shape
        assert tuple(torch.from_dlpack(ours).shape) == shape
        assert gpu.as_buffer(cupy.zeros(shape, cupy.float32)).shape == shape
        assert gpu.as_buffer(torch.zeros(shape, device="cuda:0")).to_numpy().shape == shape


def test_what_cannot_be_shared_is_refused(gpu, cupy, torch):
    matrix = cupy.zeros((4, 6), cupy.float32)
    for strided in (matrix.T, matrix[:, ::2], torch.zeros(4, 6, device="cuda:0").T):
        with pytest.raises(ValueError, match="contiguous"):
            gpu.as_buffer(strided)
    assert gpu.as_buffer(matrix[:1].T.reshape(6, 1)).shape == (6, 1)
    with pytest.raises((TypeError, ValueError), match=r"host|numpy"):
        gpu.as_buffer(torch.zeros(3))
    with pytest.raises(TypeError, match="__dlpack__"):
        gpu.as_buffer([1, 2])
    with pytest.raises(BufferError, match="ambiguous"):
        gpu.alloc(3).__dlpack__(stream=0)
    with pytest.raises(BufferError):
        gpu.alloc(3).__dlpack__(dl_device=(1, 0), copy=False)
    with gpu.stream.capture(), pytest.raises(BufferError, match="capture"):
        cupy.asarray(gpu.alloc(3))


def test_dlpack_to_the_host_and_by_copy(gpu, cupy):
    array = np.arange(5, dtype=np.int32)
    buffer = gpu.upload(array)

    class OnHost:
        def __dlpack__(self, **options):
            return buffer.__dlpack__(max_version=options.get("max_version"), dl_device=(1, 0))

        def __dlpack_device__(self):
            return (1, 0)

    assert np.array_equal(np.from_dlpack(OnHost()), array)

    class Copied:
        def __dlpack__(self, **options):
            return buffer.__dlpack__(**(options | {"copy": True}))

        def __dlpack_device__(self):
            return buffer.__dlpack_device__()

    copied = cupy.from_dlpack(Copied())
    assert cupy_address(copied) != buffer.address
    assert np.array_equal(cupy.asnumpy(copied), array)


def test_read_only_arrays_stay_read_only(gpu, cupy):
    array = cupy.arange(4, dtype=cupy.uint8)

    class ReadOnly:
        @property
        def __cuda_array_interface__(self):
            found = dict(array.__cuda_array_interface__)
            found["data"] = (found["data"][0], True)
            return found

    buffer = gpu.as_buffer(ReadOnly())
    with pytest.raises(ValueError, match="read-only"):
        gpu.stream.fill(buffer, 0)
    with pytest.raises(BufferError, match="read-only"):
        buffer.__dlpack__()
    assert buffer.__cuda_array_interface__["data"][1]
    assert buffer.to_numpy().tolist() == [0, 1, 2, 3]


def test_we_wait_for_a_slow_cupy_producer(gpu, cupy, kernels):
    producer = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(1 << 20, cupy.uint32)
    array += 0  # CuPy compiles the kernel now, not while the producer is being slow
    cupy.cuda.Device().synchronize()
    ours = gpu.as_stream(producer)
    with producer:
        spun = gpu.as_buffer(array, stream=ours)
        params = rk.record(rk.SPIN, 100 * MILLISECOND, spun.address, spun.size, 5)
        ours.launch(kernels.kernel("spin"), ONE, params)
        array += 1
        assert not producer.done, "the producer was not slow enough to prove anything"
        buffer = gpu.as_buffer(array)  # exported while the producer still spins
    target = gpu.alloc(1 << 20, np.uint32)
    gpu.stream.copy(target, buffer)
    assert np.all(target.to_numpy() == 6)


def test_weights_of_arrays_that_cupy_still_makes(gpu, cupy, rng):
    """They are packed on the GPU once they are there, and may be changed when that call returns."""
    a, b = exact_operand(rng, (5, 96)), exact_operand(rng, (2, 200, 96))
    producer = cupy.cuda.Stream(non_blocking=True)
    with producer:
        values, scales = (cupy.zeros(part.shape, cupy.uint8) for part in (b.values, b.scales))
        late = [cupy.asarray(part.view(np.uint8)) for part in (b.values, b.scales)]
        busy = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(200):
            busy += 1
        values[...], scales[...] = late
        with fp4rt.DeviceWeights.from_parts(gpu, values, scales) as weights:
            values[...] = scales[...] = 0x7F
            producer.synchronize()
            found = fp4rt.grouped_gemm(gpu, a, weights, [2, 3])
    assert np.array_equal(found, oracle(a, b, [2, 3]))


def test_they_wait_for_our_slow_producer(gpu, cupy, torch, kernels):
    stream, small = gpu.new_stream(), gpu.upload(np.zeros(3, np.int32))
    # Compiled and loaded now, not while the producer is being slow.
    cupy.from_dlpack(small) + 1
    with torch.cuda.stream(torch.cuda.Stream()):
        (torch.from_dlpack(small) + 1).cpu()
    for take in (cupy.from_dlpack, cupy.asarray, torch.from_dlpack):
        buffer = gpu.upload(np.zeros(1 << 20, np.uint32)).view(np.int32)
        params = rk.record(rk.SPIN, 100 * MILLISECOND, buffer.address, buffer.size, 5)
        stream.launch(kernels.kernel("spin"), ONE, params)
        event = stream.record()
        if take is not torch.from_dlpack:
            with cupy.cuda.Stream(non_blocking=True) as consumer:
                taken = take(buffer)
                if take is cupy.from_dlpack:  # asarray waits on the host
                    assert not event.done(), "the producer was not slow enough to prove anything"
                result = taken + 1
                consumer.synchronize()
                got = result.get()
        else:
            consumer = torch.cuda.Stream()
            with torch.cuda.stream(consumer):
                taken = take(buffer)
                assert not event.done(), "the producer was not slow enough to prove anything"
                result = taken + 1
            consumer.synchronize()
            got = result.cpu().numpy()
        assert np.all(got == 6)


def test_streams_of_others_are_taken(gpu, cupy, torch, kernels):
    buffer = gpu.upload(np.zeros(100, np.uint32))
    params = rk.record(rk.ADD, buffer.address, buffer.address, 100, 1)
    streams = [1, 2, cupy.cuda.Stream().ptr, torch.cuda.Stream().cuda_stream, gpu.stream]
    if hasattr(cupy.cuda.Stream, "__cuda_stream__"):
        streams += [cupy.cuda.Stream(), cupy.cuda.Stream.null]
    keep = streams[:]
    for given in streams:
        stream = gpu.as_stream(given)
        assert stream.__cuda_stream__()[0] == 0
        stream.launch(kernels.kernel("add"), ONE, params)
        stream.synchronize()
    assert np.all(buffer.to_numpy() == len(keep))
    if hasattr(cupy.cuda.Stream, "from_external"):
        cupy.cuda.Stream.from_external(gpu.stream).synchronize()


def test_importer_keeps_exporter_alive(gpu, cupy, torch):
    gc.collect()
    gpu.trim()  # plans of earlier calls would go below
    before = gpu.mem_info().used
    taken = torch.from_dlpack(gpu.upload(np.arange(1000, dtype=np.int64)))
    gc.collect()
    junk = [gpu.upload(np.zeros(1000, np.int64)) for _ in range(20)]
    assert taken.cpu().tolist() == list(range(1000))
    del taken, junk
    array = cupy.arange(1000)
    buffer = gpu.as_buffer(array)
    address = cupy_address(array)
    del array
    gc.collect()
    others = [cupy.zeros(1000, cupy.int64) for _ in range(20)]
    assert address not in [cupy_address(a) for a in others]
    assert np.array_equal(buffer.to_numpy(), np.arange(1000))
    del buffer
    gpu.synchronize()
    gpu.trim()
    assert gpu.mem_info().used == before


def test_shared_buffer_outlives_the_device(cupy):
    device = fp4rt.device("cuda:0")
    taken = cupy.from_dlpack(device.upload(np.arange(1000)))
    pinned = device.empty_pinned(1000, np.uint8)
    device.close()
    pinned[:] = 1
    assert np.array_equal(cupy.asnumpy(taken), np.arange(1000))
    del taken, pinned
    gc.collect()
    with fp4rt.device("cuda:0") as again:
        assert np.array_equal(again.upload(np.arange(5)).to_numpy(), np.arange(5))


@pytest.mark.slow
def test_ten_thousand_exchanges_leak_nothing(gpu, cupy, torch):
    ours = gpu.upload(np.arange(1000, dtype=np.float32))
    theirs = cupy.arange(1000, dtype=cupy.float32)
    tensor = torch.arange(1000, dtype=torch.float32, device="cuda:0")

    def exchange(count):
        for i in range(count):
            cupy.from_dlpack(ours)
            torch.from_dlpack(ours)
            gpu.as_buffer(theirs)
            gpu.as_buffer(tensor)
            if i % 8 == 0:
                cupy.from_dlpack(gpu.alloc(4096))

    def settled():
        gc.collect()
        gpu.synchronize()
        gpu.trim()
        return gpu.mem_info()

    exchange(200)
    before, objects = settled(), len(gc.get_objects())
    exchange(2_500)
    after, grown = settled(), len(gc.get_objects())
    assert after.used == before.used
    assert before.free - after.free < 64 << 20
    assert grown - objects < 500


def test_others_still_work_after_us(gpu, cupy, torch):
    with fp4rt.device("cuda:0") as second:
        second.upload(np.zeros(10))
    assert int(cupy.arange(10).sum()) == 45
    assert int(torch.arange(10, device="cuda:0").sum()) == 45
