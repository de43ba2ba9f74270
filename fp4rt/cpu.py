"""The cpu device: host memory and no kernels; grouped GEMM runs on BLAS (`fp4rt.blas`)."""

from __future__ import annotations

import os
import platform

from fp4rt.device import DeviceInfo, Kernel, LaunchConfig, Module, NoKernelError, TensorMap
from fp4rt.host import HostDevice


class CpuDevice(HostDevice):
    """A `Device` for machines with no GPU."""

    name = "cpu"
    arch = "cpu"
    image_kind = None

    def __init__(self) -> None:
        super().__init__(base=1 << 40)
        self.sm_count = os.cpu_count() or 1

    def load(self, image: bytes) -> Module:
        raise NoKernelError("the cpu device runs no kernels; open 'cuda:0' or 'emulator:ARCH'")

    def run_kernel(self, kernel: Kernel, config: LaunchConfig, params: bytes) -> None:
        raise NoKernelError("the cpu device runs no kernels; open 'cuda:0' or 'emulator:ARCH'")

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        raise NoKernelError("the cpu device has no TMA; open 'cuda:0' or 'emulator:ARCH'")

    def __repr__(self) -> str:
        return f"<fp4rt device cpu ({self.sm_count} threads, numpy and BLAS)>"


def open_device(index: str) -> CpuDevice:
    """Return a new cpu device; `index` is empty."""
    return CpuDevice()


def list_devices() -> list[DeviceInfo]:
    """Return the one cpu device, which is always there."""
    threads = os.cpu_count() or 1
    detail = f"numpy and BLAS on {threads} threads ({platform.machine()})"
    return [DeviceInfo("cpu", True, detail, {"arch": "cpu", "threads": threads})]
