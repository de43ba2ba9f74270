"""Which variant runs a problem, and how it is launched: a pure function of the problem.

Group sizes are not part of a `Problem` (they may change from launch to launch), so the choice goes
by the average rows of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fp4rt import model
from fp4rt.abi import image_arch
from fp4rt.device import NoKernelError
from fp4rt.problem import Problem


@dataclass(frozen=True)
class Choice:
    """A variant and its launch shape.

    Parameters
    ----------
    variant
        Name in `fp4rt.abi.VARIANTS`.
    max_tile_rows
        Most rows of A in a tile, a multiple of 8.
    grid, prepare_grid
        CTAs of grouped_gemm, and of prepare where the variant has one.
    """

    variant: str
    max_tile_rows: int
    grid: int
    prepare_grid: int


SKINNY_ROWS = 16
"""Average rows of a group up to which Hopper's skinny variants win, and their tiles' height."""


LARGE_ROWS = 64
"""Average rows of a group up to which two teams on every SM win."""


def choose(arch: str, sm_count: int, problem: Problem) -> Choice:
    """Return the variant for a problem.

    Parameters
    ----------
    arch
        Of the device or of its images, in any spelling of `fp4rt.abi.image_arch`.
    sm_count
        Multiprocessors of the device.
    problem
        What is to be computed.

    Raises
    ------
    NoKernelError
        If no kernel takes the problem.

    Examples
    --------
    >>> decode = Problem(((4096, 7168),) * 32, 32, "nvfp4", "float16")
    >>> choose("sm_90a", 132, decode).variant
    'grouped_gemm_sm_90a_skinny'
    """
    image = image_arch(arch)
    if image == "sm_90a":
        return _choose_hopper(sm_count, problem)
    if image == "sm_100f":
        return _choose_blackwell(sm_count, problem)
    raise NoKernelError(f"fp4rt has no grouped GEMM kernel for {arch}; use device 'cpu'")


def candidates(arch: str, sm_count: int, problem: Problem) -> tuple[Choice, ...]:
    """Return every variant that takes the problem, launched as it would be if it were chosen.

    The first is the one that `choose` returns; parameters and errors are the same.

    Examples
    --------
    >>> one = Problem(((4096, 4096),), 4096, "nvfp4", "float16")
    >>> [c.variant.removeprefix("grouped_gemm_sm_90a_") for c in candidates("sm_90a", 132, one)]
    ['medium', 'large', 'skinny', 'skinny_split']
    """
    chosen = choose(arch, sm_count, problem)
    if image_arch(arch) == "sm_90a":
        names = ("medium", "large") if problem.batch_invariant else _HOPPER
        found = [_hopper(name, sm_count, problem) for name in names]
    else:
        found = [
            _blackwell([shape], sm_count, problem)
            for shape in _blackwell_shapes(problem)
            if shape.cluster <= sm_count
        ]
    return (chosen, *(c for c in found if c.variant != chosen.variant))


def short_name(variant: str) -> str:
    """Return a variant's name without architecture and type of activations.

    Examples
    --------
    >>> short_name("grouped_gemm_sm_90a_medium_bf16"), short_name("grouped_gemm_sm_100f_pair_n256")
    ('medium', 'pair_n256')
    """
    return variant.split("_", 4)[4].removesuffix("_bf16")


def forced(name: str, arch: str, sm_count: int, problem: Problem) -> Choice:
    """Return the candidate with that `short_name`; NoKernelError lists those that there are.

    Examples
    --------
    >>> one = Problem(((4096, 4096),), 4096, "nvfp4", "float16")
    >>> forced("skinny", "sm_90a", 132, one).variant
    'grouped_gemm_sm_90a_skinny'
    """
    found = {short_name(c.variant): c for c in candidates(arch, sm_count, problem)}
    if name not in found:
        raise NoKernelError(
            f"no variant {name!r} takes this problem on {arch}; choose of {', '.join(found)}"
        )
    return found[name]


_HOPPER = ("medium", "large", "skinny", "skinny_split")


def _choose_hopper(sm_count: int, problem: Problem) -> Choice:
    rows = problem.max_m / max(problem.num_groups, 1)
    if rows <= SKINNY_ROWS and not problem.batch_invariant:
        tiles = sum(-(-n // 256) for n, _ in problem.shapes)
        return _hopper("skinny_split" if tiles <= sm_count // 2 else "skinny", sm_count, problem)
    return _hopper("large" if rows <= LARGE_ROWS else "medium", sm_count, problem)


def _hopper(name: str, sm_count: int, problem: Problem) -> Choice:
    """How a variant is launched."""
    grid, height = sm_count, SKINNY_ROWS
    if name == "skinny_split":
        grid = max(sm_count // 2 * 2, 2)
    elif name == "large":
        height = 128
    elif name == "medium":
        height = _medium_tile_rows(sm_count, problem)
    suffix = "_bf16" if problem.activations == "bfloat16" else ""
    variant = f"grouped_gemm_sm_90a_{name}{suffix}"
    return Choice(variant, height, grid, _prepare_grid(sm_count, problem))


def _medium_tile_rows(sm_count: int, problem: Problem) -> int:
    """Height that fills the SMs best if groups have equal sizes: rounds of tiles × time of one.

    A step of 64 K of a tile takes about the longer of decoding the weights, 205 + 1.2 · rows, and
    of the matrix work, 40 + 2.45 · rows (ns, measured on an H200).
    """
    size = max(math.ceil(problem.max_m / max(problem.num_groups, 1)), 1)
    blocks = sum(-(-n // 128) for n, _ in problem.shapes)
    best, best_time = 256, math.inf
    for parts in range(math.ceil(size / 256), math.ceil(size / 8) + 1):
        rows = model.tile_rows(size, math.ceil(math.ceil(size / parts) / 8) * 8)
        step = max(205 + 1.2 * rows, 40 + 2.45 * rows)
        time = math.ceil(blocks * math.ceil(size / rows) / sm_count) * step
        if time < best_time:
            # The lowest count of parts that is best may use the whole height: groups differ.
            best, best_time = (256 if parts == math.ceil(size / 256) else rows), time
    return best


def _prepare_grid(sm_count: int, problem: Problem) -> int:
    """CTAs of Hopper's `prepare`: a warp for every 8 rows × 256 K, at most three CTAs a SM.

    No more than needed, and half of the SMs rather than all: grouped_gemm starts early on those
    that are left free.
    """
    max_k = max((k for _, k in problem.shapes), default=0)
    items = (math.ceil(problem.max_m / 8) + problem.num_groups) * math.ceil(max_k / 256)
    needed = max(math.ceil(items / 8), 1)
    return max(min(needed, sm_count // 2), 1) if needed <= sm_count else min(needed, 3 * sm_count)


def _choose_blackwell(sm_count: int, problem: Problem) -> Choice:
    if problem.activations != "nvfp4":
        raise NoKernelError(
            f"there is no Blackwell kernel for {problem.activations} activations; quantize them: "
            "fp4rt.quantize(a)"
        )
    return _blackwell(_blackwell_shapes(problem), sm_count, problem)


def _blackwell_shapes(problem: Problem) -> list[model.TileShape]:
    return [v for v in model.variants() if v.splits == 1 or not problem.batch_invariant]


def _blackwell(shapes: list[model.TileShape], sm_count: int, problem: Problem) -> Choice:
    """The fastest of `shapes`, as the model predicts."""
    sizes = model.typical_sizes(problem.max_m, problem.num_groups)
    out_bytes = 4 if problem.out_dtype == "float32" else 2
    machine = replace(model.B200, sm_count=sm_count)
    found = model.best(sizes, problem.shapes, machine, candidates=shapes, out_bytes=out_bytes)
    grid = sm_count // found.shape.cluster * found.shape.cluster
    return Choice(found.shape.name, found.max_rows, grid, prepare_grid=0)
