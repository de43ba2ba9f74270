"""Weights on a device: B of every group in the layout of the device's kernels.

Hopper has a kernel that makes the layout, so weights travel as they are, a chunk of groups at a
time. Elsewhere numpy makes it before they are copied. On the cpu they stay what they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fp4rt import abi, html
from fp4rt.arguments import as_weights
from fp4rt.codes import refuse_masked
from fp4rt.device import Buffer, ClosedError, Device, LaunchConfig, Stream
from fp4rt.layout import (
    BLACKWELL_BYTES,
    BLACKWELL_K,
    BLACKWELL_ROWS,
    HOPPER_BYTES,
    HOPPER_K,
    HOPPER_ROWS,
    blackwell_blocks,
    blackwell_scales,
    hopper_blocks,
)
from fp4rt.library import LoadedImages
from fp4rt.nvfp4 import SCALE_BLOCK, Nvfp4Array, fold_scale_signs
from fp4rt.problem import WeightFacts, Weights
from fp4rt.rows import check_open_device, padded_rows

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

CHUNK_BYTES = 16 << 20
"""Groups of a stack are copied together up to this size."""
MAX_PACKED = 65535
"""Groups that one launch packs: the second extent of a grid."""

_generations = itertools.count(1)


def is_hopper(device: Device) -> bool:
    """Whether the device runs the images for Hopper."""
    return abi.image_arch(device.arch) == "sm_90a"


class DeviceWeights:
    """Weights on a device, for any number of plans and calls.

    Made by `fp4rt.upload_weights` from operands on the host, or by `from_parts` from arrays that
    other code has on the same device.

    Attributes
    ----------
    device
        Where they are.
    facts
        Shapes and global scales.
    generation
        A number that no other weights of this process have or had.
    num_groups
        Number of groups.
    table, table_address
        `Buffer` of what kernels are told of each group (`fp4rt.abi.GROUP`), in the same allocation
        as the weights, and its address; None and 0 on the cpu.
    host
        On the cpu, the operands; None elsewhere.
    closed
        Whether `close` was called.
    """

    def __init__(self, device: Device, facts: WeightFacts) -> None:
        device.as_stream()  # a closed device says so
        self.device, self.facts = device, facts
        self.generation = next(_generations)
        self.host: Weights | None = None
        self.blocks: Buffer | None = None
        self.table: Buffer | None = None
        self._root: Buffer | None = None
        self.closed = False
        self.table_address = 0
        self.spans: tuple[tuple[int, int], ...] = ()  # as of DeviceRows
        self.num_groups = len(facts.shapes)
        if device.image_kind is None:
            return
        shapes = np.array(facts.padded_shapes, np.int64).reshape(-1, 2)
        rows, columns = shapes[:, 0], np.maximum(shapes[:, 1], SCALE_BLOCK)
        self._k = columns
        if is_hopper(device):
            sizes = -(-rows // HOPPER_ROWS) * -(-columns // HOPPER_K) * HOPPER_BYTES
            scales = sizes * 0
        else:
            count = -(-rows // BLACKWELL_ROWS) * -(-columns // BLACKWELL_K)
            sizes = count * BLACKWELL_BYTES
            scales = count * (BLACKWELL_BYTES * 8 // 9)  # they follow the values
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        table = np.zeros(max(len(rows), 1), abi.GROUP.dtype)
        blocks_bytes = int(self._starts[-1]) + 255 & -256
        self._root = device.alloc(blocks_bytes + table.nbytes, np.uint8)
        self.blocks = self._root.sub(0, max(int(self._starts[-1]), 1), np.uint8)
        self.table = self._root.sub(blocks_bytes, table.shape, table.dtype)
        self.table_address = self.table.address
        self.spans = ((self._root.address, self._root.address + self._root.nbytes),)
        table["n"][: len(rows)], table["k"][: len(rows)] = rows, columns
        used = np.flatnonzero(sizes)
        starts = np.uint64(self._root.address) + self._starts[used].astype(np.uint64)
        table["weight_values"][used] = starts
        if not is_hopper(device):
            table["weight_scales"][used] = starts + scales[used].astype(np.uint64)
        device.stream.upload(self.table, table)

    @classmethod
    def from_parts(
        cls,
        device: Device,
        values: object,
        scales: object,
        global_scale: ArrayLike = 1.0,
        k: int | None = None,
        *,
        stream: object = None,
    ) -> DeviceWeights:
        """Make weights of arrays that are on a device, in the order that numpy would have.

        A Hopper GPU makes its layout there; elsewhere the arrays take the way through the host.
        All is done when this returns: the caller may change or drop the arrays.

        Parameters
        ----------
        device
            Where they are and will be used.
        values, scales
            uint8 (N, K / 2) and uint8 or float8_e4m3fn (N, K / 16), or a stack (G, N, ...) of them.
            Each is a `Buffer`, or what `Device.as_buffer` takes.
        global_scale
            One positive number, or (G,) of them for a stack.
        k
            Logical K where the last scale block is only padding beyond it. Codes there must be 0,
            which is not checked on a Hopper GPU.
        stream
            Where the work is queued; it waits for the arrays' producer.

        Raises
        ------
        TypeError, ValueError
            If the arrays do not fit together, or are not on the device.
        OutOfMemoryError
            If the kernels' layout does not fit beside them.

        Examples
        --------
        >>> import fp4rt
        >>> with fp4rt.device("cpu") as dev:
        ...     values = dev.upload(np.full((2, 5, 16), 0x11, np.uint8))
        ...     scales = dev.upload(np.full((2, 5, 2), 0x38, np.uint8))
        ...     DeviceWeights.from_parts(dev, values, scales, [1, 0.5])
        <weights of 2 groups, (N, K) (5, 32), on cpu, 188 bytes>
        """
        check_open_device(device)
        refuse_masked(values, "values")
        refuse_masked(scales, "scales")
        given = [device.as_buffer(part, stream) for part in (values, scales)]
        if given[0].shape[:-1] != given[1].shape[:-1]:
            raise ValueError(
                f"values {given[0].shape} and scales {given[1].shape} do not fit; they must be "
                "(N, K / 2) and (N, K / 16), or stacks of such"
            )
        # The same operand without a row has the same types, K and global scales to be checked.
        no_values, no_scales = (
            np.empty((*part.shape[:-2], 0, *part.shape[-1:])[-len(part.shape) :], part.dtype)
            for part in given
        )
        rowless = Nvfp4Array.from_parts(no_values, no_scales, global_scale, k)
        if not (device.image_kind == "cubin" and is_hopper(device)):
            on_host = Nvfp4Array.from_parts(
                given[0].to_numpy(), given[1].to_numpy(), global_scale, k
            )
            return upload_weights(device, on_host, stream=stream)
        n, none = given[0].shape[-2], as_weights(rowless)
        shapes = ((n, rowless.k),) * len(none.groups)
        made = cls(device, WeightFacts(shapes, none.global_scales, n, none.single))
        if n:
            target, packer = device.as_stream(stream), Packer(device)
            if none.single:
                given = [part.reshape(1, *part.shape) for part in given]
            for first in range(0, len(shapes), MAX_PACKED):
                packer.take([part[first : first + MAX_PACKED] for part in given], target)
                packer.pack(made, first, min(MAX_PACKED, len(shapes) - first), target)
            target.synchronize()
            packer.close()
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they take."""
        if self.host is not None:
            return sum(group.nbytes for group in self.host.groups)
        return 0 if self._root is None else self._root.nbytes

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self.closed:
            raise ClosedError("the weights are closed; upload them again")

    def fill(self, weights: Weights, stream: Stream) -> None:
        """Put weights of these shapes in place, in the order of `stream`."""
        if self.device.image_kind is None:
            self.host = weights
        elif self.packs_on_device:
            packer = Packer(self.device)
            for first, count in chunks(weights):
                stream.upload_all(packer.room_for(weights, first, count))
                packer.pack(self, first, count, stream)
            packer.close()
        else:
            self._fill_packed(weights, stream)

    @property
    def packs_on_device(self) -> bool:
        """Whether a kernel makes the layout; the emulator would only be slower than numpy."""
        return self.device.image_kind == "cubin" and is_hopper(self.device)

    def _fill_packed(self, weights: Weights, stream: Stream) -> None:
        assert self.blocks is not None
        packed: Nvfp4Array | None = None
        parts: list[NDArray[np.uint8]] = []
        for g, operand in enumerate(weights.groups):
            start = int(self._starts[g])
            if start == self._starts[g + 1]:
                continue
            if operand is not packed:
                packed, parts = operand, packed_parts(self.device, operand, int(self._k[g]))
            for part in parts:
                stream.upload(self.blocks.sub(start, part.shape, np.uint8), part)
                start += part.nbytes

    def close(self) -> None:
        """Free the memory; closing twice is harmless. Plans that use the weights can't go on."""
        self.closed = True
        self.host = None
        if self._root is not None:
            self._root.close()

    def __enter__(self) -> DeviceWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shapes = sorted(set(self.facts.shapes))
        text = str(shapes[0]) if len(shapes) == 1 else f"{len(shapes)} shapes"
        rest = "closed" if self.closed else f"{self.nbytes} bytes"
        return (
            f"<weights of {self.num_groups} groups, (N, K) {text}, on {self.device.name}, {rest}>"
        )

    def _repr_html_(self) -> str:
        """Show them in a notebook."""
        packed = self.device.image_kind is not None
        order = "as this device's kernels read them" if packed else "logical; there are no kernels"
        return html.card(
            "Weights on a device",
            {
                "groups": self.num_groups,
                "(N, K)": html.listed(sorted(set(self.facts.shapes))),
                "order": order,
                "device": self.device.name,
                "bytes": "closed" if self.closed else html.size(self.nbytes),
            },
        )


def upload_weights(
    device: Device, b: Nvfp4Array | Sequence[Nvfp4Array], *, stream: object = None
) -> DeviceWeights:
    """Copy weights to a device once, for any number of plans and calls there.

    Parameters
    ----------
    device
        Where they will be used; an open `Device`.
    b
        A (G, N, K) stack, one (N, K) operand, or a list of (N_g, K_g) operands. The caller may
        change or drop them on return; those in arrays from `empty_pinned` once the stream got
        there.
    stream
        Where the copies are queued.

    Raises
    ------
    TypeError, ValueError
        If b is none of these.
    OutOfMemoryError
        If they do not fit.

    Examples
    --------
    >>> import fp4rt
    >>> b = fp4rt.quantize(np.ones((2, 4, 32), np.float32))
    >>> with fp4rt.device("cpu") as dev, fp4rt.upload_weights(dev, b) as weights:
    ...     x = fp4rt.quantize(np.ones((3, 32), np.float32))
    ...     print(weights)
    ...     fp4rt.grouped_gemm(dev, x, weights, [1, 2])[:, 0]
    <weights of 2 groups, (N, K) (4, 32), on cpu, 152 bytes>
    array([32., 32., 32.], dtype=float16)
    """
    check_open_device(device)
    weights = as_weights(b)
    made = DeviceWeights(device, weights.facts)
    if device.image_kind is None:
        weights = Weights(
            tuple(_copy(group) for group in weights.groups), weights.width, weights.single
        )
    made.fill(weights, device.as_stream(stream))
    return made


def _copy(q: Nvfp4Array) -> Nvfp4Array:
    return Nvfp4Array(q.values.copy(), q.scales.copy(), q.global_scale, q.k)


def packed_parts(device: Device, operand: Nvfp4Array, k: int) -> list[NDArray[np.uint8]]:
    """Return the arrays that stand one behind the other for a 2-D operand on a device.

    K is padded with zeros to `k`.
    """
    hopper = is_hopper(device)
    if not hopper:
        operand = fold_scale_signs(operand)  # Blackwell's tensor cores ignore the sign of scales
    rows, width = operand.values.shape
    values = padded_rows([operand.values], k // 2)
    scales = padded_rows([operand.scales.view(np.uint8).reshape(rows, width // 8)], k // 16)
    if hopper:
        return [hopper_blocks(values, scales)]
    return [blackwell_blocks(values), blackwell_scales(scales).data]


def chunks(weights: Weights) -> Iterator[tuple[int, int]]:
    """Cut groups into runs (first, count) that are copied together, leaving out empty ones.

    Examples
    --------
    >>> from fp4rt.nvfp4 import quantize
    >>> list(chunks(as_weights(quantize(np.ones((3, 4, 32), np.float32)))))
    [(0, 3)]
    """
    num_groups = len(weights.groups)
    if weights.stack is None:
        yield from ((g, 1) for g, group in enumerate(weights.groups) if group.shape[0])
    elif weights.stack.values.size:
        most = max(CHUNK_BYTES * num_groups // weights.stack.values.nbytes, 1)
        most = min(most, MAX_PACKED)
        for first in range(0, num_groups, most):
            yield first, min(most, num_groups - first)


class Packer:
    """Memory for weights as they were given, from which a kernel makes Hopper's layout.

    Parameters
    ----------
    device
        A device that runs Hopper's images.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        image, module = device.attached(LoadedImages).find(device, "pack_weights_sm_90a")
        self._kernel = module.kernel("pack_weights")
        threads = image.kernels["pack_weights"].max_threads
        assert threads is not None, "every kernel has launch bounds"
        self._threads = threads
        self._config: LaunchConfig | None = None
        self._room: Buffer | None = None
        self._given: list[Buffer] = []

    def room_for(
        self, weights: Weights, first: int, count: int
    ) -> list[tuple[Buffer, NDArray[np.uint8]]]:
        """Return what to upload of groups ``[first, first + count)``, as it is, and where to."""
        operand = weights.groups[first]
        if count > 1:
            assert weights.stack is not None
            operand = weights.stack[first : first + count]
        values, scales = operand.values, operand.scales.view(np.uint8)
        place = values.nbytes + 255 & -256
        if self._room is None or self._room.nbytes < place + scales.nbytes:
            self._room = self.device.alloc(place + scales.nbytes)
        self._given = [
            self._room.sub(0, values.shape, np.uint8),
            self._room.sub(place, scales.shape, np.uint8),
        ]
        return list(zip(self._given, (values, scales), strict=True))

    def take(self, given: Sequence[Buffer], stream: Stream) -> None:
        """Have values and scales that are on the device packed, where they are."""
        self._given = [part.sub(0, part.nbytes, np.uint8) for part in given]
        if given[0].address % 8:  # the kernel reads values 8 bytes at a time
            self._given[0] = self.device.alloc(given[0].nbytes)
            stream.copy(self._given[0], given[0].view(np.uint8).reshape(-1))

    def pack(self, weights: DeviceWeights, first: int, count: int, stream: Stream) -> None:
        """Make the layout of what was uploaded last, in the order of `stream`."""
        assert weights.table is not None
        n, k = weights.facts.padded_shapes[first]
        p = np.zeros((), abi.PARAMS.dtype)
        p["groups"] = weights.table.address + first * abi.GROUP.dtype.itemsize
        p["a_values"], p["a_scales"] = (buffer.address for buffer in self._given)
        grid = (-(-n // HOPPER_ROWS) * -(-k // HOPPER_K), count, 1)
        if self._config is None or self._config.grid != grid:
            self._config = LaunchConfig(grid, self._threads)
        stream.launch(self._kernel, self._config, p.tobytes())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it has."""
        return 0 if self._room is None else self._room.nbytes

    def close(self) -> None:
        """Free the memory."""
        if self._room is not None:
            self._room.close()
        self._room, self._given = None, []
