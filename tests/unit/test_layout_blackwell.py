import numpy as np
import pytest

from fp4rt import layout

SHAPES = [(0, 0), (0, 8), (1, 8), (7, 24), (127, 128), (128, 128), (129, 136), (300, 520)]


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_blocks_there_and_back(rng, rows, width):
    values = rng.integers(0, 256, (rows, width), dtype=np.uint8)
    blocks = layout.blackwell_blocks(values)
    assert blocks.nbytes == -(-rows // 128) * -(-width // 128) * 16384
    np.testing.assert_array_equal(layout.from_blackwell_blocks(blocks, rows, width), values)


def test_blocks_follow_the_formula(rng):
    rows, width = 200, 300
    values = rng.integers(1, 256, (rows, width), dtype=np.uint8)
    flat = layout.blackwell_blocks(values).reshape(-1)
    expected = np.zeros_like(flat)
    for row in range(rows):
        for byte in range(width):
            block = row // 128 * 3 + byte // 128
            chunk = byte % 128 // 16 ^ row % 8
            expected[block * 16384 + row % 128 * 128 + chunk * 16 + byte % 16] = values[row, byte]
    np.testing.assert_array_equal(flat, expected)


@pytest.mark.parametrize(("rows", "cols"), [(0, 1), (1, 1), (130, 3), (128, 16), (5, 65)])
def test_scales_there_and_back(rng, rows, cols):
    scales = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    swizzled = layout.blackwell_scales(scales)
    back = layout.unswizzle_scales(swizzled).view(np.uint8)
    np.testing.assert_array_equal(back[:, :cols], scales)
    assert not back[:, cols:].any()
    assert swizzled.data.nbytes == -(-rows // 128) * -(-cols // 16) * 2048
