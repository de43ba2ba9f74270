"""Instructions across a warp: shuffles, votes, matches, reductions, elections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .lanes import FULL, bits_of, member
from .program import Decoder, Handler, register
from .ptx import Instruction, Not, Operand, Pair, Sink
from .warp import Fragment, Mask

if TYPE_CHECKING:
    from .warp import Warp

Groups = list[tuple[Any, int]]


def _all_here(w: Warp, frag: Fragment, want: int) -> bool:
    return (want & bits_of(w.live) & ~bits_of(frag.lanes())) == 0


def _membership(d: Decoder, op: Operand) -> Callable[[Any, Mask], Groups | bool]:
    """Return a function giving (lanes, membermask) groups, or True if the warp must wait."""
    mask_of = d.read(op, "u32")

    def groups(w: Warp, m: Mask) -> Groups | bool:
        masks = mask_of(w)
        if m is None:
            first = int(masks[0])
            if first == FULL and bool((masks == np.uint32(FULL)).all()):
                w.agent.gather(stores=False)
                return [(np.ones(32, bool), FULL)]
        active = w.active(m)
        found: Groups = []
        left = active.copy()
        while left.any():
            want = int(masks[left.argmax()])
            lanes = active & (masks == np.uint32(want))
            left &= ~lanes
            member(w, lanes, want)
            missing = want & bits_of(w.live) & ~bits_of(lanes)
            if missing:
                frag = w.frag
                here = bits_of(frag.lanes())
                if missing & here:
                    raise w.fault(
                        f"membermask {want:#010x} names lanes {missing & here:#010x}, which do "
                        "not execute the instruction with that mask"
                    )
                name = w.instruction_text(w.at)
                why = f"lanes {missing:#010x}, which its membermask {want:#010x} names, at {name}"
                return w.gather(why, partial(_all_here, w, frag, want))
            found.append((lanes, want))
        return found

    return groups


def _sources(mode: str, b: Any, c: Any) -> tuple[Any, Any]:
    """Return the lane that each lane of a shuffle reads, and whether that is in range."""
    lane = np.arange(32)
    b, c = (b & np.uint32(31)).astype(np.int64), c.astype(np.int64)
    segment, clamp = (c >> 8) & 31, c & 31
    top = (lane & segment) | (clamp & ~segment & 31)
    if mode == "up":
        j = lane - b
        ok = j >= top
    elif mode == "down":
        j = lane + b
        ok = j <= top
    elif mode == "bfly":
        j = lane ^ b
        ok = j <= top
    else:
        j = (lane & segment) | (b & ~segment & 31)
        ok = j <= top
    return np.where(ok, j, lane) & 31, ok


@register("shfl.sync")
def _shfl(ins: Instruction, d: Decoder) -> Handler:
    mode = ins.parts[2]
    d.need(mode in ("up", "down", "bfly", "idx") and ins.parts[-1] == "b32")
    dst, a, b, c, mask = ins.operands
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())
    put, put_pred = d.write(first, "b32"), d.write(second, "pred")
    source, lane_arg, clamp_arg = d.read(a, "b32"), d.read(b, "b32"), d.read(c, "b32")
    members = _membership(d, mask)
    known: dict[tuple[bytes, bytes], tuple[Any, Any]] = {}  # the operands are mostly constants

    def run(w: Warp, m: Mask) -> Any:
        groups = members(w, m)
        if groups is True:
            return True
        b, c = lane_arg(w), clamp_arg(w)
        key = b.tobytes(), c.tobytes()
        found = known.get(key)
        if found is None:
            if len(known) == 256:
                known.clear()
            found = known[key] = _sources(mode, b, c)
        j, ok = found
        values = source(w)[j]
        assert isinstance(groups, list)
        if m is not None or groups[0][1] != FULL:
            for lanes, _ in groups:
                # A lane that does not take part gives an undefined value.
                values = np.where(lanes & ~lanes[j], np.uint32(0x7FBADBAD), values)
        put(w, values, m)
        put_pred(w, ok, m)
        return None

    return run


@register("vote.sync")
def _vote(ins: Instruction, d: Decoder) -> Handler:
    mode = ins.parts[2]
    dst, a, mask = ins.operands
    flip = isinstance(a, Not)
    get = d.read(a.operand if isinstance(a, Not) else a, "pred")
    put = d.write(dst, "b32" if mode == "ballot" else "pred")
    members = _membership(d, mask)

    def run(w: Warp, m: Mask) -> Any:
        groups = members(w, m)
        if groups is True:
            return True
        assert isinstance(groups, list)
        value = ~get(w) if flip else get(w)
        for lanes, _ in groups:
            mine = value[lanes]
            if mode == "ballot":
                out: Any = np.uint32(bits_of(value & lanes))
            elif mode == "all":
                out = bool(mine.all())
            elif mode == "any":
                out = bool(mine.any())
            else:
                out = bool(mine.all() or not mine.any())
            put(w, out, None if lanes.all() else lanes)
        return None

    return run


@register("match.any.sync", "match.all.sync")
def _match(ins: Instruction, d: Decoder) -> Handler:
    everyone = ins.parts[1] == "all"
    dst, a, mask = ins.operands
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())
    put, put_pred = d.write(first, "b32"), d.write(second, "pred")
    get = d.read(a, ins.parts[-1])
    members = _membership(d, mask)

    def run(w: Warp, m: Mask) -> Any:
        groups = members(w, m)
        if groups is True:
            return True
        assert isinstance(groups, list)
        values = get(w)
        out = np.zeros(32, np.uint32)
        same = np.zeros(32, bool)
        for lanes, _ in groups:
            if everyone:
                equal = bool((values[lanes] == values[lanes.argmax()]).all())
                out[lanes] = bits_of(lanes) if equal else 0
                same[lanes] = equal
            else:
                for value in np.unique(values[lanes]):
                    hit = lanes & (values == value)
                    out[hit] = bits_of(hit)
        put(w, out, m)
        put_pred(w, same, m)
        return None

    return run


@register("redux.sync")
def _redux(ins: Instruction, d: Decoder) -> Handler:
    op, type_ = ins.parts[2], ins.parts[-1]
    dst, a, mask = ins.operands
    get, put = d.read(a, type_), d.write(dst, type_)
    members = _membership(d, mask)
    table: dict[str, Callable[[Any], Any]] = {
        "add": lambda v: np.add.reduce(v, dtype=v.dtype),
        "min": np.min,
        "max": np.max,
        "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }
    fn = table[op]
    if type_ == "f32":
        nan = "NaN" in ins.parts
        pick: Any = {
            "min": np.min if nan else np.fmin.reduce,
            "max": np.max if nan else np.fmax.reduce,
        }
        fn = pick[op]
    absolute = "abs" in ins.parts

    def run(w: Warp, m: Mask) -> Any:
        groups = members(w, m)
        if groups is True:
            return True
        assert isinstance(groups, list)
        values = np.abs(get(w)) if absolute else get(w)
        for lanes, _ in groups:
            put(w, fn(values[lanes]), None if lanes.all() else lanes)
        return None

    return run


@register("elect.sync")
def _elect(ins: Instruction, d: Decoder) -> Handler:
    dst, mask = ins.operands
    assert isinstance(dst, Pair)
    put, put_pred = d.write(dst.first, "b32"), d.write(dst.second, "pred")
    members = _membership(d, mask)

    def run(w: Warp, m: Mask) -> Any:
        groups = members(w, m)
        if groups is True:
            return True
        assert isinstance(groups, list)
        for lanes, _ in groups:
            leader = int(lanes.argmax())  # the lowest lane, as measured on hardware
            chosen = np.zeros(32, bool)
            chosen[leader] = True
            where = None if lanes.all() else lanes
            put(w, np.uint32(leader), where)
            put_pred(w, chosen, where)
        return None

    return run


@register("activemask")
def _activemask(ins: Instruction, d: Decoder) -> Handler:
    put = d.write(ins.operands[0], "b32")
    return lambda w, m: put(w, np.uint32(bits_of(w.active(m))), m)
