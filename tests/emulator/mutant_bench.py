"""Small problems that a variant's kernels solve again and again, whole or with one fault in them.

A `Bench` is one problem on one device: memory is restored before each run, a kernel's program can
be replaced, and every byte that the kernel is there to write must come out as the unchanged kernel
left it, which the oracle has confirmed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context

import ml_dtypes
import numpy as np
from helpers import exact_operand

from fp4rt import abi, reference
from fp4rt.arguments import as_inputs, as_weights
from fp4rt.choice import Choice
from fp4rt.device import Buffer, EmulatorFault
from fp4rt.emulator import EmulatorDevice
from fp4rt.emulator.dataflow import _writes as writes
from fp4rt.emulator.dataflow import analyse
from fp4rt.emulator.launch import Launch
from fp4rt.emulator.program import Program, Rows
from fp4rt.emulator.records import Instruction
from fp4rt.kernels import KernelPlan
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.problem import Problem
from fp4rt.weights import Packer, upload_weights

VARIANTS = {v.name.removeprefix("grouped_gemm_"): v for v in abi.VARIANTS}
WORKSPACE = ("a_values", "a_scales", "a_prepared", "group_starts", "schedule", "d")
RESULTS = {"prepare": ("a_prepared", "group_starts", "schedule"), "grouped_gemm": ("d",)}
SPARE_ROWS = 3
SCHEDULES = ("mixed", "lazy", "eager", "random")


@dataclass(frozen=True)
class Scenario:
    """A problem and how it is launched; `sizes` and `shapes` (n, k) have one entry a group."""

    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    rows: int = 256  # most rows of a tile
    grid: int = 1  # CTAs of grouped_gemm, or clusters of them
    prepare_grid: int = 1
    out: str = "float16"
    activations: str = "nvfp4"
    chained: bool = False  # with all of the plan's launches overlapping
    special: bool = False  # for places that others do not reach
    wide: bool = False  # D has more than 2^32 elements, as far as prepare can tell

    @property
    def work(self) -> int:
        """Roughly how long it takes: each group, its tiles and its K."""
        return sum(
            8 + m * 8 + (-(-n // 128) * (256 + k) if m else 0)
            for m, (n, k) in zip(self.sizes, self.shapes, strict=True)
        )


class Recorder(EmulatorDevice):
    """An emulator that keeps launches for later."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.launched = []

    def run_kernel(self, kernel, config, params):
        self.check_launch(kernel, config)
        self.launched.append((kernel, config, params))


class Bench:
    """One scenario of one variant, ready to run kernel `entry`."""

    def __init__(self, name: str, entry: str, scenario: Scenario) -> None:
        self.name, self.entry, self.scenario = name, entry, scenario
        variant = VARIANTS[name]
        self.device = Recorder(variant.arch)
        self.machine = self.device.machine
        if entry == "pack_weights":
            self.results = self._pack()
        else:
            self._plan(variant)
            self.results = {key: self.plan._buffers[key] for key in RESULTS[entry]}
        launched = self.device.launched
        self.at = max(i for i, (kernel, _, _) in enumerate(launched) if kernel.name == entry)
        self.program = launched[self.at][0].program
        first = self.at
        while scenario.chained and launched[first][1].programmatic and first:
            first -= 1  # starts before the one in front has ended
        for kernel, config, params in launched[:first]:
            self.machine.execute([Launch(self.machine, kernel.program, config, params)])
        self.launches, self.at = launched[first : self.at + 1], self.at - first
        self.saved = self.device._snapshot()
        self.limit = self.patience = 1 << 60
        self.expected: dict[str, bytes] = {}
        poke = self.machine.poke

        def limited() -> None:
            if self.machine.steps > self.stop:
                raise EmulatorFault("still running after four times the instructions")
            poke()

        self.machine.poke = limited

    def rehearse(self) -> tuple[int, set[int], dict[str, bytes]]:
        """Run the unchanged kernel: its instructions, the places reached, the checked results."""
        before = self.machine.steps
        launches = self._execute(self.program, 0, "mixed")
        reached = {pc for pc, n in enumerate(launches[self.at].counts) if n}
        results = {key: buffer.to_numpy().tobytes() for key, buffer in self.results.items()}
        if "d" in results:
            self._check(results["d"])
        if self.entry == "pack_weights":
            assert results["blocks"] == self.packed, "packed another way than numpy does"
        return self.machine.steps - before, reached, results

    def take(self, steps: int, reached: set[int], expected: dict[str, bytes]) -> None:
        """Remember what a rehearsal has shown."""
        self.steps, self.reached, self.expected = steps, reached, expected
        self.limit, self.patience = 4 * steps + 20_000, steps + 10_000

    def _plan(self, variant: abi.Variant) -> None:
        """Record the launches of a plan: of two, if they are chained."""
        self._set_up(variant)
        for _ in range(1 + self.scenario.chained):
            self.plan.launch(self.device.stream)
        self._isolate()
        if self.scenario.wide:
            self._widen()

    def _pack(self) -> dict[str, Buffer]:
        """Record a launch that packs weights on the device, as CUDA devices do."""
        rng = np.random.default_rng(12)
        ((n, k),) = set(self.scenario.shapes)
        codes = rng.integers(0, 256, (len(self.scenario.shapes), n, k // 2), np.uint8)
        scales = rng.integers(0, 127, (len(codes), n, k // 16), np.uint8)
        operand = Nvfp4Array.from_parts(codes, scales, 1.0)
        device, stream = self.device, self.device.stream
        packed = upload_weights(device, operand)
        self.packed = packed.blocks.to_numpy().tobytes()
        stream.fill(packed.blocks, 0xFF)
        packer = Packer(device)
        self.given = [device.upload(codes), device.upload(scales)]
        packer.take(self.given, stream)
        packer.pack(packed, 0, len(codes), stream)
        self.keep = packer, packed
        return {"blocks": packed.blocks}

    def _isolate(self) -> None:
        """Put the tables of groups where nothing borders on them: one step too far is a fault."""
        launched, groups = self.device.launched, len(self.scenario.sizes)
        self.tables = {}
        for name, size in (("group_sizes", 4), ("alpha", 4), ("groups", abi.GROUP.dtype.itemsize)):
            address = int(np.frombuffer(launched[0][2], abi.PARAMS.dtype)[0][name])
            table = self.machine.memory.read(None, address, size * groups)
            self.tables[name] = self.device.upload(table)
        for i, (kernel, config, params) in enumerate(launched):
            words = np.frombuffer(params, abi.PARAMS.dtype).copy()
            for name, buffer in self.tables.items():
                words[name] = buffer.address
            launched[i] = kernel, config, words.tobytes()

    def _widen(self) -> None:
        """Give the groups so many columns that D has more than 2^32 elements."""
        params = np.frombuffer(self.device.launched[0][2], abi.PARAMS.dtype)[0]
        size = len(self.scenario.sizes) * abi.GROUP.dtype.itemsize
        memory, address = self.machine.memory, int(params["groups"])
        hit = memory.find(address, size)
        table = hit.data[address - hit.base :][:size].view(abi.GROUP.dtype)
        table["n"] = np.resize([2**31 - 1, 2**31 - 77, 3], len(table))

    def _set_up(self, variant: abi.Variant) -> None:
        s = self.scenario
        rng = np.random.default_rng(11)
        m = sum(s.sizes)
        if s.activations == "nvfp4":
            a = [
                exact_operand(rng, (size, k))
                for size, (_, k) in zip(s.sizes, s.shapes, strict=True)
            ]
        else:
            dtype = ml_dtypes.bfloat16 if s.activations == "bfloat16" else np.float16
            a = [
                rng.integers(-8, 9, (size, k)).astype(dtype)
                for size, (_, k) in zip(s.sizes, s.shapes, strict=True)
            ]
        b = [exact_operand(rng, shape) for shape in s.shapes]
        weights = as_weights(b)
        inputs = as_inputs(a, None, weights)
        problem = Problem(
            shapes=tuple((w.shape[0], 2 * w.values.shape[-1]) for w in weights.groups),
            max_m=m + SPARE_ROWS,
            activations=inputs.activations,
            out_dtype=s.out,
        )
        cluster = variant.macros.get("CTAS", 1) * variant.macros.get("SPLITS", 1)
        choice = Choice(variant.name, s.rows, s.grid * cluster, s.prepare_grid)
        self.plan = plan = KernelPlan(self.device, weights, problem, choice)
        stream = self.device.stream
        for key in WORKSPACE:
            if key == "schedule" and "prepare" not in variant.kernels:
                continue  # a kernel leaves it as it must find it
            if key in plan._buffers:
                stream.fill(plan._buffers[key], 0xFF)
        # Not powers of two, so that results are rounded; each product is rounded to fp32 first.
        self.alpha = np.resize(np.array([0.3, 1, -1.7, 3.1], np.float32), len(s.sizes))
        scales = self.alpha * weights.global_scales * inputs.global_scales(len(weights.groups))
        plan.set_inputs(inputs, scales, stream)
        for key in ("a_values", "a_scales"):  # what lies between K and the pitch
            if key in plan._buffers:
                rows = plan._buffers[key].to_numpy()
                per = 16 if key == "a_scales" else 2 if s.activations == "nvfp4" else 1
                at = 0
                for size, (_, k) in zip(s.sizes, s.shapes, strict=True):
                    rows.view(np.uint8)[at : at + size, k // per * rows.itemsize :] = 0xFF
                    at += size
                stream.upload(plan._buffers[key], rows)
        self.operands = a, b

    def _check(self, d: bytes) -> None:
        """Compare D with the oracle, bit for bit; what lies behind it must still be poison."""
        a, b = self.operands
        want = b""
        dtype = self.plan.out_dtype
        for g, exact in enumerate(reference.grouped_gemm(a, b)):
            scaled = exact.astype(np.float32) * self.alpha[g]
            with np.errstate(over="ignore"):
                want += scaled.astype(dtype).tobytes()
        assert d[: len(want)] == want, f"{self.name}: wrong without a fault"
        assert set(d[len(want) :]) <= {0xFF}, f"{self.name}: bytes behind D changed"

    def _execute(self, program: Program, seed: int, schedule: str) -> list[Launch]:
        machine = self.machine
        self.device._restore(self.saved)
        machine.rng.seed(seed)
        machine.schedule, machine.hang_limit = schedule, self.patience
        self.stop = machine.steps + self.limit
        launches: list[Launch] = []
        for i, (kernel, config, params) in enumerate(self.launches):
            code = program if i == self.at else kernel.program
            before = launches[-1] if launches else None
            launches.append(Launch(machine, code, config, params, before))
        machine.execute(launches)
        return launches

    def caught(self, program: Program, seed: int) -> str:
        """Return the fault or the wrong result of a changed program under one schedule, or ""."""
        try:
            self._execute(program, seed, SCHEDULES[seed % 4])
        except EmulatorFault as error:
            return "fault: " + str(error).split("\n")[0]
        for key, want in self.expected.items():
            if self.results[key].to_numpy().tobytes() != want:
                return f"wrong result: {key}"
        return ""


def rehearse(benches: list[Bench], processes: int) -> None:
    """Rehearse problems, several at once in processes of their own."""
    if processes == 1:
        shown = [bench.rehearse() for bench in benches]
    else:
        context = get_context("fork")
        # A bound method cannot travel to a process that has no such device; a number can.
        _REHEARSED[:] = benches
        with context.Pool(processes) as pool:
            shown = pool.map(_rehearse, range(len(benches)), chunksize=1)
    for bench, each in zip(benches, shown, strict=True):
        bench.take(*each)


_REHEARSED: list[Bench] = []


def _rehearse(index: int) -> tuple[int, set[int], dict[str, bytes]]:
    return _REHEARSED[index].rehearse()


def changed(program: Program, faults: Mapping[int, Sequence[Instruction]]) -> Program:
    """Return `program` with some instructions replaced, each by some others or by nothing."""
    new = copy.copy(program)
    new.instructions, new.steps = [*program.instructions], [*program.steps]
    new.rows = Rows()  # the fault may need registers that nobody else has
    new.rows.rows = {cls: {**rows} for cls, rows in program.rows.rows.items()}
    new.rows.constants = {cls: {**rows} for cls, rows in program.rows.constants.items()}
    new.rows.fills = [*program.rows.fills]
    dropped = [pc for pc, replacement in faults.items() if not replacement]
    _drop(program, new, dropped)
    for pc, replacement in faults.items():
        handlers = []
        for instruction in replacement:
            new.instructions[pc] = instruction
            handlers.append(new._decode(pc))
        new.instructions[pc] = program.instructions[pc]
        if handlers:
            new.steps[pc] = handlers[0] if len(handlers) == 1 else _sequence(handlers)
    new._templates()
    return new


def _sequence(handlers: list) -> Callable:
    def run(w, m):
        for handler in handlers:
            result = handler(w, m)
        return result

    return run


def _drop(program: Program, new: Program, dropped: list[int]) -> None:
    """Leave instructions out; a register may now be read before it is written."""
    for pc in dropped:
        new.steps[pc] = lambda w, m: None
    for func in program.functions:
        base = program.base[func.name]
        inside = [pc for pc in dropped if program.owner[pc] is func]
        if not any(writes(program.instructions[pc]) for pc in inside):
            continue
        code = [*func.code]
        for pc in inside:  # keep the numbering: an instruction without effect stands in
            scope = func.code[pc - base].scope
            code[pc - base] = Instruction("pmevent", ("pmevent",), (), None, 0, "", None, scope)
        old, fresh = program.suspects[func.name], analyse(replace(func, code=code))
        new.suspects = {**program.suspects, func.name: fresh}
        for i in {*fresh.reads, *fresh.writes, *old.reads, *old.writes}:
            same = fresh.reads.get(i) == old.reads.get(i)
            same = same and fresh.writes.get(i) == old.writes.get(i)
            if not same and base + i not in dropped:
                new.steps[base + i] = new._decode(base + i)


def scenarios(name: str, entry: str) -> Iterator[Scenario]:
    """Yield problems that together reach every place of a variant's kernel, cheap ones first."""
    variant = VARIANTS[name]
    if entry == "prepare":
        yield from _prepare(variant)
        return
    if entry == "pack_weights":  # whole blocks; N and K inside one, and of several
        for n, k, groups in ((128, 64, 1), (5, 16, 1), (129, 80, 3), (300, 128, 1), (300, 400, 2)):
            yield Scenario((1,) * groups, ((n, k),) * groups)
        return
    if variant.arch == "sm_90a":
        yield from _hopper(variant)
    else:
        yield from _blackwell(variant)
    kind = "bfloat16" if variant.macros.get("BFLOAT16") else "nvfp4"
    # More groups than a warp has lanes, most of them empty: the only one of a height is the first,
    # the last, and one that loops unrolled by four or by eight reach in each of their copies.
    rows = _rows(variant)
    heights = [min(8 * i - 3, rows) for i in (4, 3, 2)]
    for groups, first in ((70, 0), (70, 35), (70, 69), (300, 299), (300, 40)):
        many = [3 + g % 5 if g % 31 == 9 or g == 32 else 0 for g in range(groups)]
        for step, height in zip((0, 32, 64), heights, strict=True):
            many[(first + step) % groups] = height
        if first == 40:  # whole tiles, behind others of their warp's lane
            many[136] = 2 * rows
        shapes = tuple((8 + g % 3, 16) for g in range(groups))
        yield Scenario(tuple(many), shapes, rows, activations=kind)
    # Tiles of one height only, in more groups than lanes.
    sizes = tuple(3 if g % 23 == 7 else 0 for g in range(70))
    yield Scenario(sizes, ((8, 16),) * 70, rows, activations=kind)
    # As many groups as lanes, exactly; a tile for each number of rows and of columns up to 33.
    yield Scenario((*(0,) * 62, 9, 5), ((8, 16),) * 64, _rows(variant), activations=kind)
    sizes = tuple(min(i + 1, _rows(variant)) for i in range(33))
    shapes = tuple((33 - i, 16) for i in range(33))
    for out in ("float16", "float32"):
        yield Scenario(sizes, shapes, _rows(variant), out=out, activations=kind)
    sizes, shapes = sizes[15:24:4], ((5, 16), (17, 16), (30, 16))
    yield Scenario(sizes, shapes, _rows(variant), out="bfloat16", activations=kind)
    # Rows of A's scales that lie at no multiple of 16 bytes, cut everywhere in words and blocks.
    shapes = ((40, 288), (24, 240), (8, 112), (9, 48), (8, 256), (8, 64))
    yield Scenario((11, 3, 9, 7, 6, 5), shapes, _rows(variant), activations=kind)
    # Heights and widths that one group alone has; none at all; tiles of exactly their height.
    yield Scenario((1, 0, 3), ((1, 16), (5, 16), (0, 16)), _rows(variant), activations=kind)
    low = min(24, _rows(variant))
    full = ((8, 192), (256, 256), (24, 128), (136, 192), (8, 512))
    yield Scenario((2 * low, low, 16, 8, 3 * low), full, low, activations=kind)
    highest = _rows(variant)
    yield Scenario((2 * highest, highest), ((16, 272), (8, 16)), highest, activations=kind)
    chain = ((24, 48), (8, 16))
    yield Scenario((3, 1), chain, _rows(variant), 2, activations=kind, chained=True)


def _rows(variant: abi.Variant) -> int:
    macros = variant.macros
    if variant.arch == "sm_90a":
        return macros.get("MAX_ROWS", 16)
    return 128 if macros["TOKENS_ON_M"] else macros["TILE_N"]


def _prepare(variant: abi.Variant) -> Iterator[Scenario]:
    """Every bound of the tiles and of K; two passes of the scan, with sums in all of its warps."""
    for kind in ["nvfp4", "float16"] if variant.arch == "sm_90a" else ["nvfp4"]:
        yield Scenario((3,), ((8, 80),), 64, activations=kind)
        # K ends after each number of scales that 256 K can have, and of steps that 512 K can.
        ends = tuple((8, 16 * (j + 1)) for j in range(17))
        yield Scenario((106,) * 17, ends, 128, activations=kind)
        steps = tuple((8, 64 * (j + 1)) for j in range(9))
        yield Scenario((2,) * 9, steps, 64, activations=kind)
        for rows in (24, 56, 88, 120, 128, 256):  # tiles end in each quarter of 128 rows
            shapes = ((8, 80), (8, 256), (5, 272))
            yield Scenario((2 * rows, 8, rows - 3), shapes, rows, activations=kind)
        exact = ((8, 512), (8, 1040), (3, 256), (8, 528), (8, 16))
        yield Scenario((130, 9, 16, 128, 0), exact, 64, activations=kind)
        # One row has several items or blocks in some groups, eight have one in others.
        sizes = tuple(0 if g % 11 == 5 else 9 if g % 32 == 4 else 1 for g in range(300))
        shapes = tuple((1 + g % 5, 1552 if g % 16 == 3 else 16) for g in range(300))
        for wide in (False, True):
            yield Scenario(sizes, shapes, 64, prepare_grid=2, activations=kind, wide=wide)
        yield Scenario((*(1,) * 254, 0, 0), ((8, 16),) * 256, 64, activations=kind)


def _hopper(variant: abi.Variant) -> Iterator[Scenario]:
    macros = variant.macros
    rows = _rows(variant)
    bf16 = "bfloat16" if macros["BFLOAT16"] else "nvfp4"
    skinny = "skinny" in variant.name
    columns = 128 * macros.get("ROW_BLOCKS", 1)
    stage = 256 if skinny else 64
    # The rings of stages and of tiles wrap twice; K ends inside a step, inside a stage; N is odd.
    around = 16 * (macros["STAGES"] * stage // 16 + 3)
    yield Scenario(
        (11, 0, 2, 1, 9, *(1,) * 6),
        ((40, around), (8, 16), (columns + 7, stage + 16), (9, around), (24, 80), *((5, 16),) * 6),
        rows,
        activations=bf16,
    )
    yield Scenario((5, 12), ((columns + 24, 80),) * 2, rows, 2, out="bfloat16", activations=bf16)
    yield Scenario((5, 12), ((70, 80), (136, 144)), rows, 2, out="float32", activations=bf16)
    if skinny:  # shares cut along K, over several chunks of groups, of fewer tiles than CTAs
        yield Scenario((5, 12), ((8, 2064), (8, 1040)), rows, 3, activations=bf16)
        many = [3 if g % 13 == 5 else 0 for g in range(70)]
        yield Scenario(tuple(many), ((8, 272),) * 70, rows, 3, activations=bf16)
        yield Scenario((5,), ((8, 80),), rows, 2, activations=bf16)
        kind = "bfloat16" if macros["BFLOAT16"] else "float16"
        yield Scenario((11, 3), ((40, around), (24, 80)), rows, 2, activations=kind)
        yield Scenario((9, 16, 2), ((8, 272), (8, 16), (8, 528)), rows, activations=kind)
        return
    for height in range(8, rows + 1, 8):
        yield Scenario((height - 1,), ((80, 400),), rows, activations=bf16, special=True)
    for n in (136, 77):
        for out in ("float16", "bfloat16", "float32"):
            yield Scenario((rows - 1, rows + 9), ((n, 16),) * 2, rows, out=out, activations=bf16)


def _blackwell(variant: abi.Variant) -> Iterator[Scenario]:
    macros = variant.macros
    rows = _rows(variant)
    ctas, splits, tile_n, on_m = (
        macros[key] for key in ("CTAS", "SPLITS", "TILE_N", "TOKENS_ON_M")
    )
    columns = tile_n if on_m else 128 * ctas
    around = 16 * (macros["STAGES"] * splits * 16 + 3)
    tall = rows - 3
    yield Scenario(
        (11, 0, 2, 1, 9, 1, 1), ((40, around), (8, 16), (columns + 7, 272), (9, around),
        (24, 592), (5, 16), (5, 16)), rows,
    )  # fmt: skip
    yield Scenario((tall, 5), ((columns + 24, 80), (columns - 8, 336)), rows, out="bfloat16")
    yield Scenario((tall, 12), ((70, 80), (columns, 144)), rows, 2, out="float32")
    yield Scenario((tall, rows + 9), ((columns + 3, 336),) * 2, rows)
    yield Scenario((tall,), ((8, 512),), rows)  # scales of whole blocks, 16 bytes at a time
    if rows > 32:
        yield Scenario((37,), ((columns, 144),), rows)
