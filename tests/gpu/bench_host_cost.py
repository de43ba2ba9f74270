"""What fp4rt costs on the host beyond the bare driver call: run it as a script on a GPU machine.

    python tests/gpu/bench_host_cost.py

Prints the median and the range over many rounds, in which bare and fp4rt calls take turns; each
round is short enough that the stream's queue never fills.
"""

import ctypes
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import runtime_kernels as rk  # noqa: E402

import fp4rt  # noqa: E402
import fp4rt.cuda  # noqa: E402
from fp4rt.device import LaunchConfig  # noqa: E402

ROUNDS, CALLS = 200, 100


def interleaved(stream, calls):
    """Microseconds per call: name -> list over rounds."""
    taken = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken[name].append((time.perf_counter() - start) / CALLS * 1e6)
            stream.synchronize()
    return taken


def show(taken, baseline):
    base = statistics.median(taken[baseline])
    for name, times in taken.items():
        median = statistics.median(times)
        print(
            f"{name:38} {median:7.2f} us  ({min(times):.2f} - {max(times):.2f})"
            f"  {median / base:5.2f} x {baseline}"
        )


def import_seconds(statement):
    """Median seconds that a fresh interpreter spends on a statement."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(7)
    ]
    return statistics.median(float(run.stdout) for run in runs)


def main():
    numpy_, ours = import_seconds("import numpy"), import_seconds("import numpy, fp4rt")
    print(f"import numpy {numpy_:.3f} s; with fp4rt {ours:.3f} s: {ours - numpy_:.3f} s more")
    if not fp4rt.cuda.list_devices()[0].available:
        print("no GPU:", fp4rt.cuda.list_devices()[0].detail)
        return
    with fp4rt.device("cuda:0") as gpu:
        from cuda.bindings import driver

        stream, kernel = gpu.stream, rk.load_kernels(gpu).kernel("add")
        config = LaunchConfig((1, 1, 1), (128, 1, 1))
        buffer = gpu.upload(np.zeros(100, np.uint32))
        params = rk.record(rk.ADD, buffer.address, buffer.address, 100, 1)
        data = params.tobytes()
        with stream.capture() as capture:
            stream.launch(kernel, config, params)
        graph = capture.graph
        executable, handle, function = graph._executable, stream.handle, kernel.function.handle
        pointers = ctypes.c_char_p(data)
        where = ctypes.addressof(pointers)
        bare = {
            "bare cuGraphLaunch": lambda: driver.cuGraphLaunch(executable, handle),
            "graph.launch": graph.launch,
            "graph.launch on a stream": lambda: graph.launch(stream),
        }
        show(interleaved(stream, bare), "bare cuGraphLaunch")
        launches = {
            "bare cuLaunchKernel": lambda: driver.cuLaunchKernel(
                function, 1, 1, 1, 128, 1, 1, 0, handle, where, 0
            ),
            "stream.launch, bytes": lambda: stream.launch(kernel, config, data),
            "stream.launch, fresh bytes": lambda: stream.launch(
                kernel, config, bytes(bytearray(data))
            ),
            "stream.launch, record": lambda: stream.launch(kernel, config, params),
        }
        show(interleaved(stream, launches), "bare cuLaunchKernel")
        small = np.zeros(1024, np.float32)
        target = gpu.alloc(1024, np.float32)
        others = {
            "alloc and drop 1 MiB": lambda: gpu.alloc(1 << 20),
            "stream.upload 4 KiB": lambda: stream.upload(target, small),
            "to_numpy 4 KiB": target.to_numpy,
            "graph.set_params": lambda: graph.set_params(0, data),
            "stream.record": stream.record,
            "cuCtxGetCurrent": driver.cuCtxGetCurrent,
        }
        show(interleaved(stream, others), "cuCtxGetCurrent")


if __name__ == "__main__":
    main()
