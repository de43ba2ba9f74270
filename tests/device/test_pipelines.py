"""plan.map: results in order, several batches in flight, whatever goes wrong."""

import numpy as np
import pytest
from helpers import exact_operand, oracle

import fp4rt

SIZES = [[1, 2, 4], [0, 7, 0], [3, 0, 4], [7, 0, 0]]


@pytest.fixture
def a(rng):
    return exact_operand(rng, (7, 48))


@pytest.fixture
def b(rng):
    return exact_operand(rng, (3, 8, 48))


@pytest.fixture
def plan(device, b):
    with fp4rt.GroupedGemmPlan(device, b, max_m=7) as made:
        yield made


def test_results_come_in_order(plan, rng, a, b):
    batches = [(exact_operand(rng, (7, 48)), sizes) for sizes in SIZES]
    plan.run(a, SIZES[0])
    results = list(plan.map(batches, in_flight=2))
    for (rows, sizes), result in zip(batches, results, strict=True):
        np.testing.assert_array_equal(result, oracle(rows, b, sizes))
    np.testing.assert_array_equal(plan.output(), oracle(a, b, SIZES[0]))  # the plan's own


def test_pinned_memory_is_used_in_turn(plan, device, a, b):
    rows = fp4rt.Nvfp4Array.from_parts(
        *(pinned_copy(device, part) for part in (a.values, a.scales.view(np.uint8))), 1.0
    )
    outs = [fp4rt.empty_pinned(device, (7, 8), np.float16) for _ in range(3)]
    for i, result in enumerate(plan.map([(rows, s) for s in SIZES], in_flight=2, out=outs)):
        assert result is outs[i % 3]
        np.testing.assert_array_equal(result, oracle(a, b, SIZES[i]))


def pinned_copy(device, array):
    copy = fp4rt.empty_pinned(device, array.shape, array.dtype)
    copy[...] = array
    return copy


def test_lists_and_rows_on_the_device(plan, device, a, b):
    parts = [a[0:1], a[1:3], a[3:7]]
    batches = [(parts, None), (fp4rt.upload_rows(device, a), SIZES[2])]
    listed, ragged = plan.map(batches)
    np.testing.assert_array_equal(np.concatenate(listed), oracle(a, b, SIZES[0]))
    np.testing.assert_array_equal(ragged, oracle(a, b, SIZES[2]))


def test_batches_are_taken_as_lanes_become_free(plan, a):
    taken = []

    def batches():
        for sizes in SIZES:
            taken.append(sizes)
            yield a, sizes

    with plan.map(batches(), in_flight=2) as pipeline:
        assert not taken
        next(pipeline)
        assert len(taken) == 3  # two, and the next one before the first result is looked at
    with pytest.raises(StopIteration):
        next(pipeline)


def test_a_wrong_batch_is_raised_in_its_turn(plan, a, b):
    pipeline = plan.map([(a, SIZES[0]), (a, [1, 1, 1]), (a, SIZES[1])], in_flight=3)
    np.testing.assert_array_equal(next(pipeline), oracle(a, b, SIZES[0]))
    with pytest.raises(ValueError, match="add up to 3, but a has 7 rows"):
        next(pipeline)
    with pytest.raises(StopIteration):
        next(pipeline)
    with pytest.raises(TypeError, match=r"a batch is a pair \(a, group_sizes\)"):
        next(plan.map([a]))


def test_an_iterator_that_fails(plan, a):
    def batches():
        yield a, SIZES[0]
        raise KeyError("no more")

    results = []
    with pytest.raises(KeyError, match="no more"):
        results.extend(plan.map(batches()))
    done = []
    with pytest.raises(KeyError):
        for result in plan.map(batches()):
            done.append(result)
    assert len(done) == 1


def test_leaving_early(plan, a, b):
    for result in plan.map([(a, sizes) for sizes in SIZES]):
        np.testing.assert_array_equal(result, oracle(a, b, SIZES[0]))
        break
    np.testing.assert_array_equal(plan.run(a, SIZES[1]), oracle(a, b, SIZES[1]))


def test_a_plan_closed_meanwhile(device, a, b):
    with fp4rt.GroupedGemmPlan(device, b, max_m=7) as plan:
        pipeline = plan.map([(a, sizes) for sizes in SIZES])
        next(pipeline)
    with pytest.raises(fp4rt.ClosedError, match="the pipeline was closed before its last batch"):
        next(pipeline)
    with pytest.raises(fp4rt.ClosedError, match="the plan is closed"):
        plan.map([])


def test_progress_and_nothing_to_do(plan, a):
    seen = []
    assert len(list(plan.map([(a, SIZES[0])] * 2, progress=seen.append))) == 2
    assert seen == [1, 2]
    assert list(plan.map([], progress=True)) == []


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"in_flight": 0}, ValueError, "in_flight must be at least 1, got 0"),
        ({"in_flight": 1.5}, TypeError, "in_flight must be an integer"),
        ({"in_flight": 2, "out": [None] * 2}, ValueError, r"at least in_flight \+ 1 = 3"),
    ],
)
def test_bad_arguments(plan, options, error, match):
    with pytest.raises(error, match=match):
        plan.map([], **options)


@pytest.mark.parametrize("batches", [None, 3])
def test_batches_that_are_none(plan, batches):
    with pytest.raises(TypeError, match=rf"batches must be an iterable .*got {batches}"):
        plan.map(batches)


def test_streams_are_used_by_the_next_pipeline(plan, a):
    for left_early in (False, True, False):
        pipeline = plan.map([(a, SIZES[0])] * 5, in_flight=2)
        next(pipeline)
        pipeline.close() if left_early else list(pipeline)
    used = {lane.stream for lane in pipeline._lanes}
    again = plan.map([], in_flight=2)
    assert {lane.stream for lane in again._lanes} == used
    assert list(again) == []


@pytest.mark.parametrize("then", ["goes on", "ends"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_whoever_makes_the_batches_closes_the_plan(device, a, b, after, then):
    def batches():
        for _ in range(after):
            yield a, SIZES[0]
        plan.close()
        if then == "goes on":
            yield a, SIZES[0]

    plan = fp4rt.GroupedGemmPlan(device, b, max_m=7)
    with pytest.raises(fp4rt.ClosedError, match="the pipeline was closed before its last batch"):
        list(plan.map(batches(), in_flight=2))


def test_lanes_push_no_plan_of_a_call_out_of_the_cache(device, a, b):
    if device.image_kind is None:
        pytest.skip("on the cpu plans cost nothing, so none are kept")
    info = fp4rt.cache_info(device)
    info.clear()
    info.resize(max_entries=2)
    try:
        fp4rt.grouped_gemm(device, a, b, SIZES[0])
        before = fp4rt.cache_info(device)
        with fp4rt.GroupedGemmPlan(device, b, max_m=7) as plan:
            list(plan.map([(a, SIZES[0])], in_flight=4))
        after = fp4rt.cache_info(device)
        assert (after.entries, after.misses, after.hits) == (2, before.misses, before.hits)
        for dtype in (np.float16, np.float32):  # a new kind takes the lane's place
            fp4rt.grouped_gemm(device, a, b, SIZES[0], out_dtype=dtype)
        fp4rt.grouped_gemm(device, a, b, SIZES[0])
        last = fp4rt.cache_info(device)
        assert (last.hits - after.hits, last.misses - after.misses) == (2, 1)
    finally:
        info.clear()
        info.resize(max_entries=64)


def test_a_device_closed_during_a_pipeline(b, a):
    with fp4rt.device("cpu") as device, fp4rt.GroupedGemmPlan(device, b, max_m=7) as plan:
        pipeline = plan.map([(a, SIZES[0])] * 5)
        next(pipeline)
        device.close()
        pipeline.close()
        with pytest.raises(fp4rt.ClosedError):
            next(pipeline)
