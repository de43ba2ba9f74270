"""What a GPU can do at most, timed in turn with what is judged by it.

With CuPy these are reading memory and cuBLAS's fp16 product of large matrices. Without it there is
a copy, from which reading is estimated, and a documented figure for the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fp4rt.bench.cupy_stream import Cupy
from fp4rt.bench.timing import Repeat, Timing, by_events, by_replay
from fp4rt.device import Device

DOCUMENTED_FLOPS = 717e12
"""Fp16 multiply-add rate of cuBLAS on an H200, 8192³ with NVFP4-valued data, power-limited."""
READ_PER_COPY = 4.6 / 4.31
"""Reading goes faster than copying by this, as measured on an H200."""
STREAM_BYTES = 2 << 30
MATMUL = 8192

COPY, READ, PRODUCT = "copy", "read", "fp16 matmul"
UNITS = {COPY: "TB/s", READ: "TB/s", PRODUCT: "TFLOP/s"}


@dataclass(frozen=True)
class Ceilings:
    """What the GPU did at most.

    Attributes
    ----------
    rates
        Bytes or FLOPs per second, by what was done: a `Timing` of rates, not of seconds.

    Examples
    --------
    >>> copied = Ceilings({"copy": Timing((4.31e12,))})
    >>> round(copied.bandwidth / 1e12, 3), copied.flops / 1e12
    (4.6, 717.0)
    """

    rates: Mapping[str, Timing]

    @property
    def bandwidth(self) -> float:
        """Bytes per second that can be read."""
        if READ in self.rates:
            return self.rates[READ].median
        return self.rates[COPY].median * READ_PER_COPY

    @property
    def flops(self) -> float:
        """FLOPs per second in fp16."""
        return self.rates[PRODUCT].median if PRODUCT in self.rates else DOCUMENTED_FLOPS

    def text(self) -> str:
        """Return lines for people: the rates with their spread, and the roofline they make."""
        lines = [
            f"ceiling: {name} {rate.median / 1e12:.4g} {UNITS[name]} "
            f"({rate.low / 1e12:.4g} – {rate.high / 1e12:.4g})"
            for name, rate in self.rates.items()
        ]
        read, flops = "measured here", "measured here, cuBLAS"
        if READ not in self.rates:
            read = f"{READ_PER_COPY:.3f} × the copy: CuPy is missing"
        if PRODUCT not in self.rates:
            flops = "documented for an H200, not measured here: CuPy is missing"
        lines.append(
            f"roofline: the longer of bytes / {self.bandwidth / 1e12:.3f} TB/s ({read}) "
            f"and FLOPs / {self.flops / 1e12:.0f} TFLOP/s ({flops})"
        )
        return "\n".join(lines)


def pooled(found: Iterable[Ceilings]) -> Ceilings:
    """Return ceilings with the windows of all that are given.

    Examples
    --------
    >>> pooled([Ceilings({"copy": Timing((1.0,))}), Ceilings({"copy": Timing((3.0,))})])
    Ceilings(rates={'copy': Timing(windows=(1.0, 3.0))})
    """
    windows: dict[str, tuple[float, ...]] = {}
    for ceilings in found:
        for name, rate in ceilings.rates.items():
            windows[name] = windows.get(name, ()) + rate.windows
    return Ceilings({name: Timing(rates) for name, rates in windows.items()})


class CeilingWork:
    """The work that shows what the GPU can do at most.

    Parameters
    ----------
    device
        A device with memory of its own.
    cupy
        CuPy on it, or None.
    """

    def __init__(self, device: Device, cupy: Cupy | None) -> None:
        self.repeats: dict[str, Repeat] = {}
        self._cupy = cupy
        self._amounts = {
            COPY: 2.0 * STREAM_BYTES,
            READ: 1.0 * STREAM_BYTES,
            PRODUCT: 2.0 * MATMUL**3,
        }
        self._kept: list[Any] = []
        stream = device.stream
        if cupy is None:
            source, target = (device.alloc(STREAM_BYTES) for _ in range(2))
            stream.fill(source, 0x55)
            self._kept = [source, target]
            self.repeats[COPY] = by_events(stream, lambda: stream.copy(target, source))
            return
        xp = cupy.np
        with cupy.on_stream():
            data, sink = xp.zeros(STREAM_BYTES, xp.uint8), xp.zeros(1, xp.uint32)
            square = []
            for _ in range(2):
                codes = xp.random.randint(0, 256, (MATMUL, MATMUL // 2), xp.uint8)
                scales = xp.random.randint(0x28, 0x40, (MATMUL, MATMUL // 16), xp.uint8)
                square.append(xp.empty((MATMUL, MATMUL), xp.float16))
                cupy.dequantize(codes, scales, square[-1])
            product = xp.empty((MATMUL, MATMUL), xp.float16)
        reading = cupy.capture(lambda: cupy.read_all(data, sink))
        multiplying = cupy.capture(lambda: cupy.matmul(square[0], square[1], product))
        self._kept = [reading, multiplying, data, sink, square, product]
        self.repeats[PRODUCT] = by_replay(stream, multiplying)
        self.repeats[READ] = by_replay(stream, reading)

    def rates(self, times: Mapping[str, Timing]) -> Ceilings:
        """Return the ceilings that the times of `repeats` stand for."""
        return Ceilings(
            {
                name: Timing(
                    tuple(self._amounts[name] / seconds for seconds in times[name].windows)
                )
                for name in self.repeats
            }
        )

    def close(self) -> None:
        """Free the memory."""
        self.repeats.clear()
        for thing in self._kept[:2]:  # fp4rt's own: buffers, or graphs
            thing.close()
        self._kept.clear()
        if self._cupy is not None:
            self._cupy.free()
