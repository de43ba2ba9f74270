"""Benchmarks: counting, checking, comparing, the command; times themselves are never tested."""

import contextlib
import dataclasses
import json
import time

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt import __main__ as cli
from fp4rt.bench import (
    ceilings,
    command,
    cupy_stream,
    gpu,
    host,
    peers,
    plot,
    report,
    sensors,
    timing,
    workload,
)
from fp4rt.bench.ceilings import Ceilings, CeilingWork
from fp4rt.bench.gpu import Libraries, bench_kernels
from fp4rt.bench.report import Report, Result, SetResult
from fp4rt.bench.timing import Repeat, Timing
from fp4rt.bench.workload import Operands, Rotation, Shapes, copies_of, named_sets, read_shapes
from fp4rt.choice import candidates
from fp4rt.library import Library

TINY = Shapes("tiny", (3, 0, 5), 40, 64)
FAST = ["--seconds", "0.001", "--windows", "1"]


@pytest.fixture
def shapes_file(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"tiny": {"sizes": [3, 0, 5], "n": 40, "k": 64}}))
    return path


# --- timing -------------------------------------------------------------------------------------


def test_things_take_turns_for_as_long_as_asked():
    log = []

    def thing(name, seconds, calls):
        def run(count):
            log.append((name, count))
            return count * seconds

        return Repeat(run, calls)

    entered = []

    def around(name):
        entered.append(name)
        return contextlib.nullcontext()

    things = {"a": thing("a", 1e-3, 1), "b": thing("b", 2.0, 16)}
    times = timing.interleaved(things, 0.5, 3, around)
    there, back = [("a", 125), ("a", 500), ("b", 1), ("b", 1)], [("b", 1)] * 2 + log[-4:-2]
    assert log[-12:] == [*there, *back, *there]
    assert entered == ["a", "b", "b", "a", "a", "b"]
    assert times["b"].windows == (2.0 / 16,) * 3


def test_a_graph_of_many_calls_is_replayed_no_longer_than_asked():
    """The length of a window counts replays, not the calls that a replay consists of."""
    replays = []

    def run(count):
        replays.append(count)
        return count * 0.01

    times = timing.interleaved({"graph": Repeat(run, calls=16)}, 0.3, 1)
    assert replays[-1] == 30
    assert times["graph"].median == pytest.approx(0.01 / 16)


def test_events_time_what_lies_between_them():
    with fp4rt.device("cpu") as dev:
        a, b = dev.alloc(64), dev.alloc(64)
        dev.stream.fill(a, 7)
        repeat = timing.by_events(dev.stream, lambda: dev.stream.copy(b, a), calls=2)
        assert repeat.run(3) >= 0 and repeat.calls == 2
        assert (b.to_numpy() == 7).all()


# --- shapes and operands ------------------------------------------------------------------------


def test_the_sets_of_the_model_are_counted_right():
    (s1,) = named_sets(["S1"])
    assert s1.flops == 2 * 1024 * 4096 * 7168
    assert s1.nvfp4_bytes == (8 * 4096 + 1024) * 7168 * 9 // 16 + 1024 * 4096 * 2
    assert s1.roofline(4.617e12, 717e12) == pytest.approx(83.8e-6, rel=2e-3)


def test_groups_without_rows_read_no_weights():
    assert Shapes("x", (3, 0), 8, 32).nvfp4_bytes == Shapes("x", (3,), 8, 32).nvfp4_bytes


def test_copies_exceed_the_cache():
    for shapes in named_sets(list(workload.SHAPE_SETS)):
        copies = copies_of(shapes)
        assert copies >= 2 and copies * shapes.nvfp4_bytes >= workload.ROTATED_BYTES


def test_shapes_are_read(shapes_file):
    assert read_shapes(shapes_file) == [TINY]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "cannot read shapes"),
        ("[]", "must hold an object"),
        ('{"x": {"sizes": [1], "n": 8}}', "must have sizes, n and k"),
        ('{"x": {"sizes": [-1], "n": 8, "k": 16}}', "must hold counts"),
        ('{"x": {"sizes": [0], "n": 8, "k": 16}}', "some rows"),
        ('{"x": {"sizes": 3, "n": 8, "k": 16}}', "must hold counts"),
        ('{"x": {"sizes": [1.5], "n": 8, "k": 16}}', "must hold counts"),
        ('{"x": {"sizes": [1], "n": 8, "k": 24}}', "multiple of 16"),
        ('{"x": {"sizes": [1], "n": 8, "k": 16}, "x": 2}', "'x' is there twice"),
        ('{"x": {"sizes": [1], "n": 8, "n": 9, "k": 16}}', "'n' is there twice"),
    ],
)
def test_bad_shapes_are_refused(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_shapes(path)


def test_a_wrong_sample_is_noticed():
    operands = Operands.random(TINY)
    exact = fp4rt.dequantize(operands.a, np.float64) @ fp4rt.dequantize(operands.b, np.float64).T
    d = exact.astype(np.float16)
    assert operands.wrong(d) is None
    d[7, 39] = np.nextafter(d[7, 39], np.float16(np.inf))
    assert operands.wrong(d) is not None
    assert operands.wrong(d, ulps=2) is None
    d[7, 39] = np.nan
    assert "(7, 39) is nan" in operands.wrong(d, ulps=2)


def test_a_rotation_multiplies_with_each_copy(monkeypatch):
    """On an emulator: two variants share the copies of the weights."""
    monkeypatch.setattr(workload, "LAUNCHES", 2)
    monkeypatch.setattr(workload, "ROTATED_BYTES", 1)
    operands = Operands.random(Shapes("t", (3, 0), 8, 64))
    try:
        Library().images("sm_100a")
    except fp4rt.NoKernelError as error:
        pytest.skip(str(error))
    with fp4rt.device("emulator:sm_100a") as dev:
        choices = candidates(dev.arch, dev.sm_count, operands.shapes.problem)
        copies = workload.upload_copies(dev, operands)
        assert len({weights.blocks.address for weights in copies}) == 2
        first, second = (Rotation(dev, operands, choice, copies) for choice in choices[:2])
        assert first.launches == 2
        assert first.wrong() is None and second.wrong() is None
        dev.stream.fill(copies[1].blocks, 0x11)
        assert "wrong" in first.wrong() and "wrong" in second.wrong()
        first.close()
        second.close()


def test_a_result_may_be_rounded_to_bfloat16():
    operands = Operands.random(TINY)
    exact = fp4rt.dequantize(operands.a, np.float64) @ fp4rt.dequantize(operands.b, np.float64).T
    d = exact.astype(ml_dtypes.bfloat16)
    assert operands.wrong(d, rounded=ml_dtypes.bfloat16) is None
    assert operands.wrong(d.astype(np.float32), rounded=ml_dtypes.bfloat16) is None
    assert operands.wrong(d) is not None


# --- kernels, peers and ceilings ----------------------------------------------------------------


class FakePeer:
    def __init__(self, wrong=None):
        self.repeats = {"peer": Repeat(lambda count: count * 1e-3)}
        self.closed = False
        self._wrong = wrong

    def wrong(self, name):
        return self._wrong

    def close(self):
        self.closed = True


@pytest.fixture
def fake_kernels(monkeypatch):
    """A device of one fake variant: what is around the kernels is tested, not they."""

    class FakeRotation:
        message = None

        def __init__(self, dev, operands, choice, copies):
            self.repeat = Repeat(lambda count: count * 2e-3)

        def wrong(self):
            return self.message

        def close(self):
            pass

    choices = [
        dataclasses.make_dataclass("Choice", ["variant"])(f"grouped_gemm_sm_90a_{n}")
        for n in ("medium", "large")
    ]
    monkeypatch.setattr(gpu, "candidates", lambda *args: choices)
    monkeypatch.setattr(gpu, "Rotation", FakeRotation)
    monkeypatch.setattr(ceilings, "STREAM_BYTES", 1 << 16)
    monkeypatch.setattr(workload, "ROTATED_BYTES", 1)
    return FakeRotation


def bench_fake(makers):
    with fp4rt.device("cpu") as dev:
        (found,) = bench_kernels(dev, [TINY], Libraries(None, makers, {}), seconds=0.01, windows=2)
    return found


def test_variants_and_peers_are_timed_with_the_ceilings(fake_kernels):
    peer = FakePeer()
    found = bench_fake({"lib": lambda operands: peer})
    assert [(r.name, r.kind, r.chosen) for r in found.results] == [
        ("medium", "variant", True),
        ("large", "variant", False),
        ("peer", "peer", False),
    ]
    assert found.chosen.timing.windows == pytest.approx((2e-3, 2e-3))
    assert found.find("peer").timing.median == pytest.approx(1e-3)
    assert len(found.ceilings.rates["copy"].windows) == 2 and not found.notes
    assert peer.closed


def test_a_peer_that_fails_or_is_wrong_is_noted_and_left_out(fake_kernels):
    def fail(operands):
        raise MemoryError("too little")

    wrong = FakePeer("all of it")
    found = bench_fake({"broken": fail, "wrong": lambda operands: wrong})
    assert [r.name for r in found.results] == ["medium", "large"]
    assert found.notes == (
        "broken is left out: MemoryError: too little",
        "peer is wrong, so it isn't timed: all of it",
    )
    assert wrong.closed


def test_a_wrong_variant_ends_the_benchmark(fake_kernels, monkeypatch):
    monkeypatch.setattr(fake_kernels, "message", "all of it")
    with pytest.raises(workload.WrongResultError, match="medium on tiny is wrong"):
        bench_fake({})


def test_without_cupy_the_ceilings_say_where_they_are_from(monkeypatch):
    monkeypatch.setattr(ceilings, "STREAM_BYTES", 1 << 16)
    with fp4rt.device("cpu") as dev:
        work = CeilingWork(dev, None)
        found = work.rates(timing.interleaved(work.repeats, 1e-4, 2))
        work.close()
    assert found.flops == ceilings.DOCUMENTED_FLOPS
    assert found.bandwidth == pytest.approx(found.rates["copy"].median * 4.6 / 4.31)
    assert "not measured here" in found.text() and "× the copy" in found.text()


def test_measured_ceilings_make_the_roofline():
    found = SetResult(TINY, (), Ceilings({"read": Timing((2e9,)), "fp16 matmul": Timing((1e9,))}))
    assert found.roofline == max(TINY.nvfp4_bytes / 2e9, TINY.flops / 1e9)


@pytest.mark.parametrize("error", [ImportError("no such"), RuntimeError("broken installation")])
@pytest.mark.parametrize(
    ("module", "find"), [(cupy_stream, cupy_stream.find_cupy), (peers, peers.find_torch)]
)
def test_a_missing_or_broken_library_is_no_peer(monkeypatch, module, find, error):
    def fail(name):
        raise error

    monkeypatch.setattr(module, "import_module", fail)
    assert find() is None


# --- sensors ------------------------------------------------------------------------------------


class FakeNvml:
    """Answers like libnvidia-ml.so.1."""

    def __init__(self, **failing):
        self.failing = failing
        self.open = 0

    def nvmlInit_v2(self):
        self.open += 1
        return 0

    def nvmlShutdown(self):
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus, handle):
        handle._obj.value = 7
        return 0 if bus == b"0000:01:00.0" else 6

    def nvmlDeviceGetClockInfo(self, handle, kind, clock):
        assert (handle.value, kind) == (7, 1)
        clock._obj.value = 1500
        return self.failing.get("clock", 0)

    def nvmlDeviceGetFieldValues(self, handle, count, fields):
        assert (handle.value, count, fields._obj.field) == (7, 1, 186)
        fields._obj.value, fields._obj.status = 700_500, self.failing.get("power", 0)
        return 0


def test_clock_and_power_are_read_while_something_runs(monkeypatch):
    monkeypatch.setattr(sensors, "PERIOD", 0.001)
    library = FakeNvml()
    found = sensors.Sensors(sensors.Nvml("0000:01:00.0", library))
    for _ in range(2):
        with found.during("a"):
            time.sleep(0.05)
    reading = found.reading("a")
    assert (reading.clock, reading.power) == (1500, 700.5) and reading.samples >= 2
    assert found.reading("a") is None and found.reading("b") is None
    found.close()
    assert library.open == 0


def test_a_window_shorter_than_the_period_has_no_reading():
    found = sensors.Sensors(sensors.Nvml("0000:01:00.0", FakeNvml()))
    with found.during("a"):
        pass
    assert found.reading("a") is None


@pytest.mark.parametrize("failing", [{"clock": 3}, {"power": 3}])
def test_a_gpu_that_does_not_say_has_no_sensors(failing):
    library = FakeNvml(**failing)
    with pytest.raises(OSError, match="nvmlReturn_t 3"):
        sensors.Nvml("0000:01:00.0", library)
    assert library.open == 0


def test_without_nvml_there_is_nothing_to_read(monkeypatch):
    def fail(name):
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(sensors.ctypes, "CDLL", fail)
    assert sensors.open_sensors("0000:01:00.0") is None


# --- reports ------------------------------------------------------------------------------------

CEILINGS = Ceilings({"read": Timing((4e12, 4.1e12)), "fp16 matmul": Timing((7e14, 7.1e14))})


def gpu_report(windows=(1e-6, 1.1e-6, 1.2e-6), shapes=TINY, name="medium"):
    reading = sensors.Reading(1500, 700, 4)
    results = (
        Result(name, "variant", Timing(windows), 1000, 1000, True, reading),
        Result("large", "variant", Timing((2e-6,)), 1000, 1000),
        Result(peers.FUSED, "peer", Timing((3e-6,)), 1000, 1000),
        Result(peers.PLAIN, "peer", Timing((5e-6,)), 1000, 1000),
        Result(peers.SPREAD, "peer", Timing((4e-6,)), 1000, 1000),
    )
    return Report(
        "cuda:0",
        "A GPU, sm_90a",
        "2026-01-02 03:04 UTC",
        {"fp4rt": "1"},
        0.3,
        3,
        10.0,
        (SetResult(shapes, results, CEILINGS, ("a note",)),),
        {"graph.launch()": Timing((1e-6,))},
    )


def test_a_report_survives_json(tmp_path):
    path = tmp_path / "x.json"
    report.write(gpu_report(), path)
    assert report.read(path) == gpu_report()


def test_results_of_something_else_are_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{}", "[]", '{"format": 2}', "nonsense"):
        path.write_text(text)
        with pytest.raises(ValueError, match="cannot read results from"):
            report.read(path)


def test_the_text_holds_all_of_it():
    text = gpu_report().text()
    for part in ("A GPU, sm_90a", "fp4rt 1", "ceiling: read 4.05 TB/s", "a note", "graph.launch()"):
        assert part in text
    (line,) = (line for line in text.splitlines() if line.startswith("* medium"))
    assert line.split()[-2:] == ["1500", "700"]


def test_the_table_shows_spread_and_share_of_the_roofline():
    ceilings = Ceilings({"read": Timing((TINY.nvfp4_bytes / 1e-6,))})
    result = Result("medium", "variant", Timing((2e-6, 1e-6, 4e-6)), 4000, 10**9, chosen=True)
    (line,) = report.table([SetResult(TINY, (result,), ceilings)]).splitlines()[2:]
    assert line.split() == ["*", "medium", "2.0", "µs", "(1.0", "–", "4.0)", "2", "500", "50", "%"]


def test_the_markdown_table_takes_the_better_cublas():
    lines = report.markdown(gpu_report()).splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[0] == "tiny" and cells[1] == "3, 0, 5" and cells[2] == "40, 64"
    assert cells[4] == "**1.1** (1.0 – 1.2)"
    assert cells[6:] == ["3.0", "–", "4.0"]
    assert len(lines[0].split("|")) == len(lines[1].split("|")) == len(lines[2].split("|"))


def test_a_report_in_a_notebook_is_a_table():
    text = gpu_report()._repr_html_()
    assert "tiny medium (chosen)" in text and text.count("<tr>") == 6


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("what", ["gpu", "host"])
def test_pictures_are_drawn(tmp_path, suffix, what):
    pytest.importorskip("matplotlib")
    found = gpu_report()
    if what == "host":
        (entry,) = found.sets
        found = dataclasses.replace(found, sets=(dataclasses.replace(entry, ceilings=None),))
    path = tmp_path / f"x{suffix}"
    plot.save(found, path)
    start = path.read_bytes()[:300]
    assert b"<svg" in start or b"<?xml" in start if suffix == ".svg" else b"PNG" in start


def test_all_bars_have_their_height():
    figures = pytest.importorskip("matplotlib.figure")
    axes = figures.Figure().subplots()
    found = gpu_report()
    plot.variants(found, axes)
    heights = sorted(bar.get_height() for bar in axes.patches if bar.get_width())
    roofline = found.sets[0].roofline
    assert heights == pytest.approx([roofline / 2e-6 * 100, roofline / 1.1e-6 * 100])


def test_sensors_are_drawn_for_the_chosen_variant_and_the_fastest_peer():
    figures = pytest.importorskip("matplotlib.figure")
    axes = figures.Figure().subplots()
    (entry,) = gpu_report().sets
    assert (entry.best_variant.name, entry.best_peer.name) == ("medium", peers.FUSED)
    plot.readings(gpu_report(), axes, "clock")
    assert [bar.get_height() for bar in axes.patches] == [1500, 0]


# --- comparing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "found"),
    [
        ((1.2e-6, 1.3e-6, 1.3e-6), "SLOWER"),
        ((1.0e-6, 1.3e-6, 1.3e-6), None),  # one window is within the old spread
        ((1.03e-6, 1.04e-6, 1.04e-6), None),  # less than noise
        ((0.5e-6, 0.5e-6, 0.5e-6), "faster"),
    ],
)
def test_only_what_is_beyond_noise_is_a_change(windows, found):
    old, new = gpu_report((0.98e-6, 1.0e-6, 1.02e-6)), gpu_report(windows)
    texts = [change.text().split()[:3] for change in report.changes(old, new)]
    assert texts == ([[found, "tiny", "medium:"]] if found else [])


def test_other_shapes_and_new_variants_are_not_compared():
    old, slow = gpu_report(), (9.0, 9.0, 9.0)
    assert not report.changes(old, gpu_report(slow, Shapes("tiny", (3, 0, 5), 48, 64)))
    assert not report.changes(old, gpu_report(slow, name="small"))


# --- the command --------------------------------------------------------------------------------


def test_the_host_is_benched_written_and_compared(shapes_file, tmp_path, capsys):
    out = tmp_path / "new.json"
    argv = ["bench", "--device", "cpu", "--shapes", str(shapes_file), *FAST]
    assert cli.main([*argv, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "tiny: 3 groups, 8 rows" in text and "np.matmul" in text and "quantize" in text
    results = json.loads(out.read_text())
    names = [result["name"] for result in results["sets"]["tiny"]["results"]]
    assert "plan.launch()" in names and results["sets"]["tiny"]["ceilings"] is None
    assert "graph.launch()" in results["host"]
    results["host"] = {}
    for result in results["sets"]["tiny"]["results"]:
        result["windows"] = [1e-12]
    out.write_text(json.dumps(results))
    assert cli.main([*argv, "--compare", str(out)]) == 1
    assert "SLOWER tiny plan.launch()" in capsys.readouterr().out
    for result in results["sets"]["tiny"]["results"]:
        result["windows"] = [1e6]
    out.write_text(json.dumps(results))
    assert cli.main([*argv, "--compare", str(out)]) == 0
    assert "nothing became slower" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(monkeypatch, shapes_file, capsys):
    monkeypatch.setattr(Operands, "wrong", lambda self, d: "all of it")
    assert cli.main(["bench", "--device", "cpu", "--shapes", str(shapes_file), *FAST]) == 1
    captured = capsys.readouterr()
    assert "isn't timed: all of it" in captured.err and not captured.out


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (fp4rt.DriverError("no more"), 1)]
)
def test_what_is_finished_is_shown_and_written(monkeypatch, tmp_path, capsys, error, code):
    path, out = tmp_path / "two.json", tmp_path / "out.json"
    entry = {"sizes": [3], "n": 8, "k": 32}
    path.write_text(json.dumps({"first": entry, "second": entry}))
    right = host.operations

    def interrupted(dev, operands):
        if operands.shapes.name == "second":
            raise error
        return right(dev, operands)

    monkeypatch.setattr(host, "operations", interrupted)
    argv = ["bench", "--device", "cpu", "--shapes", str(path), "--json", str(out), *FAST]
    assert cli.main(argv) == code
    assert [entry.shapes.name for entry in report.read(out).sets] == ["first"]
    captured = capsys.readouterr()
    assert "first: 1 groups" in captured.out and "1 of 2 sets" in captured.err


def test_host_overheads(capsys):
    assert cli.main(["bench", "--device", "cpu", "--host", *FAST]) == 0
    out = capsys.readouterr().out
    assert "graph.launch()" in out and "S4" not in out


def test_the_model_is_labelled_as_a_prediction(capsys):
    assert cli.main(["bench", "--model"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Predicted") and "not measured" in out and "| S1 |" in out


def test_an_emulator_has_no_speed(capsys):
    pytest.importorskip("fp4rt.emulator")
    try:
        Library().images("sm_90a")
    except fp4rt.NoKernelError as error:
        pytest.skip(str(error))
    assert cli.main(["bench", "--device", "emulator:sm_90a"]) == 2
    assert "no speed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sets", "S1,S9"], "no shape set 'S9'"),
        (["--shapes", "nowhere.json"], "cannot read shapes"),
        (["--compare", "nowhere.json"], "cannot read results"),
        (["--seconds", "0"], "above 0"),
        (["--windows", "0"], "at least 1"),
        (["--plot", "x.pdf"], "must end in .png or .svg"),
    ],
)
def test_wrong_use_exits_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_picture_is_refused_before_the_work_if_it_could_not_be_drawn(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["bench", "--plot", "x.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("where", ["missing/x.png", "file/x.png", "folder.png"])
def test_a_path_that_cannot_be_written_is_refused_before_measuring(
    option, where, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("it measured first"))
    with pytest.raises(SystemExit):
        cli.main(["bench", "--device", "cpu", option, str(tmp_path / where), *FAST])
    assert "can't be written" in capsys.readouterr().err


@pytest.mark.parametrize("text", [",", "", ",,"])
def test_no_set_is_not_the_default(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--sets", text])
    assert "names no set; use some of" in capsys.readouterr().err
