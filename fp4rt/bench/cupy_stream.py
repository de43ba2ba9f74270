"""CuPy, if it is installed, on streams of fp4rt's: arrays, two small kernels, and cuBLAS.

CuPy is no dependency. Its work is queued on fp4rt's streams and captured into fp4rt's graphs, so
that everything is timed in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import numpy as np

from fp4rt.bench.cublas import WORKSPACE_BYTES, Cublas, loaded_library
from fp4rt.device import Device, Graph, Stream

LANES = 4
"""Streams that products of several groups can be spread over."""

CUDA_SOURCE = r"""
typedef unsigned int u32; typedef unsigned short u16; typedef unsigned long long u64;

__device__ float from_half_bits(u16 bits) {
  float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x;
}
__device__ u16 to_half_bits(float x) {
  u16 bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits;
}

// One scale block a thread: 16 codes and an E4M3 scale to 16 halves.
extern "C" __global__ void dequantize(const uint2* values, const unsigned char* scales,
                                      uint4* out, u64 blocks) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= blocks) return;
  u32 byte = scales[i];
  float scale = from_half_bits((byte & 0x80) << 8 | (byte & 0x7f) << 7) * 256.0f * 16384.0f;
  uint2 codes = values[i];
  u32 words[2] = {codes.x, codes.y}, result[8];
  for (int w = 0; w < 2; ++w)
    for (int pair = 0; pair < 4; ++pair) {
      u32 halves = 0;
      for (int e = 0; e < 2; ++e) {
        u32 code = words[w] >> (8 * pair + 4 * e) & 15;
        u16 bits = (code & 8) << 12 | (code & 7) << 9;
        halves |= (u32)to_half_bits(from_half_bits(bits) * scale) << (16 * e);
      }
      result[4 * w + pair] = halves;
    }
  out[2 * i] = make_uint4(result[0], result[1], result[2], result[3]);
  out[2 * i + 1] = make_uint4(result[4], result[5], result[6], result[7]);
}

// Reads everything; `never` is 0, which the compiler can't know, so nothing is written.
extern "C" __global__ void read_all(const uint4* data, u64 count, u32* sink, u32 never) {
  u32 sum = 0;
  u64 step = (u64)gridDim.x * blockDim.x;
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 a = data[i], b = data[i + step], c = data[i + 2 * step], d = data[i + 3 * step];
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
    sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < count; i += step) sum ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  if (never) *sink = sum;
}
"""


def find_cupy() -> Any:
    """Return CuPy, or None if it isn't installed or finds no GPU."""
    try:
        cupy = import_module("cupy")
        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else None
    except Exception:  # a broken installation is as good as none, and fails in many ways
        return None


class Cupy:
    """CuPy on the streams of a device.

    Parameters
    ----------
    device
        A CUDA device.
    cupy
        The module.
    """

    def __init__(self, device: Device, cupy: Any) -> None:
        self.device = device
        self.np = cupy
        cupy.cuda.Device(int(device.name.partition(":")[2] or 0)).use()
        self._stream = cupy.cuda.ExternalStream(_handle(device.stream))
        module = cupy.RawModule(code=CUDA_SOURCE)
        self._dequantize = module.get_function("dequantize")
        self._read_all = module.get_function("read_all")
        with self.on_stream():  # loads cuBLAS
            cupy.matmul(cupy.ones((16, 16), cupy.float16), cupy.ones((16, 16), cupy.float16))
            self._workspace = cupy.empty((LANES, WORKSPACE_BYTES), cupy.uint8)
        library = loaded_library()
        if library is None:
            raise RuntimeError("CuPy multiplied without cuBLAS; it can't be compared with")
        self._lanes = [device.stream, *(device.new_stream() for _ in range(LANES - 1))]
        self._cublas = [
            Cublas(library, _handle(lane), int(workspace.data.ptr))
            for lane, workspace in zip(self._lanes, self._workspace, strict=True)
        ]

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which CuPy queues its work on the device's own stream."""
        context: AbstractContextManager[Any] = self._stream
        return context

    def matmul(self, a: Any, b: Any, d: Any, lane: int = 0) -> None:
        """Queue D (M, N) = A (M, K) · B (N, K)ᵀ on contiguous fp16 arrays; lane 0 is the stream."""
        first, second, third = (int(array.data.ptr) for array in (a, b, d))
        self._cublas[lane].gemm(first, second, third, a.shape[0], b.shape[0], a.shape[1])

    def fork(self) -> None:
        """Let the other lanes wait for what the stream has queued so far."""
        event = self._lanes[0].record()
        for lane in self._lanes[1:]:
            lane.wait(event)

    def join(self) -> None:
        """Let the stream wait for the other lanes."""
        for lane in self._lanes[1:]:
            self._lanes[0].wait(lane.record())

    def dequantize(self, values: Any, scales: Any, out: Any) -> None:
        """Queue decoding packed codes (…, K / 2) and scales to fp16 (…, K)."""
        blocks = scales.size
        grid = (math.ceil(blocks / 256),)
        self._dequantize(grid, (256,), (values, scales, out, np.uint64(blocks)))

    def read_all(self, data: Any, sink: Any) -> None:
        """Queue reading every byte of `data`."""
        grid = (8 * self.device.sm_count,)
        args = (data, np.uint64(data.nbytes // 16), sink, np.uint32(0))
        self._read_all(grid, (256,), args)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` once, then capture it into a graph."""
        with self.on_stream():
            work()
            self.device.stream.synchronize()
            with self.device.stream.capture() as capture:
                work()
        return capture.graph

    def free(self) -> None:
        """Give CuPy's cached memory back."""
        self.device.synchronize()
        self.np.get_default_memory_pool().free_all_blocks()

    def close(self) -> None:
        """Destroy what belongs to cuBLAS, and the streams."""
        self.device.synchronize()
        for cublas in self._cublas:
            cublas.close()
        for lane in self._lanes[1:]:
            lane.close()


def _handle(stream: Stream) -> int:
    found: Any = stream
    return int(found.__cuda_stream__()[1])
