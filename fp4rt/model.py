"""A prediction, not a measurement: how long a Blackwell variant takes, from its schedule.

No Blackwell GPU was available to this project. What is known of a B200 from public sources (bytes
per second, SMs, cycles of a matrix instruction by shape) is put together here with the schedule
that the kernel really follows (`fp4rt.model.tiles` repeats ``common/group_scheduler.cuh``), and
gives for each variant the time of the busiest resource:

- a *stage* (256 of K) of a tile costs an SM the longest of its matrix instructions, of bringing
  its bytes into shared memory, and of its share of the way there, which a ring of stages takes at
  a time;
- a tile costs the longer of its stages and of the epilogue of the tile before, which overlap;
- CTAs take tiles in rounds that run into each other: they cost the longer of the busiest CTA's
  work and of the DRAM traffic. Traffic of the last, partial round stands alone;
- launch, first read of a table, first bytes, last matrix instruction and last epilogue overlap with
  nothing.

The figures that no source confirms are marked as assumed in `Machine`. The same arithmetic with
other figures describes other kernels: `REFERENCE_TILE` is the starting point that the public
competition kernels have in common, 128×128 tiles whatever the group's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp4rt.abi import VARIANTS, Variant

BLOCK_K = 256
BOX_ROWS = 32
ARCH = "sm_100f"

SHAPE_SETS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "S1": ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168),
    "S2": ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048),
    "S3": ((192, 320), 3072, 4096),
    "S4": ((128, 384), 4096, 1536),
    "P1": ((1024,) * 8, 4096, 7168),
    "D1": ((1,) * 32, 4096, 7168),
    "D2": (tuple(1 + g % 16 for g in range(32)), 4096, 7168),
    "G1": ((4096,), 4096, 4096),
    "G2": ((16,), 8192, 8192),
}
"""Name -> (rows of each group, N, K). D2's 1 to 16 rows are taken in turn."""


@dataclass(frozen=True)
class Machine:
    """What the model knows of a GPU.

    Parameters
    ----------
    sm_count
        Multiprocessors; the kernel starts one CTA on each.
    clock
        Hz of the SMs under load.
    dram
        Bytes per second. 7.68e12 is what the competition's own speed of light implies for B200.
    ingest
        Bytes per clock that one SM takes in from L2 (assumed: the figure of earlier generations).
    launch
        Seconds of a launch with nothing to do (for B200 assumed: as measured on an H200).
    table_cycles
        From the start of a CTA to asking for its first bytes: one trip to L2 or DRAM (assumed).
        fp4rt's kernels read the groups' sizes and shapes; the starting point fetches the tensor
        map of the tile's group, which it keeps in device memory. A kernel in front hides it.
    load_cycles
        From asking for the first bytes to having them (assumed).
    mma_latency_cycles
        Of one isolated matrix instruction, N = 128.
    epilogue_cycles
        Per column of an accumulator of 128 lanes: Tensor Memory load, conversion, store (assumed
        from the compiled kernels: a warp issues 4 instructions a column where rows of D are
        stored in 16-byte pieces; 7 where they are not aligned).
    exchange_cycles
        For handing sums from one CTA of a cluster to another, on top of a store each (assumed).
    prepare, expand
        Seconds that a kernel in front adds, where there is one, and bytes per second at which it
        expands A to fp16.
    """

    name: str
    sm_count: int
    clock: float
    dram: float
    ingest: float
    launch: float
    table_cycles: float
    load_cycles: float
    mma_latency_cycles: float
    epilogue_cycles: float
    exchange_cycles: float = 1000.0
    prepare: float = 0.0
    expand: float = math.inf


B200 = Machine(
    name="B200",
    sm_count=148,
    clock=1.85e9,
    dram=7.68e12,
    ingest=64.0,
    launch=2.2e-6,
    table_cycles=800.0,
    load_cycles=1500.0,
    mma_latency_cycles=201.0,
    epilogue_cycles=4.0,
)


H200 = Machine(
    name="H200",
    sm_count=132,
    clock=1.65e9,
    dram=4.617e12,
    ingest=64.0,
    launch=2.2e-6,
    table_cycles=800.0,
    load_cycles=1500.0,
    mma_latency_cycles=150.0,
    epilogue_cycles=5.0,
    prepare=1.3e-6,
    expand=3.1e12,
)
"""Reads of DRAM, launch, prepare and expansion of A were measured on an H200, each by itself: both
kernels take 3.5 µs with nothing to do, `prepare` adds 1.3 µs to small problems and expands A of P1
(150 MB read and written) in 48 µs. The clock matters to fill and epilogue only."""


def mma_cycles(n: NDArray[np.int64], ctas: int = 1) -> NDArray[np.float64]:
    """Return SM cycles of one K = 64 FP4 matrix instruction with M = 128 rows in each CTA.

    Below N = 128, reading the 128 rows of M at 128 bytes per clock is the limit; a pair of CTAs
    reads half of N each (fits the published B200 measurements of
    SemiAnalysisAI/microbench-blackwell).

    Examples
    --------
    >>> mma_cycles(np.array([64, 96, 128])).tolist()
    [48.0, 56.0, 64.0]
    """
    least = 32.0 if ctas == 1 else 27.5
    return np.asarray(np.where(n > 0, np.maximum(n / 2, n / 4 + least), 0.0))


@dataclass(frozen=True)
class TileShape:
    """What a variant does with a tile.

    Parameters
    ----------
    name
        The variant's.
    tokens_on_m
        Whether rows of A are the 128-row operand, instead of weights.
    tile_n
        Most rows of the other operand.
    stages
        Depth of the ring in shared memory.
    ctas
        CTAs that multiply a tile together: 2 have 128 weight rows and half of the tokens each.
    splits
        CTAs that share a tile along K and add up their results.
    padded
        Whether a tile is always multiplied, and its tokens loaded, at full size.
    back_and_forth
        Whether every other round gives its tiles to the CTAs in reverse order.
    m_rows
        Rows of the first operand in a CTA.
    teams
        Tiles that an SM works on at a time.
    step_ns
        For a kernel that is not limited by loads or by the matrix unit alone: measured ns of 64 K
        of a tile as (per row, constant), the longest of these. It replaces both.
    expands
        Whether a kernel in front expands A to fp16.
    """

    name: str
    tokens_on_m: bool
    tile_n: int
    stages: int
    ctas: int = 1
    splits: int = 1
    padded: bool = False
    back_and_forth: bool = True
    m_rows: int = 128
    teams: int = 1
    step_ns: tuple[tuple[float, float], ...] = ()
    expands: bool = False

    @classmethod
    def of(cls, variant: Variant) -> TileShape:
        """Read the shape from a variant's macros."""
        macros = variant.macros
        return cls(
            variant.name,
            tokens_on_m=bool(macros["TOKENS_ON_M"]),
            tile_n=macros["TILE_N"],
            stages=macros["STAGES"],
            ctas=macros["CTAS"],
            splits=macros["SPLITS"],
        )

    @property
    def cluster(self) -> int:
        """CTAs that work on one tile."""
        return self.ctas * self.splits

    @property
    def columns(self) -> int:
        """Columns of D in a tile."""
        return self.tile_n if self.tokens_on_m else self.m_rows * self.ctas

    @property
    def max_rows(self) -> int:
        """Most rows of D in a tile."""
        return self.m_rows if self.tokens_on_m else self.tile_n


REFERENCE_TILE = TileShape(
    "128×128 tiles, persistent", True, 128, 6, padded=True, back_and_forth=False
)
"""The starting point: full 128×128 tiles, tokens on M, 148 CTAs, scales swizzled beforehand."""


def variants() -> tuple[TileShape, ...]:
    """Return the shape of every Blackwell variant."""
    return tuple(TileShape.of(v) for v in VARIANTS if v.arch == ARCH and "TILE_N" in v.macros)


def _hopper(
    name: str,
    rows: int,
    stages: int,
    *steps: tuple[float, float],
    m_rows: int = 128,
    teams: int = 1,
) -> TileShape:
    return TileShape(
        name,
        tokens_on_m=False,
        tile_n=rows,
        stages=stages,
        back_and_forth=False,
        m_rows=m_rows,
        teams=teams,
        step_ns=steps,
        expands=True,
    )


HOPPER = {
    "medium": _hopper("Hopper, medium", 256, 5, (1.2, 205.0), (2.45, 40.0)),
    "large": _hopper("Hopper, large", 128, 5, (3.05, 295.0), teams=2),
    "skinny": _hopper("Hopper, skinny", 16, 5, (0.0, 0.0), m_rows=256),
}
"""Hopper's kernels, to check rounds, bytes and fixed costs on hardware. A step of 64 K was measured
for tiles of 32 to 128 rows on every SM (medium and large; skinny is taken to cost nothing but its
bytes)."""


@dataclass(frozen=True)
class Tiles:
    """Tiles in the order in which CTAs take them; every field has one entry per tile.

    ``rows`` and ``columns`` of D, ``k`` elements, and whether the tile is the first of its group to
    read its weights, or its rows of A.
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    k: NDArray[np.int64]
    first_of_weights: NDArray[np.bool_]
    first_of_rows: NDArray[np.bool_]


def tile_rows(size: int, max_rows: int) -> int:
    """Return the height of a group's token tiles: equal, a multiple of 8, at most `max_rows`.

    Examples
    --------
    >>> [tile_rows(size, 128) for size in (1, 80, 176, 248)]
    [8, 80, 88, 128]
    """
    return math.ceil(math.ceil(size / math.ceil(size / max_rows)) / 8) * 8


def tiles(
    sizes: Sequence[int], shapes: Sequence[tuple[int, int]], shape: TileShape, max_rows: int
) -> Tiles:
    """Cut every group into tiles, tallest first, as the kernel's scheduler numbers them.

    Parameters
    ----------
    sizes
        Rows of each group.
    shapes
        (N, K) of each group.
    shape
        The variant's tile.
    max_rows
        Most rows in a tile, a multiple of 8 and at most ``shape.max_rows``.
    """
    groups = [
        (shape.max_rows if shape.padded else tile_rows(size, max_rows), size, n, k)
        for size, (n, k) in zip(sizes, shapes, strict=True)
        if size > 0 and n > 0
    ]
    groups.sort(key=lambda group: -group[0])
    height, size, n, k = (
        (np.array(column, np.int64) for column in zip(*groups, strict=True))
        if (groups)
        else (np.zeros(0, np.int64),) * 4
    )
    token_tiles, column_tiles = -(-size // height), -(-n // shape.columns)
    count = token_tiles * column_tiles
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    height, size, n, k, token_tiles = (
        np.repeat(v, count) for v in (height, size, n, k, token_tiles)
    )
    column, token = within // token_tiles, within % token_tiles
    return Tiles(
        rows=np.minimum(height, size - token * height),
        columns=np.minimum(shape.columns, n - column * shape.columns),
        k=k,
        first_of_weights=token == 0,
        first_of_rows=column == 0,
    )


@dataclass(frozen=True)
class Prediction:
    """What the model says about one variant and problem.

    Attributes
    ----------
    shape, max_rows
        The variant's tile, and the most rows that a tile was given.
    seconds
        Predicted time of one launch, a kernel in front included.
    balanced
        The same if the SMs' work could be spread over them evenly, to the last clock: the least
        that cutting tiles of the last round, or along K, could give.
    tiles, rounds
        Number of tiles; tiles of the busiest CTA.
    dram_bytes, shared_bytes
        Traffic with DRAM (each operand and the result once), and into shared memory.
    mma_share
        Part of the time in which an average SM multiplies.
    bound
        What the full rounds wait for: ``"DRAM"``, ``"shared memory"`` or ``"MMA"``.
    """

    shape: TileShape
    max_rows: int
    seconds: float
    balanced: float
    tiles: int
    rounds: int
    dram_bytes: int
    shared_bytes: int
    mma_share: float
    bound: str


def _ceil(value: NDArray[np.int64], to: int) -> NDArray[np.int64]:
    return -(-value // to) * to


def predict(
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    shape: TileShape,
    machine: Machine = B200,
    *,
    max_rows: int | None = None,
    out_bytes: int = 2,
) -> Prediction:
    """Predict the time of one grouped GEMM.

    Parameters
    ----------
    sizes, shapes
        Rows, and (N, K), of each group.
    shape
        The variant's tile, or `REFERENCE_TILE`.
    machine
        The GPU.
    max_rows
        Most rows in a tile; default, what the variant can take.
    out_bytes
        Bytes of an element of D.

    Examples
    --------
    >>> sizes, n, k = SHAPE_SETS["S1"]
    >>> p = predict(sizes, [(n, k)] * len(sizes), REFERENCE_TILE)
    >>> p.tiles, p.rounds, p.bound
    (352, 3, 'shared memory')
    """
    max_rows = max_rows or shape.max_rows
    t = tiles(sizes, shapes, shape, max_rows)
    rows = np.full_like(t.rows, shape.max_rows) if shape.padded else t.rows
    n_total = _ceil(t.columns if shape.tokens_on_m else rows, 8 * shape.ctas)
    unit = min(shape.tile_n, 128)
    units = -(-n_total // unit)
    # With a split along K, CTA 0 has the largest share, of whole blocks.
    k_padded = _ceil(-(-t.k // BLOCK_K), shape.splits) // shape.splits * BLOCK_K
    atoms = -(-np.minimum(t.k, k_padded) // 64)
    full_unit, last_unit = np.full_like(units, unit), n_total - (units - 1) * unit
    mma = atoms * (
        (units - 1) * mma_cycles(full_unit, shape.ctas) + mma_cycles(last_unit, shape.ctas)
    )
    # Rows that one CTA brings in: values of its own share, scales of all tokens.
    if shape.tokens_on_m:
        weight_rows, token_rows = min(128, shape.columns) * units, np.full_like(rows, 128)
    else:
        weight_rows = np.full_like(rows, 128)
        token_rows = _ceil(full_unit // shape.ctas, BOX_ROWS) * (units - 1)
        token_rows = token_rows + _ceil(last_unit // shape.ctas, BOX_ROWS)
    shared = (weight_rows + token_rows) * k_padded // 2
    shared = shared + _ceil(weight_rows, 128) * k_padded // 16
    shared = shared + rows * _ceil(k_padded, 2 * BLOCK_K) // 16  # whole sectors of L2
    # A ring of stages is under way at once, and lasts no shorter than the way takes.
    ring = k_padded / BLOCK_K * machine.load_cycles / shape.stages
    stages = np.maximum.reduce([mma, shared / machine.ingest, ring])
    if shape.step_ns:
        step = np.maximum.reduce([per_row * n_total + least for per_row, least in shape.step_ns])
        stages = atoms * step * 1e-9 * machine.clock
    epilogue = machine.epilogue_cycles * n_total * shape.splits
    if shape.splits > 1:
        epilogue = epilogue + machine.exchange_cycles
    work = np.maximum(stages, epilogue) / machine.clock
    dram = (
        np.where(t.first_of_weights, t.columns * t.k * 9 // 16, 0)
        + np.where(t.first_of_rows, t.rows * t.k * 9 // 16, 0)
        + t.rows * t.columns * out_bytes
    )
    grid = machine.sm_count * shape.teams // shape.cluster
    rounds, full = -(-len(work) // grid), len(work) // grid * grid
    busy = np.zeros((rounds, grid))
    busy.reshape(-1)[: len(work)] = work
    if shape.back_and_forth:
        busy[1::2] = busy[1::2, ::-1]
    busiest = float(busy.sum(axis=0).max(initial=0.0))
    moved = float(dram[:full].sum()) / machine.dram
    if full < len(work):
        moved += max(float(work[full:].max()), float(dram[full:].sum()) / machine.dram)
    seconds = max(busiest, moved)
    balanced = max(float(work.sum()) / grid, float(dram.sum()) / machine.dram)
    last = float(epilogue[-1]) if len(work) else 0.0
    idle = (machine.load_cycles + machine.mma_latency_cycles + last) / machine.clock
    fixed = machine.launch
    if shape.expands:
        fixed += machine.prepare
        fixed += float((t.rows * t.k * t.first_of_rows).sum()) * (9 / 16 + 2) / machine.expand
    elif len(work):
        fixed += machine.table_cycles / machine.clock
    if len(work):
        fixed += idle
    total = fixed + seconds
    limits = {
        "DRAM": float(dram.sum()) / machine.dram * grid,
        "shared memory": float(shared.sum()) / machine.ingest / machine.clock,
        "MMA": float(mma.sum()) / machine.clock,
    }
    return Prediction(
        shape=shape,
        max_rows=max_rows,
        seconds=total,
        balanced=fixed + balanced,
        tiles=len(work),
        rounds=rounds,
        dram_bytes=int(dram.sum()),
        shared_bytes=int(shared.sum()) * shape.cluster,
        mma_share=limits["MMA"] / grid / total,
        bound=max(limits, key=lambda name: limits[name]),
    )


def speed_of_light(
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    machine: Machine = B200,
    *,
    out_bytes: int = 2,
) -> float:
    """Return seconds for moving every operand and the result once, or multiplying, if longer.

    The rate of multiplication is that of full N = 128 instructions at the machine's clock.

    Examples
    --------
    >>> sizes, n, k = SHAPE_SETS["S1"]
    >>> round(speed_of_light(sizes, [(n, k)] * len(sizes)) * 1e6, 3)
    18.833
    """
    groups = [(m, n, k) for m, (n, k) in zip(sizes, shapes, strict=True) if m > 0]
    moved = sum((m + n) * k * 9 / 16 + m * n * out_bytes for m, n, k in groups)
    per_clock = 128 * 128 * 64 / float(mma_cycles(np.array(128)))
    products = sum(m * n * k for m, n, k in groups)
    return max(moved / machine.dram, products / (per_clock * machine.sm_count * machine.clock))


def _rank(p: Prediction) -> tuple[int, int]:
    """Picoseconds, then bytes into shared memory."""
    return round(p.seconds * 1e12), p.shared_bytes


def best(
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    machine: Machine = B200,
    *,
    candidates: Iterable[TileShape] | None = None,
    out_bytes: int = 2,
) -> Prediction:
    """Return the prediction of the fastest variant and tile height.

    Every candidate is tried with its full height and with heights that cut the largest groups into
    more tiles, which can fill a last round. Of equals the one that brings the fewest bytes into
    shared memory wins, then the earlier; variants that need more SMs than there are do not count.

    Examples
    --------
    >>> best([1] * 32, [(4096, 7168)] * 32).shape.name
    'grouped_gemm_sm_100f_n32'
    """
    found: Prediction | None = None
    for shape in variants() if candidates is None else candidates:
        if shape.cluster > machine.sm_count:
            continue
        heights = {shape.max_rows}
        largest = max(sizes, default=0)
        for parts in (2, 3, 4):
            height = tile_rows(largest, max(8, math.ceil(largest / parts))) if largest else 8
            if 32 <= height < shape.max_rows:
                heights.add(height)
        for height in sorted(heights, reverse=True):
            p = predict(sizes, shapes, shape, machine, max_rows=height, out_bytes=out_bytes)
            if found is None or _rank(p) < _rank(found):
                found = p
    if found is None:
        raise ValueError("there is no candidate that fits; pass at least one TileShape")
    return found


def typical_sizes(max_m: int, num_groups: int) -> list[int]:
    """Split `max_m` rows evenly, for a choice made before the group sizes are known.

    Examples
    --------
    >>> typical_sizes(10, 4)
    [3, 3, 2, 2]
    """
    if num_groups == 0:
        return []
    base, extra = divmod(max_m, num_groups)
    return [base + (g < extra) for g in range(num_groups)]


def report(machine: Machine = B200) -> str:
    """Return a table in Markdown: every shape set, each variant's prediction in microseconds.

    Examples
    --------
    >>> print(report().splitlines()[0].split(" | ")[1:3])
    ['speed of light', 'starting point']
    """
    prefix = "grouped_gemm_sm_100f_"
    names = [shape.name.removeprefix(prefix) for shape in variants()]
    head = ["set", "speed of light", "starting point", "chosen", *names]
    rows = [head, ["---"] * len(head)]
    for name, (sizes, n, k) in SHAPE_SETS.items():
        shapes = [(n, k)] * len(sizes)
        chosen = best(sizes, shapes, machine)
        height = f" ({chosen.max_rows} rows)" if chosen.max_rows < chosen.shape.max_rows else ""
        rows.append(
            [
                name,
                f"{speed_of_light(sizes, shapes, machine) * 1e6:.3f}",
                f"{predict(sizes, shapes, REFERENCE_TILE, machine).seconds * 1e6:.1f}",
                f"{chosen.shape.name.removeprefix(prefix)}{height}: {chosen.seconds * 1e6:.1f}",
                *(
                    f"{predict(sizes, shapes, shape, machine).seconds * 1e6:.1f}"
                    for shape in variants()
                ),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
