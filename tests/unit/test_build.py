"""build.py: the search for nvcc, what is compiled and when, what is left behind when it fails."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import build
from fp4rt import abi

ROOT = Path(build.__file__).parent
KERNELS = ROOT / "tests" / "kernels"

TOY_VARIANTS = """

VARIANTS = (
    Variant("hopper", "sm_90a", "sm_90a/gemm.cu", ("gemm",), {"TILE_M": 128}),
    Variant("blackwell", "sm_100f", "sm_100a/gemm100.cu", ("gemm", "prepare")),
)
"""


def install_fake_nvcc(folder, release="13.0"):
    """Make `folder`/nvcc a compiler of that release; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "tests" / "fake_nvcc.py", folder)
    (folder / "version").write_text(release)
    nvcc = folder / "nvcc"
    python = shlex.quote(sys.executable)
    nvcc.write_text(f'#!/bin/sh\nexec {python} -S -E "${{0%/*}}/fake_nvcc.py" "$@"\n')
    nvcc.chmod(0o755)
    return nvcc


class Tree:
    """A copy of the build in a folder with a space in its name, with toy kernels."""

    def __init__(self, root):
        self.root = root
        self.sources = root / "cuda_src"
        self.output = root / "fp4rt" / "_kernels"
        self.nvcc = root / "the toolkit" / "bin" / "nvcc"

    def fill(self):
        self.output.parent.mkdir(parents=True)
        (self.output.parent / "__init__.py").touch()
        shutil.copy(ROOT / "build.py", self.root)
        text = (ROOT / "fp4rt" / "abi.py").read_text()
        (self.output.parent / "abi.py").write_text(text + TOY_VARIANTS)
        self.write("common/inner.cuh", "// one")
        self.write("common/outer.cuh", '#include "inner.cuh"')
        gemm = 'extern "C" __global__ void gemm(int p) {}\n'
        self.write("sm_90a/gemm.cu", '#include "common/outer.cuh"\n' + gemm)
        prepare = 'extern "C" __global__ void prepare(int p) {}\n'
        self.write("sm_100a/gemm100.cu", '#include "generated/abi.h"\n' + gemm + prepare)
        install_fake_nvcc(self.nvcc.parent)

    def write(self, name, text):
        path = self.sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def replace(self, name, old, new):
        path = self.root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def command(self, *args):
        return [sys.executable, str(self.root / "build.py"), *args]

    def environment(self):
        clean = {k: v for k, v in os.environ.items() if k not in ("NVCC", "CUDA_HOME")}
        return {**clean, "NVCC": str(self.nvcc), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *args, status=0):
        done = subprocess.run(
            self.command(*args),
            env=self.environment(),
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def compiled(self):
        """Names of the sources compiled since the last call."""
        log = self.nvcc.parent / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(line.split()[1] for line in lines if line.startswith("start"))

    def manifest(self):
        return json.loads((self.output / "manifest.json").read_text())["images"]

    def files(self):
        return {path.name: path.read_bytes() for path in self.output.iterdir()}


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path / "a checkout")
    tree.fill()
    return tree


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    tree = Tree(tmp_path_factory.mktemp("build") / "another checkout")
    tree.fill()
    tree.run()
    tree.compiled()
    return tree


@pytest.fixture
def built(built_once, tmp_path):
    """A built tree; a copy, since no key depends on where the tree is."""
    return Tree(shutil.copytree(built_once.root, tmp_path / "a checkout"))


# ------------------------------------------------------------------------------ what it makes


def test_outputs_are_cubin_ptx_and_manifest_of_each_variant(built):
    names = {f"{name}.{kind}" for name in ("hopper", "blackwell") for kind in ("cubin", "ptx")}
    assert set(built.files()) == names | {"manifest.json"}


def test_manifest_holds_facts_and_hashes(built):
    record = built.manifest()["hopper"]
    assert record["kernels"]["gemm"] == {
        "registers": 40,
        "spill_bytes": 0,
        "local_bytes": 0,
        "static_shared_bytes": 512,
        "dynamic_shared_bytes": 4096,
        "max_threads": [128, 1, 1],
        "cluster": [1, 1, 1],
        "ctas_per_sm": 12,
    }
    assert record["arch"] == "sm_90a"
    assert "13.0.99" in record["nvcc"]
    for kind in ("cubin", "ptx"):
        image = built.files()[f"hopper.{kind}"]
        assert record[kind] == {"sha256": hashlib.sha256(image).hexdigest(), "bytes": len(image)}


def test_line_information_names_sources_from_the_root(built):
    """The same wherever the tree is; what is outside has no folder."""
    ptx = built.files()["hopper.ptx"].decode()
    assert re.findall(r'\.file \d "(.*)"', ptx) == ["cuda_src/sm_90a/gemm.cu", "half.hpp"]


def test_command_line_has_arch_macros_and_line_info(built):
    command = built.files()["hopper.cubin"].decode()
    for flag in ("-arch=sm_90a", "-DTILE_M=128", "-lineinfo", "-Werror=all-warnings"):
        assert flag in command.split()


def test_verbose_shows_the_command_line(tree):
    assert "-DTILE_M=128" in tree.run("-v")


def test_generated_header_is_that_of_the_abi(built):
    assert (built.sources / "generated" / "abi.h").read_text() == abi.header_text()


# ------------------------------------------------------------------------------ what rebuilds


def test_second_build_compiles_nothing_and_says_so(built):
    header = built.sources / "generated" / "abi.h"
    before = header.stat().st_mtime_ns, built.files()
    os.utime(built.sources / "sm_90a" / "gemm.cu")
    assert "nothing to compile: 2 of 2 images are up to date" in built.run()
    assert built.compiled() == []
    assert (header.stat().st_mtime_ns, built.files()) == before


HOPPER, BLACKWELL = "gemm", "gemm100"


@pytest.mark.parametrize(
    ("file", "old", "new", "rebuilt"),
    [
        ("cuda_src/sm_90a/gemm.cu", "{}", "{ }", [HOPPER]),
        ("cuda_src/common/inner.cuh", "one", "two", [HOPPER]),
        ("fp4rt/abi.py", '{"TILE_M": 128}', '{"TILE_M": 64}', [HOPPER]),
        ("fp4rt/abi.py", '"kOutputFloat32": 2', '"kOutputFloat32": 3', [HOPPER, BLACKWELL]),
        ("build.py", '"-O3"', '"-O2"', [HOPPER, BLACKWELL]),
        ("the toolkit/bin/version", "13.0", "13.1", [HOPPER, BLACKWELL]),
    ],
    ids=["source", "header of a header", "macro", "abi", "flag", "nvcc version"],
)
def test_change_rebuilds_what_it_touches(built, file, old, new, rebuilt):
    built.replace(file, old, new)
    built.run()
    assert built.compiled() == rebuilt
    assert "nothing to compile" in built.run()


def test_flags_in_the_environment_rebuild(built, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    built.run()
    assert built.compiled() == [HOPPER, BLACKWELL]


def test_header_that_nothing_includes_rebuilds_nothing(built):
    built.write("common/unused.cuh", "// new")
    built.run()
    assert built.compiled() == []


@pytest.mark.parametrize("file", ["hopper.cubin", "hopper.ptx"])
@pytest.mark.parametrize("damage", ["removed", "truncated"])
def test_lost_or_damaged_image_is_rebuilt(built, file, damage):
    whole = built.files()[file]
    if damage == "removed":
        (built.output / file).unlink()
    else:
        (built.output / file).write_bytes(whole[:-1])
    built.run()
    assert built.compiled() == [HOPPER]
    assert built.files()[file] == whole


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 0, "images": {}}', '{"format": 1, "images": {"hopper": {"key": ""}}}'],
)
def test_unreadable_manifest_rebuilds(built, text):
    (built.output / "manifest.json").write_text(text)
    built.run()
    assert built.compiled() == [HOPPER, BLACKWELL]


def test_outputs_of_a_removed_variant_go(built):
    built.replace("fp4rt/abi.py", 'Variant("blackwell"', 'Variant("renamed"')
    built.run("--arch", "sm_90a")
    assert set(built.manifest()) == {"hopper"}
    assert set(built.files()) == {"hopper.cubin", "hopper.ptx", "manifest.json"}


# ------------------------------------------------------------------------------ what fails


def test_failed_compile_keeps_the_old_image_and_builds_the_rest(built):
    before = built.files()
    built.replace("cuda_src/sm_90a/gemm.cu", "{}", "{} // FAIL")
    built.replace("cuda_src/sm_100a/gemm100.cu", "{}", "{ }")
    output = built.run(status=1)
    assert 'error: identifier "FAIL" is undefined' in output
    assert f"{shlex.quote(str(built.nvcc))} -cubin" in output
    assert built.compiled() == [HOPPER, BLACKWELL]
    after = built.files()
    assert set(after) == set(before)
    assert all(after[f"hopper.{kind}"] == before[f"hopper.{kind}"] for kind in ("cubin", "ptx"))
    assert "hopper" in built.manifest()
    built.run(status=1)
    assert built.compiled() == [HOPPER]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("SPILL", "gemm spills or uses local memory (8 bytes stack frame, 8 bytes spill stores"),
        ("SERIALISED", "wgmma is serialised: ptxas info    : (C7510)"),
    ],
)
def test_slow_code_fails(tree, word, message):
    tree.replace("cuda_src/sm_90a/gemm.cu", "{}", "{} // " + word)
    assert message in tree.run("--arch", "sm_90a", status=1)
    assert set(tree.files()) == {"manifest.json"}


def test_entry_points_must_be_those_of_the_variant(tree):
    tree.replace("fp4rt/abi.py", '("gemm",)', '("gemm", "expand")')
    output = tree.run(status=1)
    assert "hopper: has the kernels ['gemm'], its variant declares ['expand', 'gemm']" in output


def test_too_much_shared_memory_fails(tree):
    tree.replace("the toolkit/bin/fake_nvcc.py", "4096", "232448")
    assert "gemm needs 232960 bytes of shared memory; a CTA has 232448" in tree.run(status=1)


def test_same_message_of_several_runs_is_shown_once(tree):
    second = 'Variant("wide", "sm_90a", "sm_90a/gemm.cu", ("gemm",), {"TILE_M": 256}),\n)\n'
    tree.replace("fp4rt/abi.py", '"prepare")),\n)\n', '"prepare")),\n' + second)
    tree.replace("cuda_src/sm_90a/gemm.cu", "{}", "{} // FAIL")
    output = tree.run(status=1)
    assert output.count('error: identifier "FAIL" is undefined') == 1
    assert re.search("^build.py: (hopper|wide): nvcc failed", output, re.M)
    assert re.search("^(hopper|wide): nvcc failed", output, re.M)


def test_missing_source_is_named(tree):
    (tree.sources / "sm_90a" / "gemm.cu").unlink()
    assert "hopper: there is no " in tree.run(status=1)


def test_unwritable_output_is_explained(tree):
    tree.output.touch()
    output = tree.run(status=1)
    assert f"cannot write to {tree.output}" in output
    assert "Traceback" not in output


def test_interrupted_build_leaves_the_old_output(built):
    before = built.files()
    built.replace("cuda_src/sm_90a/gemm.cu", "{}", "{} // SLEEP")
    process = subprocess.Popen(
        built.command(), env=built.environment(), start_new_session=True, stderr=subprocess.PIPE
    )
    log = built.nvcc.parent / "log"
    for _ in range(200):
        if log.exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert built.files() == before


def test_leftovers_of_a_killed_build_go(built):
    (built.output / ".tmp-x").mkdir()
    (built.output / ".tmp-x" / "image.cubin").touch()
    built.run()
    assert not any(name.startswith(".tmp") for name in built.files())


# ------------------------------------------------------------------------------ side by side


@pytest.mark.parametrize(("jobs", "overlap"), [("1", False), ("2", True)])
def test_jobs_limits_compiler_runs(tree, jobs, overlap):
    for name in ("sm_90a/gemm.cu", "sm_100a/gemm100.cu"):
        tree.replace(f"cuda_src/{name}", "gemm(int p) {}", "gemm(int p) {} // SLEEP")
    tree.run("-j", jobs)
    events = [line.split()[0] for line in (tree.nvcc.parent / "log").read_text().splitlines()]
    assert (events[:2] == ["start", "start"]) == overlap


def test_concurrent_builds_compile_once(tree):
    tree.replace("cuda_src/sm_90a/gemm.cu", "{}", "{} // SLEEP")
    runs = [
        subprocess.Popen(tree.command(), env=tree.environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert tree.compiled() == [HOPPER, BLACKWELL]
    assert sum("nothing to compile" in output for output in outputs) == 1


# ------------------------------------------------------------------------------ other options


@pytest.mark.parametrize("spelling", ["sm_100f", "sm_100a", "sm_103a", "10.3"])
def test_arch_limits_the_build_in_any_spelling(tree, spelling):
    tree.run("--arch", spelling)
    assert tree.compiled() == [BLACKWELL]
    assert set(tree.manifest()) == {"blackwell"}


def test_several_archs(tree):
    tree.run("--arch", "sm_90a", "sm_100f")
    assert tree.compiled() == [HOPPER, BLACKWELL]


def test_unknown_arch_is_refused_with_the_known_ones(tree):
    message = "'sm_120a' is no architecture of fp4rt; use sm_90a, sm_100f"
    assert message in tree.run("--arch", "sm_120a", status=2)


def test_zero_jobs_are_refused(tree):
    assert "-j is 0; use 1 or more" in tree.run("-j", "0", status=2)


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_list_shows_state_and_facts(built):
    built.replace("cuda_src/sm_90a/gemm.cu", "{}", "{ }")
    head, hopper, *blackwell = rows(built.run("--list"))
    assert head[:4] == ["image", "arch", "state", "kernel"]
    assert hopper == [
        "hopper",
        "sm_90a",
        "stale",
        "gemm",
        "40",
        "0",
        "4608",
        "128x1x1",
        "1x1x1",
        "12",
    ]
    assert [row[:4] for row in blackwell] == [
        ["blackwell", "sm_100f", "current", "gemm"],
        ["blackwell", "sm_100f", "current", "prepare"],
    ]
    assert built.compiled() == []


def test_list_before_a_build(tree):
    assert "hopper     sm_90a   not built" in tree.run("--list")
    assert not tree.output.exists()


@pytest.mark.parametrize("args", [["--list"], ["-v"]])
def test_a_reader_that_leaves(tree, args):
    """As in `python build.py --list | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as stdout:
        done = subprocess.run(
            tree.command(*args),
            env=tree.environment(),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_list_takes_arch(built):
    assert [row[0] for row in rows(built.run("--list", "--arch", "9.0"))] == ["image", "hopper"]


def test_clean_removes_the_outputs(built):
    built.run("--clean")
    assert not built.output.exists()
    assert not (built.sources / "generated").exists()
    built.output.touch()
    assert "it is a file, and must be a folder; remove it" in built.run(status=1)
    built.run("--clean")
    assert not built.output.exists()
    assert (built.sources / "common" / "inner.cuh").exists()
    built.run("--clean")


def test_clean_leaves_nothing_that_a_wheel_would_take_from_the_last_one(built):
    """setuptools packs all that is in its build/lib."""
    copies = [built.root / "build" / name / "fp4rt" for name in ("lib", "lib.linux-x86_64")]
    for copy in copies:
        shutil.copytree(built.output, copy / "_kernels")
        (copy / "deleted.py").touch()
    other = built.root / "build" / "kernels"
    other.mkdir()
    built.run("--clean")
    assert list((built.root / "build").iterdir()) == [other]


# ------------------------------------------------------------------------------ finding nvcc


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A fake nvcc in every place; returns their paths by place. None is reachable yet."""
    for name in ("NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(build, "wheel_nvccs", list)
    wheel = tmp_path / "site packages" / "nvidia" / "cu13"
    (wheel / "include" / "cccl" / "nv").mkdir(parents=True)
    (wheel / "include" / "cccl" / "nv" / "target").touch()
    names = ("option", "NVCC", "CUDA HOME/bin", "PATH")
    found = {name: install_fake_nvcc(tmp_path / name) for name in names}
    return {**found, "wheel": install_fake_nvcc(wheel / "bin")}


def test_search_order(places, monkeypatch):
    monkeypatch.setattr(build, "wheel_nvccs", lambda: [places["wheel"]])
    assert build.find_nvcc().path == places["wheel"]
    monkeypatch.setenv("PATH", str(places["PATH"].parent))
    assert build.find_nvcc().path == places["PATH"]
    monkeypatch.setenv("CUDA_HOME", str(places["CUDA HOME/bin"].parent.parent))
    assert build.find_nvcc().path == places["CUDA HOME/bin"]
    monkeypatch.setenv("NVCC", str(places["NVCC"]))
    assert build.find_nvcc().path == places["NVCC"]
    assert build.find_nvcc(places["option"]).path == places["option"]


def test_no_nvcc_lists_every_place_and_the_wheels(places, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    with pytest.raises(build.BuildError) as caught:
        build.find_nvcc()
    text = str(caught.value)
    for place in ("--nvcc", "$NVCC", f"{tmp_path}/nothing/bin/nvcc", f"{tmp_path}/empty"):
        assert place in text
    assert "pip install nvidia-cuda-nvcc nvidia-cuda-cccl" in text


def test_named_nvcc_that_is_not_there_is_not_passed_over(places, monkeypatch):
    monkeypatch.setenv("PATH", str(places["PATH"].parent))
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    with pytest.raises(build.BuildError, match=re.escape("$NVCC is '/nowhere/nvcc'")):
        build.find_nvcc()
    with pytest.raises(build.BuildError, match=re.escape("--nvcc is '/else/nvcc'")):
        build.find_nvcc("/else/nvcc")


def test_what_is_not_nvcc_is_refused(places, tmp_path):
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    with pytest.raises(build.BuildError, match="did not answer as nvcc does:\nhello"):
        build.find_nvcc(other)


def test_wheel_without_cccl_names_it(places, monkeypatch):
    monkeypatch.setattr(build, "wheel_nvccs", lambda: [places["wheel"]])
    shutil.rmtree(places["wheel"].parent.parent / "include")
    with pytest.raises(build.BuildError, match=r"lacks the headers of nvidia-cuda-cccl.*pip inst"):
        build.find_nvcc()


def test_wheels_are_found_on_the_path_of_python(tmp_path):
    install_fake_nvcc(tmp_path / "nvidia" / "cu99" / "bin")
    code = "import build; print(build.wheel_nvccs()[0])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "nvidia" / "cu99" / "bin" / "nvcc")


@pytest.mark.parametrize(
    ("release", "arch", "needed"), [("11.8", "sm_90a", "12.0"), ("12.8", "sm_100f", "12.9")]
)
def test_old_nvcc_is_refused(places, release, arch, needed):
    (places["option"].parent / "version").write_text(release)
    nvcc = build.find_nvcc(places["option"])
    with pytest.raises(build.BuildError) as caught:
        build.check_supports(nvcc, arch)
    assert f"is release {release}; {arch} needs {needed} or later" in str(caught.value)
    assert "pip install" in str(caught.value)


def test_old_nvcc_is_told_of_a_newer_wheel(places, monkeypatch):
    monkeypatch.setattr(build, "wheel_nvccs", lambda: [places["wheel"]])
    (places["PATH"].parent / "version").write_text("12.4")
    nvcc = build.find_nvcc(places["PATH"])
    with pytest.raises(build.BuildError, match=r"--nvcc .*site packages/nvidia/cu13/bin/nvcc"):
        build.check_supports(nvcc, "sm_100f")


# ------------------------------------------------------------------------------ the real nvcc


@pytest.fixture(scope="module")
def nvcc():
    try:
        return build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_facts_of_real_kernels(nvcc, arch):
    image = build.compile_source(KERNELS / "launch_facts.cu", arch, nvcc=nvcc, strict=True)
    staged, plain = image.kernels["staged"], image.kernels["plain"]
    assert staged.max_threads == (384, 1, 1)
    assert staged.cluster == (2, 1, 1)
    assert (staged.static_shared_bytes % 1024, staged.dynamic_shared_bytes) == (0, 102400)
    assert plain.max_threads is None
    assert plain.cluster == (1, 1, 1)
    assert (plain.static_shared_bytes % 1024, plain.dynamic_shared_bytes) == (0, 0)
    assert plain.static_shared_bytes - staged.static_shared_bytes == 1024
    for facts in (staged, plain):
        assert 0 < facts.registers < 64
        assert facts.spill_bytes == facts.local_bytes == 0


@pytest.mark.nvcc
def test_real_ptx_has_the_lines_of_its_source(nvcc):
    ptx = build.compile_source(KERNELS / "launch_facts.cu", "sm_90a", nvcc=nvcc).ptx.read_text()
    (file,) = re.findall(r'\.file\s+(\d+) ".*launch_facts\.cu"', ptx)
    assert re.search(rf"\.loc\s+{file} \d+ \d+", ptx)


@pytest.mark.nvcc
def test_second_compile_is_the_first_ones_files(nvcc, tmp_path):
    folder = tmp_path / "a folder"
    source = tmp_path / "a source.cu"
    source.write_text('extern "C" __global__ void nothing() {}\n')
    first = build.compile_source(source, "sm_90a", folder, nvcc=nvcc)
    stamp = first.cubin.stat().st_mtime_ns
    assert build.compile_source(source, "sm_90a", folder, nvcc=nvcc) == first
    assert first.cubin.stat().st_mtime_ns == stamp
    other = build.compile_source(source, "sm_90a", folder, nvcc=nvcc, macros={"X": 1})
    assert other.cubin != first.cubin
    assert len(list(folder.iterdir())) == 6


@pytest.mark.nvcc
def test_real_spills_and_local_memory_are_refused(nvcc, tmp_path):
    with pytest.raises(build.BuildError) as caught:
        build.compile_source(KERNELS / "spills.cu", "sm_90a", tmp_path, nvcc=nvcc, strict=True)
    text = str(caught.value)
    assert "spills: indexes_registers spills or uses local memory (256 bytes stack frame" in text
    assert re.search(r"spills: spills spills .*[1-9]\d* bytes spill stores", text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nvcc
def test_real_error_is_shown(nvcc, tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void wrong() { undefined(); }\n")
    with pytest.raises(build.BuildError, match='identifier "undefined" is undefined'):
        build.compile_source(source, "sm_90a", nvcc=nvcc, out_dir=tmp_path)


@pytest.mark.nvcc
def test_wheels_alone_are_enough(monkeypatch, tmp_path):
    """With no toolkit on PATH or in CUDA_HOME; g++ stays, which no wheel has."""
    if not build.wheel_nvccs():
        pytest.skip(f"the wheels are not installed: {build.PIP_COMMAND}")
    for name in ("NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("gcc", "g++", "sh", "rm", "cat", "as", "ld"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    nvcc = build.find_nvcc()
    assert nvcc.path == build.wheel_nvccs()[0]
    for arch in abi.ARCHS:
        image = build.compile_source(KERNELS / "launch_facts.cu", arch, tmp_path, nvcc=nvcc)
        assert image.cubin.read_bytes()[:4] == b"\x7fELF"


# ------------------------------------------------------------------------------ what images have


def disassemble(cubin):
    """SASS of a cubin; skips without nvdisasm."""
    wheels = [path.with_name("nvdisasm") for path in build.wheel_nvccs()]
    wheels += [path for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin/nvdisasm")]
    found = shutil.which("nvdisasm") or next((str(path) for path in wheels if path.exists()), None)
    if found is None:
        pytest.skip("no nvdisasm on PATH or in the pip wheels: pip install nvidia-cuda-nvdisasm")
    command = [found, "-c", "-ndf", cubin]  # code only, without a search for where jumps may end
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.nvcc
def test_sm_100f_carries_the_block_scaled_mma(nvcc):
    image = build.compile_source(KERNELS / "block_scaled_mma.cu", "sm_100f", nvcc=nvcc)
    ptx = image.ptx.read_text()
    assert ".target sm_100f" in ptx
    assert "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16" in ptx
    assert "UTCOMMA.4X" in disassemble(image.cubin)  # The FP4 MMA with four scales a K step.


def job_facts(job):
    record = build.read_manifest(build.OUTPUT)[job.name]
    return {name: abi.KernelFacts.from_json(facts) for name, facts in record["kernels"].items()}


@pytest.mark.nvcc
def test_images_know_no_folder_of_this_machine(nvcc):
    image = build.compile_source(KERNELS / "minimal.cu", "sm_90a", nvcc=nvcc)
    ptx = image.ptx.read_text()
    assert '"tests/kernels/minimal.cu"' in ptx
    for image_bytes in (ptx.encode(), image.cubin.read_bytes()):
        assert str(ROOT).encode() not in image_bytes


def shipped(arch):
    """Jobs of the built images of `arch`; skips where they are not built from these sources."""
    records = build.read_manifest(build.OUTPUT)
    jobs = [v for v in build.variant_jobs(abi.VARIANTS, build.SOURCES).values() if v.arch == arch]
    for job in jobs:
        record = records.get(job.name)
        version = record["nvcc"] if record else ""
        if not build.is_current(job, record, version, build.OUTPUT):
            pytest.skip(f"{job.name} is not built from these sources: python build.py")
    return jobs


def test_hopper_images_multiply_on_tensor_cores_from_registers():
    """wgmma, or mma.sync where N is 8; no local memory, and room for what the design needs."""
    for job in shipped("sm_90a"):
        (facts,) = (f for n, f in job_facts(job).items() if n in ("grouped_gemm", "pack_weights"))
        sass = disassemble(build.OUTPUT / f"{job.name}.cubin")
        assert not re.search(r"\b(STL|LDL)\b", sass), job.name
        assert (facts.spill_bytes, facts.local_bytes) == (0, 0)
        assert facts.ctas_per_sm >= 1
        if job.name.startswith("pack"):
            continue
        wgmma = job.source.stem == "grouped_gemm"
        assert ("HGMMA.64x" in sass, "HMMA.16816.F32" in sass) == (wgmma, not wgmma), job.name
        assert ("UBLKCP" in sass, "SYNCS.PHASECHK" in sass) == (True, True)
        assert ("USETMAXREG" in sass) == wgmma


def test_blackwell_images_have_the_expected_instructions():
    """Block-scaled MMA, Tensor Memory, TMA boxes, bulk copies, and tokens' scales in 16 bytes."""
    macros = {variant.name: variant.macros for variant in abi.VARIANTS}
    for job in shipped("sm_100f"):
        units = max(macros[job.name]["TILE_N"] // 128, 1)  # accumulators of a tile
        on_m, ctas = macros[job.name]["TOKENS_ON_M"], macros[job.name]["CTAS"]
        weight_blocks, token_units = (units, 1) if on_m else (1, units)
        token_rows = 128 if on_m else macros[job.name]["TILE_N"]
        sass = disassemble(build.OUTPUT / f"{job.name}.cubin")
        names = (
            "UTCOMMA.2CTA.4X",
            "UTCOMMA.4X",
            "UTCCP",
            "LDTM",
            "UTMALDG",
            "UBLKCP",
            "LDG.E.128",
            "STS.128",
            "UTCBAR",
            "STSM",
            "STL",
            "LDL",
        )
        found = {name: len(re.findall(rf"\b{re.escape(name)}\b", sass)) for name in names}
        assert found == {
            "UTCOMMA.2CTA.4X": 4 * units if ctas == 2 else 0,
            "UTCOMMA.4X": 4 * units if ctas == 1 else 0,
            "UTCCP": 4 * (1 + units),
            "LDTM": 2 if on_m else 6,  # rows of M by 32 and by 8; 8 x 8 fragments too
            "UTMALDG": token_units,
            "UBLKCP": 2 * weight_blocks,  # values and scales
            "LDG.E.128": 2 * token_rows // 32,  # rows of scales in a lane, for two stages
            "STS.128": 2 * token_units * 4,  # atoms of 64 K
            "UTCBAR": 1 + units,  # a stage is free; each accumulator is there
            "STSM": 0 if on_m else 5,  # for 32 tokens and for 8
            "STL": 0,
            "LDL": 0,
        }, job.name


def test_hopper_images_have_no_fp4_conversion():
    """E2M1 conversions do not exist on sm_90."""
    for job in shipped("sm_90a"):
        ptx = (build.OUTPUT / f"{job.name}.ptx").read_text()
        assert not re.search(r"cvt\.\S*e2m1", ptx), job.name


@pytest.mark.parametrize("arch", abi.ARCHS)
def test_shipped_images_do_not_spill(arch):
    for job in shipped(arch):
        kernels = build.read_manifest(build.OUTPUT)[job.name]["kernels"]
        for name, facts in kernels.items():
            assert facts["spill_bytes"] == facts["local_bytes"] == 0, (job.name, name)
