"""Imports every instruction family, so that each registers its opcodes."""

from __future__ import annotations

from . import (
    alu,
    async_copy,
    control,
    convert,
    floats,
    load_store,
    matrix_load,
    mbarrier,
    remote,
    sync,
    tcgen05,
    tcgen05_mma,
    tensor_core,
    video,
)
from .tensor_box import encode_tensor_map

__all__ = [
    "alu",
    "async_copy",
    "control",
    "convert",
    "encode_tensor_map",
    "floats",
    "load_store",
    "matrix_load",
    "mbarrier",
    "remote",
    "sync",
    "tcgen05",
    "tcgen05_mma",
    "tensor_core",
    "video",
]
