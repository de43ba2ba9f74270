"""Matrix, bulk-copy and mbarrier kernels whose results on an H200 are recorded.

Each case is a function of a device that returns an array; the kernels and inputs are those of
test_wgmma, test_mma and test_tma.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import test_mma
import test_tma
import test_wgmma
from emulated import launch


def _random(rng, shape, dtype, spread):
    """Normal values times powers of two within 2 ** ±spread."""
    normal = rng.standard_normal(shape)
    return (normal * 2.0 ** rng.integers(-spread, spread + 1, shape)).astype(dtype)


def random_wgmma(device, entry, dtype, n, use_d, spread):
    """One wgmma on values whose sum is not exact: shows how the unit rounds."""
    rng = np.random.default_rng(1)
    kind = test_wgmma.TYPES[dtype]
    k = 32 // np.dtype(kind).itemsize
    a, b = (_random(rng, (rows, k), kind, spread) for rows in (64, n))
    d = _random(rng, (64, n), np.float32, spread)
    image = np.zeros(40 * 1024, np.uint8)
    params = np.zeros((), test_wgmma.PARAMS)
    params["a_desc"] = test_wgmma.place(a, "32B", False, image, 0)
    params["b_desc"] = test_wgmma.place(b, "32B", False, image, 8 * 1024)
    fragment = test_wgmma.fragment_d(d)
    held = [device.upload(x) for x in (image, np.zeros((128, 4), np.uint32), fragment)]
    out = device.upload(np.zeros_like(fragment))
    params["image"], params["a"], params["d_in"] = (x.address for x in held)
    params["d_out"], params["image_bytes"] = out.address, image.nbytes
    params["use_d"], params["steps"] = use_d, 1
    launch(device, "emu_wgmma.cu", "sm_90a", entry, params.tobytes(), shared=image.nbytes)
    return test_wgmma.fragment_d(d, out.to_numpy())


def random_mma(device, entry, spread):
    """One mma.sync on values whose sum is not exact."""
    dtype, _, k, result = test_mma.CASES[entry]
    rng = np.random.default_rng(2)
    a, b = (_random(rng, (rows, k), test_mma.TYPES[dtype], spread) for rows in (16, 8))
    c = _random(rng, (16, 8), test_mma.RESULTS[result], spread)
    return test_mma.run(device, entry, test_mma.as_bytes(a), test_mma.as_bytes(b), c)


def _cases() -> dict[str, Callable]:
    cases: dict[str, Callable] = {}
    for case, mode, steps, use_d in test_wgmma.RUNS:
        cases[f"wgmma {case.entry} {mode}"] = lambda dev, a=(case, mode, steps, use_d): (
            test_wgmma.run(dev, *a)[0]
        )
    for entry in test_mma.CASES:
        cases[f"mma {entry}"] = lambda dev, e=entry: test_mma.run_case(dev, e)[0]
    for entry, dtype, n in (
        ("f16_n8", "f16", 8),
        ("tf32_n64", "tf32", 64),
        ("e4m3_n64", "e4m3", 64),
    ):
        for use_d in (0, 1):
            for spread in (0, 3):
                cases[f"random wgmma {dtype} {use_d} {spread}"] = lambda dev, a=(
                    entry, dtype, n, use_d, spread
                ): random_wgmma(dev, *a)  # fmt: skip
    for entry in ("f16_k16", "f16_k8", "tf32_k8", "e4m3_k32", "f16_k16_f16"):
        for spread in (0, 3):
            cases[f"random mma {entry} {spread}"] = lambda dev, a=(entry, spread): random_mma(
                dev, *a
            )
    cases["mma f64"] = lambda dev: test_mma.run_f64(dev)[0]
    for entry, k in (("f64_m16_k4", 4), ("f64_m16_k8", 8)):
        cases[f"mma {entry}"] = lambda dev, a=(entry, k): test_mma.run_f64_m16(dev, *a)[0]
    for i, copy in enumerate(test_tma.COPIES):
        cases[f"tensor load {i}"] = lambda dev, c=copy: test_tma.run_tensor(dev, c)[1].to_numpy()
    for i, copy in enumerate(test_tma.STORES):
        cases[f"tensor store {i}"] = lambda dev, c=copy: test_tma.run_tensor(dev, c, 1)[
            2
        ].to_numpy()
    cases["tensor reduce"] = lambda dev: test_tma.run_tensor(dev, test_tma.STORES[2], 2)[
        2
    ].to_numpy()
    cases["ring"] = lambda dev: np.concatenate(
        [x.astype(np.uint64) for x in test_tma.run_ring(dev, mode=1)[1:]]
    )
    cases["multicast"] = lambda dev: test_tma.run_multicast(dev)[1]
    cases["mbarrier"] = lambda dev: test_tma.run_barriers(dev)[:13]
    cases["patched tensor map"] = lambda dev: test_tma.run_patch(dev)[0]
    return cases


CASES = _cases()


def digest(result: np.ndarray) -> str:
    """Return a hash of an array's bits."""
    return hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()[:32]
