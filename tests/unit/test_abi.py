"""abi: one declaration gives numpy and C++ the same layout, and a hash that notices changes."""

import ctypes
import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import build
from fp4rt import abi
from fp4rt.abi import Field, Struct

INNER = Struct("Inner", (Field("tag", "u8"), Field("size", "i64")), "A nested one.")

EVERY_TYPE = Struct(
    "EveryType",
    (
        *(Field(f"one_{name}", name) for name in abi.C_TYPES),
        *(Field(f"three_{name}", name, count=3) for name in abi.C_TYPES),
        Field("map", "tensor_map"),
        Field("after", "u8"),
        Field("maps", "tensor_map", count=2),
        Field("address", "ptr<const float>", "where"),
        Field("inner", INNER),
        Field("inners", INNER, count=2),
        Field("last", "u8"),
    ),
)

CTYPES = {
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "ptr<void>": ctypes.c_void_p,
}


def as_ctypes(struct):
    """The struct by ctypes, which follows the C compiler's rules independently."""
    members = []
    for field in struct.fields:
        kind = as_ctypes(field.type) if isinstance(field.type, Struct) else CTYPES[field.type]
        members.append((field.name, kind if field.count is None else kind * field.count))
    return type(struct.name, (ctypes.Structure,), {"_fields_": members})


def structs(types):
    fields = st.lists(st.tuples(types, st.none() | st.integers(1, 3)), min_size=1, max_size=6)
    return fields.map(
        lambda chosen: Struct(
            "Random",
            tuple(Field(f"f{i}", kind, count=n) for i, (kind, n) in enumerate(chosen)),
        )
    )


@given(structs(st.sampled_from(sorted(CTYPES)) | structs(st.sampled_from(sorted(CTYPES)))))
def test_layout_is_that_of_c(struct):
    expected = as_ctypes(struct)
    assert struct.size == struct.dtype.itemsize == ctypes.sizeof(expected)
    assert struct.alignment == ctypes.alignment(expected)
    for name, offset in struct.offsets.items():
        assert struct.dtype.fields[name][1] == offset == getattr(expected, name).offset


def test_tensor_maps_are_aligned_to_64():
    assert EVERY_TYPE.alignment == 64
    assert EVERY_TYPE.offsets["map"] % 64 == 0
    assert EVERY_TYPE.offsets["after"] == EVERY_TYPE.offsets["map"] + 128
    assert EVERY_TYPE.offsets["maps"] == EVERY_TYPE.offsets["after"] + 64
    assert EVERY_TYPE.size % 64 == 0


def test_record_takes_every_field():
    record = np.zeros((), EVERY_TYPE.dtype)
    encoded = np.arange(128, dtype=np.uint8)
    record["maps"][1] = encoded
    record["address"] = 2**63 + 5
    record["inners"][1]["size"] = -7
    record["three_f32"] = [1.5, 2.5, 3.5]
    data = record.tobytes()
    offsets = EVERY_TYPE.offsets
    assert data[offsets["maps"] + 128 : offsets["maps"] + 256] == encoded.tobytes()
    assert data[offsets["address"] :][:8] == (2**63 + 5).to_bytes(8, "little")
    assert data[offsets["inners"] + 16 + 8 :][:8] == (-7).to_bytes(8, "little", signed=True)
    assert data[offsets["three_f32"] :][:12] == np.array([1.5, 2.5, 3.5], "<f4").tobytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((Field("a", "int"),), "field 'a' has type 'int'; use one of i8, u8"),
        ((Field("a", "u8", count=0),), "field 'a' has count 0"),
        ((Field("a", "u8"), Field("a", "u16")), "struct Bad has two fields named 'a'"),
        ((), "struct Bad has no fields"),
    ],
)
def test_bad_declarations_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Struct("Bad", fields).dtype  # noqa: B018


def test_definition_asserts_size_alignment_and_every_offset():
    text = INNER.cpp()
    assert text == (
        "// A nested one.\n"
        "struct Inner {\n"
        "  uint8_t tag;\n"
        "  int64_t size;\n"
        "};\n"
        "static_assert(sizeof(Inner) == 16);\n"
        "static_assert(alignof(Inner) == 8);\n"
        "static_assert(offsetof(Inner, tag) == 0);\n"
        "static_assert(offsetof(Inner, size) == 8);\n"
    )


def test_header_declares_every_struct_and_constant():
    text = abi.header_text()
    for struct in abi.STRUCTS:
        assert struct.cpp() in text
    for name, value in abi.CONSTANTS.items():
        assert f"constexpr int {name} = {value};\n" in text


def test_params_fit_a_launch():
    assert (
        abi.PARAMS.size <= 4096
    )  # More needs a newer launch path than compute capability 9.0 has.


VARIANT = abi.Variant("v", "sm_90a", "v.cu", ("k",), {"TILE_M": 128, "TILE_N": 64})


@pytest.mark.parametrize(
    "change",
    [{"macros": {"TILE_M": 64, "TILE_N": 64}}, {"kernels": ("k", "l")}, {"arch": "sm_100f"}],
)
def test_hash_notices_the_variants_facts(change):
    assert abi.abi_hash(dataclasses.replace(VARIANT, **change)) != abi.abi_hash(VARIANT)


def test_hash_ignores_the_order_of_macros():
    other = dataclasses.replace(VARIANT, macros={"TILE_N": 64, "TILE_M": 128})
    assert abi.abi_hash(other) == abi.abi_hash(VARIANT)


def test_hash_notices_structs_and_constants(monkeypatch):
    before = abi.abi_hash(VARIANT)
    monkeypatch.setattr(abi, "STRUCTS", (*abi.STRUCTS, INNER))
    after = abi.abi_hash(VARIANT)
    monkeypatch.setitem(abi.CONSTANTS, "kExtra", 1)
    assert len({before, after, abi.abi_hash(VARIANT)}) == 3


def test_variants_are_well_formed():
    names = [variant.name for variant in abi.VARIANTS]
    assert len(set(names)) == len(names)
    for variant in abi.VARIANTS:
        assert variant.arch in abi.ARCHS
        assert (build.SOURCES / variant.source).is_file()
        assert all(isinstance(value, int) for value in variant.macros.values())


@pytest.mark.parametrize(
    ("spelling", "arch"),
    [
        ("sm_90a", "sm_90a"),
        ("9.0", "sm_90a"),
        ("sm_100a", "sm_100f"),
        ("sm_103a", "sm_100f"),
        ("sm_100f", "sm_100f"),
        ("10.0", "sm_100f"),
        ("10.3", "sm_100f"),
        ("sm_89", None),
        ("12.0", None),
        ("", None),
    ],
)
def test_image_arch(spelling, arch):
    assert abi.image_arch(spelling) == arch


def test_facts_survive_json():
    facts = abi.KernelFacts(168, 0, 0, 1024, 200_000, (384, 1, 1), (2, 1, 1))
    assert abi.KernelFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "fit"),
    [
        (168, 1024, (384, 1, 1), 1),  # 5376 registers a warp, 12 warps
        (168, 1024, (128, 1, 1), 3),
        (64, 1024, (1024, 1, 1), 1),
        (32, 1024, (1024, 1, 1), 2),
        (32, 1024, (1000, 1, 1), 2),
        (24, 0, (32, 1, 1), 32),
        (48, 0, (64, 1, 1), 20),  # 10 warps of 1536 in each quarter
        (50, 0, (96, 1, 1), 12),  # 9 warps of 1792 in each quarter
        (24, 114 * 1024 - 1024, (64, 1, 1), 2),
        (24, 114 * 1024 - 1023, (64, 1, 1), 1),
        (24, 0, None, None),
    ],
)
def test_how_many_ctas_fit(registers, shared, threads, fit):
    facts = abi.KernelFacts(registers, 0, 0, 0, shared, threads, (1, 1, 1))
    assert facts.ctas_per_sm == fit


# ------------------------------------------------------------------------------ the C++ side


def compile_header(tmp_path, text):
    (tmp_path / "structs.cuh").write_text(text)
    source = tmp_path / "structs.cu"
    source.write_text(
        '#include "structs.cuh"\nextern "C" __global__ void k(fp4rt::EveryType p) {}\n'
    )
    return build.compile_source(source, "sm_90a", tmp_path / "out")


@pytest.fixture(scope="module")
def every_type_header():
    try:
        build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(abi, "STRUCTS", (*abi.STRUCTS, INNER, EVERY_TYPE))
        return abi.header_text()


@pytest.mark.nvcc
def test_nvcc_agrees_with_the_layout(every_type_header, tmp_path):
    image = compile_header(tmp_path, every_type_header)
    (param,) = re.findall(r"\.param \.align (\d+) \.b8 k_param_0\[(\d+)\]", image.ptx.read_text())
    assert tuple(map(int, param)) == (EVERY_TYPE.alignment, EVERY_TYPE.size)


@pytest.mark.nvcc
@pytest.mark.parametrize("what", ["sizeof(EveryType)", "offsetof(EveryType, inner)"])
def test_nvcc_notices_a_wrong_layout(every_type_header, tmp_path, what):
    wrong = re.sub(rf"({re.escape(what)} == )(\d+)", r"\g<1>1\2", every_type_header)
    assert wrong != every_type_header
    with pytest.raises(build.BuildError, match="static assertion failed"):
        compile_header(tmp_path, wrong)
