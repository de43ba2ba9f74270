"""Graphs on a real GPU: lifetimes, order, and captures that go wrong."""

import gc
import subprocess
import sys

import numpy as np
import pytest
import runtime_kernels as rk

import fp4rt
from fp4rt.device import LaunchConfig

pytestmark = pytest.mark.gpu
ONE = LaunchConfig((1, 1, 1), (128, 1, 1))
COUNT = 100


def add_params(source, target, increment=1):
    return rk.record(rk.ADD, source.address, target.address, COUNT, increment)


def test_replay_after_everything_was_dropped_and_a_gib_of_junk(gpu):
    array = np.arange(COUNT, dtype=np.uint32)
    result = gpu.empty_pinned(COUNT, np.uint32)
    source, target = gpu.alloc(COUNT, np.uint32), gpu.alloc(COUNT, np.uint32)
    add = rk.load_kernels(gpu).kernel("add")
    with gpu.stream.capture() as capture:
        gpu.stream.upload(source, array)
        gpu.stream.launch(add, ONE, add_params(source, target))
        gpu.stream.download(result, target)
    graph = capture.graph
    source.close()
    del array, source, target, add, capture
    gc.collect()
    junk = []
    for _ in range(16):
        junk.append(gpu.alloc(64 << 20))
        gpu.stream.fill(junk[-1], 0xEE)
    for _ in range(5):
        result[:] = 0
        graph.launch()
        gpu.synchronize()
        assert np.array_equal(result, np.arange(1, COUNT + 1))


def test_closing_a_buffer_inside_a_capture_is_safe(gpu, kernels):
    result = gpu.upload(np.zeros(COUNT, np.uint32))
    with gpu.stream.capture() as capture:
        source = gpu.upload(np.full(COUNT, 5, np.uint32))
        gpu.stream.launch(kernels.kernel("add"), ONE, add_params(source, result))
        source.close()
    junk = [gpu.upload(np.full(COUNT, 9, np.uint32)) for _ in range(20)]
    capture.graph.launch()
    assert np.all(result.to_numpy() == 6)
    del junk


def test_what_a_table_points_to_is_kept_on_request(gpu):
    before = gpu.mem_info().used
    buffer = gpu.alloc(1 << 20)
    with gpu.stream.capture() as capture:
        capture.keep(buffer)
    graph = capture.graph
    del buffer, capture
    assert gpu.mem_info().used == before + (1 << 20)
    graph.launch()
    graph.close()
    gpu.synchronize()
    assert gpu.mem_info().used == before


def test_graph_that_keeps_its_own_owner_is_still_collected(gpu):
    class Plan:
        pass

    before = gpu.mem_info().used
    plan = Plan()
    plan.buffer = gpu.alloc(1 << 20)
    with gpu.stream.capture() as capture:
        gpu.stream.fill(plan.buffer, 1)
        capture.keep(plan)
    plan.graph = capture.graph
    plan.graph.launch()
    del plan, capture
    gc.collect()
    gpu.synchronize()
    assert gpu.mem_info().used == before


def test_old_buffers_go_after_an_update(gpu, kernels):
    before = gpu.mem_info().used
    old, new = gpu.alloc(1 << 20), gpu.upload(np.zeros(1 << 18, np.uint32))
    with gpu.stream.capture() as capture:
        gpu.stream.launch(kernels.kernel("add"), ONE, add_params(old, old))
    capture.graph.set_params(0, add_params(new, new))
    del old
    gpu.synchronize()
    assert gpu.mem_info().used == before + (1 << 20)
    capture.graph.launch()
    assert new.to_numpy().sum() == COUNT


def test_pinned_source_is_read_anew_at_every_launch(gpu):
    source, result = gpu.empty_pinned(COUNT, np.uint32), gpu.empty_pinned(COUNT, np.uint32)
    buffer = gpu.alloc(COUNT, np.uint32)
    with gpu.stream.capture() as capture:
        gpu.stream.upload(buffer, source)
        gpu.stream.download(result, buffer)
    for value in (3, 4):
        source[:] = value
        capture.graph.launch()
        gpu.synchronize()
        assert np.all(result == value)


def test_two_streams_in_one_capture(gpu, kernels):
    first, second = gpu.stream, gpu.new_stream()
    array = np.arange(COUNT, dtype=np.uint32)
    a, b, c = gpu.upload(array), gpu.alloc(COUNT, np.uint32), gpu.alloc(COUNT, np.uint32)
    with first.capture() as capture:
        first.launch(kernels.kernel("add"), ONE, add_params(a, b, 1))
        second.wait(first.record())
        second.launch(kernels.kernel("add"), ONE, add_params(b, c, 10))
        first.wait(second.record())
        first.launch(kernels.kernel("add"), ONE, add_params(c, a, 100))
    second.fill(b, 0)  # an ordinary stream again
    capture.graph.launch()
    assert np.array_equal(a.to_numpy(), array + 111)


def test_unjoined_capture_is_an_error_with_advice_and_leaves_both_usable(gpu, kernels):
    first, second = gpu.stream, gpu.new_stream()
    buffer = gpu.upload(np.zeros(COUNT, np.uint32))
    with pytest.raises(fp4rt.DriverError, match=r"UNJOINED.*joined back"), first.capture():
        second.wait(first.record())
        second.launch(kernels.kernel("add"), ONE, add_params(buffer, buffer))
    for stream in (first, second):
        stream.launch(kernels.kernel("add"), ONE, add_params(buffer, buffer))
        stream.synchronize()
    assert np.all(buffer.to_numpy() == 2)


def test_events_do_not_cross_the_border_of_a_capture(gpu):
    first, second = gpu.stream, gpu.new_stream()
    outside = second.record()
    with first.capture():
        inside = first.record()
        with pytest.raises(RuntimeError, match="outside the capture"):
            first.wait(outside)
        with pytest.raises(RuntimeError, match="inside a capture"):
            inside.synchronize()
    with pytest.raises(RuntimeError, match="ended"):
        second.wait(inside)
    second.synchronize()


def test_graph_inside_a_capture_is_refused(gpu, kernels):
    buffer = gpu.upload(np.zeros(COUNT, np.uint32))
    with gpu.stream.capture() as inner:
        gpu.stream.launch(kernels.kernel("add"), ONE, add_params(buffer, buffer))
    with gpu.stream.capture() as outer:
        gpu.stream.launch(kernels.kernel("add"), ONE, add_params(buffer, buffer))
        with pytest.raises(RuntimeError, match="inside a capture"):
            inner.graph.launch()
    outer.graph.launch()
    inner.graph.launch()
    assert np.all(buffer.to_numpy() == 2)


def test_new_group_sizes_need_no_new_capture(gpu, kernels):
    """A thousand updates of one graph: each launch sees its own parameters."""
    out = gpu.upload(np.zeros((1000, COUNT), np.uint32))
    zero = gpu.upload(np.zeros(COUNT, np.uint32))
    with gpu.stream.capture() as capture:
        gpu.stream.launch(kernels.kernel("add"), ONE, add_params(zero, out))
    for i in range(1000):
        capture.graph.set_params(0, add_params(zero, out[i], i))
        capture.graph.launch()
    expected = np.broadcast_to(np.arange(1000, dtype=np.uint32)[:, None], (1000, COUNT))
    assert np.array_equal(out.to_numpy(), expected)


def test_first_call_of_a_process_may_be_inside_a_capture():
    code = """
import sys
sys.path.insert(0, "tests")
import numpy as np, runtime_kernels as rk, fp4rt
from fp4rt.device import LaunchConfig
with fp4rt.device("cuda:0") as gpu:
    stream = gpu.stream
    with stream.capture() as capture:
        add = rk.load_kernels(gpu).kernel("add")
        buffer = gpu.upload(np.zeros(100, np.uint32))
        params = rk.record(rk.ADD, buffer.address, buffer.address, 100, 1)
        stream.launch(add, LaunchConfig((1, 1, 1), (128, 1, 1)), params)
    capture.graph.launch()
    print(buffer.to_numpy().sum())
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=rk.ROOT, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "100\n", "")
