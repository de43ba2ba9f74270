"""The single faults that `mutants` puts into kernels, one instruction at a time.

`mutations` yields every fault that an instruction can have, as a kind and the instructions that
take its place. What only makes a kernel slower is no fault: cache policies, prefetches,
``griddepcontrol.launch_dependents``, ``setmaxnreg``, ``tcgen05.relinquish_alloc_permit``. What the
compiler added, so that no source can be wrong there, is no place: see `unrolling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp4rt.emulator.records import TYPE_BYTES, Imm, Instruction, Mem, Operand, Reg, Vec

Mutation = tuple[str, list[Instruction]]

# Kind "drop PREFIX": the instruction is left out.
DROPPED = (
    "mbarrier.init", "mbarrier.arrive", "fence.mbarrier_init", "fence.proxy.async",
    "fence.acq_rel", "bar.sync", "barrier.sync", "barrier.cluster.arrive", "barrier.cluster.wait",
    "bar.warp.sync", "griddepcontrol.wait", "wgmma.fence", "wgmma.commit_group",
    "wgmma.wait_group", "cp.async.bulk", "st.async", "st.shared", "st.global", "stmatrix",
    "mma.sync", "wgmma.mma_async", "tcgen05.alloc", "tcgen05.dealloc",
    "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", "tcgen05.commit",
    "tcgen05.wait::ld", "tcgen05.cp", "tcgen05.mma",
)  # fmt: skip
_NEXT = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "lo": "ls", "ls": "lo"}
_OTHER = {"eq": "ne", "ne": "eq"}
_SIGNED = {1: "b8", 2: "b16", 4: "s32", 8: "s64"}


def _opcode(ins: Instruction, parts: list[str]) -> Instruction:
    return replace(ins, opcode=".".join(parts), parts=tuple(parts))


def _with(ins: Instruction, at: int, operand: Operand) -> Instruction:
    operands = list(ins.operands)
    operands[at] = operand
    return replace(ins, operands=tuple(operands))


def _compute(ins: Instruction, name: str, like: Reg, *operands: Operand) -> Instruction:
    """Return ``name`` of the operands into a fresh register of the type of `like`."""
    parts = name.split(".")
    result = Reg(f"%mutant_{like.type}", like.type)
    guard = ins.guard if ins.parts[0] != "bra" else None
    return replace(
        ins, opcode=name, parts=tuple(parts), operands=(result, *operands), guard=guard, text=name
    )


def _moved(ins: Instruction, at: int, step: int, operation: str = "add") -> list[Instruction]:
    """Return `ins` with an operand (of an address: its offset) raised or exclusive-or'd."""
    operand = ins.operands[at]
    if isinstance(operand, Mem):
        if operation == "add":
            return [_with(ins, at, replace(operand, offset=operand.offset + step))]
        before, after = _changed(ins, operand.base, step, operation)
        return [*before, _with(ins, at, replace(operand, base=after))]
    before, after = _changed(ins, operand, step, operation)
    return [*before, _with(ins, at, after)]


def _changed(
    ins: Instruction, operand: Operand, step: int, operation: str
) -> tuple[list[Instruction], Operand]:
    if isinstance(operand, Imm):
        value = operand.value + step if operation == "add" else operand.value ^ step
        return [], replace(operand, value=value)
    assert isinstance(operand, Reg)
    size = TYPE_BYTES[operand.type]
    name = f"add.{_SIGNED[size]}" if operation == "add" else f"xor.b{8 * size}"
    if size == 2 and operation == "add":
        name = "add.s16"
    first = _compute(ins, name, operand, operand, Imm(step))
    return [first], first.operands[0]


def _element(ins: Instruction, at: int, items: list[Operand]) -> Instruction:
    """Return `ins` with other elements in the vector operand `at`."""
    return _with(ins, at, Vec(tuple(items)))


def _bytes(ins: Instruction) -> int:
    """Return the bytes that a load or store moves in each lane."""
    count = {"v2": 2, "v4": 4}.get(ins.parts[-2], 1)
    return count * TYPE_BYTES[ins.parts[-1]]


def unrolling(code: Sequence[Instruction]) -> set[int]:
    """Return which comparisons only choose between an unrolled loop and its remainder.

    They stand for nothing in the source. Where ``n & 3`` is taken, this is ``n < 4``, or ``m < 3``
    with n = m + 1, or ``l < 96`` with m = l >> 5.
    """
    made = {ins.operands[0]: ins for ins in code if ins.parts[0] in ("add", "shr")}
    choices = set()
    for ins in code:
        if ins.opcode != "and.b32" or not isinstance(ins.operands[2], Imm):
            continue
        number, last = ins.operands[1], ins.operands[2].value
        choices.add((number, last + 1))
        before = made.get(number)
        if before is not None and before.operands[2] == Imm(1):
            number = before.operands[1]
            choices.add((number, last))
            before = made.get(number)
            if before is not None and before.parts[0] == "shr":
                shift = before.operands[2]
                if isinstance(shift, Imm):
                    choices.add((before.operands[1], last << shift.value))
        choices |= {
            (each.operands[0], last)
            for each in made.values()
            if each.operands[1:] == (number, Imm(-1))
        }
    return {
        at
        for at, ins in enumerate(code)
        if ins.parts[0] == "setp"
        and ins.parts[1] in ("lt", "gt", "ge")
        and isinstance(ins.operands[2], Imm)
        and (ins.operands[1], ins.operands[2].value) in choices
    }


def mutations(ins: Instruction) -> Iterator[Mutation]:
    """Yield (kind, instructions instead) for every single fault of an instruction."""
    name = ins.opcode
    for prefix in DROPPED:
        if name.startswith(prefix) and "prefetch" not in name:
            yield f"drop {prefix}", []
    for start, family in _FAMILIES.items():
        if name == start or name.startswith(start + "."):
            yield from family(ins)
    if ins.guard is not None:
        register, negated = ins.guard
        if ins.parts[0] == "bra":
            yield "branch inverted", [replace(ins, guard=(register, not negated))]
        else:
            yield "guard left out", [replace(ins, guard=None)]


def _mbarrier_init(ins: Instruction) -> Iterator[Mutation]:
    yield "one arrival more expected", _moved(ins, 1, 1)
    yield "one arrival fewer expected", _moved(ins, 1, -1)


def _arrive(ins: Instruction) -> Iterator[Mutation]:
    at = 0 if isinstance(ins.operands[0], Mem) else 1
    yield "arrives twice", [ins, ins]
    yield "arrives at the next barrier", _moved(ins, at, 8)
    if "expect_tx" in ins.parts:
        yield "16 bytes too many expected", _moved(ins, at + 1, 16)
        yield "16 bytes too few expected", _moved(ins, at + 1, -16)
        plain = _opcode(ins, [p for p in ins.parts if p != "expect_tx"])
        yield "no bytes expected", [replace(plain, operands=ins.operands[: at + 1])]
    elif "relaxed" not in ins.parts:
        yield "arrives without releasing", [_relaxed(ins, 2)]


def _relaxed(ins: Instruction, at: int) -> Instruction:
    scope = "cluster" if "cluster" in ins.parts else "cta"
    rest = [p for p in ins.parts[at:] if p not in ("release", "acquire", "cluster", "cta")]
    return _opcode(ins, [*ins.parts[:at], "relaxed", scope, *rest])


def _wait(ins: Instruction) -> Iterator[Mutation]:
    passed = replace(
        ins, opcode="setp.eq.u32", parts=("setp", "eq", "u32"),
        operands=(ins.operands[0], Imm(0), Imm(0)),
    )  # fmt: skip
    yield "no wait", [passed]
    yield "waits for the other phase", _moved(ins, 2, 1, "xor")
    yield "waits at the next barrier", _moved(ins, 1, 8)
    yield "waits without acquiring", [_relaxed(ins, 3)]


def _bar(ins: Instruction) -> Iterator[Mutation]:
    if len(ins.operands) > 1:
        yield "another barrier's number", _moved(ins, 0, 1)
        yield "32 threads too many at a barrier", _moved(ins, 1, 32)


def _cluster_arrive(ins: Instruction) -> Iterator[Mutation]:
    relaxed = ["relaxed" if p == "release" else p for p in ins.parts]
    yield "cluster barrier without releasing", [_opcode(ins, relaxed)]


def _wait_group(ins: Instruction) -> Iterator[Mutation]:
    yield "one group more left in flight", _moved(ins, 0, 1)


def _bulk(ins: Instruction) -> Iterator[Mutation]:
    if "tensor" in ins.parts:
        yield "copied 128 bytes further", _moved(ins, 0, 128)
        source = ins.operands[1]
        assert isinstance(source, Mem)
        (coordinates,) = source.extra
        assert isinstance(coordinates, Vec)
        for i, each in enumerate(coordinates.items):
            before, after = _changed(ins, each, 1, "add")
            items = [*coordinates.items]
            items[i] = after
            changed = _with(ins, 1, replace(source, extra=(Vec(tuple(items)),)))
            yield "coordinate one too large", [*before, changed]
        yield "signals the next barrier", _moved(ins, 2, 8)
        return
    yield "copied 16 bytes further", _moved(ins, 0, 16)
    yield "copied from 16 bytes further", _moved(ins, 1, 16)
    yield "16 bytes more copied", _moved(ins, 2, 16)
    yield "16 bytes fewer copied", _moved(ins, 2, -16)
    yield "signals the next barrier", _moved(ins, 3, 8)


def _st_async(ins: Instruction) -> Iterator[Mutation]:
    yield "shared store address", _moved(ins, 0, 16)
    yield "signals the next barrier", _moved(ins, 2, 8)


def _mapa(ins: Instruction) -> Iterator[Mutation]:
    yield "another CTA of the cluster", _moved(ins, 2, 1, "xor")


def _shared_store(ins: Instruction) -> Iterator[Mutation]:
    yield "shared store address", _moved(ins, 0, _bytes(ins))


def _shared_load(ins: Instruction) -> Iterator[Mutation]:
    yield "shared load address", _moved(ins, 1, _bytes(ins))


def _global_store(ins: Instruction) -> Iterator[Mutation]:
    yield "global store address", _moved(ins, 0, _bytes(ins))


def _global_load(ins: Instruction) -> Iterator[Mutation]:
    yield "global load address", _moved(ins, 1, _bytes(ins))


def _generic_store(ins: Instruction) -> Iterator[Mutation]:
    if len(ins.parts) == 2 or ins.parts[1] in ("v2", "v4"):  # no state space
        yield "drop st.global", []
        yield from _global_store(ins)


def _ldmatrix(ins: Instruction) -> Iterator[Mutation]:
    yield "ldmatrix address", _moved(ins, 1, 16)


def _stmatrix(ins: Instruction) -> Iterator[Mutation]:
    yield "stmatrix address", _moved(ins, 0, 16)


def _atom(ins: Instruction) -> Iterator[Mutation]:
    if isinstance(ins.operands[2], Imm):
        yield "constant one too large", _moved(ins, 2, 1)


def _setp(ins: Instruction) -> Iterator[Mutation]:
    compare, kind = ins.parts[1], ins.parts[-1]
    if kind[0] not in "us":
        return
    if compare in _NEXT:
        yield "bound off by one", [_opcode(ins, ["setp", _NEXT[compare], *ins.parts[2:]])]
    elif compare in _OTHER:
        yield "equality inverted", [_opcode(ins, ["setp", _OTHER[compare], *ins.parts[2:]])]


def _selp(ins: Instruction) -> Iterator[Mutation]:
    to, one, other, condition = ins.operands
    yield "selection swapped", [replace(ins, operands=(to, other, one, condition))]


def _min_max(ins: Instruction) -> Iterator[Mutation]:
    other = "max" if ins.parts[0] == "min" else "min"
    yield "min and max exchanged", [_opcode(ins, [other, *ins.parts[1:]])]


def _constant(ins: Instruction) -> Iterator[Mutation]:
    """Make constants too large: by one, or by a unit where they are distances of aligned things."""
    for at in range(1, len(ins.operands)):
        operand = ins.operands[at]
        if not isinstance(operand, Imm) or operand.kind != "int" or ins.parts[-1] == "pred":
            continue
        unit = min(operand.value & -operand.value, 1024)
        if operand.value >= 256 and unit >= 16:  # descriptors and masks drop the bits below
            yield "constant a unit too large", _moved(ins, at, unit)
        elif operand.value == 1 and ins.parts[0] == "mov":  # a flag is as true when it is 2
            yield "constant one too small", _moved(ins, at, -1)
        else:
            yield "constant one too large", _moved(ins, at, 1)


def _shl(ins: Instruction) -> Iterator[Mutation]:
    if isinstance(ins.operands[2], Imm):
        yield "stride doubled", _moved(ins, 2, 1)


def _multiply(ins: Instruction) -> Iterator[Mutation]:
    if isinstance(ins.operands[1], Reg):
        kind = "b32" if "f16x2" in ins.parts else "f32"
        move = replace(ins, opcode=f"mov.{kind}", parts=("mov", kind), operands=ins.operands[:2])
        yield "factor left out", [move]


def _cvt(ins: Instruction) -> Iterator[Mutation]:
    if ins.parts[1] == "rn" and ins.parts[-1] == "f32":
        yield "rounded toward zero", [_opcode(ins, ["cvt", "rz", *ins.parts[2:]])]


def _mma_sync(ins: Instruction) -> Iterator[Mutation]:
    a, b = ins.operands[1], ins.operands[2]
    assert isinstance(a, Vec) and isinstance(b, Vec)
    yield "registers of A exchanged", [_element(ins, 1, [a.items[1], a.items[0], *a.items[2:]])]
    yield "registers of B exchanged", [_element(ins, 2, [*reversed(b.items)])]


def _wgmma(ins: Instruction) -> Iterator[Mutation]:
    a = ins.operands[1]
    if isinstance(a, Vec):
        yield "registers of A exchanged", [_element(ins, 1, [a.items[1], a.items[0], *a.items[2:]])]
    yield "descriptor address", _moved(ins, 2, 2)
    yield "descriptor stride", _moved(ins, 2, 1 << 34, "xor")
    yield "descriptor swizzle", _moved(ins, 2, 1 << 62, "xor")


def _shfl(ins: Instruction) -> Iterator[Mutation]:
    if "bfly" in ins.parts:  # masks that are one larger may still reach every lane
        yield "shuffled from another lane", [_with(ins, 2, Imm(0))]
    else:
        yield "shuffled from another lane", _moved(ins, 2, 1)


def _redux(ins: Instruction) -> Iterator[Mutation]:
    if "or" in ins.parts:
        yield "another reduction", [_opcode(ins, ["and" if p == "or" else p for p in ins.parts])]


def _tmem_size(ins: Instruction) -> Iterator[Mutation]:
    columns = ins.operands[1]
    if isinstance(columns, Imm):
        yield "half the columns", [_with(ins, 1, replace(columns, value=columns.value // 2))]
    else:
        yield "half the columns", _moved(ins, 1, 256 + 512, "xor")


def _commit(ins: Instruction) -> Iterator[Mutation]:
    yield "commits to the next barrier", _moved(ins, 0, 8)
    if "multicast::cluster" in ins.parts:
        yield "commits to one CTA only", _moved(ins, 1, 2, "xor")


def _tcgen05_cp(ins: Instruction) -> Iterator[Mutation]:
    yield "scales one column further", _moved(ins, 0, 1)
    yield "descriptor address", _moved(ins, 1, 1)
    yield "descriptor stride", _moved(ins, 1, 1 << 35, "xor")
    yield "descriptor version", _moved(ins, 1, 1 << 46, "xor")


def _tcgen05_mma(ins: Instruction) -> Iterator[Mutation]:
    yield "accumulator one column further", _moved(ins, 0, 1)
    for at in (1, 2):
        yield "descriptor address", _moved(ins, at, 2)
        yield "descriptor stride", _moved(ins, at, 1 << 38, "xor")
        yield "descriptor swizzle", _moved(ins, at, 1 << 62, "xor")
        yield "descriptor version", _moved(ins, at, 1 << 46, "xor")
    for kind, bit in (
        ("N of the instruction", 17),
        ("M of the instruction", 28),
        ("element type of the instruction", 7),
        ("scale type of the instruction", 23),
        ("sign of the instruction", 13),
    ):
        yield kind, _moved(ins, 3, 1 << bit, "xor")
    yield "A's scales one column further", _moved(ins, 4, 1)
    yield "B's scales one column further", _moved(ins, 5, 1)
    yield "accumulation inverted", _inverted(ins, 6)


def _inverted(ins: Instruction, at: int) -> list[Instruction]:
    flag = ins.operands[at]
    assert isinstance(flag, Reg)
    first = _compute(ins, "not.pred", flag, flag)
    return [first, _with(ins, at, first.operands[0])]


def _tcgen05_ld(ins: Instruction) -> Iterator[Mutation]:
    yield "accumulator one column further", _moved(ins, 1, 1)
    yield "accumulator 32 lanes further", _moved(ins, 1, 32 << 16)


_FAMILIES = {
    "mapa": _mapa,
    "mbarrier.init": _mbarrier_init,
    "mbarrier.arrive": _arrive,
    "mbarrier.try_wait": _wait,
    "mbarrier.test_wait": _wait,
    "bar.sync": _bar,
    "barrier.sync": _bar,
    "barrier.cluster.arrive": _cluster_arrive,
    "wgmma.wait_group": _wait_group,
    "cp.async.bulk": _bulk,
    "st.async": _st_async,
    "st.shared": _shared_store,
    "st.shared::cluster": _shared_store,
    "ld.shared": _shared_load,
    "st.global": _global_store,
    "ld.global": _global_load,
    "st": _generic_store,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "atom": _atom,
    "setp": _setp,
    "selp": _selp,
    "min": _min_max,
    "max": _min_max,
    "add": _constant,
    "sub": _constant,
    "mad": _constant,
    "mul.lo": _constant,
    "mul.wide": _constant,
    "mov.u32": _constant,
    "mov.b32": _constant,
    "mov.u64": _constant,
    "mov.b64": _constant,
    "shl": _shl,
    "mul.f32": _multiply,
    "mul.rn.f16x2": _multiply,
    "cvt": _cvt,
    "mma.sync": _mma_sync,
    "wgmma.mma_async": _wgmma,
    "shfl.sync": _shfl,
    "redux.sync": _redux,
    "tcgen05.alloc": _tmem_size,
    "tcgen05.dealloc": _tmem_size,
    "tcgen05.commit": _commit,
    "tcgen05.cp": _tcgen05_cp,
    "tcgen05.mma": _tcgen05_mma,
    "tcgen05.ld": _tcgen05_ld,
}
