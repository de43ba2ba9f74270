"""tcgen05.alloc, dealloc and relinquish_alloc_permit.

An alloc waits until its columns are free. With ``cta_group::2`` both CTAs of a pair make it, and
get the same columns. Which free columns it gets is the scheduler's choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import Violation
from .program import Decoder, Handler, register
from .ptx import Instruction
from .tcgen05 import cta_group, group_ctas, order, tensor_memory, uniform

if TYPE_CHECKING:
    from .machine import Cta
    from .warp import Mask, Warp


@register("tcgen05.alloc")
def _alloc(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    group = cta_group(ins, d)
    target = d.shared_address(ins.operands[0])
    amount = d.read(ins.operands[1], "u32")

    def run(w: Warp, m: Mask) -> Any:
        columns = uniform(amount(w), "the column count of tcgen05.alloc")
        address = uniform(target(w), "the destination of tcgen05.alloc")
        cta, offset = w.cluster.resolve(w, address, 4, 4, "cta")
        ctas = group_ctas(w, group)
        tensor_memory(w.cta).check_alloc(columns)
        request = _Request(w, columns, ctas)
        if group == 2:
            request.join(ctas)

        def ready() -> bool:
            return request.base is not None or request.try_take(ctas)

        def then() -> None:
            word = np.array([request.base], np.uint32).view(np.uint8)
            cta.shared.write_bytes(w, slice(offset, offset + 4), word)

        return w.block(lambda: f"{columns} free Tensor Memory columns{request.why()}", ready, then)

    return run


class _Request:
    """An alloc in progress; with cta_group::2 one that both CTAs of a pair must make."""

    def __init__(self, w: Warp, columns: int, ctas: list[Cta]) -> None:
        self.columns = columns
        self.base: int | None = None
        self.complete = len(ctas) == 1
        self.partner: _Request | None = None
        self.machine = w.machine
        self.rank = w.cta.rank

    def join(self, ctas: list[Cta]) -> None:
        """Meet the peer CTA's request."""
        state = ctas[0].cluster.state
        waiting = state.setdefault(("alloc", ctas[0].rank), {})
        other = waiting.pop(self.rank ^ 1, None)
        if other is None:
            if self.rank in waiting:
                raise Violation("two tcgen05.alloc of one CTA while its peer CTA made none")
            waiting[self.rank] = self
            return
        if other.columns != self.columns:
            raise Violation(
                f"tcgen05.alloc of {self.columns} columns, and of {other.columns} in the peer CTA"
            )
        self.partner, other.partner = other, self
        self.complete = other.complete = True
        self.machine.poke()

    def try_take(self, ctas: list[Cta]) -> bool:
        """Allocate if there is room; the place is any free one, not always the first."""
        if not self.complete:
            return False
        memories = [tensor_memory(cta) for cta in ctas]
        places = set(memories[0].places(self.columns))
        for memory in memories[1:]:
            places &= set(memory.places(self.columns))
        if not places:
            return False
        self.base = max(places) if self.machine.chance(0.5) else min(places)
        for memory in memories:
            memory.take(self.base, self.columns)
        if self.partner is not None:
            self.partner.base = self.base
            self.machine.poke()
        return True

    def why(self) -> str:
        """Say what is missing."""
        return "" if self.complete else " and the peer CTA's tcgen05.alloc"


@register("tcgen05.dealloc")
def _dealloc(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    group = cta_group(ins, d)
    where = d.read(ins.operands[0], "u32")
    amount = d.read(ins.operands[1], "u32")

    def run(w: Warp, m: Mask) -> None:
        address = uniform(where(w), "the address of tcgen05.dealloc")
        columns = uniform(amount(w), "the column count of tcgen05.dealloc")
        group_ctas(w, group, alive=False)
        memory = tensor_memory(w.cta)
        memory.check_size(columns)
        order(w.cta).release(w, address & 0xFFFF, columns)
        memory.free(address, columns)
        w.machine.poke()

    return run


@register("tcgen05.relinquish_alloc_permit")
def _relinquish(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    group = cta_group(ins, d)

    def run(w: Warp, m: Mask) -> None:
        group_ctas(w, group, alive=False)
        tensor_memory(w.cta).permit = False

    return run
