"""Single faults put into the shipped kernels, one at each place that a workload reaches.

A *place* is an operation of the source: a line, and what the instruction does there. A fault is
made in all copies at once that nvcc made of it by inlining, unrolling and instantiating templates,
as if it stood in the source.

``python tests/emulator/mutants.py [KERNEL …] [-j N] [--sample N] [--out FILE]`` runs them all (or
N of each kind) and lists the survivors: mutants that gave neither a fault nor a wrong result under
any schedule. A KERNEL is a variant's name without ``grouped_gemm_``, or ``ARCH_prepare`` (all
variants with one have the same). FILE gets a line of JSON for each mutant; those that it has, of
the same PTX, are not run again. ``--report`` runs none and prints the table of what FILE has. Each
survivor must be explained in ``survivors.json``; the exit status is the number of those that are
not. Run from the repository root after ``python build.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing import get_context
from multiprocessing.synchronize import Semaphore
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from mutant_bench import VARIANTS, Bench, changed, rehearse, scenarios
from mutations import mutations, unrolling

from fp4rt.emulator.records import Imm, Instruction

ROOT = Path(__file__).parents[2]
SURVIVORS = Path(__file__).with_name("survivors.json")
PREPARE = {
    f"{arch}_prepare": next(
        name for name, v in VARIANTS.items() if v.arch == arch and "prepare" in v.kernels
    )
    for arch in ("sm_90a", "sm_100f")
    if any(v.arch == arch and "prepare" in v.kernels for v in VARIANTS.values())
}
KERNELS = [*PREPARE, *VARIANTS]
TIMED = re.compile("drop|wait|arriv|barrier|byte|flight")  # the schedule may decide what happens
# Kinds whose operations in one line are told apart by their constants, if these are so few that
# they are not the numbers of an unrolled loop's rounds.
CONSTANTS = re.compile("^constant|^stride")
UNROLLED = 4
# Lines that choose a cache policy, which only makes a kernel slower.
POLICY = "createpolicy"
SEEDS = 4
FORK = get_context("fork")  # kernels are decoded once


@dataclass(frozen=True)
class Mutant:
    """A fault: for each copy of a place, the instruction's number and what takes its place."""

    kind: str
    place: str
    copies: tuple[tuple[int, tuple[Instruction, ...]], ...]


def place_of(ins: Instruction) -> str:
    """Return where an instruction is, in words that outlast another compilation.

    The line of the kernel's source that it comes from, the opcode, and the column. Lines of the
    wrappers (``cuda_src/ptx``) and of CUDA's headers stand for the lines that call them.
    """
    source = ins.source
    while source is not None:
        _, inside, below = source.file.partition("cuda_src/")
        below = below.rpartition("../")[2]
        if inside and not below.startswith("ptx/"):
            return (
                f"{below}: {source_lines(below)[source.line - 1]} | {ins.opcode} | {source.column}"
            )
        source = source.inlined_at
    return f"? | {ins.opcode} |"


@cache
def source_lines(name: str) -> list[str]:
    """Return the lines of a source, each different from all others before it."""
    text = (ROOT / "cuda_src" / name).read_text()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    seen: Counter[str] = Counter()
    found = []
    for at, line in enumerate(lines):
        text = line
        if text == "__syncwarp();":  # says too little
            text += " " + lines[at + 1]
        seen[text] += 1
        found.append(f"{text} #{seen[text]}" if seen[text] > 1 else text)
    return found


class Kernel:
    """A kernel, and the problems that show its faults (or the smallest few of them)."""

    def __init__(self, name: str, problems: int | None = None, processes: int = 1) -> None:
        self.name = name
        variant = PREPARE.get(name, name)
        self.entry = "prepare" if name in PREPARE else VARIANTS[variant].kernels[-1]
        chosen = sorted(scenarios(variant, self.entry), key=lambda s: s.work)[:problems]
        self.benches = [Bench(variant, self.entry, s) for s in chosen]
        rehearse(self.benches, processes)
        self.benches.sort(key=lambda bench: bench.steps)
        self.program = self.benches[0].program

    @cached_property
    def source(self) -> str:
        """A name of the kernel's code: nothing but its comments and line numbers may differ."""
        code = "\n".join(ins.text for ins in self.program.instructions)
        return hashlib.sha256(code.encode()).hexdigest()[:12]

    def reaching(self, mutant: Mutant) -> list[Bench]:
        """Return the problems that execute a copy of a place, the quickest first."""
        places = {pc for pc, _ in mutant.copies}
        found = [b for b in self.benches if not places.isdisjoint(b.reached)]
        if mutant.kind == "drop griddepcontrol.wait":  # alone, a kernel has nothing to wait for
            found = [b for b in found if b.scenario.chained]
        return found

    @cached_property
    def mutants(self) -> list[Mutant]:
        """Every mutant, in a random order that is always the same."""
        operations: dict[tuple[str, str], dict[str, list]] = defaultdict(lambda: defaultdict(list))
        compilers = unrolling(self.program.instructions)
        for pc, ins in enumerate(self.program.instructions):
            if pc in compilers:
                continue
            serial: Counter[str] = Counter()
            for kind, after in mutations(ins):
                serial[kind] += 1
                place = place_of(ins) + (f" ({serial[kind]})" if serial[kind] > 1 else "")
                if POLICY in place:
                    continue
                constants = [str(op.value) for op in ins.operands if isinstance(op, Imm)]
                told = " ".join(constants) if CONSTANTS.search(kind) else ""
                operations[kind, place][told].append((pc, tuple(after)))
        found = []
        for (kind, place), each in operations.items():
            if len(each) > UNROLLED:
                each = {"": [copy for copies in each.values() for copy in copies]}
            for told, copies in each.items():
                found.append(Mutant(kind, f"{place} {told}".rstrip(), tuple(copies)))
        random.Random(0).shuffle(found)
        return found

    def caught(self, mutant: Mutant, seeds: int = SEEDS) -> str:
        """Return how a mutant shows itself under some schedule, or "" if it survives."""
        program = changed(self.program, dict(mutant.copies))
        benches = self.reaching(mutant)
        if any(each.covers(mutant.kind, mutant.place) for each in explanations()):
            benches, seeds = benches[:4], 1  # nothing will be seen
        tries = list(range(seeds if TIMED.search(mutant.kind) else min(seeds, 2)))
        if mutant.kind == "drop bar.warp.sync":  # only schedule "random" parts a warp's lanes
            benches, tries = benches[:5], [4 * i + 3 for i in range(3 * seeds)]
        for seed in tries:
            for bench in benches if seed == tries[0] else benches[: len(benches) // 2 + 1]:
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


@cache
def explanations() -> list[Explanation]:
    """Return what is known to survive."""
    return [
        Explanation(tuple(each["kinds"]), each["place"], each["most"], each["why"])
        for each in json.loads(SURVIVORS.read_text())
    ]


def unexplained(survivors: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the survivors (kind, place) of a kernel that no explanation covers."""
    left: Counter[Explanation] = Counter({each: each.most for each in explanations()})
    missing = []
    for kind, place in sorted(survivors):
        found = [each for each in left if each.covers(kind, place) and left[each] > 0]
        if found:
            left[found[0]] -= 1
        else:
            missing.append((kind, place))
    return missing


def todo(kernel: Kernel, options: argparse.Namespace) -> list[Mutant]:
    """Return a kernel's mutants of some kinds (all or a few of each) without those done before."""
    count: Counter[str] = Counter()
    records = read(options.out)
    done = {(r["kernel"], r["source"], r["kind"], r["place"]) for r in records}
    found = []
    for mutant in kernel.mutants:
        count[mutant.kind] += 1
        if options.sample and count[mutant.kind] > options.sample:
            continue
        key = kernel.name, kernel.source, mutant.kind, mutant.place
        if re.search(options.kinds, mutant.kind) and key not in done:
            found.append(mutant)
    return found


def attempt(kernel: Kernel, mutant: Mutant, options: argparse.Namespace) -> None:
    """Try a mutant and append what happened to the file of results."""
    record = {"kernel": kernel.name, "source": kernel.source, "kind": mutant.kind}
    record |= {"place": mutant.place, "copies": len(mutant.copies)}
    started = time.process_time()
    reached = bool(kernel.reaching(mutant))
    record["caught"] = kernel.caught(mutant, options.seeds) if reached else None
    record["seconds"] = round(time.process_time() - started, 2)
    with options.out.open("a") as out:
        out.write(json.dumps(record) + "\n")


def serve(name: str, options: argparse.Namespace, tokens: Semaphore) -> None:
    """Try a kernel's mutants in processes of its own, of which those with a token run."""
    with tokens:
        kernel = Kernel(name, processes=max(1, options.j // 2))
        mutants = todo(kernel, options)
    following = FORK.Value("i", 0)

    def work() -> None:
        while True:
            with following.get_lock():
                at = following.value
                following.value += 1
            if at >= len(mutants):
                return
            with tokens:
                attempt(kernel, mutants[at], options)

    count = max(2, 4 * options.j // len(options.kernels)) if options.j > 1 else 1
    in_processes([FORK.Process(target=work) for _ in range(min(count, options.j))])


def in_processes(processes: list) -> None:
    """Start processes and wait until all have ended."""
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(255)


def read(path: Path | None) -> list[dict]:
    """Return what a file of results has."""
    if path is None or not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def report(records: list[dict]) -> int:
    """Print a line for each kernel, then survivors without explanation; return their number."""
    kernels = defaultdict(list)
    for record in records:
        kernels[record["kernel"]].append(record)
    missing = 0
    print("| kernel | places | not reached | kinds | caught | survivors | explained | caught |")
    print("|---|---|---|---|---|---|---|---|")
    everything = [*kernels.items(), ("all", records)]
    lines = []
    for name, members in everything:
        tried = [r for r in members if r["caught"] is not None]
        alive = [(r["kind"], r["place"]) for r in tried if not r["caught"]]
        if name != "all":
            new = unexplained(alive)
            lines += [f"not explained: {name}: {kind}: {place}" for kind, place in new]
            missing += len(new)
        else:
            new = lines
        kinds = len({r["kind"] for r in tried})
        print(
            f"| {name} | {len(members)} | {len(members) - len(tried)} | {kinds} "
            f"| {len(tried) - len(alive)} | {len(alive)} | {len(alive) - len(new)} "
            f"| {(len(tried) - len(alive)) / max(len(tried), 1):.1%} |"
        )
    print("\n".join(lines))
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", default=KERNELS, metavar="KERNEL")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each kind (0: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="schedules of each problem")
    parser.add_argument("--kinds", default="", help="only kinds that match this expression")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each mutant")
    parser.add_argument("--report", action="store_true", help="only print what --out has")
    options = parser.parse_args()
    options.out = options.out or Path(tempfile.mkdtemp()) / "results.jsonl"
    if not options.report:
        tokens = FORK.Semaphore(options.j)
        in_processes(
            [FORK.Process(target=serve, args=(k, options, tokens)) for k in options.kernels]
        )
    return min(report(read(options.out)), 255)


if __name__ == "__main__":
    sys.exit(main())
