"""Graphs: captured work that replays as one launch."""

from __future__ import annotations

import ctypes
import functools
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.cuda import driver as door
from fp4rt.cuda.buffer import CudaBuffer
from fp4rt.cuda.driver import call, quiet
from fp4rt.cuda.memory import Memory, StreamState
from fp4rt.cuda.staging import PinnedMemory, pinned_owner
from fp4rt.device import Buffer, ClosedError, Graph, LaunchConfig, Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fp4rt.cuda.device import CudaDevice
    from fp4rt.cuda.module import CudaKernel


@dataclass
class KernelNode:
    """A captured launch, and the buffers that its parameters point into.

    `change` is the driver call that gives the node the parameters that `pointer` points to. Both
    are made once: describing a node costs more than changing it.
    """

    handle: Any
    kernel: CudaKernel
    config: LaunchConfig
    kept: list[object]
    pointer: ctypes.c_char_p = field(default_factory=ctypes.c_char_p)
    change: Callable[[], tuple[Any, ...]] | None = None

    def prepare(self, executable: Any) -> Callable[[], tuple[Any, ...]]:
        """Make `change`, for the node as it is in `executable`."""
        new = door.driver.CUDA_KERNEL_NODE_PARAMS()
        new.func = self.kernel.function.handle
        new.gridDimX, new.gridDimY, new.gridDimZ = self.config.grid
        new.blockDimX, new.blockDimY, new.blockDimZ = self.config.block
        new.sharedMemBytes = self.config.shared_bytes
        new.kernelParams = ctypes.addressof(self.pointer)  # as in CudaStream.launch
        set_params = door.driver.cuGraphExecKernelNodeSetParams
        self.change = functools.partial(set_params, executable, self.handle, new)
        return self.change


@dataclass
class CopyNode:
    """A captured copy (``"upload"``, ``"download"`` or ``"copy"``) and both of its ends."""

    handle: Any
    kind: str
    nbytes: int
    kept: list[object]


@dataclass(eq=False)
class Recording:
    """A capture that is going on: its streams, its nodes and what it has to keep alive."""

    memory: Memory
    thread: int
    kernels: list[KernelNode] = field(default_factory=list)
    copies: list[CopyNode] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)
    hooks: list[Callable[[], None]] = field(default_factory=list)
    streams: list[StreamState] = field(default_factory=list)
    ended: bool = False

    def join(self, state: StreamState) -> None:
        """Make a stream part of the capture."""
        state.recording, state.direct = self, False
        self.streams.append(state)

    def end(self) -> None:
        """Let the streams go."""
        self.ended = True
        for state in self.streams:
            state.recording, state.direct = None, True

    def keep(self, thing: object) -> None:
        """Keep an object alive; of a buffer, only its memory, so that closing it is harmless."""
        self.kept.append(thing.allocation if isinstance(thing, CudaBuffer) else thing)

    def add_kernel(
        self, stream: Any, kernel: CudaKernel, config: LaunchConfig, params: bytes
    ) -> None:
        """Note a launch that has just been captured."""
        kept: list[object] = [*self.memory.holders(params)]
        self.kernels.append(KernelNode(_newest_node(stream), kernel, config, kept))

    def add_copy(
        self,
        stream: Any,
        kind: str,
        dst: CudaBuffer | NDArray[Any],
        src: CudaBuffer | NDArray[Any],
    ) -> None:
        """Note a copy that has just been captured."""
        kept = [_lifetime(dst), _lifetime(src)]
        self.copies.append(CopyNode(_newest_node(stream), kind, src.nbytes, kept))


def _lifetime(end: CudaBuffer | NDArray[Any]) -> object:
    return end.allocation if isinstance(end, CudaBuffer) else end


def _newest_node(stream: Any) -> Any:
    """Return the node that the last call on a capturing stream made."""
    _status, _id, _graph, nodes, _edges, count = call(door.driver.cuStreamGetCaptureInfo, stream)
    if count != 1:
        raise RuntimeError(f"the captured call has {count} nodes; expected 1")
    return nodes[0]


class _Destroy:
    """Destroys a graph, once nothing runs it.

    It does not hold what the graph kept alive: that goes with the graph object, in its own order.
    """

    def __init__(self, memory: Memory, graph: Any, executable: Any) -> None:
        self._memory = memory
        self._graph = graph
        self._executable = executable
        memory.owned.add(self)

    def __call__(self) -> None:
        if self in self._memory.owned:
            self._memory.owned.discard(self)
            quiet(door.driver.cuGraphExecDestroy, self._executable)
            quiet(door.driver.cuGraphDestroy, self._graph)


def _closed(_stream: Any) -> tuple[Any, ...]:
    raise ClosedError("the graph is closed; capture it again")


class CudaGraph(Graph):
    """Captured work that replays as one launch and keeps alive everything it touches."""

    def __init__(self, device: CudaDevice, graph: Any, recording: Recording) -> None:
        cu = door.driver
        self.device: CudaDevice = device
        self._memory = device.memory
        self._kernels = recording.kernels
        self._copies = recording.copies
        self._kept = recording.kept
        self._hooks = recording.hooks
        self._graph = graph
        self._lock = threading.Lock()
        with device.context.current():
            try:
                executable = call(cu.cuGraphInstantiate, graph, 0)
            except BaseException:
                quiet(cu.cuGraphDestroy, graph)
                raise
        self._executable = executable
        self._launch: Callable[[Any], tuple[Any, ...]] = functools.partial(
            cu.cuGraphLaunch, executable
        )
        destroy = _Destroy(self._memory, graph, executable)
        self._finalizer = weakref.finalize(self, self._memory.retire, destroy)
        self._finalizer.atexit = False

    def _check_open(self) -> None:
        self.device.check_open()
        if not self._finalizer.alive:
            raise ClosedError("the graph is closed; capture it again")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def launch(self, stream: Stream | None = None) -> None:
        """Replay on `stream` (the device's own stream if None)."""
        # Short on purpose, like CudaStream.launch; the graph's nodes name their context.
        target: Any = self.device.own_stream if stream is None else stream
        try:
            state = target.state
            if state.key is None or target.device is not self.device:
                target = self._other(stream)
        except AttributeError:
            target = self._other(stream)
            state = target.state
        if state.recording is not None:
            raise RuntimeError(
                "a graph can't be launched inside a capture; call what it was captured from again"
            )
        if door.forked:
            raise ClosedError(door.FORKED)
        with self._lock:  # an executable graph is not for two threads at once
            (code,) = self._launch(state.handle)
            if code:
                self._again(state.handle, code)
        if state.direct:
            state.dirty = True
        else:
            target._used()
        for hook in self._hooks:
            hook()

    def _other(self, stream: object) -> Any:
        self.device.check_open()
        target: Any = self.device.as_stream(stream)
        target._check_open()
        return target

    def _again(self, handle: Any, code: Any) -> None:
        errors = door.driver.CUresult
        if code in (errors.CUDA_ERROR_INVALID_CONTEXT, errors.CUDA_ERROR_INVALID_HANDLE):
            with self.device.context.current():
                (code,) = self._launch(handle)
        if code:
            raise door.failure(door.driver.cuGraphLaunch, code)

    def upload(self, stream: Stream | None = None) -> None:
        """Move the graph to the device ahead of its first launch."""
        self._check_open()
        target = self._other(stream)
        with self._lock, self.device.context.current():
            call(door.driver.cuGraphUpload, self._executable, target.handle)
        target._used()

    def set_params(
        self, index: int, params: bytes | np.void, *, keep: Sequence[Buffer] | None = None
    ) -> None:
        """Replace the parameters of the captured kernel launch number `index` (capture order).

        Launches that are queued already keep the old ones. The graph keeps alive the buffers that
        the new parameters point into, or only those in `keep`, and lets the old ones go.
        """
        self._check_open()
        node = _nth(self._kernels, index, "kernel launches")
        data = node.kernel.params_of(params)
        kept: list[object]
        if keep is None:
            kept = [*self._memory.holders(data)]
        else:
            kept = [b.allocation for b in keep if isinstance(b, CudaBuffer)]
        # Without a current context the driver does not answer, it crashes (580, CUDA 13.0).
        with self._lock, self.device.context.current():
            change = node.change or node.prepare(self._executable)
            node.pointer.value = data
            (code,) = change()
            if code:
                raise door.failure(door.driver.cuGraphExecKernelNodeSetParams, code)
            node.kept = kept

    def set_copy(self, index: int, dst: Buffer | NDArray[Any], src: Buffer | NDArray[Any]) -> None:
        """Replace both ends of the captured copy number `index` (same kind and size).

        An array that is not pinned is copied now, like one given to `Stream.upload`.
        """
        self._check_open()
        node = _nth(self._copies, index, "copies")
        new_dst = self._end(node, f"destination of copy {index}", dst, node.kind != "download")
        new_src = self._end(node, f"source of copy {index}", src, node.kind != "upload")
        cu, context = door.driver, self.device.context
        host, gpu = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        new = cu.CUDA_MEMCPY3D()
        new.WidthInBytes, new.Height, new.Depth = node.nbytes, 1, 1
        if isinstance(new_dst, CudaBuffer):
            if new_dst.readonly:
                raise ValueError("the destination is read-only: its owner shared it so")
            new.dstMemoryType, new.dstDevice = gpu, new_dst.address
        else:
            if pinned_owner(new_dst) is None or not new_dst.flags.writeable:
                raise ValueError("the destination must be an array from device.empty_pinned")
            if not new_dst.flags.c_contiguous:
                raise ValueError("the destination must be C-contiguous")
            new.dstMemoryType, new.dstHost = host, new_dst.__array_interface__["data"][0]
        if isinstance(new_src, CudaBuffer):
            new.srcMemoryType, new.srcDevice = gpu, new_src.address
            if isinstance(new_dst, CudaBuffer):
                check_copy(new_dst, new_src)
        else:
            if pinned_owner(new_src) is None or not new_src.flags.c_contiguous:
                new_src = snapshot(self._memory, new_src)
            new.srcMemoryType, new.srcHost = host, new_src.__array_interface__["data"][0]
        set_params = cu.cuGraphExecMemcpyNodeSetParams
        with self._lock, context.current():
            call(set_params, self._executable, node.handle, new, context.handle)
        node.kept = [_lifetime(new_dst), _lifetime(new_src)]

    def _end(
        self, node: CopyNode, what: str, end: object, on_device: bool
    ) -> CudaBuffer | NDArray[Any]:
        """Return `end` if it can be an end of the captured copy; raise otherwise."""
        if on_device:
            if not isinstance(end, CudaBuffer):
                raise TypeError(f"the {what} must be a buffer of this device, got {end!r}")
            if end.device is not self.device:
                raise ValueError(f"the {what} is on {end.device.name} (another open device)")
        elif not isinstance(end, np.ndarray):
            raise TypeError(f"the {what} must be a numpy array, got {end!r}")
        if end.nbytes != node.nbytes:
            raise ValueError(f"the {what} had {node.nbytes} bytes, the new one {end.nbytes}")
        return end

    def debug_dot(self) -> str:
        """Return the graph, as it was captured, in GraphViz's language."""
        self._check_open()
        verbose = door.driver.CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.dot"
            with self.device.context.current():
                call(door.driver.cuGraphDebugDotPrint, self._graph, str(path).encode(), verbose)
            return path.read_text()

    def close(self) -> None:
        """Destroy the graph and let go of what it kept alive, once it no longer runs."""
        with self._lock:
            self._launch = _closed
        if not self.device.closed:
            self._finalizer()
        self._kept, self._kernels, self._copies, self._hooks = [], [], [], []

    def __repr__(self) -> str:
        return (
            f"<graph of {len(self._kernels)} kernel launches and {len(self._copies)} copies on "
            f"{self.device.name}>"
        )


def _nth(nodes: list[Any], index: int, what: str) -> Any:
    if not 0 <= index < len(nodes):
        raise ValueError(f"the graph has {len(nodes)} {what}; index {index} is out of range")
    return nodes[index]


def snapshot(memory: Memory, array: NDArray[Any]) -> NDArray[Any]:
    """Return the bytes of `array`, copied to pinned memory."""
    copy = PinnedMemory(memory, array.nbytes).array()[: array.nbytes]
    copy[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return copy


def check_copy(dst: Buffer, src: Buffer) -> None:
    """Raise unless two buffers have the same size and do not overlap."""
    if dst.nbytes != src.nbytes:
        raise ValueError(f"sizes differ: {dst.nbytes} and {src.nbytes} bytes; slice one of them")
    if dst.address < src.address + src.nbytes and src.address < dst.address + dst.nbytes:
        raise ValueError("source and destination overlap; copy through a third buffer")
