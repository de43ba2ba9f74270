"""Contexts and threads: fp4rt leaves what it finds as it was, and works from anywhere."""

import contextlib
import threading

import numpy as np
import pytest
import runtime_kernels as rk

import fp4rt
from fp4rt.device import LaunchConfig

pytestmark = pytest.mark.gpu
ONE = LaunchConfig((1, 1, 1), (128, 1, 1))


@contextlib.contextmanager
def other_context():
    """A context that is not the primary one, current in this thread."""
    from cuda.bindings import driver

    gpu = driver.cuDeviceGet(0)[1]
    code, context = driver.cuCtxCreate(None, 0, gpu)
    assert not code
    try:
        yield int(context)
    finally:
        driver.cuCtxDestroy(context)


def current():
    from cuda.bindings import driver

    return int(driver.cuCtxGetCurrent()[1])


def use_everything(gpu, kernels):
    """Call every verb once; return a result that shows it worked."""
    stream = gpu.new_stream()
    array = np.arange(100, dtype=np.uint32)
    a, b = gpu.upload(array), gpu.alloc(100, np.uint32)
    gpu.encode_tensor_map(fp4rt.TensorMap(a.address, "uint8", (64, 2), (64,), (64, 2)))
    add = rk.load_kernels(gpu).kernel("add")
    params = rk.record(rk.ADD, a.address, b.address, 100, 1)
    stream.upload(a, array)
    stream.launch(add, ONE, params)
    stream.launch(add, LaunchConfig((1, 1, 1), (128, 1, 1), programmatic=True), params)
    with stream.capture() as capture:
        stream.launch(add, ONE, params)
    capture.graph.set_params(0, rk.record(rk.ADD, b.address, b.address, 100, 1))
    capture.graph.launch(stream)
    capture.graph.debug_dot()
    start, end = stream.record(timed=True), stream.record(timed=True)
    gpu.stream.wait(end)
    end.synchronize()
    end.elapsed_since(start)
    gpu.empty_pinned(10, np.uint8)
    gpu.mem_info()
    gpu.trim()
    gpu.synchronize()
    result = b.to_numpy()
    stream.close()
    capture.graph.close()
    return np.array_equal(result, array + 2)


def test_no_current_context_stays_none(gpu, kernels):
    assert current() == 0
    assert use_everything(gpu, kernels)
    assert current() == 0


def test_foreign_context_stays_current(gpu, kernels):
    with other_context() as context:
        assert use_everything(gpu, kernels)
        assert current() == context
        with fp4rt.device("cuda:0") as second:
            assert current() == context
            assert second.alloc(10).nbytes == 10
        assert current() == context
        with pytest.raises(ValueError):
            gpu.alloc(-1)
        with pytest.raises(fp4rt.OutOfMemoryError):
            gpu.alloc(1 << 45)
        assert current() == context


def test_primary_context_stays_current(gpu, kernels):
    with gpu.context.current():
        found = current()
        assert found == gpu.context.address
        assert use_everything(gpu, kernels)
        assert current() == found
    assert current() == 0


def test_stream_of_another_context_is_refused(gpu):
    from cuda.bindings import driver

    with other_context():
        code, stream = driver.cuStreamCreate(0)
        assert not code
        with pytest.raises(ValueError, match="another context"):
            gpu.as_stream(int(stream))


def mixed_operations(gpu, kernels, seed, count, failures):
    try:
        rng = np.random.default_rng(seed)
        stream, add = gpu.new_stream(), kernels.kernel("add")
        a, b = gpu.alloc(100, np.uint32), gpu.alloc(100, np.uint32)
        with stream.capture() as capture:
            stream.launch(add, ONE, rk.record(rk.ADD, a.address, b.address, 100, 5))
        graph = capture.graph
        for step in range(count):
            array = rng.integers(0, 1 << 30, 100, dtype=np.uint32)
            kind = rng.integers(0, 5)
            if kind == 0:
                assert np.array_equal(gpu.upload(array).to_numpy(), array)
                continue
            stream.upload(a, array)
            if kind == 1:
                graph.launch(stream)
                expected = array + 5
            elif kind == 2:
                increment = int(rng.integers(0, 100))
                params = rk.record(rk.ADD, a.address, b.address, 100, increment)
                stream.launch(add, ONE, params)
                expected = array + increment
            elif kind == 3:
                stream.copy(b, a)
                expected = array
            else:
                stream.fill(b, step % 256)
                expected = np.full(100, step % 256 * 0x01010101, np.uint32)
            out = np.empty(100, np.uint32)
            stream.download(out, b)
            assert np.array_equal(out, expected), f"step {step}, kind {kind}"
    except BaseException as error:
        failures.append(error)


def test_eight_cold_threads_of_a_thousand_operations(gpu, kernels, rng):
    failures = []
    seeds = rng.integers(0, 1 << 31, 8)
    threads = [
        threading.Thread(target=mixed_operations, args=(gpu, kernels, seed, 1000, failures))
        for seed in seeds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_one_graph_from_many_threads(gpu, kernels):
    buffer = gpu.upload(np.zeros(100, np.uint32))
    with gpu.stream.capture() as capture:
        gpu.stream.launch(
            kernels.kernel("add"), ONE, rk.record(rk.ADD, buffer.address, buffer.address, 100, 1)
        )

    def launch():
        for _ in range(200):
            capture.graph.launch()

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.all(buffer.to_numpy() == 800)


def test_capture_while_other_threads_allocate_and_load(gpu, kernels):
    stop, failures = threading.Event(), []

    def busy():
        try:
            while not stop.is_set():
                gpu.upload(np.zeros(1000, np.uint8)).to_numpy()
                gpu.empty_pinned(1000, np.uint8)
                rk.load_kernels(gpu)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    stream = gpu.new_stream()
    buffer = gpu.upload(np.zeros(100, np.uint32))
    params = rk.record(rk.ADD, buffer.address, buffer.address, 100, 1)
    try:
        for _ in range(50):
            with stream.capture() as capture:
                stream.launch(kernels.kernel("add"), ONE, params)
                gpu.alloc(1000)
            capture.graph.launch(stream)
    finally:
        stop.set()
        thread.join()
    assert not failures, failures
    assert np.all(buffer.to_numpy() == 50)
