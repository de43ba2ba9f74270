"""Benchmarks: counting, checking, comparing, the command; times themselves are never tested."""

import json
import os
import time

import numpy as np
import pytest

import fp4rt
from fp4rt import __main__ as cli
from fp4rt import bench, peers, sensors, timing, workload
from fp4rt.choice import candidates
from fp4rt.library import Library
from fp4rt.timing import Timing
from fp4rt.workload import Operands, Rotation, Shapes, copies_of, named_sets, read_shapes

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

    def thing(name, seconds):
        def repeat(count):
            log.append((name, count))
            return count * seconds

        return repeat

    times = timing.interleaved({"a": thing("a", 1e-3), "b": thing("b", 2.0)}, 0.5, 3)
    windows = log[-6:]
    assert windows == [("a", 500), ("b", 1)] * 3
    assert times["b"].windows == (2.0, 2.0, 2.0)


def test_events_time_what_lies_between_them():
    with fp4rt.device("cpu") as dev:
        a, b = dev.alloc(64), dev.alloc(64)
        dev.stream.fill(a, 7)
        repeat = timing.by_events(dev.stream, lambda: dev.stream.copy(b, a), per_call=2)
        assert repeat(3) >= 0
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
    """On an emulator: one variant packs and copies the weights, another uses them."""
    monkeypatch.setattr(workload, "LAUNCHES", 2)
    monkeypatch.setattr(workload, "ROTATED_BYTES", 1)
    operands = Operands.random(Shapes("t", (3, 0), 8, 64))
    try:
        Library().images("sm_100a")
    except fp4rt.NoKernelError as error:
        pytest.skip(str(error))
    with fp4rt.device("emulator:sm_100a") as dev:
        choices = candidates(dev.arch, dev.sm_count, operands.shapes.problem)
        packed = Rotation(dev, operands, choices[0])
        shared = Rotation(dev, operands, choices[1], packed)
        addresses = [plan._buffers["weights"].address for plan in packed.plans]
        assert len(set(addresses)) == packed.launches == 2
        assert addresses == [plan._buffers["weights"].address for plan in shared.plans]
        assert packed.wrong() is None and shared.wrong() is None
        dev.stream.fill(shared.plans[1]._buffers["weights"], 0x11)
        assert "wrong" in shared.wrong()
        packed.close()
        shared.close()


# --- ceilings -----------------------------------------------------------------------------------


def test_without_cupy_the_ceilings_say_where_they_are_from(monkeypatch):
    monkeypatch.setattr(peers, "COPY_BYTES", 1 << 16)
    with fp4rt.device("cpu") as dev:
        found = peers.measure_ceilings(dev, None, 1e-4, 2)
    assert found.flops == peers.DOCUMENTED_FLOPS and "not measured" in found.flops_source
    assert found.read == pytest.approx(found.rates["copy"].median * 4.6 / 4.31)
    assert "copy" in found.read_source


@pytest.mark.parametrize("error", [ImportError("no cupy"), RuntimeError("broken installation")])
def test_a_missing_or_broken_cupy_is_no_peer(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(peers, "import_module", fail)
    assert peers.find_cupy() is None


# --- sensors ------------------------------------------------------------------------------------


def test_clock_and_power_are_read_where_they_can_be(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '[N/A], [N/A]'\n"
        "for c in 1400 1500 1600; do echo $c, 700.5; done\nexec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    start = time.monotonic()
    found = sensors.Sensors(0)
    while (reading := found.since(start)) is None or reading.samples < 3:
        assert time.monotonic() - start < 20
        time.sleep(0.01)
    found.close()
    found.close()
    assert reading == sensors.Reading(1500, 700.5, 3)
    assert found.since(time.monotonic()) is None


def test_without_nvidia_smi_there_is_nothing_to_read(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = sensors.Sensors(0)
    assert found.since(0) is None
    found.close()


# --- comparing ----------------------------------------------------------------------------------


def results_with(windows, name="medium", n=40):
    return {
        "format": bench.FORMAT,
        "sets": {
            "tiny": {
                "sizes": [3],
                "n": n,
                "k": 64,
                "results": [{"name": name, "windows": windows}],
            }
        },
    }


@pytest.mark.parametrize(
    ("windows", "flagged"),
    [
        ([1.2, 1.3, 1.3], True),
        ([1.0, 1.3, 1.3], False),  # one window is within the old spread
        ([1.03, 1.04, 1.04], False),  # less than noise
        ([0.5, 0.5, 0.5], False),
    ],
)
def test_only_what_is_slower_than_noise_is_a_regression(windows, flagged):
    lines = bench.regressions(results_with([0.98, 1.0, 1.02]), results_with(windows))
    assert bool(lines) == flagged


def test_other_shapes_and_new_variants_are_not_compared():
    slow = [9.0, 9.0, 9.0]
    old = results_with([1.0, 1.0, 1.0])
    assert not bench.regressions(old, results_with(slow, n=48))
    assert not bench.regressions(old, results_with(slow, name="large"))


# --- the command --------------------------------------------------------------------------------


def test_the_host_is_benched_written_and_compared(shapes_file, tmp_path, capsys):
    out = tmp_path / "new.json"
    argv = ["bench", "--device", "cpu", "--shapes", str(shapes_file), *FAST]
    assert cli.main([*argv, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "tiny: 3 groups, 8 rows" in text and "np.matmul" in text and "quantize" in text
    results = json.loads(out.read_text())
    names = [result["name"] for result in results["sets"]["tiny"]["results"]]
    assert "plan.launch()" in names and results["ceilings"] is None
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


def test_an_interrupt_shows_what_is_finished(monkeypatch, tmp_path, capsys):
    path = tmp_path / "two.json"
    entry = {"sizes": [3], "n": 8, "k": 32}
    path.write_text(json.dumps({"first": entry, "second": entry}))
    right = bench._host_set

    def interrupted(dev, shapes, **options):
        if shapes.name == "second":
            raise KeyboardInterrupt
        return right(dev, shapes, **options)

    monkeypatch.setattr(bench, "_host_set", interrupted)
    assert cli.main(["bench", "--device", "cpu", "--shapes", str(path), *FAST]) == 130
    captured = capsys.readouterr()
    assert "first: 1 groups" in captured.out and "1 of 2 sets" in captured.err


def test_host_overheads(capsys):
    assert cli.main(["bench", "--device", "cpu", "--host", *FAST]) == 0
    out = capsys.readouterr().out
    assert "graph.launch()" in out and "cuGraphLaunch" not in out


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
    ],
)
def test_wrong_use_exits_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_results_of_something_else_are_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not what"):
        bench.read_results(path)


def test_the_table_shows_spread_and_share_of_the_roofline():
    result = bench.Result("medium", Timing((2e-6, 1e-6, 4e-6)), 4000, 10**9, chosen=True)
    (line,) = bench.table([bench.SetResult(TINY, 1e-6, (result,))]).splitlines()[2:]
    assert line.split() == ["*", "medium", "2.0", "µs", "(1.0", "–", "4.0)", "2", "500", "50", "%"]
