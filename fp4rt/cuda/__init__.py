"""The CUDA device: the seam of `fp4rt.device` on the CUDA driver API.

``driver`` is the only file that imports cuda.bindings. Importing this package touches no driver;
`list_devices` and `open_device` do, and say what is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4rt.cuda import driver
from fp4rt.device import ClosedError, DeviceInfo, DriverError

if TYPE_CHECKING:
    from fp4rt.cuda.device import CudaDevice


def open_device(index: str) -> CudaDevice:
    """Open GPU number `index` (empty means 0).

    Raises
    ------
    ValueError
        If it is no number, or there is no such GPU.
    DriverError
        If cuda-python, the driver or a GPU is missing; the message says which.
    """
    if index and not (index.isascii() and index.isdigit()):
        raise ValueError(f"a CUDA device is named 'cuda:N' with a number N, got 'cuda:{index}'")
    driver.init()
    ordinal = int(index or 0)
    count = driver.call(driver.driver.cuDeviceGetCount)
    if ordinal >= count:
        raise ValueError(
            f"there is no GPU number {ordinal}: this process sees {count}; "
            f"use 'cuda:0'{f' to cuda:{count - 1}' if count > 1 else ''}, or check "
            "CUDA_VISIBLE_DEVICES"
        )
    from fp4rt.cuda.device import CudaDevice

    return CudaDevice(ordinal)


def list_devices() -> list[DeviceInfo]:
    """Return every GPU, or one entry that says why there is none. Makes no context."""
    try:
        driver.init()
        count = driver.call(driver.driver.cuDeviceGetCount)
    except (DriverError, ClosedError) as error:
        return [DeviceInfo("cuda", False, str(error))]
    from fp4rt.cuda.device import gpu_facts

    found = []
    for ordinal in range(count):
        facts = gpu_facts(ordinal)
        detail = (
            f"{facts['name']}, {facts['arch']}, {facts['sm_count']} SMs, "
            f"{facts['memory_bytes'] / 2**30:.0f} GiB, driver for CUDA {facts['driver']}"
        )
        found.append(DeviceInfo(f"cuda:{ordinal}", True, detail, dict(facts)))
    return found
