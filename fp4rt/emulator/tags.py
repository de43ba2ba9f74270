"""Register results of asynchronous instructions: wgmma accumulators and tcgen05.ld.

Between issue and wait, a destination register holds a *tag*: a NaN that names the result it waits
for. Arithmetic on a tag spoils its own result, as reading a register too early does on hardware;
a tag that the compiler moved to another register still finds its value; and a wgmma recognises
its own earlier result as its input. At the wait, tags are replaced wherever they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .memory import Violation

if TYPE_CHECKING:
    from .launch import AsyncOp
    from .warp import Warp

_BASE = 0xFFE00000
_COUNT = 0x1FFFFF


class Result:
    """Registers that an asynchronous operation will give: uint32 (32 lanes, count) once done."""

    def __init__(self) -> None:
        self.words: NDArray[np.uint32] | None = None
        self.op: AsyncOp | None = None
        self.waited = False

    @property
    def done(self) -> bool:
        """Whether the values are known."""
        return self.words is not None


def register_block(w: Warp) -> NDArray[np.uint32]:
    """Return all 32-bit registers of a warp, shape (registers, 32)."""
    block: NDArray[np.uint32] = w.files[4][0].base
    return block


class Tags:
    """The tags of one warp."""

    def __init__(self) -> None:
        self.sources: dict[int, tuple[Result, int]] = {}
        self.last = 0

    @staticmethod
    def of(w: Warp) -> Tags:
        """Return the tags of `w`."""
        found: Tags | None = w.state.get("tags")
        if found is None:
            found = w.state["tags"] = Tags()
        return found

    def new(self, result: Result, index: int) -> np.uint32:
        """Return the tag of one register of a result."""
        self.last = self.last % _COUNT + 1
        tag = _BASE | self.last
        self.sources[tag] = (result, index)
        return np.uint32(tag)

    def find(self, word: int) -> tuple[Result, int] | None:
        """Return what a register's word stands for, if it is a tag."""
        return self.sources.get(word)

    def check_stored(self, words: NDArray[np.uint32]) -> None:
        """Raise `Violation` if a word that goes to memory is a tag: its value is not known yet."""
        for word in set(words[words >= np.uint32(_BASE)].tolist()):
            source = self.sources.get(word)
            if source is not None and not source[0].waited:
                op = source[0].op
                wait = "wgmma.wait_group" if op is not None else "tcgen05.wait::ld"
                raise Violation(
                    f"a register is stored before the {wait} for the operation that writes it"
                    + (f": {op.describe()}" if op is not None else "")
                )

    def deliver(self, w: Warp) -> None:
        """Replace the tags of results that were waited for by their values."""
        ready = {tag: source for tag, source in self.sources.items() if source[0].waited}
        if not ready:
            return
        block = register_block(w)
        column = block[:, 0]
        for row in np.flatnonzero(column >= np.uint32(_BASE)):
            source = ready.get(int(column[row]))
            if source is not None and source[0].words is not None:
                block[row] = source[0].words[:, source[1]]
        for tag in ready:
            del self.sources[tag]
