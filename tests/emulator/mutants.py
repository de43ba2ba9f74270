"""Single faults put into the shipped kernels' PTX, one at each place that a workload executes.

``python tests/emulator/mutants.py [VARIANT …] [--sample N] [--seeds N]`` runs them all (or N of
each kind) and lists the survivors: mutants that gave neither a fault nor a wrong result. Run from
the repository root after ``python build.py``.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import hopper
from helpers import exact_operand

from fp4rt import reference
from fp4rt.device import DriverError, EmulatorFault
from fp4rt.emulator import EmulatorDevice


@dataclass(frozen=True)
class Mutant:
    """A changed line of PTX (numbered from 1)."""

    kind: str
    line: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        lines = text.split("\n")
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        return "\n".join(lines)


DROPPED = (
    "mbarrier.init", "mbarrier.arrive", "mbarrier.expect_tx", "fence.proxy.async",
    "fence.mbarrier_init", "barrier.sync", "bar.sync", "barrier.cluster.arrive",
    "barrier.cluster.wait", "wgmma.commit_group", "wgmma.wait_group", "cp.async.bulk",
    "st.async", "griddepcontrol.wait", "stmatrix", "st.shared", "tcgen05.commit", "tcgen05.wait",
    "tcgen05.fence", "tcgen05.dealloc", "tcgen05.cp", "tcgen05.mma",
)  # fmt: skip
GRID = {"skinny_split": 2}
_FLIPPED = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}


def mutations(number: int, line: str) -> Iterator[Mutant]:
    """Yield every single fault of one line."""

    def mutant(kind: str, after: str) -> Mutant:
        return Mutant(kind, number, line, after)

    code = line.strip()
    guard, op = re.match(r"(@!?%p\d+\s+)?(.*)", code).groups()
    name = op.split(None, 1)[0].rstrip(";") if op else ""
    for prefix in DROPPED:
        if name.startswith(prefix) and not name.startswith("cp.async.bulk.prefetch"):
            yield mutant(f"drop {prefix}", "// dropped")
    if name.startswith("mbarrier.try_wait"):
        target, rest = re.match(r"(\S+),\s*\[\S+\],\s*(\S+);", op[len(name) :].strip()).groups()
        yield mutant("no wait", f"setp.eq.u32 {target}, 0, 0;")
        flipped = op.replace(f", {rest};", ", %mutant;")
        xor = f"{{ .reg .b32 %mutant; xor.b32 %mutant, {rest}, 1; {flipped} }}"
        yield mutant("phase flipped", xor)
    if "expect_tx" in name:
        count = re.search(r",\s*(\S+);", op[op.index("]") :])[1]
        for step in (16, -16):
            after = op.replace(f", {count};", ", %mutant;")
            yield mutant(
                "wrong byte count",
                f"{{ .reg .b32 %mutant; add.s32 %mutant, {count}, {step}; {after} }}",
            )
    if name.startswith("wgmma.mma_async"):
        for register in re.findall(r",\s*(%rd\d+)", op):
            for kind, change in (
                ("descriptor address", f"add.s64 %mutant, {register}, 2"),
                ("descriptor stride", f"xor.b64 %mutant, {register}, {1 << 34}"),
                ("descriptor swizzle", f"xor.b64 %mutant, {register}, {1 << 62}"),
            ):
                after = re.sub(re.escape(register) + r"\b", "%mutant", op)
                yield mutant(kind, f"{{ .reg .b64 %mutant; {change}; {after} }}")
    coordinates = re.search(r"\{(%r\d+)((?:, %r\d+)*)\}\]", op)
    if name.startswith("cp.async.bulk.tensor") and coordinates:
        for place, register in enumerate(re.findall(r"%r\d+", coordinates[0])):
            items = re.findall(r"%r\d+", coordinates[0])
            items[place] = "%mutant"
            after = op.replace(coordinates[0], "{" + ", ".join(items) + "}]")
            yield mutant(
                "coordinate", f"{{ .reg .b32 %mutant; add.s32 %mutant, {register}, 1; {after} }}"
            )
    address = re.match(r"(?:ld|st)\.shared\S*\s.*?\[(\S+?)(?:\+(\d+))?\]", op)
    if address:
        base, offset = address[1], int(address[2] or 0)
        step = 16 if ".v4" in name else 8
        old = address[0][address[0].index("[") :]
        yield mutant("shared address", line.replace(old, f"[{base}+{offset + step}]"))
    compare = re.match(r"setp\.(lt|le|gt|ge)\.(s32|u32|s64|u64)", name)
    if compare and not guard:
        changed = f"setp.{_FLIPPED[compare[1]]}.{compare[2]}"
        yield mutant("bound off by one", line.replace(compare[0], changed))
    if re.match(r"selp\.\w32", name) and "begin" not in line:
        parts = re.match(r"(\S+\s+)(\S+), (\S+), (\S+), (%p\d+);", op)
        if parts:
            yield mutant(
                "selection swapped",
                f"{parts[1]}{parts[2]}, {parts[4]}, {parts[3]}, {parts[5]};",
            )


class MutatedDevice(EmulatorDevice):
    """An emulator that changes the PTX it loads, and can tell which lines were executed."""

    mutant: Mutant | None = None
    text = ""
    executed: set[int]

    def load(self, image: bytes):
        self.text = bytes(image).rstrip(b"\0").decode()
        changed = self.text if self.mutant is None else self.mutant.apply(self.text)
        return super().load(changed.encode())

    def _execute(self, pending, seed):
        super()._execute(pending, seed)
        self.executed = getattr(self, "executed", set())
        for launch in self.last_launches:
            for ins, count in zip(launch.program.instructions, launch.counts, strict=True):
                if count:
                    self.executed.add(ins.line)


def workload(device: EmulatorDevice, variant: str) -> None:
    """Run groups with tails in every dimension; AssertionError if a result is wrong.

    One CTA (or cluster) takes several tiles, and K goes round the ring of stages more than once,
    so that every wait has something to wait for.
    """
    rng = np.random.default_rng(11)
    sizes, shapes = [11, 0, 2, 1], [(40, 1040), (8, 16), (150, 144), (9, 16)]
    for group in range(4, 300):  # more than one pass of the scan, a row in each warp of it
        sizes.append(int(group % 31 == 9))
        shapes.append((8, 16))
    a = [exact_operand(rng, (m, k)) for m, (_, k) in zip(sizes, shapes, strict=True)]
    b = [exact_operand(rng, shape) for shape in shapes]
    alpha = np.resize(np.array([0.5, 1, -2, 3]), len(sizes))
    options = {"max_tile_rows": 8, "grid": GRID.get(variant, 1)}
    results = hopper.run(device, variant, a, b, alpha=alpha, **options)
    exact = reference.grouped_gemm(a, b, alpha=alpha)
    for got, want in zip(results, exact, strict=True):
        want = reference.round_to(want, np.float16)
        assert np.array_equal(got.view(np.uint16), want.view(np.uint16))


def caught(variant: str, mutant: Mutant | None, seeds: int) -> str:
    """Return how a mutant shows itself under some seed, or "" if it survives."""
    for seed in range(seeds):
        schedule = ("mixed", "lazy", "eager", "random")[seed % 4]
        device = MutatedDevice("sm_90a", seed=seed, schedule=schedule, hang_limit=300_000)
        device.mutant = mutant
        try:
            workload(device, variant)
        except EmulatorFault as error:
            return "fault: " + str(error).split("\n")[0]
        except (AssertionError, ValueError, DriverError) as error:
            return f"wrong result: {type(error).__name__}"
    return ""


def places(variant: str) -> list[Mutant]:
    """Return every mutant at a line that the workload executes."""
    device = MutatedDevice("sm_90a")
    workload(device, variant)
    found: list[Mutant] = []
    lines = device.text.split("\n")
    for number in sorted(device.executed):
        found.extend(mutations(number, lines[number - 1]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", default=["medium", "skinny"])
    parser.add_argument("--sample", type=int, default=0, help="mutants of each kind (0: all)")
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    survived = 0
    for variant in arguments.variants:
        kinds: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in places(variant):
            kinds[mutant.kind].append(mutant)
        total = 0
        started = time.monotonic()
        for kind, members in kinds.items():
            if arguments.sample and len(members) > arguments.sample:
                members = random.Random(0).sample(members, arguments.sample)
            alive = [m for m in members if not caught(variant, m, arguments.seeds)]
            total += len(members)
            survived += len(alive)
            print(f"{variant}: {kind}: {len(members) - len(alive)} of {len(members)} caught")
            for mutant in alive:
                print(f"  survived: line {mutant.line}: {mutant.before.strip()}", flush=True)
        print(f"{variant}: {total} mutants in {time.monotonic() - started:.0f} s")
    return survived


if __name__ == "__main__":
    main()
