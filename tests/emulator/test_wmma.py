"""wmma fragments: loads, products and stores agree with numpy."""

import ml_dtypes
import numpy as np
import pytest

from fp4rt.device import LaunchConfig
from fp4rt.emulator import EmulatorDevice

from emulated import image  # isort: skip

pytestmark = pytest.mark.nvcc

CASES = {
    "half_inputs": (np.float16, np.float32),
    "half_sums": (np.float16, np.float16),
    "bfloat_inputs": (ml_dtypes.bfloat16, np.float32),
    "byte_inputs": (np.int8, np.int32),
}


@pytest.mark.parametrize("name", CASES)
def test_product(name, rng):
    source, out = CASES[name]
    a, b = (rng.integers(-4, 5, (16, 16)).astype(source) for _ in range(2))
    with EmulatorDevice("sm_90a") as device:
        kernel = device.load(image("wmma.cu", "sm_90a").ptx.read_bytes()).kernel(name)
        d = device.alloc((16, 16), out)
        pointers = [device.upload(x.view(f"u{x.itemsize}")) for x in (a, b)]
        params = np.array([*(p.address for p in pointers), d.address], np.uint64).tobytes()
        device.stream.launch(kernel, LaunchConfig((1, 1, 1), (32, 1, 1)), params)
        expected = a.astype(np.float64) @ b.astype(np.float64).T + 1
        assert np.array_equal(d.to_numpy().astype(np.float64), expected)
