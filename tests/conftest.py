"""Options, markers and fixtures of the whole suite."""

import gc
import os
import zlib

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests run side by side; before numpy

import helpers
import numpy as np
import pytest

import fp4rt
from fp4rt.library import Library


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help="run the tests of tests/device on this device too (repeatable), e.g. cuda:0",
    )
    parser.addoption(
        "--seed", type=int, default=None, help="seed of the random cases (default: a new one)"
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="kernels in the emulator: every variant, at full size, under 8 schedules each; "
        "the default is a sample that changes with the seed",
    )


def pytest_configure(config):
    helpers.FULL = config.getoption("--full")
    # Decoded kernels are millions of objects that stay; looking through them again and again for
    # garbage took a third of the time of decoding.
    gc.set_threshold(100_000, 20, 100)


DEFAULT_DEVICES = ("cpu", "emulator:sm_90a", "emulator:sm_100a")


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        names = dict.fromkeys([*DEFAULT_DEVICES, *metafunc.config.getoption("--device")])
        metafunc.parametrize("device", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def device(request):
    """One open device a module; skips where its kernels are not built."""
    kind, _, arch = request.param.partition(":")
    if kind == "emulator":
        try:
            Library().images(arch)
        except fp4rt.NoKernelError as error:
            pytest.skip(str(error))
    with fp4rt.device(request.param) as opened:
        yield opened


def generator(request):
    """A random generator for the test, or module, of `request`; prints its seed."""
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed} (rerun with --seed {seed})")
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def rng(request):
    """A random generator whose seed is printed when the test fails."""
    return generator(request)


@pytest.fixture(scope="module")
def schedules(request):
    """Options of an `EmulatorDevice` that tries some of eight schedules, or all with --full.

    A fault names the schedule's own seed.
    """
    if helpers.FULL:
        return {"seed": 0, "seeds": 8}
    return {"seed": int(generator(request).integers(6)), "seeds": 3}


def gpu_missing():
    """Why there is no GPU to test on, or None."""
    found = [info for info in fp4rt.devices() if info.name.startswith("cuda")]
    if any(info.available for info in found):
        return None
    return "; ".join(f"{info.name}: {info.detail}" for info in found) or "no CUDA device"


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_missing() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
