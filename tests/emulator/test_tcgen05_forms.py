"""Every form of tcgen05 ld, st, cp, shift and mma, in PTX written here and checked by ptxas."""

from __future__ import annotations

import subprocess
import zlib
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest
from emulated import Emulated

import build
from fp4rt.device import EmulatorFault, LaunchConfig
from fp4rt.emulator import ptx
from fp4rt.emulator.launch import Launch
from fp4rt.emulator.numerics import block_scaled_dot, decode
from fp4rt.emulator.program import Program

HEAD = """.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry form(.param .u64 p_in, .param .u64 p_out, .param .u32 p_bytes)
.reqntid 128
{
.reg .pred p, q;
.reg .b32 r<300>, x<300>, warp, lane, base, tmem, addr, bar, bytes, zero;
.reg .b64 in, out, t, d<8>;
.shared .align 8 .b64 mbar;
.shared .align 4 .b32 home;
mov.b32 zero, 0;
mov.u32 r0, %tid.x;
shr.u32 warp, r0, 5;
and.b32 lane, r0, 31;
ld.param.u64 in, [p_in];
ld.param.u64 out, [p_out];
ld.param.u32 bytes, [p_bytes];
mov.u32 base, smem;
mov.u32 bar, mbar;
setp.eq.u32 p, r0, 0;
@p mbarrier.init.shared::cta.b64 [bar], 1;
@p fence.mbarrier_init.release.cluster;
setp.eq.u32 q, warp, 0;
@!q bra READY;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [home], 512;
READY:
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.u32 tmem, [home];
// lane window of this warp
shl.b32 r1, warp, 21;
add.u32 addr, tmem, r1;
"""
TAIL = """
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@!q bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem, 512;
END:
ret;
}
"""
LOAD_IMAGE = """
@!p bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], bytes;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [base], [in], bytes, [bar];
LOADED:
W0: mbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;
@!q bra W0;
setp.eq.u32 q, warp, 0;
"""
COMMIT = """
@p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
W1: mbarrier.try_wait.parity.shared::cta.b64 q, [bar], {parity};
@!q bra W1;
setp.eq.u32 q, warp, 0;
tcgen05.fence::after_thread_sync;
"""


def fill(columns=64):
    """Write lane * 1000 + column to every cell of the first columns."""
    text = ["shl.b32 r2, warp, 5;", "add.u32 r2, r2, lane;", "mul.lo.u32 r2, r2, 1000;"]
    for c in range(columns):
        text += [f"add.u32 x{c}, r2, {c};"]
    for c in range(0, columns, 32):
        regs = ",".join(f"x{i}" for i in range(c, c + 32))
        text += [
            f"add.u32 r3, addr, {c};",
            f"tcgen05.st.sync.aligned.32x32b.x32.b32 [r3], {{{regs}}};",
        ]
    return "\n".join([*text, "tcgen05.wait::st.sync.aligned;"])


def dump(count, first=0):
    """Store x<first> … to out[thread][count]."""
    text = [f"mad.wide.u32 t, r0, {4 * count}, out;"]
    text += [f"st.global.u32 [t+{4 * i}], x{first + i};" for i in range(count)]
    return "\n".join(text)


def read_back(columns=64):
    """Load every cell of the first columns and dump them."""
    text = []
    for c in range(0, columns, 32):
        regs = ",".join(f"x{i}" for i in range(c, c + 32))
        text += [
            f"add.u32 r3, addr, {c};",
            f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{regs}}}, [r3];",
        ]
    return "\n".join([*text, "tcgen05.wait::ld.sync.aligned;", dump(columns)])


@lru_cache(maxsize=512)
def assemble(body):
    """Return the text, after ptxas has accepted it where there is one."""
    text = HEAD + body + TAIL
    try:
        nvcc = build.find_nvcc()
    except build.BuildError:
        return text
    folder = build.TEST_OUTPUT / "forms"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{zlib.crc32(text.encode()):08x}.ptx"
    if not path.exists():
        trial = path.with_suffix(".tmp.ptx")
        trial.write_text(text)
        command = [str(nvcc.path), "-arch=sm_100a", "-cubin", "-o", "/dev/null", str(trial)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        trial.rename(path)
    return text


def run(body, shape, dtype=np.uint32, image=None, shared=64 * 1024, seed=0):
    """Run a body; return out."""
    program = Program(ptx.parse(assemble(body)), "form", {}, "sm_100a")
    device = Emulated(seed=seed)
    out = device.upload(np.full(shape, 0xABABABAB, np.uint32))
    image = np.zeros(16, np.uint8) if image is None else image
    source = device.upload(image)
    params = np.array([(source.address, out.address, image.nbytes)], "<u8,<u8,<u4").tobytes()
    config = LaunchConfig((1, 1, 1), (128, 1, 1), shared)
    device.machine.execute([Launch(device.machine, program, config, params)])
    return out.to_numpy().view(dtype)


# -- ld and st ------------------------------------------------------------------------------------

COUNT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
SPLIT = 24


def cell(shape, t, j):
    """(lane, column) of register j of thread t, from the fact sheet's table."""
    return {
        "32x32b": (t, j),
        "16x64b": (t // 4 + 8 * (t % 2), 2 * j + t // 2 % 2),
        "16x128b": (t // 4 + 8 * (j % 2), 4 * (j // 2) + t % 4),
        "16x256b": (t // 4 + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * (t % 4) + j % 2),
        "16x32bx2": (t % 16, j + SPLIT * (t // 16)),
    }[shape]


FORMS = [(shape, num, off) for shape in COUNT for num in (1, 2, 4, 8) for off in (0, 16)]
FORMS = [f for f in FORMS if not (f[0] == "32x32b" and f[2])]
FORMS += [("32x32b", 32, 0), ("16x64b", 16, 16), ("16x256b", 4, 0)]


@pytest.mark.parametrize(("shape", "num", "off"), FORMS)
def test_ld(shape, num, off):
    count = COUNT[shape] * num
    split = f", {SPLIT}" if shape == "16x32bx2" else ""
    regs = ",".join(f"x{100 + i}" for i in range(count))
    body = (
        fill(96)
        + f"""
    add.u32 r3, addr, {(off << 16) + 3};
    tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {{{regs}}}, [r3]{split};
    tcgen05.wait::ld.sync.aligned;
    {dump(count, 100)}"""
    )
    result = run(body, (4, 32, count))
    for warp in range(4):
        for t in range(32):
            for j in range(count):
                lane, column = cell(shape, t, j)
                want = (32 * warp + off + lane) * 1000 + column + 3
                assert result[warp, t, j] == want


@pytest.mark.parametrize(("shape", "num", "off"), [f for f in FORMS if f[1] in (2, 8)])
def test_st(shape, num, off):
    count = COUNT[shape] * num
    split = f", {SPLIT}" if shape == "16x32bx2" else ""
    regs = ",".join(f"x{100 + i}" for i in range(count))
    values = "\n".join(f"mad.lo.u32 x{100 + i}, r0, 1000, {500_000 + i};" for i in range(count))
    body = (
        fill(96)
        + f"""
    {values}
    add.u32 r3, addr, {(off << 16) + 3};
    tcgen05.st.sync.aligned.{shape}.x{num}.b32 [r3]{split}, {{{regs}}};
    tcgen05.wait::st.sync.aligned;
    {read_back(96)}"""
    )
    result = run(body, (128, 96))
    want = np.arange(128)[:, None] * 1000 + np.arange(96)
    for warp in range(4):
        for t in range(32):
            for j in range(count):
                lane, column = cell(shape, t, j)
                want[32 * warp + off + lane, column + 3] = (32 * warp + t) * 1000 + 500_000 + j
    np.testing.assert_array_equal(result, want)


def test_pack_and_unpack_16b():
    body = (
        fill()
        + f"""
    tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {{x100,x101,x102,x103}}, [addr];
    tcgen05.wait::ld.sync.aligned;
    add.u32 r3, addr, 32;
    tcgen05.st.sync.aligned.32x32b.x4.unpack::16b.b32 [r3], {{x100,x101,x102,x103}};
    tcgen05.wait::st.sync.aligned;
    {dump(4, 100)}
    add.u64 out, out, 2048;
    {read_back()}"""
    )
    result = run(body, 512 + 128 * 64)
    cells = np.arange(128)[:, None] * 1000 + np.arange(64)
    low = (cells & 0xFFFF).astype(np.uint16)
    packed = result[:512].view(np.uint16).reshape(128, 8)
    np.testing.assert_array_equal(packed, low[:, :8])
    np.testing.assert_array_equal(result[512:].reshape(128, 64)[:, 32:40], low[:, :8])


# -- cp and shift ---------------------------------------------------------------------------------


def descriptor(start, sbo, lbo=0, mode=0):
    return start >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | 1 << 46 | mode << 61


CP = {
    "128x256b": (128, 8, lambda r: [r]),
    "4x256b": (4, 8, lambda r: [32 * r]),
    "128x128b": (128, 4, lambda r: [r]),
    "64x128b.warpx2::02_13": (64, 4, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 4, lambda r: [r % 32 + 64 * (r // 32) + x for x in (0, 32)]),
    "32x128b.warpx4": (32, 4, lambda r: [r, r + 32, r + 64, r + 96]),
}


def desc_text(register, value):
    """Set a descriptor register to `value` plus the address of the image."""
    return f"""
    shr.u32 r4, base, 4;
    cvt.u64.u32 {register}, r4;
    add.u64 {register}, {register}, {value};"""


@pytest.mark.parametrize("form", CP)
def test_cp(form):
    rows, words, lanes = CP[form]
    image = np.random.default_rng(13).integers(0, 1 << 32, (rows, words), dtype=np.uint32)
    # No swizzle: 8 x 16-byte core matrices, the second 16 bytes of a row after all the first.
    groups = -(-rows // 8)
    flat = np.zeros((words // 4, groups * 8, 4), np.uint32)
    flat[:, :rows] = image.reshape(rows, words // 4, 4).transpose(1, 0, 2)
    where = desc_text("d0", descriptor(0, 128, groups * 128))
    body = (
        LOAD_IMAGE
        + fill()
        + "bar.sync 0;"
        + f"""
    {where}
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    add.u32 r3, tmem, 8;
    @p tcgen05.cp.cta_group::1.{form} [r3], d0;
    {COMMIT.format(parity=1)}
    {read_back()}"""
    )
    result = run(body, (128, 64), image=flat.view(np.uint8).reshape(-1))
    want = (np.arange(128)[:, None] * 1000 + np.arange(64)).astype(np.uint32)
    for r in range(rows):
        for lane in lanes(r):
            want[lane, 8 : 8 + words] = image[r]
    np.testing.assert_array_equal(result, want)


def test_shift_moves_rows_down():
    body = (
        fill()
        + f"""
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    add.u32 r3, tmem, {(32 << 16) + 8};
    @p tcgen05.shift.cta_group::1.down [r3];
    {COMMIT.format(parity=0)}
    {read_back()}"""
    )
    result = run(body, (128, 64))
    want = np.arange(128)[:, None] * 1000 + np.arange(64)
    want[32:63, 8:16] = want[33:64, 8:16]
    np.testing.assert_array_equal(result, want)


# -- mma of every kind ----------------------------------------------------------------------------

DTYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "s8": np.int8,
    "u8": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
CODES = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "i8": {"u8": 0, "s8": 1},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e2m1": 1},
}
D_CODES = {"f16": 0, "f32": 1, "s32": 2}
SMALL = {"e2m1": ml_dtypes.float4_e2m1fn, "e2m3": ml_dtypes.float6_e2m3fn,
         "e3m2": ml_dtypes.float6_e3m2fn}  # fmt: skip
BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6}


def operand(rng, kind, dtype, rows):
    """Random small values (rows, K) and their bytes (rows, 32 bytes) as the kind stores them."""
    low = 0 if dtype == "u8" else -4
    if dtype in SMALL:
        count = 64 if kind in ("mxf4", "mxf4nvf4") else 32
        codes = rng.integers(0, 1 << BITS[dtype], (rows, count), dtype=np.uint8)
        values = codes.view(SMALL[dtype]).astype(np.float64)
        if count == 64:
            return values, codes[:, ::2] | codes[:, 1::2] << 4
        out = np.zeros((rows, 2, 16), np.uint8)
        for group in range(2):
            bits = np.unpackbits(codes[:, 16 * group :][:, :16, None], axis=2, bitorder="little")
            packed = np.packbits(
                bits[:, :, : BITS[dtype]].reshape(rows, -1), axis=1, bitorder="little"
            )
            out[:, group, : packed.shape[1]] = packed
        return values, out.reshape(rows, 32)
    k = 32 // np.dtype(DTYPES[dtype]).itemsize
    values = rng.integers(low, 5, (rows, k)).astype(DTYPES[dtype])
    return values.astype(np.float64), np.ascontiguousarray(values).view(np.uint8)


def core_matrices(data):
    """(rows, 32 bytes) as no-swizzle K-major core matrices, LBO = rows * 16."""
    return data.reshape(len(data), 2, 16).transpose(1, 0, 2).reshape(-1)


def mma_body(kind, n, idesc, block="", extra="", use_d=True, a_tmem=False, d_lane=0, tail=""):
    """Fill D with integers, run one mma from the image, read D back."""
    scaled = ", [r6], [r7]" if block else ""
    values = []
    for c in range(64):
        values += [f"add.u32 r2, r0, {3 * c};", "rem.u32 r2, r2, 17;"]
        values += ["cvt.rn.f32.u32 f1, r2;", f"mov.b32 x{c}, f1;"]
    if kind == "i8":
        values = [
            v for c in range(64) for v in (f"add.u32 r2, r0, {3 * c};", f"rem.u32 x{c}, r2, 17;")
        ]
    stores = []
    for c in (0, 32):
        regs = ",".join(f"x{i}" for i in range(c, c + 32))
        stores += [
            f"add.u32 r3, addr, {c};",
            f"tcgen05.st.sync.aligned.32x32b.x32.b32 [r3], {{{regs}}};",
        ]
    a_offset, b_offset, sf = 0, 4096, 8192
    text = [".reg .f32 f1;", LOAD_IMAGE, *values, *stores, "tcgen05.wait::st.sync.aligned;"]
    text += [desc_text("d0", descriptor(a_offset, 128, 128 * 16))]
    text += [desc_text("d1", descriptor(b_offset, 128, n * 16))]
    text += [desc_text("d2", descriptor(sf, 128)), desc_text("d3", descriptor(sf + 512, 128))]
    text += ["add.u32 r6, tmem, 256;", "add.u32 r7, tmem, 260;", f"mov.b32 r8, {idesc};"]
    text += [f"add.u32 r9, tmem, {d_lane << 16};"]
    if a_tmem:  # operand A: 8 columns from column 300, read from the image by each thread
        text += ["shl.b32 r10, r0, 5;", "add.u32 r10, r10, base;", "add.u32 r10, r10, 16384;"]
        text += [f"ld.shared.u32 x{100 + i}, [r10+{4 * i}];" for i in range(8)]
        regs = ",".join(f"x{100 + i}" for i in range(8))
        text += ["add.u32 r11, addr, 300;"]
        text += [f"tcgen05.st.sync.aligned.32x32b.x8.b32 [r11], {{{regs}}};"]
        text += ["tcgen05.wait::st.sync.aligned;", "add.u32 r11, tmem, 300;"]
    text += [
        "tcgen05.fence::before_thread_sync;",
        "bar.sync 0;",
        "tcgen05.fence::after_thread_sync;",
    ]
    if block:
        text += ["@p tcgen05.cp.cta_group::1.32x128b.warpx4 [r6], d2;"]
        text += ["@p tcgen05.cp.cta_group::1.32x128b.warpx4 [r7], d3;"]
    text += [f"setp.eq.u32 q, zero, {0 if use_d else 1};"]
    a = "[r11]" if a_tmem else "d0"
    operands = f"[r9], {a}, d1, r8{scaled}{extra}, q{tail}"
    text += [f"@p tcgen05.mma.cta_group::1.kind::{kind}{block} {operands};"]
    text += [COMMIT.format(parity=1), read_back()]
    return "\n".join(text)


def initial(kind):
    r, c = np.mgrid[0:128, 0:64]
    return ((r + 3 * c) % 17).astype(np.float64)


def plain_idesc(kind, a, b, d, m, n, more=0):
    codes = CODES[kind]
    return D_CODES[d] << 4 | codes[a] << 7 | codes[b] << 10 | (n >> 3) << 17 | (m >> 4) << 24 | more


PLAIN = [
    ("f16", "f16", "f16", "f32"), ("f16", "bf16", "bf16", "f32"), ("tf32", "tf32", "tf32", "f32"),
    ("i8", "s8", "u8", "s32"), ("f8f6f4", "e4m3", "e5m2", "f32"), ("f8f6f4", "e2m1", "e4m3", "f32"),
    ("f8f6f4", "e2m3", "e3m2", "f32"),
]  # fmt: skip


def image_of(a_bytes, b_bytes, extra=None):
    image = np.zeros(20480 if extra is not None else 12288, np.uint8)
    image[: a_bytes.size] = core_matrices(a_bytes) if len(a_bytes) == 128 else 0
    image[4096 : 4096 + b_bytes.size] = core_matrices(b_bytes)
    if extra is not None:
        image[16384:] = extra.reshape(-1)
    return image


@pytest.mark.parametrize(("kind", "a", "b", "d"), PLAIN)
@pytest.mark.parametrize("use_d", [True, False])
def test_plain_kinds(kind, a, b, d, use_d):
    rng = np.random.default_rng(14)
    a_values, a_bytes = operand(rng, kind, a, 128)
    b_values, b_bytes = operand(rng, kind, b, 64)
    body = mma_body(kind, 64, plain_idesc(kind, a, b, d, 128, 64), use_d=use_d)
    result = run(
        body, (128, 64), np.int32 if d == "s32" else np.float32, image_of(a_bytes, b_bytes)
    )
    np.testing.assert_array_equal(result, a_values @ b_values.T + use_d * initial(kind))


def test_negate_and_scale_input_d():
    rng = np.random.default_rng(15)
    a, a_bytes = operand(rng, "f16", "f16", 128)
    b, b_bytes = operand(rng, "f16", "f16", 64)
    idesc = plain_idesc("f16", "f16", "f16", "f32", 128, 64, 1 << 13)
    body = mma_body("f16", 64, idesc, tail=", 3")
    result = run(body, (128, 64), np.float32, image_of(a_bytes, b_bytes))
    np.testing.assert_array_equal(result, -(a @ b.T) + initial("f16") / 8)


def test_disabled_lanes_keep_their_accumulator():
    rng = np.random.default_rng(16)
    a, a_bytes = operand(rng, "f16", "f16", 128)
    b, b_bytes = operand(rng, "f16", "f16", 64)
    masks = [0x1, 0x80000000, 0xFF00, 0]
    words = "\n".join(f"mov.b32 r{20 + i}, {x};" for i, x in enumerate(masks)) + "\n"
    body = words + mma_body(
        "f16", 64, plain_idesc("f16", "f16", "f16", "f32", 128, 64), extra=", {r20,r21,r22,r23}"
    )
    result = run(body, (128, 64), np.float32, image_of(a_bytes, b_bytes))
    want = a @ b.T + initial("f16")
    bits = np.unpackbits(np.array(masks, np.uint32).view(np.uint8), bitorder="little").astype(bool)
    want[bits] = initial("f16")[bits]
    np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", "f16"), ("tf32", "tf32"), ("f8f6f4", "e4m3")])
def test_a_from_tensor_memory(kind, dtype):
    rng = np.random.default_rng(17)
    a, a_bytes = operand(rng, kind, dtype, 128)
    b, b_bytes = operand(rng, kind, dtype, 64)
    idesc = plain_idesc(kind, dtype, dtype, "f32", 128, 64)
    body = mma_body(kind, 64, idesc, a_tmem=True)
    result = run(body, (128, 64), np.float32, image_of(a_bytes, b_bytes, a_bytes))
    np.testing.assert_array_equal(result, a @ b.T + initial(kind))


@pytest.mark.parametrize("d_lane", [0, 16])
def test_m64_uses_half_of_each_partition(d_lane):
    rng = np.random.default_rng(18)
    a, a_bytes = operand(rng, "f16", "f16", 64)
    b, b_bytes = operand(rng, "f16", "f16", 64)
    padded = np.zeros((128, 32), np.uint8)
    padded[:64] = a_bytes
    idesc = plain_idesc("f16", "f16", "f16", "f32", 64, 64)
    body = mma_body("f16", 64, idesc, d_lane=d_lane)
    result = run(body, (128, 64), np.float32, image_of(padded, b_bytes))
    want = initial("f16")
    r = np.arange(64)
    want[32 * (r // 16) + r % 16 + d_lane] += a @ b.T
    np.testing.assert_array_equal(result, want)


SCALED = [
    ("mxf4nvf4", "block16", "e2m1", "e2m1", 0, 0), ("mxf4nvf4", "block32", "e2m1", "e2m1", 2, 0),
    ("mxf4", "block32", "e2m1", "e2m1", 0, 2), ("mxf8f6f4", "block32", "e4m3", "e5m2", 3, 1),
    ("mxf8f6f4", "block32", "e2m1", "e4m3", 2, 0), ("mxf8f6f4", "block32", "e3m2", "e2m3", 0, 3),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "block", "a", "b", "a_id", "b_id"), SCALED)
def test_scaled_kinds(kind, block, a, b, a_id, b_id):
    rng = np.random.default_rng(19)
    n = 64
    a_values, a_bytes = operand(rng, kind, a, 128)
    b_values, b_bytes = operand(rng, kind, b, n)
    unsigned = block == "block16"
    codes = rng.integers(*((0x30, 0x48) if unsigned else (125, 130)), (2, 128, 4), dtype=np.uint8)
    image = image_of(a_bytes, b_bytes)
    for at, part in ((8192, codes[0]), (8704, codes[1])):  # 128 x 4 tile order
        image[at : at + 512] = part.reshape(4, 32, 4).transpose(1, 0, 2).reshape(-1)
    blocks = a_values.shape[1] // (16 if unsigned else 32)
    idesc = CODES[kind][a] << 7 | CODES[kind][b] << 10 | (n >> 3) << 17 | 1 << 27
    idesc |= (not unsigned) << 23 | a_id << 29 | b_id << 4
    body = mma_body(kind, n, idesc, f".block_scale.{block}")
    result = run(body, (128, 64), np.float32, image)
    want = block_scaled_dot(
        a_values, b_values, codes[0][:, a_id : a_id + blocks],
        codes[1][:n, b_id : b_id + blocks], "ue4m3" if unsigned else "ue8m0",
        initial(kind).astype(np.float32),
    )  # fmt: skip
    np.testing.assert_array_equal(result, want)
    exact = (a_values.reshape(128, blocks, -1) * decode(codes[0][:, a_id : a_id + blocks],
             "ue4m3" if unsigned else "ue8m0")[..., None]).reshape(128, -1)  # fmt: skip
    exact = exact @ (b_values.reshape(n, blocks, -1) * decode(
        codes[1][:n, b_id : b_id + blocks], "ue4m3" if unsigned else "ue8m0")[..., None]
    ).reshape(n, -1).T + initial(kind)  # fmt: skip
    np.testing.assert_allclose(result, exact, rtol=1e-6)


def test_accumulator_as_operand_needs_a_wait():
    rng = np.random.default_rng(23)
    _, a_bytes = operand(rng, "f16", "f16", 128)
    _, b_bytes = operand(rng, "f16", "f16", 64)
    body = mma_body("f16", 64, plain_idesc("f16", "f16", "f16", "f32", 128, 64))
    again = "@p tcgen05.mma.cta_group::1.kind::f16 [r9], [r12], d1, r8, q;"
    first = "@p tcgen05.mma.cta_group::1.kind::f16 [r9], d0, d1, r8, q;"
    body = body.replace(first, f"add.u32 r12, tmem, 8;\n{first}\n{again}")
    with pytest.raises(EmulatorFault, match=r"reads operand A at .* from the accumulator"):
        run(body, (128, 64), np.float32, image_of(a_bytes, b_bytes))


def test_accumulators_of_two_shapes_need_a_wait():
    rng = np.random.default_rng(24)
    _, a_bytes = operand(rng, "f16", "f16", 128)
    _, b_bytes = operand(rng, "f16", "f16", 64)
    body = mma_body("f16", 64, plain_idesc("f16", "f16", "f16", "f32", 128, 64))
    first = "@p tcgen05.mma.cta_group::1.kind::f16 [r9], d0, d1, r8, q;"
    narrow = plain_idesc("f16", "f16", "f16", "f32", 128, 32)
    again = f"mov.b32 r8, {narrow};\n{first}"
    with pytest.raises(EmulatorFault, match=r"of an earlier .* in another shape"):
        run(body.replace(first, f"{first}\n{again}"), (128, 64), np.float32,
            image_of(a_bytes, b_bytes))  # fmt: skip


@pytest.mark.parametrize("fenced", [True, False])
def test_a_wait_and_a_fence_order_accumulators_of_two_shapes(fenced):
    """N = 64, its commit waited for, then N = 32 over half of it: D + A B^T twice there."""
    rng = np.random.default_rng(25)
    a, a_bytes = operand(rng, "f16", "f16", 128)
    b, b_bytes = operand(rng, "f16", "f16", 64)
    body = mma_body("f16", 64, plain_idesc("f16", "f16", "f16", "f32", 128, 64))
    first = "@p tcgen05.mma.cta_group::1.kind::f16 [r9], d0, d1, r8, q;"
    narrow = plain_idesc("f16", "f16", "f16", "f32", 128, 32)
    wait, last = COMMIT.format(parity=1), COMMIT.format(parity=0).replace("W1", "W2")
    if not fenced:
        wait = wait.replace("tcgen05.fence::after_thread_sync;", "")
    second = f"mov.b32 r8, {narrow};\nsetp.eq.u32 q, zero, 0;\n{first}\n{last}"
    body = body.replace(f"{first}\n{COMMIT.format(parity=1)}", f"{first}\n{wait}\n{second}")
    assert second in body
    image = image_of(a_bytes, b_bytes)
    if not fenced:
        with pytest.raises(EmulatorFault, match=r"in another shape"):
            run(body, (128, 64), np.float32, image)
        return
    want = initial("f16") + a @ b.T
    want[:, :32] += a @ b[:32].T
    np.testing.assert_array_equal(run(body, (128, 64), np.float32, image), want)


# -- rules ----------------------------------------------------------------------------------------

LD8 = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {x100,x101}, [r3];\ntcgen05.wait::ld.sync.aligned;"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"mov.b32 r3, addr;\n{LD8}", "cells that were never written, the first at lane"),
        (f"{fill()}\nadd.u32 r3, addr, 511;\n{LD8}", "there are 128 lanes and 512 columns"),
        (f"{fill()}\nadd.u32 r3, addr, lane;\n{LD8}", "differs between the lanes"),
        (f"{fill()}\nadd.u32 r3, addr, {16 << 16};\n{LD8}", "the address must have lane"),
        (
            f"{fill()}\ntcgen05.st.sync.aligned.32x32b.x1.b32 [addr], {{x0}};\n"
            f"mov.b32 r3, addr;\n{LD8}\ntcgen05.wait::st.sync.aligned;",
            "there was no tcgen05.wait::st",
        ),
        (
            f"{fill()}\nmov.b32 r3, addr;\n"
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {x100}, [r3];\n"
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [addr], {x0};\n"
            "tcgen05.wait::ld.sync.aligned;\ntcgen05.wait::st.sync.aligned;",
            "there was no tcgen05.wait::ld",
        ),
        ("mov.b32 r3, addr;\n@p tcgen05.ld.sync.aligned.32x32b.x1.b32 {x100}, [r3];",
         "guard predicate differs"),
        ("@!q bra N;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [home], 48;\nN:",
         "power of 2"),
        (
            "@!q bra N;\ntcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [home], 32;\nN:",
            "after tcgen05.relinquish_alloc_permit",
        ),
        ("@!q bra N;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [home], 32;\nN:",
         "deadlock.*32 free Tensor Memory columns"),
        ("@!q bra N;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem, 256;\nN:",
         r"allocated are 512 columns \(0-511\)"),
        ("@p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [base];",
         "no mbarrier was initialised"),
        ("@p tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [bar];",
         "must use one"),
    ],
)  # fmt: skip
def test_rules(body, words):
    program = Program(ptx.parse(HEAD + body + TAIL), "form", {}, "sm_100a")
    device = Emulated(seed=1)
    out = device.alloc(4096)
    params = np.array([(out.address, out.address, 0)], "<u8,<u8,<u4").tobytes()
    config = LaunchConfig((1, 1, 1), (128, 1, 1), 1024)
    with pytest.raises(EmulatorFault, match=f"(?s){words}"):
        device.machine.execute([Launch(device.machine, program, config, params)])


def test_a_commit_must_have_arrived_before_its_cta_exits():
    commit = "@p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];"
    program = Program(ptx.parse(HEAD + commit + TAIL), "form", {}, "sm_100a")
    device = Emulated(schedule="lazy")
    params = np.array([(0, 0, 0)], "<u8,<u8,<u4").tobytes()
    config = LaunchConfig((1, 1, 1), (128, 1, 1), 1024)
    with pytest.raises(EmulatorFault, match="exits while an operation that will arrive"):
        device.machine.execute([Launch(device.machine, program, config, params)])
