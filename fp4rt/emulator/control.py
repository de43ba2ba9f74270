"""Control flow: branches, calls, exits, and the instructions that only steer a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .builtins import BUILTINS
from .program import CODE_WINDOW, FILE, STACK_BYTES, Decoder, Handler, register
from .ptx import TYPE_BYTES, Args, Function, Imm, Instruction, Operand, Reg, Sym, Variable
from .stack import pointers
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp


class Frame:
    """A call in progress: where it returns to, and what its return does."""

    __slots__ = (
        "code",
        "depth",
        "function",
        "local_base",
        "parent",
        "return_pc",
        "returns",
        "saved",
    )

    def __init__(
        self,
        return_pc: int,
        function: str,
        local_base: int,
        parent: Frame | None,
        returns: Callable[[Warp, Any], None],
        saved: Any = None,
    ) -> None:
        self.return_pc, self.function, self.local_base = return_pc, function, local_base
        self.parent, self.returns, self.saved = parent, returns, saved
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.code = hash((return_pc, local_base, id(saved), hash(parent)))

    def __eq__(self, other: object) -> bool:
        mine: Frame | None = self
        while mine is not other:
            if not isinstance(other, Frame) or mine is None or mine.code != other.code:
                return False
            if (mine.return_pc, mine.local_base) != (other.return_pc, other.local_base):
                return False
            if mine.saved is not other.saved:
                return False
            mine, other = mine.parent, other.parent
        return True

    def __hash__(self) -> int:
        return self.code


def go(w: Warp, target: int, m: Mask, frame: Any) -> bool:
    """Send the lanes `m` of the present fragment to `target` with call stack `frame`."""
    frag = w.frag
    if m is None or int(np.count_nonzero(m)) == frag.count:
        frag.pc, frag.frame = target, frame
        return False
    w.split(target, m)
    w.fragments[-1].frame = frame
    return True


@register("bra")
def _bra(ins: Instruction, d: Decoder) -> Handler:
    target = _label(ins.operands[0], d)

    def run(w: Warp, m: Mask) -> Any:
        if m is None:
            w.frag.pc = target
            return None
        if int(np.count_nonzero(m)) == w.frag.count:
            w.frag.pc = target
            return None
        w.split(target, m)
        return True

    return run


def _label(op: Operand, d: Decoder) -> int:
    d.need(isinstance(op, Sym), "branch target")
    assert isinstance(op, Sym)
    return d.program.base[d.function.name] + d.function.labels[op.name]


@register("brx")
def _brx(ins: Instruction, d: Decoder) -> Handler:
    index = d.read(ins.operands[0], "u32")
    table_name = ins.operands[1]
    assert isinstance(table_name, Sym)
    scope = ins.scope
    targets = []
    for name in d.function.tables[table_name.name]:
        unique = scope.find(name)
        label = unique if isinstance(unique, str) else name
        targets.append(d.program.base[d.function.name] + d.function.labels[label])
    table = np.array(targets)

    def run(w: Warp, m: Mask) -> Any:
        active = w.active(m) & w.frag.lanes()
        chosen = index(w)
        if (chosen[active] >= len(table)).any():
            raise w.fault(
                f"brx.idx with index {int(chosen[active].max())}, but the table has {len(table)}"
            )
        places = table[np.where(active, chosen, 0)]
        return spread(w, active, places)

    return run


def spread(w: Warp, active: Any, places: Any) -> bool:
    """Send each active lane of the present fragment to its own place."""
    unique = np.unique(places[active])
    for place in unique[1:]:
        w.split(int(place), active & (places == place))
    rest = active & (places == unique[0])
    go(w, int(unique[0]), rest, w.frag.frame)
    return len(unique) > 1 or bool(np.count_nonzero(rest) != w.frag.count)


@register("ret")
def _ret(ins: Instruction, d: Decoder) -> Handler:
    entry = d.function.entry

    def run(w: Warp, m: Mask) -> Any:
        frame = w.frag.frame
        if frame is None:
            if not entry:
                raise w.fault("ret with an empty call stack")
            w.leave(m)
            return True
        lanes = w.active(m) & w.frag.lanes()
        frame.returns(w, lanes)
        return go(w, frame.return_pc, lanes, frame.parent)

    return run


@register("exit")
def _exit(ins: Instruction, d: Decoder) -> Handler:
    def run(w: Warp, m: Mask) -> Any:
        w.leave(m)
        return True

    return run


@register("trap")
def _trap(ins: Instruction, d: Decoder) -> Handler:
    def run(w: Warp, m: Mask) -> Any:
        why = ""
        if w.program.uses_special("%envreg"):
            why = (
                "; the kernel asks for the workspace of a cooperative launch (grid-wide "
                "synchronisation), which launches here do not have"
            )
        raise w.fault("trap" + why)

    return run


@register("brkpt")
def _brkpt(ins: Instruction, d: Decoder) -> Handler:
    def run(w: Warp, m: Mask) -> Any:
        raise w.fault("breakpoint (brkpt)")

    return run


@register("nanosleep")
def _nanosleep(ins: Instruction, d: Decoder) -> Handler:
    d.read(ins.operands[0], "u32")

    def run(w: Warp, m: Mask) -> Any:
        return w.spin()

    return run


@register("pmevent")
def _pmevent(ins: Instruction, d: Decoder) -> Handler:
    return lambda w, m: None


@register("setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32")
def _setmaxnreg(ins: Instruction, d: Decoder) -> Handler:
    count = d.constant(ins.operands[0])
    d.whole_warp()

    def run(w: Warp, m: Mask) -> Any:
        if not 24 <= count <= 256 or count % 8:
            raise w.fault(f"setmaxnreg {count}: must be a multiple of 8 in 24..256")

    return run


@register("griddepcontrol.wait", "griddepcontrol.launch_dependents")
def _griddepcontrol(ins: Instruction, d: Decoder) -> Handler:
    if ins.parts[1] == "launch_dependents":
        return lambda w, m: w.machine.trigger(w.cta)

    def run(w: Warp, m: Mask) -> Any:
        before = w.launch.previous
        if before is None or before.finished:
            w.note_wait()
            return None
        return w.block(
            f"the end of kernel {before.name}, which this grid depends on",
            lambda: before.finished,
            w.note_wait,
        )

    return run


# -------------------------------------------------------------------------------------- calls

Action = Callable[["Warp", Any], None]
Copy = Callable[["Warp", Any], Callable[[], None]]
"""Takes the value now and returns what writes it: a function's formals may be its own arguments."""


def _place(d: Decoder, func: Function, name: str) -> int:
    return d.program.param_offsets[func.name, name]


def _copy(d: Decoder, op: Operand, formal: Variable, callee: Function, back: bool) -> Copy:
    """Return a copy between the caller's `op` and the callee's `formal` (back: to the caller)."""
    size = formal.size
    if formal.space == "reg":
        row = d.program.rows.of(_class(formal.type), (callee.name, formal.name))
        file = FILE[formal.type]
        own_file, own = d.row(op, formal.type)

        def registers(w: Warp, lanes: Any) -> Callable[[], None]:
            mine, callees = w.files[own_file][own], w.files[file][row]
            into, values = (mine, callees.copy()) if back else (callees, mine.copy())
            if into.ndim > 1:
                lanes = lanes[:, None]
            return lambda: np.copyto(into, values, where=lanes)

        return registers
    inner = _place(d, callee, formal.name)
    if isinstance(op, Sym):
        outer = _place(d, d.function, op.name)
        source, target = (inner, outer) if back else (outer, inner)

        def memory(w: Warp, lanes: Any) -> Callable[[], None]:
            blocks = [b.reshape(32, w.params.stride) for b in (w.params.data, w.params.valid)]
            values = [rows[lanes, source : source + size] for rows in blocks]

            def put() -> None:
                for rows, taken in zip(blocks, values, strict=True):
                    rows[lanes, target : target + size] = taken

            return put

        return memory
    type_ = f"b{size * 8}"
    file, row = d.row(op, type_)

    def register_memory(w: Warp, lanes: Any) -> Callable[[], None]:
        index = np.flatnonzero(lanes)
        at = np.full(len(index), inner)
        register = w.files[file][row]
        if back:
            loaded = w.params.load(index, at, size, min(size, 8))

            def put() -> None:
                register[lanes] = loaded if size > 8 else loaded[:, 0]

            return put
        values = register[lanes] if size > 8 else register[lanes][:, None]
        return lambda: w.params.store(index, at, values, size)

    return register_memory


def _class(type: str) -> str:
    if type == "pred":
        return "pred"
    return {1: "b16", 2: "b16", 4: "b32", 8: "b64", 16: "b128"}[TYPE_BYTES[type]]


class _Target:
    """One callee of one call instruction: argument copies in, result copies out."""

    def __init__(self, d: Decoder, func: Function, args: Args, results: Args) -> None:
        if len(args.items) != len(func.params) or len(results.items) != len(func.returns):
            raise d.illegal(f"call of {func.name} with the wrong number of arguments")
        self.func = func
        self.start = d.program.base[func.name]
        self.copies = [
            _copy(d, op, var, func, False) for op, var in zip(args.items, func.params, strict=True)
        ]
        self.back = [
            _copy(d, op, var, func, True)
            for op, var in zip(results.items, func.returns, strict=True)
        ]
        self.recursive = d.program.recursive
        self.frame_bytes = d.program.local_frames[d.function.name]
        self.callee_bytes = d.program.local_frames[func.name]
        self.local_limit = d.program.local_size - (STACK_BYTES if d.program.has_stack else 0)
        self.rows = d.program.rows
        self.has_stack = d.program.has_stack
        self.formals = [
            slice(_place(d, func, var.name), _place(d, func, var.name) + var.size)
            for var in (*func.params, *(v for v in func.variables.values() if v.space == "param"))
            if var.space == "param"
        ]

    def saved(self, w: Warp, frame: Frame | None) -> Any:
        """Return copies of the callee's state if a call of it is in progress already."""
        above = frame
        while above is not None and above.function != self.func.name:
            above = above.parent
        if above is None:
            return None
        kept = []
        for cls, file in (("pred", 0), ("b16", 1), ("b32", 4), ("b64", 7), ("b128", 10)):
            for key, row in self.rows.rows[cls].items():
                if isinstance(key, tuple) and key[0] == self.func.name:
                    kept.append((w.files[file][row], w.files[file][row].copy()))
        for block in (w.params.data, w.params.valid):
            rows = block.reshape(32, w.params.stride)
            kept.extend((rows[:, where], rows[:, where].copy()) for where in self.formals)
        return kept

    def enter(self, w: Warp, m: Mask) -> bool:
        """Call it with the lanes `m`."""
        lanes = w.active(m) & w.frag.lanes()
        frame = w.frag.frame
        saved = self.saved(w, frame) if self.recursive else None
        for put in [copy(w, lanes) for copy in self.copies]:
            put()
        base = 0
        if self.recursive:
            base = (frame.local_base if frame is not None else 0) + self.frame_bytes
            if base + self.callee_bytes > self.local_limit:
                raise w.fault(
                    f"call stack overflow: {base + self.callee_bytes} of {self.local_limit} bytes "
                    "of local memory in use"
                )
        top = pointers(w).copy() if self.has_stack else None
        back = self.back

        def returns(w: Warp, lanes: Any) -> None:
            puts = [copy(w, lanes) for copy in back]
            for where, values in saved or ():
                where[lanes] = values[lanes]
            for put in puts:
                put()
            if top is not None:
                np.copyto(pointers(w), top, where=lanes)

        new = Frame(w.at + 1, self.func.name, base, frame, returns, top if saved is None else saved)
        return go(w, self.start, lanes, new)


@register("call")
def _call(ins: Instruction, d: Decoder) -> Handler:
    ops = list(ins.operands)
    results = ops.pop(0) if isinstance(ops[0], Args) else Args(())
    callee = ops.pop(0)
    args = ops.pop(0) if ops and isinstance(ops[0], Args) else Args(())
    assert isinstance(results, Args) and isinstance(args, Args)
    functions = d.program.module.functions
    if isinstance(callee, Sym) and callee.name in functions:
        func = functions[callee.name]
        if not func.defined:
            builtin = BUILTINS.get(callee.name)
            if builtin is None:
                raise d.illegal(f"call of {callee.name}, which no module defines")
            return builtin(d, args, results)
        return _Target(d, func, args, results).enter
    assert isinstance(callee, Reg | Imm)
    pointer = d.read(callee, "u64")
    names = list(functions)
    targets: dict[int, _Target] = {}

    def run(w: Warp, m: Mask) -> Any:
        lanes = w.active(m) & w.frag.lanes()
        value = int(pointer(w)[lanes.argmax()])
        same = lanes & (pointer(w) == np.uint64(value))
        rest = lanes & ~same
        if rest.any():
            w.split(w.at, rest)
        target = targets.get(value)
        if target is None:
            index = value - CODE_WINDOW
            if not 0 <= index < len(names) or names[index] not in d.program.base:
                raise w.fault(f"indirect call of {value:#x}, which is no function")
            target = targets[value] = _Target(d, functions[names[index]], args, results)
        target.enter(w, None if same.all() else same)
        return True

    return run
