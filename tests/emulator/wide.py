"""Executing one instruction case on all its inputs at once: a warp of as many lanes as inputs."""

from types import SimpleNamespace

import numpy as np
from instruction_cases import BITS, inputs

_FILE = {2: 1, 4: 4, 8: 7}
_CLASS = {2: "b16", 4: "b32", 8: "b64"}
_DTYPE = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def evaluate(program, case, values=None):
    """Return the results of a case, from the decoded instructions between its loads and store.

    `values` replaces the case's own inputs.
    """
    count = case.count
    rows = program.rows.rows
    wide = {cls: np.repeat(block[:, :1], count, axis=1) for cls, block in program.templates.items()}
    b16, b32, b64 = wide["b16"], wide["b32"], wide["b64"]
    files = (
        list(wide["pred"]),
        *(list(b16.view(t)) for t in (np.uint16, np.int16, np.float16)),
        *(list(b32.view(t)) for t in (np.uint32, np.int32, np.float32)),
        *(list(b64.view(t)) for t in (np.uint64, np.int64, np.float64)),
        [],
    )
    warp = SimpleNamespace(
        files=files,
        written={},
        machine=SimpleNamespace(allow=frozenset()),
        active=lambda m: np.ones(count, bool) if m is None else m,
        lanes=lambda m: np.arange(count) if m is None else np.flatnonzero(m),
    )
    for letter, kind, array in zip("abc", case.inputs, values or inputs(case), strict=False):
        size = BITS[kind]
        files[_FILE[size]][rows[_CLASS[size]][case.entry, f"%{letter}"]][:] = array
    code = program.instructions
    first = max(i for i, ins in enumerate(code) if ins.opcode.startswith("ld.global")) + 1
    last = max(i for i, ins in enumerate(code) if ins.opcode.startswith("ld.param"))
    with np.errstate(all="ignore"):
        for step in program.steps[first:last]:
            step(warp, None)
    size = BITS[case.out]
    return files[_FILE[size]][rows[_CLASS[size]][case.entry, "%d"]].astype(_DTYPE[size])
