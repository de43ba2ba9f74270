"""A plan: grouped GEMM with fixed weights, checked and set up once, run any number of times.

It keeps the weights where its device wants them, and runs either on BLAS (the cpu) or on kernels.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fp4rt import arguments, html
from fp4rt.blas import BlasPlan
from fp4rt.choice import Choice, forced
from fp4rt.device import Buffer, ClosedError, Device, Graph, NoKernelError, Stream
from fp4rt.device import device as open_device
from fp4rt.kernels import KernelPlan
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.pipeline import Lane, Pipeline, Recipe
from fp4rt.problem import Inputs, Problem, WeightFacts
from fp4rt.rows import DeviceRows, Rows
from fp4rt.weights import DeviceWeights

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

Outputs = list["NDArray[Any]"]


class GroupedGemmPlan:
    """Grouped GEMM with fixed weights, for any group sizes up to a capacity.

    Parameters
    ----------
    device
        A `Device`, or the name of one (``"auto"``, ``"cuda:0"``, …), which the plan then owns.
    weights
        B: a (G, N, K) stack, one (N, K) operand, or a list of (N_g, K_g) operands, which the plan
        copies to the device (the cpu holds them as they are); or what `fp4rt.upload_weights` put
        there, which any number of plans share.
    max_m
        Most rows that all groups have together.
    alpha
        A number, or one per group; multiplies the result.
    out_dtype
        ``float16`` (default), ``bfloat16`` (from ml_dtypes) or ``float32``.
    activations
        ``"nvfp4"``, or ``"float16"`` or ``"bfloat16"`` for 16-bit rows (weight-only quantisation).
    batch_invariant
        Give a row the same bits whichever variant would otherwise be chosen.
    variant
        A kernel variant by its short name (``"medium"``), for tests and measurements; by default
        `fp4rt.choice.choose` picks one.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names the value, the rule and a fix.
    NoKernelError
        If no kernel was built for the device, or none takes this problem.

    Examples
    --------
    >>> import numpy as np, fp4rt
    >>> weights = fp4rt.quantize(np.ones((2, 8, 32), np.float32))
    >>> with fp4rt.GroupedGemmPlan("cpu", weights, max_m=4) as plan:
    ...     plan.set_inputs(fp4rt.quantize(np.ones((3, 32), np.float32)), [1, 2])
    ...     plan.launch()
    ...     plan.output()[:, 0]
    array([32., 32., 32.], dtype=float16)
    """

    def __init__(
        self,
        device: Device | str,
        weights: Nvfp4Array | Sequence[Nvfp4Array] | DeviceWeights,
        *,
        max_m: int,
        alpha: ArrayLike | None = None,
        out_dtype: DTypeLike = np.float16,
        activations: str = "nvfp4",
        batch_invariant: bool = False,
        variant: str | None = None,
    ) -> None:
        if isinstance(max_m, bool) or not isinstance(max_m, (int, np.integer)) or max_m < 0:
            raise ValueError(f"max_m must be an integer of at least 0, got {max_m!r}")
        if activations not in ("nvfp4", "float16", "bfloat16"):
            raise ValueError(
                f"activations must be 'nvfp4', 'float16' or 'bfloat16', got {activations!r}"
            )
        if not isinstance(device, (str, Device)):
            raise TypeError(
                f"device must be a Device or the name of one, such as 'auto', got {device!r}"
            )
        given = weights if isinstance(weights, DeviceWeights) else arguments.as_weights(weights)
        if isinstance(given, DeviceWeights):
            arguments.check_device(device, given, "weights")
            given.check_open()
        self.weights: WeightFacts = given.facts
        self.alpha = arguments.checked_alpha(alpha, len(self.weights.shapes))
        self.out_dtype = arguments.checked_out_dtype(out_dtype)
        self.problem = Problem(
            shapes=self.weights.padded_shapes,
            max_m=int(max_m),
            activations=activations,
            out_dtype=self.out_dtype.name,
            batch_invariant=arguments.checked_flag(batch_invariant, "batch_invariant"),
        )
        self._owns_device = isinstance(device, str)
        self.device = open_device(device) if isinstance(device, str) else device
        self._lock = threading.RLock()
        # Rows and sizes that came by the short way wait as a pair; `_inputs` makes them Inputs.
        self._given: Inputs | tuple[DeviceRows, list[int]] | None = None
        # Of rows on the device, if the scales sent hold for other group sizes too.
        self._kind: tuple[Device, int, str] | None = None
        self._launched = False
        self._closed = False
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
        try:
            self.device.as_stream()  # a closed device says so
            if self.device.image_kind is None and variant is not None:
                raise NoKernelError(f"{self.device.name} has no kernel variants; leave variant out")
            self._path: BlasPlan | KernelPlan
            if self.device.image_kind is None:
                self._path = BlasPlan(given, self.problem)
            else:
                self._path = KernelPlan(self.device, given, self.problem, self._choice(variant))
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise

    def _choice(self, variant: str | None) -> Choice | None:
        if variant is None:
            return None
        return forced(variant, self.device.arch, self.device.sm_count, self.problem)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the plan is closed; make a new GroupedGemmPlan")

    def set_inputs(
        self,
        a: Rows | DeviceRows | Sequence[Rows],
        group_sizes: ArrayLike | None = None,
        *,
        stream: object = None,
    ) -> None:
        """Give the rows of the next launches, and of the replays of captured graphs.

        Rows on the host are copied to memory of the plan's own. Rows on the device are not: they
        are read where they are whenever the plan is launched, and kept until others are given.

        Parameters
        ----------
        a
            Rows of all groups, concatenated: an NVFP4 operand of shape (M, K), or fp16 or bf16
            rows, or `DeviceRows`; or a list with one operand per group.
        group_sizes
            Integers (G,): rows of each group, adding up to M. Not given with a list.
        stream
            Where the copies are queued. The caller may change its arrays on return, but those from
            `empty_pinned` only once the stream got there.

        Raises
        ------
        TypeError, ValueError
            If they do not fit the plan; the inputs given before stay in force.
        """
        if type(a) is DeviceRows and self._set_rows(a, group_sizes, stream):
            return
        inputs = self._checked_rows(a, group_sizes)
        scales, lasting = arguments.combined_scales(self.alpha, self.weights, inputs)
        with self._lock:
            self._check_open()
            target = self.device.as_stream(stream)
            self._check_bound_result(inputs.rows)
            self._path.set_inputs(inputs, scales, target)
            self._given = inputs
            rows = inputs.rows
            self._kind = rows.kind if lasting and type(rows) is DeviceRows else None
            self._launched = False

    def _set_rows(self, a: DeviceRows, group_sizes: ArrayLike | None, stream: object) -> bool:
        """Take rows on the device like the last ones by a short way; False if it can't be gone."""
        m = a.shape[0]
        sizes = arguments.plain_sizes(group_sizes, self.problem.num_groups, m)
        if sizes is None or a.kind != self._kind or m > self.problem.max_m:
            return False
        with self._lock:
            path = self._path
            given = self._given
            if given is None or self._closed or not isinstance(path, KernelPlan):
                return False
            last = given[0] if type(given) is tuple else given.rows  # type: ignore[union-attr]
            if type(last) is not DeviceRows or last.global_scale != a.global_scale:
                return False
            a.check_open()
            target = self.device.as_stream(stream)
            if last is not a:
                self._check_bound_result(a)
                path.bind_rows(a)
            path.set_scalars(sizes, None, target)
            self._given = (a, sizes)
            self._launched = False
            return True

    def _check_bound_result(self, *operands: object) -> None:
        """Raise if operands lie where the plan's result goes."""
        path = self._path
        if isinstance(path, KernelPlan) and path.bound_result is not None:
            given = [each for each in operands if isinstance(each, (DeviceRows, DeviceWeights))]
            # Its address as it was: it may be closed, and then only graphs write there.
            arguments.check_apart(*path.result_place, *given)

    @property
    def _inputs(self) -> Inputs | None:
        given = self._given
        if isinstance(given, tuple):
            given = self._given = Inputs(given[0], np.array(given[1], np.int64))
        return given

    def _checked_rows(self, a: Any, group_sizes: ArrayLike | None) -> Inputs:
        """Return inputs that fit the plan."""
        inputs = arguments.as_inputs(a, group_sizes, self.weights)
        if inputs.sizes.size and inputs.activations != self.problem.activations:
            raise TypeError(
                f"the plan was made for {self.problem.activations} activations, "
                f"got {inputs.activations}"
            )
        if inputs.total > self.problem.max_m:
            raise ValueError(
                f"{inputs.total} rows exceed the plan's max_m = {self.problem.max_m}; "
                "make a plan with a larger max_m"
            )
        if isinstance(inputs.rows, DeviceRows):
            arguments.check_device(self.device, inputs.rows, "a")
        return inputs

    def rebind(self, *, out: Buffer | None = None, weights: DeviceWeights | None = None) -> None:
        """Use other memory from the next launch on, also in graphs that `capture` returned.

        Nothing is captured again: the graphs are changed in place; launches that are queued
        already keep what they had. The plan keeps what it is bound to. (Rows are bound by
        `set_inputs`.)

        Parameters
        ----------
        out
            `Buffer` of `out_dtype` that takes the result from now on: rows of all groups behind
            each other, room for ``max_m`` of them.
        weights
            Weights on the plan's device, of the same shapes, to be used from now on.

        Raises
        ------
        TypeError, ValueError
            If they do not fit the plan; nothing has changed then.
        NoKernelError
            On a device without kernels, for `out`: results are numpy arrays there.

        Examples
        --------
        >>> import numpy as np, fp4rt
        >>> ones, twos = (fp4rt.quantize(np.full((1, 8, 32), v, np.float32)) for v in (1, 2))
        >>> with fp4rt.device("cpu") as dev, fp4rt.GroupedGemmPlan(dev, ones, max_m=1) as plan:
        ...     plan.rebind(weights=fp4rt.upload_weights(dev, twos))
        ...     plan.run(fp4rt.quantize(np.ones((1, 32), np.float32)), [1])[0, 0]
        np.float16(64.0)
        """
        with self._lock:
            self._check_open()
            if weights is not None:
                self._check_weights(weights)
            if out is not None:
                self._check_result(out, weights)
            else:
                self._check_bound_result(weights)
            if weights is not None:
                inputs = self._inputs
                if inputs is not None:
                    scales, _ = arguments.combined_scales(self.alpha, weights.facts, inputs)
                self._path.bind_weights(weights)
                self.weights = weights.facts
                if inputs is not None:
                    self._path.set_scales(scales, self.device.stream)
                    self._kind = None
            if out is not None:
                assert isinstance(self._path, KernelPlan)
                self._path.bind_result(out)
            self._launched = False

    def _check_weights(self, weights: object) -> None:
        if not isinstance(weights, DeviceWeights):
            raise TypeError(
                f"weights must be what fp4rt.upload_weights returns, got {type(weights).__name__}"
            )
        arguments.check_device(self.device, weights, "weights")
        weights.check_open()
        if weights.facts.shapes != self.weights.shapes:
            raise ValueError(
                f"weights are {weights!r}, not of the plan's shapes; make another plan for them"
            )

    def _check_result(self, out: Buffer, weights: DeviceWeights | None) -> None:
        if not isinstance(self._path, KernelPlan):
            raise NoKernelError(f"{self.device.name} has no kernels, and its results are on host")
        size, inputs = self._path.result_size, self._inputs
        arguments.check_result_buffer(self.device, out, size, self.out_dtype)
        rows = inputs.rows if inputs is not None else None
        rows = rows if isinstance(rows, DeviceRows) else None
        nbytes = size * out.dtype.itemsize
        arguments.check_apart(out.address, nbytes, rows, weights or self._path.resident)

    def run(
        self,
        a: Rows | DeviceRows | Sequence[Rows],
        group_sizes: ArrayLike | None = None,
        *,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """Set inputs, launch and return the result, as one step that other threads can't disturb.

        Parameters and result are those of `set_inputs` and `output`.

        Examples
        --------
        >>> import numpy as np, fp4rt
        >>> weights = fp4rt.quantize(np.ones((2, 4, 32), np.float32))
        >>> with fp4rt.GroupedGemmPlan("cpu", weights, max_m=4) as plan:
        ...     plan.run(fp4rt.quantize(np.ones((3, 32), np.float32)), [1, 2]).shape
        (3, 4)
        """
        with self._lock:
            self._check_open()
            target = self.device.as_stream(stream)
            arguments.refuse_capture(target, "plan.run")
            self._path.check_bound(but="rows")
            if out is not None:
                self._check_output(self._checked_rows(a, group_sizes), out)
            self.set_inputs(a, group_sizes, stream=target)
            self.launch(target)
            return self.output(out, target)

    def map(
        self,
        batches: Iterable[tuple[Any, ArrayLike | None]],
        *,
        in_flight: int = 3,
        out: Sequence[Any] | None = None,
        progress: bool | Callable[[int], object] = False,
    ) -> Pipeline:
        """Compute batch after batch, with copies and computation overlapped.

        The plan's own inputs and result are left alone. Weights are those that it has now.

        Parameters
        ----------
        batches
            Pairs (a, group_sizes) as for `set_inputs`; taken one by one, as lanes become free. The
            arrays of a batch must not be changed before its result is there.
        in_flight
            Batches that are worked on at a time, each with memory of its own on the device.
        out
            What takes the results in turn: at least ``in_flight + 1`` arrays (lists of arrays for
            list inputs). A result is overwritten ``len(out)`` batches later. If they and the rows
            are in pinned memory (`empty_pinned`), all copies are made by the GPU. None gives every
            batch a fresh array.
        progress
            True for a line on the terminal; or a function that is called with the number of
            batches done.

        Returns
        -------
        Pipeline
            Iterator over the results, in the order of the batches. What goes wrong with a batch is
            raised in its turn. It may be left at any time.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.

        Examples
        --------
        >>> import numpy as np, fp4rt
        >>> weights = fp4rt.quantize(np.ones((2, 4, 32), np.float32))
        >>> x = fp4rt.quantize(np.ones((3, 32), np.float32))
        >>> with fp4rt.GroupedGemmPlan("cpu", weights, max_m=4) as plan:
        ...     [y.shape for y in plan.map([(x, [1, 2]), (x[:2], [0, 2])])]
        [(3, 4), (2, 4)]
        """
        if isinstance(in_flight, bool) or not isinstance(in_flight, (int, np.integer)):
            raise TypeError(f"in_flight must be an integer, got {in_flight!r}")
        if in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, got {in_flight}")
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"batches must be an iterable of pairs (a, group_sizes), got {batches!r}"
            )
        if out is not None and (not isinstance(out, Sequence) or len(out) <= in_flight):
            raise ValueError(
                f"out must be a list of at least in_flight + 1 = {in_flight + 1} results, so that "
                "none is overwritten while it is looked at"
            )
        with self._lock:
            self._check_open()
            alpha, facts = self.alpha, self.weights
            recipe = Recipe(
                self.device,
                facts,
                self.out_dtype,
                self._checked_rows,
                lambda inputs: arguments.combined_scales(alpha, facts, inputs),
            )
            lanes: list[Lane] = []
            try:
                for _ in range(int(in_flight)):
                    lanes.append(Lane(recipe, self._path.sibling()))
            except BaseException:
                for lane in lanes:
                    lane.close()
                raise
            pipeline = Pipeline(lanes, batches, out, progress)
            self._pipelines.add(pipeline)
            return pipeline

    def launch(self, stream: object = None) -> None:
        """Compute the result of the current inputs, in the order of `stream`."""
        with self._lock:
            if self._closed or self._given is None:
                self._checked_inputs()  # says which
            target = self.device.as_stream(stream)
            self._path.launch(target)
            target.on_launch(self._mark_launched)

    def _mark_launched(self) -> None:
        self._launched = True

    def capture(self, stream: object = None) -> Graph:
        """Return a graph that computes the result of the inputs that are current when it runs.

        Inputs, group sizes included, are given by `set_inputs` between replays; the graph need not
        be captured again. It keeps the plan alive, and every buffer that it touches: also when the
        plan, rows, weights or a bound result are closed, until other ones are given.
        """
        with self._lock:
            self._check_open()
            if stream is not None:
                target = self.device.as_stream(stream)
                return self._path.capture(target, self._mark_launched, self)
            # A stream of its own: what other threads queue meanwhile must not be captured.
            target = self.device.new_stream()
            try:
                return self._path.capture(target, self._mark_launched, self)
            finally:
                target.close()

    @overload
    def output(self, out: None = None, stream: object = None) -> Any: ...

    @overload
    def output(self, out: NDArray[Any], stream: object = None) -> NDArray[Any]: ...

    @overload
    def output(self, out: Buffer, stream: object = None) -> Buffer: ...

    @overload
    def output(self, out: Sequence[NDArray[Any]], stream: object = None) -> Outputs: ...

    def output(
        self,
        out: NDArray[Any] | Buffer | Sequence[NDArray[Any]] | None = None,
        stream: object = None,
    ) -> Any:
        """Return the result of the last launch, or of the last replay of a captured graph.

        Parameters
        ----------
        out
            Array (M, N) that takes the result; a list of them for list inputs. A `Buffer` of the
            plan's device gets a copy there, in the order of the stream.
        stream
            The stream of the launch; a result on the host is complete on return.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            One (M, N) array for concatenated rows, a list of (M_g, N_g) for lists.
        """
        with self._lock:
            inputs = self._checked_inputs()
            if not self._launched:
                raise ValueError(
                    "nothing was computed from these inputs yet; call launch, or launch the graph"
                )
            shapes = inputs.result_shapes(self.weights)
            if isinstance(out, Buffer):
                self._check_output(inputs, out)
                return self._copy_result(out, self.device.as_stream(stream))
            targets = None if out is None else self._checked_targets(inputs, shapes, out)
            results = self._path.read(shapes, targets, self.device.as_stream(stream))
            return results[0] if inputs.ragged else results

    def _copy_result(self, out: Buffer, stream: Stream) -> Buffer:
        size = self.output_size
        if size:
            window = out.sub(0, size, self.out_dtype)
            if isinstance(self._path, KernelPlan):
                stream.copy(window, self._path.result.sub(0, size, self.out_dtype))
            else:
                rows = self._path.read(self._inputs_shapes(), None, stream)
                stream.upload(window, np.concatenate([part.reshape(-1) for part in rows]))
        return out

    def _inputs_shapes(self) -> list[tuple[int, int]]:
        return self._checked_inputs().result_shapes(self.weights)

    @property
    def output_size(self) -> int:
        """Elements of the result of the current inputs, all groups together."""
        return sum(m * n for m, n in self._inputs_shapes())

    def record(self, rows: DeviceRows, group_sizes: Any, out: Buffer, stream: Stream) -> None:
        """Record inputs, launch and the result's way to `out` in a capture; on the cpu."""
        assert isinstance(self._path, BlasPlan)
        self._check_output(self._checked_rows(rows, group_sizes), out)
        self.set_inputs(rows, group_sizes, stream=stream)
        self._path.launch(stream)
        self._path.deliver(out.sub(0, self.output_size, self.out_dtype), stream)

    def poison_output(self, stream: object = None) -> None:
        """Fill the result on the device with NaN, so that what a launch leaves out shows.

        For tests; on the cpu every launch has a new result anyway.
        """
        with self._lock:
            self._check_open()
            if isinstance(self._path, KernelPlan):
                self._path.poison_output(self.device.as_stream(stream))

    def _checked_inputs(self) -> Inputs:
        self._check_open()
        if self._inputs is None:
            raise ValueError("the plan has no inputs yet; call set_inputs first")
        return self._inputs

    def _checked_targets(
        self, inputs: Inputs, shapes: list[tuple[int, int]], out: object
    ) -> Outputs:
        return arguments.check_targets(inputs, shapes, self.out_dtype, self._path.operands, out)

    def check_output(self, out: NDArray[Any] | Buffer | Sequence[NDArray[Any]]) -> None:
        """Raise unless `out` can take the result of the current inputs; see `output`."""
        self._check_output(self._checked_inputs(), out)

    def _check_output(self, inputs: Inputs, out: Any) -> None:
        shapes = inputs.result_shapes(self.weights)
        if isinstance(out, Buffer):
            size = sum(m * n for m, n in shapes)
            arguments.check_result_buffer(self.device, out, size, self.out_dtype)
            rows = inputs.rows if isinstance(inputs.rows, DeviceRows) else None
            arguments.check_apart(out.address, size * out.dtype.itemsize, rows, self._path.resident)
        else:
            self._checked_targets(inputs, shapes, out)

    @property
    def nbytes(self) -> int:
        """Bytes that the plan owns on its device, or holds on the cpu; 0 once it is closed."""
        return 0 if self._closed else self._path.nbytes

    def close(self) -> None:
        """Release what the plan holds; closing twice is harmless."""
        for pipeline in list(self._pipelines):
            pipeline.close()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._given = None
                self._path.close()
                if self._owns_device:
                    self.device.close()

    def __enter__(self) -> GroupedGemmPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shapes = sorted(set(self.problem.shapes))
        text = str(shapes[0]) if len(shapes) == 1 else f"{len(shapes)} shapes"
        rest = "closed" if self._closed else f"{self.nbytes} bytes"
        return (
            f"<grouped GEMM plan: {self.problem.num_groups} groups, (N, K) {text}, "
            f"max_m {self.problem.max_m}, {self.problem.activations} -> {self.out_dtype.name}, "
            f"{self._path.name} on {self.device.name}, {rest}>"
        )

    def _repr_html_(self) -> str:
        """Show it in a notebook: its problem, what runs it, and what it was given."""
        inputs, size = "none yet", html.size(self.nbytes)
        if self._closed:
            inputs = "none: the plan is closed"
        elif self._inputs is not None:
            sizes = self._inputs.sizes
            inputs = f"{sizes.sum()} rows; groups of {html.listed(sizes.tolist())}"
        return html.card(
            "Grouped GEMM plan",
            {
                "groups": self.problem.num_groups,
                "(N, K)": html.listed(sorted(set(self.problem.shapes))),
                "capacity": f"{self.problem.max_m} rows",
                "inputs": inputs,
                "types": f"{self.problem.activations} × nvfp4 -> {self.out_dtype.name}",
                "runs": f"{self._path.name} on {self.device.name}",
                "bytes": "closed" if self._closed else f"{size} of weights and buffers",
            },
        )
