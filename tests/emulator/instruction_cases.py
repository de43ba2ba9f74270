"""Single PTX instructions with their inputs, run alike on a GPU and in the emulator.

Each case becomes one kernel of a PTX module: thread i loads element i of every input, executes the
instruction and stores the result. `recorded` fixtures hold a checksum for every 32 results of a
GPU, and whole results where PTX leaves the last bits to the hardware.
"""

# ruff: noqa: E501 (one case a line)
from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import numpy as np

BITS = {
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f16x2": 4, "bf16x2": 4, "amount": 4, "e8": 2,
    "small": 4, "nibbles": 4, "unit": 4, "positive": 4, "e4": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An instruction: its text with {d}, {a}, {b}, {c}, and the kinds of result and inputs."""

    name: str
    text: str
    out: str
    inputs: tuple[str, ...]
    count: int = 1024
    ulps: int = 0  # allowed distance in units of the last place, for the .approx instructions
    absolute: float = 0.0  # or in value

    @property
    def entry(self) -> str:
        return "case_" + self.name.replace(".", "_").replace("::", "_")


def _register(kind: str) -> str:
    return {2: "b16", 4: "b32", 8: "b64"}[BITS[kind]]


def ptx(cases: list[Case]) -> str:
    """Return a PTX module with an entry for every case; parameters: three inputs, the output."""
    body = [".version 8.6", ".target sm_90a", ".address_size 64"]
    for case in cases:
        regs = "\n".join(
            f"  .reg .{_register(kind)} %{letter};"
            for letter, kind in zip(
                "abcd", (*case.inputs, *["b32"] * (3 - len(case.inputs)), case.out), strict=True
            )
        )
        loads = "\n".join(
            f"""  ld.param.u64 %p, [params+{8 * i}];
  mad.wide.u32 %q, %i, {BITS[kind]}, %p;
  ld.global.{_register(kind)} %{letter}, [%q];"""
            for i, (letter, kind) in enumerate(zip("abc", case.inputs, strict=False))
        )
        text = case.text.format(d="%d", a="%a", b="%b", c="%c")
        body.append(f"""
.visible .entry {case.entry}(.param .align 8 .b8 params[32])
{{
  .reg .b32 %i, %t, %u;
  .reg .b64 %p, %q;
  .reg .pred %f, %g;
{regs}
  mov.u32 %i, %tid.x;
  mov.u32 %t, %ctaid.x;
  mov.u32 %u, %ntid.x;
  mad.lo.u32 %i, %t, %u, %i;
{loads}
  {{ {text} }}
  ld.param.u64 %p, [params+24];
  mad.wide.u32 %q, %i, {BITS[case.out]}, %p;
  st.global.{_register(case.out)} [%q], %d;
  ret;
}}""")
    return "\n".join(body)


_EDGES32 = np.array(
    [0, 1, 2, 3, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000,
     0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF], np.uint32,
)  # fmt: skip
_FLOATS32 = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.4e38, -3.4e38, 1e-38, 1e-45, -1e-45, np.inf,
     -np.inf, np.nan, 65504, 65520, 448, 464, 6, 5, 0.25, 0.75, 2147483648.0, -2147483648.0,
     4294967296.0, 9.3e18, 0.99999994, 1.0000001], np.float32,
)  # fmt: skip


def inputs(case: Case) -> list[np.ndarray]:
    """Return the case's input arrays; the same on every machine."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    return [_values(kind, case.count, rng, i) for i, kind in enumerate(case.inputs)]


def _values(kind: str, n: int, rng: np.random.Generator, position: int) -> np.ndarray:
    if kind == "amount":  # shift amounts, bit positions, lengths
        return rng.integers(0, 80, n).astype(np.uint32)
    if kind == "small":
        return rng.integers(-3, 4, n).astype(np.int32).view(np.uint32)
    if kind == "unit":
        return rng.uniform(-4, 4, n).astype(np.float32).view(np.uint32)
    if kind == "positive":
        return np.exp2(rng.uniform(-120, 120, n)).astype(np.float32).view(np.uint32)
    if kind in ("f32", "f64"):
        wide = np.where(
            rng.random(n) < 0.5,
            rng.standard_normal(n) * np.exp2(rng.integers(-30, 31, n)),
            np.round(rng.standard_normal(n) * 100) / 8,
        )
        with np.errstate(all="ignore"):
            if kind == "f32":
                f = wide.astype(np.float32)
                raw = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
                f = np.where(rng.random(n) < 0.25, raw, f)
                edges = _FLOATS32
            else:
                f = np.where(rng.random(n) < 0.25, wide * 2.0 ** rng.integers(-900, 900, n), wide)
                edges = np.concatenate([_FLOATS32.astype(np.float64), [5e-324, 1e308, -1e308]])
        k = min(len(edges), n)
        f[:k] = np.roll(edges, 7 * position)[:k]
        f = f.astype(np.float32 if kind == "f32" else np.float64)
        f = np.where(np.isnan(f), f.dtype.type(np.nan), f)
        return f.view(np.uint32 if kind == "f32" else np.uint64)
    size = BITS[kind]
    if size == 2 and n == 65536:
        return np.arange(65536, dtype=np.uint16)
    if size == 2:
        return rng.integers(0, 65536, n).astype(np.uint16)
    if size == 8:
        raw = rng.integers(0, 2**64, n, dtype=np.uint64)
        raw[::3] = rng.integers(0, 1000, len(raw[::3]))
        edges64 = np.concatenate([_EDGES32.astype(np.uint64), ~_EDGES32.astype(np.uint64)])
        raw[: len(edges64)] = np.roll(edges64, 5 * position)
        return raw
    raw = rng.integers(0, 2**32, n, dtype=np.uint32)
    if kind in ("f16x2", "bf16x2"):
        if n == 65536:
            low = np.arange(65536, dtype=np.uint32)
            return low | ((low * 40503 + 12345) & 0xFFFF) << 16
        return raw
    raw[::3] = rng.integers(0, 1000, len(raw[::3]))
    raw[: len(_EDGES32)] = np.roll(_EDGES32, 5 * position)
    return raw


def covers(wide: str, narrow: str) -> bool:
    """Whether every value of one integer type is one of another (.sat is illegal then)."""
    if narrow[0] == "s" and wide[0] == "u":
        return False
    return int(wide[1:]) >= int(narrow[1:]) + (wide[0] != narrow[0])


_VIDEO = (
    "vadd.u32.u32.s32 {d}, {a}, {b};",
    "vadd.s32.u32.s32.sat {d}, {a}.b0, {b}.h1;",
    "vsub.s32.s32.u32.sat {d}, {a}.b3, {b};",
    "vsub.s32.s32.s32.min {d}, {a}.h1, {b}, {c};",
    "vabsdiff.u32.s32.s32.add {d}, {a}, {b}.h0, {c};",
    "vmin.s32.s32.s32.max {d}, {a}, {b}, {c};",
    "vmax.u32.u32.u32.min {d}, {a}.b1, {b}.b2, {c};",
    "vmax.s32.s32.u32 {d}.b0, {a}, {b}, {c};",
    "vshl.u32.u32.u32.clamp {d}, {a}, {b}.b0;",
    "vshr.s32.s32.u32.wrap.add {d}, {a}, {b}, {c};",
    "vshr.u32.u32.u32.clamp {d}.h0, {a}, {b}.b1, {c};",
    "vmad.u32.u32.u32 {d}, {a}.h0, {b}.h1, {c};",
    "vmad.s32.s32.s32.sat {d}, {a}.h1, {b}.h0, {c};",
    "vmad.s32.s32.u32.shr7 {d}, {a}.b3, {b}.h1, -{c};",
    "vmad.s32.s32.s32 {d}, -{a}.h0, {b}.b0, {c};",
    "vmad.s32.s32.s32.po {d}, {a}.h0, {b}.b1, {c};",
    "vset.u32.s32.lt {d}, {a}, {b};",
    "vset.u32.u32.ne.max {d}, {a}, {b}, {c};",
    "vadd2.s32.s32.u32.sat {d}, {a}, {b}, {c};",
    "vadd2.s32.s32.s32 {d}.h1, {a}.h03, {b}.h21, {c};",
    "vsub2.u32.u32.u32.add {d}.h0, {a}, {b}, {c};",
    "vavrg2.s32.s32.s32 {d}, {a}.h12, {b}.h30, {c};",
    "vabsdiff4.u32.u32.u32.add {d}, {a}.b3210, {b}.b0527, {c};",
    "vadd4.s32.s32.s32.sat {d}.b20, {a}.b7140, {b}.b0123, {c};",
    "vmin4.u32.s32.u32.sat {d}.b3, {a}, {b}, {c};",
    "vset4.u32.s32.gt {d}.b310, {a}, {b}, {c};",
    "vset2.u32.u32.le.add {d}, {a}, {b}, {c};",
)  # fmt: skip


def _many() -> list[Case]:
    found: list[Case] = []

    def add(text: str, out: str, *ins: str, count: int = 1024, name: str = "", **near) -> None:
        op = name or text.split()[0].rstrip(";")
        found.append(Case(op, text, out, ins, count, **near))

    # integer
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            add(f"{op}.{t} {{d}}, {{a}}, {{b}};", t, t, t)
        add(f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, t, t, t)
        add(f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, t, t, t)
        add(f"or.b{t[1:]} %d, {{b}}, 1; div.{t} {{d}}, {{a}}, %d;", t, t, t, name=f"div.{t}")
        add(f"or.b{t[1:]} %d, {{b}}, 1; rem.{t} {{d}}, {{a}}, %d;", t, t, t, name=f"rem.{t}")
        add(f"shl.b{t[1:]} {{d}}, {{a}}, {{b}};", t, t, "amount", name=f"shl.{t}")
        add(f"shr.{t} {{d}}, {{a}}, {{b}};", t, t, "amount")
    for t in ("s16", "s32", "s64"):
        add(f"abs.{t} {{d}}, {{a}};", t, t)
        add(f"neg.{t} {{d}}, {{a}};", t, t)
    for t in ("u16", "s16", "u32", "s32"):
        w = {"16": "32", "32": "64"}[t[1:]]
        add(f"mul.wide.{t} {{d}}, {{a}}, {{b}};", t[0] + w, t, t)
        add(f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}};", t[0] + w, t, t, t[0] + w)
    for t in ("u32", "s32"):
        for half in ("lo", "hi"):
            add(f"mul24.{half}.{t} {{d}}, {{a}}, {{b}};", t, t, t)
            add(f"mad24.{half}.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, t, t, t)
        add(f"mad.hi.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, t, t, t)
    add("add.sat.s32 {d}, {a}, {b};", "s32", "s32", "s32")
    add("sub.sat.s32 {d}, {a}, {b};", "s32", "s32", "s32")
    add("mad.hi.sat.s32 {d}, {a}, {b}, {c};", "s32", "s32", "s32", "s32")
    add("add.u16x2 {d}, {a}, {b};", "u32", "u32", "u32")
    for t in ("u16x2", "s16x2"):
        add(f"min.{t} {{d}}, {{a}}, {{b}};", "u32", "u32", "u32")
        add(f"max.{t} {{d}}, {{a}}, {{b}};", "u32", "u32", "u32")
    add("max.relu.s16x2 {d}, {a}, {b};", "u32", "u32", "u32")
    add("min.relu.s32 {d}, {a}, {b};", "u32", "u32", "u32")
    carry = "add.cc.u32 %t, {a}, {b}; addc.u32 {d}, {c}, 0;"
    add(carry, "u32", "u32", "u32", "u32", name="add.cc.u32")
    add(
        "sub.cc.u32 %t, {a}, {b}; subc.u32 {d}, {c}, 0;",
        "u32",
        "u32",
        "u32",
        "u32",
        name="sub.cc.u32",
    )
    add(
        "mad.lo.cc.u32 %t, {a}, {b}, {c}; madc.hi.u32 {d}, {a}, {b}, 0;",
        "u32",
        "u32",
        "u32",
        "u32",
        name="mad.lo.cc.u32",
    )
    add(
        "mad.hi.cc.u32 %t, {a}, {b}, {c}; addc.cc.u32 %t, {a}, {b}; addc.u32 {d}, 5, 6;",
        "u32",
        "u32",
        "u32",
        "u32",
        name="mad.hi.cc.u32",
    )
    # bits
    for t in ("b32", "b64"):
        n = int(t[1:])
        add(f"popc.{t} {{d}}, {{a}};", "u32", t)
        add(f"clz.{t} {{d}}, {{a}};", "u32", t)
        add(f"brev.{t} {{d}}, {{a}};", t, t)
        add(
            f"bfi.{t} {{d}}, {{a}}, {'{a}' if t == 'b64' else '{b}'}, {{c}}, 7;",
            t,
            t,
            t,
            "amount",
            name=f"bfi.{t}",
        )
        add(f"bfi.{t} {{d}}, {{a}}, {{a}}, 5, {{b}};", t, t, "amount", name=f"bfi.length.{t}")
        for s in ("u", "s"):
            add(f"bfe.{s}{n} {{d}}, {{a}}, {{b}}, {{c}};", t, t, "amount", "amount")
            add(f"bfind.{s}{n} {{d}}, {{a}};", "u32", t)
            add(f"bfind.shiftamt.{s}{n} {{d}}, {{a}};", "u32", t)
    for t in ("b16", "b32", "b64"):
        for op in ("and", "or", "xor"):
            add(f"{op}.{t} {{d}}, {{a}}, {{b}};", t, t, t)
        add(f"not.{t} {{d}}, {{a}};", t, t)
        add(f"cnot.{t} {{d}}, {{a}};", t, t)
    for table in (
        0x00,
        0x01,
        0x17,
        0x2A,
        0x35,
        0x6A,
        0x78,
        0x96,
        0xAC,
        0xB8,
        0xCA,
        0xD8,
        0xE2,
        0xE8,
        0xEA,
        0xF8,
        0xFE,
    ):
        add(
            f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};",
            "b32",
            "b32",
            "b32",
            "b32",
            name=f"lop3.{table:02x}",
        )
    for mode in ("clamp", "wrap"):
        for way in ("l", "r"):
            add(f"shf.{way}.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};", "b32", "b32", "b32", "amount")
        add(f"bmsk.{mode}.b32 {{d}}, {{a}}, {{b}};", "b32", "amount", "amount")
        for t in ("u32", "s32"):
            add(f"szext.{mode}.{t} {{d}}, {{a}}, {{b}};", t, t, "amount")
    add("prmt.b32 {d}, {a}, {b}, {c};", "b32", "b32", "b32", "b32")
    add("prmt.b32 {d}, {a}, {b}, 0x5140;", "b32", "b32", "b32", name="prmt.constant")
    add("prmt.b32 {d}, {a}, {b}, 0xF8C2;", "b32", "b32", "b32", name="prmt.sign")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        add(f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}};", "b32", "b32", "b32", "b32")
    for x in ("u32", "s32"):
        for y in ("u32", "s32"):
            add(f"dp4a.{x}.{y} {{d}}, {{a}}, {{b}}, {{c}};", "b32", "b32", "b32", "b32")
            for half in ("lo", "hi"):
                add(f"dp2a.{half}.{x}.{y} {{d}}, {{a}}, {{b}}, {{c}};", "b32", "b32", "b32", "b32")
    add(
        "and.b32 %t, {b}, 31; fns.b32 {d}, {a}, %t, {c};",
        "b32",
        "b32",
        "b32",
        "small",
        name="fns.b32",
    )
    # compare and select
    for t in ("s32", "u32", "u64", "s16"):
        for op in ("eq", "ne", "lt", "le", "gt", "ge"):
            add(
                f"setp.{op}.{t} %f, {{a}}, {{b}}; selp.b32 {{d}}, 1, 0, %f;",
                "b32",
                t,
                t,
                name=f"setp.{op}.{t}",
            )
    for t in ("f32", "f64", "f16", "bf16"):
        for op in ("eq", "ne", "lt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
            add(
                f"setp.{op}.{t} %f, {{a}}, {{b}}; selp.b32 {{d}}, 1, 0, %f;",
                "b32",
                t,
                t,
                name=f"setp.{op}.{t}",
            )
    add(
        "setp.lt.and.s32 %f|%g, {a}, {b}, 1; selp.b32 {d}, 1, 0, %f; @%g add.s32 {d}, {d}, 2;",
        "b32",
        "s32",
        "s32",
        name="setp.and.pair",
    )
    add(
        "setp.gt.ftz.f32 %f, {a}, {b}; selp.b32 {d}, 1, 0, %f;",
        "b32",
        "f32",
        "f32",
        name="setp.gt.ftz.f32",
    )
    add(
        "setp.lt.f16x2 %f|%g, {a}, {b}; selp.b32 {d}, 1, 0, %f; @%g add.s32 {d}, {d}, 2;",
        "b32",
        "f16x2",
        "f16x2",
        name="setp.lt.f16x2",
    )
    add("set.lt.u32.f32 {d}, {a}, {b};", "b32", "f32", "f32")
    add("set.ge.f32.s32 {d}, {a}, {b};", "f32", "s32", "s32")
    add("set.lt.f16x2.f16x2 {d}, {a}, {b};", "b32", "f16x2", "f16x2")
    add("slct.b32.s32 {d}, {a}, {b}, {c};", "b32", "b32", "b32", "s32")
    add("slct.b32.f32 {d}, {a}, {b}, {c};", "b32", "b32", "b32", "f32")
    # floating point
    for mode in ("rn", "rz", "rm", "rp"):
        for t in ("f32", "f64"):
            for op in ("add", "sub", "mul", "div"):
                add(f"{op}.{mode}.{t} {{d}}, {{a}}, {{b}};", t, t, t)
            add(f"fma.{mode}.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, t, t, t)
            add(f"sqrt.{mode}.{t} {{d}}, {{a}};", t, t)
            add(f"rcp.{mode}.{t} {{d}}, {{a}};", t, t)
    for op in ("add", "mul"):
        add(f"{op}.rn.ftz.f32 {{d}}, {{a}}, {{b}};", "f32", "f32", "f32")
        add(f"{op}.rn.sat.f32 {{d}}, {{a}}, {{b}};", "f32", "f32", "f32")
    add("fma.rn.ftz.sat.f32 {d}, {a}, {b}, {c};", "f32", "f32", "f32", "f32")
    add("fma.rn.ftz.f32 {d}, {a}, {b}, {c};", "f32", "f32", "f32", "f32")
    for t in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
        add(f"min.{t} {{d}}, {{a}}, {{b}};", t, t, t)
        add(f"max.{t} {{d}}, {{a}}, {{b}};", t, t, t)
        add(f"neg.{t} {{d}}, {{a}};", t, t)
        add(f"abs.{t} {{d}}, {{a}};", t, t)
    for t in ("f32", "f16", "bf16x2"):
        add(f"min.NaN.{t} {{d}}, {{a}}, {{b}};", t, t, t)
        add(f"max.NaN.xorsign.abs.{t} {{d}}, {{a}}, {{b}};", t, t, t)
    for t in ("f16", "f16x2", "bf16", "bf16x2"):
        for op in ("add", "sub", "mul"):
            add(f"{op}.rn.{t} {{d}}, {{a}}, {{b}};", t, t, t)
        add(f"fma.rn.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, t, t, t)
        add(f"fma.rn.relu.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, t, t, t)
    add("fma.rn.ftz.sat.f16x2 {d}, {a}, {b}, {c};", "f16x2", "f16x2", "f16x2", "f16x2")
    add("add.rn.sat.f16 {d}, {a}, {b};", "f16", "f16", "f16")
    for t in ("f32", "f64"):
        add(f"copysign.{t} {{d}}, {{a}}, {{b}};", t, t, t)
        for p in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            add(
                f"testp.{p}.{t} %f, {{a}}; selp.b32 {{d}}, 1, 0, %f;",
                "b32",
                t,
                name=f"testp.{p}.{t}",
            )
    for op, kind, ulps in (("rcp", "positive", 1), ("sqrt", "positive", 1), ("rsqrt", "positive", 2),
                           ("ex2", "unit", 2), ("lg2", "positive", 4)):  # fmt: skip
        add(f"{op}.approx.f32 {{d}}, {{a}};", "f32", kind, ulps=ulps)
    for op, near in (("sin", 2.0**-20.5), ("cos", 2.0**-20.5), ("tanh", 2.0**-10.9)):
        add(f"{op}.approx.f32 {{d}}, {{a}};", "f32", "unit", absolute=near)
    add("div.approx.f32 {d}, {a}, {b};", "f32", "unit", "unit", ulps=2)
    add("div.full.f32 {d}, {a}, {b};", "f32", "unit", "unit", ulps=2)
    # conversions
    ints = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
    kind = {"u8": "u16", "s8": "s16"}
    for x in ints:
        for y in ints:
            if x != y:
                add(f"cvt.{y}.{x} {{d}}, {{a}};", kind.get(y, y), kind.get(x, x))
                if not covers(y, x):
                    add(f"cvt.sat.{y}.{x} {{d}}, {{a}};", kind.get(y, y), kind.get(x, x))
    for x in ints:
        for f in ("f16", "f32", "f64"):
            for mode in ("rn", "rz", "rm", "rp"):
                add(f"cvt.{mode}.{f}.{x} {{d}}, {{a}};", f, kind.get(x, x))
            for mode in ("rni", "rzi", "rmi", "rpi"):
                all_ = 65536 if f == "f16" else 2048
                add(f"cvt.{mode}.{x}.{f} {{d}}, {{a}};", kind.get(x, x), f, count=all_)
    add("cvt.rzi.ftz.s32.f32 {d}, {a};", "s32", "f32")
    add("cvt.f32.f16 {d}, {a};", "f32", "f16", count=65536)
    add("cvt.f64.f16 {d}, {a};", "f64", "f16", count=65536)
    add("cvt.f32.bf16 {d}, {a};", "f32", "bf16", count=65536)
    add("cvt.f64.f32 {d}, {a};", "f64", "f32")
    for mode in ("rn", "rz", "rm", "rp"):
        add(f"cvt.{mode}.f32.f64 {{d}}, {{a}};", "f32", "f64")
        add(f"cvt.{mode}.f16.f64 {{d}}, {{a}};", "f16", "f64")
        add(f"cvt.{mode}.f16.f32 {{d}}, {{a}};", "f16", "f32", count=8192)
    for mode in ("rn", "rz"):
        add(f"cvt.{mode}.bf16.f32 {{d}}, {{a}};", "bf16", "f32", count=8192)
        add(f"cvt.{mode}.relu.f16.f32 {{d}}, {{a}};", "f16", "f32")
        for t in ("f16x2", "bf16x2"):
            add(f"cvt.{mode}.{t}.f32 {{d}}, {{a}}, {{b}};", t, "f32", "f32", count=4096)
            add(f"cvt.{mode}.relu.{t}.f32 {{d}}, {{a}}, {{b}};", t, "f32", "f32")
    for mode in ("rni", "rzi", "rmi", "rpi"):
        for t in ("f16", "f32", "f64"):
            add(f"cvt.{mode}.{t}.{t} {{d}}, {{a}};", t, t)
    add("cvt.sat.f32.f32 {d}, {a};", "f32", "f32")
    add("cvt.ftz.f32.f32 {d}, {a};", "f32", "f32")
    add("cvt.rn.sat.f16.f32 {d}, {a};", "f16", "f32")
    add("cvt.rna.tf32.f32 {d}, {a};", "b32", "f32", count=8192)
    add("cvt.rn.tf32.f32 {d}, {a};", "b32", "f32", count=8192)
    add("cvt.rz.relu.tf32.f32 {d}, {a};", "b32", "f32")
    for t in ("e4m3x2", "e5m2x2"):
        add(f"cvt.rn.satfinite.{t}.f32 {{d}}, {{a}}, {{b}};", "b16", "f32", "f32", count=8192)
        add(f"cvt.rn.satfinite.{t}.f16x2 {{d}}, {{a}};", "b16", "f16x2", count=65536)
        add(f"cvt.rn.satfinite.relu.{t}.f16x2 {{d}}, {{a}};", "b16", "f16x2", count=65536)
        add(f"cvt.rn.f16x2.{t} {{d}}, {{a}};", "f16x2", "e8", count=65536)
        add(f"cvt.rn.relu.f16x2.{t} {{d}}, {{a}};", "f16x2", "e8", count=65536)
    for t in ("u16", "s16", "u8", "s8"):
        tail = "" if t.endswith("16") else ".b32"
        third = "" if t.endswith("16") else ", {c}"
        add(f"cvt.pack.sat.{t}.s32{tail} {{d}}, {{a}}, {{b}}{third};", "b32", "s32", "s32", "b32")
    # video instructions: parts of words, with a third source to combine or merge with
    for text in _VIDEO:
        name = text.split("{")[0].strip() + "".join(re.findall(r"[}](?:\.\w+)?|-", text))
        add(text, "b32", "b32", "b32", "b32", name=name.replace("}", "").replace("-", "_n"))
    # modifiers in another order than decoders know
    add("add.f32.rz {d}, {a}, {b};", "f32", "f32", "f32")
    add("min.s32.relu {d}, {a}, {b};", "s32", "s32", "s32")
    add("cvt.s32.rmi.f32 {d}, {a};", "s32", "f32")
    add("bfind.u32.shiftamt {d}, {a};", "u32", "u32")
    add("prmt.rc8.b32 {d}, {a}, {b}, {c};", "b32", "b32", "b32", "b32")
    add(
        "setp.s32.lt %f, {a}, {b}; selp.b32 {d}, 1, 0, %f;", "b32", "s32", "s32", name="setp.s32.lt"
    )
    # moves between register sizes
    add(
        "{ .reg .b16 %x, %y; mov.b32 {%x, %y}, %a; mov.b32 %d, {%y, %x}; }".replace(
            "{", "{{"
        ).replace("}", "}}"),
        "b32",
        "b32",
        name="mov.halves",
    )
    add(
        "{ .reg .b32 %x, %y; mov.b64 {%x, %y}, %a; mov.b64 %d, {%y, %x}; }".replace(
            "{", "{{"
        ).replace("}", "}}"),
        "b64",
        "b64",
        name="mov.words",
    )
    return found


CASES = _many()


def approximate(case: Case) -> bool:
    """Whether PTX leaves the last bits of the result to the hardware."""
    return bool(case.ulps or case.absolute)


def chunks(result: np.ndarray) -> np.ndarray:
    """Return the checksum of every 32 results (256 where there are many)."""
    rows = result.reshape(-1, 256 if len(result) > 8192 else 32)
    return np.array([zlib.crc32(np.ascontiguousarray(row)) for row in rows], np.uint32)
