"""Copies of ordinary arrays through pinned memory, against a stand-in for the driver.

The stand-in copies late, in a thread of its own, as a GPU does: memory that is used again too soon
shows as wrong bytes.
"""

import contextlib
import ctypes
import enum
import queue
import threading
import time
import types

import numpy as np
import pytest

import fp4rt
from fp4rt.cuda import driver as door
from fp4rt.cuda import staging
from fp4rt.cuda.staging import Staging


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_UNKNOWN = 999
    CUDA_ERROR_NOT_READY = 600


class LateGpu:
    """What of cuda.bindings.driver staging uses; `fail_at` is the number of a copy that fails."""

    CUresult = Code
    CU_MEMHOSTALLOC_PORTABLE = 1
    CUevent_flags = types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self):
        self.pinned, self.copies, self.fail_at = {}, 0, None
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (job := self._work.get()) is not None:
            time.sleep(0.0005)
            job()

    def settle(self):
        """Wait until all that was queued is done."""
        done = threading.Event()
        self._work.put(done.set)
        assert done.wait(60)

    def stop(self):
        self._work.put(None)

    def cuMemHostAlloc(self, nbytes, _flags):
        array = np.full(nbytes, 0xEE, np.uint8)
        self.pinned[array.ctypes.data] = array
        return Code.CUDA_SUCCESS, array.ctypes.data

    def cuMemFreeHost(self, address):
        del self.pinned[address]
        return (Code.CUDA_SUCCESS,)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return Code.CUDA_SUCCESS, mode

    def cuEventCreate(self, _flags):
        event = threading.Event()
        event.set()
        return Code.CUDA_SUCCESS, event

    def cuEventDestroy(self, _event):
        return (Code.CUDA_SUCCESS,)

    def cuEventRecord(self, event, _stream):
        event.clear()
        self._work.put(event.set)
        return (Code.CUDA_SUCCESS,)

    def cuEventQuery(self, event):
        return (Code.CUDA_SUCCESS if event.is_set() else Code.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event):
        event.wait()
        return (Code.CUDA_SUCCESS,)

    def _copy(self, dst, src, nbytes, _stream):
        self.copies += 1
        if self.copies == self.fail_at:
            return (Code.CUDA_ERROR_UNKNOWN,)
        self._work.put(lambda: ctypes.memmove(dst, src, nbytes))
        return (Code.CUDA_SUCCESS,)

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = _copy

    def cuGetErrorString(self, _code):
        return Code.CUDA_SUCCESS, b"unknown"


class Context:
    def current(self):
        return contextlib.nullcontext()

    def enter(self):
        pass


class Memory:
    """What of `fp4rt.cuda.memory.Memory` staging uses."""

    context = Context()

    def __init__(self):
        self.pinned = set()

    def collect(self):
        pass

    def retire(self, item):
        if door.driver is not None:  # a test's own, which it has no longer at the end
            item()


@pytest.fixture
def gpu(monkeypatch):
    """A late GPU; pieces are so small that a kilobyte takes many rounds."""
    late = LateGpu()
    monkeypatch.setattr(door, "driver", late)
    for name, value in {"STAGING_THREADS": 4, "SLOT_BYTES": 64, "SMALLEST_BYTES": 8}.items():
        monkeypatch.setattr(staging, name, value)
    monkeypatch.setattr(staging.os, "cpu_count", lambda: 4)
    yield late
    late.stop()


@pytest.fixture
def ring(gpu):
    made = Staging(Memory())
    yield made
    made.close()


def upload(ring, rng, sizes):
    """Upload random arrays; return what arrived and what should have."""
    given = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    wanted = [array.copy() for array in given]
    found = [np.zeros_like(array) for array in given]
    ring.upload([(f.ctypes.data, g) for f, g in zip(found, given, strict=True)], None)
    for array in given:
        array[:] = 0xAA  # the caller may
    return found, wanted


@pytest.mark.parametrize("sizes", [[1], [63], [64], [65], [5000], [7, 640, 1, 900]])
def test_arrays_arrive_whatever_their_size(ring, gpu, rng, sizes):
    for _ in range(3):
        found, wanted = upload(ring, rng, sizes)
        gpu.settle()
        for f, w in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(f, w)
    rounds = sum(-(-size // 64) for size in sizes)
    assert gpu.copies == 3 * rounds


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000])
def test_results_are_complete_on_return(ring, rng, size):
    for _ in range(3):
        source = rng.integers(0, 256, size, dtype=np.uint8)
        found = np.zeros_like(source)
        ring.download(found, source.ctypes.data, None)
        np.testing.assert_array_equal(found, source)


def test_many_callers_at_once(ring, gpu, rng, monkeypatch):
    """More of them than slots, each with work for all threads, which is handed out slowly."""
    submit = staging.ThreadPoolExecutor.submit

    def slowly(*args):
        time.sleep(0.0005)
        return submit(*args)

    monkeypatch.setattr(staging.ThreadPoolExecutor, "submit", slowly)
    source = rng.integers(0, 256, 3000, dtype=np.uint8)
    wrong, pairs, counts = [], [], []
    made = staging.Work.__init__

    def counted(work, rounds, slots, stream):
        counts.append((len(slots), len(rounds)))
        made(work, rounds, slots, stream)

    monkeypatch.setattr(staging.Work, "__init__", counted)

    def work(seed):
        own = np.random.default_rng(seed)
        for _ in range(5):
            size = int(own.integers(1, 2000))
            found = np.zeros(size, np.uint8)
            ring.download(found, source.ctypes.data, None)
            if not np.array_equal(found, source[:size]):
                wrong.append(seed)
            pairs.append(upload(ring, own, [size, 100]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    gpu.settle()
    assert not wrong
    assert all(slots == min(rounds, staging.STAGING_SLOTS) for slots, rounds in counts)
    for found, wanted in pairs:
        for f, w in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(f, w)


@pytest.mark.parametrize("fail_at", [1, 3, 20])
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_copy_that_fails_ends_the_others(ring, gpu, rng, fail_at, way):
    data = rng.integers(0, 256, 4000, dtype=np.uint8)
    other = np.zeros_like(data)
    gpu.fail_at = fail_at
    with pytest.raises(fp4rt.DriverError, match="CUDA_ERROR_UNKNOWN"):
        if way == "up":
            ring.upload([(other.ctypes.data, data)], None)
        else:
            ring.download(other, data.ctypes.data, None)
    if way == "up":
        found, wanted = upload(ring, rng, [4000])
        gpu.settle()
        np.testing.assert_array_equal(found[0], wanted[0])
    else:
        ring.download(other, data.ctypes.data, None)
        np.testing.assert_array_equal(other, data)


def test_memory_is_made_once_and_given_back(ring, gpu, rng):
    for _ in range(20):
        upload(ring, rng, [1000])
    assert 1 <= len(gpu.pinned) <= staging.STAGING_SLOTS
    gpu.settle()
    ring.close()
    assert not gpu.pinned
