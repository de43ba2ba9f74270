"""Imports every instruction family, so that each registers its opcodes."""

from __future__ import annotations

from . import (
    alu,
    async_copy,
    bits,
    compare,
    control,
    convert,
    cp_async,
    floats,
    load_store,
    matrix_load,
    mbarrier,
    remote,
    sync,
    tcgen05,
    tcgen05_alloc,
    tcgen05_mma,
    tensor_copy,
    tensor_core,
    video,
    warp_wide,
    wmma,
)
from .tensor_box import encode_tensor_map

__all__ = [
    "alu",
    "async_copy",
    "bits",
    "compare",
    "control",
    "convert",
    "cp_async",
    "encode_tensor_map",
    "floats",
    "load_store",
    "matrix_load",
    "mbarrier",
    "remote",
    "sync",
    "tcgen05",
    "tcgen05_alloc",
    "tcgen05_mma",
    "tensor_copy",
    "tensor_core",
    "video",
    "warp_wide",
    "wmma",
]
