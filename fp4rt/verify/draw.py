"""Random problems, and smaller ones next to a problem that fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp4rt import choice
from fp4rt.device import Device, NoKernelError
from fp4rt.problem import OUT_DTYPES, Problem

from .case import Case

ATTEMPTS = 300
"""Most problems that are tried to make a failing one smaller."""


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
    """Return the activations that `dev` takes.

    Raises
    ------
    NoKernelError
        If there is no kernel for it at all.
    """
    found: list[str] = []
    missing: NoKernelError | None = None
    for kind in ("nvfp4", "float16", "bfloat16"):
        try:
            if dev.image_kind is not None:
                problem = Problem(((16, 16),), 1, kind, "float16")
                choice.choose(dev.arch, dev.sm_count, problem)
        except NoKernelError as error:
            missing = error
            continue
        found.append(kind)
    if missing is not None and not found:
        raise missing
    return tuple(found)


def variants(dev: Device) -> tuple[str, ...]:
    """Return the short names of the kernel variants of `dev`.

    Examples
    --------
    >>> from fp4rt.device import device
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
