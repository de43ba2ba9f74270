"""Notebooks are committed as they ran, from top to bottom. CI runs them again."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
PLACE = re.compile(r"/(?:home|root|tmp|work|usr|opt|mnt|Users)/")  # a folder of some machine


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request):
    return json.loads(request.param.read_text())


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_every_cell_ran_in_order(notebook):
    counts = [cell["execution_count"] for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_cell_failed_or_warned(notebook):
    outputs = [output for cell in code(notebook) for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert all(o["name"] == "stdout" for o in outputs if o["output_type"] == "stream")


def test_nothing_tells_where_it_ran(notebook):
    for cell in notebook["cells"]:
        texts = ["".join(cell["source"])]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            texts += ["".join(data[kind]) for kind in data if kind.startswith("text/")]
            texts.append("".join(output.get("text", "")))
        for text in texts:
            assert not PLACE.search(text), text


def test_there_is_a_picture(notebook):
    assert any("image/png" in o.get("data", {}) for c in code(notebook) for o in c["outputs"])
