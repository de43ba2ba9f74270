"""What the emulator forbids: each broken rule is reported as itself, with kernel, warp and line."""

import numpy as np
import pytest

from fp4rt.device import EmulatorFault, LaunchConfig
from fp4rt.emulator import EmulatorDevice

HEADER = """.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
"""


def module(body):
    """A kernel `k` whose %p0 points to a 256-byte buffer; %t is the thread, %l the lane."""
    return (
        HEADER
        + """.visible .entry k(.param .align 8 .b8 params[8])
{
  .reg .b16 %h<10>;
  .reg .b32 %t, %l, %c, %r<20>;
  .reg .b64 %p<10>;
  .reg .f32 %f<10>;
  .reg .pred %q<10>;
  .shared .align 16 .b8 s[1024];
  .shared .align 8 .b64 bar;
  .local .align 4 .b8 local[16];
  ld.param.u64 %p0, [params];
  mov.u32 %t, %tid.x;
  mov.u32 %c, %ctaid.x;
  mov.u32 %l, %laneid;
  mul.wide.u32 %p1, %t, 4;
  add.u64 %p1, %p0, %p1;
  mul.lo.u32 %r0, %t, 4;
  mov.u32 %r1, s;
  add.u32 %r2, %r1, %r0;
"""
        + body
        + "\n  ret;\n}\n"
    )


def run(body, *, block=32, grid=1, cluster=1, shared=0, data=None, **options):
    """Run the kernel; return its buffer as uint32."""
    with EmulatorDevice("sm_90a", **options) as device:
        kernel = device.load(module(body).encode()).kernel("k")
        if data is None:
            data = np.arange(64, dtype=np.uint32)
        buffer = device.upload(data)
        config = LaunchConfig((grid, 1, 1), (block, 1, 1), shared, (cluster, 1, 1))
        device.stream.launch(kernel, config, np.uint64(buffer.address).tobytes())
        return buffer.to_numpy()


def fault(body, match, **options):
    """Run the kernel and return the fault it must raise."""
    with pytest.raises(EmulatorFault, match=match) as caught:
        run(body, **options)
    return str(caught.value)


# ---------------------------------------------------------------------------------- messages


def test_fault_names_kernel_cta_warp_line_and_source():
    body = """
  .loc 1 42 7
  ld.global.u32 %r3, [%p1+1000];"""
    text = module(body).replace(".extern .shared", '.file 1 "gemm.cu"\n.extern .shared', 1)
    line = text[: text.index("ld.global.u32 %r3")].count("\n") + 1
    with EmulatorDevice("sm_90a") as device:
        kernel = device.load(text.encode()).kernel("k")
        buffer = device.upload(np.zeros(64, np.uint32))
        with pytest.raises(EmulatorFault) as caught:
            device.stream.launch(
                kernel,
                LaunchConfig((1, 1, 1), (64, 1, 1)),
                np.uint64(buffer.address).tobytes(),
            )
    message = str(caught.value)
    for part in ("kernel k", "CTA (0,0,0)", f"PTX line {line}", "source gemm.cu:42", "seed=0"):
        assert part in message


def test_unknown_instruction_stops_with_its_text_and_line():
    message = fault("  tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%p0, {%t}];", "unknown instruction")
    assert "tex.1d.v4.f32.s32" in message
    assert "PTX line" in message


def test_unknown_instruction_that_is_not_reached_does_no_harm():
    run("  ret;\n  tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%p0, {%t}];")


# ------------------------------------------------------------------------------------- memory

OUT_OF_BOUNDS = {
    "global past the end": ("ld.global.u32 %r3, [%p1+132];", "global access .* out of bounds"),
    "global before": ("ld.global.u32 %r3, [%p0+-4];", "starts 4 bytes before"),
    "global store": ("st.global.u32 [%p1+132], %t;", "out of bounds"),
    "global vector": ("ld.global.v4.u32 {%r3,%r4,%r5,%r6}, [%p0+248];", "misaligned|out of"),
    "nowhere": ("mov.u64 %p2, 16; ld.global.u32 %r3, [%p2];", "no live allocation"),
    "shared past the end": ("st.shared.u32 [%r2+1024], %t;", "shared access .* out of bounds"),
    "shared reserved": ("mov.u32 %r3, 0; st.shared.u32 [%r3], %t;", "out of bounds"),
    "local": ("mov.u64 %p2, 16; st.local.u32 [%p2], %t;", "local access .* out of bounds"),
    "param": ("ld.param.u64 %p3, [params+8];", "outside the 8 bytes of parameters"),
    "generic shared": (
        "mov.u64 %p2, s; cvta.shared.u64 %p3, %p2; st.u32 [%p3+4096], %t;",
        "shared access .* out of bounds",
    ),
    "atomic": ("atom.global.add.u32 %r3, [%p0+256], 1;", "out of bounds"),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_bounds(name):
    text, match = OUT_OF_BOUNDS[name]
    fault(text, match)


MISALIGNED = {
    "global": "ld.global.u32 %r3, [%p1+2];",
    "global vector": "ld.global.v4.u32 {%r3,%r4,%r5,%r6}, [%p1+8];",
    "shared": "st.shared.u32 [%r2+1], %t;",
    "shared vector": "st.shared.v2.u32 [%r2], {%t, %t};",
    "local": "mov.u64 %p2, local; st.local.u16 [%p2+1], 5;",
    "param": "ld.param.u32 %r3, [params+2];",
}


@pytest.mark.parametrize("name", MISALIGNED)
def test_alignment(name):
    fault(MISALIGNED[name], "misaligned")


UNINITIALISED = {
    "shared": ("ld.shared.u32 %r3, [%r2];", "uninitialised shared memory at offset 0x400"),
    "one shared byte": (
        "st.shared.u8 [%r2], %t; st.shared.u16 [%r2+2], 7; ld.shared.u32 %r3, [%r2];",
        "uninitialised shared memory at offset 0x401",
    ),
    "local": ("mov.u64 %p2, local; ld.local.u32 %r3, [%p2];", "uninitialised local memory"),
}


@pytest.mark.parametrize("name", UNINITIALISED)
def test_initialisation(name):
    fault(*UNINITIALISED[name])


def test_fresh_global_memory_is_poison():
    with EmulatorDevice("sm_90a") as device:
        kernel = device.load(module("ld.global.u32 %r3, [%p1];").encode()).kernel("k")
        buffer = device.alloc(32, np.uint32)
        buffer.sub(0, 16, np.uint32)
        device.stream.fill(buffer.sub(0, 16, np.uint32), 0)
        with pytest.raises(EmulatorFault, match="uninitialised global memory: byte 64"):
            device.stream.launch(
                kernel,
                LaunchConfig((1, 1, 1), (32, 1, 1)),
                np.uint64(buffer.address).tobytes(),
            )


def test_freed_memory_is_gone():
    with EmulatorDevice("sm_90a") as device:
        kernel = device.load(module("ld.global.u32 %r3, [%p1];").encode()).kernel("k")
        buffer = device.upload(np.zeros(32, np.uint32))
        address = np.uint64(buffer.address).tobytes()
        buffer.close()
        with pytest.raises(EmulatorFault, match="no live allocation"):
            device.stream.launch(kernel, LaunchConfig((1, 1, 1), (32, 1, 1)), address)


# -------------------------------------------------------------------------------------- races

STORE_AND_READ = """
  st.shared.u32 [%r2], %t;
  {barrier}
  xor.b32 %r3, %r0, 128;
  add.u32 %r3, %r1, %r3;
  ld.shared.u32 %r4, [%r3];
  st.global.u32 [%p1], %r4;"""


def test_barrier_orders_shared_memory():
    out = run(STORE_AND_READ.format(barrier="bar.sync 0;"), block=64)
    assert np.array_equal(out, np.arange(64) ^ 32)


@pytest.mark.parametrize("seed", range(4))
def test_read_without_barrier_is_a_race(seed):
    body = "  st.shared.u32 [%r2], %t;\n  bar.sync 0;\n" + STORE_AND_READ.format(barrier="")
    fault(body, "data race|no barrier", block=64, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_overwriting_what_another_warp_reads_is_a_race(seed):
    body = STORE_AND_READ.format(barrier="bar.sync 0;") + "\n  st.shared.u32 [%r2], %r4;"
    message = fault(body, "data race", block=64, seed=seed)
    assert "shared memory of CTA rank 0" in message


def test_two_writers_are_a_race():
    fault("  st.shared.u32 [%r1], %t;", "data race: write to shared memory", block=64)


def test_bytes_of_one_word_are_separate():
    run("  add.u32 %r3, %r1, %t;\n  st.shared.u8 [%r3], %t;", block=64)


def test_atomics_do_not_race_with_each_other():
    body = """
  setp.eq.u32 %q0, %t, 0;
  @%q0 st.shared.u32 [%r1], 0;
  bar.sync 0;
  red.shared.add.u32 [%r1], 1;
  bar.sync 0;
  ld.shared.u32 %r3, [%r1];
  st.global.u32 [%p1], %r3;"""
    assert (run(body, block=64) == 64).all()
    unordered = body.replace("1;\n  bar.sync 0;\n  ld", "1;\n  ld")
    assert unordered != body
    fault(unordered, "data race", block=64)


def test_release_and_acquire_order_shared_memory():
    body = """
  mov.u32 %r5, dynamic;
  setp.eq.u32 %q0, %t, 0;
  @%q0 st.shared.u32 [%r5], 0;
  bar.sync 0;
  setp.lt.u32 %q1, %t, 32;
  @!%q1 bra READER;
  st.shared.u32 [%r2], %t;
  bar.warp.sync 0xffffffff;
  @%q0 st.release.cta.shared.u32 [%r5], 1;
  bra DONE;
READER:
  ld.{acquire}.cta.shared.u32 %r6, [%r5];
  setp.ne.u32 %q2, %r6, 1;
  @%q2 bra READER;
  ld.shared.u32 %r7, [%r2+-128];
  st.global.u32 [%p1], %r7;
DONE:"""
    out = run(body.format(acquire="acquire"), block=64, shared=16)
    assert np.array_equal(out[32:], np.arange(32))
    fault(body.format(acquire="relaxed"), "data race", block=64, shared=16)


# ------------------------------------------------------------------------ async proxy and copies

BULK_STORE = """
  st.shared.u32 [%r2], %t;
  {fence}
  bar.sync 0;
  setp.eq.u32 %q0, %t, 0;
  @!%q0 bra DONE;
  cp.async.bulk.global.shared::cta.bulk_group [%p0], [%r1], 128;
  cp.async.bulk.commit_group;
  {wait}
DONE:"""


def test_bulk_store_sees_fenced_writes():
    body = BULK_STORE.format(
        fence="fence.proxy.async.shared::cta;", wait="cp.async.bulk.wait_group 0;"
    )
    assert np.array_equal(run(body)[:32], np.arange(32))


def test_missing_proxy_fence_is_named():
    fault(BULK_STORE.format(fence="", wait="cp.async.bulk.wait_group 0;"), "fence.proxy.async")


def test_fence_before_the_write_does_not_count():
    body = BULK_STORE.format(fence="", wait="cp.async.bulk.wait_group 0;")
    fault("  fence.proxy.async;\n" + body, "fence.proxy.async")


def test_copy_in_flight_at_exit():
    body = BULK_STORE.format(fence="fence.proxy.async.shared::cta;", wait="")
    fault(body, "in flight|exits", schedule="lazy")


BULK_LOAD = """
  mov.u32 %r5, bar;
  setp.eq.u32 %q0, %t, 0;
  @%q0 mbarrier.init.shared.b64 [%r5], 1;
  @%q0 fence.mbarrier_init.release.cluster;
  bar.sync 0;
  @!%q0 bra WAIT;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r5], {bytes};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%p0], 128, [%r5];
WAIT:
  bar.warp.sync 0xffffffff;
  {wait}
  ld.shared.u32 %r4, [%r2];
  add.u32 %r4, %r4, 1;
  st.global.u32 [%p1], %r4;"""
TRY_WAIT = """
AGAIN:
  mbarrier.try_wait.parity.shared.b64 %q1, [%r5], 0;
  @!%q1 bra AGAIN;
"""


@pytest.mark.parametrize("schedule", ["mixed", "random", "eager", "lazy"])
def test_bulk_load_arrives(schedule):
    out = run(BULK_LOAD.format(bytes=128, wait=TRY_WAIT), schedule=schedule)
    assert np.array_equal(out[:32], np.arange(32) + 1)


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_bulk_load_without_wait(schedule):
    fault(BULK_LOAD.format(bytes=128, wait=""), "race|in flight|uninitialised", schedule=schedule)


def test_too_many_expected_bytes_deadlock_with_the_list_of_waiters():
    message = fault(BULK_LOAD.format(bytes=144, wait=TRY_WAIT), "deadlock")
    assert "who waits for what" in message
    assert "mbarrier" in message
    assert "16 bytes" in message


def test_too_few_expected_bytes():
    fault(BULK_LOAD.format(bytes=112, wait=TRY_WAIT), "more bytes")


def test_cp_async_needs_its_wait():
    body = """
  cp.async.ca.shared.global [%r2], [%p1], 4;
  cp.async.commit_group;
  {wait}
  ld.shared.u32 %r3, [%r2];
  add.u32 %r3, %r3, 7;
  st.global.u32 [%p1], %r3;"""
    out = run(body.format(wait="cp.async.wait_group 0;"))
    assert np.array_equal(out[:32], np.arange(32) + 7)
    for schedule in ("eager", "lazy"):
        fault(body.format(wait=""), "in flight|race|uninitialised", schedule=schedule)
    fault(body.format(wait="cp.async.wait_group 1;"), "in flight|uninitialised", schedule="lazy")


# ----------------------------------------------------------------------------------- barriers


def test_barrier_that_some_warps_never_reach():
    body = """
  setp.lt.u32 %q0, %t, 32;
  @%q0 bar.sync 1, 64;"""
    message = fault(body, "deadlock", block=64)
    assert "barrier 1 (32 of 64 threads have arrived)" in message


def test_barrier_counts_must_agree():
    body = """
  setp.lt.u32 %q0, %t, 32;
  @%q0 bar.sync 1, 64;
  @!%q0 bar.sync 1, 96;"""
    fault(body, "thread count", block=64)


def test_barrier_count_of_no_whole_warp():
    fault("  bar.sync 1, 48;", "multiple of the warp size")


def test_barrier_number():
    fault("  bar.sync 16;", "16 barriers")


def test_aligned_barrier_of_half_a_warp():
    body = """
  setp.lt.u32 %q0, %l, 16;
  @%q0 bra ONE;
  bar.sync 2;
  ret;
ONE:
  bar.sync 3;"""
    fault(body, "whole-warp")


def test_guard_of_an_aligned_instruction_must_be_uniform():
    fault("  setp.lt.u32 %q0, %l, 16;\n  @%q0 bar.sync 0;", "guard predicate differs")


def test_lanes_meet_again_before_an_aligned_instruction():
    body = """
  setp.lt.u32 %q0, %l, 16;
  @%q0 bra JOIN;
  add.u32 %r3, %t, 1;
JOIN:
  bar.sync 0;
  st.global.u32 [%p1], %t;"""
    assert np.array_equal(run(body, block=64), np.arange(64))


def test_member_outside_its_mask():
    fault("  shfl.sync.idx.b32 %r3, %t, 0, 31, 0xffff;", "membermask 0x0000ffff does not name")


def test_member_that_never_comes():
    body = """
  setp.lt.u32 %q0, %l, 16;
  @%q0 bra ONE;
  bar.sync 0;
  ret;
ONE:
  shfl.sync.idx.b32 %r3, %t, 0, 31, 0xffffffff;
  bar.sync 0;"""
    fault(body, "deadlock")


def test_cluster_wait_without_arrive():
    fault("  barrier.cluster.wait.aligned;", "no barrier.cluster.arrive", grid=2, cluster=2)


def test_peer_memory_after_the_peer_has_gone():
    body = """
  mapa.shared::cluster.u32 %r3, %r2, 1;
  setp.eq.u32 %q0, %c, 1;
  st.shared.u32 [%r2], %t;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  @%q0 ret;
  mov.u32 %r6, 0;
LOOP:
  add.u32 %r6, %r6, 1;
  setp.lt.u32 %q1, %r6, 3000;
  @%q1 bra LOOP;
  ld.shared::cluster.u32 %r4, [%r3];"""
    fault(body, "has exited", grid=2, cluster=2)


def test_peer_memory_needs_the_cluster_window():
    body = """
  st.shared.u32 [%r2], %t;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  mapa.shared::cluster.u32 %r3, %r2, 1;
  ld.shared::cta.u32 %r4, [%r3];
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;"""
    fault(body, "another CTA's memory needs", grid=2, cluster=2)


def test_cluster_memory_without_barrier_is_a_race():
    body = """
  st.shared.u32 [%r2], %t;
  barrier.cluster.arrive.{order}.aligned;
  barrier.cluster.wait.aligned;
  mapa.shared::cluster.u32 %r3, %r2, 1;
  ld.shared::cluster.u32 %r4, [%r3];
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;"""
    run(body.format(order="release"), grid=2, cluster=2)
    fault(body.format(order="relaxed"), "data race", grid=2, cluster=2)


# ------------------------------------------------------------------------------ other stoppers


def test_spinning_for_ever_is_reported():
    body = """
AGAIN:
  ld.volatile.global.u32 %r3, [%p0];
  setp.ne.u32 %q0, %r3, 77;
  @%q0 bra AGAIN;"""
    fault(body, "no progress", hang_limit=20_000)


@pytest.mark.parametrize("space", ["global", "shared"])
def test_a_lock_that_nobody_gives_back_is_reported(space):
    """The lanes that poll change nothing, however often they try."""
    body = """
  setp.eq.u32 %q1, %t, 0;
  cvt.u64.u32 %p3, %r1;
  {where}
  @%q1 st.{space}.u32 [%p3], 0;
  bar.warp.sync -1;
AGAIN:
  atom.{space}.cas.b32 %r3, [%p3], 0, 1;
  setp.ne.u32 %q0, %r3, 0;
  @%q0 bra AGAIN;
  bar.sync 0;"""
    where = "mov.u64 %p3, %p0;" if space == "global" else ""
    fault(body.format(space=space, where=where), "no progress", hang_limit=2_000)


def test_trap():
    fault("  trap;", "trap")


def test_registers_of_warpgroups_have_limits():
    fault("  setmaxnreg.dec.sync.aligned.u32 20;", "24..256")


def test_reading_a_register_nobody_wrote():
    fault("  add.u32 %r9, %r8, 1;\n  st.global.u32 [%p1], %r9;", "%r8 .* never written")


def test_reading_a_register_that_some_lanes_wrote():
    body = """
  setp.lt.u32 %q0, %l, 16;
  @%q0 mov.u32 %r8, 5;
  add.u32 %r9, %r8, 1;"""
    fault(body, "%r8 .* never written")


def test_a_register_written_on_the_path_taken_is_fine():
    body = """
  setp.lt.u32 %q0, %t, 64;
  @%q0 mov.u32 %r8, 5;
  add.u32 %r9, %r8, 1;"""
    run(body)


def test_results_that_depend_on_the_schedule():
    body = """
  setp.ne.u32 %q0, %l, 0;
  @%q0 ret;
  atom.global.add.u32 %r3, [%p0+252], 1;
  st.global.u32 [%p1], %r3;"""
    fault(body, "results differ between schedules", block=64, seeds=8)


def test_bulk_zeroing_writes_exactly_its_bytes():
    body = """
  setp.eq.u32 %q0, %t, 0;
  @%q0 st.bulk.weak.shared::cta [%r1], 128, 0;
  bar.sync 0;
  ld.shared.u32 %r3, [%r2];
  st.global.u32 [%p1], %r3;"""
    assert (run(body)[:32] == 0).all()
    fault(body, "uninitialised shared memory at offset 0x480", block=64)


HAND_OVER = """
  setp.lt.u32 %q0, %t, 32;
  setp.eq.u32 %q1, %l, 0;
  setp.eq.u32 %q2, %t, 0;
  @%q2 mbarrier.init.shared::cta.b64 [bar], 1;
  bar.sync 0;
  @!%q0 bra READER;
  st.shared.u32 [%r2], %t;
  {together}
  @%q1 mbarrier.arrive.shared::cta.b64 _, [bar];
  bra DONE;
READER:
  mbarrier.try_wait.parity.shared::cta.b64 %q3, [bar], 0;
  @!%q3 bra READER;
  ld.shared.u32 %r5, [%r2+-128];
  add.u64 %p1, %p1, -128;
  st.global.u32 [%p1], %r5;
DONE:
"""


@pytest.mark.parametrize("seed", range(3))
def test_one_lane_speaks_for_its_warp_only_after_a_warp_barrier(seed):
    """Lane 0 arrives for all 32 lanes' stores; a shuffle brings them together but orders none."""
    together = HAND_OVER.format(together="bar.warp.sync -1;")
    assert np.array_equal(run(together, block=64, seed=seed)[:32], np.arange(32))
    apart = "by lane [1-9].* of warp 0 .*no bar.warp.sync|uninitialised shared"
    fault(HAND_OVER.format(together=""), apart, block=64, seed=seed)
    shuffled = HAND_OVER.format(together="shfl.sync.idx.b32 %r9, %t, 0, 31, -1;")
    fault(shuffled, apart, block=64, seed=seed)


EMPTIED = """
  mov.u32 %r5, bar;
  setp.eq.u32 %q1, %l, 0;
  setp.eq.u32 %q2, %t, 0;
  @%q2 mbarrier.init.shared::cta.b64 [%r5], 1;
  st.shared.u32 [%r2], %t;
  bar.sync 0;
  setp.lt.u32 %q0, %t, 32;
  @!%q0 bra WRITER;
  ld.shared.u32 %r6, [%r2];
  {together}
  @%q1 mbarrier.arrive.shared::cta.b64 _, [%r5];
  bra DONE;
WRITER:
  mbarrier.try_wait.parity.shared::cta.b64 %q3, [%r5], 0;
  @!%q3 bra WRITER;
  st.shared.u32 [%r2+-128], %t;
DONE:
"""


@pytest.mark.parametrize("seed", range(3))
def test_what_other_lanes_still_read_is_not_free(seed):
    """Their loads are over once the whole warp has executed an instruction together."""
    for together in ("bar.warp.sync -1;", "shfl.sync.idx.b32 %r9, %r6, 0, 31, -1;"):
        run(EMPTIED.format(together=together), block=64, seed=seed)
    fault(EMPTIED.format(together=""), "read by lane .*no bar.warp.sync", block=64, seed=seed)


def test_a_copy_of_what_other_lanes_have_written():
    body = """
  st.shared.u32 [%r2], %t;
  fence.proxy.async.shared::cta;
  {together}
  setp.eq.u32 %q0, %t, 0;
  @%q0 cp.async.bulk.global.shared::cta.bulk_group [%p0], [%r1], 128;
  @%q0 cp.async.bulk.commit_group;
  @%q0 cp.async.bulk.wait_group 0;"""
    out = run(body.format(together="bar.warp.sync -1;"))
    assert np.array_equal(out[:32], np.arange(32))
    fault(body.format(together=""), "lane 1 of warp 0 .*no bar.warp.sync")


def test_lanes_of_a_warp_exchange_data():
    """A neighbour's store may be read after a barrier of the warp, or of a part that has both."""
    body = """
  st.shared.u32 [%r2], %t;
  {together}
  xor.b32 %r3, %r0, 4;
  add.u32 %r3, %r1, %r3;
  ld.shared.u32 %r4, [%r3];
  st.global.u32 [%p1], %r4;"""
    tiles = """and.b32 %r5, %l, 16;
  mov.u32 %r6, 0xffff;
  shl.b32 %r5, %r6, %r5;
  bar.warp.sync %r5;"""
    for together in ("bar.warp.sync -1;", "bar.sync 0;", tiles):
        out = run(body.format(together=together))
        assert np.array_equal(out[:32], np.arange(32) ^ 1)
    fault(body.format(together=""), "no bar.warp.sync lies between")
