"""The grammar: what PTX text becomes, in the spellings that people and compilers use."""

import numpy as np
import pytest

from fp4rt.device import EmulatorFault, LaunchConfig
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
        ("(10 / 3) % 2", 1), ("!0", 1), ("5 > 3 && 2 == 2", 1), ("1 > 2 ? 7 : 8 + 1", 9),
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
      .global .attribute(.unified(19, 95)) .f32 unified;
      .global .v2 .u16 pair = {1, 2}, pairs[2] = {{3, 4}, {5}};
      .extern .shared .align 16 .b8 dynamic[];
      .func f() { ret; }"""
    )
    table, values = module.variables["table"], module.variables["values"]
    assert [v for _, _, v in table.init] == [("f", 0, False), ("values", 4, True), 7]
    bits = np.array([v for _, _, v in values.init], np.uint32).view(np.float32)
    assert [at for at, _, _ in values.init] == [0, 4, 8, 12]
    assert bits.tolist() == [1, 2, 3, 4]
    assert module.variables["text"].size == 3
    assert module.variables["pair"].init == [(0, 2, 1), (2, 2, 2)]
    assert module.variables["pairs"].init == [(0, 2, 3), (2, 2, 4), (4, 2, 5)]
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


def run(text, threads=32, words=32, **options):
    """Run entry `k` of a module on a buffer of words; return the buffer."""
    with EmulatorDevice("sm_90a", **options) as device:
        out = device.upload(np.zeros(words, np.uint32))
        kernel = device.load((HEAD + text).encode()).kernel("k")
        config = LaunchConfig((1, 1, 1), (threads, 1, 1))
        device.stream.launch(kernel, config, np.uint64(out.address).tobytes())
        return out.to_numpy()


ENTRY = """
.visible .entry k(.param .u64 p)
{
  .reg .b32 %r<9>; .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [p];
  mov.u32 %r1, %tid.x;
"""
STORE = """
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd2, %rd1, %rd2;
  st.global.u32 [%rd2], %r3;
}"""
T = np.arange(32)


def test_branch_tables_and_functions_with_registers():
    text = f"""
.func (.reg .b32 out) twice(.reg .b32 x) {{ add.u32 out, x, x; ret; }}
{ENTRY}
  and.b32 %r2, %r1, 3;
  table: .branchtargets A, B, C, A;
  brx.idx %r2, table;
A: add.u32 %r3, %r1, 100; bra.uni DONE;
B: call (%r3), twice, (%r1); bra.uni DONE;
C: mov.u32 %r3, 7;
DONE: {STORE}"""
    assert np.array_equal(run(text), np.choose(T % 4, [T + 100, 2 * T, np.full(32, 7), T + 100]))


def test_recursion_keeps_registers_parameters_and_swapped_arguments():
    text = f"""
.func (.reg .u32 r) swap(.reg .u32 a, .reg .u32 b, .reg .u32 n)
{{
  .reg .pred p; .reg .u32 m;
  setp.eq.u32 p, n, 0;
  @p sub.u32 r, a, b;
  @p ret;
  sub.u32 m, n, 1;
  call (r), swap, (b, a, m);
  add.u32 r, r, n;
  ret;
}}
.func (.param .b32 r) sum(.param .b32 n)
{{
  .reg .pred p; .reg .b32 a, b;
  ld.param.b32 a, [n];
  setp.eq.u32 p, a, 0;
  @p bra ZERO;
  sub.u32 a, a, 1;
  {{ .param .b32 x; .param .b32 y;
    st.param.b32 [x], a; call (y), sum, (x); ld.param.b32 b, [y]; }}
  ld.param.b32 a, [n];
  add.u32 b, a, b;
  st.param.b32 [r], b;
  ret;
ZERO:
  st.param.b32 [r], 0;
}}
{ENTRY}
  and.b32 %r2, %r1, 7;
  call (%r3), swap, (100, %r1, %r2);
  {{ .param .b32 x; .param .b32 y;
    st.param.b32 [x], %r1; call (y), sum, (x); ld.param.b32 %r4, [y]; }}
  mad.lo.u32 %r3, %r4, 1000, %r3; {STORE}"""
    n = T % 8
    turned = np.where(n % 2, T - 100, 100 - T) + n * (n + 1) // 2
    assert np.array_equal(run(text), (T * (T + 1) // 2 * 1000 + turned).astype(np.uint32))


def test_functions_that_return_several_registers():
    text = f"""
.func (.reg .u32 low, .reg .u32 high) product(.reg .u32 a, .reg .u32 b)
{{ .reg .u64 w; mul.wide.u32 w, a, b; mov.b64 {{low, high}}, w; }}
{ENTRY} call.uni (%r2, %r3), product, (%r1, 0xF0000000); add.u32 %r3, %r3, %r2; {STORE}"""
    wide = T.astype(np.uint64) * np.uint64(0xF0000000)
    assert np.array_equal(run(text), (wide + (wide >> np.uint64(32))).astype(np.uint32))


def test_whole_vectors_of_registers():
    text = f"""
.global .align 16 .v4 .u32 values = {{10, 20, 30, 40}};
{ENTRY}
  .reg .v4 .u32 v; .reg .v2 .b32 %w<3>;
  ld.global.v4.u32 v, [values];
  mov.u32 %w2.x, v.w;
  add.u32 %w2.y, v.g, %r1;
  mov.b64 %rd3, %w2;
  shr.u64 %rd3, %rd3, 32;
  cvt.u32.u64 %r3, %rd3; {STORE}"""
    assert np.array_equal(run(text), T + 20)


@pytest.mark.parametrize("size", [64, 20_000])
def test_alloca(size):
    text = f"""
.func (.reg .b32 r) twice(.reg .b32 n)
{{
  .reg .b64 a; .reg .b32 x;
  alloca.u64 a, {size}, 16;
  st.local.u32 [a+32], n; ld.local.u32 x, [a+32]; add.u32 r, n, x;
}}
{ENTRY}
  .reg .pred q;
  stacksave.u64 %rd3;
  mov.u32 %r2, 0;
LOOP:  // a call gives its memory back, or the stack would overflow
  call (%r3), twice, (%r1);
  add.u32 %r2, %r2, 1;
  setp.lt.u32 q, %r2, 300;
  @q bra LOOP;
  stackrestore.u64 %rd3;
  alloca.u64 %rd4, 64; st.local.u32 [%rd4], %r3; ld.local.u32 %r3, [%rd4]; {STORE}"""
    if size < 16384:
        assert np.array_equal(run(text), 2 * T)
    else:
        with pytest.raises(EmulatorFault, match="alloca of 20000 bytes"):
            run(text)


def test_memory_from_alloca_is_poison():
    text = f"{ENTRY} alloca.u64 %rd4, 64; ld.local.u32 %r3, [%rd4]; {STORE}"
    with pytest.raises(EmulatorFault, match="uninitialised local"):
        run(text)


def test_scratch_of_the_reserved_shared_memory():
    """Libraries find zeros there; a program that does not ask for it has no such memory."""
    body = """
  mov.u32 %r2, {where};
  mad.lo.u32 %r2, %r1, 4, %r2;
  st.shared.u32 [%r2+64], %r1;
  ld.shared.u32 %r3, [%r2];
  add.u32 %r3, %r3, %r1;"""
    plain = ENTRY + body.format(where="%reserved_smem_offset_1") + STORE
    assert np.array_equal(run(plain, 16)[:16], T[:16])
    with pytest.raises(EmulatorFault, match=r"shared access .* out of bounds"):
        run(ENTRY + body.format(where="512") + STORE)


def test_clocks_move_within_a_turn():
    text = f"{ENTRY} mov.u32 %r2, %clock; mov.u32 %r3, %clock; sub.u32 %r3, %r3, %r2; {STORE}"
    assert (run(text) > 0).all()


def test_debug_modules_may_copy_bytes_that_nobody_wrote():
    """Unoptimised code copies whole objects; what it makes of such bytes is poison."""
    text = f"""
.visible .entry k(.param .u64 p)
{{
  .local .align 8 .b8 frame[16];
  .reg .b32 %r<9>; .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [p];
  mov.u32 %r1, %tid.x;
  ld.local.u64 %rd3, [frame];
  st.local.u64 [frame+8], %rd3;
  mov.u32 %r3, %r1; {STORE}"""
    with pytest.raises(EmulatorFault, match="uninitialised local"):
        run(text)
    with EmulatorDevice("sm_90a") as device:
        out = device.upload(np.zeros(32, np.uint32))
        head = HEAD.replace("sm_90a", "sm_90a, debug")
        kernel = device.load((head + text).encode()).kernel("k")
        config = LaunchConfig((1, 1, 1), (32, 1, 1))
        device.stream.launch(kernel, config, np.uint64(out.address).tobytes())
        assert np.array_equal(out.to_numpy(), T)


def test_lanes_meet_again_when_a_function_returns():
    """Lanes that left a function early wait for the others, wherever its code lies."""
    text = f"""
.func (.reg .u32 r) uneven(.reg .u32 n)
{{
  .reg .pred p;
  mov.u32 r, 0;
  setp.lt.u32 p, n, 16;
  @p ret;
LOOP:
  add.u32 r, r, 1;
  setp.lt.u32 p, r, n;
  @p bra LOOP;
  ret;
}}
{ENTRY} call (%r2), uneven, (%r1); activemask.b32 %r3; {STORE}"""
    full = [(run(text, seed=seed) == 0xFFFFFFFF).all() for seed in range(8)]
    assert sum(full) >= 4  # now and then the schedule lets some run ahead


def test_results_of_16_bits_under_a_mask():
    text = f"""
{ENTRY}
  .reg .b16 %h<4>; .reg .pred q;
  mov.b16 %h1, 0x3C00; mov.b16 %h2, 0x4000; mov.b16 %h3, 0;
  and.b32 %r2, %r1, 1;
  setp.eq.u32 q, %r2, 1;
  @q set.lt.f16.f16 %h3, %h1, %h2;
  cvt.u32.u16 %r3, %h3; {STORE}"""
    assert np.array_equal(run(text), T % 2 * 0x3C00)


REFUSED = {
    "tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1, {%r1}];": "textures and surfaces",
    "multimem.red.relaxed.sys.global.add.u32 [%rd1], %r1;": "multicast objects",
    "vote.ballot.b32 %r3, q;": "without .sync",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals_say_why(text):
    body = f"{ENTRY} .reg .f32 %f<5>; .reg .pred q; {text} {STORE}"
    with pytest.raises(EmulatorFault, match=REFUSED[text]) as caught:
        run(body)
    assert text in str(caught.value)


def test_symbols_keep_their_offset():
    (ins,) = body("mov.u64 %rd1, table+16;")
    assert ins.operands[1] == Sym("table", 16)
