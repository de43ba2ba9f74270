"""``python -m fp4rt``: arguments, exit codes, what goes to which stream."""

import json
import subprocess
import sys

import pytest

import fp4rt
from fp4rt import __main__ as cli
from fp4rt import demo, info, library, minilm
from fp4rt.device import DeviceInfo, NoKernelError

REPORT = demo.Report(
    device="cpu",
    sentences=["One."],
    num_tokens=3,
    fp32_bytes=8,
    nvfp4_bytes=1,
    nearest=[-1],
    plain=demo.Comparison([0.96], [-1], 0.96, 1),
    fitted=demo.Comparison([0.98], [-1], 0.98, 1),
)


@pytest.fixture
def fake_run(monkeypatch):
    """Replace the demo's work by one that records its sentences; returns the record."""
    seen = []

    def run(dev, sentences, progress):
        seen.append((dev.name, list(sentences)))
        progress("working")
        return REPORT

    monkeypatch.setattr(demo, "run", run)
    return seen


def fail_with(monkeypatch, error):
    def run(*args):
        raise error

    monkeypatch.setattr(demo, "run", run)


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "info" in out and "demo" in out and "Exit codes" in out


@pytest.mark.parametrize("argv", [["--help"], ["info", "-h"], ["demo", "-h"], ["--version"]])
def test_help_and_version_exit_with_0(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["dance"], "invalid choice"),
        (["demo", "--sentences", "0"], "'0' is not a number of at least 1"),
        (["demo", "--sentences", "-3"], "'-3' is not a number of at least 1"),
        (["demo", "--sentences", "many"], "'many' is not a number of at least 1"),
        (["demo", "--text", "no-such-file"], "cannot read 'no-such-file'"),
    ],
)
def test_wrong_use_exits_with_2_and_says_why(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_device_exits_with_2_and_lists_the_kinds(capsys):
    assert cli.main(["demo", "--device", "gpu"]) == 2
    assert "'gpu'; use 'cuda:N'" in capsys.readouterr().err


def test_demo_prints_a_table_and_no_progress_in_a_pipe(fake_run, capsys):
    assert cli.main(["demo", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "0.9800" in captured.out and captured.err == ""
    assert fake_run == [("cpu", list(demo.SENTENCES))]


def test_progress_shows_on_a_terminal_and_is_wiped(fake_run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main(["demo", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == "\r\x1b[Kworking\r\x1b[K"


def test_demo_json_is_the_whole_report(fake_run, capsys):
    assert cli.main(["demo", "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True and result["fitted"]["cosine"] == [0.98]


def test_demo_reads_a_file_and_says_what_it_leaves_out(fake_run, capsys, tmp_path):
    path = tmp_path / "text"
    path.write_text("One.\nTwo.\nThree.\n")
    argv = ["demo", "--device", "cpu", "--text", str(path), "--sentences", "2"]
    assert cli.main(argv) == 0
    assert fake_run == [("cpu", ["One.", "Two."])]
    assert "(the first 2 of 3 sentences; see --sentences)" in capsys.readouterr().out


def test_a_low_cosine_fails_for_the_built_in_sentences_only(monkeypatch, capsys, tmp_path):
    low = demo.Report(**(vars(REPORT) | {"fitted": demo.Comparison([0.9], [-1], 0.9, 1)}))
    monkeypatch.setattr(demo, "run", lambda *args: low)
    path = tmp_path / "text"
    path.write_text("One.\n")
    assert cli.main(["demo", "--device", "cpu"]) == 1
    assert cli.main(["demo", "--device", "cpu", "--text", str(path)]) == 0
    assert capsys.readouterr().out.count("is below 0.97") == 2


@pytest.mark.parametrize(
    "error",
    [
        minilm.MissingModelError("run: pip install this"),
        NoKernelError("run: build that"),
        fp4rt.DriverError("CUDA_ERROR_SOMETHING"),
        fp4rt.EmulatorFault("line 3"),
    ],
)
def test_a_failure_exits_with_1_and_its_message_alone(monkeypatch, capsys, error):
    fail_with(monkeypatch, error)
    assert cli.main(["demo", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"fp4rt demo: {error}\n"


def test_an_internal_error_is_not_hidden(monkeypatch):
    fail_with(monkeypatch, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["demo", "--device", "cpu"])


def test_ctrl_c_exits_with_130_and_closes_the_device(monkeypatch, capsys):
    closed = []
    real = fp4rt.device("cpu")
    monkeypatch.setattr(real, "close", lambda: closed.append(True))
    monkeypatch.setattr(demo, "device", lambda name: real)
    fail_with(monkeypatch, KeyboardInterrupt())
    assert cli.main(["demo", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "interrupted\n" and closed == [True]


def test_a_reader_that_leaves_early_is_no_error_message():
    code = f"{sys.executable} -m fp4rt info --json | true"
    done = subprocess.run(code, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""


# --- info -----------------------------------------------------------------------------------


def test_info_lists_devices_with_reasons(monkeypatch, capsys):
    found = [
        DeviceInfo("cuda", False, "no driver: install one"),
        DeviceInfo("cpu", True, "numpy", {"threads": 2}),
    ]
    monkeypatch.setattr(info, "devices", lambda: found)
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cuda                no      no driver: install one" in lines
    assert "cpu                 yes     numpy" in lines
    assert "driver   none found" in lines
    assert f"fp4rt    {fp4rt.__version__}" in lines


def test_info_json_holds_the_same(capsys):
    assert cli.main(["info", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["fp4rt"] == fp4rt.__version__
    (cpu,) = [entry for entry in result["devices"] if entry["name"] == "cpu"]
    assert cpu["available"] is True


def test_info_says_that_nothing_is_built_and_how_to_build(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(library, "KERNELS", tmp_path)
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"kernels in {tmp_path}" in out and "python build.py" in out


def test_info_works_without_cuda_python():
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "from fp4rt.__main__ import main; sys.exit(main(['info']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout and done.stderr == ""
