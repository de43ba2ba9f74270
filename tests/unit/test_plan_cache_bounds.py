"""The plan cache by itself: order, bounds and counters, with plans that only count."""

import gc
import tracemalloc

import pytest

import fp4rt
from fp4rt.plan_cache import PlanCache


class FakePlan:
    def __init__(self, nbytes=100, scale_key=None):
        self.nbytes, self.scale_key, self.closed = nbytes, scale_key, 0

    def close(self):
        self.closed += 1


def test_the_least_recently_used_goes_first():
    cache = PlanCache()
    cache.resize(2, 1000)
    plans = {key: FakePlan() for key in "abc"}
    cache.give("a", plans["a"])
    cache.give("b", plans["b"])
    cache.give("a", cache.take("a"))
    cache.give("c", plans["c"])
    assert [plans[key].closed for key in "abc"] == [0, 1, 0]
    assert (len(cache), cache.nbytes, cache.evictions) == (2, 200, 1)
    assert cache.take("b") is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_bytes_are_bounded_too():
    cache = PlanCache()
    cache.resize(10, 250)
    huge, large, small = FakePlan(300), FakePlan(200), FakePlan(100)
    cache.give("large", large)
    cache.give("huge", huge)  # it could never stay, so nothing makes way for it
    assert (large.closed, huge.closed, len(cache), cache.nbytes) == (0, 1, 1, 200)
    cache.give("small", small)
    assert (large.closed, small.closed, len(cache), cache.nbytes) == (1, 0, 1, 100)


def test_plans_of_one_key_are_lent_once_each():
    cache = PlanCache()
    first, second = FakePlan(), FakePlan()
    cache.give("key", first)
    cache.give("key", second)
    assert {cache.take("key"), cache.take("key")} == {first, second}
    assert cache.take("key") is None


def test_a_plan_with_other_scales_stays():
    cache = PlanCache()
    plan = FakePlan(scale_key=(1, 0.5))
    cache.give("key", plan)
    assert cache.take_if("key", (2, 0.5)) is None
    assert cache.take_if("key", (1, 0.5)) is plan
    assert (cache.hits, cache.misses) == (1, 0)


def test_clear_closes_each_plan_once():
    cache = PlanCache()
    plans = [FakePlan() for _ in range(3)]
    for i, plan in enumerate(plans):
        cache.give(i % 2, plan)
    cache.clear()
    cache.clear()
    assert [plan.closed for plan in plans] == [1, 1, 1]
    assert (len(cache), cache.nbytes, cache.take(0)) == (0, 0, None)


def test_a_hundred_thousand_shapes_leave_memory_flat():
    cache = PlanCache()

    def shapes(start, stop):
        for i in range(start, stop):
            assert cache.take((i, "float16")) is None
            cache.give((i, "float16"), FakePlan())
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = shapes(0, 1000)
        after = shapes(1000, 100_000)
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
    assert (len(cache), cache.evictions) == (64, 100_000 - 64)


@pytest.mark.parametrize("bound", ["max_entries", "max_bytes"])
@pytest.mark.parametrize("value", [1.5, "a", float("nan"), float("inf"), True])
def test_bounds_must_be_integers(bound, value):
    with fp4rt.device("cpu") as dev:
        before = repr(fp4rt.cache_info(dev))
        with pytest.raises(TypeError, match=f"{bound} is .*must be an integer"):
            fp4rt.cache_info(dev).resize(**{bound: value})
        assert repr(fp4rt.cache_info(dev)) == before


def test_bounds_must_not_be_negative():
    with fp4rt.device("cpu") as dev, pytest.raises(ValueError, match="max_bytes is -1"):
        fp4rt.cache_info(dev).resize(max_bytes=-1)
    with pytest.raises(TypeError, match="device must be an open Device or None"):
        fp4rt.cache_info("cpu")
