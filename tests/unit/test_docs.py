"""What a user calls has an example, which the doctests run."""

import doctest
import inspect

import pytest

import fp4rt

FUNCTIONS = [name for name in fp4rt.__all__ if inspect.isfunction(getattr(fp4rt, name))]


@pytest.mark.parametrize("name", [*FUNCTIONS, "GroupedGemmPlan", "Nvfp4Array"])
def test_what_users_call_has_an_example(name):
    found = doctest.DocTestFinder(recurse=False).find(getattr(fp4rt, name), name)
    assert any(test.examples for test in found)
