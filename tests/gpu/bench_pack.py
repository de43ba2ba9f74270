"""How long the GPU takes to make Hopper's weight layout of plain order: not part of any GEMM time.

``PYTHONPATH=. python tests/gpu/bench_pack.py`` prints the median of 20 windows of 20 launches,
and the rate of bytes read and written together; two sets of buffers larger than L2 take turns.
"""

import statistics

import numpy as np

import fp4rt
from fp4rt.weights import Packer

SETS = {"S1": (8, 4096, 7168), "S2": (8, 7168, 2048), "D1": (32, 4096, 7168), "G1": (1, 4096, 4096)}


def measure(gpu, groups, n, k):
    """Median µs of packing (groups, n, k), and the bytes that it moves."""
    rng = np.random.default_rng(0)
    row = rng.integers(0, 256, (1, n, k // 2), dtype=np.uint8)
    values = np.broadcast_to(row, (groups, n, k // 2))
    scales = np.full((groups, n, k // 16), 0x38, np.uint8)
    sets = []
    for _ in range(max(2, (256 << 20) // values.nbytes)):
        given = [gpu.upload(np.ascontiguousarray(part)) for part in (values, scales)]
        weights = fp4rt.DeviceWeights.from_parts(gpu, *given)
        packer = Packer(gpu)
        packer.take(given, gpu.stream)
        sets.append((packer, weights))
    times = []
    for _ in range(20):
        start = gpu.stream.record(timed=True)
        for i in range(20):
            packer, weights = sets[i % len(sets)]
            packer.pack(weights, 0, groups, gpu.stream)
        end = gpu.stream.record(timed=True)
        end.synchronize()
        times.append(end.elapsed_since(start) / 20 * 1e6)
    moved = values.nbytes + scales.nbytes + sets[0][1].blocks.nbytes
    return statistics.median(times), moved


def main():
    with fp4rt.device("cuda:0") as gpu:
        for name, shape in SETS.items():
            time, moved = measure(gpu, *shape)
            print(f"{name} {shape}: {time:7.1f} us, {moved / time / 1e6:.2f} TB/s")


if __name__ == "__main__":
    main()
