"""The benchmark on a GPU, in a process of its own: everything is timed, and nothing hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fp4rt import verify

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def test_a_small_benchmark(gpu, tmp_path):
    shapes, out = tmp_path / "shapes.json", tmp_path / "out.json"
    shapes.write_text(json.dumps({"tiny": {"sizes": [30, 0, 100], "n": 512, "k": 1024}}))
    command = [sys.executable, "-m", "fp4rt", "bench", "--device", gpu.name]
    command += ["--shapes", str(shapes), "--json", str(out), "--seconds", "0.02", "--windows", "2"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    (entry,) = results["sets"].values()
    kinds = {r["name"]: r["kind"] for r in entry["results"]}
    assert {name for name, kind in kinds.items() if kind == "variant"} == set(verify.variants(gpu))
    assert all(t > 0 for r in entry["results"] for t in r["windows"])
    assert entry["ceilings"] and results["host"]
    for library, peer in (("CuPy", "cuBLAS fp16"), ("PyTorch", "torch grouped_mm bf16")):
        if library in results["software"]:
            assert peer in kinds, entry["notes"]
