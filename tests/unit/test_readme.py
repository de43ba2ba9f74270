"""README's example does what README says, and its table is what was measured."""

import contextlib
import io
import re
from pathlib import Path

from fp4rt import bench

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_example_prints_the_output_shown():
    blocks = re.findall(r"```(\w*)\n(.*?)```", README.read_text(), re.DOTALL)
    i = next(i for i, (language, _) in enumerate(blocks) if language == "python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks[i][1], {})
    assert printed.getvalue() == blocks[i + 1][1]


def test_the_table_is_that_of_the_results_in_the_notebook():
    report = bench.read(ROOT / "notebooks" / "04_benchmarks.json")
    assert bench.markdown(report) in README.read_text()
    assert report.date.split()[0] in README.read_text()
