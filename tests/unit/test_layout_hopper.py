"""Hopper's weight blocks: there and back, the documented formula, and zero padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4rt.layout import from_hopper_blocks, hopper_blocks, hopper_prepared_bytes

SHAPES = [(1, 16), (8, 128), (127, 112), (128, 128), (129, 144), (200, 272), (256, 256)]


def operand(rows: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    return values, rng.integers(0, 256, (rows, k // 16), dtype=np.uint8)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 300), blocks=st.integers(0, 24))
def test_blocks_and_back(rows: int, blocks: int) -> None:
    values, scales = operand(rows, 16 * blocks)
    found = from_hopper_blocks(hopper_blocks(values, scales), rows, 8 * blocks)
    np.testing.assert_array_equal(found[0], values)
    np.testing.assert_array_equal(found[1].view(np.uint8), scales)


@pytest.mark.parametrize(("rows", "k"), SHAPES)
def test_every_code_lies_where_the_formula_says(rows: int, k: int) -> None:
    values, scales = operand(rows, k, seed=1)
    k_blocks = -(-k // 64)
    blocks = hopper_blocks(values, scales)
    rng = np.random.default_rng(2)
    for n, kk in zip(rng.integers(0, rows, 50), rng.integers(0, k, 50), strict=True):
        code = values[n, kk // 2] >> (4 * (kk % 2)) & 15
        block = blocks[n // 128 * k_blocks + kk // 64]
        half = n % 128 // 64
        w, h, r = n % 64 // 16, n % 16 // 8, n % 8
        j, i, c, e = kk % 64 // 16, kk % 16 // 8, kk % 8 // 2, kk % 2
        byte = block[2048 * half + 16 * (32 * w + 4 * r + c) + 4 * j + 2 * e + 1 - h]
        found = byte << 3 & 8 | byte >> 4 & 7 if i else byte >> 4 & 8 | byte >> 1 & 7
        assert found == code
        assert block[4096 + 256 * half + 64 * w + 8 * r + 2 * j + h] == scales[n, kk // 16]


@pytest.mark.parametrize(("rows", "k"), SHAPES)
def test_padding_is_zero(rows: int, k: int) -> None:
    values, scales = operand(rows, k)
    blocks = hopper_blocks(values | 0x11, scales | 1)
    assert blocks.shape == (-(-rows // 128) * -(-k // 64), 4608)
    whole = from_hopper_blocks(blocks, -(-rows // 128) * 128, -(-k // 64) * 32)
    assert not whole[0][rows:].any() and not whole[0][:, k // 2 :].any()
    assert not whole[1].view(np.uint8)[rows:].any()
    assert not whole[1].view(np.uint8)[:, k // 16 :].any()


@pytest.mark.parametrize("sizes", [[0, 0], [1, 1, 1], [8, 7], [9, 0, 17], [100]])
def test_prepared_bytes_hold_every_group(sizes: list[int]) -> None:
    k = 80
    need = sum(-(-m // 8) for m in sizes) * 2 * 1024
    assert need + 16384 <= hopper_prepared_bytes(sum(sizes), len(sizes), k)
