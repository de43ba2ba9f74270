"""cvt: conversions between every pair of types, and the small formats of tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .floats import narrow, widen
from .program import DTYPES, Decoder, Handler, register
from .ptx import TYPE_BYTES, Instruction, Operand, Reg, Vec
from .rounding import SMALLEST_NORMAL, bf16_to_f32, round_tf32, two_sum
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

F64 = np.float64
_MODES = {"rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi"}
_REAL = {"f16", "bf16", "f32", "f64"}
_NAN32 = np.uint32(0x7FFFFFFF)

SMALL: dict[str, tuple[int, int, int, float, int | None]] = {
    # name: exponent bits, mantissa bits, bias, largest finite value, code of NaN (None: no NaN)
    "e4m3": (4, 3, 7, 448.0, 0x7F),
    "e5m2": (5, 2, 15, 57344.0, 0x7F),
    "e2m1": (2, 1, 1, 6.0, None),
    "e2m3": (2, 3, 1, 7.5, None),
    "e3m2": (3, 2, 3, 28.0, None),
}


@cache
def decode_table(name: str) -> Any:
    """Return the float64 value of every code of a small format (sign bit included)."""
    exponent_bits, mantissa_bits, bias, _, _ = SMALL[name]
    count = 1 << (exponent_bits + mantissa_bits)
    codes = np.arange(count)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    magnitude = np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias),
        (1 + fraction) * np.exp2((exponent - bias).astype(F64)),
    )
    if name == "e4m3":
        magnitude[0x7F] = np.nan
    if name == "e5m2":
        magnitude[0x7C] = np.inf
        magnitude[0x7D:] = np.nan
    return np.concatenate([magnitude, -magnitude])


def encode_small(x: Any, name: str, relu: bool = False) -> Any:
    """Return the codes (uint8) nearest to float64 values: ties to even, saturating."""
    _, mantissa_bits, bias, largest, nan = SMALL[name]
    bad = np.isnan(x)
    if relu:
        x = np.where(np.signbit(x) & (x == x), 0.0, x)
    magnitude = np.minimum(np.abs(np.where(bad, 0.0, x)), 2 * largest)
    _, exponent = np.frexp(magnitude)
    exponent = np.maximum(exponent - 1, 1 - bias)
    quantum = np.exp2((exponent - mantissa_bits).astype(F64))
    value = np.minimum(np.rint(magnitude / quantum) * quantum, largest)
    table = decode_table(name)
    positive = table[: len(table) // 2]
    codes = np.searchsorted(positive[np.isfinite(positive)], value).astype(np.uint8)
    codes = codes | (np.signbit(x) * np.uint8(len(positive)))
    if nan is None:
        full = np.searchsorted(positive, largest)
        return np.where(bad, full, codes).astype(np.uint8)
    return np.where(bad, nan, codes).astype(np.uint8)


def _scale_code(x: Any, up: bool) -> Any:
    """Return the ue8m0 codes of float64 magnitudes, rounded up or toward zero, saturating."""
    mantissa, exponent = np.frexp(np.abs(x))
    power = exponent - 1 + ((mantissa > 0.5) if up else 0)
    code = np.clip(power + 127, 0, 254)
    code = np.where(x == 0, 0, np.where(np.isinf(x), 254, code))
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


def _source(d: Decoder, op: Operand, type_: str) -> Callable[[Any], Any]:
    """Return a getter of a source whose register may be wider than its type."""
    if isinstance(op, Reg) and type_ in TYPE_BYTES:
        have, size = TYPE_BYTES[op.type], TYPE_BYTES[type_]
        if have > size and type_ not in _REAL:
            get = d.read(op, f"u{max(have, 2) * 8}")
            unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]
            dtype = DTYPES[type_]
            return lambda w: get(w).astype(unsigned).view(dtype)
        if have == 1:
            get = d.read(op, "u16")
            dtype = DTYPES[type_]
            return lambda w: get(w).astype(np.uint8).view(dtype)
    return d.read(op, type_)


def _destination(d: Decoder, op: Operand, type_: str) -> Callable[[Any, Any, Mask], None]:
    """Return a setter that extends values to a wider register."""
    if isinstance(op, Reg):
        have, size = TYPE_BYTES[op.type], TYPE_BYTES.get(type_, 0)
        if type_ not in _REAL and max(have, 2) > size:
            sign = "s" if type_[0] == "s" else "u"
            put = d.write(op, f"{sign}{max(have, 2) * 8}")
            dtype = DTYPES[f"{sign}{max(have, 2) * 8}"]
            return lambda w, values, m: put(w, values.astype(dtype), m)
    return d.write(op, "u16" if type_ in ("f16", "bf16") else type_)


@register("cvt")
def _cvt(ins: Instruction, d: Decoder) -> Handler:
    if ins.parts[1] == "pack":
        return _pack(ins, d)
    out, source = ins.parts[-2], ins.parts[-1]
    mods = set(ins.parts[1:-2])
    if "rs" in mods:
        raise d.unsupported("stochastic rounding is not emulated")
    d.need(mods <= {*_MODES, "ftz", "sat", "satfinite", "relu", "scaled"}, f"modifier {mods}")
    mode = next((p for p in mods if p in _MODES), "")
    if out.endswith(("x2", "x4")) or source.endswith("x2") or "ue8m0" in out + source:
        return _packed(ins, d, out, source, mods, mode or "rn")
    if out == "tf32":
        return _tf32(ins, d, mods, mode)
    get, put = (
        _source(d, ins.operands[1], "u16" if source == "bf16" else source),
        _destination(d, ins.operands[0], out),
    )
    fn = conversion(out, source, mode, mods)

    def run(w: Warp, m: Mask) -> None:
        put(w, fn(get(w)), m)

    return run


def conversion(out: str, source: str, mode: str, mods: set[str]) -> Callable[[Any], Any]:
    """Return the function for a scalar conversion, on register contents."""
    if source in _REAL and out in _REAL:
        return _float_float(out, source, mode, mods)
    if source in _REAL:
        return _float_int(out, source, mode, "ftz" in mods)
    if out in _REAL:
        return _int_float(out, mode or "rn", "sat" in mods)
    dtype = DTYPES[out]
    if "sat" in mods:
        return lambda a: _clip(a, out).astype(dtype)
    return lambda a: a.astype(dtype)


def _clip(a: Any, out: str) -> Any:
    info = np.iinfo(DTYPES[out])
    have = np.iinfo(a.dtype)
    low, high = max(info.min, have.min), min(info.max, have.max)
    return np.clip(a, a.dtype.type(low), a.dtype.type(high))


def _flush(x: Any, kind: str) -> Any:
    return np.where(np.abs(x) < SMALLEST_NORMAL[kind], np.copysign(0.0, x), x)


_INTEGRAL: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


def _quiet(x: Any) -> Any:
    return (x.view(np.uint64) | np.uint64(1 << 51)).view(F64)


def _float_float(out: str, source: str, mode: str, mods: set[str]) -> Callable[[Any], Any]:
    ftz, sat, relu = "ftz" in mods, "sat" in mods, "relu" in mods
    finite = "satfinite" in mods
    limit = {"f16": 65504.0, "bf16": 3.3895313892515355e38}.get(out, np.inf)

    if source == "bf16" and out == "f32" and not mods:
        return bf16_to_f32

    def run(a: Any) -> Any:
        x = widen(a, source)
        if ftz and source == "f32":
            x = _flush(x, source)
        if mode in _INTEGRAL:
            x = _INTEGRAL[mode](x)
        if sat:
            x = np.where(x > 0, np.minimum(x, 1.0), 0.0)
        if relu:
            x = np.where(np.signbit(x) & (x == x), 0.0, x)
        if finite:
            x = np.clip(x, -limit, limit)
        if out == "f64":
            return np.where(x != x, _quiet(x), x)
        r = narrow(x, out, mode if mode in ("rz", "rm", "rp") else "rn")
        if source == "f64":  # a NaN keeps the upper bits of its payload, as measured
            if out == "f32":
                r = np.where(x != x, a.astype(np.float32), r)
            elif out == "f16":
                r = np.where(x != x, a.astype(np.float16).view(np.uint16), r)
        if ftz and out == "f32":
            r = _flush(r, out).astype(np.float32)
        return r

    return run


def _float_int(out: str, source: str, mode: str, ftz: bool) -> Callable[[Any], Any]:
    info = np.iinfo(DTYPES[out])
    dtype = DTYPES[out]
    wide = source == "f64" or TYPE_BYTES[out] == 8
    bad = 1 << (TYPE_BYTES[out] * 8 - 1) if wide else 0
    nan = np.array([bad], np.uint64).astype(DTYPES["u" + out[1:]]).view(dtype)[0]
    integral = _INTEGRAL[mode or "rzi"]

    def run(a: Any) -> Any:
        x = widen(a, source)
        if ftz and source == "f32":
            x = _flush(x, source)
        unknown = np.isnan(x)
        x = integral(np.where(unknown, 0.0, x))
        high, low = x >= float(info.max), x <= float(info.min)
        inside = np.where(high | low, 0.0, x)
        value = inside.astype(dtype)
        value = np.where(high, dtype(info.max), np.where(low, dtype(info.min), value))
        return np.where(unknown, nan, value)

    return run


def _int_float(out: str, mode: str, sat: bool) -> Callable[[Any], Any]:
    def run(a: Any) -> Any:
        if a.dtype.itemsize == 8:
            high = (a >> a.dtype.type(32)).astype(F64) * 2.0**32
            x = two_sum(high, (a & a.dtype.type(0xFFFFFFFF)).astype(F64))
            if out == "f64":
                return _double(a, mode)
        else:
            x = a.astype(F64)
        if sat:
            x = np.clip(x, 0.0, 1.0)
        return narrow(x, out, mode)

    return run


def _double(a: Any, mode: str) -> Any:
    r = a.astype(F64)
    if mode == "rn":
        return r
    for i in range(len(r)):
        error = int(r[i]) - int(a[i])
        down = error > 0 and (mode == "rm" or (mode == "rz" and a[i] > 0))
        up = error < 0 and (mode == "rp" or (mode == "rz" and a[i] < 0))
        if down or up:
            r[i] = np.nextafter(r[i], np.inf if up else -np.inf)
    return r


def _tf32(ins: Instruction, d: Decoder, mods: set[str], mode: str) -> Handler:
    get, put = d.read(ins.operands[1], "f32"), d.write(ins.operands[0], "b32")
    relu, finite = "relu" in mods, "satfinite" in mods

    def run(w: Warp, m: Mask) -> None:
        a = get(w)
        x = a.astype(F64)
        if relu:
            x = np.where(np.signbit(x) & (x == x), 0.0, x)
        bits = round_tf32(x, mode)
        # NaNs as measured: .rna cuts the payload, the others give all ones.
        cut = (a.view(np.uint32) & np.uint32(0xFFFFE000)) | np.uint32(0x400000)
        bits = np.where(x == x, bits, cut if mode == "rna" else np.uint32(0x7FFFE000))
        if finite:
            sign = bits & np.uint32(0x80000000)
            infinite = (bits & _NAN32) == np.uint32(0x7F800000)
            bits = np.where(infinite, sign | np.uint32(0x7F7FE000), bits)
        put(w, bits, m)

    return run


def _packed(
    ins: Instruction, d: Decoder, out: str, source: str, mods: set[str], mode: str
) -> Handler:
    relu, finite = "relu" in mods, "satfinite" in mods
    small_out, small_in = out.removesuffix("x2"), source.removesuffix("x2")
    encode: Callable[[Any], Any]
    if small_out in SMALL:
        d.need(finite and mode == "rn", "needs .rn.satfinite")

        def encode(x: Any) -> Any:
            codes = encode_small(x, small_out, relu)
            if small_out == "e2m1":
                return (codes[:, 0] | codes[:, 1] << 4).astype(np.uint16)
            return codes[:, 0].astype(np.uint16) | codes[:, 1].astype(np.uint16) << 8

    elif small_out == "ue8m0":
        d.need(mode in ("rz", "rp"), "needs .rz or .rp")

        def encode(x: Any) -> Any:
            codes = _scale_code(x, mode == "rp")
            return codes[:, 0].astype(np.uint16) | codes[:, 1].astype(np.uint16) << 8

    elif out in ("f16x2", "bf16x2"):
        limit = 65504.0 if out == "f16x2" else 3.3895313892515355e38

        def encode(x: Any) -> Any:
            if relu:
                x = np.where(np.signbit(x) & (x == x), 0.0, x)
            if finite:
                x = np.clip(x, -limit, limit)
            return narrow(np.ascontiguousarray(x).reshape(-1), out, mode)

    else:
        raise d.unsupported(f"conversion to {out}")
    reg = "u32" if out in ("f16x2", "bf16x2") else "u16"
    dst = ins.operands[0]
    if isinstance(dst, Reg) and TYPE_BYTES[dst.type] == 1:
        d.need(small_out == "e2m1", "an 8-bit destination")
    put = d.write(dst, reg)
    if source == "f32":
        high, low = (d.read(op, "f32") for op in ins.operands[1:3])
        d.need(len(ins.operands) == 3, "stochastic rounding")

        def two(w: Warp, m: Mask) -> None:
            put(w, encode(np.stack([low(w), high(w)], axis=1).astype(F64)), m)

        return two
    if source in ("f16x2", "bf16x2"):
        get = d.read(ins.operands[1], "u32")
        return lambda w, m: put(w, encode(widen(get(w), source).reshape(-1, 2)), m)
    if small_in == "ue8m0":
        get = d.read(ins.operands[1], "u16")

        def scales(w: Warp, m: Mask) -> None:
            codes = get(w).view(np.uint8).reshape(-1, 2)
            x = np.where(codes == 255, np.nan, np.exp2(codes.astype(F64) - 127))
            put(w, encode(x), m)

        return scales
    d.need(small_in in SMALL, f"conversion from {source}")
    table = decode_table(small_in)
    get = d.read(ins.operands[1], "u16")
    nibbles = small_in == "e2m1"

    def decode(w: Warp, m: Mask) -> None:
        bits = get(w)
        low, high = (bits & 15, bits >> 4 & 15) if nibbles else (bits & 255, bits >> 8)
        mask = np.uint16(len(table) - 1)
        put(w, encode(np.stack([table[low & mask], table[high & mask]], axis=1)), m)

    return decode


def _pack(ins: Instruction, d: Decoder) -> Handler:
    """cvt.pack.sat.convertType.abType{.cType}: saturate two integers and pack them."""
    d.need(ins.parts[2] == "sat", "needs .sat")
    kind = ins.parts[3]
    source = ins.parts[4]
    bits = {"u16": 16, "s16": 16, "u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2}[kind]
    dst, a, b, *rest = ins.operands
    get_a, get_b = d.read(a, source), d.read(b, source)
    c = d.read(rest[0], "u32") if rest else None
    put = d.write(dst, "u32")
    low = -(1 << (bits - 1)) if kind[0] == "s" else 0
    high = (1 << (bits - 1)) - 1 if kind[0] == "s" else (1 << bits) - 1
    mask = (1 << bits) - 1

    def run(w: Warp, m: Mask) -> None:
        x = np.clip(get_a(w).astype(np.int64), low, high) & mask
        y = np.clip(get_b(w).astype(np.int64), low, high) & mask
        value = (x << bits | y).astype(np.uint64)
        if c is not None:
            value = value | c(w).astype(np.uint64) << np.uint64(2 * bits)
        put(w, value.astype(np.uint32), m)

    return run


__all__ = ["SMALL", "Vec", "conversion", "decode_table", "encode_small"]
