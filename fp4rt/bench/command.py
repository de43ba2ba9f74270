"""The command ``python -m fp4rt bench``: options, and the order of things."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fp4rt import __version__, model, progress
from fp4rt.bench import plot, report
from fp4rt.bench.gpu import bench_kernels, find_libraries
from fp4rt.bench.host import bench_host, overheads
from fp4rt.bench.report import Report, SetResult
from fp4rt.bench.sensors import open_sensors
from fp4rt.bench.timing import Timing
from fp4rt.bench.workload import Shapes, WrongResultError, named_sets, read_shapes
from fp4rt.device import Device, device, devices
from fp4rt.model import SHAPE_SETS

CPU_SETS = ("S4", "S3")
"""What a machine without a GPU gets through in a minute."""
PICTURES = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="cuda:N, cpu or auto (default)"
    )
    parser.add_argument(
        "--sets",
        type=_argument(_named),
        metavar="NAMES",
        help=f"shape sets, with commas between them, of {','.join(SHAPE_SETS)} "
        f"(default: all; on the cpu {','.join(CPU_SETS)})",
    )
    parser.add_argument(
        "--shapes",
        type=_argument(lambda text: read_shapes(Path(text))),
        metavar="FILE",
        help='JSON with shape sets instead: {"mine": {"sizes": [3, 0, 5], "n": 4096, "k": 7168}}',
    )
    parser.add_argument(
        "--seconds",
        type=_argument(_seconds),
        default=0.3,
        help="length of a timing window (default 0.3)",
    )
    parser.add_argument(
        "--windows",
        type=_argument(_windows),
        default=3,
        help="windows of each thing, in turn (default 3)",
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="time fp4rt's variants and the ceilings only"
    )
    parser.add_argument(
        "--json", type=_argument(_writable), metavar="FILE", help="write all results there too"
    )
    parser.add_argument(
        "--plot",
        type=_argument(_picture),
        metavar="FILE",
        help="draw roofline and bars there, .png or .svg (needs matplotlib)",
    )
    parser.add_argument(
        "--compare",
        type=_argument(report.read),
        metavar="OLD.json",
        help="say what changed since then, beyond the spread; exit code 1 if anything is slower",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--model", action="store_true", help="print predicted (not measured) times on Blackwell"
    )
    modes.add_argument("--host", action="store_true", help="time only what calls cost in Python")


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse print the message of a ValueError."""

    def argument(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return argument


def _named(text: str) -> list[Shapes]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise ValueError(f"{text!r} names no set; use some of {','.join(SHAPE_SETS)}")
    return named_sets(names)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a number of seconds above 0")
    return value


def _windows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a count of at least 1")
    return int(text)


def _writable(text: str) -> Path:
    """Refuse now what could not be written once everything was measured."""
    path = Path(text)
    folder = path.parent
    target = path if path.exists() else folder
    if not folder.is_dir() or path.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(f"{text!r} can't be written; name a file in an existing folder of yours")
    return path


def _picture(text: str) -> Path:
    path = _writable(text)
    if path.suffix not in PICTURES:
        raise ValueError(f"{text!r} must end in {' or '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise ValueError("a picture needs matplotlib; pip install matplotlib")
    return path


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
    kernels = dev.image_kind is not None
    default = SHAPE_SETS if kernels else CPU_SETS
    sets = [] if args.host else args.shapes or args.sets or named_sets(list(default))
    versions: dict[str, str] = {}
    found: list[SetResult] = []
    host: dict[str, Timing] = {}
    broken: BaseException | None = None
    with ExitStack() as opened:
        try:
            if sets and kernels:
                progress.show("looking for libraries to compare with")
                libraries = find_libraries(dev, peers=not args.no_peers)
                opened.callback(libraries.close)
                versions.update(libraries.versions)
                sensors = open_sensors(_facts(dev).get("bus_id", ""))
                if sensors is not None:
                    opened.callback(sensors.close)
                found.extend(bench_kernels(dev, sets, libraries, sensors=sensors, **options))
            elif sets:
                found.extend(bench_host(dev, sets, **options))
            progress.show("what calls cost the host")
            host = overheads(dev, **options)
        except (Exception, KeyboardInterrupt) as error:  # what is finished is worth showing
            if not found:
                raise
            broken = error
    progress.show("")
    result = Report(
        dev.name,
        _detail(dev),
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        {"fp4rt": __version__, "numpy": np.__version__, **versions},
        args.seconds,
        args.windows,
        time.monotonic() - start,
        tuple(found),
        host,
    )
    print(result.text())
    if args.json:
        report.write(result, args.json)
    if args.plot:
        plot.save(result, args.plot)
    if broken is not None:
        print(f"stopped after {len(found)} of {len(sets)} sets", file=sys.stderr)
        raise broken
    if not args.compare:
        return 0
    changes = report.changes(args.compare, result)
    for change in changes:
        print(change.text())
    slower = any(change.slower for change in changes)
    if not slower:
        print("nothing became slower beyond the spread")
    return 1 if slower else 0


def _facts(dev: Device) -> dict[str, Any]:
    return next((info.facts for info in devices() if info.name == dev.name), {})


def _detail(dev: Device) -> str:
    return next((info.detail for info in devices() if info.name == dev.name), repr(dev))
