"""What is put around a decoded instruction: guards, whole-warp rules, watched registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.device import EmulatorFault

from .warp import ALL, NONE, Mask

if TYPE_CHECKING:
    from .warp import Warp

Handler = Callable[["Warp", Mask], Any]


def failing(message: str) -> Handler:
    """Return a handler that raises `message` when it is reached."""

    def fail(w: Warp, m: Mask) -> None:
        raise EmulatorFault(f"{message}\n  at {w.where()}")

    return fail


def with_preludes(preludes: list[Callable[[Any], None]], handler: Handler) -> Handler:
    """Return `handler` preceded by `preludes`."""

    def run(w: Warp, m: Mask) -> Any:
        for prelude in preludes:
            prelude(w)
        return handler(w, m)

    return run


def watched(handler: Handler, func: str, reads: list[str], writes: list[str]) -> Handler:
    """Return `handler` with the registers it may read unwritten checked, and its writes noted."""
    if not reads and not writes:
        return handler

    def run(w: Warp, m: Mask) -> Any:
        written = w.written
        for reg in reads:
            lanes = written.get((func, reg))
            missing = w.active(m) if lanes is None else w.active(m) & ~lanes
            if 1 in missing.tobytes() and "uninitialised-registers" not in w.machine.allow:
                bits = sum(1 << int(lane) for lane in np.flatnonzero(missing))
                raise w.fault(f"register {reg.split('@')[0]} was never written in lanes {bits:#x}")
        for reg in writes:
            lanes = written.get((func, reg))
            written[func, reg] = w.active(m).copy() if lanes is None else lanes | w.active(m)
        return handler(w, m)

    return run


def guarded(handler: Handler, row: int, negated: bool) -> Handler:
    """Return `handler` under a guard predicate."""
    none, all_ = (ALL, NONE) if negated else (NONE, ALL)

    def run(w: Warp, m: Mask) -> Any:
        p = w.files[0][row]
        if m is None:
            bits = p.tobytes()
            if bits == none:
                return None
            if bits == all_:
                return handler(w, None)
            return handler(w, ~p if negated else p.copy())
        p = m & ~p if negated else m & p
        if p.tobytes() == NONE:
            return None
        return handler(w, p)

    return run


def aligned(handler: Handler, guard: tuple[int, bool] | None, exited: bool) -> Handler:
    """Return `handler` for a whole warp only; `exited` lanes may be missing."""

    def gathered(w: Warp, m: Mask) -> Any:
        result = handler(w, m)
        w.agent.gather(stores=False)
        return result

    def run(w: Warp, m: Mask) -> Any:
        if m is not None:
            frag = w.frag
            name = w.instruction_text(w.at)
            if frag.count < w.live_count:
                return w.gather(
                    f"the other lanes of the warp: {name} is a whole-warp instruction, executed "
                    f"by {frag.count} of {w.live_count} live lanes"
                )
            if not exited:
                raise w.fault(
                    f"{name} is a whole-warp (.sync.aligned) instruction, but only {frag.count} "
                    "of 32 lanes execute it; the others have exited or do not exist"
                )
        if guard is None:
            return gathered(w, m)
        p = w.files[0][guard[0]]
        p = ~p if guard[1] else p
        bits = p[w.frag.lanes()].tobytes()
        if 1 not in bits:
            return None
        if 0 in bits:
            raise w.fault(
                f"{w.instruction_text(w.at)} is a whole-warp (.sync.aligned) instruction, but its "
                "guard predicate differs between the lanes"
            )
        return gathered(w, m)

    return run
