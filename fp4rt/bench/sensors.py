"""SM clock and power of a GPU while it works, through NVML, the driver's library, if present."""

from __future__ import annotations

import ctypes
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PERIOD = 0.06
"""Seconds between samples. The first of a window comes after one period: clocks settle."""

CLOCK_SM = 1
POWER_INSTANT = 186
"""NVML_CLOCK_SM and NVML_FI_DEV_POWER_INSTANT of nvml.h; the usual query averages over 1 s."""


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


@dataclass(frozen=True)
class Reading:
    """Medians over some windows: SM clock in MHz, power in watts, and how many samples."""

    clock: float
    power: float
    samples: int


class Nvml:
    """One GPU, as NVML sees it.

    Parameters
    ----------
    bus_id
        Its PCI bus id: NVML numbers GPUs in another order than CUDA may.
    library
        The loaded ``libnvidia-ml.so.1``; None loads it.

    Raises
    ------
    OSError
        If there is no NVML, or it doesn't know the GPU or can't say.
    """

    def __init__(self, bus_id: str, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        try:
            found = ctypes.byref(self._handle)
            self._call("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), found)
            self.sample()
        except OSError:
            self.close()
            raise

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise OSError(f"{name} failed with nvmlReturn_t {status}")

    def sample(self) -> tuple[float, float]:
        """Return SM clock in MHz and power in watts, now."""
        clock, power = ctypes.c_uint(), _FieldValue(POWER_INSTANT)
        self._call("nvmlDeviceGetClockInfo", self._handle, CLOCK_SM, ctypes.byref(clock))
        self._call("nvmlDeviceGetFieldValues", self._handle, 1, ctypes.byref(power))
        if power.status:
            raise OSError(f"the GPU doesn't say its power: nvmlReturn_t {power.status}")
        return float(clock.value), (power.value & 0xFFFFFFFF) / 1000

    def close(self) -> None:
        """Let NVML go."""
        self._library.nvmlShutdown()


class Sensors:
    """Samples a GPU in a thread of its own while `during` is entered.

    Parameters
    ----------
    gpu
        What is asked.
    """

    def __init__(self, gpu: Nvml) -> None:
        self._gpu = gpu
        self._samples: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Sample under this name until the context is left."""
        samples, done = self._samples.setdefault(name, []), threading.Event()

        def watch() -> None:
            while not done.wait(PERIOD):
                try:
                    samples.append(self._gpu.sample())
                except OSError:  # it can say no longer: what there is must do
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def reading(self, name: str) -> Reading | None:
        """Return the medians under a name and forget the samples; None if there were none."""
        found = self._samples.pop(name, [])
        if not found:
            return None
        clocks, powers = zip(*found, strict=True)
        return Reading(statistics.median(clocks), statistics.median(powers), len(found))

    def close(self) -> None:
        """Let NVML go."""
        self._gpu.close()


def open_sensors(bus_id: str) -> Sensors | None:
    """Return sensors of a GPU, or None where NVML can't read them."""
    try:
        return Sensors(Nvml(bus_id))
    except OSError:
        return None
