"""The kernel path of a plan: operands to buffers, parameters, two launches, result.

`KernelPlan` owns every buffer that its launches touch, and their addresses never change, so a
captured graph stays right when inputs, group sizes or alpha are replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import abi
from fp4rt.choice import Choice, choose
from fp4rt.device import Buffer, Device, Kernel, LaunchConfig, Stream, TensorMap
from fp4rt.layout import (
    BLACKWELL_BYTES,
    BLACKWELL_K,
    BLACKWELL_ROWS,
    HOPPER_BYTES,
    HOPPER_K,
    HOPPER_ROWS,
    blackwell_blocks,
    blackwell_prepared_bytes,
    blackwell_scales,
    hopper_blocks,
    hopper_prepared_bytes,
)
from fp4rt.library import Library
from fp4rt.nvfp4 import Nvfp4Array, fold_scale_signs
from fp4rt.problem import Inputs, Problem, Weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

OUTPUT_TYPES = {
    "float16": abi.CONSTANTS["kOutputFloat16"],
    "bfloat16": abi.CONSTANTS["kOutputBfloat16"],
    "float32": abi.CONSTANTS["kOutputFloat32"],
}
PITCH_STEP = 32
"""Elements: rows of A lie at multiples of 16 bytes (of 64 where they have 16 bits)."""


class KernelPlan:
    """Buffers and launches of one plan on a device that runs kernels.

    Parameters
    ----------
    device
        Where; its ``image_kind`` is not None.
    weights
        B of every group; uploaded in the layout of the chosen variant, and not kept.
    problem
        Shapes, capacity and types.
    choice
        Variant and launch shape; None for what `fp4rt.choice.choose` says.

    Raises
    ------
    NoKernelError
        If no kernel was built for the device, or none takes this problem.
    OutOfMemoryError
        If the buffers do not fit.
    """

    def __init__(
        self,
        device: Device,
        weights: Weights,
        problem: Problem,
        choice: Choice | None = None,
    ) -> None:
        self.device = device
        self.problem = problem
        self.choice = choice = choice or choose(device.arch, device.sm_count, problem)
        image = Library().find(self.choice.variant)
        assert device.image_kind is not None
        self._module = device.load(image.read(device.image_kind))
        self._kernels = {name: self._module.kernel(name) for name in image.kernels}
        self._facts = image.kernels
        self._hopper = image.variant.arch == "sm_90a"

        shapes = np.array(problem.shapes, np.int64).reshape(-1, 2)
        self._n = shapes[:, 0]
        self._k = np.maximum(shapes[:, 1], 16)  # a group with K = 0 has one block of zeros
        max_k = int(self._k.max(initial=16))
        self._pitch = -(-max_k // PITCH_STEP) * PITCH_STEP
        groups = problem.num_groups

        self._buffers: dict[str, Buffer] = {}
        self._upload_weights(weights)
        alloc = self._alloc
        if problem.activations == "nvfp4":
            alloc("a_values", (problem.max_m, self._pitch // 2), np.uint8)
            alloc("a_scales", (problem.max_m, self._pitch // 16), np.uint8)
        else:
            alloc("a_values", (problem.max_m, self._pitch), np.uint16)
        alloc("group_sizes", groups, np.int32)
        alloc("alpha", groups, np.float32)
        alloc("a_prepared", self._prepared_bytes(max_k), np.uint8)
        alloc("group_starts", groups, abi.GROUP_START.dtype)
        alloc("schedule", 1, np.uint32)
        self.out_dtype = problem.out_numpy
        alloc("d", problem.max_m * int(self._n.max(initial=0)), self.out_dtype)
        stream = device.stream
        stream.fill(self._buffers["group_sizes"], 0)
        if not self._hopper:
            stream.fill(self._buffers["a_values"], 0)  # whole boxes are read, rows beyond M too
        stream.fill(self._buffers["a_prepared"], 0)  # see `load_tokens`: it may be read ahead
        # Made once: a stream recognises a launch by these objects, and skips its checks.
        self._param_bytes = self._pack().tobytes()
        self._launches = (
            self._launch("prepare", choice.prepare_grid, programmatic=False),
            self._launch("grouped_gemm", choice.grid, programmatic=True),
        )

    def _alloc(self, name: str, shape: int | tuple[int, ...], dtype: Any) -> None:
        if 0 in (shape if isinstance(shape, tuple) else (shape,)):
            shape = 1
        self._buffers[name] = self.device.alloc(shape, dtype)

    def _prepared_bytes(self, max_k: int) -> int:
        problem = self.problem
        if self._hopper:
            return hopper_prepared_bytes(problem.max_m, problem.num_groups, max_k)
        rows = self.choice.max_tile_rows
        return blackwell_prepared_bytes(problem.max_m, problem.num_groups, max_k, rows)

    def _upload_weights(self, weights: Weights) -> None:
        """Put every group's weights in the variant's layout, in one allocation, and its table."""
        table = np.zeros(max(len(weights.groups), 1), abi.GROUP.dtype)
        table["n"][: len(self._n)], table["k"][: len(self._k)] = self._n, self._k
        if self._hopper:
            sizes = -(-self._n // HOPPER_ROWS) * -(-self._k // HOPPER_K) * HOPPER_BYTES
        else:
            sizes = -(-self._n // BLACKWELL_ROWS) * -(-self._k // BLACKWELL_K) * BLACKWELL_BYTES
        starts = np.concatenate([[0], np.cumsum(sizes)])
        buffer = self.device.alloc(max(int(starts[-1]), 1), np.uint8)
        stream = self.device.stream
        packed: Nvfp4Array | None = None
        for g, operand in enumerate(weights.groups):
            if sizes[g] == 0:
                continue
            start = int(starts[g])
            table[g]["weight_values"] = buffer.address + start
            if operand is not packed:
                packed, parts = operand, self._packed(operand, int(self._k[g]))
            for part in parts:
                stream.upload(buffer.sub(start, part.shape, np.uint8), part)
                start += part.nbytes
            if not self._hopper:
                table[g]["weight_scales"] = buffer.address + start - parts[1].nbytes
        self._buffers["weights"] = buffer
        self._buffers["groups"] = self.device.upload(table)

    def _packed(self, operand: Nvfp4Array, k: int) -> list[NDArray[np.uint8]]:
        """Return an operand's weights in the variant's layout."""
        values, scales = _with_k(self._readable(operand), k)
        if self._hopper:
            return [hopper_blocks(values, scales)]
        return [blackwell_blocks(values), blackwell_scales(scales).data]

    def _readable(self, operand: Nvfp4Array) -> Nvfp4Array:
        """Return an equal operand as the kernel reads it: Blackwell's scales have no sign."""
        return operand if self._hopper else fold_scale_signs(operand)

    def _pack(self) -> NDArray[Any]:
        p = np.zeros((), abi.PARAMS.dtype)
        for name in self._buffers:
            if name in abi.PARAMS.offsets:
                p[name] = self._buffers[name].address
        p["total_m"] = self.problem.max_m
        p["num_groups"] = self.problem.num_groups
        p["output_type"] = OUTPUT_TYPES[self.problem.out_dtype]
        p["activation_type"] = abi.CONSTANTS[
            "kActivationNvfp4" if self.problem.activations == "nvfp4" else "kActivation16Bit"
        ]
        p["max_tile_rows"] = self.choice.max_tile_rows
        p["a_pitch"] = self._pitch
        if not self._hopper and self.problem.max_m:
            rows = TensorMap(
                self._buffers["a_values"].address,
                "uint8",
                (self._pitch // 2, self.problem.max_m),
                (self._pitch // 2,),
                (128, 32),
                swizzle="128B",
                l2_promotion="256B",
            )
            p["tensor_map_a"] = np.frombuffer(self.device.encode_tensor_map(rows), np.uint8)
        return p

    @property
    def name(self) -> str:
        """The variant's name."""
        return self.choice.variant

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Device memory that the plan owns."""
        return tuple(self._buffers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the plan owns."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch for, whatever the group sizes."""
        return self.problem.max_m == 0 or not (self._n > 0).any()

    def set_inputs(self, inputs: Inputs, scales: NDArray[np.float64], stream: Stream) -> None:
        """Upload rows, group sizes and each group's scale (alpha and both global scales)."""
        if self.problem.num_groups == 0:
            return
        stream.upload(self._buffers["group_sizes"], inputs.sizes.astype(np.int32))
        with np.errstate(under="ignore"):
            alpha = scales.astype(np.float32)
        stream.upload(self._buffers["alpha"], alpha)
        m = int(inputs.sizes.sum())
        if m == 0:
            return
        operands = inputs.rows if isinstance(inputs.rows, tuple) else (inputs.rows,)
        if isinstance(operands[0], Nvfp4Array):
            readable = [self._readable(a) for a in operands if isinstance(a, Nvfp4Array)]
            values = [a.values for a in readable]
            scale_bytes = [a.scales.view(np.uint8) for a in readable]
            stream.upload(self._buffers["a_values"][:m], _pitched(values, self._pitch // 2))
            stream.upload(self._buffers["a_scales"][:m], _pitched(scale_bytes, self._pitch // 16))
        else:
            rows = [a.view(np.uint16) for a in operands if isinstance(a, np.ndarray)]
            stream.upload(self._buffers["a_values"][:m], _pitched(rows, self._pitch))

    def launch(self, stream: Stream) -> None:
        """Queue both kernels."""
        if self.empty:
            return
        params = self._param_bytes
        for kernel, config in self._launches:
            stream.launch(kernel, config, params)

    def _launch(self, name: str, grid: int, *, programmatic: bool) -> tuple[Kernel, LaunchConfig]:
        facts = self._facts[name]
        assert facts.max_threads is not None, "every kernel has launch bounds"
        config = LaunchConfig(
            (grid, 1, 1), facts.max_threads, facts.dynamic_shared_bytes, facts.cluster, programmatic
        )
        return self._kernels[name], config

    def poison_output(self, stream: Stream) -> None:
        """Fill D with 0xFF, which is NaN in every output type."""
        stream.fill(self._buffers["d"], 0xFF)

    def read(
        self,
        shapes: list[tuple[int, int]],
        targets: list[NDArray[Any]] | None,
        stream: Stream,
    ) -> list[NDArray[Any]]:
        """Return D on the host, in `targets` if given: one array for all rows, or one per group."""
        if targets is None:
            targets = [np.empty(shape, self.out_dtype) for shape in shapes]
        offset = 0
        for target in targets:
            if target.size:
                window = self._buffers["d"].sub(
                    offset * self.out_dtype.itemsize, target.shape, self.out_dtype
                )
                if target.flags.c_contiguous:
                    stream.download(target, window)
                else:
                    dense = np.empty(target.shape, target.dtype)
                    stream.download(dense, window)
                    target[...] = dense
            offset += target.size
        return targets

    def close(self) -> None:
        """Free the buffers."""
        for buffer in self._buffers.values():
            buffer.close()
        self._module.close()


def _with_k(operand: Nvfp4Array, k: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Values and scale bytes of a 2-D operand, padded with zeros to `k`."""
    rows = operand.shape[0]
    values = operand.values.reshape(rows, operand.values.shape[-1])
    scales = operand.scales.view(np.uint8).reshape(rows, values.shape[1] // 8)
    return _pitched([values], k // 2), _pitched([scales], k // 16)


def _pitched(parts: list[NDArray[Any]], pitch: int) -> NDArray[Any]:
    """Rows of all `parts` behind each other, each padded with zeros to `pitch` elements."""
    if len(parts) == 1 and parts[0].shape[1] == pitch:
        return parts[0]
    out = np.zeros((sum(part.shape[0] for part in parts), pitch), parts[0].dtype)
    row = 0
    for part in parts:
        out[row : row + part.shape[0], : part.shape[1]] = part
        row += part.shape[0]
    return out
