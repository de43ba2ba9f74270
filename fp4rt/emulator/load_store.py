"""Loads, stores, atomics and address arithmetic in every state space."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .atomics import OPERATIONS
from .memory import LOCAL_WINDOW, SHARED_WINDOW, Violation
from .program import DTYPES, Decoder, Getter, Handler, local_base, register
from .ptx import TYPE_BYTES, Instruction, Mem, Operand, Reg, Special, Sym, Vec
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

_UINT: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SHARED_HIGH = np.uint64(SHARED_WINDOW >> 32)
_LOCAL_HIGH = np.uint64(LOCAL_WINDOW >> 32)
_LOW = np.uint64(0xFFFFFFFF)
_IGNORED = {
    "weak", "unified", "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "cta", "cluster", "gpu",
    "sys", "noftz",
    *(f"L{i}::{hint}" for i in (1, 2) for hint in (
        "evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate",
        "cache_hint", "64B", "128B", "256B")),
}  # fmt: skip
_SPACES = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "local": "local",
    "shared::cluster": "cluster", "const": "global", "param": "param", "param::entry": "param",
    "param::func": "param",
}  # fmt: skip
_STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}


# ------------------------------------------------------------------------------------- access


def _by_rank(w: Warp, addresses: Any) -> Any:
    """Yield (Shared, offsets, selection) for shared::cluster addresses."""
    ranks = addresses >> 24
    for rank in np.unique(ranks):
        if not 0 <= rank < len(w.cluster.ctas):
            raise Violation(
                f"shared address {int(addresses[ranks == rank][0]):#x} names CTA rank {rank}, but "
                f"the cluster has {len(w.cluster.ctas)} CTAs"
            )
        cta = w.cluster.ctas[rank]
        if cta is not w.cta and not cta.live_warps:
            raise Violation(
                f"access to shared memory of CTA rank {rank}, which has exited; keep it alive with "
                "a cluster barrier"
            )
        pick = ranks == rank
        yield cta.shared, addresses[pick] & 0xFFFFFF, pick


def _own(w: Warp, addresses: Any) -> Any:
    """Return offsets of shared::cta addresses in the own window."""
    rank = w.cta.rank
    offsets = addresses - (rank << 24) if rank else addresses
    if ((offsets >> 24) != 0).any():
        bad = int(addresses[((offsets >> 24) != 0).argmax()])
        raise Violation(
            f"shared::cta access at {bad:#x} lies outside the CTA's own window (rank {rank}); "
            "another CTA's memory needs .shared::cluster"
        )
    return offsets


def _generic(w: Warp, addresses: Any) -> Any:
    """Yield (space, addresses, selection) for generic addresses."""
    high = addresses >> np.uint64(32)
    shared, local = high == _SHARED_HIGH, high == _LOCAL_HIGH
    if not shared.any() and not local.any():
        yield "global", addresses, slice(None)
        return
    for space, pick in (("cluster", shared), ("local", local), ("global", ~shared & ~local)):
        if pick.any():
            part = addresses[pick]
            yield space, part if space == "global" else part & _LOW, pick


def load_lanes(
    w: Warp, lanes: Any, addresses: Any, size: int, unit: int, space: str, strength: str = ""
) -> Any:
    """Load uint[n, size/unit] for `lanes` at uint64[n] addresses of `space`, all checks made.

    `strength` is ``""`` (weak), ``"relaxed"`` or ``"acquire"``.
    """
    if space == "global":
        w.machine.counters["bytes.global.load"] += len(addresses) * size
        return w.machine.memory.load(addresses, size, unit)
    if space == "shared":
        offsets = _own(w, addresses.astype(np.int64))
        got = w.cta.shared.load(w, lanes, offsets, size, unit, strong=bool(strength))
        if strength:
            _strong(w, w.cta.shared, offsets, False, strength == "acquire")
        return got
    if space == "cluster":
        out = np.empty((len(addresses), size // unit), _UINT[unit])
        for shared, offsets, pick in _by_rank(w, addresses.astype(np.int64)):
            out[pick] = shared.load(w, lanes[pick], offsets, size, unit, strong=bool(strength))
            if strength:
                _strong(w, shared, offsets, False, strength == "acquire")
        return out
    if space == "local":
        return w.local.load(lanes, addresses.astype(np.int64), size, unit)
    if space == "param":
        return w.params.load(lanes, addresses.astype(np.int64), size, unit)
    out = np.empty((len(addresses), size // unit), _UINT[unit])
    for part, where, pick in _generic(w, addresses):
        out[pick] = load_lanes(w, lanes[pick], where, size, unit, part, strength)
    return out


def store_lanes(
    w: Warp, lanes: Any, addresses: Any, values: Any, size: int, space: str, strength: str = ""
) -> None:
    """Store uint[n, size/unit] values; see `load_lanes`; `strength` may be ``"release"``."""
    if space == "global":
        w.machine.counters["bytes.global.store"] += len(addresses) * size
        w.machine.memory.store(addresses, values, size)
        return
    if space == "shared":
        offsets = _own(w, addresses.astype(np.int64))
        w.cta.shared.store(w, lanes, offsets, values, size, strong=bool(strength))
        if strength:
            _strong(w, w.cta.shared, offsets, True, strength == "release")
    elif space == "cluster":
        for shared, offsets, pick in _by_rank(w, addresses.astype(np.int64)):
            shared.store(w, lanes[pick], offsets, values[pick], size, strong=bool(strength))
            if strength:
                _strong(w, shared, offsets, True, strength == "release")
    elif space == "local":
        w.local.store(lanes, addresses.astype(np.int64), values, size)
    elif space == "param":
        w.params.store(lanes, addresses.astype(np.int64), values, size)
    else:
        for part, where, pick in _generic(w, addresses):
            store_lanes(w, lanes[pick], where, values[pick], size, part, strength)


def _strong(w: Warp, shared: Any, offsets: Any, write: bool, ordered: bool) -> None:
    for offset in set(offsets.tolist()):
        clock = shared.location_clock(offset)
        if write:
            w.agent.strong_write(clock, ordered, w.acting())
        else:
            w.agent.strong_read(clock, ordered)


class _Modifiers:
    """What the dotted parts of a memory instruction say."""

    def __init__(self, d: Decoder, parts: tuple[str, ...]) -> None:
        self.space, self.vector, self.type, self.strength = "generic", 1, "", ""
        self.cache_hint = False
        for part in parts:
            if part in _SPACES:
                self.space = _SPACES[part]
                self.constant = part == "const"
            elif part in ("v2", "v4", "v8"):
                self.vector = int(part[1:])
            elif part in TYPE_BYTES:
                self.type = part
            elif part in _STRONG:
                self.strength = part if part in ("acquire", "release") else "relaxed"
            elif part in _IGNORED:
                self.cache_hint |= part == "L2::cache_hint"
            else:
                raise d.unsupported(f"modifier .{part}")
        d.need(bool(self.type), "no type")


def memory_address(d: Decoder, op: Operand, mods: _Modifiers) -> Getter:
    """Return a getter of uint64[32] addresses in the instruction's space."""
    base = op.base if isinstance(op, Mem) else op
    if isinstance(base, Sym):
        space, _ = d.symbol(base.name)
        if mods.space == "generic" and space in ("shared", "local"):
            mods.space = space
        if mods.space == "local" and d.program.recursive:
            plain = d.program.local_offsets[d.function.name, base.name]
            offset = base.offset + (op.offset if isinstance(op, Mem) else 0) + plain
            return lambda w: np.full(32, offset + local_base(w), np.uint64)
    return d.address(op)


@register("ld", "ldu")
def _ld(ins: Instruction, d: Decoder) -> Handler:
    mods = _Modifiers(d, ins.parts[1:])
    dst, src = ins.operands[0], ins.operands[1]
    unit = TYPE_BYTES[mods.type]
    size = unit * mods.vector
    put = [_putter(d, op, mods.type) for op in (dst.items if isinstance(dst, Vec) else (dst,))]
    d.need(len(put) == mods.vector, "vector length")
    if isinstance(src, Mem) and isinstance(src.base, Sym) and mods.space == "param":
        space, at = d.symbol(src.base.name)
        if space == "kernel_param":
            return _ld_kernel_param(d, put, mods, at + src.base.offset + src.offset, size, unit)
    space_of = _param_space(d, src, mods)
    if space_of == "kernel_param":
        return _ld_param_pointer(d, put, d.address(src), size, unit)
    address = memory_address(d, src, mods)
    space, strength = mods.space, mods.strength
    part = min(unit, 8)
    wide = unit == 16

    def run(w: Warp, m: Mask) -> None:
        where = address(w)
        lanes = _LANES
        if m is not None:
            lanes = np.flatnonzero(m)
            where = where[lanes]
        if where.ndim == 0:
            where = np.full(len(lanes), where)
        got = load_lanes(w, lanes, where, size, part, space, strength)
        if wide:
            for i, setter in enumerate(put):
                setter(w, got[:, 2 * i : 2 * i + 2], lanes, m)
            return
        for i, setter in enumerate(put):
            setter(w, got[:, i], lanes, m)

    return run


_LANES = np.arange(32)
Putter = Callable[["Warp", Any, Any, Mask], None]


def _putter(d: Decoder, op: Operand, type: str) -> Putter:
    """Return a setter of loaded uint[n] values that widens them to the register."""
    if not isinstance(op, Reg):
        return lambda w, values, lanes, m: None
    have = TYPE_BYTES[op.type]
    size = TYPE_BYTES[type]
    if have < size:
        raise d.illegal(f"register {op.name} is narrower than .{type}")
    if size == 16:
        file, row = d.row(op, "b128")

        def put_wide(w: Warp, values: Any, lanes: Any, m: Mask) -> None:
            w.files[file][row][lanes] = values

        return put_wide
    signed = type[0] == "s" and have > size
    kind = f"{'s' if signed else 'u'}{have * 8}" if have > 1 else "u16"
    file, row = d.row(op, kind)
    view = DTYPES[f"s{size * 8}"] if signed else None

    def put(w: Warp, values: Any, lanes: Any, m: Mask) -> None:
        if view is not None:
            values = values.astype(_UINT[size]).view(view)
        if m is None:
            w.files[file][row][:] = values
        else:
            w.files[file][row][lanes] = values

    return put


def _param_space(d: Decoder, op: Operand, mods: _Modifiers) -> str:
    """Return "kernel_param" for a register address in .param space of an entry."""
    base = op.base if isinstance(op, Mem) else op
    if mods.space == "param" and not isinstance(base, Sym) and d.function.entry:
        return "kernel_param"
    return mods.space


def _ld_kernel_param(
    d: Decoder, put: list[Putter], mods: _Modifiers, at: int, size: int, unit: int
) -> Handler:
    if not 0 <= at <= d.program.param_bytes - size:
        raise d.illegal(
            f"ld.param of {size} bytes at {at} lies outside the {d.program.param_bytes} bytes of "
            "parameters"
        )
    if at % size:
        raise d.illegal(f"misaligned ld.param: offset {at} is no multiple of {size}")
    part = min(unit, 8)
    count = size // part

    def run(w: Warp, m: Mask) -> None:
        lanes = _LANES if m is None else np.flatnonzero(m)
        values = w.launch.params.data[at : at + size].view(_UINT[part])
        for i, setter in enumerate(put):
            if unit == 16:
                setter(w, values[2 * i : 2 * i + 2], lanes, m)
            else:
                setter(w, values[i : i + 1], lanes, m)

    d.need(count >= len(put))
    return run


def _ld_param_pointer(
    d: Decoder, put: list[Putter], address: Getter, size: int, unit: int
) -> Handler:
    part = min(unit, 8)

    def run(w: Warp, m: Mask) -> None:
        lanes = _LANES if m is None else np.flatnonzero(m)
        where = address(w)[lanes] + np.uint64(w.launch.params.base)
        got = w.machine.memory.load(where, size, part)
        for i, setter in enumerate(put):
            setter(w, got[:, i], lanes, m)

    return run


@register("st")
def _st(ins: Instruction, d: Decoder) -> Handler:
    mods = _Modifiers(d, ins.parts[1:])
    dst, src = ins.operands[0], ins.operands[1]
    unit = TYPE_BYTES[mods.type]
    size = unit * mods.vector
    items = src.items if isinstance(src, Vec) else (src,)
    d.need(len(items) == mods.vector, "vector length")
    get = [_stored(d, op, mods.type) for op in items]
    d.need(mods.space != "param" or not d.function.entry or _is_local_param(d, dst))
    address = memory_address(d, dst, mods)
    space, strength = mods.space, mods.strength
    part = _UINT[min(unit, 8)]
    single = len(get) == 1 and unit < 16

    def run(w: Warp, m: Mask) -> None:
        where = address(w)
        lanes = _LANES
        if m is not None:
            lanes = np.flatnonzero(m)
            where = where[lanes]
        if single:
            values = get[0](w)[lanes].astype(part)[:, None]
        elif unit == 16:
            values = np.concatenate([g(w)[lanes] for g in get], axis=1)
        else:
            values = np.empty((len(lanes), len(get)), part)
            for i, g in enumerate(get):
                values[:, i] = g(w)[lanes]
        if unit == 4:
            tags = w.state.get("tags")
            if tags is not None and tags.sources:
                tags.check_stored(values)
        store_lanes(w, lanes, where, values, size, space, strength)
        if strength:
            w.machine.poke()

    return run


@register("st.bulk")
def _st_bulk(ins: Instruction, d: Decoder) -> Handler:
    d.need(set(ins.parts[2:]) <= {"weak", "shared::cta"})
    to = d.shared_address(ins.operands[0])
    count = d.read(ins.operands[1], "u64")
    d.need(d.constant(ins.operands[2]) == 0, "an initial value other than 0")

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            size = int(count(w)[lane])
            if size % 8:
                raise w.fault(f"st.bulk of {size} bytes: must be a multiple of 8")
            if size:
                cta, offset = w.cluster.resolve(w, int(to(w)[lane]), size, 8, "cta")
                cta.shared.write_bytes(w, slice(offset, offset + size), 0)

    return run


def _is_local_param(d: Decoder, op: Operand) -> bool:
    base = op.base if isinstance(op, Mem) else op
    return isinstance(base, Sym) and d.symbol(base.name)[0] == "param"


def _stored(d: Decoder, op: Operand, type: str) -> Getter:
    size = TYPE_BYTES[type]
    if isinstance(op, Reg):
        have = TYPE_BYTES[op.type]
        if have < size:
            raise d.illegal(f"register {op.name} is narrower than .{type}")
        if size == 16:
            return d.read(op, "b128")
        return d.read(op, f"u{max(have, 2) * 8}" if have != 1 else "u16")
    return d.read(op, "u16" if size == 1 else f"b{size * 8}")


# ----------------------------------------------------------------------------------- atomics


@register("atom", "red")
def _atom(ins: Instruction, d: Decoder) -> Handler:
    wants = ins.parts[0] == "atom"
    parts = list(ins.parts[1:])
    name = next((p for p in parts if p in OPERATIONS), "")
    d.need(bool(name), "operation")
    parts.remove(name)
    kinds = [p for p in parts if p in ("f16x2", "bf16x2", "bf16")]
    plain = tuple(p for p in parts if p not in kinds)
    if kinds:
        plain = (*plain, "b32" if kinds[0].endswith("x2") else "b16")
    mods = _Modifiers(d, plain)
    type_ = kinds[0] if kinds else mods.type
    unit = TYPE_BYTES[type_]
    size = unit * mods.vector
    ops = list(ins.operands)
    dst = ops.pop(0) if wants else None
    address = memory_address(d, ops.pop(0), mods)
    count = 2 if name == "cas" else 1
    inputs = []
    for op in ops[:count]:
        inputs.append(
            [
                _stored(d, item, type_ if unit == 16 else f"b{unit * 8}")
                for item in (op.items if isinstance(op, Vec) else (op,))
            ]
        )
    put = []
    if dst is not None:
        items = dst.items if isinstance(dst, Vec) else (dst,)
        put = [_putter(d, op, f"b{unit * 8}") for op in items]
    apply = OPERATIONS[name](type_)
    space, ordered = mods.space, _sem(ins.parts)
    part = min(unit, 8)

    def run(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        where = address(w)[lanes]
        columns = [
            np.concatenate([g(w)[lanes] for g in group], axis=1)
            if unit == 16
            else np.stack([g(w)[lanes].astype(_UINT[part]) for g in group], axis=1)
            for group in inputs
        ]
        old = np.empty((len(lanes), size // part), _UINT[part])
        changed = False
        for pick in rounds(where):
            # Lanes of one round have distinct addresses; rounds follow one another.
            before = load_lanes(
                w,
                lanes[pick],
                where[pick],
                size,
                part,
                space,
                "acquire" if ordered[0] else "relaxed",
            )
            after = apply(before, *(c[pick] for c in columns))
            store_lanes(
                w, lanes[pick], where[pick], after, size, space,
                "release" if ordered[1] else "relaxed",
            )  # fmt: skip
            old[pick] = before
            changed |= before.tobytes() != after.tobytes()
        if changed:  # a lock that is taken already stays as it is: polling it is no progress
            w.machine.poke()
        w.machine.count("atomics", len(lanes))
        for i, setter in enumerate(put):
            setter(w, old[:, 2 * i : 2 * i + 2] if unit == 16 else old[:, i], lanes, m)

    return run


def _sem(parts: tuple[str, ...]) -> tuple[bool, bool]:
    return "acquire" in parts or "acq_rel" in parts, "release" in parts or "acq_rel" in parts


def rounds(addresses: Any) -> list[Any]:
    """Split lanes into groups of distinct addresses, in lane order."""
    _, inverse, counts = np.unique(addresses, return_inverse=True, return_counts=True)
    if counts.max() == 1:
        return [np.arange(len(addresses))]
    seen = np.zeros(len(counts), int)
    turn = np.empty(len(addresses), int)
    for i, group in enumerate(inverse):
        turn[i] = seen[group]
        seen[group] += 1
    return [np.flatnonzero(turn == t) for t in range(int(counts.max()))]


# --------------------------------------------------------------------------------- addresses


@register("cvta")
def _cvta(ins: Instruction, d: Decoder) -> Handler:
    to = ins.parts[1] == "to"
    space = ins.parts[2 if to else 1]
    type_ = ins.parts[-1]
    d.need(type_ == "u64", "32-bit generic addresses")
    dst, src = ins.operands[0], ins.operands[1]
    put = d.write(dst, "u64")
    window = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "local": LOCAL_WINDOW,
              "shared::cluster": SHARED_WINDOW, "global": 0, "const": 0, "param": -1,
              "param::entry": -1}.get(space)  # fmt: skip
    d.need(window is not None, space)
    assert window is not None
    if isinstance(src, Sym):
        get = d.address(src)
    else:
        get = d.read(src, "u64")
    high = np.uint64(max(window, 0) >> 32)

    def run(w: Warp, m: Mask) -> None:
        value = get(w)
        if window < 0:
            base = np.uint64(w.launch.params.base)
            put(w, value - base if to else value + base, m)
        elif window == 0:
            put(w, value, m)
        elif to:
            lanes = w.active(m)
            if ((value >> np.uint64(32) != high) & lanes & (value != 0)).any():
                bad = value[((value >> np.uint64(32) != high) & lanes).argmax()]
                raise w.fault(f"cvta.to.{space} of {int(bad):#x}, which is not in {space} memory")
            put(w, value & _LOW, m)
        else:
            put(w, (value & _LOW) | np.uint64(window), m)

    return run


@register("isspacep")
def _isspacep(ins: Instruction, d: Decoder) -> Handler:
    space = ins.parts[1]
    put, get = d.write(ins.operands[0], "pred"), d.read(ins.operands[1], "u64")
    d.need(space in (*_SPACES, "param::entry"), space)

    def run(w: Warp, m: Mask) -> None:
        value = get(w)
        high = value >> np.uint64(32)
        shared = high == _SHARED_HIGH
        if space == "shared::cluster":
            result = shared
        elif space in ("shared", "shared::cta"):
            result = shared & ((value & _LOW) >> np.uint64(24) == w.cta.rank)
        elif space == "local":
            result = high == _LOCAL_HIGH
        elif space.startswith("param"):
            base = np.uint64(w.launch.params.base)
            result = (value >= base) & (value < base + np.uint64(0x10000))
        elif space == "const":
            result = np.array([_is_const(w, int(v)) for v in value])
        else:
            result = ~shared & (high != _LOCAL_HIGH)
        put(w, result, m)

    return run


def _is_const(w: Warp, address: int) -> bool:
    try:
        return w.machine.memory.find(address).readonly
    except Violation:
        return False


@register("mapa", "getctarank")
def _mapa(ins: Instruction, d: Decoder) -> Handler:
    type_ = ins.parts[-1]
    explicit = "shared::cluster" in ins.parts
    rank_only = ins.parts[0] == "getctarank"
    get = d.read(ins.operands[1], type_)
    bits = _UINT[TYPE_BYTES[type_]]
    put = d.write(ins.operands[0], "u32" if rank_only else type_)
    rank = d.read(ins.operands[2], "u32") if not rank_only else None

    def run(w: Warp, m: Mask) -> None:
        value = get(w)
        if not explicit:
            high = value.astype(np.uint64) >> np.uint64(32)
            if (high[w.lanes(m)] != _SHARED_HIGH).any():
                raise w.fault("generic address is not in shared memory")
        if rank is None:
            put(w, (value >> bits(24) & bits(0xFF)).astype(np.uint32), m)
            return
        ranks = rank(w)
        if (ranks[w.lanes(m)] >= len(w.cluster.ctas)).any():
            bad = int(ranks[w.lanes(m)].max())
            raise w.fault(f"mapa to CTA rank {bad}, but the cluster has {len(w.cluster.ctas)} CTAs")
        put(w, (value & ~bits(0xFF000000)) | (ranks.astype(bits) << bits(24)), m)

    return run


# ------------------------------------------------------------------- hints without an effect


@register("prefetch", "prefetchu", "applypriority", "discard")
def _prefetch(ins: Instruction, d: Decoder) -> Handler:
    return lambda w, m: None


@register("createpolicy")
def _createpolicy(ins: Instruction, d: Decoder) -> Handler:
    put = d.write(ins.operands[0], "b64")
    return lambda w, m: put(w, np.uint64(0x1000000000000000), m)


__all__ = ["Special", "load_lanes", "rounds", "store_lanes"]
