"""The grammar: what PTX text becomes, in the spellings that people and compilers use."""

import numpy as np
import pytest

from fp4rt.device import LaunchConfig
from fp4rt.emulator import EmulatorDevice
from fp4rt.emulator.ptx import Imm, Mem, Pair, PtxError, Reg, Sink, Sym, Vec, parse

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def body(text):
    """The instructions of an entry with a few registers."""
    registers = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .pred %p<9>, q;"
    module = parse(f"{HEAD}.entry k() {{ {registers}\n{text}\n}}")
    return module.functions["k"].code


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        ("10", 10), ("-10", -10), ("0x1F", 31), ("0x1fU", 31), ("017", 15), ("0b101", 5),
        ("3U", 3), ("(1 << 4) | 3", 19), ("~0", -1), ("-(7 - 2) * 3", -15), ("WARP_SZ", 32),
        ("(10 / 3) % 2", 1), ("!0", 1), ("5 > 3 && 2 == 2", 1),
    ],
)  # fmt: skip
def test_integer_constants(spelling, value):
    (ins,) = body(f"mov.b32 %r1, {spelling};")
    assert ins.operands[1] == Imm(value)


@pytest.mark.parametrize(
    ("spelling", "bits", "kind"),
    [
        ("0f3F800000", 0x3F800000, "f32"),
        ("0F3f800000", 0x3F800000, "f32"),
        ("-0f3F800000", 0xBF800000, "f32"),
        ("0d3FF0000000000000", 0x3FF0000000000000, "f64"),
        ("1.0", 0x3FF0000000000000, "f64"),
        ("1e0", 0x3FF0000000000000, "f64"),
    ],
)
def test_float_constants(spelling, bits, kind):
    (ins,) = body(f"mov.f32 %f1, {spelling};")
    assert ins.operands[1] == Imm(bits, kind)


def test_operand_shapes():
    code = body(
        """
      @!%p1 ld.global.L1::evict_last.v2.b32 { %r1, _ }, [ %rd1 + -8 ], %rd2;
      setp.lt.and.s32 %p2 | %p3, %r1, 5, !%p1;
      cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
          [%r1], [%rd1, {%r2, %r3}], [%r4];
      elect.sync _|q, 0xffffffff;"""
    )
    load, compare, tensor, elect = code
    assert load.guard == (Reg("%p1", "pred"), True)
    assert load.parts == ("ld", "global", "L1::evict_last", "v2", "b32")
    assert load.operands[0] == Vec((Reg("%r1", "b32"), Sink()))
    assert load.operands[1] == Mem(Reg("%rd1", "b64"), -8)
    assert compare.operands[0] == Pair(Reg("%p2", "pred"), Reg("%p3", "pred"))
    assert tensor.parts[5] == "shared::cluster"
    assert tensor.operands[1].extra == (Vec((Reg("%r2", "b32"), Reg("%r3", "b32"))),)
    assert elect.operands[0] == Pair(Sink(), Reg("q", "pred"))


def test_scopes_have_their_own_names():
    text = """
      { .reg .pred p; L: setp.eq.u32 p, %r1, 0; @!p bra L; }
      { .reg .pred p; L: setp.eq.u32 p, %r2, 0; @!p bra L; }
      L: bra L;"""
    first, jump1, second, jump2, last = body(text)
    assert first.operands[0] != second.operands[0]
    code = parse(
        f"{HEAD}.entry k() {{ .reg .b32 %r<3>; {text} }}"
    ).functions["k"]  # fmt: skip
    targets = [code.labels[i.operands[0].name] for i in code.code if i.parts[0] == "bra"]
    assert targets == [0, 2, 4]
    assert {jump1.parts, jump2.parts, last.parts} == {("bra",)}


def test_variables_and_initialisers():
    module = parse(
        HEAD
        + """
      .global .align 8 .u64 table[3] = {f, generic(values)+4, 7};
      .const .f32 values[2][2] = {{0f3F800000, 2.0}, {3.0, 0f40800000}};
      .global .u8 text[] = {104, 105, 0};
      .extern .shared .align 16 .b8 dynamic[];
      .func f() { ret; }"""
    )
    table, values = module.variables["table"], module.variables["values"]
    assert [v for _, _, v in table.init] == [("f", 0, False), ("values", 4, True), 7]
    bits = np.array([v for _, _, v in values.init], np.uint32).view(np.float32)
    assert [at for at, _, _ in values.init] == [0, 4, 8, 12]
    assert bits.tolist() == [1, 2, 3, 4]
    assert module.variables["text"].size == 3
    assert module.variables["dynamic"].unsized


def test_source_places_follow_inlining():
    (ins,) = body(".loc 1 7 2, function_name $L__info, inlined_at 2 9 1\n mov.b32 %r1, 1;\n")
    assert str(ins.source) == "<file 1>:7 (inlined at <file 2>:9)"
    *_, ins = body(
        ".loc 3 5 4\n .loc 2 9 1, function_name $L__a, inlined_at 3 5 4\n"
        ".loc 1 7 2, function_name $L__b, inlined_at 2 9 1\n mov.b32 %r1, 1;\n"
    )
    assert str(ins.source) == "<file 1>:7 (inlined at <file 2>:9 (inlined at <file 3>:5))"
    module = parse(f'{HEAD}.entry k() {{ .loc 1 3 1\n ret; }}\n.file 1 "dir/a.cu"')
    assert str(module.functions["k"].code[0].source) == "dir/a.cu:3"


def test_debug_sections_are_passed_over():
    module = parse(HEAD + ".entry k() { ret; }\n.section .debug_info { .b32 5\n.b8 1, 2\n }")
    assert len(module.functions["k"].code) == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("mov.b32 %r1, %r77;", "line 4: undeclared register %r77"),
        ("bra NOWHERE;", "unknown label NOWHERE"),
        ("mov.b32 %r1 5;", "line 4"),
        ("mov.b32 %r1, 1/0;", "division by zero"),
        ("@%r1 mov.b32 %r1, 5;", "guard is not a predicate"),
    ],
)
def test_errors_give_the_line(text, match):
    with pytest.raises(PtxError, match=match):
        parse(f"{HEAD}.entry k() {{ .reg .b32 %r<9>; {text} }}")


def test_branch_tables_and_functions_with_registers():
    text = (
        HEAD
        + """
.func (.reg .b32 out) twice(.reg .b32 x) { add.u32 out, x, x; ret; }
.visible .entry k(.param .u64 p)
{
  .reg .b32 %r<9>; .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [p];
  mov.u32 %r1, %tid.x;
  and.b32 %r2, %r1, 3;
  table: .branchtargets A, B, C, A;
  brx.idx %r2, table;
A: add.u32 %r3, %r1, 100; bra.uni DONE;
B: call (%r3), twice, (%r1); bra.uni DONE;
C: mov.u32 %r3, 7;
DONE:
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd2, %rd1, %rd2;
  st.global.u32 [%rd2], %r3;
}"""
    )
    with EmulatorDevice("sm_90a") as device:
        out = device.upload(np.zeros(32, np.uint32))
        kernel = device.load(text.encode()).kernel("k")
        config = LaunchConfig((1, 1, 1), (32, 1, 1))
        device.stream.launch(kernel, config, np.uint64(out.address).tobytes())
        t = np.arange(32)
        expected = np.choose(t % 4, [t + 100, 2 * t, np.full(32, 7), t + 100])
        assert np.array_equal(out.to_numpy(), expected)


def test_symbols_keep_their_offset():
    (ins,) = body("mov.u64 %rd1, table+16;")
    assert ins.operands[1] == Sym("table", 16)
