"""Special registers: those fixed for a warp's life, and those read anew each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .shared import SHARED_RESERVED, SHARED_SCRATCH

if TYPE_CHECKING:
    from .warp import Warp


def _ids(w: Warp) -> tuple[Any, Any, Any]:
    x, y, _ = w.launch.config.block
    thread = np.arange(32) + 32 * w.index
    return thread % x, thread // x % y, thread // (x * y)


def _clusters(w: Warp) -> tuple[int, ...]:
    grid, size = w.launch.config.grid, w.launch.config.cluster
    return tuple(g // c for g, c in zip(grid, size, strict=True))


def _cluster_id(w: Warp) -> tuple[int, ...]:
    return tuple(b // c for b, c in zip(w.cluster.base, w.launch.config.cluster, strict=True))


def _cluster_ctaid(w: Warp) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(w.cta.ctaid, w.cluster.base, strict=True))


_LANE = np.arange(32, dtype=np.uint64)
_BIT = np.uint64(1) << _LANE
STATIC: dict[str, Callable[[Any], Any]] = {
    "%tid": _ids,
    "%ntid": lambda w: w.launch.config.block,
    "%ctaid": lambda w: w.cta.ctaid,
    "%nctaid": lambda w: w.launch.config.grid,
    "%laneid": lambda w: _LANE,
    "%warpid": lambda w: w.index,
    "%nwarpid": lambda w: 64,
    "%smid": lambda w: w.cta.sm.index,
    "%nsmid": lambda w: len(w.machine.sms),
    "%gridid": lambda w: 1,
    "%is_explicit_cluster": lambda w: w.launch.config.cluster != (1, 1, 1),
    "%clusterid": _cluster_id,
    "%nclusterid": _clusters,
    "%cluster_ctaid": _cluster_ctaid,
    "%cluster_nctaid": lambda w: w.launch.config.cluster,
    "%cluster_ctarank": lambda w: w.cta.rank,
    "%cluster_nctarank": lambda w: len(w.cluster.ctas),
    "%lanemask_eq": lambda w: _BIT,
    "%lanemask_lt": lambda w: _BIT - np.uint64(1),
    "%lanemask_le": lambda w: 2 * _BIT - np.uint64(1),
    "%lanemask_gt": lambda w: np.uint64(0xFFFFFFFF) & ~(2 * _BIT - np.uint64(1)),
    "%lanemask_ge": lambda w: np.uint64(0xFFFFFFFF) & ~(_BIT - np.uint64(1)),
    "%dynamic_smem_size": lambda w: w.launch.config.shared_bytes,
    "%total_smem_size": lambda w: w.launch.shared_bytes,
    "%aggr_smem_size": lambda w: w.launch.shared_bytes + SHARED_RESERVED,
    "%reserved_smem_offset_begin": lambda w: 0,
    "%reserved_smem_offset_end": lambda w: SHARED_RESERVED,
    "%reserved_smem_offset_cap": lambda w: SHARED_RESERVED,
    "%reserved_smem_offset_0": lambda w: 0,
    "%reserved_smem_offset_1": lambda w: w.cta.rank << 24 | SHARED_SCRATCH,
    "%current_graph_exec": lambda w: 0,
    **{f"%envreg{i}": (lambda w: 0) for i in range(32)},
}


def _clock(w: Warp) -> int:
    """Return a time that grows with every reading, within one turn of a warp too."""
    machine = w.machine
    machine.readings += 1
    return 4 * (machine.steps + machine.readings)


def _timer(w: Warp) -> int:
    return 1_000_000 + 8 * _clock(w)


DYNAMIC: dict[str, Callable[[Any], int]] = {
    "%clock": _clock,
    "%clock_hi": lambda w: _clock(w) >> 32,
    "%clock64": _clock,
    "%globaltimer": _timer,
    "%globaltimer_lo": _timer,
    "%globaltimer_hi": lambda w: _timer(w) >> 32,
    # Performance counters that nobody set up.
    **{f"%pm{i}{wide}": (lambda w: 0) for i in range(8) for wide in ("", "_64")},
}
