"""Launches, parameter structs and graphs of kernels, on every device that runs kernels."""

import gc

import numpy as np
import pytest
import runtime_kernels as rk

import fp4rt
from fp4rt.abi import C_TYPES, Field, Struct
from fp4rt.device import LaunchConfig

ONE = LaunchConfig((1, 1, 1), (128, 1, 1))


@pytest.fixture(scope="module")
def module(device):
    return rk.load_kernels(device)


def add_params(source, target, increment=1):
    return rk.record(rk.ADD, source.address, target.address, source.size, increment)


def test_launch_computes(device, module):
    array = np.arange(300, dtype=np.uint32)
    source, target = device.upload(array), device.upload(np.zeros(300, np.uint32))
    params = add_params(source, target, 7)
    for given in (params, params.tobytes()):
        device.stream.fill(target, 0)
        device.stream.launch(module.kernel("add"), LaunchConfig((3, 1, 1), (128, 1, 1)), given)
        assert np.array_equal(target.to_numpy(), array + 7)


def test_a_kernel_knows_its_image(device, module):
    kernel = module.kernel("add")
    assert kernel.name == "add"
    assert kernel.params_bytes == rk.ADD.itemsize
    assert 128 <= kernel.max_threads <= 1024
    assert kernel.num_registers > 0 or device.image_kind == "ptx"  # known after assembly only
    assert kernel.local_bytes == 0
    assert module.kernel("load_box").shared_bytes >= 8
    assert module.kernel("no_parameters").params_bytes == 0
    device.stream.launch(module.kernel("no_parameters"), ONE, b"")
    with pytest.raises(ValueError, match="load_box"):
        module.kernel("nothing")


def test_bad_launches_change_nothing(device, module):
    array = np.arange(100, dtype=np.uint32)
    buffer = device.upload(array)
    params, add = add_params(buffer, buffer), module.kernel("add")
    launch = device.stream.launch
    for use, error in [
        (lambda: launch(add, ONE, params.tobytes()[:-4]), ValueError),
        (lambda: launch(add, ONE, params.tobytes() + b"\0"), ValueError),
        (lambda: launch(add, LaunchConfig((0, 1, 1), (128, 1, 1)), params), ValueError),
        (lambda: launch(add, LaunchConfig((1, 1, 1), (1025, 1, 1)), params), ValueError),
        (lambda: launch(add, LaunchConfig((1, 70000, 1), (1, 1, 1)), params), ValueError),
        (lambda: launch(add, LaunchConfig((1, 1, 1), (1, 1, 65)), params), ValueError),
        (lambda: launch(add, LaunchConfig((1, 1, 1), (32, 1, 1), 1 << 20), params), ValueError),
        (lambda: launch(add, LaunchConfig((1, 1, 1), (32, 1, 1), -1), params), ValueError),
        (
            lambda: launch(add, LaunchConfig((3, 1, 1), (32, 1, 1), cluster=(2, 1, 1)), params),
            ValueError,
        ),
        (
            lambda: launch(add, LaunchConfig((32, 1, 1), (32, 1, 1), cluster=(32, 1, 1)), params),
            ValueError,
        ),
        (lambda: launch("add", ONE, params), (TypeError, AttributeError)),
    ]:
        with pytest.raises(error):
            use()
    assert np.array_equal(buffer.to_numpy(), array)


def test_more_shared_memory_than_the_default(device, module):
    words = 200 * 1024 // 4
    out = device.alloc(words, np.uint32)
    device.stream.launch(
        module.kernel("shared_words"),
        LaunchConfig((1, 1, 1), (1024, 1, 1), shared_bytes=4 * words),
        rk.record(rk.SHARED, out.address, words),
    )
    expected = np.roll(np.arange(words, dtype=np.uint32) ^ np.uint32(0x5A5A5A5A), -1)
    assert np.array_equal(out.to_numpy(), expected)


def test_clusters(device, module):
    out = device.alloc(8, np.uint32)
    for size in (1, 2, 4, 8):
        device.stream.fill(out, 0xFF)
        device.stream.launch(
            module.kernel("cluster_rank"),
            LaunchConfig((8, 1, 1), (32, 1, 1), cluster=(size, 1, 1)),
            rk.record(rk.CLUSTER, out.address),
        )
        assert np.array_equal(out.to_numpy(), np.arange(8) % size + 256 * size)


def test_programmatic_launches_keep_their_order(device, module):
    array = np.arange(256, dtype=np.uint32)
    buffer = device.upload(array)
    config = LaunchConfig((2, 1, 1), (128, 1, 1), programmatic=True)
    for _ in range(4):
        device.stream.launch(module.kernel("add_dependent"), config, add_params(buffer, buffer))
    assert np.array_equal(buffer.to_numpy(), array + 4)


def test_same_image_is_shared(device):
    image = rk.image_bytes(device)
    first, second = device.load(image), device.load(image)
    kernel = first.kernel("add")
    first.close()
    first.close()
    second.close()
    buffer = device.upload(np.zeros(10, np.uint32))
    device.stream.launch(kernel, ONE, add_params(buffer, buffer))  # a kernel keeps it loaded
    assert np.all(buffer.to_numpy() == 1)


FIELDS = Struct(
    "Fields",
    (
        *(Field(f"a_{name}", name) for name in C_TYPES),
        Field("some", "u16", count=3),
        Field("pair", Struct("Pair", (Field("first", "u8"), Field("second", "i32")))),
        Field("map", "tensor_map"),
        Field("bytes", "ptr<uint8_t>"),
        Field("values", "ptr<double>"),
    ),
)


def test_every_field_type_arrives(device, tmp_path, rng):
    pair = next(f.type for f in FIELDS.fields if f.name == "pair")
    text = "\n".join(["#pragma once", "namespace fp4rt {", pair.cpp(), FIELDS.cpp(), "}"])
    (tmp_path / "fields.h").write_text(text)
    kernel = rk.load_kernels(device, "fields", include_dirs=[tmp_path]).kernel("fields")
    assert kernel.params_bytes == FIELDS.size

    raw = device.alloc(FIELDS.size)
    values = device.alloc(13, np.float64)
    params = np.zeros((), FIELDS.dtype)
    expected = []
    for name, (_, kind) in C_TYPES.items():
        if np.issubdtype(kind, np.floating):
            value = kind(-1.5)
        else:
            limits = np.iinfo(kind)
            value = kind(limits.min if limits.min else limits.max // 2 + 1)
        params[f"a_{name}"] = value
        expected.append(float(value))
    params["some"] = [1, 2, 3]
    params["pair"]["first"], params["pair"]["second"] = 200, -7
    params["map"] = rng.integers(0, 256, 128)
    params["bytes"], params["values"] = raw.address, values.address
    expected += [1 + 20 + 300, 200 - 7000, float(params["map"][0]) + float(params["map"][127])]
    device.stream.launch(kernel, ONE, params[()])
    assert values.to_numpy().tolist() == expected
    assert raw.to_numpy().tobytes() == params.tobytes()


def captured_add(device, module, source, target):
    with device.stream.capture() as capture:
        device.stream.launch(module.kernel("add"), ONE, add_params(source, target))
        device.stream.launch(
            module.kernel("add_dependent"),
            LaunchConfig((1, 1, 1), (128, 1, 1), programmatic=True),
            add_params(target, target, 10),
        )
    return capture.graph


def test_graph_of_kernels_keeps_buffers_and_module(device):
    array = np.arange(100, dtype=np.uint32)
    result = device.upload(np.zeros(100, np.uint32))
    graph = captured_add(device, rk.load_kernels(device), device.upload(array), result)
    gc.collect()
    junk = [device.upload(np.full(100, 9, np.uint32)) for _ in range(50)]
    for _ in range(3):
        device.stream.fill(result, 0)
        graph.launch()
        assert np.array_equal(result.to_numpy(), array + 11)
    del junk


def test_set_params_needs_no_new_graph(device, module):
    array = np.arange(100, dtype=np.uint32)
    source, target = device.upload(array), device.upload(np.zeros(100, np.uint32))
    graph = captured_add(device, module, source, target)
    for step in range(3):
        new_source, new_target = device.upload(array * step), device.alloc(100, np.uint32)
        graph.set_params(0, add_params(new_source, new_target, step))
        graph.set_params(1, add_params(new_target, new_target, 100))
        del new_source
        gc.collect()
        graph.launch()
        assert np.array_equal(new_target.to_numpy(), array * step + step + 100)
    assert not target.to_numpy().any()
    with pytest.raises(ValueError):
        graph.set_params(2, add_params(source, target))
    with pytest.raises(ValueError):
        graph.set_params(0, b"too short")


def test_kernel_of_another_device_is_refused(device, module):

    with fp4rt.device(device.name) as second:
        buffer = second.upload(np.zeros(10, np.uint32))
        with pytest.raises(ValueError, match="add"):
            second.stream.launch(module.kernel("add"), ONE, add_params(buffer, buffer))
