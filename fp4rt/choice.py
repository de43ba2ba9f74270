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
        CTAs of grouped_gemm and of prepare.
    """

    variant: str
    max_tile_rows: int
    grid: int
    prepare_grid: int


SKINNY_ROWS = 16
"""Average rows of a group up to which Hopper's skinny variants win, and their tiles' height."""


LARGE_ROWS = 512
"""Average rows of a group from which two teams on every SM win."""


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


def _choose_hopper(sm_count: int, problem: Problem) -> Choice:
    rows = problem.max_m / max(problem.num_groups, 1)
    suffix = "_bf16" if problem.activations == "bfloat16" else ""
    prepare_grid = _prepare_grid(sm_count, problem)
    if rows <= SKINNY_ROWS and not problem.batch_invariant:
        tiles = sum(-(-n // 256) for n, _ in problem.shapes)
        name = "skinny_split" if tiles <= sm_count // 2 else "skinny"
        grid = max(sm_count // 2 * 2, 2) if name == "skinny_split" else sm_count
        return Choice(f"grouped_gemm_sm_90a_{name}{suffix}", SKINNY_ROWS, grid, prepare_grid)
    if rows >= LARGE_ROWS:
        return Choice(f"grouped_gemm_sm_90a_large{suffix}", 128, sm_count, prepare_grid)
    height = _medium_tile_rows(sm_count, problem)
    return Choice(f"grouped_gemm_sm_90a_medium{suffix}", height, sm_count, prepare_grid)


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
    """CTAs of Hopper's `prepare`: a warp for every 8 rows × 512 K, at most three CTAs a SM.

    No more than needed: grouped_gemm starts early on the SMs that are left free.
    """
    max_k = max((k for _, k in problem.shapes), default=0)
    items = (math.ceil(problem.max_m / 8) + problem.num_groups) * math.ceil(max_k / 512)
    return min(max(math.ceil(items / 8), 1), 3 * sm_count)


def _choose_blackwell(sm_count: int, problem: Problem) -> Choice:
    if problem.activations != "nvfp4":
        raise NoKernelError(
            f"there is no Blackwell kernel for {problem.activations} activations; quantize them: "
            "fp4rt.quantize(a)"
        )
    sizes = model.typical_sizes(problem.max_m, problem.num_groups)
    out_bytes = 4 if problem.out_dtype == "float32" else 2
    machine = replace(model.B200, sm_count=sm_count)
    candidates = [v for v in model.variants() if v.splits == 1 or not problem.batch_invariant]
    found = model.best(sizes, problem.shapes, machine, candidates=candidates, out_bytes=out_bytes)
    grid = sm_count // found.shape.cluster * found.shape.cluster
    return Choice(found.shape.name, found.max_rows, grid, sm_count)
