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
from fp4rt.gemm import empty_pinned, grouped_gemm
from fp4rt.nvfp4 import (
    Nvfp4Array,
    dequantize,
    global_scale_from_divisor,
    load,
    quantize,
    save,
    stack,
)
from fp4rt.plan import GroupedGemmPlan
from fp4rt.plan_cache import CacheInfo, cache_info
from fp4rt.rows import DeviceRows, upload_rows
from fp4rt.weights import DeviceWeights, upload_weights

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "CacheInfo",
    "ClosedError",
    "Device",
    "DeviceInfo",
    "DeviceRows",
    "DeviceWeights",
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
    "cache_info",
    "dequantize",
    "device",
    "devices",
    "empty_pinned",
    "global_scale_from_divisor",
    "grouped_gemm",
    "load",
    "pack",
    "quantize",
    "save",
    "stack",
    "unpack",
    "upload_rows",
    "upload_weights",
]
