"""The emulator: a `fp4rt.device.Device` that executes the kernels' own PTX in numpy, strictly.

It needs no GPU and no driver. It loads the PTX that nvcc emitted, takes the parameter bytes and
tensor maps that a GPU would take, and reports as an `EmulatorFault` what hardware forgives by luck:
accesses out of bounds, misaligned or of memory nobody wrote; data races on shared memory; missing
waits and fences; misuse of barriers and tensor cores; deadlock.

Layers: `ptx` (grammar; `lexer`, `records`, `spelling`) · `program` (every instruction decoded once
into a closure; `special`, `wrappers`, `dataflow`) · `machine` (scheduler; `warp`, `launch`,
`overlap`) · `memory`, `shared`, `clocks` (address spaces, checks, happens-before). The instruction
families register themselves: `control`, `alu`, `bits`, `compare`, `floats`, `convert`, `video`,
`load_store`, `stack`, `sync`, `warp_wide`, `cp_async`, `remote`, `matrix_load`, `wmma`, `mbarrier`,
`async_copy`, `tensor_core` and the `tcgen05` modules; `refused` says what is left out. `families`
imports them all.

What it does not see: data races on global memory (other than between kernels that overlap
programmatically), races between lanes of one warp (but schedule ``"random"`` lets them drift
apart, so that another warp may notice), register limits of ``setmaxnreg``, textures.
Blackwell's instructions follow the documentation only; nothing compared them with a GPU.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fp4rt import host
from fp4rt.device import (
    DeviceInfo,
    EmulatorFault,
    Event,
    Kernel,
    LaunchConfig,
    MemInfo,
    Module,
    TensorMap,
)

from . import ptx
from .families import encode_tensor_map
from .launch import Launch
from .machine import Machine
from .memory import Allocation
from .program import CODE_WINDOW, Program

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_100f", "sm_80", "sm_90", "sm_100")
RULES = (
    "uninitialised-local",
    "uninitialised-shared",
    "uninitialised-global",
    "uninitialised-registers",
    "unfenced-mbarrier-init",
    "unallocated-tmem",
    "unordered-tcgen05",
)
SCHEDULES = ("mixed", "random", "eager", "lazy")
SHARED_LIMIT = 227 * 1024
DEFAULT_SM_COUNT = 4


_parse = lru_cache(maxsize=16)(ptx.parse)  # a parsed module is not changed by its users


@lru_cache(maxsize=128)
def _program(text: str, entry: str, symbols: tuple[tuple[str, int], ...], arch: str) -> Program:
    """Decode an entry once for all devices where its variables have the same addresses."""
    return Program(_parse(text), entry, dict(symbols), arch)


class EmulatorMemory(host.HostMemory):
    """Device memory that the machine can address, with a flag for each byte ever written."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(0)
        self._machine = machine
        self._live: dict[int, Allocation] = {}

    def allocate(self, nbytes: int) -> host.Allocation:
        block = self._machine.memory.alloc(nbytes, f"buffer of {nbytes} bytes")
        self._live[block.base] = block
        self.used += nbytes
        return host.Allocation(block.base, block.data[:nbytes], block.valid[:nbytes].view(np.bool_))

    def free(self, allocation: host.Allocation) -> None:
        if allocation.closed:
            return
        allocation.closed = True
        self.used -= allocation.data.size
        block = self._live.pop(allocation.address)
        self._machine.memory.free(block)


class EmulatorKernel(Kernel):
    """An entry point of a PTX module."""

    def __init__(self, module: EmulatorModule, name: str) -> None:
        self.device = module.device
        self.module = module
        self.name = name
        program = self.program = _program(
            module.text, name, tuple(module.named_symbols.items()), module.device.arch
        )
        directives = program.entry.directives
        limit = directives.get("maxntid") or directives.get("reqntid")
        self.num_registers = int(directives.get("maxnreg", (0,))[0])
        self.local_bytes = program.local_bytes
        self.shared_bytes = program.static_shared
        self.max_threads = int(np.prod(limit)) if limit else 1024
        self.params_bytes = program.param_bytes
        self.required_block = directives.get("reqntid")
        self.required_cluster = directives.get("reqnctapercluster")


def _runs_on(target: str, arch: str) -> bool:
    """Whether PTX for `target` may run: plain ones on later architectures, others on their own."""
    found, own = re.fullmatch(r"sm_(\d+)([af]?)", target), re.match(r"sm_(\d+)", arch)
    if found is None or own is None:
        return False
    number, suffix = int(found[1]), found[2]
    return number == int(own[1]) if suffix else number <= int(own[1])


class EmulatorModule(Module):
    """A PTX module: its variables in device memory, its kernels decoded when asked for."""

    device: EmulatorDevice

    def __init__(self, device: EmulatorDevice, text: str) -> None:
        self.device = device
        self.text = text
        self.parsed = _parse(text)
        target = self.parsed.target
        if not _runs_on(target, device.arch):
            raise ValueError(
                f"the PTX is for {target or 'no architecture (it has no .target)'}, which does not "
                f"run on {device.arch}; load an image that was built for {device.arch}"
            )
        self._kernels: dict[str, EmulatorKernel] = {}
        self._blocks: list[Allocation] = []
        self.symbols: dict[str, int] = {}
        memory = device.machine.memory
        blocks: dict[str, Allocation] = {}
        for var in self.parsed.variables.values():
            if var.space not in ("global", "const"):
                continue
            if var.external:
                raise ValueError(f"PTX variable {var.name} is .extern: link the module first")
            block = memory.alloc(var.size, f"{var.space} variable {var.name}", valid=True)
            block.data[:] = 0
            self.symbols[var.name] = block.base
            blocks[var.name] = block
            self._blocks.append(block)
        functions = list(self.parsed.functions)
        for name, block in blocks.items():
            for at, size, value in self.parsed.variables[name].init:
                if isinstance(value, tuple):
                    target, addend, _ = value
                    if target in functions:
                        value = CODE_WINDOW + functions.index(target)
                    else:
                        value = self.symbols[target] + addend
                block.data[at : at + size] = np.frombuffer(
                    (value & ((1 << 8 * size) - 1)).to_bytes(size, "little"), np.uint8
                )
            block.readonly = self.parsed.variables[name].space == "const"
        # What only its declaration mentions, no code can name: though its address differs from load
        # to load, programs need not be decoded again.
        self.named_symbols = {n: at for n, at in self.symbols.items() if text.count(n) > 1}

    def kernel(self, name: str) -> EmulatorKernel:
        self.device.check_open()
        found = self._kernels.get(name)
        if found is None:
            function = self.parsed.functions.get(name)
            if function is None or not function.entry:
                names = [f.name for f in self.parsed.functions.values() if f.entry]
                raise ValueError(f"no kernel {name!r} in the module; it has {', '.join(names)}")
            found = self._kernels[name] = EmulatorKernel(self, name)
        return found

    def close(self) -> None:
        """Kernels keep working: nothing is unloaded before the module is unreachable."""


class EmulatorStream(host.HostStream):
    """A stream that finishes launched kernels before anything looks at their results."""

    device: EmulatorDevice

    def do(self, call: Callable[[], None]) -> None:
        with self.device.lock:
            if self._recording is None and not isinstance(call, host._Launch):
                self.device.flush()
            self.device.current_stream = self
            super().do(call)

    def record(self, *, timed: bool = False) -> host.HostEvent:
        self.device.flush()
        return super().record(timed=timed)

    def wait(self, event: Event) -> None:
        self.device.flush()
        super().wait(event)

    def synchronize(self) -> None:
        super().synchronize()
        self.device.flush()


class EmulatorDevice(host.HostDevice):
    """A `Device` that executes PTX in numpy.

    Parameters
    ----------
    arch
        ``"sm_90a"``, ``"sm_100a"`` or ``"sm_100f"``.
    seed
        Seed of the first schedule: in which order CTAs start (in half of the schedules by index,
        as hardware does it), warps run and asynchronous operations complete.
    seeds
        Number of schedules to try for each launch, with seeds ``seed``, ``seed + 1``, …: device
        memory is restored between tries, and the results of all tries must agree bit for bit.
    sm_count
        Number of multiprocessors. Few by default, so that persistent kernels take several turns.
    schedule
        When asynchronous operations complete: ``"random"`` times, ``"eager"`` (as soon as they
        may), ``"lazy"`` (when nothing else can run), or ``"mixed"``. With ``"random"`` the lanes
        of a warp also drift apart now and then, until something makes them wait for each other.
    race_check
        Report data races on shared memory.
    trace
        Record events for `chrome_trace`.
    hang_limit
        Instructions without progress that another warp could see after which a launch is hung.
    allow
        Rules to relax, by name: ``"uninitialised-local"``, ``"uninitialised-shared"`` and
        ``"uninitialised-global"`` let reads of memory that nobody wrote give poison instead of a
        fault (unoptimised code copies such bytes), ``"uninitialised-registers"`` likewise,
        ``"unfenced-mbarrier-init"`` lets asynchronous operations signal an mbarrier whose
        initialisation was not fenced.

    Examples
    --------
    >>> from fp4rt.emulator import EmulatorDevice
    >>> with EmulatorDevice("sm_90a", seeds=3) as dev:
    ...     dev
    <fp4rt device emulator:sm_90a (sm_90a, 4 SMs)>
    """

    image_kind = "ptx"

    def __init__(
        self,
        arch: str = "sm_90a",
        *,
        seed: int = 0,
        seeds: int = 1,
        sm_count: int = DEFAULT_SM_COUNT,
        schedule: str = "mixed",
        race_check: bool = True,
        trace: bool = False,
        hang_limit: int = 3_000_000,
        allow: frozenset[str] | set[str] = frozenset(),
    ) -> None:
        if arch not in ARCHITECTURES:
            raise ValueError(
                f"unknown architecture {arch!r}; use one of {', '.join(ARCHITECTURES)}"
            )
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}; use one of {', '.join(SCHEDULES)}")
        if set(allow) - set(RULES):
            raise ValueError(
                f"unknown rules {', '.join(sorted(set(allow) - set(RULES)))} in allow; there are "
                f"{', '.join(RULES)}"
            )
        if seeds < 1 or sm_count < 1:
            raise ValueError(f"seeds and sm_count must be at least 1, got {seeds} and {sm_count}")
        super().__init__(0)
        self.name = f"emulator:{arch}"
        self.arch = arch
        self.sm_count = sm_count
        self.seed, self.seeds = seed, seeds
        self.machine = Machine(
            sm_count,
            seed=seed,
            schedule=schedule,
            race_check=race_check,
            trace=trace,
            hang_limit=hang_limit,
            allow=frozenset(allow),
        )
        self.memory = EmulatorMemory(self.machine)
        self._stream = EmulatorStream(self)
        self.current_stream: host.HostStream = self._stream
        self._pending: list[tuple[EmulatorKernel, LaunchConfig, bytes]] = []
        self._pending_stream: host.HostStream | None = None
        self._freed_after: list[host.Allocation] = []  # once the waiting launches have run
        self.last_launches: list[Launch] = []

    def new_stream(self) -> EmulatorStream:
        self.check_open()
        return EmulatorStream(self)

    def load(self, image: bytes) -> EmulatorModule:
        self.check_open()
        if not isinstance(image, bytes | bytearray | memoryview):
            raise TypeError(f"an image is bytes, got {type(image).__name__}; use .encode()")
        if image[:4] == b"\x7fELF":
            raise ValueError("the image is a cubin; the emulator loads PTX")
        try:
            with self.lock:
                return EmulatorModule(self, bytes(image).rstrip(b"\0").decode())
        except UnicodeDecodeError:
            raise ValueError("the image is not PTX text") from None

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        encoded = encode_tensor_map(tensor_map, self.arch)
        if not self.holders(np.uint64(tensor_map.address).tobytes()):
            raise ValueError(
                f"tensor map: address {tensor_map.address:#x} is not memory of {self.name}: it is "
                "host memory or was freed; use a live buffer's address"
            )
        return encoded

    # -- launching

    def run_kernel(self, kernel: Kernel, config: LaunchConfig, params: bytes) -> None:
        assert isinstance(kernel, EmulatorKernel)
        self.check_launch(kernel, config)
        if not config.programmatic or self._pending_stream is not self.current_stream:
            self.flush()
        self._pending.append((kernel, config, params))
        self._pending_stream = self.current_stream
        if not any(
            ins.opcode == "griddepcontrol.launch_dependents" for ins in kernel.program.instructions
        ):
            self.flush()

    def check_launch(self, kernel: EmulatorKernel, config: LaunchConfig) -> None:
        """Raise ValueError if the launch is not legal."""
        threads = int(np.prod(config.block))
        if min(*config.grid, *config.block, *config.cluster) < 1:
            raise ValueError(f"grid, block and cluster must be positive: {config}")
        if threads > kernel.max_threads or config.block[2] > 64:
            raise ValueError(
                f"a block of {config.block} has {threads} threads; {kernel.name} allows "
                f"{kernel.max_threads}"
            )
        required = kernel.required_block
        if required and tuple(required) + (1,) * (3 - len(required)) != config.block:
            raise ValueError(f"{kernel.name} requires blocks of {required}, got {config.block}")
        cluster = kernel.required_cluster
        if cluster and tuple(cluster) + (1,) * (3 - len(cluster)) != config.cluster:
            raise ValueError(f"{kernel.name} requires clusters of {cluster}, got {config.cluster}")
        if any(g % c for g, c in zip(config.grid, config.cluster, strict=True)):
            raise ValueError(f"grid {config.grid} is no multiple of cluster {config.cluster}")
        if int(np.prod(config.cluster)) > 16:
            raise ValueError(f"cluster {config.cluster} has more than 16 CTAs")
        size = kernel.program.shared_size(config.shared_bytes)
        if config.shared_bytes < 0:
            raise ValueError(f"shared_bytes is {config.shared_bytes}; it must be at least 0")
        if size > SHARED_LIMIT:
            raise ValueError(f"{size} bytes of shared memory; a CTA may have {SHARED_LIMIT}")
        if config.grid[1] > 65535 or config.grid[2] > 65535 or config.grid[0] >= 2**31:
            raise ValueError(f"grid {config.grid} is too large")

    def free(self, allocation: host.Allocation) -> None:
        with self.lock:
            if self._pending:
                self._freed_after.append(allocation)
            else:
                super().free(allocation)

    def flush(self) -> None:
        """Finish every launch that waits for a programmatic successor."""
        with self.lock:
            try:
                self._flush()
            finally:
                freed, self._freed_after = self._freed_after, []
                for allocation in freed:
                    super().free(allocation)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        self._pending_stream = None
        if not pending:
            return
        saved = self._snapshot() if self.seeds > 1 else None
        first: Any = None
        for turn in range(self.seeds):
            if turn:
                self._restore(saved)
            self.machine.rng.seed(self.seed + turn)
            self._execute(pending, self.seed + turn)
            if self.seeds > 1:
                result = self._snapshot()
                if turn == 0:
                    first = result
                else:
                    self._compare(first, result, self.seed, self.seed + turn)

    def _execute(self, pending: list[Any], seed: int) -> None:
        launches: list[Launch] = []
        for kernel, config, params in pending:
            before = launches[-1] if launches else None
            launches.append(Launch(self.machine, kernel.program, config, params, before))
        self.last_launches = launches
        try:
            self.machine.execute(launches)
        except EmulatorFault as error:
            raise EmulatorFault(f"{error}\n  with seed={seed}") from None

    def _snapshot(self) -> list[tuple[Allocation, Any, Any]]:
        return [(a, a.data.copy(), a.valid.copy()) for a in self.machine.memory.allocations]

    def _restore(self, saved: Any) -> None:
        for block, data, valid in saved:
            block.data[:], block.valid[:] = data, valid

    def _compare(self, first: Any, second: Any, seed: int, other: int) -> None:
        for (block, a, _), (_, b, _) in zip(first, second, strict=True):
            if not np.array_equal(a, b):
                at = int((a != b).argmax())
                raise EmulatorFault(
                    f"results differ between schedules: byte {at} of {block.name} is {a[at]} with "
                    f"seed={seed} and {b[at]} with seed={other}; the kernel depends on timing"
                )

    # -- the rest of the seam

    def mem_info(self) -> MemInfo:
        total = 1 << 37
        return MemInfo(free=total - self.memory.used, total=total, held=0, used=self.memory.used)

    def synchronize(self) -> None:
        super().synchronize()
        self.flush()

    def close(self) -> None:
        if not self.closed:
            try:
                self.clear_attached()
                self.flush()
            finally:
                self.closed = True

    # -- eyes

    @property
    def counters(self) -> Counter[str]:
        """What the launches so far did: instructions by opcode, bytes, MMAs, conflicts."""
        return self.machine.counters

    @property
    def output(self) -> list[str]:
        """What the kernels printed, a string for each printf."""
        return self.machine.output

    def chrome_trace(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the event trace in Chrome's format (``chrome://tracing``), and write it."""
        from .trace import chrome_trace

        document = chrome_trace(self.machine.events)
        if path is not None:
            Path(path).write_text(json.dumps(document))
        return document


def open_device(index: str) -> EmulatorDevice:
    """Return an emulator for an architecture, ``"sm_90a"`` if none is named."""
    return EmulatorDevice(index or "sm_90a")


def list_devices() -> list[DeviceInfo]:
    """Return the architectures whose kernels can be emulated."""
    return [
        DeviceInfo(
            f"emulator:{arch}",
            True,
            f"PTX of {arch} in numpy, {DEFAULT_SM_COUNT} SMs",
            {"arch": arch},
        )
        for arch in ("sm_90a", "sm_100a")
    ]


__all__ = ["EmulatorDevice", "EmulatorFault", "list_devices", "open_device"]
