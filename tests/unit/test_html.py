"""What notebooks show of operands, plans, devices and results: complete, escaped and cheap."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import fp4rt
from fp4rt import html, layout


def parsed(text):
    """The elements of well-formed HTML; raises if a tag isn't closed or a text isn't escaped."""
    return ElementTree.fromstring(f"<body>{text.replace('<br>', '<br/>')}</body>")


def texts(text):
    return [element.text for element in parsed(text).iter() if element.text]


def colours(text):
    return [e.get("fill") for e in parsed(text).iter() if e.tag.endswith("rect")]


HOSTILE = '<script>alert("1 & 2")</script>'


def test_every_text_is_escaped():
    shown = html.card(HOSTILE, {HOSTILE: HOSTILE}) + html.table(HOSTILE, [HOSTILE], [[HOSTILE]])
    assert texts(shown) == [HOSTILE] * 6


def test_a_device_name_from_outside_is_escaped():
    info = fp4rt.DeviceInfo(HOSTILE, False, HOSTILE, {"arch": HOSTILE})
    assert "script" not in {element.tag for element in parsed(info._repr_html_()).iter()}


def test_a_card_leaves_out_what_is_unknown():
    assert "clock" not in texts(html.card("GPU", {"clock": None, "power": 0}))


@pytest.mark.parametrize("groups", [(), (3,)], ids=["one", "stack"])
def test_an_operand_shows_its_logical_shape_and_order(groups):
    shown = fp4rt.quantize(np.ones((*groups, 200, 100), np.float32))._repr_html_()
    assert any(str((*groups, 200, 100)) in text for text in texts(shown))
    assert any("linear order" in text for text in texts(shown))


def test_an_operand_without_elements_has_no_strip():
    assert colours(fp4rt.quantize(np.ones((0, 32), np.float32))._repr_html_()) == []


def test_both_orders_of_the_same_scales_have_the_same_colours():
    x = np.random.default_rng(0).standard_normal((2, 150, 112)) * np.logspace(-2, 1, 150)[:, None]
    q = fp4rt.quantize(x)
    swizzled = layout.swizzle_scales(q.scales)
    assert "swizzled" in swizzled._repr_html_()
    assert colours(swizzled._repr_html_()) == colours(q._repr_html_())


def test_larger_scales_are_lighter():
    scales = np.float32([[1], [4], [16], [64]])
    shown = colours(html.strip(4, 1, lambda r, c: scales[r, c]))
    lightness = [sum(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in shown]
    assert lightness == sorted(lightness)
    assert len(set(shown)) == 4


def test_nan_and_zero_scales_show():
    scales = np.float32([[1], [np.nan], [0], [2]])
    shown = html.strip(4, 1, lambda r, c: scales[r, c])
    assert len(set(colours(shown))) == 4
    assert any("NaN" in text and "black" in text for text in texts(shown))


def test_a_huge_operand_costs_no_more():
    looked_at = []

    def scale_at(row, col):
        looked_at.append(np.broadcast(row, col).size)
        assert row.max() < 1 << 40
        assert col.max() < 1 << 20
        return np.ones(np.broadcast_shapes(row.shape, col.shape), np.float32)

    shown = html.strip(1 << 40, 1 << 20, scale_at)
    assert sum(looked_at) <= html.STRIP_CELLS * html.STRIP_SAMPLES
    assert len(shown) < 10_000


@pytest.mark.parametrize("rows", [1, 2, 47, 48, 49, 1000])
def test_a_strip_goes_through_all_rows_in_order(rows):
    seen = []

    def scale_at(row, col):
        seen.extend(row.ravel())
        return np.ones((len(row), col.size), np.float32)

    html.strip(rows, 3, scale_at)
    assert len(seen) == min(rows, html.STRIP_CELLS)
    assert seen == sorted(set(seen))
    assert 0 <= seen[0] <= rows / len(seen) / 2
    assert seen[-1] >= rows - 1 - rows / len(seen) / 2


def test_a_device_shows_what_its_buffers_take():
    with fp4rt.device("cpu") as dev:
        held = dev.alloc(1000)
        assert any("1 kB in buffers" in text for text in texts(dev._repr_html_()))
        held.close()


def test_a_closed_device_still_shows():
    with fp4rt.device("cpu") as dev:
        pass
    assert any("is closed" in text for text in texts(dev._repr_html_()))


def test_a_plan_shows_its_problem_and_its_inputs():
    weights = fp4rt.quantize(np.ones((2, 8, 32), np.float32))
    with fp4rt.GroupedGemmPlan("cpu", weights, max_m=4) as plan:
        assert "none yet" in texts(plan._repr_html_())
        plan.set_inputs(fp4rt.quantize(np.ones((3, 32), np.float32)), [1, 2])
        shown = texts(plan._repr_html_())
    assert "3 rows; groups of 1, 2" in shown
    assert "(8, 32)" in shown
    assert "BLAS on cpu" in shown
    assert any("closed" in text for text in texts(plan._repr_html_()))


def test_a_plan_of_many_groups_stays_short():
    weights = fp4rt.quantize(np.ones((500, 8, 32), np.float32))
    with fp4rt.GroupedGemmPlan("cpu", weights, max_m=4) as plan:
        plan.set_inputs(fp4rt.quantize(np.ones((1, 32), np.float32)), [1] + 499 * [0])
        shown = plan._repr_html_()
    assert "(500 in all)" in shown
    assert len(shown) < 2000


def test_operands_on_a_device_show_where_they_are():
    b = fp4rt.quantize(np.ones((2, 8, 32), np.float32))
    with fp4rt.device("cpu") as dev:
        rows = fp4rt.upload_rows(dev, b[0])
        assert {"cpu", "(8, 32)", "nvfp4", "linear order"} <= set(texts(rows._repr_html_()))
        halves = fp4rt.upload_rows(dev, np.ones((3, 32), np.float16))
        assert {"(3, 32)", "float16", "192 bytes"} <= set(texts(halves._repr_html_()))
        weights = fp4rt.upload_weights(dev, b)
        assert {"cpu", "(8, 32)", "bytes"} <= set(texts(weights._repr_html_()))
        weights.close()
        assert "closed" in texts(weights._repr_html_())


def test_cards_of_operands_on_a_device():
    b = fp4rt.quantize(np.ones((3, 8, 96), np.float32))
    with fp4rt.device("cpu") as dev:
        rows, weights = fp4rt.upload_rows(dev, b[0]), fp4rt.upload_weights(dev, b)
        half = fp4rt.upload_rows(dev, np.ones((5, 64), np.float16))
        assert {"shape", "(8, 96)", "nvfp4", "linear order", "cpu"} <= set(
            texts(rows._repr_html_())
        )
        shown = texts(half._repr_html_())
        assert {"(5, 64)", "float16", "640 bytes"} <= set(shown)
        assert "scales" not in shown and "global_scale" not in shown
        shown = texts(weights._repr_html_())
        assert {"groups", "3", "(N, K)", "(8, 96)", "1.308 kB"} <= set(shown)
        assert "logical; there are no kernels" in shown
        rows.scales.close()
        weights.close()
        for closed, kept in ((rows, "linear order"), (weights, "logical; there are no kernels")):
            assert {"closed", kept} <= set(texts(closed._repr_html_()))
            assert "closed" in repr(closed)
    assert "closed" in repr(half)
