"""Single instructions give what an H200 gave, bit for bit; approximations within PTX's bounds.

Conversions from 16-bit types are compared for all 65536 inputs. tests/gpu/record_fixtures.py made
the recording.
"""

from pathlib import Path

import instruction_cases
import numpy as np
import pytest
import wide
from comparison import launch_case
from instruction_cases import CASES, approximate, chunks

from fp4rt.emulator import EmulatorDevice, ptx
from fp4rt.emulator.program import Program

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def recorded():
    with np.load(FIXTURES / "instructions.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def module():
    return ptx.parse(instruction_cases.ptx(CASES))


def assert_same(case, result, expected):
    if not approximate(case):
        differ = np.flatnonzero(chunks(result) != expected)
        assert not len(differ), f"results differ from the GPU's in blocks {differ[:10]}"
        return
    got, want = result.view(np.float32), expected.view(np.float32)
    if case.absolute:
        assert np.max(np.abs(got - want)) <= case.absolute
    else:
        distance = np.abs(got.view(np.int32).astype(np.int64) - want.view(np.int32))
        assert distance.max() <= case.ulps


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_instruction_equals_hardware(module, recorded, case):
    result = wide.evaluate(Program(module, case.entry, {}, "sm_90a"), case)
    assert_same(case, result, recorded[case.name])


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.count <= 1024][::12], ids=lambda case: case.name
)
def test_kernel_equals_hardware(recorded, case):
    with EmulatorDevice("sm_90a") as device:
        loaded = device.load(instruction_cases.ptx([case]).encode())
        assert_same(case, launch_case(device, loaded, case), recorded[case.name])
