"""The memory of a real GPU: order of reuse, limits, big buffers, and nothing leaking."""

import gc
import resource
from pathlib import Path

import numpy as np
import pytest
import runtime_kernels as rk

import fp4rt
from fp4rt.device import LaunchConfig

pytestmark = pytest.mark.gpu
ONE = LaunchConfig((1, 1, 1), (128, 1, 1))
MILLISECOND = 1_000_000


def spin(gpu, kernels, stream, buffer, milliseconds, value):
    """Queue a kernel that waits and then fills a uint32 buffer."""
    params = rk.record(rk.SPIN, milliseconds * MILLISECOND, buffer.address, buffer.size, value)
    stream.launch(kernels.kernel("spin"), ONE, params)


def test_dropped_buffer_is_not_reused_while_its_kernel_runs(gpu, kernels):
    for stream in (gpu.stream, gpu.new_stream()):
        gpu.trim()
        buffer = gpu.alloc(1 << 18, np.uint32)
        spin(gpu, kernels, stream, buffer, 50, 0xDEAD)
        del buffer
        fresh = [gpu.upload(np.zeros(1 << 18, np.uint32)) for _ in range(4)]
        gpu.synchronize()
        for other in fresh:
            assert not other.to_numpy().any(), "a late kernel wrote into a new buffer"


def test_dropped_pinned_array_is_not_reused_while_it_is_copied(gpu, kernels):
    stream = gpu.new_stream()
    target = gpu.alloc(1 << 20)
    source = gpu.empty_pinned(1 << 20, np.uint8)
    source[:] = 7
    spin(gpu, kernels, stream, gpu.alloc(1, np.uint32), 50, 0)
    stream.upload(target, source)
    del source
    gc.collect()
    for _ in range(4):
        gpu.empty_pinned(1 << 20, np.uint8)[:] = 9
    stream.synchronize()
    assert np.all(target.to_numpy() == 7)


def test_big_buffers_can_be_freed_and_taken_again(gpu):
    second = gpu.new_stream()
    size = int(gpu.mem_info().free * 0.6)
    for stream in (gpu.stream, second, gpu.stream):
        buffer = gpu.alloc(size)
        stream.fill(buffer[:1024], 1)
        stream.fill(buffer[-1024:], 2)
        assert buffer[-1].to_numpy() == 2
        del buffer


def test_results_are_complete_though_memory_was_dropped_meanwhile(gpu, kernels):
    stream = gpu.new_stream()
    buffer = gpu.upload(np.zeros(100, np.uint32))
    other = gpu.alloc(100)
    spin(gpu, kernels, stream, buffer, 50, 7)
    del other  # the free stream now waits for the kernel, and so must what follows
    assert np.all(buffer.to_numpy() == 7)


def test_out_of_memory_says_how_much(gpu):
    gpu.trim()
    keep = gpu.alloc(1 << 20)
    before = gpu.mem_info()
    for size in (int(before.free * 1.02), before.total * 3):
        with pytest.raises(fp4rt.OutOfMemoryError, match=f"asked for {size:,} bytes") as caught:
            gpu.alloc(size)
        assert isinstance(caught.value, MemoryError)
        assert f"buffers use {before.used:,} " in str(caught.value)
    after = gpu.mem_info()
    assert after.used == before.used
    assert abs(after.free - before.free) < 64 << 20
    gpu.stream.fill(keep, 1)
    assert np.all(keep.to_numpy() == 1)


def test_trim_gives_the_cache_back(gpu):
    gpu.trim()
    before = gpu.mem_info()
    for _ in range(3):
        gpu.alloc(512 << 20)
    held = gpu.mem_info()
    assert held.used == before.used
    assert held.held >= 512 << 20
    gpu.trim()
    after = gpu.mem_info()
    assert after.held < 64 << 20
    assert after.free > held.free


def test_both_ends_of_more_than_4_gib(gpu, kernels):
    size = (4 << 30) + 3
    buffer = gpu.alloc(size)
    gpu.stream.fill(buffer, 0x11)
    for offset, value in ((0, 1), (size - 1, 2), (1 << 32, 3), ((1 << 32) - 1, 4)):
        gpu.stream.launch(
            kernels.kernel("poke"), ONE, rk.record(rk.POKE, buffer.address, offset, value)
        )
    assert buffer[:2].to_numpy().tolist() == [1, 0x11]
    assert buffer[(1 << 32) - 2 :].to_numpy().tolist() == [0x11, 4, 3, 0x11, 2]
    gpu.stream.copy(buffer[:3], buffer[size - 3 :])
    assert buffer[:3].to_numpy().tolist() == [3, 0x11, 2]
    gpu.stream.upload(buffer[size - 2 :], np.array([5, 6], np.uint8))
    assert buffer[size - 3 :].to_numpy().tolist() == [3, 5, 6]


def test_forgotten_devices_give_their_memory_back(gpu):
    gpu.trim()
    before = gpu.mem_info().free
    for _ in range(20):
        device = fp4rt.device("cuda:0")
        device.cycle = [device, device.alloc(1 << 30)]
        del device
    gc.collect()
    assert before - gpu.mem_info().free < 256 << 20


def test_large_copies_go_in_pieces(gpu, rng):
    array = rng.integers(0, 256, (33 << 20) + 5, dtype=np.uint8)
    assert np.array_equal(gpu.upload(array).to_numpy(), array)


def host_bytes():
    """Resident size of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_many_cycles_leave_memory_flat(gpu, kernels):
    stream, add = gpu.stream, kernels.kernel("add")
    source = np.zeros(64, np.uint32)

    def buffers(count):
        for i in range(count):
            buffer = gpu.alloc(1 + i % 5000)
            if i % 16 == 0:
                stream.fill(buffer, 0)
            del buffer

    def graphs(count):
        for _ in range(count):
            a, b = gpu.alloc(64, np.uint32), gpu.alloc(64, np.uint32)
            with stream.capture() as capture:
                stream.upload(a, source)
                stream.launch(add, ONE, rk.record(rk.ADD, a.address, b.address, 64, 1))
            capture.graph.launch()

    def others(count):
        for _ in range(count):
            other = gpu.new_stream()
            event = other.record()
            other.wait(event)
            pinned = gpu.empty_pinned(100, np.uint8)
            del other, event, pinned

    def settled():
        gpu.synchronize()
        gc.collect()
        gpu.trim()
        return gpu.mem_info(), host_bytes()

    for warm in (buffers, graphs, others):
        warm(1000)
    before, resident = settled()
    buffers(80_000)
    graphs(15_000)
    others(5_000)
    after, grown = settled()
    assert after.used == before.used
    assert before.free - after.free < 64 << 20
    assert grown - resident < 64 << 20, f"{(grown - resident) / 2**20:.0f} MiB more"
