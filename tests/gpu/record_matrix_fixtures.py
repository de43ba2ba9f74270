"""Record what an H200 computes for the matrix, bulk-copy and mbarrier kernels.

Run on a machine with a Hopper GPU and nvcc: ``python tests/gpu/record_matrix_fixtures.py [FILE]``.
It writes tests/emulator/fixtures/matrix.json (or FILE), which the emulator's tests compare with.
"""

import json
import sys
from pathlib import Path

EMULATOR_TESTS = Path(__file__).resolve().parent.parent / "emulator"
sys.path[:0] = [str(EMULATOR_TESTS), str(EMULATOR_TESTS.parent.parent)]

from matrix_cases import CASES, digest  # noqa: E402

import fp4rt  # noqa: E402

if __name__ == "__main__":
    with fp4rt.device("cuda:0") as gpu:
        recorded = {name: digest(case(gpu)) for name, case in CASES.items()}
    default = EMULATOR_TESTS / "fixtures" / "matrix.json"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    target.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{len(recorded)} cases recorded in {target}")
