"""Boxes loaded with tensor maps, byte for byte against a numpy model."""

import itertools

import numpy as np
import pytest
import runtime_kernels as rk

from fp4rt.device import LaunchConfig, TensorMap

SPANS = {"none": 64, "32B": 32, "64B": 64, "128B": 128}
# For each swizzle: how many of the address bits from 7 up are added (xor) to those from 4 up.
SWIZZLE_MASK = {"none": 0, "32B": 1, "64B": 3, "128B": 7}
EXTENTS = (96, 5, 3, 4, 2)
BOX = (0, 4, 2, 3, 2)


def box_image(array, coords, box, steps, swizzle):
    """The shared-memory image of a box: coords, box and steps innermost first, like the map's."""
    axes = []
    for extent, start, width, step in zip(array.shape[::-1], coords, box, steps, strict=True):
        index = start + np.arange(0, width, step)
        axes.append((index, (index >= 0) & (index < extent)))
    image = np.zeros([len(index) for index, _ in reversed(axes)], array.dtype)
    inside = np.ix_(*[np.flatnonzero(valid) for _, valid in reversed(axes)])
    taken = np.ix_(*[index[valid] for index, valid in reversed(axes)])
    image[inside] = array[taken]
    linear = image.reshape(-1).view(np.uint8)
    place = np.arange(linear.size)
    place ^= (place >> 7 & SWIZZLE_MASK[swizzle]) << 4
    swizzled = np.empty_like(linear)
    swizzled[place] = linear
    return swizzled


class Boxes:
    """Loads boxes of one array in device memory."""

    def __init__(self, device, array):
        self.device = device
        self.array = array
        self.buffer = device.upload(array)
        self.kernel = rk.load_kernels(device).kernel("load_box")
        self.out = device.alloc(1 << 16)

    def check(self, coords, box, swizzle, steps=None, **options):
        rank = self.array.ndim
        steps = steps or (1,) * rank
        expected = box_image(self.array, coords, box, (1, *steps[1:]), swizzle)
        tensor_map = TensorMap(
            address=self.buffer.address,
            dtype=self.array.dtype.name,
            global_dim=self.array.shape[::-1],
            global_strides=self.array.strides[::-1][1:],
            box_dim=box,
            element_strides=steps if any(s != 1 for s in steps) else (),
            swizzle=swizzle,
            **options,
        )
        encoded = self.device.encode_tensor_map(tensor_map)
        assert len(encoded) == 128
        params = rk.record(
            rk.BOX,
            np.frombuffer(encoded, np.uint8),
            [*coords, *[0] * (5 - rank)],
            rank,
            self.out.address,
            expected.size,
        )
        self.device.stream.fill(self.out, 0xA5)
        config = LaunchConfig((1, 1, 1), (128, 1, 1), shared_bytes=-(-expected.size // 1024) * 1024)
        self.device.stream.launch(self.kernel, config, params)
        got = self.out.to_numpy()
        wrong = np.flatnonzero(got[: expected.size] != expected)
        assert wrong.size == 0, f"box {box} at {coords}: {wrong.size} bytes, first {wrong[:8]}"
        assert np.all(got[expected.size :] == 0xA5)


def random_bytes(rng, shape, dtype):
    dtype = np.dtype(dtype)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("swizzle", SPANS)
def test_every_swizzle_and_rank(device, swizzle, rank, rng):
    if device.image_kind is None:
        pytest.skip(f"{device.name} has no TMA")
    boxes = Boxes(device, random_bytes(rng, EXTENTS[:rank][::-1], np.uint8))
    box = (SPANS[swizzle], *BOX[1:rank])
    # Inside, across the end, before the start, and beyond the array in the last dimension. The
    # innermost coordinate must be a multiple of 16 bytes: the H200 ends in an illegal instruction
    # otherwise, though no manual says so.
    middle = (16, *[1] * (rank - 1))
    for coords in (
        (0,) * rank,
        middle,
        (80, *[e - 1 for e in EXTENTS[1:rank]]),
        (-16, *[-1] * (rank - 1)),
        (*middle[:-1], EXTENTS[rank - 1] + 16),
    ):
        boxes.check(coords, box, swizzle)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32", "float16", "float64", "int64"])
def test_wider_elements(device, dtype, rng):
    if device.image_kind is None:
        pytest.skip(f"{device.name} has no TMA")
    boxes = Boxes(device, random_bytes(rng, (9, 32), dtype))
    step = 16 // np.dtype(dtype).itemsize
    corners = [(0, 0), (3 * step, 5), (-step, -2), (32 - step, 3)]
    for coords, swizzle in itertools.product(corners, ["none", "64B"]):
        boxes.check(coords, (4 * step, 8), swizzle)


def test_rows_that_are_not_adjacent_and_stepped_boxes(device, rng):
    if device.image_kind is None:
        pytest.skip(f"{device.name} has no TMA")
    boxes = Boxes(device, random_bytes(rng, (12, 128), np.uint8))
    boxes.check((0, 1), (64, 9), "none", steps=(1, 3))
    boxes.check((32, -2), (64, 8), "64B", steps=(1, 2), l2_promotion="128B")


def test_a_map_of_host_or_freed_memory_is_refused(device):
    if device.image_kind is None:
        pytest.skip(f"{device.name} has no TMA")
    host = np.zeros(1 << 20, np.uint8)
    address = -(-host.ctypes.data // 16) * 16
    buffer = device.alloc(1 << 16)
    good = TensorMap(buffer.address, "uint8", (128, 8), (128,), (128, 8))
    assert device.encode_tensor_map(good) == device.encode_tensor_map(good)
    with pytest.raises(ValueError, match="address"):
        device.encode_tensor_map(TensorMap(address, "uint8", (128, 8), (128,), (128, 8)))
    with pytest.raises(ValueError, match="multiple of 16"):
        device.encode_tensor_map(TensorMap(buffer.address + 8, "uint8", (128, 8), (128,), (128, 8)))
