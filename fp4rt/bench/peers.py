"""What fp4rt is compared with on a GPU: cuBLAS by way of CuPy, and PyTorch, where installed.

None of them is a dependency. Each peer gets copies of the operands that together exceed the L2
cache, and a graph that goes through them, as fp4rt's variants do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from fp4rt.bench.cupy_stream import LANES, Cupy
from fp4rt.bench.timing import Repeat, by_events, by_replay
from fp4rt.bench.workload import LAUNCHES, Operands, copies_of
from fp4rt.device import Device, Graph
from fp4rt.nvfp4 import dequantize

if TYPE_CHECKING:
    from numpy.typing import NDArray

FUSED = "dequantise + cuBLAS fp16"
PLAIN = "cuBLAS fp16"
SPREAD = f"cuBLAS fp16, {LANES} streams"
TORCH = "torch grouped_mm bf16"
FROM_NVFP4 = (FUSED,)
"""Peers that start from NVFP4 operands, as fp4rt does; the others had them dequantised before."""


class Peer(Protocol):
    """Something that computes the same products.

    Attributes
    ----------
    repeats
        What is timed, by name.
    """

    repeats: Mapping[str, Repeat]

    def wrong(self, name: str) -> str | None:
        """Run it over results filled with NaN; return what is wrong with them, or None."""

    def close(self) -> None:
        """Free its memory."""


def _copies(operands: Operands) -> int:
    """Copies of the operands, with 16 bits an element, that together exceed the L2 cache."""
    shapes = operands.shapes
    return copies_of(shapes, (shapes.rows + len(shapes.sizes) * shapes.n) * shapes.k * 2)


class CublasPeers:
    """cuBLAS in fp16, group by group.

    On operands dequantised beforehand, on one stream and spread over several; and dequantising
    followed by that.

    Parameters
    ----------
    cupy
        CuPy on the device.
    operands
        What is multiplied.
    """

    def __init__(self, cupy: Cupy, operands: Operands) -> None:
        self._cupy, self._operands = cupy, operands
        xp, shapes = cupy.np, operands.shapes
        groups = len(shapes.sizes)
        self._copies = _copies(operands)
        self._launches = math.ceil(LAUNCHES / self._copies) * self._copies
        ends = np.cumsum(shapes.sizes)
        self._spans = [
            (g, int(end) - m, int(end))
            for g, (end, m) in enumerate(zip(ends, shapes.sizes, strict=True))
            if m
        ]
        self._sets: list[tuple[Any, ...]] = []
        self._graphs: dict[str, Graph] = {}
        with cupy.on_stream():
            packed = [
                xp.asarray(part)
                for q in (operands.a, operands.b)
                for part in (q.values, q.scales.view(np.uint8))
            ]
            for _ in range(self._copies):
                weights = [xp.repeat(part[None], groups, axis=0) for part in packed[2:]]
                rows = [part.copy() for part in packed[:2]]
                dense_a = xp.empty((shapes.rows, shapes.k), xp.float16)
                dense_b = xp.empty((groups, shapes.n, shapes.k), xp.float16)
                d = xp.empty((shapes.rows, shapes.n), xp.float16)
                self._sets.append((rows, weights, dense_a, dense_b, d))
                self._decode(self._sets[-1])
        self._capture(FUSED, self._decode, self._multiply)
        self._capture(PLAIN, self._multiply)
        if len(self._spans) > 1:
            self._capture(SPREAD, self._multiply_spread)
        stream = cupy.device.stream
        self.repeats: Mapping[str, Repeat] = {
            name: by_replay(stream, graph, self._launches) for name, graph in self._graphs.items()
        }

    def _capture(self, name: str, *steps: Callable[[tuple[Any, ...]], None]) -> None:
        def work() -> None:
            for i in range(self._launches):
                for step in steps:
                    step(self._sets[i % self._copies])

        self._graphs[name] = self._cupy.capture(work)

    def _decode(self, arrays: tuple[Any, ...]) -> None:
        rows, weights, dense_a, dense_b, _ = arrays
        self._cupy.dequantize(rows[0], rows[1], dense_a)
        self._cupy.dequantize(weights[0], weights[1], dense_b)

    def _multiply(self, arrays: tuple[Any, ...]) -> None:
        for g, start, end in self._spans:
            self._group(arrays, g, start, end, 0)

    def _multiply_spread(self, arrays: tuple[Any, ...]) -> None:
        self._cupy.fork()
        for i, (g, start, end) in enumerate(self._spans):
            self._group(arrays, g, start, end, i % LANES)
        self._cupy.join()

    def _group(self, arrays: tuple[Any, ...], g: int, start: int, end: int, lane: int) -> None:
        _, _, dense_a, dense_b, d = arrays
        self._cupy.matmul(dense_a[start:end], dense_b[g], d[start:end], lane)

    def wrong(self, name: str) -> str | None:
        """Replay a graph over results filled with NaN; return what is wrong with it, or None."""
        with self._cupy.on_stream():
            for arrays in self._sets:
                arrays[-1].fill(np.nan)
        self._graphs[name].launch(self._cupy.device.stream)
        self._cupy.device.stream.synchronize()
        d: NDArray[np.float16] = self._cupy.np.asnumpy(self._sets[-1][-1])
        return self._operands.wrong(d, ulps=2)

    def close(self) -> None:
        """Free the graphs and the arrays."""
        for graph in self._graphs.values():
            graph.close()
        self._sets.clear()
        self._cupy.free()


def find_torch() -> Any:
    """Return PyTorch, or None if it isn't installed, has no grouped_mm, or finds no GPU."""
    try:
        torch = import_module("torch")
        return torch if _grouped_mm(torch) and torch.cuda.is_available() else None
    except Exception:  # as for CuPy
        return None


def _grouped_mm(torch: Any) -> Any:
    public = getattr(torch.nn.functional, "grouped_mm", None)
    return public or getattr(torch, "_grouped_mm", None)


class TorchPeer:
    """PyTorch's grouped_mm in bf16, on operands dequantised beforehand.

    Parameters
    ----------
    torch
        The module.
    device
        The device whose stream it runs on.
    operands
        What is multiplied; its values are exact in bf16.
    """

    def __init__(self, torch: Any, device: Device, operands: Operands) -> None:
        self._torch, self._operands = torch, operands
        ordinal, stream = int(device.name.partition(":")[2] or 0), device.stream
        handle: Any = stream
        self._gpu = torch.device("cuda", ordinal)
        self._stream = torch.cuda.ExternalStream(handle.__cuda_stream__()[1], device=self._gpu)
        shapes, multiply = operands.shapes, _grouped_mm(torch)
        groups, copies = len(shapes.sizes), _copies(operands)
        launches = math.ceil(LAUNCHES / copies) * copies
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._gpu), torch.cuda.stream(self._stream):
            ends = np.cumsum(shapes.sizes).astype(np.int32)
            self._ends = torch.from_numpy(ends).to(self._gpu)
            rows, weights = (self._dense(q) for q in (operands.a, operands.b))
            self._sets = [
                (rows.clone(), weights.expand(groups, *weights.shape).contiguous())
                for _ in range(copies)
            ]

            def work() -> list[Any]:
                return [
                    multiply(a, b.transpose(-2, -1), offs=self._ends)
                    for a, b in self._sets * (launches // copies)
                ]

            work()
            self._stream.synchronize()
            mode = {"capture_error_mode": "relaxed"}
            with torch.cuda.graph(self._graph, stream=self._stream, **mode):
                self._results = work()
        self.repeats: Mapping[str, Repeat] = {TORCH: by_events(stream, self._replay, launches)}

    def _dense(self, q: Any) -> Any:
        bits = dequantize(q, ml_dtypes.bfloat16).view(np.int16)
        return self._torch.from_numpy(bits).to(self._gpu).view(self._torch.bfloat16)

    def _replay(self) -> None:
        with self._torch.cuda.stream(self._stream):
            self._graph.replay()

    def wrong(self, name: str) -> str | None:
        """Replay the graph over results filled with NaN; return what is wrong with it, or None."""
        with self._torch.cuda.stream(self._stream):
            for result in self._results:
                result.fill_(math.nan)
            self._graph.replay()
            d: NDArray[np.float32] = self._results[-1].float().cpu().numpy()
        return self._operands.wrong(d, rounded=ml_dtypes.bfloat16, ulps=2)

    def close(self) -> None:
        """Free the graph and the arrays, and give PyTorch's cached memory back."""
        self._stream.synchronize()
        self._graph.reset()
        self._results.clear()
        self._sets.clear()
        self._torch.cuda.empty_cache()
