"""Options, markers and fixtures of the whole suite."""

import os
import zlib

import numpy as np
import pytest

import fp4rt


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


def default_devices():
    return ["cpu"]


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        names = [*default_devices(), *metafunc.config.getoption("--device")]
        metafunc.parametrize("device", dict.fromkeys(names), indirect=True, scope="module")


@pytest.fixture(scope="module")
def device(request):
    """One open device a module."""
    with fp4rt.device(request.param) as opened:
        yield opened


@pytest.fixture
def rng(request):
    """A random generator whose seed is printed when the test fails."""
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed} (rerun with --seed {seed})")
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


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
