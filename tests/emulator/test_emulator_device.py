"""The emulator behind the seam: launches, graphs, programmatic overlap, printing, eyes."""

import json

import numpy as np
import pytest

import fp4rt
from fp4rt.device import EmulatorFault, LaunchConfig
from fp4rt.emulator import EmulatorDevice

CHAIN = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry first(.param .align 8 .b8 params[16])
{
  .reg .b32 %t, %r<4>;
  .reg .b64 %p, %q;
  .reg .pred %s;
  ld.param.u64 %p, [params];
  mov.u32 %t, %tid.x;
  mul.wide.u32 %q, %t, 4;
  add.u64 %p, %p, %q;
  griddepcontrol.launch_dependents;
  mov.u32 %r0, 0;
LOOP:
  add.u32 %r0, %r0, 1;
  setp.lt.u32 %s, %r0, 200;
  @%s bra LOOP;
  st.global.u32 [%p], %r0;
  ret;
}
.visible .entry second(.param .align 8 .b8 params[16])
{
  .reg .b32 %t, %r<4>;
  .reg .b64 %p<2>, %q;
  ld.param.u64 %p0, [params];
  ld.param.u64 %p1, [params+8];
  mov.u32 %t, %tid.x;
  mul.wide.u32 %q, %t, 4;
  add.u64 %p0, %p0, %q;
  add.u64 %p1, %p1, %q;
  WAIT
  ld.global.u32 %r1, [%p0];
  add.u32 %r1, %r1, 1;
  st.global.u32 [%p1], %r1;
  ret;
}
"""


def run_chain(device, text):
    module = device.load(text.encode())
    a = device.upload(np.zeros(64, np.uint32))
    b = device.upload(np.zeros(64, np.uint32))
    params = np.array([a.address, b.address], np.uint64).tobytes()
    block = (64, 1, 1)
    device.stream.launch(module.kernel("first"), LaunchConfig((1, 1, 1), block), params)
    device.stream.launch(
        module.kernel("second"), LaunchConfig((1, 1, 1), block, programmatic=True), params
    )
    return b.to_numpy()


@pytest.mark.parametrize("seed", range(3))
def test_programmatic_launch_waits(seed):
    with EmulatorDevice("sm_90a", seed=seed) as device:
        out = run_chain(device, CHAIN.replace("WAIT", "griddepcontrol.wait;"))
        assert (out == 201).all()


@pytest.mark.parametrize("seed", range(3))
def test_missing_griddepcontrol_wait_is_reported(seed):
    with (
        EmulatorDevice("sm_90a", seed=seed) as device,
        pytest.raises(EmulatorFault, match=r"no griddepcontrol\.wait"),
    ):
        run_chain(device, CHAIN.replace("WAIT", ""))


ONE_WARP_WAITS = """setp.ge.u32 %s, %t, 32;
  @%s bra BEHIND;
  griddepcontrol.wait;
BEHIND:
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_wait_counts_for_those_ordered_behind_it(seed):
    """Warp 1 may read what warp 0 has waited for, but only behind a barrier."""
    text = CHAIN.replace("ld.param.u64 %p0", ".reg .pred %s;\n  ld.param.u64 %p0")
    with EmulatorDevice("sm_90a", seed=seed) as device:
        out = run_chain(device, text.replace("WAIT", ONE_WARP_WAITS + "  bar.sync 0;"))
        assert (out == 201).all()
        with pytest.raises(EmulatorFault, match=r"no griddepcontrol\.wait") as hit:
            run_chain(device, text.replace("WAIT", ONE_WARP_WAITS))
        assert "warp 1" in str(hit.value)


def test_launch_without_the_attribute_is_in_stream_order():
    with EmulatorDevice("sm_90a") as device:
        module = device.load(CHAIN.replace("WAIT", "").encode())
        a, b = (device.upload(np.zeros(64, np.uint32)) for _ in range(2))
        params = np.array([a.address, b.address], np.uint64).tobytes()
        for name in ("first", "second"):
            config = LaunchConfig((1, 1, 1), (64, 1, 1))
            device.stream.launch(module.kernel(name), config, params)
        assert (b.to_numpy() == 201).all()


def test_graph_replays_a_programmatic_chain():
    with EmulatorDevice("sm_90a") as device:
        module = device.load(CHAIN.replace("WAIT", "griddepcontrol.wait;").encode())
        a, b = (device.upload(np.zeros(64, np.uint32)) for _ in range(2))
        params = np.array([a.address, b.address], np.uint64).tobytes()
        with device.stream.capture() as capture:
            for name in ("first", "second"):
                config = LaunchConfig((1, 1, 1), (64, 1, 1), programmatic=name == "second")
                device.stream.launch(module.kernel(name), config, params)
        assert (b.to_numpy() == 0).all()
        for _ in range(2):
            device.stream.fill(b, 0)
            capture.graph.launch()
            assert (b.to_numpy() == 201).all()


HELLO = """.version 8.6
.target sm_90a
.address_size 64
.extern .func (.param .b32 result) vprintf (.param .b64 a, .param .b64 b);
.global .align 1 .b8 text[14] = {37, 100, 32, 37, 53, 46, 50, 102, 32, 37, 115, 33, 10, 0};
.global .align 1 .b8 name[3] = {72, 105, 0};
.visible .entry k()
{
  .reg .b32 %r<3>;
  .reg .b64 %p<5>;
  .local .align 8 .b8 values[24];
  mov.u64 %p0, values;
  cvta.local.u64 %p1, %p0;
  mov.u32 %r0, %tid.x;
  st.local.u32 [%p0], %r0;
  st.local.f64 [%p0+8], 0d3FF8000000000000;
  mov.u64 %p2, name;
  cvta.global.u64 %p2, %p2;
  st.local.u64 [%p0+16], %p2;
  mov.u64 %p3, text;
  cvta.global.u64 %p3, %p3;
  {
  .param .b64 a; .param .b64 b; .param .b32 result;
  st.param.b64 [a], %p3;
  st.param.b64 [b], %p1;
  call (result), vprintf, (a, b);
  ld.param.b32 %r1, [result];
  }
  ret;
}
"""


def test_printf_is_collected():
    with EmulatorDevice("sm_90a") as device:
        kernel = device.load(HELLO.encode()).kernel("k")
        device.stream.launch(kernel, LaunchConfig((1, 1, 1), (2, 1, 1)), b"")
        assert device.output == ["0  1.50 Hi!\n", "1  1.50 Hi!\n"]


def test_facts_of_a_kernel():
    text = CHAIN.replace(
        "params[16])\n{\n  .reg .b32 %t, %r<4>;\n  .reg .b64 %p, %q;",
        "params[16]) .maxntid 96, 1, 1\n{\n  .shared .align 8 .b8 s[40];\n"
        "  .local .align 8 .b8 l[24];\n  .reg .b32 %t, %r<4>;\n  .reg .b64 %p, %q;\n"
        "  mov.u32 %t, s;",
    ).replace("WAIT", "")
    with EmulatorDevice("sm_90a") as device:
        kernel = device.load(text.encode()).kernel("first")
        assert kernel.max_threads == 96
        assert kernel.params_bytes == 16
        assert kernel.shared_bytes == 40
        assert kernel.local_bytes == 32
        with pytest.raises(ValueError, match="128 threads"):
            config = LaunchConfig((1, 1, 1), (128, 1, 1))
            device.stream.launch(kernel, config, bytes(16))
        with pytest.raises(ValueError, match="16 bytes"):
            config = LaunchConfig((1, 1, 1), (32, 1, 1))
            device.stream.launch(kernel, config, bytes(8))


ILLEGAL = {
    "cluster does not divide": (LaunchConfig((3, 1, 1), (32, 1, 1), cluster=(2, 1, 1)), "multiple"),
    "too much shared memory": (LaunchConfig((1, 1, 1), (32, 1, 1), 228 * 1024), "shared memory"),
    "no threads": (LaunchConfig((1, 1, 1), (0, 1, 1)), "positive"),
    "cluster too large": (LaunchConfig((32, 1, 1), (32, 1, 1), cluster=(32, 1, 1)), "16"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_launches(name):
    config, match = ILLEGAL[name]
    with EmulatorDevice("sm_90a") as device:
        kernel = device.load(CHAIN.replace("WAIT", "").encode()).kernel("first")
        with pytest.raises(ValueError, match=match):
            device.stream.launch(kernel, config, bytes(16))


def test_cluster_that_fits_on_no_set_of_sms():
    text = CHAIN.replace("WAIT", "")
    with EmulatorDevice("sm_90a", sm_count=2) as device:
        kernel = device.load(text.encode()).kernel("first")
        buffer = device.upload(np.zeros(64, np.uint32))
        config = LaunchConfig((8, 1, 1), (64, 1, 1), 200 * 1024, cluster=(8, 1, 1))
        with pytest.raises(EmulatorFault, match="sm_count"):
            device.stream.launch(kernel, config, np.array([buffer.address, 0], np.uint64).tobytes())
            device.stream.synchronize()


@pytest.mark.parametrize(
    ("image", "match"),
    [(b"\x7fELF\x02", "cubin"), (b"\xff\xfe", "not PTX"), (b".version 8.6\nnonsense", "line 2")],
)
def test_images_that_are_not_ptx(image, match):
    with EmulatorDevice("sm_90a") as device, pytest.raises(ValueError, match=match):
        device.load(image)


@pytest.mark.parametrize(
    ("target", "arch", "runs"),
    [
        ("sm_90a", "sm_90a", True),
        ("sm_100f", "sm_100a", True),
        ("sm_100a", "sm_100f", True),
        ("sm_80", "sm_90a", True),
        ("sm_90", "sm_100a", True),
        ("sm_100f", "sm_90a", False),
        ("sm_90a", "sm_100a", False),
        ("sm_100", "sm_90a", False),
    ],
)
def test_an_image_for_another_architecture(target, arch, runs):
    text = HELLO.replace("sm_90a", target)
    with EmulatorDevice(arch) as device:
        if runs:
            assert device.load(text.encode()).kernel("k")
        else:
            with pytest.raises(ValueError, match=f"for {target}, which does not run on {arch}"):
                device.load(text.encode())


@pytest.mark.parametrize("image", [b"", b"// nothing\n", b".version 8.6\n"])
def test_an_image_without_a_target(image):
    with EmulatorDevice("sm_90a") as device, pytest.raises(ValueError, match=r"no \.target"):
        device.load(image)


def test_an_image_is_bytes():
    with (
        EmulatorDevice("sm_90a") as device,
        pytest.raises(TypeError, match=r"got str; use \.encode"),
    ):
        device.load(HELLO)


def test_unknown_kernel_lists_the_names():
    with EmulatorDevice("sm_90a") as device:
        module = device.load(CHAIN.replace("WAIT", "").encode())
        with pytest.raises(ValueError, match="first, second"):
            module.kernel("third")


def test_options_are_checked():
    for options, match in (
        ({"arch": "sm_12"}, "sm_90a"),
        ({"schedule": "fast"}, "lazy"),
        ({"seeds": 0}, "seeds"),
        ({"allow": {"everything"}}, "uninitialised-local"),
    ):
        with pytest.raises(ValueError, match=match):
            EmulatorDevice(**options)


def test_opened_by_name():
    with fp4rt.device("emulator:sm_100a") as device:
        assert (device.name, device.arch, device.image_kind) == (
            "emulator:sm_100a",
            "sm_100a",
            "ptx",
        )


def test_same_seed_same_schedule():
    def steps(seed):
        with EmulatorDevice("sm_90a", seed=seed, trace=True) as device:
            run_chain(device, CHAIN.replace("WAIT", "griddepcontrol.wait;"))
            return device.machine.events

    assert steps(5) == steps(5)


def test_counters_and_trace(tmp_path):
    with EmulatorDevice("sm_90a", trace=True) as device:
        run_chain(device, CHAIN.replace("WAIT", "griddepcontrol.wait;"))
        counters = device.counters
        assert counters["bytes.global.store"] == 2 * 64 * 4
        assert counters["bytes.global.load"] == 64 * 4
        assert counters["instructions.st"] == 4
        assert counters["instructions"] > 2 * 3 * 200
        path = tmp_path / "trace.json"
        device.chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    waits = [e for e in events if e["name"] == "griddepcontrol.wait" and e["ph"] == "X"]
    assert waits
    assert all(e["dur"] >= 0 for e in waits)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"first CTA (0,0,0) warp 0", "second CTA (0,0,0) warp 0"} & names
    assert "CTA (0,0,0) warp 0" not in names, "two kernels on one track"
    assert all("waits for" in e["args"] for e in waits)


def test_bank_conflicts_are_counted():
    text = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k()
{
  .reg .b32 %r<5>;
  .shared .align 16 .b8 s[4096];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, s;
  mad.lo.u32 %r2, %r0, STEP, %r1;
  st.shared.u32 [%r2], %r0;
  ret;
}
"""
    for step, conflicts in ((4, 0), (8, 1), (128, 31), (0, 0)):
        with EmulatorDevice("sm_90a") as device:
            kernel = device.load(text.replace("STEP", str(step)).encode()).kernel("k")
            device.stream.launch(kernel, LaunchConfig((1, 1, 1), (32, 1, 1)), b"")
            assert device.counters["bank_conflicts"] == conflicts
            assert device.counters["bytes.shared.store"] == 128


STEAL = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .align 8 .b8 params[8])
{
  .reg .b32 %t, %x, %r<9>, %phase;
  .reg .b64 %p, %q;
  .reg .b128 %answer;
  .reg .pred %f, %g, %first;
  .shared .align 16 .b8 response[16];
  .shared .align 8 .b64 bar;
  ld.param.u64 %p, [params];
  mov.u32 %t, %tid.x;
  mov.u32 %x, %ctaid.x;
  mov.u32 %r1, response;
  mov.u32 %r2, bar;
  mov.u32 %phase, 0;
  setp.eq.u32 %first, %t, 0;
  @%first mbarrier.init.shared.b64 [%r2], 1;
  @%first fence.mbarrier_init.release.cluster;
  bar.sync 0;
LOOP:
  @!%first bra WORK;
  fence.proxy.async.shared::cta;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
  clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
WORK:
  bar.warp.sync 0xffffffff;
  mul.wide.u32 %q, %x, 4;
  add.u64 %q, %p, %q;
  @%first red.global.add.u32 [%q], 1;
AGAIN:
  mbarrier.try_wait.parity.shared.b64 %f, [%r2], %phase;
  @!%f bra AGAIN;
  xor.b32 %phase, %phase, 1;
  ld.shared.b128 %answer, [%r1];
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %g, %answer;
  @!%g bra DONE;
  clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %x, %answer;
  bar.sync 0;
  bra LOOP;
DONE:
  ret;
}
"""


@pytest.mark.parametrize("seed", range(3))
def test_running_ctas_take_over_those_that_wait(seed):
    with EmulatorDevice("sm_100a", sm_count=2, seed=seed) as device:
        kernel = device.load(STEAL.encode()).kernel("k")
        done = device.upload(np.zeros(40, np.uint32))
        config = LaunchConfig((40, 1, 1), (64, 1, 1), 150 * 1024)
        device.stream.launch(kernel, config, np.uint64(done.address).tobytes())
        assert (done.to_numpy() == 1).all()
        assert device.counters["async.launch control"] == 40


CHAIN_OF_CTAS = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .align 8 .b8 params[8])
{
  .reg .b32 %s, %r<4>;
  .reg .b64 %p, %q;
  .reg .pred %f;
  ld.param.u64 %p, [params];
  NUMBER
  setp.eq.u32 %f, %s, 0;
  mul.wide.u32 %q, %s, 4;
  add.u64 %q, %p, %q;
  @%f bra DONE;
AGAIN:
  ld.acquire.gpu.global.u32 %r1, [%q];
  setp.eq.u32 %f, %r1, 0;
  @%f bra AGAIN;
DONE:
  mov.u32 %r1, 1;
  st.release.gpu.global.u32 [%q+4], %r1;
  ret;
}
"""
BY_INDEX = "mov.u32 %s, %ctaid.x;"
BY_TICKET = "mov.u32 %r2, 11; atom.global.inc.u32 %s, [%p], %r2;"


@pytest.mark.parametrize("number", [BY_INDEX, BY_TICKET], ids=["index", "ticket"])
def test_ctas_start_in_any_order(number):
    """Waiting for the CTA before hangs where that one finds no place; one with a ticket has one."""
    hangs = 0
    for seed in range(8):
        with EmulatorDevice("sm_90a", sm_count=2, seed=seed, hang_limit=2000) as device:
            kernel = device.load(CHAIN_OF_CTAS.replace("NUMBER", number).encode()).kernel("k")
            flags = device.upload(np.zeros(13, np.uint32))
            params = np.uint64(flags.address).tobytes()
            config = LaunchConfig((12, 1, 1), (1, 1, 1), 150 * 1024)
            try:
                device.stream.launch(kernel, config, params)
                assert (flags.to_numpy()[1:] == 1).all()
            except EmulatorFault as error:
                assert "no progress" in str(error)
                hangs += 1
    assert hangs > 0 if number == BY_INDEX else hangs == 0
