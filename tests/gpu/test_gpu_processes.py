"""Whole processes: exit, fork, spawn, Ctrl-C and errors that end a context."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest
import runtime_kernels as rk

pytestmark = pytest.mark.gpu

HEADER = """
import sys, warnings
warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
sys.path.insert(0, "tests")
import numpy as np, runtime_kernels as rk, fp4rt
from fp4rt.device import LaunchConfig
ONE = LaunchConfig((1, 1, 1), (128, 1, 1))
"""
LIVE = """
gpu = fp4rt.device("cuda:0")
kernels = rk.load_kernels(gpu)
add = kernels.kernel("add")
buffer = gpu.upload(np.zeros(100, np.uint32))
pinned = gpu.empty_pinned(100, np.uint32)
stream, event = gpu.new_stream(), gpu.stream.record()
with stream.capture() as capture:
    stream.launch(add, ONE, rk.record(rk.ADD, buffer.address, buffer.address, 100, 1))
graph = capture.graph
graph.launch()
"""


def start(body, **options):
    code = HEADER + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=rk.ROOT,
        **options,
    )


def run(body, timeout=60):
    process = start(body)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("del gpu", 0),
        ("del gpu, kernels, add, stream; graph.launch()", 0),
        ("gpu.close()", 0),
        ("sys.modules['keep'] = (buffer, graph, gpu); del buffer, graph", 0),
        ("cycle = [gpu, buffer]; cycle.append(cycle); gpu.cycle = cycle", 0),
        (
            "import threading, time\n"
            "def work():\n"
            "    while True: gpu.upload(np.zeros(10)).to_numpy()\n"
            "threading.Thread(target=work, daemon=True).start(); time.sleep(0.2)",
            0,
        ),
    ],
    ids=["live", "exit", "device-first", "owner-first", "closed", "modules", "cycle", "daemon"],
)
def test_exit_is_silent(ending, code):
    assert run(LIVE + ending) == (code, "", "")


def test_unhandled_exception_shows_only_itself():
    code, out, err = run(LIVE + "raise KeyError('mine')")
    assert (code, out) == (1, "")
    assert err.rstrip().endswith("KeyError: 'mine'")
    assert err.count("Traceback") == 1


def test_fork_after_use_is_refused_in_the_child():
    code, out, err = run(
        LIVE
        + """
import os
sys.stdout.flush()
child = os.fork()
if child == 0:
    uses = [
        lambda: fp4rt.device("cuda:0"), buffer.to_numpy, graph.launch, gpu.synchronize,
        lambda: gpu.alloc(10), lambda: stream.launch(add, ONE, b"\\0" * add.params_bytes),
        lambda: stream.fill(buffer, 0), lambda: gpu.load(b""), event.done,
    ]
    for use in uses:
        try:
            use()
        except fp4rt.ClosedError as error:
            assert "spawn" in str(error)
        else:
            sys.exit(5)
    assert not fp4rt.cuda.list_devices()[0].available
    buffer.close()
    graph.close()
    stream.close()
    gpu.close()
    del buffer, graph, stream, pinned, event, gpu
    sys.exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), buffer.to_numpy().sum())
"""
    )
    assert (code, out, err) == (0, "0 100\n", "")


def test_fork_before_use_and_spawn_work():
    code, out, err = run(
        """
import os, multiprocessing
child = os.fork()
if child == 0:
    with fp4rt.device("cuda:0") as gpu:
        sys.exit(int(gpu.upload(np.arange(5)).to_numpy().sum()))
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 10
gpu = fp4rt.device("cuda:0")
with multiprocessing.get_context("spawn").Pool(2) as pool:
    print(pool.map(rk.sum_on_gpu, [5, 6]))
""",
        timeout=120,
    )
    assert (code, out, err) == (0, "[10, 15]\n", "")


def test_illegal_address_is_reported_once_and_plainly():
    code, out, err = run(
        LIVE
        + """
poke = kernels.kernel("poke")
stream.launch(poke, ONE, rk.record(rk.POKE, 0x10, 0, 1))
for use in (stream.synchronize, lambda: gpu.upload(np.zeros(3)), buffer.to_numpy):
    try:
        use()
    except fp4rt.DriverError as error:
        print(error.code, "restart the process" in str(error), "cu" in str(error))
del graph, pinned
gpu.close()
print("closed")
"""
    )
    assert code == 0, err
    assert out == "CUDA_ERROR_ILLEGAL_ADDRESS True True\n" * 3 + "closed\n"
    assert err == ""


def test_box_that_starts_between_16_bytes_is_an_illegal_instruction():
    """A rule of the hardware that no manual has, and that the emulator applies too."""
    code, out, err = run(
        """
sys.path.insert(0, "tests/device")
import test_tensor_maps
with fp4rt.device("cuda:0") as gpu:
    boxes = test_tensor_maps.Boxes(gpu, np.zeros((8, 128), np.uint8))
    boxes.check((16, 0), (64, 4), "none")
    try:
        boxes.check((8, 0), (64, 4), "none")
    except fp4rt.DriverError as error:
        print(error.code)
"""
    )
    assert (code, out, err) == (0, "CUDA_ERROR_ILLEGAL_INSTRUCTION\n", "")


@pytest.mark.parametrize("wait", ["stream.synchronize()", "buffer.to_numpy()", "gpu.synchronize()"])
def test_ctrl_c_ends_a_wait_and_frees_memory(wait):
    process = start(
        """
with fp4rt.device("cuda:0") as watcher:
    with fp4rt.device("cuda:0") as warm:
        pass
    before = watcher.mem_info().free
    try:
        with fp4rt.device("cuda:0") as gpu:
            spin, stream = rk.load_kernels(gpu).kernel("spin"), gpu.new_stream()
            buffer = gpu.alloc(1 << 20, np.uint32)
            big = gpu.alloc(1 << 30)
            stream.launch(spin, ONE, rk.record(rk.SPIN, 1_500_000_000, buffer.address, 1, 5))
            print("waiting", flush=True)
            WAIT
    except KeyboardInterrupt:
        import time
        print("interrupted", flush=True)
    after = watcher.mem_info().free
    print("freed" if before - after < 64 << 20 else (before, after))
""".replace("WAIT", wait)
    )
    try:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "interrupted\nfreed\n", "")


def test_wait_is_interrupted_long_before_the_kernel_ends():
    code, out, err = run(
        """
import signal, time
with fp4rt.device("cuda:0") as gpu:
    spin = rk.load_kernels(gpu).kernel("spin")
    buffer = gpu.alloc(4, np.uint32)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    gpu.stream.launch(spin, ONE, rk.record(rk.SPIN, 1_500_000_000, buffer.address, 4, 5))
    event = gpu.stream.record()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        gpu.synchronize()
    except KeyboardInterrupt:
        print("still running" if not event.done() else "too late")
    print(buffer.to_numpy())
"""
    )
    assert (code, out, err) == (0, "still running\n[5 5 5 5]\n", "")
