"""The numpy path: one grouped GEMM whose operands come from the host and whose result goes there.

Groups are moved in chunks, on three streams, so that a chunk is computed while the next one comes
and the last one goes::

    uploads     B and A of chunk 0 | 1                | 2                | ...
    computing                       pack, multiply 0  | 1                | 2 ...
    downloads                                          D of chunk 0      | 1 ...

Ordinary arrays go through pinned memory, which threads fill and empty; pinned ones are copied by
the GPU from where they are. Memory for B as it was given is used in turn by every third chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.device import Attached, Buffer, Device, Event, Stream
from fp4rt.kernels import KernelPlan
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.problem import Inputs, Weights
from fp4rt.rows import DeviceRows
from fp4rt.weights import Packer

if TYPE_CHECKING:
    from numpy.typing import NDArray

STREAM_BYTES = 4 << 20
"""From this many bytes to move, chunks are worth their launches."""

CHUNK_BYTES, STAGED_BYTES = 8 << 20, 256 << 20
"""Groups are moved together up to this many bytes; up to more where threads stage them, since the
threads are much better at few large copies than at many."""

AHEAD = 3
"""Chunks that are being staged at a time."""

SPARE_BYTES = 256 << 20
"""Memory for weights as they were given is kept for the next call up to this size."""

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Chunk:
    """Groups that are moved together.

    Attributes
    ----------
    first, count
        Groups ``[first, first + count)``.
    row, rows
        Their first row of A, and how many they have.
    element, elements
        Where their result begins in D, and how long it is.
    """

    first: int
    count: int
    row: int
    rows: int
    element: int
    elements: int


def cut(inputs: Inputs, weights: Weights | None, plan: KernelPlan, most: int) -> list[Chunk]:
    """Cut groups into chunks of at most so many bytes, unless one group has more.

    Groups without rows take no part, and their weights stay behind.
    """
    chunks: list[Chunk] = []
    sizes = inputs.sizes.tolist()
    row = element = 0
    bytes_in_chunk = 0
    open_ = False
    per_row = plan.bytes_per_row
    for g, (m, (n, k)) in enumerate(zip(sizes, plan.problem.shapes, strict=True)):
        elements = m * n
        if elements == 0:
            row, element, open_ = row + m, element + elements, False
            continue
        moved = m * per_row + (0 if weights is None else n * k * 9 // 16)
        if open_ and bytes_in_chunk + moved <= most and _together(weights, g):
            last = chunks[-1]
            chunks[-1] = Chunk(
                last.first,
                last.count + 1,
                last.row,
                last.rows + m,
                last.element,
                last.elements + elements,
            )
            bytes_in_chunk += moved
        else:
            chunks.append(Chunk(g, 1, row, m, element, elements))
            bytes_in_chunk, open_ = moved, True
        row, element = row + m, element + elements
    return chunks


def _together(weights: Weights | None, g: int) -> bool:
    """Whether group g may be in the chunk of the one before: weights of a stack are one copy."""
    return weights is None or weights.stack is not None


def worthwhile(plan: KernelPlan, inputs: Inputs, weights: Weights | None, stream: Stream) -> bool:
    """Whether to move these operands in chunks."""
    if not plan.divisible or isinstance(inputs.rows, DeviceRows) or stream.capturing:
        return False
    moved = 0 if weights is None else sum(w.nbytes for w in weights.groups)
    sizes: list[int] = inputs.sizes.tolist()
    result = sum(m * n for m, (n, _) in zip(sizes, plan.problem.shapes, strict=True))
    moved += inputs.total * plan.bytes_per_row + result * plan.out_dtype.itemsize
    return moved >= STREAM_BYTES


class Lanes(Attached):
    """A device's streams for copies in both directions, the threads that serve them, and memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packers: list[Packer] = []
        self._streams: tuple[Stream, Stream] | None = None
        self._stagers: ThreadPoolExecutor | None = None
        self._receivers: ThreadPoolExecutor | None = None

    def open(self, plan: KernelPlan) -> tuple[Stream, Stream]:
        """Return the streams for uploads and downloads."""
        with self._lock:
            if self._streams is None:
                self._streams = plan.device.new_stream(), plan.device.new_stream()
            return self._streams

    @property
    def stagers(self) -> ThreadPoolExecutor:
        """Threads that fill staging memory."""
        with self._lock:
            if self._stagers is None:
                self._stagers = ThreadPoolExecutor(AHEAD, "fp4rt-upload")
            return self._stagers

    @property
    def receivers(self) -> ThreadPoolExecutor:
        """Threads that wait for results."""
        with self._lock:
            if self._receivers is None:
                self._receivers = ThreadPoolExecutor(AHEAD, "fp4rt-download")
            return self._receivers

    def take_packers(self, device: Device) -> list[Packer]:
        """Return one packer for each chunk that is ahead, for the caller alone."""
        with self._lock:
            found, self._packers = self._packers, []
        return found or [Packer(device) for _ in range(AHEAD)]

    def give_packers(self, packers: list[Packer]) -> None:
        """Keep packers that have nothing left to do, unless there are some or they are large."""
        with self._lock:
            if not self._packers and sum(packer.nbytes for packer in packers) <= SPARE_BYTES:
                self._packers, packers = packers, []
        for packer in packers:
            packer.close()

    def clear(self) -> None:
        """Free the memory; streams and threads are not worth having back."""
        with self._lock:
            packers, self._packers = self._packers, []
        for packer in packers:
            packer.close()


def run(
    plan: KernelPlan,
    inputs: Inputs,
    weights: Weights | None,
    targets: list[NDArray[Any]],
    stream: Stream,
    *,
    fresh: bool = False,
) -> None:
    """Move operands to `plan`, launch, and bring the result into `targets`, complete on return.

    Parameters
    ----------
    plan
        With group sizes and scales sent, and with memory of its own for A and D.
    inputs
        Rows on the host.
    weights
        B on the host, for the plan's own memory; None if the plan has them.
    targets
        One array (M, N) for ragged inputs, one for each group otherwise.
    stream
        Where the kernels run.
    fresh
        Whether nobody wrote to the targets yet, so that they have no memory so far.
    """
    lanes = plan.device.attached(Lanes)
    up, down = lanes.open(plan)
    plan.order(stream)
    plan.bind_own_rows()
    up.after(stream)
    threads = None if _is_pinned(plan, inputs, weights) else lanes.stagers
    chunks = cut(inputs, weights, plan, CHUNK_BYTES if threads is None else STAGED_BYTES)
    if len(chunks) == 1:
        threads = None
    packers = [] if weights is None else lanes.take_packers(plan.device)
    free: list[Event | None] = [None] * AHEAD
    staged: deque[Future[Event]] = deque()
    arrived: deque[Event] = deque()
    received: list[Future[None]] = []
    mapped: list[Future[None]] = []

    def stage(i: int) -> Event:
        chunk = chunks[i]
        rows = slice(chunk.row, chunk.row + chunk.rows)
        pairs: list[tuple[Buffer, NDArray[Any]]] = [
            (plan.rows_buffer(name)[rows], part)
            for name, part in plan.packed_rows(_rows_of(inputs, chunk)).items()
        ]
        if weights is not None:
            pairs += packers[i % AHEAD].room_for(weights, chunk.first, chunk.count)
        up.upload_all(pairs)
        return up.record()

    def begin(i: int) -> None:
        if threads is not None:
            staged.append(threads.submit(stage, i))
        else:
            arrived.append(stage(i))

    try:
        if fresh:
            parts = [part for target in targets for part in _parts(target, AHEAD)]
            mapped += [lanes.receivers.submit(_map_pages, part) for part in parts]
        for i in range(min(AHEAD, len(chunks))):
            begin(i)
        for i, chunk in enumerate(chunks):
            stream.wait(arrived.popleft() if threads is None else staged.popleft().result())
            if weights is not None:
                packers[i % AHEAD].pack(plan.own_weights(), chunk.first, chunk.count, stream)
                free[i % AHEAD] = stream.record()
            plan.launch_groups(chunk.first, chunk.count, chunk.row, chunk.element, stream)
            down.wait(stream.record())
            while mapped:
                mapped.pop().result()
            for target, element in _targets_of(targets, inputs, chunk):
                if plan.device.is_pinned(target):
                    plan.fetch(target, element, down)
                else:
                    received.append(lanes.receivers.submit(plan.fetch, target, element, down))
            if i + AHEAD < len(chunks):
                last_use = free[i % AHEAD]
                if last_use is not None:
                    up.wait(last_use)
                begin(i + AHEAD)
        for each in received:
            each.result()
    finally:
        unfinished: list[Future[Any]] = [*staged, *received, *mapped]
        for future in unfinished:
            future.exception()  # waits: threads and GPU still read or write the caller's arrays
        up.synchronize()
        down.synchronize()
    if packers:
        lanes.give_packers(packers)


def _parts(target: NDArray[Any], count: int) -> list[NDArray[np.uint8]]:
    """Cut the bytes of a dense array into parts, unless they are few."""
    flat = target.reshape(-1).view(np.uint8)
    if flat.size < max(STREAM_BYTES, 1):
        return []
    step = -(-flat.size // count)
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def _map_pages(part: NDArray[np.uint8]) -> None:
    """Have the system find memory for new pages, while copies to the device are under way.

    It takes longer than a copy to them, and would hold up the download.
    """
    part[::PAGE_BYTES] = 0


def _is_pinned(plan: KernelPlan, inputs: Inputs, weights: Weights | None) -> bool:
    """Whether the large operands need no staging."""
    if weights is not None:
        return all(plan.device.is_pinned(group.values) for group in weights.groups)
    rows = inputs.rows if isinstance(inputs.rows, tuple) else (inputs.rows,)
    return all(
        plan.device.is_pinned(part.values if isinstance(part, Nvfp4Array) else part)
        for part in rows
        if not isinstance(part, DeviceRows)
    )


def _rows_of(inputs: Inputs, chunk: Chunk) -> Inputs:
    """Return the inputs of a chunk's groups."""
    sizes = inputs.sizes[chunk.first : chunk.first + chunk.count]
    if isinstance(inputs.rows, tuple):
        return Inputs(inputs.rows[chunk.first : chunk.first + chunk.count], sizes)
    assert isinstance(inputs.rows, (Nvfp4Array, np.ndarray))
    return Inputs(inputs.rows[chunk.row : chunk.row + chunk.rows], sizes)


def _targets_of(
    targets: list[NDArray[Any]], inputs: Inputs, chunk: Chunk
) -> list[tuple[NDArray[Any], int]]:
    """Return what takes a chunk's result: arrays, and the elements of D where they begin."""
    if inputs.ragged:
        return [(targets[0][chunk.row : chunk.row + chunk.rows], chunk.element)]
    found, element = [], chunk.element
    for target in targets[chunk.first : chunk.first + chunk.count]:
        found.append((target, element))
        element += target.size
    return found
