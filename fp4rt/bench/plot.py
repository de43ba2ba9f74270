"""Pictures of a benchmark, with matplotlib, which is imported only when one is drawn.

Colours are those of Okabe and Ito, which people with any kind of colour vision tell apart; markers
and hatching repeat what they say. Letters stay readable at half of a page's width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fp4rt.bench.peers import FROM_NVFP4, PLAIN, SPREAD, TORCH
from fp4rt.bench.report import Report, Result, SetResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHOSEN = "fp4rt"
PEERS = (*FROM_NVFP4, TORCH, PLAIN, SPREAD)
STYLES: dict[str, tuple[str, str, str]] = {
    CHOSEN: ("#0072B2", "o", ""),
    FROM_NVFP4[0]: ("#D55E00", "s", "//"),
    TORCH: ("#CC79A7", "^", ".."),
    PLAIN: ("#E69F00", "v", "\\\\"),
    SPREAD: ("#56B4E9", "D", "xx"),
}
"""Colour, marker and hatching of what is compared."""
VARIANT_STYLES = (
    ("#0072B2", ""),
    ("#56B4E9", "//"),
    ("#009E73", ".."),
    ("#F0E442", "\\\\"),
    ("#999999", "xx"),
    ("#000000", ""),
)
FONT = 13
"""Points, on pictures 10 inches wide."""


def save(report: Report, path: Path) -> None:
    """Draw everything into a file; its name says the format."""
    figure(report).savefig(path, dpi=150)


def figure(report: Report) -> Figure:
    """Return the roofline and the peers of a GPU's report, or the times of a host's."""
    from matplotlib.figure import Figure

    if report.ceilings is None:
        sets = [entry for entry in report.sets if entry.results]
        rows = len(sets) + bool(report.host)
        found = Figure(figsize=(10, 4.2 * max(rows, 1)), layout="constrained")
        panels = list(found.subplots(rows, squeeze=False)[:, 0]) if rows else []
        for axes, entry in zip(panels, sets, strict=False):
            times(axes, {r.name: r.timing for r in entry.results}, f"{entry.shapes.name}, ms", 1e3)
        if report.host:
            host(report, panels[-1])
        return found
    found = Figure(figsize=(10, 12.5), layout="constrained")
    upper, lower = found.subplots(2, height_ratios=(6, 5.5))
    roofline(report, upper)
    shares(report, lower)
    found.suptitle(f"{report.detail.split(',')[0]}, {report.date}", fontsize=FONT)
    return found


def roofline(report: Report, axes: Axes) -> None:
    """Draw TFLOP/s against FLOPs per byte: what the ceilings allow, what fp4rt and peers reach."""
    ceilings = report.ceilings
    assert ceilings is not None, "a host has no roofline"
    intensity = {e.shapes.name: e.shapes.flops / e.shapes.nvfp4_bytes for e in report.sets}
    least, greatest = min(intensity.values()) / 2, max(intensity.values()) * 2
    ridge = ceilings.flops / ceilings.bandwidth
    xs = sorted({least, min(max(ridge, least), greatest), greatest})
    ys = [min(x * ceilings.bandwidth, ceilings.flops) / 1e12 for x in xs]
    axes.plot(xs, ys, color="black", linewidth=2)
    axes.fill_between(xs, ys, [max(ys) * 2] * len(xs), color="#eeeeee")
    if least < ridge:
        x = math.sqrt(least * min(ridge, greatest))
        text = f"read {ceilings.bandwidth / 1e12:.2f} TB/s "
        axes.text(x, x * ceilings.bandwidth / 1e12, text, fontsize=FONT, ha="right", va="bottom")
    if greatest > ridge:
        text = f"fp16 matmul {ceilings.flops / 1e12:.0f} TFLOP/s"
        axes.text(greatest / 1.1, max(ys) * 1.12, text, fontsize=FONT, ha="right")
    for name in reversed((CHOSEN, *PEERS)):
        points = [
            (intensity[entry.shapes.name], result.flops / result.timing.median / 1e12)
            for entry in report.sets
            if (result := _find(entry, name)) and result.flops
        ]
        if points:
            colour, marker, _ = STYLES[name]
            across, up = zip(*points, strict=True)
            axes.plot(
                across,
                up,
                marker,
                color=colour,
                markersize=11 if name == CHOSEN else 8,
                markeredgecolor="black" if name == CHOSEN else "white",
                label=name,
                zorder=3 if name == CHOSEN else 2,
            )
    _name_points(axes, report, intensity)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(least, greatest)
    axes.set_ylim(axes.get_ylim()[0] / 2, max(ys) * 1.6)
    axes.set_xlabel("FLOPs per byte of NVFP4 operands and fp16 result", fontsize=FONT)
    axes.set_ylabel("TFLOP/s", fontsize=FONT)
    axes.tick_params(labelsize=FONT)
    axes.grid(True, which="major", color="#cccccc", linewidth=0.6)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=FONT - 1, loc="lower right")


def _name_points(axes: Axes, report: Report, intensity: dict[str, float]) -> None:
    """Put the sets' names above a column of points, stepping aside where two are near."""
    placed: list[float] = []
    entries = [entry for entry in report.sets if _find(entry, CHOSEN)]
    for entry in sorted(entries, key=lambda e: intensity[e.shapes.name]):
        x = intensity[entry.shapes.name]
        least = min(
            r.flops / r.timing.median / 1e12
            for name in (CHOSEN, *PEERS)
            if (r := _find(entry, name)) and r.flops
        )
        near = sum(1 for other in placed if abs(math.log(x / other)) < 0.2)
        placed.append(x)
        axes.annotate(
            entry.shapes.name,
            (x, least),
            xytext=(0, -12 - 15 * near),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=FONT,
        )


def _find(entry: SetResult, name: str) -> Result | None:
    return entry.chosen if name == CHOSEN else entry.find(name)


def shares(report: Report, axes: Axes) -> None:
    """Draw, for each set, how much of the roofline fp4rt and its peers reach."""
    names = [name for name in (CHOSEN, *PEERS) if any(_find(e, name) for e in report.sets)]
    _bars(
        axes,
        report,
        [(name, *STYLES[name][::2], [_find(e, name) for e in report.sets]) for name in names],
    )


def variants(report: Report, axes: Axes) -> None:
    """Draw, for each set, how much of the roofline each variant reaches; a dot marks the chosen."""
    names: dict[str, None] = {}
    for entry in report.sets:
        names.update({r.name: None for r in entry.results if r.kind == "variant"})
    ordered = sorted(names)
    series = [
        (name, *VARIANT_STYLES[i % len(VARIANT_STYLES)], [e.find(name) for e in report.sets])
        for i, name in enumerate(ordered)
    ]
    _bars(axes, report, series, dots=True)


def _bars(
    axes: Axes,
    report: Report,
    series: Sequence[tuple[str, str, str, Sequence[Result | None]]],
    *,
    dots: bool = False,
) -> None:
    """Draw groups of bars with their spread, one group a set; dots mark the chosen variants."""
    highest = 100.0
    width = 0.84 / max(len(series), 1)
    for i, (name, colour, hatch, found) in enumerate(series):
        offset = (i - (len(series) - 1) / 2) * width
        for column, (entry, result) in enumerate(zip(report.sets, found, strict=True)):
            if result is None or entry.roofline is None:
                continue
            timing = result.timing
            top, low, high = (
                entry.roofline / t * 100 for t in (timing.median, timing.high, timing.low)
            )
            axes.bar(
                column + offset,
                top,
                width,
                yerr=[[top - low], [high - top]],
                color=colour,
                hatch=hatch,
                edgecolor="white",
                error_kw={"linewidth": 1},
            )
            highest = max(highest, high)
            if dots and result.chosen:
                axes.plot(column + offset, high + 3, "k.", markersize=7)
        axes.bar(0, 0, 0, color=colour, hatch=hatch, edgecolor="white", label=name)
    axes.axhline(100, color="black", linewidth=2)
    axes.set_xticks(range(len(report.sets)), [e.shapes.name for e in report.sets])
    axes.set_ylabel("% of the roofline", fontsize=FONT)
    axes.tick_params(labelsize=FONT)
    axes.set_ylim(0, highest + 10)
    axes.grid(True, axis="y", color="#cccccc", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(
        fontsize=FONT - 1,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=min(max(len(series), 1), 4 if len(series) < 5 else 3),
        frameon=False,
    )


def readings(report: Report, axes: Axes, what: Literal["clock", "power"]) -> None:
    """Draw what a sensor said while fp4rt and the fastest peer were timed, for each set."""
    for offset, label, colour, found in (
        (-0.2, CHOSEN, STYLES[CHOSEN][0], [entry.chosen for entry in report.sets]),
        (0.2, "fastest peer", STYLES[PLAIN][0], [entry.best_peer for entry in report.sets]),
    ):
        heights = [getattr(r.reading, what) if r and r.reading else 0 for r in found]
        columns = [column + offset for column in range(len(found))]
        axes.bar(columns, heights, 0.38, label=label, color=colour)
    axes.set_xticks(range(len(report.sets)), [entry.shapes.name for entry in report.sets])
    axes.set_ylabel("SM clock, MHz" if what == "clock" else "power, W", fontsize=FONT)
    axes.tick_params(labelsize=FONT)
    axes.legend(
        fontsize=FONT - 1, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False
    )


def host(report: Report, axes: Axes) -> None:
    """Draw what calls cost the host."""
    times(axes, report.host, "µs of host time per call", 1e6)


def times(axes: Axes, found: Any, label: str, scale: float) -> None:
    """Draw a bar for each of several timings by name."""
    names = list(found)
    medians = [found[name].median * scale for name in names]
    errors = [
        [(found[name].median - found[name].low) * scale for name in names],
        [(found[name].high - found[name].median) * scale for name in names],
    ]
    axes.barh(names, medians, xerr=errors, color=STYLES[CHOSEN][0], error_kw={"linewidth": 1})
    for row, median in enumerate(medians):
        axes.annotate(
            f"{median:.4g}" if median < 1e4 else f"{median:.0f}",
            (median + errors[1][row], row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=FONT,
        )
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(label, fontsize=FONT)
    axes.tick_params(labelsize=FONT)
