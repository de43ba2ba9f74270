"""Plans, their cache and the numpy path at sizes and counts that only a GPU has time for."""

import gc
import itertools
import resource
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import exact_operand, oracle

import fp4rt

pytestmark = pytest.mark.gpu
N, K = 96, 128


def test_capture_with_even_sizes_replay_with_uneven_ones(gpu, rng):
    a, b = exact_operand(rng, (256, K)), exact_operand(rng, (4, N, K))
    with fp4rt.GroupedGemmPlan(gpu, b, max_m=256) as plan:
        plan.set_inputs(a, [64] * 4)
        graph = plan.capture()
        for sizes in ([64] * 4, [1, 0, 255, 0], [256, 0, 0, 0], [0, 0, 0, 256], [64] * 4):
            plan.set_inputs(a, sizes)
            plan.poison_output()
            graph.launch()
            assert np.array_equal(plan.output(), oracle(a, b, sizes))


def test_three_plans_take_a_thousand_turns_each(gpu, rng):
    """Both their graphs and their launches; inputs change all the time."""
    plans, graphs, cases = [], [], []
    for _ in range(3):
        b = exact_operand(rng, (2, N, K))
        plans.append(fp4rt.GroupedGemmPlan(gpu, b, max_m=8))
        graphs.append(plans[-1].capture())
        rows = [exact_operand(rng, (8, K)) for _ in range(2)]
        found = []
        for i, sizes in enumerate(([3, 5], [8, 0], [0, 8], [1, 7])):
            a = rows[i % 2]
            given = fp4rt.upload_rows(gpu, a) if i < 2 else a
            found.append((given, sizes, oracle(a, b, sizes)))
        cases.append(found)
    wrong = 0
    for turn in range(3000):
        plan, graph = plans[turn % 3], graphs[turn % 3]
        a, sizes, expected = cases[turn % 3][turn // 3 % 4]
        plan.set_inputs(a, sizes)
        (graph.launch if turn % 2 else plan.launch)()
        wrong += not np.array_equal(plan.output(), expected)
    assert wrong == 0
    for plan in plans:
        plan.close()


def test_replay_after_all_was_dropped_and_a_gib_of_junk(gpu, rng):
    a, b = exact_operand(rng, (64, K)), exact_operand(rng, (4, N, K))
    expected = oracle(a, b, [16] * 4)
    out = fp4rt.empty_pinned(gpu, (64, N), np.float16)
    weights, rows = fp4rt.upload_weights(gpu, b), fp4rt.upload_rows(gpu, a)
    plan = fp4rt.GroupedGemmPlan(gpu, weights, max_m=64)
    graph = plan.capture()
    plan.set_inputs(rows, [16] * 4)
    plan.rebind(out=gpu.alloc((64, N), np.float16))
    del weights, rows, a, b
    gc.collect()
    junk = []
    for _ in range(16):
        junk.append(gpu.alloc(64 << 20))
        gpu.stream.fill(junk[-1], 0xEE)
    for _ in range(3):
        graph.launch()
        assert np.array_equal(plan.output(out), expected)
    plan.close()


def test_thousands_of_shapes_leave_memory_flat(gpu, rng):
    b = exact_operand(rng, (2, 32, 64))
    a = exact_operand(rng, (3000, 64))

    def calls(start, stop):
        for m in range(start, stop):
            fp4rt.grouped_gemm(gpu, a[:m], b, [m // 2, m - m // 2])
        gc.collect()
        gpu.synchronize()
        return gpu.mem_info().used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    fp4rt.cache_info(gpu).clear()
    calls(1, 300)
    used, rss = calls(300, 1000)
    more, grown = calls(1000, 3000)
    info = fp4rt.cache_info(gpu)
    assert info.entries <= info.max_entries and info.evictions > 2000
    assert more < 3 * used + (16 << 20)  # 64 plans each time, of somewhat larger shapes
    assert grown - rss < 64 << 10  # KiB


@pytest.mark.slow
def test_a_hundred_thousand_shapes_leave_memory_flat(gpu, rng, request):
    """Every call has a key that none had before: weights of 40 shapes, three dtypes, 834 sizes."""
    if "slow" not in request.config.getoption("-m"):
        pytest.skip("takes two minutes; run it with -m slow")
    a = exact_operand(rng, (834, 64))
    dtypes = [np.float16, np.float32, ml_dtypes.bfloat16]
    operands = [exact_operand(rng, (2, 8 + 8 * i, 64)) for i in range(40)]
    weights = [fp4rt.upload_weights(gpu, b) for b in operands]

    def calls(heights):
        for m in heights:
            rows, sizes = a[:m], [m // 2, m - m // 2]
            for w, dtype in itertools.product(weights, dtypes):
                found = fp4rt.grouped_gemm(gpu, rows, w, sizes, out_dtype=dtype)
            if m % 64 == 1:
                expected = oracle(rows, operands[-1], sizes, out_dtype=dtypes[-1])
                assert np.array_equal(found, expected)
        gc.collect()
        gpu.synchronize()
        rss = Path("/proc/self/statm").read_text().split()[1]
        return gpu.mem_info().used, int(rss) * resource.getpagesize()

    fp4rt.cache_info(gpu).clear()
    misses = fp4rt.cache_info(gpu).misses
    calls(range(1, 35))
    used, rss = calls(range(35, 135))
    more, grown = calls(range(135, 835))
    info = fp4rt.cache_info(gpu)
    assert info.misses - misses == 834 * 40 * 3 == 100_080
    assert info.entries <= info.max_entries
    assert more < 8 * used + (16 << 20)  # 64 plans each time, of taller shapes
    assert grown - rss < 64 << 20


def test_threads_with_plans_of_their_own_and_one_shared(gpu, rng):
    b = exact_operand(rng, (2, N, K))
    cases = [(exact_operand(rng, (m, K)), [m // 2, m - m // 2]) for m in range(9, 17)]
    wrong, refused = [], []

    def work(i, shared):
        a, sizes = cases[i]
        expected = oracle(a, b, sizes)
        own = shared or fp4rt.GroupedGemmPlan(gpu, b, max_m=16)
        stream = gpu.new_stream() if shared is None and i % 2 else None
        for turn in range(100):
            if i == 3 and turn % 10 == 5:
                try:
                    own.run(a, [1, 1], stream=stream)
                except ValueError:
                    refused.append(i)
            if not np.array_equal(own.run(a, sizes, stream=stream), expected):
                wrong.append((i, turn))

    for plan in (fp4rt.GroupedGemmPlan(gpu, b, max_m=16), None):
        threads = [threading.Thread(target=work, args=(i, plan)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert refused == [3] * 20


def test_one_plan_of_the_cache_on_many_streams(gpu, rng):
    """A call on another stream waits for the work of the last one in the plan's memory."""
    a = [exact_operand(rng, (200, 512)) for _ in range(2)]
    b = exact_operand(rng, (2, 512, 512))
    weights = fp4rt.upload_weights(gpu, b)
    rows = [fp4rt.upload_rows(gpu, x) for x in a]
    expected = [oracle(x, b, [120, 80]) for x in a]
    streams = [gpu.new_stream() for _ in range(4)]
    for _ in range(10):
        results = [
            fp4rt.grouped_gemm(gpu, rows[i % 2], weights, [120, 80], stream=streams[i % 4])
            for i in range(16)
        ]
        for i, result in enumerate(results):
            assert np.array_equal(result.to_numpy(), expected[i % 2])


@pytest.mark.parametrize("pinned", [False, True])
def test_the_numpy_path_at_size(gpu, rng, pinned):
    """Chunks, staging and threads give the bits of one plain launch."""
    sizes, n, k = [300, 0, 70, 513, 1], 1000, 4112
    a, b = exact_operand(rng, (sum(sizes), k)), exact_operand(rng, (5, n, k))
    with fp4rt.GroupedGemmPlan(gpu, fp4rt.upload_weights(gpu, b), max_m=sum(sizes)) as plan:
        expected = plan.run(fp4rt.upload_rows(gpu, a), sizes, out=None)
    out = None
    if pinned:
        copies = []
        for part in (a.values, a.scales, b.values, b.scales):
            copies.append(fp4rt.empty_pinned(gpu, part.shape, np.uint8))
            copies[-1][...] = part.view(np.uint8)
        a = fp4rt.Nvfp4Array.from_parts(*copies[:2], 1.0)
        b = fp4rt.Nvfp4Array.from_parts(*copies[2:], 1.0)
        out = fp4rt.empty_pinned(gpu, (sum(sizes), n), np.float16)
    for _ in range(3):
        found = fp4rt.grouped_gemm(gpu, a, b, sizes, out=out)
        assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))
        found[:] = np.nan
    listed = fp4rt.grouped_gemm(gpu, a, list(b), sizes)
    assert np.array_equal(listed.view(np.uint16), expected.view(np.uint16))


def test_packing_weights_on_the_gpu_is_packing_them_in_numpy(gpu, rng):
    from fp4rt.weights import packed_parts

    b = [exact_operand(rng, shape) for shape in ((130, 80), (1, 16), (256, 1024), (5, 4112))]
    weights = fp4rt.upload_weights(gpu, b)
    expected = [packed_parts(gpu, w, w.k)[0].reshape(-1) for w in b]
    assert np.array_equal(weights.blocks.to_numpy(), np.concatenate(expected))


def test_a_large_pipeline(gpu, rng):
    a, b = exact_operand(rng, (600, 1024)), exact_operand(rng, (3, 2048, 1024))
    sizes = [[200] * 3, [0, 600, 0], [1, 2, 597]]
    expected = [oracle(a, b, s) for s in sizes]
    with fp4rt.GroupedGemmPlan(gpu, b, max_m=600) as plan:
        outs = [fp4rt.empty_pinned(gpu, (600, 2048), np.float16) for _ in range(4)]
        for out in (None, outs):
            batches = ((a, sizes[i % 3]) for i in range(30))
            for i, result in enumerate(plan.map(batches, out=out)):
                assert np.array_equal(result, expected[i % 3])


SCRIPTS = {
    "cached plans at exit": "fp4rt.grouped_gemm(gpu, a, w, [3, 5])",
    "a pipeline left at exit": "p = fp4rt.GroupedGemmPlan(gpu, w, max_m=8); "
    "it = p.map([(a, [3, 5])] * 9); next(it)",
    "a fork": """
import os
p = fp4rt.GroupedGemmPlan(gpu, w, max_m=8)
p.run(a, [3, 5])
child = os.fork()
if child == 0:
    for call in (p.launch, lambda: p.set_inputs(a, [3, 5]), p.output, p.capture,
                 lambda: fp4rt.grouped_gemm(gpu, a, w, [3, 5])):
        try:
            call()
        except fp4rt.ClosedError:
            continue
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
p.run(a, [3, 5])
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_processes_end_quietly(name):
    code = (
        "import numpy as np, fp4rt\n"
        "a = fp4rt.quantize(np.ones((8, 64), np.float32))\n"
        "w = fp4rt.quantize(np.ones((2, 32, 64), np.float32))\n"
        "gpu = fp4rt.device('cuda:0')\n" + SCRIPTS[name]
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
