"""Self-test: random problems on a device against the oracle, and a small one where it fails.

``python -m fp4rt verify`` makes problems of odd shapes (ragged and list forms, empty groups, K from
16, every output type, alpha, 16-bit rows where the device takes them), runs each through a plan
whose output is poisoned with NaN, launched or replayed from a graph, and compares every element.

Half of the problems hold *exact* data: codes and powers of two whose every partial sum is a
multiple of 1/16 below 144 · K, so float32 holds it, the order of the sum can't matter, and the
result must be the oracle's, rounded once, bit for bit. The others hold *real* data, any codes with
scales over many powers of two, and must lie between ``oracle ± bound`` (`error_bound`), both ends
rounded to the output type; rounding never changes an order, so nothing right is refused.

A problem that fails is made smaller for as long as it still fails, and printed as a program.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from fp4rt import choice, progress, reference
from fp4rt.codes import round_to
from fp4rt.device import Device, DriverError, EmulatorFault, NoKernelError, device
from fp4rt.nvfp4 import Nvfp4Array, dequantize, stack
from fp4rt.plan import GroupedGemmPlan
from fp4rt.problem import OUT_DTYPES, Problem
from fp4rt.rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EXACT_K = 7280
"""Largest K at which 144 · K, in units of 1/16, stays below 2**24."""

ATTEMPTS = 300
"""Most problems that are tried to make a failing one smaller."""


# --- a problem ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One problem, all of it: the same fields give the same bytes on every machine.

    Parameters
    ----------
    sizes, shapes, seeds
        For each group: rows, (N, K), and what its data is drawn from. A group's first rows are the
        same whatever M and N are.
    ragged
        Whether rows are passed concatenated with group sizes (all shapes are equal then), or as
        lists.
    activations
        ``"nvfp4"``, ``"float16"`` or ``"bfloat16"``.
    out_dtype
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    exact
        Whether every partial sum is exact in float32.
    alpha
        One per group.
    batch_invariant
        As for `fp4rt.grouped_gemm`.
    graph
        Whether the launch is captured and replayed.
    variant
        The kernel variant that must run it, by its short name; None for the one that is chosen.

    Examples
    --------
    >>> case = Case(sizes=(2, 0), shapes=((3, 32), (3, 32)), seeds=(1, 2))
    >>> a, b = case.operands()
    >>> a.shape, b.shape, case.flops
    ((2, 32), (2, 3, 32), 384)
    """

    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    seeds: tuple[int, ...]
    ragged: bool = True
    activations: str = "nvfp4"
    out_dtype: str = "float16"
    exact: bool = True
    alpha: tuple[float, ...] = field(default=())
    batch_invariant: bool = False
    graph: bool = False
    variant: str | None = None

    def __post_init__(self) -> None:
        if not self.alpha:
            object.__setattr__(self, "alpha", (1.0,) * len(self.sizes))
        if not len(self.sizes) == len(self.shapes) == len(self.seeds) == len(self.alpha):
            raise ValueError("sizes, shapes, seeds and alpha must have one entry per group")
        if self.ragged and len(set(self.shapes)) != 1:
            raise ValueError(f"ragged groups need one shape and at least one group: {self.shapes}")

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return sum(2 * m * n * k for m, (n, k) in zip(self.sizes, self.shapes, strict=True))

    @property
    def elements(self) -> int:
        """Elements of A and B."""
        return sum((m + n) * k for m, (n, k) in zip(self.sizes, self.shapes, strict=True))

    @property
    def out_numpy(self) -> np.dtype[Any]:
        """The numpy dtype of the result."""
        return next(dtype for dtype in OUT_DTYPES if dtype.name == self.out_dtype)

    @property
    def group_sizes(self) -> tuple[int, ...] | None:
        """What goes with concatenated rows; None for lists."""
        return self.sizes if self.ragged else None

    def operands(self) -> tuple[Any, Any]:
        """Return A and B, as `fp4rt.grouped_gemm` takes them."""
        return self.joined(*self.groups())

    def joined(self, a: list[Rows], b: list[Nvfp4Array]) -> tuple[Any, Any]:
        """Return the operands that each group's A and B make up."""
        if not self.ragged:
            return a, b
        if self.activations != "nvfp4":
            return np.concatenate([np.asarray(rows) for rows in a]), stack(b)
        parts = [rows for rows in a if isinstance(rows, Nvfp4Array)]
        values = np.concatenate([rows.values for rows in parts])
        scales = np.concatenate([rows.scales.view(np.uint8) for rows in parts])
        return Nvfp4Array.from_parts(values, scales, parts[0].global_scale), stack(b)

    def groups(self) -> tuple[list[Rows], list[Nvfp4Array]]:
        """Return each group's A and B."""
        a: list[Rows] = []
        for m, (_, k), seed in zip(self.sizes, self.shapes, self.seeds, strict=True):
            rows_seed = (self.seeds[0], 9) if self.ragged else (seed, 9)  # the global scale's
            if self.activations == "nvfp4":
                a.append(_operand((seed, 0), rows_seed, m, k, self.exact))
            else:
                dtype = np.float16 if self.activations == "float16" else ml_dtypes.bfloat16
                rng = np.random.default_rng((seed, 0))
                a.append(
                    rng.integers(-8, 9, (m, k)).astype(dtype)
                    if self.exact
                    else rng.standard_normal((m, k)).astype(dtype)
                )
        b = [
            _operand((seed, 1), (seed, 8), n, k, self.exact)
            for (n, k), seed in zip(self.shapes, self.seeds, strict=True)
        ]
        return a, b

    def snippet(self, device_name: str) -> str:
        """Return a program that runs the problem and prints what is wrong."""
        return (
            "import fp4rt\n"
            "from fp4rt.verify import Case, check\n"
            "\n"
            f"case = {self!r}\n"
            f"with fp4rt.device({device_name!r}) as dev:\n"
            "    print(check(dev, case))  # None if right\n"
            "    a, b = case.operands()\n"
            "    print(fp4rt.grouped_gemm(\n"
            "        dev, a, b, case.group_sizes, alpha=case.alpha, out_dtype=case.out_numpy,\n"
            "        batch_invariant=case.batch_invariant,\n"
            "    ))\n"
        )


def _operand(
    seed: tuple[int, int], scale_seed: tuple[int, int], rows: int, k: int, exact: bool
) -> Nvfp4Array:
    """Random codes; scales are 1/2, 1 and 2 if `exact`, otherwise any from 2**-4 to 30."""
    values = np.random.default_rng((*seed, 0)).integers(0, 256, (rows, k // 2), dtype=np.uint8)
    choices = np.array([0x30, 0x38, 0x40] if exact else range(0x18, 0x60), np.uint8)
    picked = np.random.default_rng((*seed, 1)).integers(0, len(choices), (rows, k // 16))
    scale = np.random.default_rng(scale_seed).uniform(-3, 3)
    return Nvfp4Array.from_parts(
        values, choices[picked], np.float32(2.0 ** (round(scale) if exact else scale))
    )


# --- running and judging it ---------------------------------------------------------------------


def error_bound(a: Rows, b: Nvfp4Array, alpha: float) -> NDArray[np.float64]:
    """Return how far a float32 sum of the group's products may be from the exact one, (M, N).

    Products are exact: at most 11 + 6 significant bits. A matrix instruction aligns its products
    and the running sum (17 addends for every 16 of K at worst) to the largest and may cut each,
    which loses less than 2**-23 of a number that is at most S = Σ|a·b|; a sum in BLAS loses less.
    Eight more such steps cover partial sums of a split K, the float32 product of alpha and both
    global scales, and the multiplication by it. With u = 2**-23 and n = K + ⌈K / 16⌉ + 8, the
    error is at most ``n·u / (1 - n·u) · |alpha| · S`` (Higham, Accuracy and Stability, lemma 3.1).

    Examples
    --------
    >>> codes, scales = np.full((1, 8), 0x22, np.uint8), np.full((1, 1), 56, np.uint8)
    >>> one = Nvfp4Array.from_parts(codes, scales, 1)
    >>> round(float(error_bound(one, one, 1.0)[0, 0] / 2**-23))  # n = 25, S = 16
    400
    """
    magnitude_a, magnitude_b = (
        np.abs(dequantize(x, np.float64) if isinstance(x, Nvfp4Array) else x.astype(np.float64))
        for x in (a, b)
    )
    k = magnitude_a.shape[1]
    n = k + math.ceil(k / 16) + 8
    unit = n * 2.0**-23 / (1 - n * 2.0**-23)
    bound: NDArray[np.float64] = unit * abs(alpha) * (magnitude_a @ magnitude_b.T)
    return bound


def multiply(dev: Device, case: Case, a: Any, b: Any) -> list[NDArray[Any]]:
    """Run a case through a plan; the result is one array, or one per group.

    Where the result goes is filled with NaN first, on the device and on the host.
    """
    with GroupedGemmPlan(
        dev,
        b,
        max_m=sum(case.sizes),
        alpha=case.alpha,
        out_dtype=case.out_numpy,
        activations=case.activations,
        batch_invariant=case.batch_invariant,
        variant=case.variant,
    ) as plan:
        graph = plan.capture() if case.graph else None
        plan.set_inputs(a, case.group_sizes)
        plan.poison_output()
        if graph is None:
            plan.launch()
        else:
            graph.launch()
        if case.ragged:
            out = np.full((sum(case.sizes), case.shapes[0][0]), np.nan, case.out_numpy)
            plan.output(out)
            return [out]
        outs = [
            np.full((m, n), np.nan, case.out_numpy)
            for m, (n, _) in zip(case.sizes, case.shapes, strict=True)
        ]
        plan.output(outs)
        return outs


Run = Callable[[Device, Case, Any, Any], "list[NDArray[Any]]"]
"""Computes the result of a case from A and B, in the form of `multiply`."""


def check(dev: Device, case: Case, run: Run | None = None) -> str | None:
    """Return None if `run` (default `multiply`) gives the right result, otherwise what is wrong.

    A fault or an error of the device is a finding too, not an exception.

    Examples
    --------
    >>> case = Case(sizes=(3, 0, 2), shapes=((5, 48),) * 3, seeds=(1, 2, 3))
    >>> with device("cpu") as cpu:
    ...     print(check(cpu, case))
    None
    """
    a_groups, b_groups = case.groups()
    a, b = case.joined(a_groups, b_groups)
    try:
        results = (run or multiply)(dev, case, a, b)
    except (DriverError, EmulatorFault, ArithmeticError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if case.ragged:
        results = np.split(results[0], np.cumsum(case.sizes)[:-1])
    exact = reference.grouped_gemm(a_groups, b_groups, alpha=case.alpha)
    for g, (found, sums) in enumerate(zip(results, exact, strict=True)):
        if found.shape != sums.shape or found.dtype != case.out_numpy:
            return (
                f"group {g}: {found.dtype} {found.shape} instead of {case.out_dtype} {sums.shape}"
            )
        if case.exact:
            low = high = round_to(sums, case.out_numpy)
            unsigned = f"u{found.dtype.itemsize}"
            right = found.view(unsigned) == low.view(unsigned)
        else:
            bound = error_bound(a_groups[g], b_groups[g], case.alpha[g])
            low, high = (round_to(end, case.out_numpy) for end in (sums - bound, sums + bound))
            right = (found >= low) & (found <= high)
        if not right.all():
            row, column = (int(i) for i in np.argwhere(~right)[0])
            expected = f"{low[row, column]}"
            if not case.exact:
                expected = f"{low[row, column]} to {high[row, column]}"
            return (
                f"group {g} (rows {case.sizes[g]}, N, K {case.shapes[g]}): {(~right).sum()} of "
                f"{right.size} elements wrong; first ({row}, {column}) is {found[row, column]}, "
                f"expected {expected}"
            )
    return None


# --- making problems, and making them smaller ---------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """How large random problems get on a kind of device.

    Parameters
    ----------
    groups, rows, n, k
        What the largest of each is drawn from.
    cases
        How many problems are tried if the caller doesn't say.
    """

    groups: tuple[int, ...]
    rows: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    cases: int


LIMITS = {
    "cuda": Limits(
        (1, 1, 2, 3, 9, 70),
        (1, 9, 16, 40, 130, 300, 1500),
        (8, 70, 300, 600),
        (80, 640, 2240),
        1000,
    ),
    "emulator": Limits((1, 2, 3), (1, 9, 20), (8, 70), (48, 160), 30),
    "cpu": Limits((1, 2, 3, 9), (1, 9, 40, 130), (8, 70, 200), (80, 640), 1000),
}
MAX_FLOPS, MAX_ELEMENTS = 1e9, 2e6
"""Problems beyond these are drawn again: the host has to make and to compute them too."""


def random_case(rng: np.random.Generator, limits: Limits, kinds: tuple[str, ...]) -> Case:
    """Draw a problem; `kinds` are the activations that the device takes."""
    while True:
        case = _draw(rng, limits, kinds)
        if case.flops <= MAX_FLOPS and case.elements <= MAX_ELEMENTS:
            return case


def _draw(rng: np.random.Generator, limits: Limits, kinds: tuple[str, ...]) -> Case:
    groups = int(rng.choice(limits.groups))
    ragged = bool(rng.random() < 0.6)
    if not ragged and rng.random() < 0.02:
        groups = 0
    most_rows, most_n, most_k = (int(rng.choice(c)) for c in (limits.rows, limits.n, limits.k))
    empty = rng.random(groups) < rng.choice([0.0, 0.2, 0.2, 0.9])
    sizes = np.where(empty, 0, rng.integers(1, most_rows + 1, groups))
    n = rng.integers(1, most_n + 1, groups)
    if rng.random() < 0.05:
        n[:1] = 0
    k = 16 * rng.integers(1, most_k // 16 + 1, groups)
    if ragged:
        n[:], k[:] = n[0], k[0]
    exact = bool(rng.random() < 0.5)
    alpha = rng.choice([0.5, 1, 2, -1], groups) if exact else rng.uniform(-2, 2, groups)
    return Case(
        sizes=tuple(int(m) for m in sizes),
        shapes=tuple((int(i), int(j)) for i, j in zip(n, k, strict=True)),
        seeds=tuple(int(s) for s in rng.integers(0, 2**31, groups)),
        ragged=ragged,
        activations=str(rng.choice(kinds)) if groups else "nvfp4",
        out_dtype=str(rng.choice([dtype.name for dtype in OUT_DTYPES])),
        exact=exact,
        alpha=tuple(float(x) for x in alpha),
        batch_invariant=bool(rng.random() < 0.2),
        graph=bool(rng.random() < 0.3),
    )


def activation_kinds(dev: Device) -> tuple[str, ...]:
    """Return the activations that `dev` takes."""
    found = []
    for kind in ("nvfp4", "float16", "bfloat16"):
        try:
            if dev.image_kind is not None:
                problem = Problem(((16, 16),), 1, kind, "float16")
                choice.choose(dev.arch, dev.sm_count, problem)
        except NoKernelError:
            continue
        found.append(kind)
    return tuple(found)


def variants(dev: Device) -> tuple[str, ...]:
    """Return the short names of the kernel variants of `dev`.

    Examples
    --------
    >>> with device("cpu") as cpu:
    ...     variants(cpu)
    ()
    """
    if dev.image_kind is None:
        return ()
    problem = Problem(((16, 16),), 1, "nvfp4", "float16")
    found = choice.candidates(dev.arch, dev.sm_count, problem)
    return tuple(choice.short_name(each.variant) for each in found)


def shrink(case: Case, fails: Callable[[Case], bool], attempts: int = ATTEMPTS) -> Case:
    """Return a smaller case that still fails: fewer groups, then smaller M, N, K, then plainer.

    Parameters
    ----------
    case
        One that fails.
    fails
        Whether a case does.
    attempts
        Most calls of `fails`.

    Examples
    --------
    >>> case = Case(sizes=(9, 40), shapes=((64, 96),) * 2, seeds=(1, 2), out_dtype="bfloat16")
    >>> shrink(case, lambda c: max(c.sizes) >= 7)
    Case(sizes=(7,), shapes=((0, 16),), seeds=(1,), ragged=True, activations='nvfp4', \
out_dtype='float32', exact=True, alpha=(1.0,), batch_invariant=False, graph=False, variant=None)
    """
    while True:
        for smaller in itertools.islice(_smaller(case), attempts):
            attempts -= 1
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases next to `case`, the greatest reductions first."""
    groups = range(len(case.sizes))
    least = 1 if case.ragged else 0
    half = len(groups) // 2
    for keep in (groups[:half], groups[half:], *(_without(groups, g) for g in groups)):
        if least <= len(keep) < len(groups):
            yield replace(
                case,
                sizes=tuple(case.sizes[g] for g in keep),
                shapes=tuple(case.shapes[g] for g in keep),
                seeds=tuple(case.seeds[g] for g in keep),
                alpha=tuple(case.alpha[g] for g in keep) or (),
            )
    for g in groups:
        for m in _lower(case.sizes[g], 0):
            yield replace(case, sizes=_with(case.sizes, g, m))
    for g in groups[:1] if case.ragged else groups:
        n, k = case.shapes[g]
        for shape in (
            *((lower, k) for lower in _lower(n, 0)),
            *((n, 16 * lower) for lower in _lower(k // 16, 1)),
        ):
            shapes = (shape,) * len(groups) if case.ragged else _with(case.shapes, g, shape)
            yield replace(case, shapes=shapes)
    plainer: dict[str, Any]
    for plainer in (
        {"alpha": (1.0,) * len(groups)},
        {"graph": False},
        {"variant": None},
        {"batch_invariant": False},
        {"out_dtype": "float32"},
        {"activations": "nvfp4"},
        {"exact": True},
    ):
        simpler = replace(case, **plainer)
        if simpler != case:
            yield simpler


def _lower(value: int, least: int) -> Iterator[int]:
    """Half, three quarters and one less of `value`, each once, not below `least`."""
    yield from sorted({x for x in (value // 2, value * 3 // 4, value - 1) if least <= x < value})


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _without(groups: range, index: int) -> list[int]:
    return [g for g in groups if g != index]


# --- the command --------------------------------------------------------------------------------


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
