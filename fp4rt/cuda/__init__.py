"""The CUDA device: the seam of `fp4rt.device` on the CUDA driver API.

``driver`` is the only file that imports cuda.bindings. Importing this package touches no driver;
`list_devices` and `open_device` do, and say what is missing.

What to know when other CUDA code runs in the same process:

- fp4rt uses the GPU's primary context, as the CUDA runtime and every library on it do. It leaves
  each thread's current context as it was.
- A dropped or closed buffer is freed behind all work that any of the device's streams had queued by
  then, and behind work that fp4rt queued on streams of other code. Memory that was handed to
  another library waits until the whole GPU has been idle. A buffer that another library shared is
  let go in the same order.
- A buffer of another library is ordered behind its producer on the stream given to
  ``Device.as_buffer``; other streams wait for an event of that one.
- Closing twice is harmless; use after closing raises `ClosedError`. Pinned arrays and exported
  buffers outlive their device.
- If other code resets the GPU (``cudaDeviceReset``), every handle is gone: close the device and
  open it again. After a kernel's illegal access nothing helps but a new process.
- After a fork, the child can't use CUDA if the parent did: every call raises `ClosedError`.
  Processes started by spawn can.
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
