"""Streams, events and graphs of copies on every device."""

import gc

import numpy as np
import pytest

import fp4rt


def test_streams_wait_for_events(device):
    first, second = device.stream, device.new_stream()
    array = np.arange(1000, dtype=np.float32)
    source, target = device.alloc(1000, np.float32), device.alloc(1000, np.float32)
    first.upload(source, array)
    second.wait(first.record())
    second.copy(target, source)
    assert np.array_equal(target.to_numpy(), array)
    second.synchronize()
    second.close()
    second.close()
    with pytest.raises(fp4rt.ClosedError):
        second.copy(target, source)


def test_events_measure_time(device):
    stream = device.stream
    start = stream.record(timed=True)
    stream.fill(device.alloc(1 << 16), 0)
    end = stream.record(timed=True)
    end.synchronize()
    assert end.done()
    assert 0 <= end.elapsed_since(start) < 60
    with pytest.raises(ValueError, match="timed=True"):
        end.elapsed_since(stream.record())


def captured_copies(device):
    """A graph that uploads, copies and downloads; its arrays, all but the result, are dropped."""
    stream = device.stream
    source = np.arange(1000, dtype=np.uint32)
    a, b = device.alloc(1000, np.uint32), device.alloc(1000, np.uint32)
    result = device.empty_pinned(1000, np.uint32)
    with stream.capture() as capture:
        stream.upload(a, source)
        stream.copy(b, a)
        stream.download(result, b)
        stream.fill(a, 0)
    source[:] = 0
    return capture.graph, result


def test_graph_keeps_alive_what_it_touches(device):
    graph, result = captured_copies(device)
    gc.collect()
    junk = [device.upload(np.full(1000, 7, np.uint32)) for _ in range(20)]
    for _ in range(3):
        result[:] = 0
        graph.launch()
        device.synchronize()
        assert np.array_equal(result, np.arange(1000, dtype=np.uint32))
    del junk
    graph.upload()
    graph.close()
    graph.close()
    with pytest.raises(fp4rt.ClosedError):
        graph.launch()


def test_captured_work_is_not_done(device):
    buffer = device.upload(np.zeros(10, np.uint8))
    with device.stream.capture() as capture:
        device.stream.fill(buffer, 3)
    assert not buffer.to_numpy().any()
    capture.graph.launch()
    assert np.all(buffer.to_numpy() == 3)


def test_set_copy_replaces_both_ends(device):
    graph, result = captured_copies(device)
    a, b = device.alloc(1000, np.uint32), device.alloc(1000, np.uint32)
    other = device.empty_pinned(1000, np.uint32)
    source = np.arange(1000, dtype=np.uint32) * 3
    graph.set_copy(0, a, source)
    graph.set_copy(1, b, a)
    graph.set_copy(2, other, b)
    source[:] = 0
    result[:] = 5
    graph.launch()
    device.synchronize()
    assert np.array_equal(other, np.arange(1000, dtype=np.uint32) * 3)
    assert np.all(result == 5)


def test_bad_graph_updates_change_nothing(device):
    graph, result = captured_copies(device)
    a, short = device.alloc(1000, np.uint32), device.alloc(10, np.uint32)
    array = np.zeros(1000, np.uint32)
    for use, error in [
        (lambda: graph.set_copy(9, a, array), ValueError),
        (lambda: graph.set_copy(0, short, array), ValueError),
        (lambda: graph.set_copy(0, a, array[:3]), ValueError),
        (lambda: graph.set_copy(0, array, a), (TypeError, ValueError)),
        (lambda: graph.set_params(0, b""), ValueError),
    ]:
        with pytest.raises(error):
            use()
    graph.launch()
    device.synchronize()
    assert np.array_equal(result, np.arange(1000, dtype=np.uint32))


def test_debug_dot_is_a_graph(device):
    text = captured_copies(device)[0].debug_dot()
    assert text.startswith("digraph")
    assert text.rstrip().endswith("}")


def test_a_capture_that_raises_leaves_the_stream_usable(device):
    buffer = device.upload(np.zeros(10, np.uint8))
    with pytest.raises(KeyError), device.stream.capture():
        device.stream.fill(buffer, 3)
        raise KeyError
    device.stream.fill(buffer, 4)
    assert np.all(buffer.to_numpy() == 4)


def test_waiting_inside_a_capture_is_refused(device):
    buffer = device.upload(np.zeros(10, np.uint8))
    with device.stream.capture() as capture:
        device.stream.fill(buffer, 3)
        with pytest.raises(RuntimeError, match="capture"):
            buffer.to_numpy()
        with pytest.raises(RuntimeError, match="capture"):
            device.stream.download(np.zeros(10, np.uint8), buffer)
        with pytest.raises(RuntimeError, match="captur"):
            device.stream.synchronize()
        with pytest.raises(RuntimeError, match="already"), device.stream.capture():
            pass
    capture.graph.launch()
    assert np.all(buffer.to_numpy() == 3)


def test_a_graph_inside_a_capture_is_refused(device):
    graph, _ = captured_copies(device)
    stream = device.new_stream()
    with (
        stream.capture(),
        pytest.raises(RuntimeError, match="can't be launched inside a capture; call what it was"),
    ):
        graph.launch(stream)
    graph.launch(stream)
    stream.synchronize()


def test_a_closed_stream_is_no_stream_of_its_device(device):
    stream = device.new_stream()
    assert device.as_stream(stream) is stream
    stream.close()
    with pytest.raises(fp4rt.ClosedError, match="closed"):
        device.as_stream(stream)
