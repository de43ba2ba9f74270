"""The kernel path of a plan: operands to buffers, parameters, launches, result.

`KernelPlan` owns every buffer that its launches touch, but for operands and results that are on the
device already: those it is bound to. Group sizes and scales are data in device memory, so they
change without a new capture. Where an operand is, is a parameter of the launches
(`fp4rt.launches`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import abi
from fp4rt.choice import Choice, choose
from fp4rt.device import Buffer, Device, Graph, Stream, TensorMap
from fp4rt.launches import Launches
from fp4rt.layout import hopper_prepared_bytes
from fp4rt.nvfp4 import Nvfp4Array, fold_scale_signs
from fp4rt.plan_cache import PlanCache
from fp4rt.problem import Inputs, Problem, Weights
from fp4rt.rows import DeviceRows, padded_rows, row_pitch
from fp4rt.weights import DeviceWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray

OUTPUT_TYPES = {
    "float16": abi.CONSTANTS["kOutputFloat16"],
    "bfloat16": abi.CONSTANTS["kOutputBfloat16"],
    "float32": abi.CONSTANTS["kOutputFloat32"],
}

PARTIAL_SUMS = 16 * 16 * 32
"""Numbers that a CTA of a skinny variant leaves to the next: 16 in each lane of 16 warps."""
FLAGS_PER_CTA = 16
"""Words of `schedule` beside the first: whether the partial sums of a CTA's warp are there."""


def _check_counts(problem: Problem) -> None:
    """Refuse extents that do not fit the kernels' 32-bit counts (offsets have 64 bits)."""
    extents = {
        "max_m": problem.max_m,
        "N": max((n for n, _ in problem.shapes), default=0),
        "K": max((k for _, k in problem.shapes), default=0),
    }
    for name, extent in extents.items():
        if extent >= 2**31:
            raise ValueError(
                f"{name} is {extent}; kernels count rows and columns in 32 bits, so use at most "
                f"{2**31 - 1}"
            )


class KernelPlan:
    """Buffers and launches of one plan on a device that runs kernels.

    Parameters
    ----------
    device
        Where; its ``image_kind`` is not None.
    weights
        B of every group: on the host, to be uploaded and not kept, or on the device.
    problem
        Shapes, capacity and types.
    choice
        Variant and launch shape; None for what `fp4rt.choice.choose` says.
    own_rows, own_result
        Whether to have memory for A and for D; without it the plan must be bound to some.

    Raises
    ------
    NoKernelError
        If no kernel was built for the device, or none takes this problem.
    OutOfMemoryError
        If the buffers do not fit.
    ValueError
        If rows, columns or K are more than kernels count.
    """

    def __init__(
        self,
        device: Device,
        weights: Weights | DeviceWeights,
        problem: Problem,
        choice: Choice | None = None,
        *,
        own_rows: bool = True,
        own_result: bool = True,
    ) -> None:
        _check_counts(problem)
        self.device = device
        self.problem = problem
        self.choice = choice or choose(device.arch, device.sm_count, problem)
        self._launches = Launches(device, self.choice)
        self._hopper = self._launches.arch == "sm_90a"
        self._pitch = row_pitch(max((k for _, k in problem.shapes), default=16))
        self._widest = max((n for n, _ in problem.shapes), default=0)
        self.empty = problem.max_m == 0 or self._widest == 0
        self.out_dtype = problem.out_numpy
        self.result_size = problem.max_m * self._widest
        self.scale_key: Hashable = None  # the caller's note of what the scales are made of
        self.weights: DeviceWeights | None = self._resident(weights)
        self._owns_weights = weights is not self.weights
        self._weights_at, self._weights_bytes = self.weights.table_address, self.weights.nbytes
        self._buffers = {
            name: device.alloc(shape, dtype)
            for name, (shape, dtype) in self._memory(own_rows, own_result).items()
        }
        self._own_bytes = sum(buffer.nbytes for buffer in self._buffers.values())
        self._last_stream: Stream = device.stream
        self._clear()
        # Group sizes and scales as kernels read them, sent in one copy.
        groups = problem.num_groups
        self._scalars = np.zeros(max(2 * groups, 1), np.int32)
        self._sizes = self._scalars[:groups]
        self._alpha = self._scalars[groups : 2 * groups].view(np.float32)
        self._send: tuple[Stream | None, Callable[[], None]] = (None, lambda: None)
        # What is not the plan's own, and must stay alive.
        self._bound: dict[str, tuple[Buffer, ...]] = {}
        self._windows: tuple[int, dict[str, Buffer]] = (-1, {})  # the last height of A
        self._rows_at: tuple[int, int, int, int] | None = None
        self._result_at = self._buffers["d"].address if own_result else 0
        self._set_params()
        self._own_rows_at: tuple[int, int, int, int] | None = None
        if own_rows:
            values, row_scales = self._buffers["a_values"], self._buffers.get("a_scales")
            at = 0 if row_scales is None else row_scales.address
            self._own_rows_at = (values.address, at, self._pitch, problem.max_m)
            self.bind_own_rows()

    def _resident(self, weights: Weights | DeviceWeights) -> DeviceWeights:
        """Return weights on the device: those given, or new ones."""
        if isinstance(weights, DeviceWeights):
            weights.check_open()
            return weights
        resident = DeviceWeights(self.device, weights.facts)
        resident.fill(weights, self.device.stream)
        return resident

    def _memory(self, own_rows: bool, own_result: bool) -> dict[str, tuple[Any, Any]]:
        """Return shape and dtype of each buffer that the plan has."""
        problem, pitch = self.problem, self._pitch
        groups, max_m = problem.num_groups, problem.max_m
        memory: dict[str, tuple[tuple[int, ...], Any]] = {}
        if own_rows and problem.activations == "nvfp4":
            memory["a_values"] = (max_m, pitch // 2), np.uint8
            memory["a_scales"] = (max_m, pitch // 16), np.uint8
        elif own_rows:
            memory["a_values"] = (max_m, pitch), np.uint16
        memory["scalars"] = (2 * groups,), np.int32
        if self._launches.prepares:
            max_k = max((k for _, k in problem.shapes), default=16)
            memory["a_prepared"] = (hopper_prepared_bytes(max_m, groups, max_k),), np.uint8
            memory["group_starts"] = (groups,), abi.GROUP_START.dtype
            memory["schedule"] = (1,), np.uint32
        elif self._hopper:
            memory["schedule"] = (1 + FLAGS_PER_CTA * self.choice.grid,), np.uint32
            memory["partial_sums"] = (self.choice.grid, PARTIAL_SUMS), np.float32
        if own_result:
            memory["d"] = (self.result_size,), self.out_dtype
        return {
            name: (1 if 0 in shape else shape, dtype) for name, (shape, dtype) in memory.items()
        }

    def _clear(self) -> None:
        """Clear what kernels read before anything was written there."""
        names = ["scalars"]
        if not self._hopper:
            names.append("a_values")  # whole boxes are read, rows beyond M too
        if self._launches.prepares:
            names.append("a_prepared")  # see `load_tokens`: it may be read ahead
        else:
            names.append("schedule")  # who reads a flag clears it
        for name in names:
            if name in self._buffers:
                self.device.stream.fill(self._buffers[name], 0)

    def _set_params(self) -> None:
        """Give the launches all parameters but those of the rows."""
        scalars, problem = self._buffers["scalars"].address, self.problem
        fields: dict[str, Any] = {
            name: buffer.address
            for name, buffer in self._buffers.items()
            if name in abi.PARAMS.offsets and name not in ("a_values", "a_scales", "d")
        }
        fields["groups"] = self._weights_at
        fields["group_sizes"], fields["alpha"] = scalars, scalars + 4 * problem.num_groups
        fields["total_m"] = problem.max_m
        fields["num_groups"] = problem.num_groups
        fields["output_type"] = OUTPUT_TYPES[problem.out_dtype]
        fields["activation_type"] = abi.CONSTANTS[
            "kActivationNvfp4" if problem.activations == "nvfp4" else "kActivation16Bit"
        ]
        fields["max_tile_rows"] = self.choice.max_tile_rows
        self._launches.set(fields)
        self._launches.set({"d": self._result_at}, ("grouped_gemm",))

    @property
    def name(self) -> str:
        """The variant's name."""
        return self.choice.variant

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the plan owns."""
        return self._own_bytes + (self._weights_bytes if self._owns_weights else 0)

    # What the launches are bound to

    def bind_rows(self, rows: DeviceRows) -> None:
        """Read A where it is on the device, until other rows are given."""
        self._bind_rows(rows.at)
        self._bound["rows"] = rows.buffers

    def bind_own_rows(self) -> None:
        """Read A in the plan's own memory again."""
        if self._own_rows_at is not None:
            self._bind_rows(self._own_rows_at)
        self._bound.pop("rows", None)

    def _bind_rows(self, at: tuple[int, int, int, int]) -> None:
        if at == self._rows_at:
            return
        values, scales, pitch, count = at
        fields: dict[str, Any] = {"a_values": values, "a_scales": scales, "a_pitch": pitch}
        if not self._hopper and count:
            rows = TensorMap(
                values,
                "uint8",
                (pitch // 2, count),
                (pitch // 2,),
                (128, 32),
                swizzle="128B",
                l2_promotion="256B",
            )
            fields["tensor_map_a"] = np.frombuffer(self.device.encode_tensor_map(rows), np.uint8)
        self._launches.set(fields, self._launches.rows_read_by)
        self._rows_at = at

    def bind_result(self, buffer: Buffer) -> None:
        """Write D to `buffer` from now on."""
        at = buffer.address
        if at != self._result_at:
            self._launches.set({"d": at}, ("grouped_gemm",))
            self._result_at = at
        self._bound["d"] = (buffer,)

    @property
    def bound_result(self) -> Buffer | None:
        """What D is written to, if it is not the plan's own."""
        bound = self._bound.get("d")
        return None if bound is None else bound[0]

    @property
    def result_place(self) -> tuple[int, int]:
        """Address of D and its bytes at most."""
        return self._result_at, self.result_size * self.out_dtype.itemsize

    @property
    def resident(self) -> DeviceWeights | None:
        """The weights on the device."""
        return self.weights

    @property
    def operands(self) -> tuple[Nvfp4Array, ...]:
        """What of the caller's on the host the plan reads at a launch: nothing."""
        return ()

    def bind_weights(self, weights: DeviceWeights) -> None:
        """Read other weights of the same shapes from now on."""
        weights.check_open()
        if weights.table_address != self._weights_at:
            self._launches.set({"groups": weights.table_address})
            self._weights_at = weights.table_address
        if self._owns_weights and self.weights is not None and self.weights is not weights:
            self.weights.close()
        self._owns_weights, self.weights = False, weights

    def own_weights(self) -> DeviceWeights:
        """Return the weights that the plan was made with, which it closes from now on."""
        assert self.weights is not None
        self._owns_weights = True
        return self.weights

    def unbind(self) -> None:
        """Let go of what is not the plan's own; it must be bound again before it is launched."""
        self._bound.clear()
        if not self._owns_weights:
            self.weights = None

    # Inputs, launches, result

    def order(self, stream: Stream) -> None:
        """Let `stream` wait for what the plan did last on another one."""
        if stream is not self._last_stream:
            if not stream.capturing:
                stream.after(self._last_stream)
            self._last_stream = stream

    def set_scalars(self, sizes: Any, alpha: NDArray[Any] | None, stream: Stream) -> None:
        """Send group sizes and each group's scale (alpha and both global scales; None: as before).

        Nothing waits: launches that are queued already see the old ones.
        """
        self.order(stream)
        self._sizes[:] = sizes
        if alpha is not None:
            self._alpha[:] = alpha
        known, send = self._send
        if known is not stream:
            send = stream.prepare_upload(self._buffers["scalars"], self._scalars)
            self._send = (stream, send)
        send()

    def set_inputs(self, inputs: Inputs, scales: NDArray[np.float64], stream: Stream) -> None:
        """Send group sizes and scales, and upload the rows or read them where they are."""
        self.send_rows(inputs, as_float32(scales), stream)

    def send_rows(self, inputs: Inputs, alpha: NDArray[np.float32] | None, stream: Stream) -> None:
        """Do as `set_inputs`, with scales as `set_scalars` takes them."""
        rows = inputs.rows
        if isinstance(rows, DeviceRows):
            self.bind_rows(rows)
        else:
            self.bind_own_rows()
        if self.problem.num_groups == 0:
            return
        self.set_scalars(inputs.sizes, alpha, stream)
        m = inputs.total
        if m and not isinstance(rows, DeviceRows):
            if m != self._windows[0]:
                names = [name for name in ("a_values", "a_scales") if name in self._buffers]
                self._windows = (m, {name: self._buffers[name][:m] for name in names})
            for name, part in self.packed_rows(inputs).items():
                stream.upload(self._windows[1][name], part)

    def set_scales(self, scales: NDArray[np.float64], stream: Stream) -> None:
        """Change each group's scale."""
        self.set_scalars(self._sizes.copy(), as_float32(scales), stream)

    def packed_rows(self, inputs: Inputs) -> dict[str, NDArray[Any]]:
        """Return rows on the host as they go to the plan's buffers, by the buffer's name."""
        assert not isinstance(inputs.rows, DeviceRows)
        operands = inputs.rows if isinstance(inputs.rows, tuple) else (inputs.rows,)
        if not isinstance(operands[0], Nvfp4Array):
            rows = [a.view(np.uint16) for a in operands if isinstance(a, np.ndarray)]
            return {"a_values": padded_rows(rows, self._pitch)}
        quantized = [a for a in operands if isinstance(a, Nvfp4Array)]
        if not self._hopper:
            quantized = [fold_scale_signs(a) for a in quantized]
        scales = [a.scales.view(np.uint8) for a in quantized]
        return {
            "a_values": padded_rows([a.values for a in quantized], self._pitch // 2),
            "a_scales": padded_rows(scales, self._pitch // 16),
        }

    def sibling(self) -> KernelPlan:
        """Return another plan with memory of its own and these weights, perhaps a used one."""
        assert self.weights is not None
        found: KernelPlan | None = self.device.attached(PlanCache).take_spare(self._sibling_key)
        if found is None:
            return KernelPlan(self.device, self.weights, self.problem, self.choice)
        found.bind_weights(self.weights)
        return found

    @property
    def _sibling_key(self) -> Hashable:
        return ("sibling", self.problem, self.choice)

    def retire(self) -> None:
        """Keep a sibling, whose work is done, for the next one."""
        if self.weights is None or self.weights.closed:
            self.close()
            return
        self.unbind()
        self.device.attached(PlanCache).give(self._sibling_key, self, spare=True)

    def launch(self, stream: Stream) -> None:
        """Queue the kernels."""
        if self.empty:
            return
        self.check_bound()
        if stream is not self._last_stream:
            self.order(stream)
        self._launches.run(stream)

    def check_bound(self, *, but: str = "") -> None:
        """Raise ClosedError if something that launches use was closed, `but` left out."""
        weights = self.weights
        if weights is not None and weights.closed:
            weights.check_open()  # says so
        for name, buffers in self._bound.items():
            if name != but:
                for buffer in buffers:
                    buffer._check_open()

    @property
    def divisible(self) -> bool:
        """Whether `launch_groups` can be used: not where a tensor map spans all rows."""
        return self._hopper

    def launch_groups(self, first: int, count: int, row: int, element: int, stream: Stream) -> None:
        """Launch for groups ``[first, first + count)`` only, after `set_scalars` for all.

        Their rows begin at `row` of A, their results at `element` of D. The bits are those of the
        whole launch.
        """
        self.order(stream)
        nvfp4 = self.problem.activations == "nvfp4"

        def change(kernel: str, p: NDArray[Any]) -> None:
            p["groups"] += first * abi.GROUP.dtype.itemsize
            p["group_sizes"] += 4 * first
            p["alpha"] += 4 * first
            p["num_groups"] = count
            if kernel in self._launches.rows_read_by:
                elements = row * int(p["a_pitch"])
                p["a_values"] += elements // 2 if nvfp4 else 2 * elements
                p["a_scales"] += elements // 16 if nvfp4 else 0
            if kernel == "grouped_gemm":
                p["d"] += element * self.out_dtype.itemsize

        self._launches.run_with(stream, change)

    def capture(self, stream: Stream, hook: Callable[[], None], *keep: object) -> Graph:
        """Return a graph of the kernels that follows later bindings and calls `hook`."""
        self.check_bound()
        return self._launches.capture(stream, hook, *keep, empty=self.empty)

    def poison_output(self, stream: Stream) -> None:
        """Fill D with 0xFF, which is NaN in every output type."""
        stream.fill(self.result, 0xFF)

    def rows_buffer(self, name: str) -> Buffer:
        """Return the plan's own memory for A: ``"a_values"`` or ``"a_scales"``."""
        return self._buffers[name]

    @property
    def result(self) -> Buffer:
        """Where D is: rows of all groups, of the output type, flat or as it was bound."""
        bound = self.bound_result
        return self._buffers["d"] if bound is None else bound

    def read(
        self,
        shapes: list[tuple[int, int]],
        targets: list[NDArray[Any]] | None,
        stream: Stream,
    ) -> list[NDArray[Any]]:
        """Return D on the host, in `targets` if given: one array for all rows, or one per group."""
        if targets is None:
            targets = [np.empty(shape, self.out_dtype) for shape in shapes]
        self.order(stream)
        element = 0
        for target in targets:
            self.fetch(target, element, stream)
            element += target.size
        stream.synchronize()  # copies to pinned memory are still under way
        return targets

    def fetch(self, target: NDArray[Any], element: int, stream: Stream) -> None:
        """Copy D from `element` on into `target`; complete on return, unless that is pinned."""
        if target.size == 0:
            return
        window = self.result.sub(element * self.out_dtype.itemsize, target.shape, self.out_dtype)
        if target.flags.c_contiguous:
            stream.download(target, window)
        else:
            dense = np.empty(target.shape, target.dtype)
            stream.download(dense, window)
            target[...] = dense

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row of A in the plan's memory."""
        return self._pitch * 9 // 16 if self.problem.activations == "nvfp4" else 2 * self._pitch

    def close(self) -> None:
        """Free the buffers."""
        self._launches.close()
        for buffer in self._buffers.values():
            buffer.close()
        if self._owns_weights and self.weights is not None:
            self.weights.close()
        self._bound.clear()


def as_float32(scales: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return scales as kernels take them, whatever numpy's error state is."""
    with np.errstate(under="ignore"):
        return scales.astype(np.float32)
