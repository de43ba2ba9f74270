"""Matrix, bulk-copy and mbarrier kernels give bit for bit what an H200 gave.

tests/gpu/record_matrix_fixtures.py made the recording.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from emulated import Emulated
from matrix_cases import CASES, digest

pytestmark = pytest.mark.nvcc

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "matrix.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_hardware(name):
    assert digest(CASES[name](Emulated(seed=1))) == RECORDED[name]
