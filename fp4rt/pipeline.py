"""Pipelines: batch after batch through one plan, several in flight.

Every lane has memory and a stream of its own, and all share the weights. While one batch is
computed, the next one is on its way to the device and the last one on its way back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import progress as display
from fp4rt.arguments import check_targets
from fp4rt.blas import BlasPlan
from fp4rt.device import Attached, ClosedError, Device, Stream
from fp4rt.kernels import KernelPlan, as_float32
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.problem import Inputs, WeightFacts
from fp4rt.rows import DeviceRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPARE_STREAMS = 16
"""Streams kept for the next pipeline: making and closing one takes as long as a small batch."""

Finish = Callable[[], Any]
"""Waits for a batch and returns its result, or raises what went wrong with it."""


class SpareStreams(Attached):
    """Streams of a device that lanes had, with nothing left to do."""

    def __init__(self) -> None:
        self._spare: deque[Stream] = deque()

    def take(self, device: Device) -> Stream:
        """Return a stream that nobody else uses."""
        try:
            return self._spare.pop()
        except IndexError:
            return device.new_stream()

    def give(self, stream: Stream) -> None:
        """Take back a stream."""
        if len(self._spare) < SPARE_STREAMS:
            self._spare.append(stream)
        else:
            stream.close()

    def clear(self) -> None:
        """Close them."""
        while self._spare:
            self._spare.pop().close()


@dataclass(frozen=True)
class Recipe:
    """What all lanes of a pipeline have in common.

    Attributes
    ----------
    device, facts, dtype
        Where, the weights' shapes and scales, and the type of results.
    inputs, scales
        Turn what the caller gave for a batch into inputs, and those into their scales and whether
        they hold for other group sizes too; or raise.
    checked
        Results to write to that were looked at already: their identity and height.
    """

    device: Device
    facts: WeightFacts
    dtype: np.dtype[Any]
    inputs: Callable[[Any, Any], Inputs]
    scales: Callable[[Inputs], tuple[NDArray[np.float64], bool]]
    checked: set[tuple[int, int]] = field(default_factory=set)


class Lane:
    """A path of its own for one batch at a time.

    Parameters
    ----------
    recipe
        What is computed.
    path
        Memory and launches, with the weights in place.
    """

    def __init__(self, recipe: Recipe, path: BlasPlan | KernelPlan) -> None:
        self._recipe, self.path = recipe, path
        self._streams = recipe.device.attached(SpareStreams)
        self.stream = self._streams.take(recipe.device)
        self._scale: float | None = None  # of the rows that the lane's scales are for
        self.stream.after(recipe.device.stream)

    def start(self, batch: Any, out: Any, threads: ThreadPoolExecutor) -> Finish:
        """Begin a batch, which the lane's last one must have made way for."""
        recipe = self._recipe
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                "a batch is a pair (a, group_sizes), with group_sizes None where set_inputs "
                f"takes none; got {type(batch).__name__}"
            )
        inputs = recipe.inputs(*batch)
        alpha = self._alpha(inputs)
        shapes = inputs.result_shapes(recipe.facts)
        targets = None if out is None else self._targets(inputs, shapes, out)
        if isinstance(inputs.rows, DeviceRows):
            self.stream.after(recipe.device.stream)
        if targets is None or not self._is_pinned(inputs, targets):
            return threads.submit(self._run, inputs, alpha, shapes, targets).result
        assert isinstance(self.path, KernelPlan)
        self.path.send_rows(inputs, alpha, self.stream)
        self.path.launch(self.stream)
        element = 0
        for target in targets:
            self.path.fetch(target, element, self.stream)
            element += target.size
        done = self.stream.record()

        def finish(_held: Inputs = inputs) -> Any:
            done.synchronize()
            return targets[0] if inputs.ragged else targets

        return finish

    def _alpha(self, inputs: Inputs) -> NDArray[Any] | None:
        """Return the scales to send; None if the lane has them."""
        rows = inputs.rows
        key = float(rows.global_scale) if isinstance(rows, (Nvfp4Array, DeviceRows)) else None
        if key is not None and key == self._scale:
            return None
        scales, lasting = self._recipe.scales(inputs)
        self._scale = key if lasting else None
        return scales if isinstance(self.path, BlasPlan) else as_float32(scales)

    def _targets(
        self, inputs: Inputs, shapes: list[tuple[int, int]], out: Any
    ) -> list[NDArray[Any]]:
        """Return the arrays that take a result; what is used again is only compared with A."""
        recipe = self._recipe
        known = (id(out), inputs.total)
        if inputs.ragged and known in recipe.checked:
            rows = inputs.rows
            given = (rows.values, rows.scales) if isinstance(rows, Nvfp4Array) else (rows,)
            if not any(isinstance(p, np.ndarray) and np.may_share_memory(out, p) for p in given):
                return [out]
        targets = check_targets(inputs, shapes, recipe.dtype, self.path.operands, out)
        recipe.checked.add(known)
        return targets

    def _is_pinned(self, inputs: Inputs, targets: list[NDArray[Any]]) -> bool:
        """Whether no copy of the batch needs a thread."""
        if not isinstance(self.path, KernelPlan):
            return False
        arrays = list(targets)
        for part in inputs.rows if isinstance(inputs.rows, tuple) else (inputs.rows,):
            if isinstance(part, Nvfp4Array):
                arrays += [part.values, part.scales]
            elif isinstance(part, np.ndarray):
                arrays.append(part)
        return all(self._recipe.device.is_pinned(array) for array in arrays if array.size)

    def _run(
        self,
        inputs: Inputs,
        alpha: NDArray[Any] | None,
        shapes: list[tuple[int, int]],
        targets: list[NDArray[Any]] | None,
    ) -> Any:
        self.path.send_rows(inputs, alpha, self.stream)
        self.path.launch(self.stream)
        results = self.path.read(shapes, targets, self.stream)
        return results[0] if inputs.ragged else results

    def close(self) -> None:
        """Give the lane's memory to the next pipeline; its work is done."""
        with suppress(ClosedError):  # the device may have been closed first
            self.stream.synchronize()
            self._streams.give(self.stream)
        self.path.retire()


class Pipeline(Iterator[Any]):
    """Results of batches, in their order; what `GroupedGemmPlan.map` returns.

    Leaving the loop early, an exception and `close` all wait for what is in flight, and let go of
    the rest. What goes wrong with a batch is raised when its turn comes, after the results before
    it.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        batches: Iterable[Any],
        outs: Sequence[Any] | None,
        progress: bool | Callable[[int], object],
    ) -> None:
        self._idle = list(lanes)
        self._lanes = lanes
        self._batches: Iterator[Any] | None = iter(batches)
        self._outs, self._progress = outs, progress
        self._threads = ThreadPoolExecutor(len(lanes), "fp4rt-map")
        self._flying: deque[tuple[Lane | None, Finish]] = deque()
        self._started = self._done = 0
        self._closed = self._cut_short = False

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> Any:
        self._check_not_cut_short()
        if self._closed:
            raise StopIteration
        try:
            self._fill()
            if not self._flying:
                raise StopIteration
            lane, finish = self._flying[0]
            result = finish()
            self._flying.popleft()
            if lane is not None:
                self._idle.append(lane)
            self._done += 1
            self._fill()  # before the caller works on the result
            self._show()
        except BaseException:
            self._end()
            raise
        return result

    def _fill(self) -> None:
        while self._idle and self._batches is not None:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._check_not_cut_short()
                self._batches = None
                return
            except Exception as error:
                self._fail(error)
                return
            self._check_not_cut_short()  # whoever makes the batches may have closed the plan
            out = None if self._outs is None else self._outs[self._started % len(self._outs)]
            lane = self._idle.pop(0)
            try:
                finish = lane.start(batch, out, self._threads)
            except Exception as error:
                self._fail(error)
                return
            self._started += 1
            self._flying.append((lane, finish))

    def _check_not_cut_short(self) -> None:
        if self._cut_short:
            raise ClosedError("the pipeline was closed before its last batch")

    def _fail(self, error: Exception) -> None:
        """Raise `error` in its turn, and begin nothing more."""

        def finish() -> Any:
            raise error

        self._batches = None
        self._flying.append((None, finish))

    def _show(self) -> None:
        if callable(self._progress):
            self._progress(self._done)
        elif self._progress:
            display.show(f"{self._done} batches done" if self._flying else "")

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._batches = None
        flying, self._flying = self._flying, deque()
        for lane, finish in flying:
            if lane is not None:
                with suppress(Exception):  # the error that counts has been raised
                    finish()
        self._threads.shutdown()
        for lane in self._lanes:
            lane.close()

    def close(self) -> None:
        """Wait for what is in flight and begin nothing more; closing twice is harmless."""
        self._cut_short = self._cut_short or not self._closed
        self._end()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def __del__(self) -> None:
        with suppress(Exception):
            self._end()
