"""Benchmarks of the kernels: every variant that takes a problem, its peers, and the ceilings.

A sample of each result is checked first. What is timed are replays of graphs whose launches go
through copies of the operands that together exceed the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

from fp4rt import progress
from fp4rt.bench.ceilings import CeilingWork
from fp4rt.bench.cupy_stream import Cupy, find_cupy
from fp4rt.bench.peers import CublasPeers, Peer, TorchPeer, find_torch
from fp4rt.bench.report import Result, SetResult
from fp4rt.bench.sensors import Sensors
from fp4rt.bench.timing import Repeat, interleaved
from fp4rt.bench.workload import Operands, Rotation, Shapes, check, upload_copies
from fp4rt.choice import candidates, short_name
from fp4rt.device import Device

PeerMaker = Callable[[Operands], Peer]


@dataclass(frozen=True)
class Libraries:
    """What is installed to compare with.

    Attributes
    ----------
    cupy
        CuPy on the device, or None.
    peers
        What makes each peer for a problem, by the library's name.
    versions
        Of the libraries, or why one can't be used.
    """

    cupy: Cupy | None
    peers: Mapping[str, PeerMaker]
    versions: Mapping[str, str]

    def close(self) -> None:
        """Let go of what they hold on the device."""
        if self.cupy is not None:
            self.cupy.close()


def find_libraries(dev: Device, *, peers: bool = True) -> Libraries:
    """Return what is installed and works with a device; without peers, what ceilings need."""
    cupy: Cupy | None = None
    makers: dict[str, PeerMaker] = {}
    versions: dict[str, str] = {}
    if (module := find_cupy()) is not None:
        versions["CuPy"] = module.__version__
        try:
            cupy = opened = Cupy(dev, module)
            makers["CuPy"] = lambda operands: CublasPeers(opened, operands)
        except Exception as error:  # whatever is wrong with it, fp4rt can be timed
            versions["CuPy"] += f" (does not work: {error})"
    if peers and (torch := find_torch()) is not None:
        versions["PyTorch"] = torch.__version__
        makers["PyTorch"] = lambda operands: TorchPeer(torch, dev, operands)
    return Libraries(cupy, makers if peers else {}, versions)


def bench_kernels(
    dev: Device,
    sets: Sequence[Shapes],
    libraries: Libraries,
    *,
    seconds: float = 0.3,
    windows: int = 3,
    sensors: Sensors | None = None,
) -> Iterator[SetResult]:
    """Time every variant that takes each problem, the peers, and the ceilings, in turn.

    Parameters
    ----------
    dev
        A device with kernels.
    sets
        The problems.
    libraries
        What to compare with.
    seconds, windows
        Length of a window, and how many of each thing are timed.
    sensors
        Sensors of the device.

    Raises
    ------
    WrongResultError
        If a sample of a variant's result isn't right. (A peer's that isn't is only noted.)
    """
    ceilings = CeilingWork(dev, libraries.cupy)
    try:
        for number, shapes in enumerate(sets):
            progress.show(f"{shapes.name} ({number + 1} of {len(sets)}): {shapes.describe()}")
            yield _bench_set(dev, shapes, libraries.peers, ceilings, seconds, windows, sensors)
    finally:
        ceilings.close()


def _bench_set(
    dev: Device,
    shapes: Shapes,
    makers: Mapping[str, PeerMaker],
    ceilings: CeilingWork,
    seconds: float,
    windows: int,
    sensors: Sensors | None,
) -> SetResult:
    operands = Operands.random(shapes)
    with ExitStack() as opened:
        opened.callback(dev.trim)
        variants: dict[str, Rotation] = {}
        copies = upload_copies(dev, operands)
        for weights in copies:
            opened.callback(weights.close)
        for choice in candidates(dev.arch, dev.sm_count, shapes.problem):
            name = short_name(choice.variant)
            rotation = variants[name] = Rotation(dev, operands, choice, copies)
            opened.callback(rotation.close)
            check(rotation.wrong(), shapes, name)
        peers, notes = _open_peers(makers, operands, opened)
        compared = {**{name: variants[name].repeat for name in variants}, **peers}
        around = sensors.during if sensors else nullcontext
        times = interleaved({**compared, **ceilings.repeats}, seconds, windows, around)
        for name, rotation in variants.items():
            check(rotation.wrong(), shapes, f"{name}, after timing,")
    results = (
        Result(
            name,
            "variant" if name in variants else "peer",
            times[name],
            shapes.nvfp4_bytes,
            shapes.flops,
            name == next(iter(variants)),
            sensors.reading(name) if sensors else None,
        )
        for name in compared
    )
    return SetResult(shapes, tuple(results), ceilings.rates(times), tuple(notes))


def _open_peers(
    makers: Mapping[str, PeerMaker], operands: Operands, opened: ExitStack
) -> tuple[dict[str, Repeat], list[str]]:
    """Return what is timed of the peers that work and are right, and a note on the others."""
    repeats: dict[str, Repeat] = {}
    notes = []
    for library, make in makers.items():
        try:
            peer = make(operands)
        except Exception as error:  # other people's code: whatever it is, the rest can be timed
            notes.append(f"{library} is left out: {type(error).__name__}: {error}")
            continue
        opened.callback(peer.close)
        for name, repeat in peer.repeats.items():
            wrong = peer.wrong(name)
            if wrong is None:
                repeats[name] = repeat
            else:
                notes.append(f"{name} is wrong, so it isn't timed: {wrong}")
    return repeats, notes
