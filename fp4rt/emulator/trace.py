"""The event trace as Chrome trace JSON: one track for each warp and asynchronous unit."""

from __future__ import annotations

from typing import Any


def chrome_trace(events: list[tuple[int, str, str, str, Any]]) -> dict[str, Any]:
    """Return the events in Chrome's trace format; the time unit is one warp instruction.

    Parameters
    ----------
    events
        (step, track, name, phase, argument) as recorded by the machine. "wait"/"wake" of a warp
        (the argument says for what) and "issue"/"complete" of an asynchronous operation (the
        argument is its number) become intervals, the rest instants.
    """
    tracks: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    open_: dict[tuple[str, Any], tuple[int, Any]] = {}
    for step, track, name, phase, argument in events:
        if track not in tracks:
            tracks[track] = len(tracks) + 1
        base = {"name": name, "pid": 1, "tid": tracks[track]}
        if phase in ("wait", "issue"):
            open_[track, name if phase == "wait" else argument] = step, argument
        elif phase in ("wake", "complete"):
            key = (track, name if phase == "wake" else argument)
            start, what = open_.pop(key, (step, argument))
            extra = {"args": {"waits for": what}} if phase == "wake" and what else {}
            found.append({**base, "ph": "X", "ts": start, "dur": step - start, **extra})
        elif phase in ("B", "E"):
            found.append({**base, "ph": phase, "ts": step})
        else:
            found.append({**base, "ph": "i", "ts": step, "s": "t", "args": {"value": argument}})
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": track}}
        for track, tid in tracks.items()
    ]
    return {"traceEvents": names + found}
