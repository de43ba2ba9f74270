"""SM clock and power of a GPU while something runs, read with nvidia-smi where it is installed."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass

PERIOD_MS = 250
"""Each query takes locks of the driver's, so not too often."""


@dataclass(frozen=True)
class Reading:
    """Medians over a span of time: SM clock in MHz, power in watts, and how many samples."""

    clock: float
    power: float
    samples: int


class Sensors:
    """Samples clock and power in the background until it is closed.

    Parameters
    ----------
    ordinal
        Of the CUDA device. (With GPUs of several kinds, CUDA and nvidia-smi number them alike only
        under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.)
    """

    def __init__(self, ordinal: int) -> None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        gpu = visible[ordinal] if ordinal < len(visible) else str(ordinal)
        self._samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        query = "--query-gpu=clocks.sm,power.draw"
        command = ["nvidia-smi", "-i", gpu, query, "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen(
                [*command, "-lms", str(PERIOD_MS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:  # not installed: there is nothing to read
            return
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            try:
                clock, power = (float(part) for part in line.split(","))
            except ValueError:  # "[N/A]": this GPU doesn't say
                continue
            self._samples.append((time.monotonic(), clock, power))

    def since(self, start: float) -> Reading | None:
        """Return medians since `start` of `time.monotonic`; None if there is no sample."""
        found = [(clock, power) for at, clock, power in self._samples if at >= start]
        if not found:
            return None
        clocks, powers = zip(*found, strict=True)
        return Reading(statistics.median(clocks), statistics.median(powers), len(found))

    def close(self) -> None:
        """Stop sampling."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
