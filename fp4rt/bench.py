"""Benchmarks: every variant that takes a problem, its peers, and what the machine allows.

``python -m fp4rt bench`` on a CUDA device checks a sample of each result first, then times replays
of graphs whose launches go through copies of the operands that together exceed the L2 cache. The
things that are compared take turns (`fp4rt.timing`); the ceilings are measured in the same run. On
a machine without a GPU it times the host's part (`fp4rt.bench_host`).

Every group of a problem has the same random weights, each in memory of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp4rt import bench_host, model, progress
from fp4rt.abi import image_arch
from fp4rt.choice import candidates
from fp4rt.device import Device, device
from fp4rt.model import SHAPE_SETS
from fp4rt.peers import Ceilings, Cupy, CupyPeers, find_cupy, measure_ceilings
from fp4rt.sensors import Reading, Sensors
from fp4rt.timing import Repeat, Timing, by_clock, by_replay, interleaved
from fp4rt.workload import Operands, Rotation, Shapes, named_sets, read_shapes

NOISE = 1.05
"""A median may be this much slower than before without being called a regression."""
FORMAT = 1
"""Changes with the meaning of what ``--json`` writes."""
CPU_SETS = ("S4", "S3")
"""What a machine without a GPU gets through in a minute."""


@dataclass(frozen=True)
class Result:
    """One thing's time on one shape set.

    Attributes
    ----------
    name
        A variant, a peer, or an operation on the host.
    timing
        Seconds of one launch, or of one call.
    nbytes, flops
        What it is credited with: of a grouped GEMM the bytes of its NVFP4 operands and of D, also
        where a peer moves more; of another operation the bytes of its argument and result.
    chosen
        Whether fp4rt picks this variant for the problem.
    """

    name: str
    timing: Timing
    nbytes: int
    flops: int | None = None
    chosen: bool = False


@dataclass(frozen=True)
class SetResult:
    """All that was timed on one shape set.

    Attributes
    ----------
    shapes, results
        The problem, and everything that was timed on it.
    roofline
        The least seconds that the ceilings allow; None on a host.
    reading
        Clock and power while it was timed, where they can be read.
    """

    shapes: Shapes
    roofline: float | None
    results: tuple[Result, ...]
    reading: Reading | None = None


class WrongResultError(RuntimeError):
    """A result was wrong, so its time means nothing."""


def bench_kernels(
    dev: Device,
    sets: Sequence[Shapes],
    ceilings: Ceilings,
    *,
    seconds: float = 0.3,
    windows: int = 3,
    cupy: Cupy | None = None,
    sensors: Sensors | None = None,
) -> Iterator[SetResult]:
    """Time every variant that takes each problem, and peers where CuPy is given.

    Parameters
    ----------
    dev
        A device with kernels.
    sets
        The problems.
    ceilings
        What the roofline is made of.
    seconds, windows
        Length of a window, and how many of each thing are timed in turn.
    cupy
        CuPy on the device.
    sensors
        Sensors of the device.

    Raises
    ------
    WrongResultError
        If a sample of a result isn't right.
    """
    for number, shapes in enumerate(sets):
        progress.show(f"{shapes.name} ({number + 1} of {len(sets)}): {shapes.describe()}")
        yield _bench_set(dev, shapes, ceilings, seconds, windows, cupy, sensors)


def _bench_set(
    dev: Device,
    shapes: Shapes,
    ceilings: Ceilings,
    seconds: float,
    windows: int,
    cupy: Cupy | None,
    sensors: Sensors | None,
) -> SetResult:
    operands = Operands.random(shapes)
    arch = image_arch(dev.arch)
    choices = candidates(dev.arch, dev.sm_count, shapes.problem)
    rotations: dict[str, Rotation] = {}
    peers: CupyPeers | None = None
    things: dict[str, Repeat] = {}
    try:
        first: Rotation | None = None
        for choice in choices:
            name = choice.variant.removeprefix(f"grouped_gemm_{arch}_")
            rotation = rotations[name] = Rotation(dev, operands, choice, first)
            first = first or rotation
            _check(rotation.wrong(), shapes, name)
            things[name] = by_replay(dev.stream, rotation.graph, rotation.launches)
        if cupy is not None:
            peers = CupyPeers(cupy, operands)
            for name, graph in peers.graphs.items():
                _check(peers.wrong(name), shapes, name)
                things[name] = by_replay(dev.stream, graph, peers.launches)
        start = time.monotonic()
        times = interleaved(things, seconds, windows)
        reading = sensors.since(start) if sensors else None
        for name, rotation in rotations.items():
            _check(rotation.wrong(), shapes, f"{name}, after timing,")
    finally:
        for rotation in rotations.values():
            rotation.close()
        if peers is not None:
            peers.close()
        dev.trim()
    chosen = next(iter(rotations))
    results = (
        Result(name, timing, shapes.nvfp4_bytes, shapes.flops, name == chosen)
        for name, timing in times.items()
    )
    roofline = shapes.roofline(ceilings.read, ceilings.flops)
    return SetResult(shapes, roofline, tuple(results), reading)


def _check(wrong: str | None, shapes: Shapes, name: str) -> None:
    if wrong is not None:
        raise WrongResultError(f"{name} on {shapes.name} is wrong, so it isn't timed: {wrong}")


# --- what is printed and written ----------------------------------------------------------------


def table(found: Sequence[SetResult]) -> str:
    """Lay results out: a line for each set, and one for each thing that was timed on it.

    Examples
    --------
    >>> shapes = Shapes("tiny", (16,), 64, 32)
    >>> result = Result("medium", Timing((2e-6, 1e-6, 4e-6)), 3000, 65536, chosen=True)
    >>> print(table([SetResult(shapes, 1e-6, (result,))]))  # doctest: +NORMALIZE_WHITESPACE
      set                             median (min – max)    GB/s  TFLOP/s  roofline
    tiny: 1 groups, 16 rows, N 64, K 32: 0.0 MB, 0.0 GFLOP; roofline 1.0 µs
    * medium                        2.0 µs (1.0 – 4.0)       2    0.033      50 %
    """
    lines = [f"{'  set':<36}{'median (min – max)':>28}{'GB/s':>8}{'TFLOP/s':>9}{'roofline':>10}"]
    for entry in found:
        roof = f"; roofline {entry.roofline * 1e6:.1f} µs" if entry.roofline else ""
        if entry.reading:
            roof += f"; {entry.reading.clock:.0f} MHz, {entry.reading.power:.0f} W"
        lines.append(f"{entry.shapes.name}: {entry.shapes.describe()}{roof}")
        for result in entry.results:
            median = result.timing.median
            rate = result.flops / median / 1e12 if result.flops else None
            speed = "" if rate is None else f"{rate:.{0 if rate >= 10 else 3}f}"
            share = f"{entry.roofline / median * 100:.0f} %" if entry.roofline else ""
            lines.append(
                f"{'*' if result.chosen else ' '} {result.name:<34}{_span(result.timing):>28}"
                f"{result.nbytes / median / 1e9:>8.{0 if median < 1e-3 else 1}f}"
                f"{speed:>9}{share:>10}"
            )
    return "\n".join(line.rstrip() for line in lines)


def _span(timing: Timing) -> str:
    """A timing with its spread, in µs, or in ms from 10 ms on."""
    unit, scale = ("ms", 1e3) if timing.median >= 0.01 else ("µs", 1e6)
    median, low, high = (t * scale for t in (timing.median, timing.low, timing.high))
    return f"{median:.1f} {unit} ({low:.1f} – {high:.1f})"


def to_json(dev: Device, found: Sequence[SetResult], ceilings: Ceilings | None) -> dict[str, Any]:
    """Return everything in plain types; times are in seconds."""
    return {
        "format": FORMAT,
        "device": repr(dev),
        "ceilings": None
        if ceilings is None
        else {
            **{k: v for k, v in asdict(ceilings).items() if k != "rates"},
            "rates": {name: list(t.windows) for name, t in ceilings.rates.items()},
        },
        "sets": {
            entry.shapes.name: {
                "sizes": list(entry.shapes.sizes),
                "n": entry.shapes.n,
                "k": entry.shapes.k,
                "bytes": entry.shapes.nvfp4_bytes,
                "flops": entry.shapes.flops,
                "roofline": entry.roofline,
                "reading": asdict(entry.reading) if entry.reading else None,
                "results": [
                    {
                        "name": r.name,
                        "chosen": r.chosen,
                        "bytes": r.nbytes,
                        "flops": r.flops,
                        "windows": list(r.timing.windows),
                    }
                    for r in entry.results
                ],
            }
            for entry in found
        },
    }


def read_results(path: Path) -> dict[str, Any]:
    """Read what ``--json`` wrote; ValueError if the file can't be read or is something else."""
    try:
        old = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read results from {str(path)!r}: {error}") from error
    if not isinstance(old, dict) or old.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is not what `bench --json` of this version writes")
    return old


def regressions(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a line for everything that became slower than its spread and `NOISE` explain.

    That is: the new median is more than `NOISE` times the old one, and the fastest new window is
    slower than the slowest old one. Both are what ``--json`` writes; sets of other shapes under
    the same name are left out.
    """
    lines = []
    for name, entry in new["sets"].items():
        before = old["sets"].get(name)
        if before is None or any(before[key] != entry[key] for key in ("sizes", "n", "k")):
            continue
        times = {result["name"]: Timing(tuple(result["windows"])) for result in before["results"]}
        for result in entry["results"]:
            was, now = times.get(result["name"]), Timing(tuple(result["windows"]))
            if was and now.median > NOISE * was.median and now.low > was.high:
                lines.append(f"{name} {result['name']}: {_span(was)} before, {_span(now)} now")
    return lines


def _ceilings_text(ceilings: Ceilings) -> str:
    units = {"copy": (1e12, "TB/s"), "read": (1e12, "TB/s"), "fp16 matmul": (1e12, "TFLOP/s")}
    lines = []
    for name, rate in ceilings.rates.items():
        scale, unit = units[name]
        lines.append(
            f"ceiling: {name} {rate.median / scale:.4g} {unit} "
            f"({rate.low / scale:.4g} – {rate.high / scale:.4g})"
        )
    lines.append(
        f"roofline: the longer of bytes / {ceilings.read / 1e12:.3f} TB/s "
        f"({ceilings.read_source}) and FLOPs / {ceilings.flops / 1e12:.0f} TFLOP/s "
        f"({ceilings.flops_source})"
    )
    return "\n".join(lines)


# --- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="cuda:N, cpu or auto (default)"
    )
    parser.add_argument(
        "--sets",
        type=_sets_argument,
        metavar="NAMES",
        help=f"shape sets, with commas between them, of {','.join(SHAPE_SETS)} "
        f"(default: all; on the cpu {','.join(CPU_SETS)})",
    )
    parser.add_argument(
        "--shapes",
        type=_file_argument(read_shapes),
        metavar="FILE",
        help='JSON with shape sets instead: {"mine": {"sizes": [3, 0, 5], "n": 4096, "k": 7168}}',
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=0.3, help="length of a timing window (default 0.3)"
    )
    parser.add_argument(
        "--windows", type=_windows, default=3, help="windows of each thing, in turn (default 3)"
    )
    parser.add_argument(
        "--clocks", action="store_true", help="read SM clock and power with nvidia-smi meanwhile"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there too")
    parser.add_argument(
        "--compare",
        type=_file_argument(read_results),
        metavar="OLD.json",
        help="say what became slower since then, beyond the spread; exit code 1 if anything did",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--model", action="store_true", help="print predicted (not measured) times on Blackwell"
    )
    modes.add_argument(
        "--host", action="store_true", help="time what a call costs in Python, with small operands"
    )


def _sets_argument(text: str) -> list[Shapes]:
    try:
        return named_sets([name for name in text.split(",") if name])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _file_argument(read: Any) -> Any:
    def argument(text: str) -> Any:
        try:
            return read(Path(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return argument


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _windows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of at least 1")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 for a wrong result or a regression, 2 for a bad device."""
    if args.model:
        print("Predicted by fp4rt.model, not measured: no Blackwell GPU was at hand. µs on a B200.")
        print(model.report())
        return 0
    try:
        dev = device(args.device)
        if dev.name.startswith("emulator"):
            dev.close()
            raise ValueError("an emulator has no speed of its own; use --device cuda:0 or cpu")
    except ValueError as error:
        print(f"fp4rt bench: {error}", file=sys.stderr)
        return 2
    with dev:
        try:
            return _run(dev, args)
        except WrongResultError as error:
            print(f"fp4rt bench: {error}", file=sys.stderr)
            return 1
        finally:
            progress.show("")


def _run(dev: Device, args: argparse.Namespace) -> int:
    start = time.monotonic()
    options = {"seconds": args.seconds, "windows": args.windows}
    if args.host:
        print(bench_host.overheads(dev, **options))
        return 0
    sets = args.shapes or args.sets
    ceilings: Ceilings | None = None
    timed: Iterator[SetResult]
    sensors: Sensors | None = None
    cupy: Cupy | None = None
    if dev.image_kind is None:
        sets = sets or named_sets(CPU_SETS)
        timed = (_host_set(dev, shapes, **options) for shapes in sets)
        text = "timed on the host"
    else:
        sets = sets or named_sets(list(SHAPE_SETS))
        cupy, peers_text = _open_cupy(dev)
        progress.show("ceilings")
        ceilings = measure_ceilings(dev, cupy, **options)
        sensors = Sensors(int(dev.name.partition(":")[2])) if args.clocks else None
        timed = bench_kernels(dev, sets, ceilings, cupy=cupy, sensors=sensors, **options)
        text = f"{_ceilings_text(ceilings)}\npeers: {peers_text}"
    found: list[SetResult] = []
    interrupted = False
    try:
        found.extend(timed)
    except KeyboardInterrupt:  # what is finished is worth showing
        interrupted = True
    finally:
        if sensors is not None:
            sensors.close()
        if cupy is not None:
            cupy.close()
    progress.show("")
    results = to_json(dev, found, ceilings)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    slower = regressions(args.compare, results) if args.compare else []
    print(
        f"{dev!r}\n{text}\nmedians of {args.windows} windows of {args.seconds:g} s, in turn; "
        f"{time.monotonic() - start:.0f} s in all; * is what fp4rt chooses\n\n{table(found)}"
    )
    if interrupted:
        print(f"interrupted after {len(found)} of {len(sets)} sets", file=sys.stderr)
        return 130
    for line in slower:
        print(f"SLOWER {line}")
    if args.compare and not slower:
        print("nothing became slower beyond the spread")
    return 1 if slower else 0


def _open_cupy(dev: Device) -> tuple[Cupy | None, str]:
    """CuPy if it is there and works, and what to say about it."""
    module = find_cupy()
    if module is None:
        return None, "none (CuPy is not installed)"
    try:
        return Cupy(dev, module), f"cuBLAS, arrays by CuPy {module.__version__}"
    except Exception as error:  # whatever is wrong with it, fp4rt can be timed
        return None, f"none (CuPy {module.__version__} does not work: {error})"


def _host_set(dev: Device, shapes: Shapes, *, seconds: float, windows: int) -> SetResult:
    progress.show(f"{shapes.name}: {shapes.describe()}")
    operands = Operands.random(shapes)
    operations = bench_host.operations(dev, operands)
    try:
        _check(operands.wrong(operations.run()), shapes, "grouped_gemm")
        times = interleaved(
            {name: by_clock(call) for name, (call, _, _) in operations.calls.items()},
            seconds,
            windows,
        )
    finally:
        operations.close()
    results = (
        Result(name, times[name], nbytes, flops)
        for name, (_, nbytes, flops) in operations.calls.items()
    )
    return SetResult(shapes, None, tuple(results))
