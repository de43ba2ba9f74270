"""Record what a GPU computes for the emulator's comparison cases.

Run on a machine with a Hopper GPU and nvcc: ``python tests/gpu/record_fixtures.py [programs]``. It
writes tests/emulator/fixtures/*.npz, which the emulator's tests replay without a GPU.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import fp4rt

EMULATOR_TESTS = Path(__file__).parent.parent / "emulator"
sys.path.insert(0, str(EMULATOR_TESTS))

import instruction_cases  # noqa: E402
import program_cases  # noqa: E402
import warp_cases  # noqa: E402
from comparison import launch_case  # noqa: E402


def assemble(text, folder):
    """Return the cubin of a PTX module."""
    source, image = folder / "module.ptx", folder / "module.cubin"
    source.write_text(text)
    subprocess.run(["ptxas", "-arch=sm_90a", "-o", image, source], check=True)
    return image.read_bytes()


def record_instructions(device):
    """Run every instruction case; write checksums, and whole results of approximations."""
    with tempfile.TemporaryDirectory() as name:
        module = device.load(assemble(instruction_cases.ptx(instruction_cases.CASES), Path(name)))
    stored = {}
    for case in instruction_cases.CASES:
        result = launch_case(device, module, case)
        exact = not instruction_cases.approximate(case)
        stored[case.name] = instruction_cases.chunks(result) if exact else result
    np.savez_compressed(EMULATOR_TESTS / "fixtures" / "instructions.npz", **stored)
    print(f"{len(stored)} instruction cases recorded")


def record_warps(device):
    """Run every case of a whole warp; write its whole output."""
    with tempfile.TemporaryDirectory() as name:
        module = device.load(assemble(warp_cases.ptx(), Path(name)))
    stored = {case.name: warp_cases.run(device, module, case) for case in warp_cases.CASES}
    np.savez_compressed(EMULATOR_TESTS / "fixtures" / "warps.npz", **stored)
    print(f"{len(stored)} warp cases recorded")


def record_programs(device):
    """Compile and run every program; write its whole output."""
    modules = {}
    with tempfile.TemporaryDirectory() as name:
        for source in {program.source for program in program_cases.PROGRAMS}:
            image = Path(name) / "programs.cubin"
            command = ["nvcc", "-cubin", "-std=c++17", "-arch=sm_90a", "-w", "-o", image]
            subprocess.run([*command, program_cases.KERNELS / source], check=True)
            modules[source] = device.load(image.read_bytes())
    stored = {}
    for program in program_cases.PROGRAMS:
        stored[program.name] = program_cases.run(device, modules[program.source], program)
        print("recorded", program.name, flush=True)
    np.savez_compressed(EMULATOR_TESTS / "fixtures" / "programs.npz", **stored)


if __name__ == "__main__":
    with fp4rt.device("cuda:0") as gpu:
        record_programs(gpu)
        if "programs" not in sys.argv:
            record_instructions(gpu)
            record_warps(gpu)
