"""Bulk copies and mbarriers through the machine; the good cases run on any device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from emulated import Emulated, launch

from fp4rt.device import EmulatorFault, TensorMap
from fp4rt.emulator.tensor_box import box
from fp4rt.tensor_map import ELEMENT_TYPES, box_bytes

pytestmark = pytest.mark.nvcc

PARAMS = np.dtype(
    {
        "names": ["src", "dst", "c", "to", "rank", "bytes", "mode", "fault", "dump", "global",
                  "words", "extent"],
        "formats": ["V128", "V128", "(5,)<i4", "(5,)<i4", "<i4", "<i4", "<i4", "<i4", "<u8",
                    "<u8", "<u8", "<i4"],
        "offsets": [0, 128, 256, 276, 296, 300, 304, 308, 312, 320, 328, 336],
        "itemsize": 384,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Copy:
    """A tensor copy: the map's geometry and where the box starts."""

    dtype: str
    dim: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    swizzle: str = "none"
    steps: tuple[int, ...] = ()
    fill: str = "zero"
    to: tuple[int, ...] = field(default=())

    def map(self, address):
        return TensorMap(
            address, self.dtype, self.dim, self.strides, self.box, self.steps, self.swizzle,
            "none", self.fill,
        )  # fmt: skip


COPIES = [
    Copy("uint8", (200,), (), (64,), (16,)),
    Copy("uint8", (200,), (), (64,), (-16,)),
    Copy("uint8", (128, 40), (128,), (128, 16), (0, 3), "128B"),
    Copy("uint8", (128, 40), (128,), (128, 16), (-32, 30), "128B"),
    Copy("uint8", (128, 40), (128,), (64, 16), (64, 3), "64B"),
    Copy("uint8", (128, 40), (128,), (32, 24), (32, -5), "32B"),
    Copy("uint8", (128, 40), (128,), (64, 8), (32, 5), "128B"),  # narrower than the swizzle
    Copy("uint8", (128, 40), (128,), (16, 8), (32, 5), "64B"),
    Copy("float16", (70, 9), (144,), (32, 8), (48, 4), "64B", (), "nan"),
    Copy("float32", (40, 9), (160,), (32, 8), (28, 4), "128B", (), "nan"),
    Copy("bfloat16", (24, 9), (48,), (24, 8), (8, 4), "none", (), "nan"),
    Copy("uint16", (20, 7, 5), (48, 336), (16, 4, 3), (8, 5, 3)),
    Copy("uint32", (20, 7, 5, 3), (96, 672, 3360), (8, 2, 3, 2), (16, -1, 3, 2)),
    Copy("uint8", (48, 3, 4, 2, 3), (48, 144, 576, 1152), (16, 2, 3, 2, 2), (32, 2, 2, 1, -1)),
    Copy("uint8", (64, 30, 6), (64, 1920), (32, 12, 4), (16, 3, 1), "32B", (1, 3, 2)),
    Copy("uint8", (64, 30, 6), (64, 1920), (32, 12, 5), (16, 25, 1), "none", (2, 5, 4)),
    Copy("uint8", (128, 16, 4), (512, 128), (128, 16, 2), (0, 0, 1), "128B"),  # slabs of a row
    Copy("uint8", (128, 8), (128,), (128, 8), (0, 8), "128B"),  # entirely outside
]


def background(copy, memory):
    """The dense image of a box, by the copy plan (which has its own tests)."""
    plan = box(copy.map(0x1000), copy.at, 0x400)
    image = plan.background()
    if plan.inside.any():
        span = np.arange(plan.last - plan.first)
        plan.place(image, memory[plan.rows[plan.inside][:, None] - 0x1000 + span])
    shared = np.full(1 << 16, 0xEE, np.uint8)
    shared[plan.offsets] = image.reshape(-1)
    return shared[0x400 : 0x400 + extent(copy)], plan, image


def extent(copy):
    """Bytes from the first to the last of a box in shared memory."""
    nbytes = box_bytes(copy.map(0))
    span = {"none": 0, "32B": 32, "64B": 64, "128B": 128}[copy.swizzle]
    row = copy.box[0] * ELEMENT_TYPES[copy.dtype].shared_bits // 8
    return nbytes // row * max(row, span)


def run_tensor(device, copy, mode=0, fault=0):
    """Run the tensor kernel; return the dump and the destination."""
    rng = np.random.default_rng(5)
    memory = rng.integers(1, 250, 1 << 14, dtype=np.uint8)
    source = device.upload(memory)
    target = device.upload(np.full(1 << 14, 7, np.uint8))
    nbytes, size = box_bytes(copy.map(0)), extent(copy)
    dump = device.alloc(size)
    params = np.zeros((), PARAMS)
    params["src"] = np.void(device.encode_tensor_map(copy.map(source.address)))
    params["dst"] = np.void(device.encode_tensor_map(copy.map(target.address)))
    rank = len(copy.dim)
    params["c"][:rank] = copy.at
    params["to"][:rank] = copy.to or (0,) * rank
    params["rank"], params["bytes"], params["mode"] = rank, nbytes, mode
    params["fault"], params["dump"], params["extent"] = fault, dump.address, size
    launch(device, "emu_tma.cu", "sm_90a", "tensor", params.tobytes(), shared=size + 1024)
    return memory, dump, target


@pytest.mark.parametrize("copy", COPIES, ids=str)
def test_tensor_load(copy):
    device = Emulated(seed=3)
    memory, dump, _ = run_tensor(device, copy)
    np.testing.assert_array_equal(dump.to_numpy(), background(copy, memory)[0])


def stored(copy, memory, add):
    """What the destination holds afterwards, by a loop over rows."""
    _, _, image = background(copy, memory)
    to = copy.to or (0,) * len(copy.dim)
    plan = box(copy.map(0x1000), to, 0x400)
    result = np.full(1 << 14, 7, np.uint8)
    end = -(-plan.last // 16) * 16  # whole units of 16 bytes
    part = image[plan.inside, :end]
    at = plan.rows[plan.inside][:, None] - 0x1000 + np.arange(end)
    dtype = np.dtype(copy.dtype)
    if add:
        part = (result[at].view(dtype) + part.copy().view(dtype)).view(np.uint8)
    result[at] = part
    return result


STORES = [
    Copy("uint8", (128, 40), (128,), (128, 16), (0, 3), "128B", to=(0, 20)),
    Copy("uint8", (128, 40), (128,), (64, 16), (64, 3), "64B", to=(96, 30)),
    Copy("uint32", (20, 7, 5), (96, 672), (8, 4, 3), (8, 1, 1), to=(4, 5, 3)),
    Copy("uint8", (200,), (), (64,), (16,), to=(160,)),
    Copy("uint8", (128, 40), (128,), (32, 16), (64, 3), "128B", to=(16, 30)),
    Copy("float16", (70, 9), (144,), (32, 8), (8, 0), to=(48, 2)),
]


@pytest.mark.parametrize(("copy", "mode"), [*((c, 1) for c in STORES), (STORES[2], 2)], ids=str)
def test_tensor_store_clips_at_the_edges(copy, mode):
    device = Emulated(seed=4)
    memory, _, target = run_tensor(device, copy, mode)
    np.testing.assert_array_equal(target.to_numpy(), stored(copy, memory, mode == 2))


@pytest.mark.parametrize("to", [(-32, 3), (0, -1)])
def test_store_to_negative_coordinates_is_illegal(to):
    with pytest.raises(EmulatorFault, match="must not be negative"):
        run_tensor(Emulated(), replace(STORES[0], to=to), 1)


BROKEN = {
    1: "mbarrier.init is not fenced",
    2: "data race|uninitialised|no mbarrier was initialised",
    3: "deadlock.*16 bytes pending",
    4: "in flight|uninitialised|data race",
    5: "no fence.proxy.async|data race",
    6: "exits while an operation on its shared memory is in flight",
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_broken_rules_of_a_tensor_copy(fault, seed):
    with pytest.raises(EmulatorFault, match=f"(?s){BROKEN[fault]}"):
        run_tensor(Emulated(seed=seed, schedule="lazy"), STORES[0], 1, fault)


def test_reusing_a_stored_box_after_wait_group_read_is_fine():
    run_tensor(Emulated(seed=1, schedule="lazy"), STORES[0], 1, 7)


# -- one-dimensional copies -----------------------------------------------------------------------


def run_ring(device, chunks=8, mode=0, fault=0):
    data = np.random.default_rng(6).integers(0, 1 << 20, (chunks, 256), dtype=np.uint32)
    source, words = device.upload(data), device.upload(np.zeros(chunks, np.uint64))
    dump = device.upload(np.zeros(256, np.uint32))
    params = np.zeros((), PARAMS)
    params["global"], params["words"], params["dump"] = (
        source.address,
        words.address,
        dump.address,
    )
    params["bytes"], params["mode"], params["fault"] = data.nbytes, mode, fault
    launch(device, "emu_tma.cu", "sm_90a", "ring", params.tobytes(), block=64)
    return data, words.to_numpy(), dump.to_numpy()


@pytest.mark.parametrize("schedule", ["eager", "random", "lazy", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_ring_of_bulk_copies(schedule, seed):
    data, words, dump = run_ring(Emulated(seed=seed, schedule=schedule), mode=1)
    np.testing.assert_array_equal(words, data.sum(axis=1, dtype=np.uint64))
    np.testing.assert_array_equal(dump, 2 * data[-1])


@pytest.mark.parametrize(
    ("fault", "words"),
    [(1, "in flight|data race|arrivals|more bytes"), (2, "in flight|uninitialised|data race"),
     (3, "in flight|uninitialised|data race")],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_broken_ring(fault, words, seed):
    with pytest.raises(EmulatorFault, match=words):
        run_ring(Emulated(seed=seed), fault=fault)


# -- clusters -------------------------------------------------------------------------------------


def run_multicast(device, fault=0):
    data = np.random.default_rng(7).integers(0, 256, (32, 128), dtype=np.uint8)
    source, dump = device.upload(data), device.upload(np.zeros((2, 4352), np.uint8))
    params = np.zeros((), PARAMS)
    tensor_map = TensorMap(source.address, "uint8", (128, 32), (128,), (128, 16))
    params["src"] = np.void(device.encode_tensor_map(tensor_map))
    params["dump"], params["fault"] = dump.address, fault
    launch(
        device, "emu_tma.cu", "sm_90a", "multicast", params.tobytes(), grid=2, block=64, cluster=2
    )
    return data.reshape(-1), dump.to_numpy()


@pytest.mark.parametrize("seed", range(4))
def test_multicast_and_distributed_shared_memory(seed):
    data, dump = run_multicast(Emulated(seed=seed))
    for rank in range(2):
        np.testing.assert_array_equal(dump[rank, :4096], data)
        np.testing.assert_array_equal(dump[rank, 4096:], data[(1 - rank) * 2048 :][:256])


@pytest.mark.parametrize(
    ("fault", "words"),
    [(1, "no mbarrier was initialised|data race|uninitialised|not ordered"),
     (2, "multicast mask 0x0008"), (3, "exited|exits while")],
)  # fmt: skip
def test_broken_clusters(fault, words):
    for seed in range(40):  # a fault may need a schedule that few seeds make
        try:
            run_multicast(Emulated(seed=seed, schedule="random"), fault)
        except EmulatorFault as error:
            assert any(word in str(error) for word in words.split("|")), error
            return
    pytest.fail("no schedule showed the fault")


# -- mbarrier -------------------------------------------------------------------------------------


def run_barriers(device, fault=0):
    words = device.upload(np.full(16, 99, np.uint64))
    params = np.zeros((), PARAMS)
    params["words"], params["fault"] = words.address, fault
    launch(device, "emu_tma.cu", "sm_90a", "barriers", params.tobytes(), block=32)
    return words.to_numpy()


def test_every_mbarrier_instruction():
    assert run_barriers(Emulated())[:13].tolist() == [0, 1, 0, 3, 2, 1, 1, 0, 2, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("fault", "words"),
    [(1, "count 0"), (2, "noComplete completes phase"), (3, "more bytes"),
     (4, "3 arrivals with 2 pending of 2"), (5, "only the current and the preceding phase"),
     (6, "over the live mbarrier"), (7, "overwritten"), (8, "no state that"),
     (9, "no mbarrier was initialised")],
)  # fmt: skip
def test_broken_mbarrier_rules(fault, words):
    with pytest.raises(EmulatorFault, match=words):
        run_barriers(Emulated(), fault)


# -- tensor maps in memory ------------------------------------------------------------------------


def run_patch(device):
    data = np.random.default_rng(8).integers(0, 256, (24, 64), dtype=np.uint8)
    source, other = device.upload(data), device.upload(np.zeros((8, 64), np.uint8))
    dump, home = device.upload(np.zeros((16, 64), np.uint8)), device.upload(np.zeros(128, np.uint8))
    params = np.zeros((), PARAMS)
    tensor_map = TensorMap(other.address, "uint8", (64, 4), (64,), (64, 16))
    params["src"] = np.void(device.encode_tensor_map(tensor_map))
    params["dump"], params["global"], params["words"] = dump.address, source.address, home.address
    params["c"] = (0, 2, 10, 128, 0)  # from row 2; 10 rows; stride 128: every second row
    params["bytes"] = 16 * 64
    launch(device, "emu_tma.cu", "sm_90a", "patch", params.tobytes(), block=32)
    want = np.zeros((16, 64), np.uint8)
    want[:8] = data[::2][2:10]
    return dump.to_numpy(), want


def test_patched_tensor_map():
    result, want = run_patch(Emulated())
    np.testing.assert_array_equal(result, want)
