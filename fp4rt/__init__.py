"""fp4rt: NVFP4 grouped GEMM from numpy, without PyTorch, on the CUDA driver API."""

from fp4rt.device import (
    Buffer,
    ClosedError,
    Device,
    DeviceInfo,
    DriverError,
    EmulatorFault,
    Event,
    Graph,
    LaunchConfig,
    NoKernelError,
    OutOfMemoryError,
    Stream,
    TensorMap,
    device,
    devices,
)

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "ClosedError",
    "Device",
    "DeviceInfo",
    "DriverError",
    "EmulatorFault",
    "Event",
    "Graph",
    "LaunchConfig",
    "NoKernelError",
    "OutOfMemoryError",
    "Stream",
    "TensorMap",
    "device",
    "devices",
]
