"""fp4rt: NVFP4 grouped GEMM from numpy, without PyTorch, on the CUDA driver API."""

from fp4rt.codes import pack, unpack
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
from fp4rt.gemm import GroupedGemmPlan, grouped_gemm
from fp4rt.nvfp4 import (
    Nvfp4Array,
    dequantize,
    global_scale_from_divisor,
    load,
    quantize,
    save,
    stack,
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
    "GroupedGemmPlan",
    "LaunchConfig",
    "NoKernelError",
    "Nvfp4Array",
    "OutOfMemoryError",
    "Stream",
    "TensorMap",
    "dequantize",
    "device",
    "devices",
    "global_scale_from_divisor",
    "grouped_gemm",
    "load",
    "pack",
    "quantize",
    "save",
    "stack",
    "unpack",
]
