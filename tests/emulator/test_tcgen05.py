"""tcgen05 through the whole machine: an NVFP4 tile by TMA, cp, mma, commit and ld."""

from __future__ import annotations

import numpy as np
import pytest
from emulated import Emulated, launch

from fp4rt.device import EmulatorFault, TensorMap
from fp4rt.emulator.numerics import block_scaled_dot, decode

pytestmark = pytest.mark.nvcc

FAULTS = [
    "none", "no accumulator wait", "dealloc by one lane", "no fence before", "no fence after",
    "no epilogue fence", "no wait ld", "no full wait", "no empty wait", "wrong bytes",
    "no init fence", "no dealloc", "no commit", "wrong lane", "no accumulator empty wait",
    "dealloc early",
]  # fmt: skip
PARAMS = np.dtype(
    [("a", "V128"), ("b", "V128"), ("sfa", "<u8"), ("sfb", "<u8"), ("d", "<u8"),
     ("n", "<i4"), ("k", "<i4"), ("tiles", "<i4"), ("columns", "<i4"), ("fault", "<i4"),
     ("pad", "V20")],
)  # fmt: skip


def tile_order(scales):
    """Scale codes (rows, K/16) in 128x4 tile order, padding filled with NaN codes."""
    rows, columns = scales.shape
    padded = np.full((-(-rows // 128) * 128, columns), 0x7F, np.uint8)
    padded[:rows] = scales
    r, j = np.mgrid[0 : padded.shape[0], 0:columns]
    at = ((r // 128) * (columns // 4) + j // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + j % 4
    out = np.empty(padded.size, np.uint8)
    out[at.reshape(-1)] = padded.reshape(-1)
    return out


def problem(n, k, seed=0):
    """Random codes; scales that differ between any two (row, block) as far as a byte can."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 256, (128, k // 2), dtype=np.uint8)
    b = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    sfa = rng.permutation(128 * (k // 16)).reshape(128, -1) % 0x7F
    sfb = rng.permutation(n * (k // 16)).reshape(n, -1) % 0x7F
    return a, b, sfa.astype(np.uint8), sfb.astype(np.uint8)


def expected(a, b, sfa, sfb):
    """D by the documented rounding of each K = 64 step."""
    d = None
    for at in range(0, a.shape[1] * 2, 64):
        part, blocks = slice(at // 2, at // 2 + 32), slice(at // 16, at // 16 + 4)
        d = block_scaled_dot(
            decode(a[:, part], "e2m1"), decode(b[:, part], "e2m1"),
            sfa[:, blocks], sfb[:, blocks], "ue4m3", d,
        )  # fmt: skip
    return d


def run(n=64, k=512, tiles=1, fault="none", columns=512, **options):
    a, b, sfa, sfb = problem(n, k)
    device = Emulated(**options)
    params = np.zeros((), PARAMS)
    for name, codes, rows in (("a", a, 128), ("b", b, n)):
        tensor_map = TensorMap(
            device.upload(codes).address, "16u4_align8b", (k, rows), (k // 2,), (256, rows),
            swizzle="128B",
        )  # fmt: skip
        params[name] = np.void(device.encode_tensor_map(tensor_map))
    params["sfa"] = device.upload(tile_order(sfa)).address
    params["sfb"] = device.upload(tile_order(sfb)).address
    d = device.alloc((tiles, 128, n), np.float32)
    params["d"] = d.address
    params["n"], params["k"], params["tiles"], params["columns"] = n, k, tiles, columns
    params["fault"] = FAULTS.index(fault)
    shared = 2 * (128 * 128 + 256 * 128 + 8192) + 1024
    launch(
        device, "emu_tcgen05.cu", "sm_100f", "nvfp4_tile", params.tobytes(),
        block=192, shared=shared,
    )  # fmt: skip
    return d.to_numpy(), expected(a, b, sfa, sfb)


@pytest.mark.parametrize("n", [8, 16, 24, 40, 64, 96, 128, 192, 256])
def test_distinct_scales_reach_every_product(n):
    result, want = run(n, 256)
    np.testing.assert_array_equal(result[0], want)


@pytest.mark.parametrize("schedule", ["eager", "random", "lazy", "mixed"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_schedule_gives_the_same_bits(schedule, seed):
    result, want = run(24, 768, tiles=3, schedule=schedule, seed=seed)
    for tile in result:
        np.testing.assert_array_equal(tile, want)


REPORTED = {
    "no accumulator wait": "reads the accumulator.*that tcgen05.mma.*there was no wait on the "
    "mbarrier|no tcgen05.commit of its thread follows|never written",
    "dealloc by one lane": r"tcgen05.dealloc.*whole-warp.*executed by 1 of 32|only 1 of 32 lanes",
    "no fence before": "synchronised after its tcgen05.wait without a tcgen05.fence::before",
    "no fence after": "was not followed by a tcgen05.fence::after_thread_sync",
    "no epilogue fence": "commit was not followed by a tcgen05.fence::after_thread_sync",
    "no full wait": "in flight|uninitialised|data race",
    "no empty wait": "in flight|data race|more bytes|arrivals",
    "wrong bytes": "more bytes",
    "no init fence": "mbarrier.init is not fenced",
    "no dealloc": "Tensor Memory not freed",
    "no commit": "no tcgen05.commit of its thread follows it|no wait on the mbarrier",
    "wrong lane": "may access lanes",
    "no accumulator empty wait": "reads the accumulator.*that tcgen05.mma|tcgen05.wait::ld|nothing "
    "orders it|fence::",
}


@pytest.mark.parametrize("fault", REPORTED)
@pytest.mark.parametrize("seed", range(4))
def test_each_broken_rule_is_reported_as_itself(fault, seed):
    with pytest.raises(EmulatorFault, match=f"(?s){REPORTED[fault]}") as caught:
        run(16, 768, tiles=3, fault=fault, seed=seed)
    if fault != "no dealloc":  # found at exit, where there is no line
        assert "emu_tcgen05.cu:" in str(caught.value)


def test_fewer_columns_than_used_are_reported_as_that():
    with pytest.raises(
        EmulatorFault, match=r"columns 64-67, of which 64-67 are not allocated.*64 columns"
    ):
        run(64, 256, columns=64, seed=1)


def test_columns_that_hardware_forgives_can_be_allowed():
    result, want = run(64, 256, columns=64, allow={"unallocated-tmem"})
    np.testing.assert_array_equal(result[0], want)


@pytest.mark.parametrize("fault", ["no fence before", "no fence after", "no epilogue fence"])
def test_fences_that_hardware_forgives_can_be_allowed(fault):
    result, want = run(16, 768, tiles=2, fault=fault, allow={"unordered-tcgen05"})
    np.testing.assert_array_equal(result[1], want)


@pytest.mark.parametrize("seed", range(3))
def test_missing_wait_ld_is_found_at_the_store(seed):
    with pytest.raises(EmulatorFault, match=r"stored before the tcgen05.wait::ld"):
        run(16, 256, fault="no wait ld", seed=seed)


def test_seeds_choose_the_base_column():
    faults = set()
    for seed in range(8):
        with pytest.raises(EmulatorFault) as caught:
            run(64, 256, columns=64, seed=seed)
        faults.add(str(caught.value).split(";")[1].split("\n")[0])
    assert len(faults) == 2


# -- a pair of CTAs -------------------------------------------------------------------------------

PAIR = np.dtype(
    [("a", "V128"), ("b", "V128"), ("sfa", "<u8"), ("sfb", "<u8"), ("d", "<u8"), ("m", "<i4"),
     ("n", "<i4"), ("k", "<i4"), ("fault", "<i4"), ("pad", "V24")],
)  # fmt: skip


def run_pair(m, n, k=512, fault=0, **options):
    rng = np.random.default_rng(12)
    a = rng.integers(0, 256, (m, k // 2), dtype=np.uint8)
    b = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    sfa = (rng.permutation(m * (k // 16)).reshape(m, -1) % 0x7F).astype(np.uint8)
    sfb = (rng.permutation(n * (k // 16)).reshape(n, -1) % 0x7F).astype(np.uint8)
    device = Emulated(**options)
    rows, half = m // 2, n // 2
    columns = n if m == 256 else half
    params = np.zeros((), PAIR)
    for name, codes, extent in (("a", a, rows), ("b", b, half)):
        tensor_map = TensorMap(
            device.upload(codes).address, "16u4_align8b", (k, len(codes)), (k // 2,),
            (256, extent), swizzle="128B",
        )  # fmt: skip
        params[name] = np.void(device.encode_tensor_map(tensor_map))
    split = np.concatenate([tile_order(sfa[:rows]), tile_order(sfa[rows:])])
    params["sfa"] = device.upload(split).address
    params["sfb"] = device.upload(tile_order(sfb)).address
    d = device.alloc((2, 128, columns), np.float32)
    params["d"], params["m"], params["n"] = d.address, m, n
    params["k"], params["fault"] = k, fault
    launch(
        device, "emu_tcgen05_pair.cu", "sm_100f", "nvfp4_pair", params.tobytes(), grid=2, cluster=2,
        block=192, shared=2 * (2 * 128 * 128 + 4 * 2048) + 1024,
    )  # fmt: skip
    cells = d.to_numpy()
    if m == 256:
        result = cells.reshape(256, n)
    else:  # layout B: rows 64 r .. 64 r + 63 in CTA r, the right half of the columns below
        result = np.concatenate([np.hstack([x[:64], x[64:]]) for x in cells])
    return result, expected(a, b, sfa, sfb)


@pytest.mark.parametrize(("m", "n"), [(256, 16), (256, 64), (256, 208), (256, 256), (128, 128)])
def test_pair_of_ctas(m, n):
    result, want = run_pair(m, n, seed=n)
    np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize(
    ("fault", "words"),
    [(1, "data race|in flight|uninitialised"), (2, "deadlock"),
     (3, "no mbarrier was initialised|data race|uninitialised|in flight"),
     (4, "deadlock|more bytes"), (5, "peer CTA's tcgen05.alloc|uninitialised")],
)  # fmt: skip
def test_broken_pairs(fault, words):
    caught = 0
    for seed in range(4):
        try:
            run_pair(256, 16, 768, fault, seed=seed)
        except EmulatorFault as error:
            assert any(word in str(error) for word in words.split("|")), error
            caught += 1
    assert caught
