"""`python -m fp4rt verify`: random problems until one fails, and a small one that does."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp4rt import progress
from fp4rt.device import Device, NoKernelError, device

from .case import Case
from .draw import LIMITS, activation_kinds, random_case, shrink, variants
from .judge import Run, check


@dataclass(frozen=True)
class Failure:
    """The first problem that failed: its number, what was wrong, and a smaller one that fails."""

    number: int
    case: Case
    message: str
    smallest: Case
    smallest_message: str


@dataclass(frozen=True)
class Report:
    """What a run found.

    Attributes
    ----------
    passed
        Problems that were right.
    flops
        Multiplications and additions in them.
    exact
        How many held exact data.
    failure
        The first problem that was wrong, or None.
    """

    passed: int
    flops: int
    exact: int
    failure: Failure | None


def verify(
    dev: Device,
    *,
    cases: int | None = None,
    seed: int = 0,
    seconds: float = math.inf,
    variant: str | None = None,
    run: Run | None = None,
) -> Report:
    """Check random problems until one fails.

    Parameters
    ----------
    dev
        The device to test; the size of the problems goes by its kind.
    cases
        How many problems; default `Limits.cases`, or no limit if `seconds` is given.
    seed
        Problem i of a seed is the same in every run on the same kind of device.
    seconds
        Begin no problem after this time.
    variant
        A kernel variant by its short name, which then runs all of them; a batch-invariant problem
        leaves no choice, so there are none then.
    run
        What computes a result; default `multiply`.

    Examples
    --------
    >>> with device("cpu") as cpu:
    ...     report = verify(cpu, cases=5, seed=1)
    >>> report.passed, report.failure
    (5, None)
    """
    kind = dev.name.partition(":")[0]
    limits = LIMITS.get(kind, LIMITS["cpu"])
    if cases is None:
        cases = limits.cases if math.isinf(seconds) else sys.maxsize
    kinds = activation_kinds(dev)
    start = time.monotonic()
    flops = exact = number = 0
    while number < cases and time.monotonic() - start < seconds:
        case = random_case(np.random.default_rng((seed, number)), limits, kinds)
        if variant is not None:
            case = replace(case, variant=variant, batch_invariant=False)
        progress.show(f"problem {number}: {case.flops / 1e6:.1f} MFLOP")
        message = check(dev, case, run)
        if message is not None:
            return Report(number, flops, exact, _failure(dev, number, case, message, run))
        number += 1
        flops += case.flops
        exact += case.exact
    return Report(number, flops, exact, None)


def _failure(
    dev: Device,
    number: int,
    case: Case,
    message: str,
    run: Run | None,
) -> Failure:
    smallest = case
    if not message.startswith("DriverError"):  # after one of those, a device computes no more
        progress.show(f"problem {number} failed; looking for a smaller one")
        smallest = shrink(case, lambda smaller: check(dev, smaller, run) is not None)
    again = message if smallest is case else check(dev, smallest, run)
    return Failure(number, case, message, smallest, again or "(right when run once more)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--cases",
        type=_positive(int),
        metavar="N",
        help="problems to try (default: 1000, on an emulator 30)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="of the problems; default a new one, which is printed"
    )
    parser.add_argument(
        "--time", type=_positive(float), default=math.inf, metavar="SECONDS", help="stop after this"
    )
    parser.add_argument(
        "--variant", metavar="NAME", help="kernel variant for all of them, such as medium"
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="cuda:N, emulator:ARCH, cpu or auto (default); `info` lists those that are here",
    )


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return value

    return number


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 if a problem failed, 2 for a bad device or seed."""
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    if seed < 0:
        print(f"fp4rt verify: --seed must not be negative, got {seed}", file=sys.stderr)
        return 2
    try:
        dev = device(args.device)
    except ValueError as error:
        print(f"fp4rt verify: {error}", file=sys.stderr)
        return 2
    start = time.monotonic()
    with dev:
        try:
            activation_kinds(dev)
        except NoKernelError as error:
            print(f"fp4rt verify: {error}", file=sys.stderr)
            return 1
        if args.variant and args.variant not in (names := variants(dev)):
            print(
                f"fp4rt verify: {dev.name} has no variant {args.variant!r}; "
                + (
                    f"choose of {', '.join(names)}"
                    if names
                    else "variants are kernels, and it runs none; leave --variant out, or use "
                    "--device cuda:0 or emulator:sm_90a"
                ),
                file=sys.stderr,
            )
            return 2
        try:
            report = verify(
                dev, cases=args.cases, seed=seed, seconds=args.time, variant=args.variant
            )
        finally:
            progress.show("")
        print(
            f"{dev.name}: {report.passed} problems right ({report.exact} of them bit for bit), "
            f"{report.flops / 1e9:.1f} GFLOP in {time.monotonic() - start:.1f} s, seed {seed}"
        )
    if report.failure is None:
        return 0
    failure = report.failure
    print(
        f"problem {failure.number} FAILED: {failure.message}\n"
        f"smallest problem found that fails: {failure.smallest_message}\n"
        f"\n{failure.smallest.snippet(args.device)}"
    )
    return 1
