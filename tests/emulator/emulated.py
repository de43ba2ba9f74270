"""Run a small CUDA C++ test kernel in the emulator's machine, with the seed and schedule chosen."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from fp4rt.device import LaunchConfig
from fp4rt.emulator import ptx  # importing the package registers the instruction families
from fp4rt.emulator.machine import Launch, Machine
from fp4rt.emulator.program import Program

KERNELS = Path(__file__).parents[1] / "kernels"


@lru_cache(maxsize=64)
def compiled(source: str, arch: str, entry: str) -> Program:
    """Return an entry of a file in tests/kernels as a program."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.ptx"
        command = [nvcc, f"-arch={arch}", "-ptx", "-lineinfo", "-o", str(out)]
        subprocess.run([*command, str(KERNELS / source)], check=True, capture_output=True)
        return Program(ptx.parse(out.read_text()), entry, {}, arch)


class Emulated:
    """A machine with buffers."""

    def __init__(self, seed: int = 0, schedule: str = "mixed", sm_count: int = 4, **options):
        self.machine = Machine(sm_count, seed=seed, schedule=schedule, **options)
        self.buffers = {}

    def buffer(self, array: np.ndarray | int) -> int:
        """Return the address of a new buffer with the array's bytes, or with nothing in it."""
        size = array if isinstance(array, int) else array.nbytes
        allocation = self.machine.memory.alloc(size, f"buffer {len(self.buffers)}")
        self.buffers[allocation.base] = allocation
        if not isinstance(array, int):
            self.machine.memory.write(None, allocation.base, array.reshape(-1).view(np.uint8))
        return allocation.base

    def read(self, address: int, shape, dtype) -> np.ndarray:
        """Return a buffer's content, which must have been written completely."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.machine.memory.read(None, address, nbytes).view(dtype).reshape(shape)

    def run(self, program, params, *, grid=1, block=128, cluster=1, shared=0) -> None:
        """Launch one kernel with a parameter struct's bytes."""
        config = LaunchConfig((grid, 1, 1), (block, 1, 1), shared, (cluster, 1, 1))
        self.machine.execute([Launch(self.machine, program, config, bytes(params))])
