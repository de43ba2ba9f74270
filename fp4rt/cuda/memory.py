"""Device memory, pinned memory, and the order in which both are let go.

Memory may be dropped while kernels that use it still wait in a stream, and a finalizer may run in
any thread at any time. So nothing is freed on the spot:

- Allocations come from a pool of the driver, on a stream of their own that is always empty, and
  only from memory that the GPU has finished with. A new buffer can be used on any stream at once.
- What is dropped goes to the graveyard. From there it is freed on a second stream, which first
  waits for an event of every stream that has had work since the last time. So a buffer is reused
  only after all work that was queued before it was dropped.
- What other libraries have been given through DLPack may be in use on streams that fp4rt doesn't
  know. It is freed only after the whole GPU has been idle.
- Some memory is wanted again and again on one stream, such as results. When it is dropped, it is
  spared for a while, and taken again by the same stream if no other one has unfinished work.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.cuda import driver as door
from fp4rt.cuda.driver import Context, call, quiet, relaxed, wait_for
from fp4rt.cuda.staging import Staging
from fp4rt.device import ClosedError, DriverError, MemInfo, OutOfMemoryError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CACHE_BYTES = 1 << 30
"""Freed memory beyond this goes back to the driver at the next synchronisation."""

SPARE_COUNT, SPARE_BYTES = 8, 128 << 20
"""Most dropped memory that waits to be taken again."""

QUARANTINE_COUNT, QUARANTINE_BYTES = 64, 256 << 20
"""Dropped memory that other libraries had; beyond this, an allocation first waits for the GPU."""


class StreamState:
    """What clean-up has to know about a stream, apart from the object that users hold.

    Attributes
    ----------
    handle
        The driver's stream.
    dirty
        Whether work was queued that the free stream does not wait for yet.
    event
        Marks the work to wait for.
    recording
        The capture that the stream takes part in, or None.
    direct
        Whether work runs as soon as it is queued and `dirty` keeps track of it: not during a
        capture, and not on a stream of other code.
    key
        An object for as long as the stream is open, then None. Launches prepared for the stream
        hold it too, so one comparison tells whether they still apply.
    """

    __slots__ = ("direct", "dirty", "event", "handle", "key", "recording")

    def __init__(self, handle: Any, *, foreign: bool = False) -> None:
        self.handle = handle
        self.dirty = False
        self.direct = not foreign
        self.key: object | None = object()
        self.event = call(
            door.driver.cuEventCreate, door.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        )
        self.recording: Any = None


class Block:
    """An address range of the pool; `again` means to spare it when it is dropped."""

    __slots__ = ("address", "again", "exported", "key", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.exported = self.again = False
        self.key = 0


class Allocation:
    """A range of device memory, let go when the last reference to this object goes away.

    Attributes
    ----------
    address, nbytes
        The range.
    readonly
        Whether its owner forbids writing.
    block
        The pool's record of it; None for memory that another library owns.
    """

    __slots__ = ("__weakref__", "address", "block", "nbytes", "readonly")

    def __init__(self, address: int, nbytes: int, readonly: bool = False) -> None:
        self.address = address
        self.nbytes = nbytes
        self.readonly = readonly
        self.block: Block | None = None


class _Hold:
    """Keeps another library's array alive until it is called."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def __call__(self) -> None:
        self.owner = None


class Memory:
    """The memory of one device, and the streams that may be using it.

    Parameters
    ----------
    context
        The GPU's primary context.
    name
        The device's name, for messages.
    """

    # Attributes that other modules use: `pinned`, addresses of page-locked memory in use, and
    # `owned`, what destroys graphs and modules, for those that are left when the device is closed.

    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.name = name
        self.closed = False
        self._abandoned = False
        self.pinned: set[int] = set()
        self.owned: set[Callable[[], None]] = set()
        self.staging = Staging(self)
        self._lock = threading.Lock()
        self._graveyard: deque[Block | Callable[[], None]] = deque()
        self._spare: list[Block] = []  # only touched under the lock
        self._joined = False  # whether the free stream may be waiting for others
        self._quarantine: list[Block] = []
        self._waiting: deque[tuple[Any, list[Callable[[], None]]]] = deque()
        self._streams: set[StreamState] = set()
        self._live: dict[int, weakref.ref[Allocation]] = {}
        self._blocks: dict[int, Block] = {}
        self._next_key = 0
        self._ranges: tuple[NDArray[np.uint64], NDArray[np.uint64], list[int]] | None = None
        cu = door.driver
        with context.current():
            self.total = int(call(cu.cuMemGetInfo)[1])
            flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._alloc_stream = call(cu.cuStreamCreate, flags)
            self._free_stream = call(cu.cuStreamCreate, flags)
            self._fence = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            # For copies that are complete on return, whatever the user's streams are doing.
            self._loader = StreamState(call(cu.cuStreamCreate, flags))
            self._reader = StreamState(call(cu.cuStreamCreate, flags))
            self._streams.update((self._loader, self._reader))
            props = cu.CUmemPoolProps()
            props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            props.location.id = context.ordinal
            self._pool = call(cu.cuMemPoolCreate, props)
            attribute = cu.CUmemPool_attribute
            # Never make an allocation wait for a free: take other memory instead.
            for name_, value in (
                ("CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES", cu.cuuint64_t(0)),
                ("CU_MEMPOOL_ATTR_RELEASE_THRESHOLD", cu.cuuint64_t(CACHE_BYTES)),
            ):
                call(cu.cuMemPoolSetAttribute, self._pool, getattr(attribute, name_), value)

    # Allocation

    def allocate(self, nbytes: int) -> Allocation:
        """Return `nbytes` of device memory, usable on any stream at once.

        Raises
        ------
        OutOfMemoryError
            If there is not enough, even after everything unused was collected.
        """
        if nbytes == 0:
            return Allocation(0, 0)
        with self._lock:
            self._check_open()
            if nbytes > self.total:
                raise self._out_of_memory(nbytes)
            with self.context.current():
                if self._graveyard or self._waiting:
                    self._bury()
                if self._quarantine and (
                    len(self._quarantine) > QUARANTINE_COUNT
                    or sum(block.nbytes for block in self._quarantine) > QUARANTINE_BYTES
                ):
                    self._end_quarantine()
                address = self._take(nbytes)
                if address is None:
                    gc.collect()
                    self._reclaim()
                    address = self._take(nbytes)
                if address is None:
                    call(door.driver.cuMemPoolTrimTo, self._pool, 0)  # the attempt may leave some
                    raise self._out_of_memory(nbytes)
            return self._allocation(Block(address, nbytes))

    def _allocation(self, block: Block) -> Allocation:
        allocation = Allocation(block.address, block.nbytes)
        allocation.block = block
        block.key = self._register(allocation)
        self._blocks[block.key] = block
        weakref.finalize(allocation, self._drop, block).atexit = False
        return allocation

    def allocate_again(self, nbytes: int, state: StreamState) -> Allocation | None:
        """Return memory that was dropped lately, for a stream that will use it first; or None.

        None if there is none of that size, or if another stream may have used it and not be done.
        """
        if not (self._spare and state.direct):
            return None
        with self._lock:
            self._check_open()
            for block in reversed(self._spare):
                if block.nbytes == nbytes:
                    break
            else:
                return None
            if not self._alone(state):
                return None
            self._spare.remove(block)
            del self._blocks[block.key]
            return self._allocation(block)

    def keep_when_dropped(self, allocation: Allocation) -> None:
        """Spare this memory when it is dropped, for `allocate_again`."""
        if allocation.block is not None:
            allocation.block.again = True

    def _alone(self, state: StreamState) -> bool:
        """Whether no other stream has unfinished work."""
        for other in self._streams:
            if other.dirty and other is not state:
                return False
        if self._joined:  # some may have been dirty before: the free stream waits for them
            with self.context.current():
                self._joined = bool(door.driver.cuStreamQuery(self._free_stream)[0])
        return not self._joined

    def adopt(self, address: int, nbytes: int, owner: object, readonly: bool) -> Allocation:
        """Return another library's memory as an allocation that keeps `owner` alive."""
        allocation = Allocation(address, nbytes, readonly)
        with self._lock:
            self._check_open()
            hold = _Hold(owner)
            key = self._register(allocation)
        finalizer = weakref.finalize(allocation, self._let_go, key, hold)
        finalizer.atexit = False
        return allocation

    def _register(self, allocation: Allocation) -> int:
        self._next_key += 1
        self._live[self._next_key] = weakref.ref(allocation)
        self._ranges = None
        return self._next_key

    def _drop(self, block: Block) -> None:
        self._live.pop(block.key, None)
        self._ranges = None
        if not (block.again and self._spared(block)):
            self.retire(block)

    def _spared(self, block: Block) -> bool:
        """Keep a dropped block for `allocate_again`, if that can be done without waiting."""
        if block.exported or door.forked or not self._lock.acquire(blocking=False):
            return False
        try:
            if self.closed:
                return False
            self._spare.append(block)
            total = 0
            for each in self._spare:
                total += each.nbytes
            while len(self._spare) > SPARE_COUNT or total > SPARE_BYTES:
                oldest = self._spare.pop(0)
                total -= oldest.nbytes
                self._graveyard.append(oldest)
        finally:
            self._lock.release()
        if self._graveyard:
            self.collect()
        return True

    def _spare_nothing(self) -> None:
        self._graveyard.extend(self._spare)
        self._spare.clear()

    def _let_go(self, key: int, hold: _Hold) -> None:
        self._live.pop(key, None)
        self._ranges = None
        self.retire(hold)

    def _take(self, nbytes: int) -> int | None:
        cu = door.driver
        code, address = cu.cuMemAllocFromPoolAsync(nbytes, self._pool, self._alloc_stream)
        if code == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return None
        if code:
            raise door.failure(cu.cuMemAllocFromPoolAsync, code)
        call(cu.cuStreamSynchronize, self._alloc_stream)
        return int(address)

    def _out_of_memory(self, nbytes: int) -> OutOfMemoryError:
        with self.context.current():
            info = self._info()
        error = OutOfMemoryError(
            f"out of memory on {self.name}: asked for {nbytes:,} bytes; {info.free:,} of "
            f"{info.total:,} are free, fp4rt's buffers use {info.used:,} and its cache holds "
            f"{info.held:,} more; close buffers and plans that are no longer needed, make the "
            "problem smaller, or free memory that other libraries hold"
        )
        error.code = "CUDA_ERROR_OUT_OF_MEMORY"
        return error

    def holders(self, params: bytes) -> list[Allocation]:
        """Return the allocations that 8-byte words of `params` point into."""
        words = np.frombuffer(params, np.uint64, len(params) // 8)
        with self._lock:
            ranges = self._ranges  # a finalizer may reset it at any time
            if ranges is None:
                found = [(key, ref()) for key, ref in self._live.copy().items()]
                spans = sorted((a.address, a.address + a.nbytes, k) for k, a in found if a)
                ranges = self._ranges = (
                    np.array([s[0] for s in spans], np.uint64),
                    np.array([s[1] for s in spans], np.uint64),
                    [s[2] for s in spans],
                )
            starts, ends, keys = ranges
            if not keys:
                return []
            index = np.searchsorted(starts, words, "right") - 1
            inside = (index >= 0) & (words < ends[index])
            refs = [self._live.get(keys[i]) for i in np.unique(index[inside])]
        return [a for a in (ref() for ref in refs if ref is not None) if a is not None]

    # Letting go

    def retire(self, item: Block | Callable[[], None]) -> None:
        """Free a block, or call a function, once the GPU is past all work queued so far.

        For finalizers: never raises, never blocks, works in any thread.
        """
        if door.forked:
            return
        self._graveyard.append(item)
        self.collect()

    def collect(self) -> None:
        """Free what can be freed without waiting."""
        if not self._lock.acquire(blocking=False):
            return  # whoever has the lock, or comes next, does it
        try:
            if self.closed:
                self._bury_late()
            else:
                with self.context.current():
                    self._bury()
        except (DriverError, ClosedError):
            pass  # clean-up never raises; a broken context has nothing left to free
        finally:
            self._lock.release()
        if self._abandoned:
            self.close()

    def _bury(self) -> None:
        cu = door.driver
        dropped: list[Block | Callable[[], None]] = []
        while self._graveyard:
            dropped.append(self._graveyard.popleft())
        if dropped:
            self._join()  # only now: other threads may have queued work and dropped its memory
        later: list[Callable[[], None]] = []
        for item in dropped:
            if not isinstance(item, Block):
                later.append(item)
            elif item.exported:
                self._quarantine.append(item)
            else:
                self._free(item)
        if later:
            event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            quiet(cu.cuEventRecord, event, self._free_stream)
            self._waiting.append((event, later))
        not_ready = cu.CUresult.CUDA_ERROR_NOT_READY
        while self._waiting and cu.cuEventQuery(self._waiting[0][0])[0] != not_ready:
            event, later = self._waiting.popleft()
            quiet(cu.cuEventDestroy, event)
            for action in later:
                action()

    def _free(self, block: Block) -> None:
        self._blocks.pop(block.key, None)
        quiet(door.driver.cuMemFreeAsync, block.address, self._free_stream)

    def _join(self) -> None:
        """Let the free stream wait for everything that was queued so far."""
        cu = door.driver
        for state in self._streams:
            if state.dirty and state.recording is None:
                state.dirty = False  # first, so that work queued meanwhile marks it again
                self._joined = True
                quiet(cu.cuEventRecord, state.event, state.handle)
                quiet(cu.cuStreamWaitEvent, self._free_stream, state.event, 0)

    def _end_quarantine(self) -> None:
        if any(state.recording is not None for state in self._streams):
            return  # the GPU can't be synchronised during a capture
        with relaxed():
            (code,) = door.driver.cuCtxSynchronize()
        if not code:
            for block in self._quarantine:
                self._free(block)
            self._quarantine.clear()

    def _reclaim(self) -> None:
        """Free everything that is unused, waiting for it."""
        self._spare_nothing()
        self._bury()
        if self._quarantine:
            self._end_quarantine()
        wait_for(door.driver.cuStreamQuery, self._free_stream)
        call(door.driver.cuStreamSynchronize, self._free_stream)
        self._bury()
        call(door.driver.cuMemPoolTrimTo, self._pool, 0)

    def _bury_late(self) -> None:
        """Free what outlived `close`: arrays in pinned memory, and what other libraries kept."""
        if not (self.pinned or self._blocks):
            while self._graveyard:
                item = self._graveyard.popleft()
                if not isinstance(item, Block):
                    item()
            return
        with self.context.current():
            while self._graveyard:
                item = self._graveyard.popleft()
                if not isinstance(item, Block):
                    item()
                elif self._blocks.pop(item.key, None) is not None:
                    quiet(door.driver.cuCtxSynchronize)
                    quiet(door.driver.cuMemFree, item.address)
        if not (self.pinned or self._blocks):
            self.context.release()

    # Streams

    def add_stream(self, state: StreamState) -> None:
        """Take a stream's work into account from now on."""
        with self._lock:
            self._streams.add(state)

    def remove_stream(self, state: StreamState) -> None:
        """Forget and destroy a stream; its queued work still runs."""
        self.retire(_RemoveStream(self, state))

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Hold the streams still, with all of their work ordered before later frees."""
        with self.context.current(), self._lock:
            self._check_open()
            self._join()
            yield

    def order(self, handle: Any) -> None:
        """Let the stream `handle` wait for everything that was queued on any stream.

        That is what the free stream waits for, so it is enough to wait for the free stream.
        """
        cu = door.driver
        with self._lock:
            self._check_open()
            self._join()
            call(cu.cuEventRecord, self._fence, self._free_stream)
            call(cu.cuStreamWaitEvent, handle, self._fence, 0)

    def follow(self, state: StreamState) -> None:
        """Order later frees behind a stream that is not fp4rt's, right after its use."""
        with self._lock:
            self._joined = True
            quiet(door.driver.cuEventRecord, state.event, state.handle)
            quiet(door.driver.cuStreamWaitEvent, self._free_stream, state.event, 0)

    def drain(self) -> None:
        """Wait on the host for everything that was queued on any stream."""
        cu = door.driver
        with self.context.current():
            with self._lock:
                self._check_open()
                self._join()
                event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
                quiet(cu.cuEventRecord, event, self._free_stream)
            try:
                wait_for(cu.cuEventQuery, event)
            finally:
                quiet(cu.cuEventDestroy, event)
        self.collect()

    def recordings(self) -> list[Any]:
        """Return the captures that are going on."""
        return [s.recording for s in list(self._streams) if s.recording is not None]

    # The whole

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"device {self.name} is closed; open it again with fp4rt.device")

    def _info(self) -> MemInfo:
        cu = door.driver
        free, total = call(cu.cuMemGetInfo)
        attribute = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        reserved = int(call(cu.cuMemPoolGetAttribute, self._pool, attribute))
        used = sum(block.nbytes for block in self._blocks.values())
        used -= sum(block.nbytes for block in self._quarantine)  # nobody's any more, but held
        return MemInfo(free=free, total=total, held=max(reserved - used, 0), used=used)

    def info(self) -> MemInfo:
        """Return how much memory there is and who has it."""
        with self._lock, self.context.current():
            self._check_open()
            self._spare_nothing()
            self._bury()
            return self._info()

    def load(self, address: int, data: NDArray[np.uint8], *, pinned: bool) -> None:
        """Copy flat `data` into memory that no stream uses yet, complete on return."""
        with self._complete(self._loader) as stream:
            if pinned:
                where = data.__array_interface__["data"][0]
                call(door.driver.cuMemcpyHtoDAsync, address, where, data.size, stream)
            else:
                self.staging.upload([(address, data)], stream)

    def read(self, data: NDArray[np.uint8], address: int, *, pinned: bool) -> None:
        """Copy into flat `data` after all queued work, complete on return."""
        with self._complete(self._reader) as stream:
            self.order(stream)
            if pinned:
                where = data.__array_interface__["data"][0]
                call(door.driver.cuMemcpyDtoHAsync, where, address, data.size, stream)
            else:
                self.staging.download(data, address, stream)

    @contextmanager
    def _complete(self, state: StreamState) -> Iterator[Any]:
        with self.context.current():
            try:
                yield state.handle
                wait_for(door.driver.cuStreamQuery, state.handle)
            except BaseException:
                state.dirty = True  # interrupted: what is dropped now must wait for the copy
                raise

    def trim(self) -> None:
        """Wait for dropped memory to come free, and give the cache back to the driver."""
        with self._lock, self.context.current():
            self._check_open()
            self._reclaim()

    def abandon(self) -> None:
        """Close, for a finalizer, which may run while this very thread holds the lock."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.close()
        else:
            self._abandoned = True  # `collect`, the only one who can hold it then, closes

    def close(self) -> None:
        """Free everything and let go of the context.

        Arrays in pinned memory and buffers that other libraries have stay valid; the context goes
        with the last of them.
        """
        cu = door.driver
        with self._lock:
            if self.closed or door.forked:
                return
            with self.context.current():
                with suppress(DriverError, ClosedError):
                    self._reclaim()
                self.closed = True
                for destroy in list(self.owned):
                    destroy()
                self.staging.close()
                for event, later in self._waiting:
                    quiet(cu.cuEventDestroy, event)
                    self._graveyard.extend(later)
                self._waiting.clear()
                for block in list(self._blocks.values()):
                    if not block.exported:
                        self._free(block)
                for state in self._streams:
                    state.key = None
                    quiet(cu.cuEventDestroy, state.event)
                    quiet(cu.cuStreamDestroy, state.handle)
                self._streams.clear()
                quiet(cu.cuEventDestroy, self._fence)
                quiet(cu.cuMemPoolDestroy, self._pool)
                quiet(cu.cuStreamDestroy, self._alloc_stream)
                quiet(cu.cuStreamDestroy, self._free_stream)
            guests = bool(self.pinned or self._blocks)
            self._bury_late()
            if not guests:
                self.context.release()


class _RemoveStream:
    """Destroys a stream whose work was already joined."""

    __slots__ = ("_memory", "_state")

    def __init__(self, memory: Memory, state: StreamState) -> None:
        self._memory = memory
        self._state = state

    def __call__(self) -> None:
        if self._state in self._memory._streams:
            self._memory._streams.discard(self._state)
            quiet(door.driver.cuEventDestroy, self._state.event)
            quiet(door.driver.cuStreamDestroy, self._state.handle)
