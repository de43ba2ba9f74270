"""Fixtures of the tests that need hardware."""

import pytest
import runtime_kernels as rk

import fp4rt


@pytest.fixture(scope="module")
def gpu():
    """The first GPU, open."""
    with fp4rt.device("cuda:0") as device:
        yield device


@pytest.fixture(scope="module")
def kernels(gpu):
    """The module of tests/kernels/runtime.cu."""
    return rk.load_kernels(gpu)
