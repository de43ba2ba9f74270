"""nvcuda::wmma in each type and layout; integers, so that the order of sums cannot matter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulated import Emulated, launch

from fp4rt.device import EmulatorFault

pytestmark = pytest.mark.nvcc

PARAMS = np.dtype(
    [("a", "<u8"), ("b", "<u8"), ("c", "<u8"), ("d", "<u8"), ("lda", "<i4"), ("ldb", "<i4"),
     ("ldc", "<i4"), ("pad", "<i4")]
)  # fmt: skip
# entry: m, n, k, type of A and B, accumulator, A column-major, B column-major, C column-major
CASES = {
    "half_row_col": (16, 16, 16, np.float16, np.float32, False, True, False),
    "half_col_row": (16, 16, 16, np.float16, np.float32, True, False, True),
    "half_shared": (16, 16, 16, np.float16, np.float32, False, False, False),
    "half_half": (32, 8, 16, np.float16, np.float16, False, True, False),
    "bfloat": (8, 32, 16, ml_dtypes.bfloat16, np.float32, False, True, False),
    "tf32": (16, 16, 8, np.float32, np.float32, False, True, False),
    "integers": (16, 16, 16, np.int8, np.int32, False, True, False),
}


def padded(matrix, column_major):
    """Bytes in memory with a pitch wider than the matrix; return (array, pitch)."""
    lines = matrix.T if column_major else matrix
    out = np.zeros((lines.shape[0], lines.shape[1] + 16), matrix.dtype)
    out[:, : lines.shape[1]] = lines
    return out, out.shape[1]


def run(device, entry, skew=0):
    """Run an entry; return (D, expected)."""
    m, n, k, dtype, acc, a_col, b_col, c_col = CASES[entry]
    rng = np.random.default_rng(22)
    a, b = (rng.integers(-4, 5, s).astype(dtype) for s in ((m, k), (k, n)))
    c = rng.integers(-9, 9, (m, n)).astype(acc)
    params = np.zeros((), PARAMS)
    held = []
    for name, matrix, column_major in (("a", a, a_col), ("b", b, b_col), ("c", c, c_col)):
        data, pitch = padded(matrix, column_major)
        held.append(device.upload(data))
        params[name], params["ld" + name] = held[-1].address, pitch + skew
    d = device.upload(padded(np.zeros_like(c), c_col)[0])
    params["d"] = d.address
    launch(device, "emu_wmma.cu", "sm_90a", entry, params.tobytes(), block=32)
    result = d.to_numpy()
    result = result[:, :m].T if c_col else result[:, :n]
    return result, (a.astype(float) @ b.astype(float) + 2 * c).astype(acc)


@pytest.mark.parametrize("entry", CASES)
def test_wmma(entry):
    result, want = run(Emulated(), entry)
    np.testing.assert_array_equal(result, want)


def test_rows_must_be_aligned():
    with pytest.raises(EmulatorFault, match="multiples of 16 bytes apart"):
        run(Emulated(), "half_row_col", skew=1)
