"""Run the small CUDA C++ kernels of tests/kernels: in a bare machine, or on any device."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import build
from fp4rt.device import LaunchConfig
from fp4rt.emulator import ptx  # importing the package registers the instruction families
from fp4rt.emulator.launch import Launch
from fp4rt.emulator.machine import Machine
from fp4rt.emulator.program import Program
from fp4rt.emulator.tensor_box import encode_tensor_map

KERNELS = Path(__file__).parents[1] / "kernels"


@lru_cache(maxsize=64)
def image(source: str, arch: str) -> build.Image:
    """Compile a file in tests/kernels; skip the test where there is no nvcc."""
    try:
        build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))
    return build.compile_source(KERNELS / source, arch)


@lru_cache(maxsize=64)
def parsed(source: str, arch: str) -> ptx.Module:
    return ptx.parse(image(source, arch).ptx.read_text())


@lru_cache(maxsize=256)
def compiled(source: str, arch: str, entry: str) -> Program:
    """Return an entry of a file in tests/kernels as a program."""
    return Program(parsed(source, arch), entry, {}, arch)


class Emulated:
    """A machine with buffers, its seed and schedule chosen; the verbs are those of a device."""

    def __init__(self, seed: int = 0, schedule: str = "mixed", sm_count: int = 4, **options):
        self.machine = Machine(sm_count, seed=seed, schedule=schedule, **options)

    def alloc(self, shape, dtype=np.uint8):
        """Return a buffer that nobody has written."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        base = self.machine.memory.alloc(nbytes, f"buffer of {nbytes} bytes").base

        def to_numpy():
            data = self.machine.memory.read(None, base, nbytes)
            return data.view(dtype).reshape(shape)

        return SimpleNamespace(address=base, to_numpy=to_numpy)

    def upload(self, array):
        buffer = self.alloc(array.shape, array.dtype)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.machine.memory.write(None, buffer.address, data)
        return buffer

    def encode_tensor_map(self, tensor_map) -> bytes:
        return encode_tensor_map(tensor_map)


def launch(device, source, arch, entry, params, *, grid=1, block=128, cluster=1, shared=0) -> None:
    """Launch an entry of a file in tests/kernels and wait for it."""
    config = LaunchConfig((grid, 1, 1), (block, 1, 1), shared, (cluster, 1, 1))
    if isinstance(device, Emulated):
        program = compiled(source, arch, entry)
        device.machine.execute([Launch(device.machine, program, config, bytes(params))])
        return
    built = image(source, arch)
    path = built.ptx if device.image_kind == "ptx" else built.cubin
    kernel = device.load(path.read_bytes()).kernel(entry)
    device.stream.launch(kernel, config, bytes(params))
    device.stream.synchronize()
