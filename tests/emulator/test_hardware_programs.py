"""Whole programs give what an H200 gave, bit for bit, under several schedules.

tests/gpu/record_fixtures.py made the recording from the same sources and inputs.
"""

from pathlib import Path

import numpy as np
import program_cases
import pytest

import build
from fp4rt.device import EmulatorFault
from fp4rt.emulator import EmulatorDevice

pytestmark = pytest.mark.nvcc

FIXTURE = Path(__file__).parent / "fixtures" / "programs.npz"
SCHEDULES = {0: "mixed", 1: "random", 2: "eager", 3: "lazy"}


@pytest.fixture(scope="module")
def recorded():
    with np.load(FIXTURE) as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def images():
    """The PTX of each source, compiled when it is first asked for."""
    found = {}

    def image(source):
        if source not in found:
            found[source] = build.compile_source(
                program_cases.KERNELS / source, "sm_90a"
            ).ptx.read_bytes()
        return found[source]

    return image


@pytest.mark.parametrize("program", program_cases.PROGRAMS, ids=lambda program: program.name)
def test_program_equals_hardware(images, recorded, program):
    for seed, schedule in SCHEDULES.items():
        options = {"seed": seed, "schedule": schedule, "allow": program.allow}
        with EmulatorDevice("sm_90a", **options) as device:
            module = device.load(images(program.source))
            result = program_cases.run(device, module, program)
        differ = np.flatnonzero(result != recorded[program.name])
        assert not len(differ), f"seed {seed}: words {differ[:8]} differ from the GPU's"


@pytest.mark.parametrize("name", ["cub_merge", "cuda_bulk"])
def test_rules_that_a_program_breaks(images, name):
    program = next(p for p in program_cases.PROGRAMS if p.name == name)
    with EmulatorDevice("sm_90a") as device:
        module = device.load(images(program.source))
        with pytest.raises(EmulatorFault, match=r"uninitialised shared|not fenced"):
            program_cases.run(device, module, program)
