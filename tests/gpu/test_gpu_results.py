"""Memory of results, which is taken again at once where only one stream may still use it."""

import gc
import threading

import numpy as np
import pytest
import runtime_kernels as rk
from helpers import exact_operand, oracle

import fp4rt
from fp4rt.cuda.memory import SPARE_COUNT
from fp4rt.device import LaunchConfig

pytestmark = pytest.mark.gpu
ONE = LaunchConfig((1, 1, 1), (128, 1, 1))
FLOAT16, UINT32 = np.dtype(np.float16), np.dtype(np.uint32)
MILLISECOND = 1_000_000


def spin(gpu, kernels, stream, buffer, milliseconds, value):
    """Queue a kernel that waits and then fills a uint32 buffer."""
    params = rk.record(rk.SPIN, milliseconds * MILLISECOND, buffer.address, buffer.size, value)
    stream.launch(kernels.kernel("spin"), ONE, params)


@pytest.fixture
def settled(gpu):
    """Nothing spared, and no stream busy."""
    gpu.trim()
    gpu.synchronize()


def test_the_memory_of_the_last_result_is_taken_again(gpu, rng, settled):
    a, b = exact_operand(rng, (8, 64)), exact_operand(rng, (2, 32, 64))
    rows, weights = fp4rt.upload_rows(gpu, a), fp4rt.upload_weights(gpu, b)
    addresses, held, before = set(), None, None
    for sizes in [[3, 5], [8, 0]] * 5:
        found = fp4rt.grouped_gemm(gpu, rows, weights, sizes)
        if held is not None:
            assert held.address != found.address
            assert np.array_equal(held.to_numpy(), before)
        held, before = found, oracle(a, b, sizes)
        assert np.array_equal(found.to_numpy(), before)
        addresses.add(found.address)
    assert len(addresses) <= 4  # two in turn, and what was taken while copies were under way


def test_one_stream_takes_memory_behind_its_own_work(gpu, kernels, settled):
    stream = gpu.new_stream()
    first = stream.alloc((1 << 16,), UINT32)
    address = first.address
    spin(gpu, kernels, stream, first, 30, 0xDEAD)
    del first
    second = stream.alloc((1 << 16,), UINT32)
    assert second.address == address
    stream.fill(second, 0)
    stream.synchronize()
    assert not second.to_numpy().any()


@pytest.mark.parametrize("joined", [False, True])
def test_memory_that_another_stream_still_writes_is_not_taken(gpu, kernels, settled, joined):
    mine, other = gpu.new_stream(), gpu.new_stream()
    first = mine.alloc((1 << 16,), UINT32)
    spin(gpu, kernels, other, first, 50, 0xDEAD)
    if joined:  # the free stream waits for the kernel already
        other_memory = gpu.alloc(1 << 10)
        del other_memory
        gc.collect()
    del first
    second = mine.alloc((1 << 16,), UINT32)
    mine.fill(second, 0)
    gpu.synchronize()
    assert not second.to_numpy().any(), "a late kernel wrote into a new result"


def test_memory_that_other_code_was_given_is_not_taken(gpu, settled):
    first = gpu.stream.alloc((64, 64), FLOAT16)
    address = first.address
    capsule = first.__dlpack__()
    del first
    assert gpu.stream.alloc((64, 64), FLOAT16).address != address
    del capsule


def test_spared_memory_is_bounded_and_given_back(gpu, settled):
    before = gpu.mem_info().used
    held = [gpu.stream.alloc((1 << 16,), UINT32) for _ in range(3 * SPARE_COUNT)]
    held.clear()
    assert len(gpu.memory._spare) == SPARE_COUNT
    assert gpu.mem_info().used == before
    assert not gpu.memory._spare
    big = gpu.stream.alloc((1 << 30,), UINT32)
    del big
    assert not gpu.memory._spare
    assert gpu.mem_info().used == before


def test_an_allocation_that_needs_it_gets_spared_memory(gpu, settled):
    size = gpu.mem_info().free - (48 << 20)
    gpu.stream.alloc((1 << 24,), UINT32)  # 64 MiB, dropped at once
    assert gpu.memory._spare
    gpu.alloc(size)
    assert not gpu.memory._spare


def test_threads_with_results_on_streams_of_their_own(gpu, rng, settled):
    a, b = exact_operand(rng, (64, 256)), exact_operand(rng, (2, 256, 256))
    rows, weights = fp4rt.upload_rows(gpu, a), fp4rt.upload_weights(gpu, b)
    cases = [([m, 64 - m], oracle(a, b, [m, 64 - m])) for m in (0, 7, 32, 64)]
    wrong = []

    def work(i):
        stream = gpu.new_stream()
        for turn in range(100):
            sizes, expected = cases[(i + turn) % 4]
            results = [
                fp4rt.grouped_gemm(gpu, rows, weights, sizes, stream=stream) for _ in range(3)
            ]
            wrong.extend(i for y in results if not np.array_equal(y.to_numpy(), expected))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
