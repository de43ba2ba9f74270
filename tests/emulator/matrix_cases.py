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


def _cases() -> dict[str, Callable]:
    cases: dict[str, Callable] = {}
    for case, mode, steps, use_d in test_wgmma.RUNS:
        cases[f"wgmma {case.entry} {mode}"] = lambda dev, a=(case, mode, steps, use_d): (
            test_wgmma.run(dev, *a)[0]
        )
    for entry in test_mma.CASES:
        cases[f"mma {entry}"] = lambda dev, e=entry: test_mma.run_case(dev, e)[0]
    cases["mma f64"] = lambda dev: test_mma.run_f64(dev)[0]
    for entry, k in (("f64_m16_k4", 4), ("f64_m16_k8", 8)):
        cases[f"mma {entry}"] = lambda dev, a=(entry, k): test_mma.run_f64_m16(dev, *a)[0]
    for i, copy in enumerate(test_tma.COPIES):
        cases[f"tensor load {i}"] = lambda dev, c=copy: test_tma.run_tensor(dev, c)[1].to_numpy()
    stores = [*((c, 1) for c in test_tma.STORES), (test_tma.STORES[2], 2)]
    for i, (copy, mode) in enumerate(stores):
        cases[f"tensor store {i}"] = lambda dev, c=copy, m=mode: test_tma.run_tensor(dev, c, m)[
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
