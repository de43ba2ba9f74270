"""What a user calls has an example, which the doctests run; pages do what they say."""

import contextlib
import doctest
import inspect
import io
import re
import textwrap
from pathlib import Path

import pytest

import fp4rt

FUNCTIONS = [name for name in fp4rt.__all__ if inspect.isfunction(getattr(fp4rt, name))]


@pytest.mark.parametrize("name", [*FUNCTIONS, "GroupedGemmPlan", "Nvfp4Array"])
def test_what_users_call_has_an_example(name):
    found = doctest.DocTestFinder(recurse=False).find(getattr(fp4rt, name), name)
    assert any(test.examples for test in found)


def test_the_variant_of_contributing_is_predicted_to_win():
    page = (Path(fp4rt.__file__).parents[1] / "CONTRIBUTING.md").read_text()
    code = re.search(r"```python\n( *from fp4rt import model.*?)```", page, re.DOTALL)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(textwrap.dedent(code), {})
    *others, new = (float(line.split()[1]) for line in printed.getvalue().splitlines())
    assert new < min(others)
    assert "predicted to be the fastest" in page
