"""Instructions of a whole warp, on raw registers: run alike on a GPU and in the emulator.

Each case becomes one kernel of a PTX module: every lane loads 16 words into %a0 … %a15, executes
the text and stores %o0 … %o7. The inputs are drawn from the case's name.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from fp4rt.device import LaunchConfig


@dataclass(frozen=True)
class Case:
    """A text and the kind of its inputs: "int", "small" (few values) or "edge" (sums saturate)."""

    name: str
    kind: str
    text: str


def _registers(letter: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%{letter}{first + i}" for i in range(count)) + "}"


def _mma(name: str, form: str, d: int, a: int, b: int, kind: str = "int") -> Case:
    operands = ", ".join(
        (_registers("o", d), _registers("a", a), _registers("a", b, 4), _registers("a", d, 8))
    )
    return Case(name, kind, f"mma.sync.aligned.{form} {operands};")


def _many() -> list[Case]:
    found = []
    for types in ("s8.s8", "u8.s8"):
        found.append(_mma(f"m8n8k16.{types}", f"m8n8k16.row.col.s32.{types}.s32", 2, 1, 1))
    found.append(_mma("m8n8k16.sat", "m8n8k16.row.col.satfinite.s32.s8.s8.s32", 2, 1, 1, "edge"))
    for types in ("s4.s4", "u4.u4", "s4.u4"):
        for shape, counts in (("m8n8k32", (2, 1, 1)), ("m16n8k32", (4, 2, 1)),
                              ("m16n8k64", (4, 4, 2))):  # fmt: skip
            found.append(_mma(f"{shape}.{types}", f"{shape}.row.col.s32.{types}.s32", *counts))
    for word in ("xor", "and"):
        for shape, counts in (("m8n8k128", (2, 1, 1)), ("m16n8k128", (4, 2, 1)),
                              ("m16n8k256", (4, 4, 2))):  # fmt: skip
            form = f"{shape}.row.col.s32.b1.b1.s32.{word}.popc"
            found.append(_mma(f"{shape}.{word}", form, *counts))
    for mode in ("up", "down", "bfly", "idx"):
        for clamp in ("%a2", "0x1f", "0x181f", "0x1807", "0x0700"):
            text = (
                "{ .reg .pred q; and.b32 %a2, %a2, 0x1f1f; "
                f"shfl.sync.{mode}.b32 %o0|q, %a0, %a1, {clamp}, -1; selp.b32 %o1, 1, 0, q; }}"
            )
            found.append(Case(f"shfl.{mode}.{clamp}", "int", text))
    found.append(Case("movmatrix", "int", "movmatrix.sync.aligned.m8n8.trans.b16 %o0, %a0;"))
    text = (
        "{ .reg .pred q; match.any.sync.b32 %o0, %a0, -1; match.all.sync.b32 %o1|q, %a1, -1; "
        "selp.b32 %o2, 1, 0, q; match.any.sync.b64 %o3, %d0, -1; }"
    )
    found.append(Case("match", "small", text))
    text = (
        "redux.sync.add.s32 %o0, %a0, -1; redux.sync.min.s32 %o1, %a0, -1; "
        "redux.sync.max.u32 %o2, %a0, -1; redux.sync.xor.b32 %o3, %a0, -1;"
    )
    found.append(Case("redux", "int", text))
    return found


CASES = _many()


def ptx() -> str:
    """Return a PTX module with entry ``w<i>`` for case i; parameters: inputs, outputs."""
    found = [".version 8.6", ".target sm_90a", ".address_size 64"]
    for i, case in enumerate(CASES):
        loads = "\n".join(
            f"  ld.global.v4.u32 {_registers('a', 4, j)}, [%p+{4 * j}];" for j in range(0, 16, 4)
        )
        zeros = " ".join(f"mov.u32 %o{j}, 0;" for j in range(8))
        found.append(f"""
.visible .entry w{i}(.param .align 8 .b8 params[16])
{{
  .reg .b64 %p, %d<2>; .reg .b32 %t, %a<16>, %o<8>;
  ld.param.u64 %p, [params];
  mov.u32 %t, %tid.x;
  mad.wide.u32 %p, %t, 64, %p;
{loads}
  mov.b64 %d0, {{%a2, %a3}};
  {zeros}
  {case.text}
  ld.param.u64 %p, [params+8];
  mad.wide.u32 %p, %t, 32, %p;
  st.global.v4.u32 [%p], {_registers("o", 4)};
  st.global.v4.u32 [%p+16], {_registers("o", 4, 4)};
  ret;
}}""")
    return "\n".join(found)


def inputs(case: Case) -> np.ndarray:
    """Return uint32[32, 16]; the same on every machine."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    words = rng.integers(0, 2**32, (32, 16), dtype=np.uint32)
    if case.kind == "small":
        words = rng.integers(0, 4, (32, 16)).astype(np.uint32)
        words[:, 1] = 5
    if case.kind == "edge":
        ends = np.array([2**31 - 1, 2**31, 2**31 - 100], np.uint32)
        words[:, 8:12] = rng.choice(ends, (32, 4))
    return words


def run(device, module, case: Case) -> np.ndarray:
    """Return uint32[32, 8]: what the lanes stored."""
    given, out = device.upload(inputs(case)), device.upload(np.zeros((32, 8), np.uint32))
    params = np.array([given.address, out.address], np.uint64).tobytes()
    kernel = module.kernel(f"w{CASES.index(case)}")
    device.stream.launch(kernel, LaunchConfig((1, 1, 1), (32, 1, 1)), params)
    result = out.to_numpy().reshape(32, 8)
    given.close()
    out.close()
    return result
