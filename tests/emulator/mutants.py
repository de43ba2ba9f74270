"""Single faults put into the shipped kernels, one at each place that a workload reaches.

``python tests/emulator/mutants.py [KERNEL …] [--sample N]`` runs them all (or N of each kind) and
lists the survivors: mutants that gave neither a fault nor a wrong result under any schedule. A
KERNEL is a variant's name without ``grouped_gemm_``, or ``ARCH_prepare`` (all variants of an
architecture have the same one). Each survivor must be explained in ``survivors.json``; the exit
status is the number of those that are not. Run from the repository root after ``python build.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from mutant_bench import VARIANTS, Bench, changed, scenarios
from mutations import mutations

from fp4rt.emulator.records import Instruction, Source

ROOT = Path(__file__).parents[2]
SURVIVORS = Path(__file__).with_name("survivors.json")
PREPARE = {"sm_90a_prepare": "sm_90a_skinny", "sm_100f_prepare": "sm_100f_n128"}
KERNELS = [*PREPARE, *VARIANTS]
TIMED = re.compile("drop|wait|arriv|barrier|byte|flight")  # the schedule may decide what happens
SEEDS = 4


@dataclass(frozen=True)
class Mutant:
    """An instruction of a kernel replaced by others."""

    kind: str
    pc: int
    before: Instruction
    after: tuple[Instruction, ...] = field(hash=False)

    @cached_property
    def place(self) -> str:
        """Where the fault is, in words that outlast another compilation: source line and PTX."""
        return f"{source_text(self.before.source)} | {without_numbers(self.before.text)}"


def source_text(source: Source | None) -> str:
    """Return the line of the kernel's source that an instruction comes from, and its caller's.

    Lines of the wrappers (``cuda_src/ptx``) and of CUDA's headers stand for their callers'.
    """
    found: list[str] = []
    while source is not None and len(found) < 2:
        _, inside, below = source.file.partition("cuda_src/")
        below = below.rpartition("../")[2]
        if inside and not below.startswith("ptx/"):
            lines = [" ".join(line.split()) for line in (ROOT / "cuda_src" / below).open()]
            text = lines[source.line - 1]
            if text == "__syncwarp();":  # says too little
                text += " " + lines[source.line]
            found.append(text if found else f"{below}: {text}")
        source = source.inlined_at
    return " < ".join(found) or "?"


def without_numbers(text: str) -> str:
    """Return PTX text with its registers' numbers left out."""
    text = re.sub(r"\$L\w+", "$L", " ".join(text.split()))
    return re.sub(r"(%[a-z]+)\d+", r"\1", text)


class Kernel:
    """A kernel, and the problems that show its faults (or the smallest few of them)."""

    def __init__(self, name: str, problems: int | None = None) -> None:
        self.name = name
        self.entry = "prepare" if name in PREPARE else "grouped_gemm"
        variant = PREPARE.get(name, name)
        chosen = sorted(scenarios(variant, self.entry), key=lambda s: s.work)[:problems]
        self.benches = [Bench(variant, self.entry, s) for s in chosen]
        self.benches.sort(key=lambda bench: bench.steps)
        self.program = self.benches[0].program

    def reaching(self, pc: int) -> list[Bench]:
        """Return problems that execute a place: the general ones, special ones if need be."""
        found = [b for b in self.benches if pc in b.reached]
        general = [b for b in found if not b.scenario.special]
        return general + [b for b in found if b.scenario.special][: 1 if general else 3]

    def mutants(self) -> list[Mutant]:
        """Return every mutant at a place that some problem reaches."""
        reached = set().union(*(bench.reached for bench in self.benches))
        instructions = self.program.instructions
        return [
            Mutant(kind, pc, instructions[pc], tuple(after))
            for pc in sorted(reached)
            for kind, after in mutations(instructions[pc])
        ]

    def unreached(self) -> int:
        """Return how many mutants lie at places that no problem reaches."""
        reached = set().union(*(bench.reached for bench in self.benches))
        code = enumerate(self.program.instructions)
        return sum(len(list(mutations(ins))) for pc, ins in code if pc not in reached)

    def caught(self, mutant: Mutant, seeds: int = SEEDS) -> str:
        """Return how a mutant shows itself under some schedule, or "" if it survives."""
        benches = self.reaching(mutant.pc)
        if mutant.kind == "drop griddepcontrol.wait":  # alone, a kernel has nothing to wait for
            benches = [b for b in benches if b.scenario.chained]
        program = changed(self.program, mutant.pc, mutant.after)
        tries = list(range(seeds if TIMED.search(mutant.kind) else min(seeds, 2)))
        if mutant.kind == "drop bar.warp.sync":  # only schedule "random" parts a warp's lanes
            benches, tries = benches[:5], [4 * i + 3 for i in range(3 * seeds)]
        for seed in tries:
            for bench in benches:
                how = bench.caught(program, seed)
                if how:
                    return how
        return ""


@dataclass(frozen=True)
class Explanation:
    """Why some mutants change nothing: their kinds, words of their place, how many a kernel has."""

    kinds: tuple[str, ...]
    place: str
    most: int
    why: str

    def covers(self, kind: str, place: str) -> bool:
        """Whether it is about a mutant."""
        return kind in self.kinds and self.place in place


def explanations() -> list[Explanation]:
    """Return what is known to survive."""
    return [
        Explanation(tuple(each["kinds"]), each["place"], each["most"], each["why"])
        for each in json.loads(SURVIVORS.read_text())
    ]


def unexplained(survivors: list) -> list:
    """Return the survivors (kind, place, …) of a kernel that no explanation covers."""
    known = explanations()
    left: Counter[Explanation] = Counter({each: each.most for each in known})
    missing = []
    for survivor in survivors:
        found = [each for each in known if each.covers(*survivor[:2]) and left[each] > 0]
        if found:
            left[found[0]] -= 1
        else:
            missing.append(survivor)
    return missing


def run(name: str, sample: int, seeds: int, chosen: str, again: list | None = None) -> dict:
    """Try a kernel's mutants and return the counts by kind and the survivors.

    `again` are survivors of an earlier run, whose other mutants were caught.
    """
    started = time.monotonic()
    kernel = Kernel(name)
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in kernel.mutants():
        if re.search(chosen, mutant.kind):
            kinds[mutant.kind].append(mutant)
    unreached = kernel.unreached()
    places = sum(map(len, kinds.values()))
    print(f"{name}: {places} places, {unreached} more are never reached", flush=True)
    tried: Counter[str] = Counter()
    alive: list[Mutant] = []
    for kind, members in kinds.items():
        if sample and len(members) > sample:
            members = random.Random(f"{name} {kind}").sample(members, sample)
        tried[kind] = len(members)
        if again is not None:
            wanted = {(k, line) for k, _, line in again}
            members = [m for m in members if (m.kind, m.before.line) in wanted]
        left = [mutant for mutant in members if not kernel.caught(mutant, seeds)]
        print(f"{name}: {kind}: {len(members) - len(left)} of {len(members)} caught", flush=True)
        for mutant in left:
            print(f"  survived: {mutant.place}  (PTX line {mutant.before.line})", flush=True)
        alive += left
    return {
        "kernel": name,
        "places": places,
        "unreached": unreached,
        "tried": dict(tried),
        "survivors": [[m.kind, m.place, m.before.line] for m in alive],
        "seconds": round(time.monotonic() - started),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", default=KERNELS, metavar="KERNEL")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each kind (0: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="schedules of each problem")
    parser.add_argument("--kinds", default="", help="only kinds that match this expression")
    parser.add_argument("--again", type=Path, help="only the survivors in a file of --out")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each kernel")
    arguments = parser.parse_args()
    total = 0
    before = {}
    if arguments.again:
        before = {r["kernel"]: r["survivors"] for r in map(json.loads, arguments.again.open())}
    for name in arguments.kernels:
        result = run(name, arguments.sample, arguments.seeds, arguments.kinds, before.get(name))
        new = unexplained(result["survivors"])
        tried, alive = sum(result["tried"].values()), len(result["survivors"])
        print(
            f"{name}: {tried - alive} of {tried} mutants of {len(result['tried'])} kinds caught "
            f"({(tried - alive) / max(tried, 1):.1%}) in {result['seconds']} s; "
            f"{alive} survivors, {len(new)} of them not explained",
            flush=True,
        )
        for kind, place, line in new:
            print(f"  not explained: {kind}: {place} (PTX line {line})", flush=True)
        total += len(new)
        if arguments.out:
            with arguments.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
    return min(total, 255)


if __name__ == "__main__":
    sys.exit(main())
