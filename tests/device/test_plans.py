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
    if device.image_kind is None:  # what a closed plan computed could not be read anyway
        with pytest.raises(fp4rt.ClosedError, match="the plan of this graph is closed"):
            graph.launch()
    else:
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
