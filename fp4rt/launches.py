"""The launches of a plan: kernels in their order, their parameters, graphs that replay them.

Where an operand is, is a parameter of a launch: it changes in place, also in the graphs that were
captured from the plan. The plan's own graphs do not change; there is one for each of a few places.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import abi
from fp4rt.choice import Choice
from fp4rt.device import Device, Graph, Kernel, LaunchConfig, Stream
from fp4rt.library import LoadedImages

if TYPE_CHECKING:
    from numpy.typing import NDArray

KERNELS = ("prepare", "grouped_gemm")
"""Entry points of an image, in the order of their launches; some images have no `prepare`."""

MAX_GRAPHS, GRAPH_AT = 8, 3
"""Sets of parameters, the last ones used, that a plan remembers; and the launch with one of them at
which it makes a graph for later ones, which takes as long as fifty launches."""

WORDS = {
    name: offset // 8
    for name, offset in abi.PARAMS.offsets.items()
    if abi.PARAMS.dtype[name].itemsize == 8
}
"""Parameters of 8 bytes, addresses above all, by their place. To change one as a word takes half as
long as by its name, and binding changes a few at every call."""


class Launch:
    """One launch: what runs, how, and with which parameters.

    `data` is what is passed: the record `params` as it was after the last `set`.
    """

    def __init__(self, name: str, kernel: Kernel, config: LaunchConfig) -> None:
        self.name, self.kernel, self.config = name, kernel, config
        self.params: NDArray[Any] = np.zeros((), abi.PARAMS.dtype)
        self._words: NDArray[np.uint64] = self.params.reshape(1).view(np.uint64)
        self.data = self.params.tobytes()

    def set(self, fields: Mapping[str, Any]) -> bytes:
        """Change parameters and return all of them."""
        for name, value in fields.items():
            place = WORDS.get(name)
            if place is None:
                self.params[name] = value
            else:
                self._words[place] = value
        self.data = self._words.tobytes()
        return self.data


class Launches:
    """What a plan launches.

    Parameters
    ----------
    device
        Where; its ``image_kind`` is not None.
    choice
        Variant and launch shape.

    Attributes
    ----------
    arch
        Of the image.
    prepares
        Whether a kernel puts A in another order before it is multiplied.
    rows_read_by
        The kernel that reads A as it was given: the first. It alone is told where that is.

    Raises
    ------
    NoKernelError
        If the variant was not built.
    """

    def __init__(self, device: Device, choice: Choice) -> None:
        self._device = device
        image, module = device.attached(LoadedImages).find(device, choice.variant)
        self.arch = image.variant.arch
        self.prepares = "prepare" in image.kernels
        self.rows_read_by = ("prepare",) if self.prepares else ("grouped_gemm",)
        grids = {"prepare": choice.prepare_grid, "grouped_gemm": choice.grid}
        self._launches: list[Launch] = []
        for name in KERNELS:
            if name not in image.kernels:
                continue
            facts = image.kernels[name]
            assert facts.max_threads is not None, "every kernel has launch bounds"
            config = LaunchConfig(
                (grids[name], 1, 1),
                facts.max_threads,
                facts.dynamic_shared_bytes,
                facts.cluster,
                programmatic=name == "grouped_gemm",
            )
            self._launches.append(Launch(name, module.kernel(name), config))
        self._graph: Graph | None = None  # of the present parameters, if it is known
        # By parameters: their graph, or how often they were launched so far.
        self._replays: OrderedDict[tuple[bytes, ...], Graph | int] = OrderedDict()
        self._captured: list[weakref.ref[Graph]] = []
        self._recorded_elsewhere = False

    def set(self, fields: Mapping[str, Any], kernels: Iterable[str] = KERNELS) -> None:
        """Change parameters, and those of the graphs, whose queued launches keep the old ones.

        Raises
        ------
        ValueError
            If there is a graph that can't be told.
        """
        if self._recorded_elsewhere:
            raise ValueError(
                "a launch of this plan was captured by other means than plan.capture(), so its "
                "graph can't be told of the new buffers; copy the data into the bound ones, or "
                "capture with plan.capture()"
            )
        for index, launch in enumerate(self._launches):
            if launch.name not in kernels:
                continue
            data = launch.set(fields)
            if self._captured:
                for graph in self._graphs():
                    graph.set_params(index, data)
        self._graph = None

    def _graphs(self) -> list[Graph]:
        """Return the graphs that were captured from the plan and are still there."""
        found = [(ref, ref()) for ref in self._captured]
        open_ = [(ref, graph) for ref, graph in found if graph is not None and not graph.closed]
        self._captured = [ref for ref, _ in open_]
        return [graph for _, graph in open_]

    def run(self, stream: Stream) -> None:
        """Queue the kernels; by replaying a graph if they had these parameters often lately."""
        if stream.capturing:
            self._recorded_elsewhere = True
            self._queue(stream)
        elif self._graph is not None:
            self._graph.launch(stream)
        else:
            self._run_again(stream)

    def _run_again(self, stream: Stream) -> None:
        """Find a graph for the present parameters and replay it, or launch the kernels.

        Callers give a few buffers in turn, so their graphs are kept: to change one takes longer
        than to launch a kernel.
        """
        key = tuple([launch.data for launch in self._launches])
        known = self._replays.get(key, 0)
        if isinstance(known, Graph):
            self._replays.move_to_end(key)
            known.launch(stream)
            self._graph = known
            return
        self._queue(stream)
        self._replays[key] = known + 1 if known + 1 < GRAPH_AT else self._own_graph()
        self._replays.move_to_end(key)
        if len(self._replays) > MAX_GRAPHS:
            _, oldest = self._replays.popitem(last=False)
            if isinstance(oldest, Graph):
                oldest.close()

    def _queue(self, stream: Stream) -> None:
        for launch in self._launches:
            stream.launch(launch.kernel, launch.config, launch.data)

    def run_with(self, stream: Stream, change: Callable[[str, NDArray[Any]], None]) -> None:
        """Queue the kernels once with parameters that ``change(kernel, parameters)`` alters."""
        for launch in self._launches:
            params = launch.params.copy()
            change(launch.name, params)
            stream.launch(launch.kernel, launch.config, params.tobytes())

    def _own_graph(self) -> Graph:
        """Return a graph of the launches as they are now."""
        # A stream of its own: what other threads queue meanwhile must not be captured.
        stream = self._device.new_stream()
        with stream.capture() as capture:
            self._queue(stream)
        stream.close()
        for index, launch in enumerate(self._launches):  # the plan keeps what is needed
            capture.graph.set_params(index, launch.data, keep=())
        return capture.graph

    def capture(
        self, stream: Stream, hook: Callable[[], None], *keep: object, empty: bool
    ) -> Graph:
        """Return a graph of the kernels (none if `empty`) that follows changes and calls `hook`."""
        with stream.capture() as capture:
            capture.keep(*keep)
            if not empty:
                self._queue(stream)
            stream.on_launch(hook)
        if not empty:
            self._captured.append(weakref.ref(capture.graph))
        return capture.graph

    def close(self) -> None:
        """Let go of the plan's own graphs; those that were captured live on."""
        for graph in self._replays.values():
            if isinstance(graph, Graph):
                graph.close()
        self._replays.clear()
        self._graph = None
