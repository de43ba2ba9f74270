"""What a benchmark found: as a table, as JSON and back, in a notebook, and against an older one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fp4rt import html
from fp4rt.bench.ceilings import Ceilings, pooled
from fp4rt.bench.peers import FROM_NVFP4, PLAIN, SPREAD, TORCH
from fp4rt.bench.sensors import Reading
from fp4rt.bench.timing import Timing
from fp4rt.bench.workload import Shapes

NOISE = 1.05
"""A median may be this much slower than before without being called a regression."""
FORMAT = 2
"""Changes with the meaning of what ``--json`` writes."""


@dataclass(frozen=True)
class Result:
    """One thing's time on one shape set.

    Attributes
    ----------
    name
        A variant, a peer, or an operation on the host.
    kind
        Which of these.
    timing
        Seconds of one launch, or of one call.
    nbytes, flops
        What it is credited with: of a grouped GEMM the bytes of its NVFP4 operands and of D, also
        where a peer moves more; of another operation the bytes of its argument and result.
    chosen
        Whether fp4rt picks this variant for the problem.
    reading
        Clock and power while it was timed, where they can be read.
    """

    name: str
    kind: Literal["variant", "peer", "host"]
    timing: Timing
    nbytes: int
    flops: int | None = None
    chosen: bool = False
    reading: Reading | None = None


@dataclass(frozen=True)
class SetResult:
    """All that was timed on one shape set.

    Attributes
    ----------
    shapes, results
        The problem, and everything that was timed on it.
    ceilings
        What the GPU did at most, timed in turn with the results; None on a host.
    notes
        What could not be timed, and why.
    """

    shapes: Shapes
    results: tuple[Result, ...]
    ceilings: Ceilings | None = None
    notes: tuple[str, ...] = ()

    @property
    def roofline(self) -> float | None:
        """The least seconds that the ceilings allow."""
        if self.ceilings is None:
            return None
        return self.shapes.roofline(self.ceilings.bandwidth, self.ceilings.flops)

    @property
    def chosen(self) -> Result | None:
        """The variant that fp4rt picks."""
        return next((result for result in self.results if result.chosen), None)

    @property
    def best_variant(self) -> Result | None:
        """The variant that was fastest."""
        return self._fastest("variant")

    @property
    def best_peer(self) -> Result | None:
        """The peer that was fastest."""
        return self._fastest("peer")

    def _fastest(self, kind: str) -> Result | None:
        found = (result for result in self.results if result.kind == kind)
        return min(found, key=lambda result: result.timing.median, default=None)

    def find(self, name: str) -> Result | None:
        """Return the result of that name, or None."""
        return next((result for result in self.results if result.name == name), None)


@dataclass(frozen=True)
class Report:
    """A whole benchmark.

    Attributes
    ----------
    device, detail
        The device's name, and what it is.
    date
        When, in UTC.
    software
        Versions, by package.
    seconds, windows
        Length of a timing window, and how many each thing had.
    took
        Seconds that the whole of it took.
    sets
        What was timed.
    host
        What calls cost the host, by name.
    """

    device: str
    detail: str
    date: str
    software: Mapping[str, str]
    seconds: float
    windows: int
    took: float
    sets: tuple[SetResult, ...]
    host: Mapping[str, Timing]

    @property
    def ceilings(self) -> Ceilings | None:
        """The ceilings of all sets together."""
        found = [entry.ceilings for entry in self.sets if entry.ceilings is not None]
        return pooled(found) if found else None

    def text(self) -> str:
        """Return all of it for a terminal."""
        versions = ", ".join(f"{name} {version}" for name, version in self.software.items())
        lines = [f"{self.device}: {self.detail}", f"{self.date}, {versions}"]
        if self.ceilings is not None:
            lines.append(self.ceilings.text())
        if self.sets:
            lines += [
                f"medians of {self.windows} windows of {self.seconds:g} s, in turn; "
                f"{self.took:.0f} s in all; * is what fp4rt chooses",
                "",
                table(self.sets),
            ]
        if self.host:
            lines += ["", host_table(self.host, self.windows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show it in a notebook."""
        rows = []
        for entry in self.sets:
            for result in entry.results:
                rate = _tflops(result)
                share = _share(entry, result)
                rows.append(
                    [
                        f"{entry.shapes.name} {result.name}{' (chosen)' if result.chosen else ''}",
                        result.timing.text(),
                        f"{result.nbytes / result.timing.median / 1e9:.0f}",
                        "" if rate is None else f"{rate:.3g}",
                        "" if share is None else f"{share:.0%}",
                    ]
                )
        title = f"fp4rt bench on {self.detail}, {self.date}"
        return html.table(title, ["", "median (min – max)", "GB/s", "TFLOP/s", "roofline"], rows)


def _tflops(result: Result) -> float | None:
    return result.flops / result.timing.median / 1e12 if result.flops else None


def _share(entry: SetResult, result: Result) -> float | None:
    return entry.roofline / result.timing.median if entry.roofline else None


def table(found: Sequence[SetResult]) -> str:
    """Lay results out: a line for each set, and one for each thing that was timed on it.

    Examples
    --------
    >>> ceilings = Ceilings({"read": Timing((3e9,)), "fp16 matmul": Timing((65.536e9,))})
    >>> result = Result("medium", "variant", Timing((2e-6, 1e-6, 4e-6)), 3000, 65536, chosen=True)
    >>> print(table([SetResult(Shapes("tiny", (16,), 64, 32), (result,), ceilings)]))
    ... # doctest: +NORMALIZE_WHITESPACE
      set                                         median (min – max)    GB/s  TFLOP/s  roofline
    tiny: 1 groups, 16 rows, N 64, K 32: 0.0 MB, 0.0 GFLOP; roofline 1.2 µs
    * medium                        2.0 µs (1.0 – 4.0)       2    0.033      58 %
    """
    lines = [f"{'  set':<36}{'median (min – max)':>28}{'GB/s':>8}{'TFLOP/s':>9}{'roofline':>10}"]
    if any(result.reading for entry in found for result in entry.results):
        lines[0] += f"{'MHz':>6}{'W':>6}"
    for entry in found:
        roof = f"; roofline {entry.roofline * 1e6:.1f} µs" if entry.roofline else ""
        lines.append(f"{entry.shapes.name}: {entry.shapes.describe()}{roof}")
        for result in entry.results:
            median, rate, share = result.timing.median, _tflops(result), _share(entry, result)
            lines.append(
                f"{'*' if result.chosen else ' '} {result.name:<34}{result.timing.text():>28}"
                f"{result.nbytes / median / 1e9:>8.{0 if median < 1e-3 else 1}f}"
                + ("" if rate is None else f"{rate:.{0 if rate >= 10 else 3}f}").rjust(9)
                + ("" if share is None else f"{share * 100:.0f} %").rjust(10)
                + _reading_text(result.reading)
            )
        lines += [f"  {note}" for note in entry.notes]
    return "\n".join(line.rstrip() for line in lines)


def _reading_text(reading: Reading | None) -> str:
    return f"{reading.clock:>6.0f}{reading.power:>6.0f}" if reading else ""


def host_table(host: Mapping[str, Timing], windows: int) -> str:
    """Lay out what calls cost the host.

    Examples
    --------
    >>> print(host_table({"plan.launch()": Timing((2e-6,))}, 1))
    µs of host time per call, median of 1 windows (min – max)
    plan.launch()                                      2.00 (2.00 – 2.00)
    """
    lines = [f"µs of host time per call, median of {windows} windows (min – max)"]
    for name, t in host.items():
        figures = f"{t.median * 1e6:.2f} ({t.low * 1e6:.2f} – {t.high * 1e6:.2f})"
        lines.append(f"{name:<39}{figures:>30}")
    return "\n".join(lines)


def markdown(report: Report) -> str:
    """Return the table that README shows: a row for each set, with peers where they were timed.

    Times are medians in µs, fp4rt's with its fastest and slowest window.
    """
    peers = (*FROM_NVFP4, TORCH, f"{PLAIN}, best of 1 and {SPREAD.split()[-2]} streams")
    titles = ["set", "M of each group", "N, K", "roofline", "**fp4rt**", "of roofline", *peers]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for entry in report.sets:
        chosen = entry.chosen
        if chosen is None or entry.roofline is None:
            continue
        t, shapes = chosen.timing, entry.shapes
        cuBLAS = [r.timing.median for r in map(entry.find, (PLAIN, SPREAD)) if r is not None]
        others = [r.timing.median if r else None for r in map(entry.find, (*FROM_NVFP4, TORCH))]
        cells = [
            shapes.name,
            _sizes_text(shapes.sizes),
            f"{shapes.n}, {shapes.k}",
            _us(entry.roofline),
            f"**{_us(t.median)}** ({_us(t.low)} – {_us(t.high)})",
            f"{entry.roofline / t.median * 100:.0f} %",
            *(_us(x) for x in (*others, min(cuBLAS, default=None))),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:.1f}"


def _sizes_text(sizes: tuple[int, ...]) -> str:
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} × {sizes[0]}"
    if len(sizes) > 8:
        return f"{len(sizes)} × ({min(sizes)} to {max(sizes)})"
    return ", ".join(str(size) for size in sizes)


# --- JSON ---------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """Return a report in plain types; times are in seconds."""
    return {
        "format": FORMAT,
        "device": report.device,
        "detail": report.detail,
        "date": report.date,
        "software": dict(report.software),
        "seconds": report.seconds,
        "windows": report.windows,
        "took": report.took,
        "sets": {
            entry.shapes.name: {
                "sizes": list(entry.shapes.sizes),
                "n": entry.shapes.n,
                "k": entry.shapes.k,
                "ceilings": _windows(entry.ceilings.rates) if entry.ceilings else None,
                "notes": list(entry.notes),
                "results": [
                    {
                        "name": r.name,
                        "kind": r.kind,
                        "chosen": r.chosen,
                        "bytes": r.nbytes,
                        "flops": r.flops,
                        "windows": list(r.timing.windows),
                        "reading": asdict(r.reading) if r.reading else None,
                    }
                    for r in entry.results
                ],
            }
            for entry in report.sets
        },
        "host": _windows(report.host),
    }


def from_json(data: Mapping[str, Any]) -> Report:
    """Return the report that `to_json` made this of; ValueError if it is something else."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("this is not what `bench --json` of this version writes")
    sets = []
    for name, entry in data["sets"].items():
        shapes = Shapes(name, tuple(entry["sizes"]), entry["n"], entry["k"])
        results = (
            Result(
                r["name"],
                r["kind"],
                Timing(tuple(r["windows"])),
                r["bytes"],
                r["flops"],
                r["chosen"],
                Reading(**r["reading"]) if r["reading"] else None,
            )
            for r in entry["results"]
        )
        ceilings = Ceilings(_timings(entry["ceilings"])) if entry["ceilings"] else None
        sets.append(SetResult(shapes, tuple(results), ceilings, tuple(entry["notes"])))
    plain = {k: data[k] for k in ("device", "detail", "date", "software", "seconds", "windows")}
    return Report(**plain, took=data["took"], sets=tuple(sets), host=_timings(data["host"]))


def _windows(timings: Mapping[str, Timing]) -> dict[str, list[float]]:
    return {name: list(timing.windows) for name, timing in timings.items()}


def _timings(windows: Mapping[str, Sequence[float]]) -> dict[str, Timing]:
    return {name: Timing(tuple(times)) for name, times in windows.items()}


def write(report: Report, path: Path) -> None:
    """Write a report to a JSON file."""
    path.write_text(json.dumps(to_json(report), indent=1) + "\n", "utf-8")


def read(path: str | Path) -> Report:
    """Read what ``--json`` wrote; ValueError if the file can't be read or is something else."""
    try:
        return from_json(json.loads(Path(path).read_text("utf-8")))
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"cannot read results from {str(path)!r}: {error}") from error


# --- comparing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Something whose time is not what it was."""

    what: str
    before: Timing
    now: Timing

    @property
    def slower(self) -> bool:
        """Whether it takes longer now."""
        return self.now.median > self.before.median

    def text(self) -> str:
        """Return a line for people."""
        return (
            f"{'SLOWER' if self.slower else 'faster'} {self.what}: "
            f"{self.before.text()} before, {self.now.text()} now"
        )


def changes(old: Report, new: Report) -> list[Change]:
    """Return what changed by more than its spread and `NOISE` explain.

    That is: the medians differ by more than `NOISE`, and the windows of before and now don't
    overlap. Sets of other shapes under the same name are left out.
    """
    before = {entry.shapes: entry for entry in old.sets}
    found = []
    for entry in new.sets:
        for result in entry.results:
            was = before[entry.shapes].find(result.name) if entry.shapes in before else None
            if was is not None and _differ(was.timing, result.timing):
                what = f"{entry.shapes.name} {result.name}"
                found.append(Change(what, was.timing, result.timing))
    for name, now in new.host.items():
        if name in old.host and _differ(old.host[name], now):
            found.append(Change(name, old.host[name], now))
    return found


def _differ(was: Timing, now: Timing) -> bool:
    fast, slow = sorted((was, now), key=lambda timing: timing.median)
    return slow.median > NOISE * fast.median and slow.low > fast.high
