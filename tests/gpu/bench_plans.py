"""What plans, the plan cache and the numpy path cost on a GPU machine: run it as a script.

    python tests/gpu/bench_plans.py [--quick]

Results are checked first. Every figure is a median of one run, with its baseline and the target
beside it. Host times come from short rounds in which the calls take turns, so that the stream's
queue never fills; whole calls are timed from the call to its return.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import fp4rt  # noqa: E402
from fp4rt.model import SHAPE_SETS  # noqa: E402
from fp4rt.nvfp4 import decode  # noqa: E402

FIRST_CALL = """
import time
import numpy as np
import fp4rt
values = np.full((64, 128), 0x11, np.uint8)
scales = np.full((64, 16), 0x38, np.uint8)
a = fp4rt.Nvfp4Array.from_parts(values, scales, 1.0)
b = fp4rt.Nvfp4Array.from_parts(values.reshape(2, 32, 128), scales.reshape(2, 32, 16), 1.0)
start = time.perf_counter()
gpu = fp4rt.device("cuda:0")
opened = time.perf_counter()
y = fp4rt.grouped_gemm(gpu, a, b, [30, 34])
done = time.perf_counter()
assert (y == 64).all()
print(opened - start, done - opened)
"""


def line(name, value, unit, note=""):
    print(f"{name:58} {value:9.2f} {unit:5} {note}", flush=True)


def turns(gpu, calls, rounds=60, repeat=50):
    """Median microseconds of host time for each call, in turns."""
    taken = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            taken[name].append((time.perf_counter() - start) / repeat * 1e6)
            gpu.synchronize()
    return {name: statistics.median(times) for name, times in taken.items()}


def whole(call, count):
    """Median seconds of a call that returns when all is done."""
    call()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def operand(rng, shape, pinned=None):
    """A random operand, in pinned memory of a device if one is given."""
    *rows, k = shape
    values = rng.integers(0, 256, (*rows, k // 2), dtype=np.uint8)
    scales = rng.choice(np.array([0x28, 0x30, 0x38], np.uint8), (*rows, k // 16))
    if pinned is not None:
        ordinary = values, scales
        values, scales = (fp4rt.empty_pinned(pinned, part.shape) for part in ordinary)
        values[...], scales[...] = ordinary
    return fp4rt.Nvfp4Array.from_parts(values, scales, 2.0**-6)


def check(result, a, b, sizes, count=64):
    """Raise unless sampled elements of a result are right to within fp16's rounding."""
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rows = rng.integers(0, len(groups), count)
    columns = rng.integers(0, b.shape[1], count)
    left = decode(a.values[rows], a.scales[rows]).astype(np.float64)
    right = decode(b.values[groups[rows], columns], b.scales[groups[rows], columns])
    expected = (left * right).sum(axis=1) * float(a.global_scale) * float(b.global_scale)
    bound = np.abs(left * right).sum(axis=1) * 2.0**-12 * 1e-2 + np.abs(expected) * 2.0**-10
    assert np.abs(expected).max() > 0
    assert (np.abs(result[rows, columns] - expected) <= bound).all(), "wrong result"


def host_times(gpu):
    """Launches, inputs and calls with operands on the device."""
    from cuda.bindings import driver

    rng = np.random.default_rng(0)
    b, a = operand(rng, (8, 256, 256)), operand(rng, (64, 256))
    weights = fp4rt.upload_weights(gpu, b)
    rows = [fp4rt.upload_rows(gpu, a) for _ in range(2)]
    sizes = [[8] * 8, [1, 15, 0, 16, 8, 8, 8, 8]]
    plan = fp4rt.GroupedGemmPlan(gpu, weights, max_m=64)
    for i in (0, 1):
        expected = fp4rt.grouped_gemm(gpu, a, b, sizes[i])
        check(expected, a, b, sizes[i])
        for _ in range(4):
            assert (plan.run(rows[i], sizes[i]) == expected).all()
            found = fp4rt.grouped_gemm(gpu, rows[i], weights, sizes[i])
            assert (found.to_numpy() == expected).all()
    graph = plan.capture()
    plan.set_inputs(rows[0], sizes[0])
    handle, executable = gpu.stream.handle, graph._executable
    out = gpu.alloc((64, 256), np.float16)
    step = [0]

    def same_rows():
        step[0] += 1
        plan.set_inputs(rows[0], sizes[step[0] % 2])
        plan.launch()

    def other_plan_rows():
        step[0] += 1
        second.set_inputs(rows[step[0] % 2], sizes[step[0] % 2])
        second.launch()

    def one_call(**options):
        step[0] += 1
        fp4rt.grouped_gemm(gpu, rows[0], weights, sizes[step[0] % 2], **options)

    held = []

    def one_call_held():
        step[0] += 1
        held[:] = [fp4rt.grouped_gemm(gpu, rows[0], weights, sizes[step[0] % 2])]

    second = fp4rt.GroupedGemmPlan(gpu, weights, max_m=64)
    for _ in range(4):
        other_plan_rows()
    found = turns(
        gpu,
        {
            "bare cuGraphLaunch": lambda: driver.cuGraphLaunch(executable, handle),
            "graph.launch()": graph.launch,
            "plan.launch()": plan.launch,
            "set_inputs(same device rows, new sizes) + launch": same_rows,
            "set_inputs(other device rows, new sizes) + launch": other_plan_rows,
            "grouped_gemm(device operands, out=buffer)": lambda: one_call(out=out),
            "grouped_gemm(device operands)": one_call,
            "grouped_gemm(device operands), last result held": one_call_held,
            "set_inputs(host rows) + launch": lambda: (
                second.set_inputs(a, sizes[0]),
                second.launch(),
            ),
            "alloc and drop": lambda: gpu.alloc(32768),
        },
    )
    bare = found["bare cuGraphLaunch"]
    targets = {
        "graph.launch()": f"{found['graph.launch()'] / bare:.2f} x bare, target 2",
        "plan.launch()": f"{found['plan.launch()'] / bare:.2f} x bare, target 2",
        "set_inputs(same device rows, new sizes) + launch": "target 12",
        "set_inputs(other device rows, new sizes) + launch": "target 12",
        "grouped_gemm(device operands, out=buffer)": "target 25",
        "grouped_gemm(device operands)": "target 25",
        "grouped_gemm(device operands), last result held": "target 25",
    }
    for name, value in found.items():
        line(name, value, "us", targets.get(name, ""))
    plan.close()
    second.close()


def first_call():
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, check=True
        )
        runs.append([float(word) for word in done.stdout.split()])
    opened, called = (statistics.median(column) * 1e3 for column in zip(*runs, strict=True))
    line("first grouped_gemm after import", called, "ms", f"opening the GPU: {opened:.0f} ms more")
    line("  together", opened + called, "ms", "target 400")


def rates(gpu, nbytes=128 << 20):
    """Bytes per second of pinned copies, and of plain copies of ordinary memory."""
    from cuda.bindings import driver

    buffer = gpu.alloc(nbytes)
    pinned, ordinary = fp4rt.empty_pinned(gpu, nbytes), np.ones(nbytes, np.uint8)

    def up():
        gpu.stream.upload(buffer, pinned)
        gpu.stream.synchronize()

    def down():
        gpu.stream.download(pinned, buffer)
        gpu.stream.synchronize()

    def plain_up():
        (code,) = driver.cuMemcpyHtoD(buffer.address, ordinary.ctypes.data, nbytes)
        assert not code, code

    with gpu.context.current():
        found = {
            "up": nbytes / whole(up, 5),
            "down": nbytes / whole(down, 5),
            "plain up": nbytes / whole(plain_up, 3),
        }
    for name, value in found.items():
        line(f"copy rate, {name}", value / 1e9, "GB/s")
    return found


def copy_seconds(gpu, given, taken, count=10):
    """Seconds to copy arrays to the GPU and others back, both ways at once, and nothing else."""
    up, down = gpu.new_stream(), gpu.new_stream()
    pairs = [(gpu.alloc(x.shape, x.dtype), x) for x in given]
    back = [(x, gpu.alloc(x.shape, x.dtype)) for x in taken]
    for buffer, array in pairs:
        up.upload(buffer, array)
    up.synchronize()

    def copies():
        for _ in range(count):
            for buffer, array in pairs:
                up.upload(buffer, array)
            for array, buffer in back:
                down.download(array, buffer)
        up.synchronize()
        down.synchronize()

    return whole(copies, 3) / count


def kernel_seconds(gpu, plan, count=30):
    graph = plan.capture()
    graph.launch()
    start = gpu.stream.record(timed=True)
    for _ in range(count):
        graph.launch()
    end = gpu.stream.record(timed=True)
    end.synchronize()
    return end.elapsed_since(start) / count


def numpy_path(gpu, name, rate, count, batches):
    """One call from numpy to numpy, and a pipeline with resident weights."""
    sizes, n, k = SHAPE_SETS[name]
    sizes, m = list(sizes), sum(sizes)
    rng = np.random.default_rng(0)
    a, b = operand(rng, (m, k), gpu), operand(rng, (len(sizes), n, k), gpu)
    out = fp4rt.empty_pinned(gpu, (m, n), np.float16)
    up, down = a.nbytes + b.nbytes, out.nbytes
    weights = fp4rt.upload_weights(gpu, b)
    with fp4rt.GroupedGemmPlan(gpu, weights, max_m=m) as plan:
        expected = plan.run(a, sizes)
        check(expected, a, b, sizes)
        kernel = kernel_seconds(gpu, plan)
        line(f"{name}: kernels", kernel * 1e6, "us")
        out[:] = np.nan
        fp4rt.grouped_gemm(gpu, a, b, sizes, out=out)
        assert (out == expected).all()
        taken = whole(lambda: fp4rt.grouped_gemm(gpu, a, b, sizes, out=out), count)
        parts = [x for q in (a, b) for x in (q.values, q.scales)]
        both = copy_seconds(gpu, parts, [out])
        bound = max(up / rate["up"], down / rate["down"], kernel)
        note = (
            f"{taken / bound:.2f} x {bound * 1e3:.2f} ms (one way), "
            f"{taken / max(both, kernel):.2f} x {both * 1e3:.2f} ms (copies both ways), target 1.3"
        )
        line(f"{name}: one call, pinned, cold weights", taken * 1e3, "ms", note)

        ordinary = [
            fp4rt.Nvfp4Array.from_parts(x.values.copy(), x.scales.copy(), x.global_scale)
            for x in (a, b)
        ]
        assert (fp4rt.grouped_gemm(gpu, *ordinary, sizes) == expected).all()
        fresh = whole(lambda: fp4rt.grouped_gemm(gpu, *ordinary, sizes), count)
        target = np.empty((m, n), np.float16)
        target[:] = 0
        kept = whole(lambda: fp4rt.grouped_gemm(gpu, *ordinary, sizes, out=target), count)
        assert (target == expected).all()
        plain = (up + down) / rate["plain up"]
        for what, seconds in (("fresh result", fresh), ("out=", kept)):
            note = f"{plain / seconds:.2f} x the plain copy rate, target 3"
            line(f"{name}: one call, ordinary arrays, {what}", seconds * 1e3, "ms", note)
        resident = whole(lambda: fp4rt.grouped_gemm(gpu, a, weights, sizes, out=out), count)
        line(f"{name}: one call, pinned, resident weights", resident * 1e3, "ms")
        outs = [fp4rt.empty_pinned(gpu, (m, n), np.float16) for _ in range(5)]
        for what, given in (("pinned", outs), ("fresh results", None)):
            for result in plan.map([(a, sizes)] * 6, in_flight=4, out=given):
                assert (result == expected).all()

            def pipeline(given=given):
                for _ in plan.map([(a, sizes)] * batches, in_flight=4, out=given):
                    pass

            seconds = whole(pipeline, 3) / batches
            both = copy_seconds(gpu, [a.values, a.scales], [out], 64)
            bound = max(a.nbytes / rate["up"], down / rate["down"], kernel)
            note = (
                f"{seconds / bound:.2f} x {bound * 1e6:.0f} us (one way), "
                f"{seconds / max(both, kernel):.2f} x {both * 1e6:.0f} us (copies both ways), "
                "target 1.15 (pinned)"
            )
            line(f"{name}: map, {what}, a batch", seconds * 1e6, "us", note)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--sets", default="S1,P1")
    options = parser.parse_args()
    count, batches = (5, 24) if options.quick else (15, 64)
    if not any(i.available and i.name.startswith("cuda") for i in fp4rt.devices()):
        print("no GPU")
        return
    first_call()
    with fp4rt.device("cuda:0") as gpu:
        print(gpu)
        host_times(gpu)
        rate = rates(gpu)
        for name in options.sets.split(","):
            numpy_path(gpu, name, rate, count, batches)
        print(fp4rt.cache_info())


if __name__ == "__main__":
    main()
