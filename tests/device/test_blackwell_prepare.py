"""Blackwell's first kernel on every device that runs kernels, whatever its architecture."""

from pathlib import Path

import numpy as np
import pytest

import build
from fp4rt import abi, layout, model
from fp4rt.device import LaunchConfig

pytestmark = pytest.mark.nvcc
SOURCE = Path(__file__).parents[1] / "kernels" / "blackwell_prepare.cu"


@pytest.fixture(scope="module")
def prepare(device):
    if device.image_kind is None:
        pytest.skip(f"{device.name} runs no kernels")
    image = build.compile_source(SOURCE, abi.image_arch(device.arch), strict=True)
    return device.load(getattr(image, device.image_kind).read_bytes()).kernel("prepare")


def expected(scales, sizes, shapes, pitch, max_rows):
    """Blocks of every group, tile, 128 rows and 256 K, by the layout functions; and the starts."""
    blocks, starts = [], []
    row = d = 0
    for size, (n, k) in zip(sizes, shapes, strict=True):
        starts.append((2048 * len(blocks), d, row))
        height = model.tile_rows(size, max_rows) if size else 1
        for first in range(0, size, height):
            rows = scales[row + first : row + min(first + height, size), : k // 16]
            swizzled = layout.blackwell_scales(rows).data
            for block in swizzled.reshape(-1, 2048):
                blocks.append(block)
            missing = -(-height // 128) - -(-len(rows) // 128)  # whole blocks of padding
            blocks += [np.zeros(2048, np.uint8)] * (missing * -(-k // 256))
        row, d = row + size, d + size * n
    return np.concatenate([*blocks, np.zeros(0, np.uint8)]), np.array(starts)


@pytest.mark.parametrize("max_rows", [32, 128, 256])
@pytest.mark.parametrize("grid", [1, 3])
def test_scales_by_tile_and_starts(device, prepare, rng, max_rows, grid):
    sizes = [0, 1, 300, 0, 37, 129, *rng.integers(0, 3, 290).tolist(), 8]
    shapes = [(5 + g % 3, (16, 272, 48, 256, 1040)[g % 5]) for g in range(len(sizes))]
    pitch, total = 1056, sum(sizes)
    scales = rng.integers(0, 256, (total + 9, pitch // 16), dtype=np.uint8)
    groups = np.zeros(len(sizes), abi.GROUP.dtype)
    groups["n"], groups["k"] = np.array(shapes).T
    want, starts = expected(scales, sizes, shapes, pitch, max_rows)
    room = layout.blackwell_prepared_bytes(total, len(sizes), 1040, max_rows)
    assert len(want) <= room

    buffers = {
        "groups": device.upload(groups),
        "group_sizes": device.upload(np.array(sizes, np.int32)),
        "a_scales": device.upload(scales),
        "a_prepared": device.alloc(room, np.uint8),
        "group_starts": device.alloc(len(sizes), abi.GROUP_START.dtype),
    }
    device.stream.fill(buffers["a_prepared"], 0xA5)
    params = np.zeros((), abi.PARAMS.dtype)
    for name, buffer in buffers.items():
        params[name] = buffer.address
    params["num_groups"], params["max_tile_rows"] = len(sizes), max_rows
    params["a_pitch"] = pitch
    device.stream.launch(prepare, LaunchConfig((grid, 1, 1), (256, 1, 1)), params)
    got = buffers["a_prepared"].to_numpy()
    np.testing.assert_array_equal(got[: len(want)], want)
    assert (got[len(want) :] == 0xA5).all()
    found = buffers["group_starts"].to_numpy()
    np.testing.assert_array_equal(
        np.stack([found["a_prepared"], found["d"], found["row"]], axis=1), starts
    )
