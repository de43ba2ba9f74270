"""Instructions of a whole warp give what an H200 gave, bit for bit.

tests/gpu/record_fixtures.py made the recording.
"""

from pathlib import Path

import numpy as np
import pytest
import warp_cases

from fp4rt.emulator import EmulatorDevice


@pytest.fixture(scope="module")
def recorded():
    with np.load(Path(__file__).parent / "fixtures" / "warps.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("case", warp_cases.CASES, ids=lambda case: case.name)
def test_warp_equals_hardware(recorded, case):
    with EmulatorDevice("sm_90a") as device:
        module = device.load(warp_cases.ptx().encode())
        assert np.array_equal(warp_cases.run(device, module, case), recorded[case.name])
