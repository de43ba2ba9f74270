"""How Blackwell's kernel puts scales in order, on every device that runs kernels."""

import struct
from pathlib import Path

import numpy as np
import pytest

import build
from fp4rt import abi, layout
from fp4rt.device import LaunchConfig

pytestmark = pytest.mark.nvcc
SOURCE = Path(__file__).parents[1] / "kernels" / "blackwell_scales.cu"


@pytest.fixture(scope="module", params=[32, 64, 128, 256])
def order(device, request):
    """The kernel for tiles of so many rows at most, and that number."""
    if device.image_kind is None:
        pytest.skip(f"{device.name} runs no kernels")
    arch, macros = abi.image_arch(device.arch), {"KROWS": request.param // 32}
    image = build.compile_source(SOURCE, arch, macros=macros, strict=True)
    return device.load(getattr(image, device.image_kind).read_bytes()).kernel(
        "order"
    ), request.param


@pytest.mark.parametrize("k", [16, 80, 272, 320, 1040])
@pytest.mark.parametrize(("pitch", "offset"), [(80, 0), (76, 0), (66, 3)])
def test_blocks_of_a_tile(device, order, rng, k, pitch, offset):
    """16-byte, word and byte loads; what lies around the tile's scales must not be seen."""
    kernel, max_rows = order
    for rows in (max_rows, rng.integers(1, max_rows)):
        scales = np.full((rows + 2, pitch), 0xFF, np.uint8)
        tile = scales[1 : rows + 1, : k // 16] = rng.integers(0, 0x7F, (rows, k // 16))
        given = device.upload(np.concatenate([np.zeros(offset, np.uint8), scales.reshape(-1)]))
        row_blocks, k_blocks = -(-max_rows // 128), -(-k // 256)
        blocks = device.alloc((k_blocks, row_blocks, 2048), np.uint8)
        device.stream.fill(blocks, 0xA5)
        first = given.address + offset + pitch
        params = struct.pack("<QQqii", first, blocks.address, pitch, rows, k)
        device.stream.launch(kernel, LaunchConfig((k_blocks, 1, 1), (32, 1, 1)), params)
        want = np.zeros((row_blocks * 128, k // 16), np.uint8)
        want[:rows] = tile
        want = layout.blackwell_scales(want).data.reshape(row_blocks, k_blocks, 2048)
        np.testing.assert_array_equal(blocks.to_numpy(), want.swapaxes(0, 1))
