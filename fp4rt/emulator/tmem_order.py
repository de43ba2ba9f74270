"""Who may touch which Tensor Memory cells when: the tcgen05 memory model.

Operations of one thread on mma, cp and shift run in order. Everything else is ordered only by the
documented chains (PTX ISA, "Memory consistency model for tcgen05"):

- mma or cp -> ``commit`` -> wait on its mbarrier -> ``fence::after_thread_sync`` -> next access;
- ld or st -> ``wait::ld`` / ``wait::st`` -> (another thread: ``fence::before_thread_sync`` ->
  barrier or mbarrier -> ``fence::after_thread_sync``) -> next access.

Each access leaves a `Touch` on its rectangle of cells. A later access that conflicts with a touch
that no chain orders before it is reported, with the link of the chain that is missing. Overwriting
cells that an earlier mma or cp of the same thread reads or writes (mma -> cp, cp -> cp) is not in
the PTX list but relied on by production kernels; it counts as ordered here.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .clocks import Agent
from .memory import Violation

if TYPE_CHECKING:
    from .warp import Warp

NEVER = 1 << 62
Rect = tuple[int, int, int, int]
"""First lane, number of lanes, first column, number of columns."""


@dataclass(eq=False, slots=True)
class Touch:
    """An access to Tensor Memory.

    Attributes
    ----------
    what
        The instruction, for messages.
    role
        ``"accumulator"``, ``"scale factors"``, ``"operand A"`` or ``"cells"``.
    piped
        Whether it is an mma, cp or shift, ordered by commit; otherwise a ld or st.
    stream
        Which thread's pipeline (piped) or which warp (ld, st) it belongs to.
    done
        When it was complete (piped) or waited for (ld, st); `NEVER` until then.
    """

    what: str
    role: str
    piped: bool
    stream: Any
    warp: Warp
    agent: Agent
    write: bool
    rect: Rect
    done: int = NEVER
    committed: bool = False


class ThreadOrder:
    """What a warp's tcgen05 operations may rely on."""

    def __init__(self, w: Warp) -> None:
        self.view = w.agent.known.copy()
        self.view[:] = 0
        self.before_fences: list[int] = []

    @staticmethod
    def of(w: Warp) -> ThreadOrder:
        """Return the record of warp `w`."""
        found: ThreadOrder | None = w.state.get("tcgen05 order")
        if found is None:
            found = w.state["tcgen05 order"] = ThreadOrder(w)
        return found

    def fence_after(self, w: Warp) -> None:
        """fence::after_thread_sync: what the warp has acquired now counts for tcgen05 too."""
        self.view = w.agent.known.copy()

    def fence_before(self, w: Warp) -> None:
        """fence::before_thread_sync: what was waited for may be passed on from now."""
        self.before_fences.append(w.machine.time)
        w.machine.time += 1

    def sees(self, agent: Agent, time: int) -> bool:
        """Whether an agent's work up to `time` is ordered before this warp's tcgen05 operations."""
        return agent.index < len(self.view) and int(self.view[agent.index]) >= time


def _overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1] and a[2] < b[2] + b[3] and b[2] < a[2] + a[3]


def _where(rect: Rect) -> str:
    return f"lanes {rect[0]}-{rect[0] + rect[1] - 1}, columns {rect[2]}-{rect[2] + rect[3] - 1}"


class Order:
    """The touches on one CTA's Tensor Memory; nothing is reported unless `strict`."""

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.touches: dict[Any, Touch] = {}

    def access(self, new: Touch) -> None:
        """Check an access against the earlier ones and remember it."""
        if not self.strict:
            return
        for old in self.touches.values():
            if (old.write or new.write) and _overlap(old.rect, new.rect):
                self._check(old, new)
        self.touches[new.stream, new.write, new.rect, new.role] = new

    def release(self, w: Warp, first: int, columns: int) -> None:
        """Check a dealloc: everything on its columns is over (fences are not asked for)."""
        rect = (0, 128, first, columns)
        gone = [key for key, old in self.touches.items() if _overlap(old.rect, rect)]
        for key in gone:
            old = self.touches[key]
            known = int(w.agent.known[old.agent.index]) if old.warp is not w or old.piped else NEVER
            if old.done == NEVER or known < old.done:
                raise Violation(
                    f"tcgen05.dealloc of columns {first}-{first + columns - 1} while {old.what} "
                    f"on {_where(old.rect)} is not known to be complete: {_hint(old)}"
                )
        for key in gone:
            del self.touches[key]

    def _check(self, old: Touch, new: Touch) -> None:
        if old.piped and new.piped and old.stream == new.stream:
            _check_pipe(old, new)
            return
        order = ThreadOrder.of(new.warp)
        known = int(new.warp.agent.known[old.agent.index])
        clash = (
            f"{new.what} {'writes' if new.write else 'reads'} the {new.role} in Tensor Memory "
            f"{_where(new.rect)} that {old.what} {'writes' if old.write else 'reads'}"
        )
        if old.piped:
            if order.sees(old.agent, old.done):
                return
            if known >= old.done:
                raise Violation(
                    f"{clash}: the wait for its tcgen05.commit was not followed by a "
                    "tcgen05.fence::after_thread_sync"
                )
            raise Violation(f"{clash}: {_hint(old)}")
        if old.done == NEVER:
            raise Violation(f"{clash}: {_hint(old)}")
        if old.warp is new.warp:
            return
        fences = ThreadOrder.of(old.warp).before_fences
        at = bisect_left(fences, old.done)
        fence = fences[at] if at < len(fences) else NEVER
        if order.sees(old.agent, fence + 1):
            return
        if known > fence:
            raise Violation(
                f"{clash}: the wait for warp {old.warp.index} was not followed by a "
                "tcgen05.fence::after_thread_sync"
            )
        if known >= old.done:
            raise Violation(
                f"{clash}: warp {old.warp.index} synchronised after its tcgen05.wait without a "
                "tcgen05.fence::before_thread_sync"
            )
        raise Violation(
            f"{clash}: nothing orders it after that access of warp {old.warp.index}; "
            "synchronise the warps (fence::before_thread_sync, barrier, fence::after_thread_sync)"
        )


def _check_pipe(old: Touch, new: Touch) -> None:
    """Check two operations of one thread's pipeline, which run in order.

    An accumulator is ordered for the next mma on the same cells only: with another shape, or as
    an operand of the next mma, it has to be waited for.
    """
    if old.role != "accumulator" or not old.write or old.rect == new.rect:
        return
    if ThreadOrder.of(new.warp).sees(old.agent, old.done):  # waited for
        return
    if new.role == "accumulator":
        raise Violation(
            f"{new.what} writes the accumulator {_where(new.rect)}, which overlaps "
            f"{_where(old.rect)} of an earlier {old.what} in another shape; only operations on "
            "the same accumulator and shape are ordered without a wait"
        )
    if not new.write:
        raise Violation(
            f"{new.what} reads {new.role} at {_where(new.rect)} from the accumulator of an "
            f"earlier {old.what} with no wait for it; commit and wait in between"
        )


def _hint(old: Touch) -> str:
    """Say what would make an incomplete access complete."""
    if not old.piped:
        name = "st" if old.write else "ld"
        return f"there was no tcgen05.wait::{name} after it"
    if not old.committed:
        return "no tcgen05.commit of its thread follows it, so nothing can wait for it"
    return (
        "it may still be in flight: there was no wait on the mbarrier that its tcgen05.commit "
        "signals"
    )
