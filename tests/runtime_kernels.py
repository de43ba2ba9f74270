"""The kernels of tests/kernels/runtime.cu: loading them, and their parameter structs."""

import sys
from pathlib import Path

import numpy as np
import pytest

import fp4rt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import build  # noqa: E402

KERNELS = ROOT / "tests" / "kernels"


def aligned(*fields):
    return np.dtype(list(fields), align=True)


ADD = aligned(("in", "u8"), ("out", "u8"), ("count", "u8"), ("increment", "u4"))
SPIN = aligned(("nanoseconds", "u8"), ("out", "u8"), ("count", "u8"), ("value", "u4"))
POKE = aligned(("base", "u8"), ("offset", "u8"), ("value", "u4"))
SHARED = aligned(("out", "u8"), ("words", "u4"))
CLUSTER = aligned(("out", "u8"))
BOX = np.dtype(
    {
        "names": ["map", "coords", "rank", "out", "bytes"],
        "formats": [("u1", 128), ("i4", 5), "i4", "u8", "u4"],
        "offsets": [0, 128, 148, 152, 160],
        "itemsize": 192,
    }
)


def record(dtype, *values):
    """One parameter struct, its padding zero."""
    filled = np.zeros((), dtype)
    for name, value in zip(dtype.names, values, strict=True):
        filled[name] = value
    return filled[()]


def compile_kernels(arch, name="runtime", **options):
    """The image that build.py makes of a test kernel; skips where there is no nvcc."""
    try:
        build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(f"needs nvcc: {str(error).splitlines()[0]}")
    return build.compile_source(KERNELS / f"{name}.cu", arch, **options)


def image_bytes(device, name="runtime", **options):
    """The image's bytes, of the kind that `device` loads; skips on devices without kernels."""
    if device.image_kind is None:
        pytest.skip(f"{device.name} runs no kernels")
    image = compile_kernels(device.arch, name, **options)
    return (image.cubin if device.image_kind == "cubin" else image.ptx).read_bytes()


def load_kernels(device, name="runtime", **options):
    """The module of a test kernel on `device`."""
    return device.load(image_bytes(device, name, **options))


def sum_on_gpu(count):
    """0 + 1 + … + (count - 1), by way of the first GPU; for worker processes."""
    with fp4rt.device("cuda:0") as device:
        return int(device.upload(np.arange(count)).to_numpy().sum())
