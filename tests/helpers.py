"""What several test modules share: exactly representable operands and the expected results."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import fp4rt
from fp4rt import reference

FULL = False
"""Whether pytest was called with --full; set before test modules are imported."""


def exact_operand(rng, shape):
    """Random NVFP4 operand whose GEMM results are exact in fp32, and in fp16 at test sizes.

    Every one of the 16 codes occurs; a row's scales are powers of two between 1/2 and 2, so a sum
    of K products is a multiple of 1/16 and below 144·K.
    """
    *rows, k = shape
    values = rng.integers(0, 256, (*rows, k // 2), dtype=np.uint8)
    scales = rng.choice(np.array([0x30, 0x38, 0x40], np.uint8), (*rows, k // 16))
    return fp4rt.Nvfp4Array.from_parts(values, scales, 1.0)


def oracle(a, b, group_sizes, alpha=1.0, out_dtype=np.float16):
    """The float64 result for concatenated rows, rounded once to `out_dtype`."""
    return reference.round_to(reference.grouped_gemm(a, b, group_sizes, alpha), out_dtype)


def side_by_side(work, cases):
    """Call ``work(*case)`` for every case at once, each in a thread of its own; raise its error."""
    start = threading.Barrier(len(cases))

    def run(case):
        start.wait()
        work(*case)

    with ThreadPoolExecutor(len(cases)) as pool:
        for _ in pool.map(run, cases):
            pass
