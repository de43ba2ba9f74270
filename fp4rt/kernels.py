"""The kernel path of a plan: operands to buffers, parameters, launches, result.

`KernelPlan` owns every buffer that its launches touch, but for operands and results that are on the
device already: those it is bound to. Group sizes and scales are data in device memory, so they
change without a new capture. Where an operand is, is a parameter of the launch: it changes in
place, in the plan's own graph and in those that were captured from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import abi
from fp4rt.choice import Choice, choose
from fp4rt.device import Buffer, Device, Graph, LaunchConfig, Stream, TensorMap
from fp4rt.layout import blackwell_prepared_bytes, hopper_prepared_bytes
from fp4rt.library import Library
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

ROWS_READ_BY = {"sm_90a": ("prepare",), "sm_100f": ("prepare", "grouped_gemm")}
"""The kernels that are told where the rows are; the others get no address, and can't read them.
Where an image has no `prepare`, grouped_gemm reads them."""
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
        image = Library().find(self.choice.variant)
        assert device.image_kind is not None
        self._module = device.load(image.read(device.image_kind))
        self._hopper = image.variant.arch == "sm_90a"
        prepares = "prepare" in image.kernels
        self._rows_read_by = ROWS_READ_BY[image.variant.arch] if prepares else ("grouped_gemm",)
        self._launches = []
        for name, grid in (
            ("prepare", self.choice.prepare_grid),
            ("grouped_gemm", self.choice.grid),
        ):
            if name not in image.kernels:
                continue
            facts = image.kernels[name]
            assert facts.max_threads is not None, "every kernel has launch bounds"
            config = LaunchConfig(
                (grid, 1, 1),
                facts.max_threads,
                facts.dynamic_shared_bytes,
                facts.cluster,
                programmatic=name == "grouped_gemm",
            )
            self._launches.append((name, self._module.kernel(name), config))

        shapes = np.array(problem.shapes, np.int64).reshape(-1, 2)
        self._n = shapes[:, 0]
        max_k = int(shapes[:, 1].max(initial=16))
        self._pitch = row_pitch(max_k)
        groups = problem.num_groups

        self._buffers: dict[str, Buffer] = {}
        self._owns_weights = not isinstance(weights, DeviceWeights)
        if isinstance(weights, DeviceWeights):
            weights.check_open()
            resident = weights
        else:
            resident = DeviceWeights(device, weights.facts)
            resident.fill(weights, device.stream)
        self.weights: DeviceWeights | None = resident
        self._weights_at = resident.table_address
        alloc = self._alloc
        if own_rows and problem.activations == "nvfp4":
            alloc("a_values", (problem.max_m, self._pitch // 2), np.uint8)
            alloc("a_scales", (problem.max_m, self._pitch // 16), np.uint8)
        elif own_rows:
            alloc("a_values", (problem.max_m, self._pitch), np.uint16)
        alloc("scalars", 2 * groups, np.int32)
        if prepares:
            alloc("a_prepared", self._prepared_bytes(max_k), np.uint8)
            alloc("group_starts", groups, abi.GROUP_START.dtype)
            alloc("schedule", 1, np.uint32)
        else:
            alloc("schedule", 1 + FLAGS_PER_CTA * self.choice.grid, np.uint32)
            alloc("partial_sums", (self.choice.grid, PARTIAL_SUMS), np.float32)
        self.out_dtype = problem.out_numpy
        self.result_size = problem.max_m * int(self._n.max(initial=0))
        if own_result:
            alloc("d", self.result_size, self.out_dtype)
        stream = device.stream
        stream.fill(self._buffers["scalars"], 0)
        if own_rows and not self._hopper:
            stream.fill(self._buffers["a_values"], 0)  # whole boxes are read, rows beyond M too
        if prepares:
            stream.fill(self._buffers["a_prepared"], 0)  # see `load_tokens`: it may be read ahead
        else:
            stream.fill(self._buffers["schedule"], 0)  # who reads a flag clears it
        self._last_stream: Stream = stream

        # Group sizes and scales as kernels read them, sent in one copy.
        self._scalars = np.zeros(max(2 * groups, 1), np.int32)
        self._sizes = self._scalars[:groups]
        self._alpha = self._scalars[groups : 2 * groups].view(np.float32)
        self._send: tuple[Stream | None, Callable[[], None]] = (None, lambda: None)
        self._params = {name: self._pack(name) for name, _, _ in self._launches}
        self._data = {name: p.tobytes() for name, p in self._params.items()}
        self._rows_at: tuple[int, int, int, int] | None = None
        self._result_at = self._buffers["d"].address if own_result else 0
        self.empty = problem.max_m == 0 or not bool((self._n > 0).any())
        self._own_bytes = sum(buffer.nbytes for buffer in self._buffers.values())
        self._weights_bytes = resident.nbytes
        self.scale_key: Hashable = None  # the caller's note of what the scales are made of
        # What is not the plan's own, and must stay alive.
        self._bound: dict[str, tuple[Buffer, ...]] = {}
        self._windows: tuple[int, dict[str, Buffer]] = (-1, {})  # the last height of A
        self._runs = 0
        self._graph: Graph | None = None
        self._captured: list[weakref.ref[Graph]] = []
        self._recorded_elsewhere = False
        self._own_rows_at: tuple[int, int, int, int] | None = None
        if own_rows:
            values, row_scales = self._buffers["a_values"], self._buffers.get("a_scales")
            at = 0 if row_scales is None else row_scales.address
            self._own_rows_at = (values.address, at, self._pitch, problem.max_m)
            self.bind_own_rows()

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

    def _pack(self, kernel: str) -> NDArray[Any]:
        """Return the parameters of a kernel, less the addresses of the rows."""
        p = np.zeros((), abi.PARAMS.dtype)
        for name in self._buffers:
            if name in abi.PARAMS.offsets and name not in ("a_values", "a_scales", "d"):
                p[name] = self._buffers[name].address
        p["groups"] = self._weights_at
        scalars = self._buffers["scalars"].address
        p["group_sizes"], p["alpha"] = scalars, scalars + 4 * self.problem.num_groups
        if kernel == "grouped_gemm" and "d" in self._buffers:
            p["d"] = self._buffers["d"].address
        p["total_m"] = self.problem.max_m
        p["num_groups"] = self.problem.num_groups
        p["output_type"] = OUTPUT_TYPES[self.problem.out_dtype]
        p["activation_type"] = abi.CONSTANTS[
            "kActivationNvfp4" if self.problem.activations == "nvfp4" else "kActivation16Bit"
        ]
        p["max_tile_rows"] = self.choice.max_tile_rows
        return p

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
        self._rebind(self._rows_read_by, fields)
        self._rows_at = at

    def bind_result(self, buffer: Buffer) -> None:
        """Write D to `buffer` from now on."""
        at = buffer.address
        if at != self._result_at:
            self._rebind(("grouped_gemm",), {"d": at})
            self._result_at = at
        self._bound["d"] = (buffer,)

    @property
    def operands(self) -> tuple[Nvfp4Array, ...]:
        """What of the caller's on the host the plan reads at a launch: nothing."""
        return ()

    def bind_weights(self, weights: DeviceWeights) -> None:
        """Read other weights of the same shapes from now on."""
        weights.check_open()
        if weights.table_address != self._weights_at:
            self._rebind(tuple(self._params), {"groups": weights.table_address})
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

    def _rebind(self, kernels: tuple[str, ...], fields: dict[str, Any]) -> None:
        """Change parameters, and those of the graphs, whose queued launches keep the old ones."""
        if self._recorded_elsewhere:
            raise ValueError(
                "a launch of this plan was captured by other means than plan.capture(), so its "
                "graph can't be told of the new buffers; copy the data into the bound ones, or "
                "capture with plan.capture()"
            )
        for index, (name, _, _) in enumerate(self._launches):
            if name not in kernels:
                continue
            params = self._params[name]
            for field, value in fields.items():
                params[field] = value
            data = self._data[name] = params.tobytes()
            if self._graph is not None:
                self._graph.set_params(index, data, keep=())
            if self._captured:
                for graph in self._graphs():
                    graph.set_params(index, data)

    def _graphs(self) -> list[Graph]:
        """Return the graphs that were captured from the plan and are still there."""
        found = [(ref, ref()) for ref in self._captured]
        open_ = [(ref, graph) for ref, graph in found if graph is not None and not graph.closed]
        self._captured = [ref for ref, _ in open_]
        return [graph for _, graph in open_]

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
        found: KernelPlan | None = self.device.attached(PlanCache).take(self._sibling_key)
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
        self.device.attached(PlanCache).give(self._sibling_key, self)

    def launch(self, stream: Stream) -> None:
        """Queue the kernels; from the third time on by replaying a graph of the plan's own."""
        if self.empty:
            return
        if self.weights is not None:
            self.weights.check_open()
        for buffers in self._bound.values():
            for buffer in buffers:
                buffer._check_open()
        self.order(stream)
        if stream.capturing:
            self._recorded_elsewhere = True
            self._queue(stream)
        elif self._graph is not None:
            self._graph.launch(stream)
        else:
            self._queue(stream)
            self._runs += 1
            if self._runs == 2:
                self._graph = self._capture()

    def _queue(self, stream: Stream) -> None:
        for name, kernel, config in self._launches:
            stream.launch(kernel, config, self._data[name])

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
        for name, kernel, config in self._launches:
            p = self._params[name].copy()
            p["groups"] += first * abi.GROUP.dtype.itemsize
            p["group_sizes"] += 4 * first
            p["alpha"] += 4 * first
            p["num_groups"] = count
            if name in self._rows_read_by:
                elements = row * int(p["a_pitch"])
                nvfp4 = self.problem.activations == "nvfp4"
                p["a_values"] += elements // 2 if nvfp4 else 2 * elements
                p["a_scales"] += elements // 16 if nvfp4 else 0
            if name == "grouped_gemm":
                p["d"] += element * self.out_dtype.itemsize
            stream.launch(kernel, config, p.tobytes())

    def _capture(self) -> Graph:
        # A stream of its own: what other threads queue meanwhile must not be captured.
        stream = self.device.new_stream()
        with stream.capture() as capture:
            self._queue(stream)
        stream.close()
        for index, (name, _, _) in enumerate(self._launches):  # the plan keeps what is needed
            capture.graph.set_params(index, self._data[name], keep=())
        return capture.graph

    def capture(self, stream: Stream, hook: Callable[[], None], *keep: object) -> Graph:
        """Return a graph of the kernels that follows later bindings and calls `hook`."""
        if self.weights is not None:
            self.weights.check_open()
        with stream.capture() as capture:
            capture.keep(*keep)
            if not self.empty:
                self._queue(stream)
            stream.on_launch(hook)
        if not self.empty:
            self._captured.append(weakref.ref(capture.graph))
        return capture.graph

    def poison_output(self, stream: Stream) -> None:
        """Fill D with 0xFF, which is NaN in every output type."""
        stream.fill(self.result, 0xFF)

    def rows_buffer(self, name: str) -> Buffer:
        """Return the plan's own memory for A: ``"a_values"`` or ``"a_scales"``."""
        return self._buffers[name]

    @property
    def result(self) -> Buffer:
        """Where D is: rows of all groups, of the output type, flat or as it was bound."""
        bound = self._bound.get("d")
        return self._buffers["d"] if bound is None else bound[0]

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
        if self._graph is not None:
            self._graph.close()
        for buffer in self._buffers.values():
            buffer.close()
        if self._owns_weights and self.weights is not None:
            self.weights.close()
        self._bound.clear()
        self._module.close()


def as_float32(scales: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return scales as kernels take them, whatever numpy's error state is."""
    with np.errstate(under="ignore"):
        return scales.astype(np.float32)
