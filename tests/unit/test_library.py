"""library: what the manifest lists, what is refused, what the messages say; and the wheel."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import build
from fp4rt import abi, library
from fp4rt.device import NoKernelError
from fp4rt.library import Library

ROOT = Path(build.__file__).parent

VARIANTS = (
    abi.Variant("narrow", "sm_90a", "a.cu", ("gemm",), {"TILE_M": 64}),
    abi.Variant("wide", "sm_90a", "a.cu", ("gemm",), {"TILE_M": 128}),
    abi.Variant("new", "sm_100f", "b.cu", ("gemm",)),
)
FACTS = {
    "registers": 168,
    "spill_bytes": 0,
    "local_bytes": 0,
    "static_shared_bytes": 1024,
    "dynamic_shared_bytes": 200_000,
    "max_threads": [384, 1, 1],
    "cluster": [2, 1, 1],
}


def write_kernels(folder, variants):
    """What build.py leaves, with stand-ins for the images."""
    folder.mkdir(parents=True)
    images = {}
    for variant in variants:
        record = {"arch": variant.arch, "key": "0", "abi_hash": abi.abi_hash(variant)}
        record["nvcc"] = "release 13.0, V13.0.88"
        for kind in ("cubin", "ptx"):
            data = f"{kind} of {variant.name}".encode()
            (folder / f"{variant.name}.{kind}").write_bytes(data)
            record[kind] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        record["kernels"] = dict.fromkeys(variant.kernels, FACTS)
        images[variant.name] = record
    manifest = {"format": abi.MANIFEST_FORMAT, "images": images}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(autouse=True)
def variants(monkeypatch):
    monkeypatch.setattr(library, "VARIANTS", VARIANTS)


@pytest.fixture
def folder(tmp_path):
    write_kernels(tmp_path / "kernels", VARIANTS)
    return tmp_path / "kernels"


def edit(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_archs(folder):
    assert Library(folder).archs() == ("sm_90a", "sm_100f")


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("sm_90a", ["narrow", "wide"]),
        ("9.0", ["narrow", "wide"]),
        ("sm_100a", ["new"]),
        ("sm_103a", ["new"]),
        ("sm_100f", ["new"]),
    ],
)
def test_images_of_an_arch_in_order_of_declaration(folder, arch, names):
    assert [image.variant.name for image in Library(folder).images(arch)] == names


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_image_bytes(folder, kind):
    assert Library(folder).image("wide", kind) == f"{kind} of wide".encode()


def test_facts_are_typed(folder):
    facts = Library(folder).find("new").kernels["gemm"]
    assert facts == abi.KernelFacts(168, 0, 0, 1024, 200_000, (384, 1, 1), (2, 1, 1))


def refused(call, *parts):
    with pytest.raises(NoKernelError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_nothing_built(tmp_path):
    refused(lambda: Library(tmp_path), f"there is no {tmp_path}/manifest.json", "`python build.py`")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"format": 0, "images": {}}', '{"format": 1}'),
        *('{"format": 1, "images": {"new": {}}}', '{"format": 1, "images": {"new": null}}'),
    ],
)
def test_unreadable_manifest(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    refused(lambda: Library(tmp_path), "manifest.json", "`python build.py`")


def test_arch_that_is_not_built(folder):
    edit(folder, lambda manifest: manifest["images"].pop("new"))
    built = Library(folder)
    assert built.archs() == ("sm_90a",)
    command = "`python build.py --arch sm_100f`"
    refused(lambda: built.images("sm_103a"), "sm_103a", "built: sm_90a", command)
    refused(lambda: built.find("new"), "new is not built (built: narrow, wide)", command)


def test_arch_that_has_no_kernel(folder):
    parts = "no kernel for sm_120a", "kernels for sm_90a, sm_100f", "device 'cpu'"
    refused(lambda: Library(folder).images("sm_120a"), *parts)


def test_other_abi_is_refused_for_its_arch_only(folder):
    edit(folder, lambda manifest: manifest["images"]["wide"].update(abi_hash="0"))
    built = Library(folder)
    parts = "wide", "other parameter structs", "`python build.py --arch sm_90a`"
    refused(lambda: built.images("sm_90a"), *parts)
    refused(lambda: built.image("wide", "cubin"), *parts)
    assert [image.variant.name for image in built.images("sm_100a")] == ["new"]


def test_changed_declaration_is_noticed(folder, monkeypatch):
    monkeypatch.setitem(abi.CONSTANTS, "kExtra", 1)
    refused(lambda: Library(folder).images("sm_100f"), "`python build.py --arch sm_100f`")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "cannot read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 12 bytes, 13 were built"),
        (lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]), "has changed since"),
    ],
    ids=["missing", "truncated", "changed"],
)
def test_damaged_image_is_refused(folder, damage, message):
    path = folder / "wide.cubin"
    assert path.stat().st_size == 13
    damage(path)
    built = Library(folder)
    refused(lambda: built.image("wide", "cubin"), str(path), message, "`python build.py`")
    assert built.image("wide", "ptx") == b"ptx of wide"


def test_unknown_names_are_value_errors(folder):
    built = Library(folder)
    with pytest.raises(
        ValueError, match="no variant is named 'other'; there are narrow, wide, new"
    ):
        built.find("other")
    with pytest.raises(ValueError, match="kind is 'fatbin'; use 'cubin' or 'ptx'"):
        built.image("wide", "fatbin")


def test_what_build_writes_is_what_library_reads(tmp_path, monkeypatch):
    """The manifest of build.py itself, with a compiler that takes no time."""
    sources = tmp_path / "cuda_src"
    sources.mkdir()
    for name in ("a.cu", "b.cu"):
        (sources / name).write_text('extern "C" __global__ void gemm(int p) {}\n')
    nvcc = tmp_path / "nvcc"
    fake = ROOT / "tests" / "fake_nvcc.py"
    shutil.copy(fake, tmp_path)
    (tmp_path / "version").write_text("13.0")
    nvcc.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{tmp_path}/fake_nvcc.py" "$@"\n')
    nvcc.chmod(0o755)
    monkeypatch.setattr(abi, "VARIANTS", VARIANTS)
    output = tmp_path / "out"
    build.build(nvcc=build.find_nvcc(nvcc), source_dir=sources, output_dir=output)
    built = Library(output)
    assert built.archs() == ("sm_90a", "sm_100f")
    assert built.image("wide", "ptx") == (output / "wide.ptx").read_bytes()
    assert built.find("wide").kernels["gemm"].registers == 40


# ------------------------------------------------------------------------------ the wheel


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_installed_wheel_finds_its_kernels(tmp_path):
    """Everything offline: the wheel is built and installed with what this Python has."""
    needed = (ROOT / "pyproject.toml").read_text().partition('requires = ["setuptools>=')[2]
    minimum = int(re.match(r"\d+", needed)[0])
    found = metadata.version("setuptools")
    if int(found.partition(".")[0]) < minimum:
        pytest.skip(f"setuptools {found} is older than {minimum}: pip install -U setuptools")
    checkout = tmp_path / "a checkout"
    ignored = shutil.ignore_patterns("_kernels", "__pycache__")
    shutil.copytree(ROOT / "fp4rt", checkout / "fp4rt", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "build.py"):
        shutil.copy(ROOT / name, checkout)
    write_kernels(checkout / "fp4rt" / "_kernels", abi.VARIANTS)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    wheels = tmp_path / "wheels"
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "wheel", *options, "-w", wheels, checkout, cwd=tmp_path)
    (wheel,) = wheels.iterdir()
    shutil.rmtree(checkout)

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    code = """
import fp4rt, pkgutil
from fp4rt import abi, library
built = library.Library()
for variant in abi.VARIANTS:
    for kind in ("cubin", "ptx"):
        assert built.image(variant.name, kind) == f"{kind} of {variant.name}".encode()
print(fp4rt.__file__, library.KERNELS, *(m.name for m in pkgutil.iter_modules(fp4rt.__path__)))
"""
    here = os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    environment = {**os.environ, "PYTHONPATH": here, "PYTHONSAFEPATH": "1"}
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    environment["PYTHONPATH"] = os.pathsep.join([site, here])
    package, kernels, *modules = run(python, "-c", code, env=environment, cwd=tmp_path).split()
    assert Path(package).is_relative_to(tmp_path / "venv")
    assert Path(kernels).is_relative_to(tmp_path / "venv")
    expected = {path.stem for path in (ROOT / "fp4rt").glob("[!_]*.py")}
    expected |= {path.parent.name for path in (ROOT / "fp4rt").glob("*/__init__.py")}
    assert expected <= set(modules)
    assert (Path(package).parent / "py.typed").exists()
