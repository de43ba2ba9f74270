"""Plans in a program's hands: threads, odd capacities, things closed in any order."""

import numpy as np
import pytest
from helpers import exact_operand, oracle, side_by_side

import fp4rt
from fp4rt.kernels import KernelPlan
from fp4rt.problem import Problem


@pytest.mark.parametrize("max_m", [6, 140])
def test_the_first_inputs_may_be_fewer_rows_than_the_plan_takes(device, rng, max_m):
    """No row beyond those given was ever written."""
    a, b = exact_operand(rng, (1, 48)), exact_operand(rng, (3, 8, 48))
    with fp4rt.GroupedGemmPlan(device, b, max_m=max_m) as plan:
        plan.set_inputs(a, [0, 1, 0])
        plan.launch()
        np.testing.assert_array_equal(plan.output(), oracle(a, b, [0, 1, 0]))


def test_threads_share_a_device(device, rng):
    b = exact_operand(rng, (3, 8, 48))
    cases = [(exact_operand(rng, (6, 48)), sizes) for sizes in ([1, 2, 3], [6, 0, 0], [0, 5, 1])]

    def work(a, sizes):
        with fp4rt.GroupedGemmPlan(device, b, max_m=6) as plan:
            plan.set_inputs(a, sizes)
            graph = plan.capture(device.new_stream())
            for run in (plan.launch, graph.launch):
                run()
                np.testing.assert_array_equal(plan.output(), oracle(a, b, sizes))

    side_by_side(work, cases)


def test_a_graph_holds_the_buffers_of_a_closed_plan(device, rng):
    a, b = exact_operand(rng, (6, 48)), exact_operand(rng, (3, 8, 48))
    before = device.mem_info().used
    plan = fp4rt.GroupedGemmPlan(device, b, max_m=6)
    plan.set_inputs(a, [1, 2, 3])
    graph = plan.capture()
    held = device.mem_info().used
    plan.close()
    device.trim()
    assert device.mem_info().used == held
    graph.launch()
    device.synchronize()
    graph.close()
    if device.image_kind != "cubin":
        assert device.mem_info().used == before


def test_more_rows_than_a_kernel_counts(device, rng):
    b = exact_operand(rng, (3, 8, 48))
    if device.image_kind is None:
        pytest.skip("the cpu counts rows in 64 bits")
    with pytest.raises(ValueError, match=r"max_m is 2147483648.*use at most 2147483647"):
        fp4rt.GroupedGemmPlan(device, b, max_m=2**31)


@pytest.mark.parametrize(("name", "shape"), [("N", (2**31, 48)), ("K", (8, 2**31))])
def test_weights_larger_than_a_kernel_counts(device, name, shape):
    if device.image_kind is None:
        pytest.skip("the cpu counts in 64 bits")
    problem = Problem(((8, 48), shape), 8, "nvfp4", "float16")
    with pytest.raises(ValueError, match=rf"{name} is 2147483648.*use at most 2147483647"):
        KernelPlan(device, None, problem)  # refused before the weights are looked at


def test_more_memory_than_there_is(device):
    used = device.mem_info().used
    with pytest.raises(fp4rt.OutOfMemoryError, match=r"1,125,899,906,842,624 bytes"):
        device.alloc(2**50)
    assert device.mem_info().used == used


def test_a_stream_of_another_open_device(device, rng):
    a, b = exact_operand(rng, (2, 32)), exact_operand(rng, (1, 8, 32))
    with (
        fp4rt.device(device.name) as other,
        pytest.raises(ValueError, match=f"{device.name}, opened apart from this {device.name}"),
    ):
        fp4rt.grouped_gemm(device, a, b, [2], stream=other.new_stream())


def test_replay_with_other_sizes_than_captured(device, rng):
    b = exact_operand(rng, (4, 8, 48))
    a, fewer = exact_operand(rng, (32, 48)), exact_operand(rng, (16, 48))
    with fp4rt.GroupedGemmPlan(device, b, max_m=32) as plan:
        plan.set_inputs(a, [8] * 4)
        graph = plan.capture()
        for rows, sizes in ((a, [8] * 4), (fewer, [1, 0, 15, 0])):
            plan.set_inputs(rows, sizes)
            plan.poison_output()
            graph.launch()
            np.testing.assert_array_equal(plan.output(), oracle(rows, b, sizes))


def test_plans_of_one_shape_take_turns(device, rng):
    """Each owns its parameters: an older graph never replays with another plan's."""
    turns = 4 if device.image_kind == "ptx" else 3000
    plans, graphs, cases = [], [], []
    for _ in range(3):
        a, b = exact_operand(rng, (3, 32)), exact_operand(rng, (2, 8, 32))
        plan = fp4rt.GroupedGemmPlan(device, b, max_m=3)
        plan.set_inputs(a, [1, 2])
        plans.append(plan)
        graphs.append(plan.capture())
        cases.append(oracle(a, b, [1, 2]))
    for i in range(turns):
        graphs[i % 3].launch()
        assert np.array_equal(plans[i % 3].output(), cases[i % 3])
    for plan in plans:
        plan.close()


def test_threads_share_a_plan(device, rng):
    """`run` is one step: no thread sees another's inputs. An error leaves the others working."""
    b = exact_operand(rng, (2, 8, 32))
    first = 6 if device.image_kind == "ptx" else 1
    cases = [(exact_operand(rng, (m, 32)), [m - 1, 1]) for m in range(first, 9)]
    refused = []

    def work(a, sizes):
        try:
            for _ in range(1 if device.image_kind == "ptx" else 20):
                np.testing.assert_array_equal(plan.run(a, sizes), oracle(a, b, sizes))
        except ValueError as error:
            refused.append(str(error))

    with fp4rt.GroupedGemmPlan(device, b, max_m=7) as plan:  # one case is too large
        side_by_side(work, cases)
    assert [text[:30] for text in refused] == ["8 rows exceed the plan's max_m"]


def test_refused_inputs_leave_the_last_ones_in_force(device, rng):
    a, b = exact_operand(rng, (3, 32)), exact_operand(rng, (2, 8, 32))
    with fp4rt.GroupedGemmPlan(device, b, max_m=3) as plan:
        expected = plan.run(a, [1, 2])
        for rows, sizes, match in (
            (exact_operand(rng, (4, 32)), [2, 2], "4 rows exceed the plan's max_m = 3"),
            (a, [1, 1], "add up to 2"),
            (exact_operand(rng, (3, 48)), [1, 2], "a has K = 48"),
        ):
            with pytest.raises(ValueError, match=match):
                plan.set_inputs(rows, sizes)
        np.testing.assert_array_equal(plan.output(), expected)
    for call in (plan.launch, plan.output, plan.capture, lambda: plan.set_inputs(a, [1, 2])):
        with pytest.raises(fp4rt.ClosedError, match="the plan is closed"):
            call()


@pytest.mark.parametrize("wrong", ["out", "stream", "overlap", "capturing"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_a_refused_run_changes_nothing(device, rng, wrong, where):
    """Neither the inputs nor the result that is there."""
    a, b = exact_operand(rng, (3, 32)), exact_operand(rng, (2, 8, 32))
    other, stream = exact_operand(rng, (2, 32)), device.new_stream()
    rows = other if where == "host" else fp4rt.upload_rows(device, other)
    error, options = ValueError, {"out": np.zeros((3, 8), np.float16)}
    if wrong == "stream":
        stream.close()
        error, options = fp4rt.ClosedError, {"stream": stream}
    elif wrong == "capturing":
        error, options = RuntimeError, {"stream": stream}
    elif wrong == "overlap":
        if where == "host":
            options = {"out": other.values.reshape(-1).view(np.float16)[:16].reshape(2, 8)}
        else:
            options = {"out": rows.values.sub(0, (2, 8), np.float16)}
    with fp4rt.GroupedGemmPlan(device, b, max_m=3) as plan:
        expected = plan.run(a, [1, 2])
        if wrong == "capturing":
            with stream.capture(), pytest.raises(error, match="inside a capture: it returns"):
                plan.run(rows, [1, 1], **options)
        else:
            with pytest.raises(error):
                plan.run(rows, [1, 1], **options)
        np.testing.assert_array_equal(plan.output(), expected)
        plan.launch()
        np.testing.assert_array_equal(plan.output(), expected)


def test_one_call_with_host_operands_inside_a_capture(device, rng):
    a, b = exact_operand(rng, (3, 32)), exact_operand(rng, (2, 8, 32))
    stream = device.new_stream()
    with stream.capture(), pytest.raises(RuntimeError, match="inside a capture: it returns"):
        fp4rt.grouped_gemm(device, a, b, [1, 2], stream=stream)
    np.testing.assert_array_equal(
        fp4rt.grouped_gemm(device, a, b, [1, 2], stream=stream), oracle(a, b, [1, 2])
    )


@pytest.mark.parametrize("given", [True, False])
def test_one_call_with_device_operands_inside_a_capture(device, rng, given):
    a, b = exact_operand(rng, (3, 32)), exact_operand(rng, (2, 8, 32))
    rows, weights = fp4rt.upload_rows(device, a), fp4rt.upload_weights(device, b)
    out = device.alloc((3, 8), np.float16) if given else None
    fp4rt.grouped_gemm(device, rows, weights, [1, 2])  # the kernels are loaded
    stream = device.new_stream()
    with stream.capture() as capture:
        result = fp4rt.grouped_gemm(device, rows, weights, [1, 2], out=out, stream=stream)
    for _ in range(2):
        device.stream.fill(result, 0xFF)
        capture.graph.launch()
        np.testing.assert_array_equal(result.to_numpy(), oracle(a, b, [1, 2]))


@pytest.mark.parametrize("closed", ["weights", "out"])
def test_a_run_with_something_closed_changes_nothing(device, rng, closed):
    a, b = exact_operand(rng, (3, 32)), exact_operand(rng, (2, 8, 32))
    if closed == "out" and device.image_kind is None:
        pytest.skip("no result is bound there")
    weights = fp4rt.upload_weights(device, b)
    with fp4rt.GroupedGemmPlan(device, weights, max_m=3) as plan:
        plan.set_inputs(a, [1, 2])
        if closed == "out":
            out = device.alloc((3, 8), np.float16)
            plan.rebind(out=out)
        graph = plan.capture()
        (weights if closed == "weights" else out).close()
        with pytest.raises(fp4rt.ClosedError):
            plan.run(exact_operand(rng, (3, 32)), [3, 0])
        if closed == "out":
            plan.rebind(out=device.alloc((3, 8), np.float16))
        graph.launch()
        np.testing.assert_array_equal(plan.output(), oracle(a, b, [1, 2]))


def test_inputs_given_inside_a_capture_are_part_of_the_graph(device, rng):
    a, b = exact_operand(rng, (3, 32)), exact_operand(rng, (2, 8, 32))
    other = exact_operand(rng, (3, 32))
    with fp4rt.GroupedGemmPlan(device, b, max_m=3) as plan:
        plan.set_inputs(other, [2, 1])
        stream = device.new_stream()
        with stream.capture() as capture:
            plan.set_inputs(a, [1, 2], stream=stream)
            plan.launch(stream)
        plan.launch()  # with what is there: the graph was not launched
        np.testing.assert_array_equal(plan.output(), oracle(other, b, [2, 1]))
        for _ in range(2):
            capture.graph.launch()
            np.testing.assert_array_equal(plan.output(), oracle(a, b, [1, 2]))


def test_a_closed_plan_says_so(device, rng):
    plan = fp4rt.GroupedGemmPlan(device, exact_operand(rng, (2, 8, 32)), max_m=3)
    assert plan.nbytes > 0 and f"{plan.nbytes} bytes>" in repr(plan)
    plan.close()
    assert plan.nbytes == 0
    assert repr(plan).endswith(", closed>") and "closed" in plan._repr_html_()
