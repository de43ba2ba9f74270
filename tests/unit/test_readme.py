"""README's example does what README says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_the_output_shown():
    blocks = re.findall(r"```(\w*)\n(.*?)```", README.read_text(), re.DOTALL)
    i = next(i for i, (language, _) in enumerate(blocks) if language == "python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks[i][1], {})
    assert printed.getvalue() == blocks[i + 1][1]
