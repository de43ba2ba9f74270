"""The programs of tests/kernels/*_programs.cu: how each is launched, and on what."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KERNELS = Path(__file__).parent.parent / "kernels"
WORDS = 2048


@dataclass(frozen=True)
class Program:
    """A kernel and its launch; `out` words of output start as `fill`."""

    name: str
    grid: int = 2
    block: int = 128
    out: int = 256
    shared: int = 0
    cluster: int = 1
    fill: int = 0
    source: str = "emulator_programs.cu"
    allow: frozenset[str] = frozenset()


def _library(name: str, *allow: str, out: int = 128) -> Program:
    return Program(name, 1, 128, out, source="library_programs.cu", allow=frozenset(allow))


PROGRAMS = [
    Program("vector_loads", out=512),
    Program("byte_stores", grid=2, block=128, out=512),
    Program("shared_reverse", block=256, out=512),
    Program("shuffles"),
    Program("votes"),
    Program("reductions"),
    Program("divergence"),
    Program("switches"),
    Program("recursion", grid=1, block=64, out=64),
    Program("function_pointers"),
    Program("virtual_calls"),
    Program("local_arrays"),
    Program("tables"),
    Program("struct_arguments"),
    Program("wide_integers"),
    Program("simd_video"),
    Program("half_math"),
    Program("double_math"),
    Program("shared_atomics", out=32),
    Program("global_atomics", out=32),
    Program("block_reduction"),
    Program("named_barriers"),
    Program("warp_sync"),
    Program("last_block", grid=6, out=16),
    Program("spin_flag", block=32, out=4),
    Program("scan", block=256, out=512),
    Program("bitonic_sort", block=256, out=512, shared=1024),
    Program("transpose", grid=1, block=256, out=1024),
    Program("generic_addresses"),
    Program("partial_warps", block=40, out=80),
    Program("copy_async"),
    Program("copy_async_mbarrier"),
    Program("matrix_loads", grid=1, block=32, out=512),
    Program("mma_half", grid=1, block=32, out=192),
    Program("mma_bfloat_and_integer", grid=1, block=32, out=256),
    Program("bulk_copies", grid=1, out=2048),
    Program("mbarrier_ring"),
    Program("elect_one"),
    Program("cluster_memory", grid=8, block=64, out=512, cluster=4),
    Program("cluster_multicast", grid=4, block=256, out=1024, cluster=2),
    Program("registers_of_warpgroups", grid=1, block=256, out=256),
    Program("special_registers", grid=3, block=96, out=288, shared=64),
    _library("cub_reduce"),
    _library("cub_scan", out=512),
    _library("cub_sort", out=512),
    # CUB's merge reads one key too far and does not use it.
    _library("cub_merge", "uninitialised-shared", out=512),
    _library("cub_hist", out=256),
    _library("cub_load", out=512),
    _library("cg_all"),
    _library("cg_memcpy"),
    _library("cuda_barrier"),
    # libcu++ does not fence the initialisation of a barrier.
    _library("cuda_bulk", "unfenced-mbarrier-init"),
    _library("cuda_pipe"),
    _library("cuda_atomic", out=260),
    _library("fp8"),
    _library("i128"),
    _library("tree"),
    _library("bitfields"),
    _library("longloop"),
    _library("small_arrays"),
]


def words(program: Program) -> np.ndarray:
    """Return the program's input; the same on every machine."""
    rng = np.random.default_rng(zlib.crc32(program.name.encode()))
    found = rng.integers(0, 2**32, WORDS, dtype=np.uint32)
    if program.name in ("half_math",):  # finite halves and bfloats
        found = found & np.uint32(0xBFFFBFFF) & np.uint32(0xCFFFCFFF)
    return found


def run(device, module, program: Program) -> np.ndarray:
    """Return the program's output."""
    from fp4rt.device import LaunchConfig

    source = device.upload(words(program))
    out = device.upload(np.full(program.out, program.fill, np.uint32))
    params = np.zeros((), [("in", "u8"), ("out", "u8"), ("n", "u4"), ("pad", "u4")])
    params["in"], params["out"], params["n"] = source.address, out.address, WORDS - 16
    config = LaunchConfig(
        (program.grid, 1, 1), (program.block, 1, 1), program.shared, (program.cluster, 1, 1)
    )
    device.stream.launch(module.kernel(program.name), config, params.tobytes())
    result = out.to_numpy()
    source.close()
    out.close()
    return result
