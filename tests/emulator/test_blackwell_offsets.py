"""Offsets beyond 32 bits: a problem of terabytes, of which a few CTAs are executed.

Every buffer but the group tables is larger than 2^32 bytes and takes memory only where it is
touched. The grids have a CTA (or cluster) for every tile; the last ones and those of a small group
behind the large one are run, which read and write at the far ends.
"""

import mmap

import numpy as np
import pytest
from blackwell_launch import VARIANTS, any_operand, load, operand
from helpers import FULL

import fp4rt
from fp4rt import abi, layout, model, reference
from fp4rt.device import LaunchConfig, TensorMap
from fp4rt.emulator import EmulatorDevice
from fp4rt.emulator.families import encode_tensor_map
from fp4rt.emulator.launch import Launch
from fp4rt.emulator.memory import UINT, Allocation

pytestmark = [pytest.mark.nvcc, pytest.mark.slow]

SIZES = (2**20 + 5, 37)
SHAPES = ((2**19 + 264, 16384), (72, 80))
MAP_NORESERVE = 0x4000  # of Linux; Python's mmap has no name for it before 3.13
PITCH = 65536  # elements from row to row of A, as if yet another group had this K


class Sparse(Allocation):
    """Device memory whose pages exist once they are written."""

    def __init__(self, memory, size, name):
        self.size, self.name = size, name
        self.base = -(-memory.next // 256) * 256
        memory.next = self.base + size + memory.GUARD
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        padded = (size + 31) // 16 * 16
        try:
            self.data, self.valid = (
                np.frombuffer(mmap.mmap(-1, padded, flags=flags), np.uint8) for _ in range(2)
            )
        except OSError as error:
            pytest.skip(f"no address space for {size} bytes: {error}")
        self.readonly, self.live = False, True
        self.views = {n: self.data.view(t) for n, t in UINT.items()}
        self.valids = {n: self.valid.view(t) for n, t in UINT.items()}
        memory.map(self)

    def put(self, offset, values):
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self.data[offset : offset + data.size] = data
        self.valid[offset : offset + data.size] = 1

    def put_rows(self, offset, pitch, rows):
        for i, row in enumerate(rows):
            self.put(offset + i * pitch, row)


def run_some(device, kernel, config, params, ctas):
    """Execute the clusters that begin at these CTAs of a launch, and no others."""
    launch = Launch(device.machine, kernel.program, config, params.tobytes())
    launch.left = iter([(cta, 0, 0) for cta in ctas])
    launch.next_base = next(launch.left)
    launch.unfinished = launch.untriggered = len(ctas) * config.cluster[0]
    device.machine.execute([launch])


@pytest.mark.parametrize("name", VARIANTS if FULL else ["n32", "pair_n128"])
def test_far_ends_of_a_problem_of_terabytes(rng, name):
    device = EmulatorDevice("sm_100a", allow={"uninitialised-global"})
    memory = device.machine.memory
    loaded = load(device, name)
    shape = model.TileShape.of(VARIANTS[name])
    heights = [model.tile_rows(size, shape.max_rows) for size in SIZES]
    token_tiles = [-(-size // h) for size, h in zip(SIZES, heights, strict=True)]
    column_tiles = [-(-n // shape.columns) for n, _ in SHAPES]
    k_blocks = [-(-k // 256) for _, k in SHAPES]
    rows = SIZES[0] - (token_tiles[0] - 1) * heights[0]  # of the last tile of group 0
    first_row = SIZES[0] - rows
    columns = SHAPES[0][0] - (column_tiles[0] - 1) * shape.columns
    first_column = SHAPES[0][0] - columns

    # 1. The operands of that tile, and all of group 1.
    inputs = [operand(rng, rows, SHAPES[0][1]), any_operand(rng, SIZES[1], SHAPES[1][1])]
    weights = [operand(rng, columns, SHAPES[0][1]), any_operand(rng, *SHAPES[1])]
    total = sum(SIZES)
    a_values = Sparse(memory, total * PITCH // 2, "A")
    a_scales = Sparse(memory, total * PITCH // 16, "scales of A")
    for a, row in zip(inputs, (first_row, SIZES[0]), strict=True):
        a_values.put_rows(row * (PITCH // 2), PITCH // 2, a.values)
        a_scales.put_rows(row * (PITCH // 16), PITCH // 16, a.scales.view(np.uint8))
    groups = np.zeros(2, abi.GROUP.dtype)
    groups["n"], groups["k"] = np.array(SHAPES).T
    for g, w in enumerate(weights):
        row_blocks = -(-SHAPES[g][0] // layout.BLACKWELL_ROWS)
        first = first_column // layout.BLACKWELL_ROWS if g == 0 else 0
        assert first_column % layout.BLACKWELL_ROWS == 0
        for field, part, size in (
            ("weight_values", layout.blackwell_blocks(w.values), 16384),
            ("weight_scales", layout.blackwell_scales(w.scales.view(np.uint8)).data, 2048),
        ):
            block = Sparse(memory, row_blocks * k_blocks[g] * size, field)
            block.put(first * k_blocks[g] * size, part)
            groups[g][field] = block.base
    elements = [size * n for size, (n, _) in zip(SIZES, SHAPES, strict=True)]
    d = Sparse(memory, sum(elements) * 2, "D")
    assert min(a_values.size, a_scales.size, d.size) > 2**32
    assert first_column // 128 * k_blocks[0] * 16384 > 2**32

    p = np.zeros((), abi.PARAMS.dtype)
    tensor_map = TensorMap(
        a_values.base,
        "uint8",
        (PITCH // 2, total),
        (PITCH // 2,),
        (128, 32),
        swizzle="128B",
    )
    p["tensor_map_a"] = np.frombuffer(encode_tensor_map(tensor_map, device.arch), np.uint8)
    tables = [device.upload(t) for t in (groups, np.int32(SIZES), np.float32([1, 2.0**-12]))]
    p["groups"], p["group_sizes"], p["alpha"] = (t.address for t in tables)
    p["a_values"], p["a_scales"] = a_values.base, a_scales.base
    p["d"] = d.base
    p["total_m"], p["num_groups"] = total, 2
    p["max_tile_rows"], p["a_pitch"] = shape.max_rows, PITCH

    # 2. The last tile of group 0, and group 1, whose tiles are lower (or as high).
    tiles = [t * c for t, c in zip(token_tiles, column_tiles, strict=True)]
    clusters = sum(tiles)
    facts = loaded.facts
    cluster = facts.cluster[0]
    config = LaunchConfig(
        (clusters * cluster, 1, 1),
        tuple(facts.max_threads),
        shared_bytes=facts.dynamic_shared_bytes,
        cluster=tuple(facts.cluster),
    )
    chosen = [(tile * cluster) for tile in range(tiles[0] - 1, clusters)]
    run_some(device, loaded.gemm, config, p, chosen)

    # 3. Results where they belong, bit for bit, and nothing around the far tile.
    exact = [
        reference.grouped_gemm(a, fp4rt.stack([w]), [a.shape[0]], alpha)
        for a, w, alpha in zip(inputs, weights, (1.0, 2.0**-12), strict=True)
    ]
    result = d.data[: d.size].view(np.float16)
    for row in range(rows):
        at = (first_row + row) * SHAPES[0][0] + first_column
        assert at > 2**32
        np.testing.assert_array_equal(result[at : at + columns], exact[0][row].astype(np.float16))
        assert not d.valid[2 * (at - 4096) : 2 * at].any()
    small = result[elements[0] :].reshape(SIZES[1], SHAPES[1][0]).astype(np.float64)
    assert np.abs(small - exact[1]).max() <= 2.0**-10 * np.abs(exact[1]).max()
    assert np.abs(exact[1]).max() > 1
