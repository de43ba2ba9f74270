"""Compile the kernels: every variant of ``fp4rt.abi.VARIANTS`` to a cubin and its PTX.

``python build.py`` writes ``fp4rt/_kernels/{variant}.cubin``, ``{variant}.ptx`` and
``manifest.json``. GPUs load the cubin; the emulator executes the PTX, which comes from the same
nvcc run. An image is compiled only if its key has changed: its sources with every header below
``cuda_src`` that they include, the generated ``abi.h``, the flags, and nvcc's version. All outputs
appear by rename, the manifest last, so a reader never sees half of one, and a failed compile leaves
the previous image in place.

nvcc is looked for in ``--nvcc``, ``$NVCC``, ``$CUDA_HOME/bin``, ``$PATH``, and last in the pip
wheels of the ``build`` extra (``pip install ".[build]"``), so no CUDA toolkit is needed. A host C++
compiler (g++) is: nvcc preprocesses with it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp4rt import abi

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "cuda_src"
OUTPUT = ROOT / "fp4rt" / "_kernels"
TEST_OUTPUT = ROOT / "build" / "kernels"

FLAGS = ("-std=c++20", "-O3", "-lineinfo", "-Werror=all-warnings", "-Xptxas=-v")
PIP_COMMAND = "pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
MINIMUM_NVCC = {"sm_90a": (12, 0), "sm_100f": (12, 9)}
"""First nvcc release that knows an architecture."""
MAX_SHARED_BYTES = 227 * 1024
"""Most shared memory of one CTA on compute capability 9.0, 10.0 and 10.3."""


NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
"""Environment variables that change what nvcc does; part of the key."""


RECORD_KEYS = {"arch", "key", "abi_hash", "nvcc", "cubin", "ptx", "kernels"}
"""What the manifest holds of each image."""


class BuildError(RuntimeError):
    """The build cannot go on; the text says what is wrong and what to do, or is nvcc's own."""


# ------------------------------------------------------------------------------------- nvcc


@dataclass(frozen=True)
class Nvcc:
    """A compiler: its path, its release, and all that ``--version`` prints."""

    path: Path
    release: tuple[int, int]
    version: str

    @property
    def version_id(self) -> str:
        """The full version, such as ``13.0.88``."""
        found = re.search(r"V(\d[\d.]*)", self.version)
        return found[1] if found else ".".join(map(str, self.release))


def wheel_nvccs() -> list[Path]:
    """Return the compilers that pip wheels of CUDA 13 and later put into site-packages."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("cu[0-9]*/bin/nvcc")]
    return sorted(found, key=lambda path: int(path.parts[-3][2:]), reverse=True)


def find_nvcc(explicit: str | Path | None = None) -> Nvcc:
    """Return the nvcc to use.

    Parameters
    ----------
    explicit
        Path given by the user; None searches ``$NVCC``, ``$CUDA_HOME/bin``, ``$PATH`` and the pip
        wheels, in this order.

    Raises
    ------
    BuildError
        If there is none (the text lists every place searched and the pip command), or the one
        that `explicit` or ``$NVCC`` names is not there or does not run.
    """
    for origin, named in (("--nvcc", explicit), ("$NVCC", os.environ.get("NVCC"))):
        if named:
            path = shutil.which(named)
            if path is None:
                raise BuildError(f"{origin} is {str(named)!r}, which is not an executable file")
            return _ask_version(Path(path))
    searched = ["--nvcc: not given", "$NVCC: not set"]
    home = os.environ.get("CUDA_HOME")
    if home:
        path = shutil.which(Path(home) / "bin" / "nvcc")
        if path is not None:
            return _ask_version(Path(path))
    searched.append(f"$CUDA_HOME: no {home}/bin/nvcc" if home else "$CUDA_HOME: not set")
    path = shutil.which("nvcc")
    if path is not None:
        return _ask_version(Path(path))
    searched.append(f"$PATH: no nvcc in {os.environ.get('PATH', '')}")
    for wheel in wheel_nvccs():
        include = wheel.parent.parent / "include"
        if not any((folder / "nv" / "target").is_file() for folder in (include, include / "cccl")):
            raise BuildError(
                f"{wheel} lacks the headers of nvidia-cuda-cccl, which cuda_fp16.h needs;"
                f" {PIP_COMMAND}"
            )
        return _ask_version(wheel)
    searched.append(f"pip wheels: no nvidia/cu*/bin/nvcc for {sys.executable}")
    lines = "\n".join(f"  {place}" for place in searched)
    raise BuildError(f"no nvcc found. Searched:\n{lines}\nWithout a CUDA toolkit: {PIP_COMMAND}")


def _ask_version(path: Path) -> Nvcc:
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run {path}: {error.strerror}") from error
    release = re.search(r"release (\d+)\.(\d+)", run.stdout)
    if run.returncode or release is None:
        raise BuildError(f"{path} --version did not answer as nvcc does:\n{run.stdout}{run.stderr}")
    return Nvcc(path, (int(release[1]), int(release[2])), run.stdout)


def check_supports(nvcc: Nvcc, arch: str) -> None:
    """Raise BuildError if `nvcc` is too old for `arch`."""
    needed = MINIMUM_NVCC.get(arch, (0, 0))
    if nvcc.release < needed:
        newer = [str(path) for path in wheel_nvccs() if path != nvcc.path]
        remedy = f"--nvcc {shlex.quote(newer[0])}" if newer else f"{PIP_COMMAND}, and unset the old"
        raise BuildError(
            f"{nvcc.path} is release {nvcc.release[0]}.{nvcc.release[1]}; {arch} needs"
            f" {needed[0]}.{needed[1]} or later. Use a newer one: {remedy}"
        )


# ----------------------------------------------------------------------------- one image


@dataclass(frozen=True)
class Job:
    """One source to compile: what decides the bytes of its image.

    Parameters
    ----------
    name
        Name of the image.
    source
        The ``.cu`` file.
    arch
        As nvcc spells it, e.g. ``"sm_90a"``.
    macros
        ``-D`` flags.
    include_dirs
        Folders for ``#include``; their headers are part of the key.
    abi_hash
        What the host assumes (`fp4rt.abi.abi_hash`); empty for an image without a variant.
    kernels
        Entry points that must come out; None accepts any.
    strict
        Whether spills, local memory and serialised wgmma fail the build.
    """

    name: str
    source: Path
    arch: str
    macros: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    include_dirs: tuple[Path, ...] = (SOURCES,)
    abi_hash: str = ""
    kernels: tuple[str, ...] | None = None
    strict: bool = True

    @property
    def flags(self) -> list[str]:
        """The flags that do not name a path."""
        return [
            "-cubin",
            f"-arch={self.arch}",
            *FLAGS,
            *(f"-D{k}={v}" for k, v in self.macros.items()),
        ]

    def sources(self) -> list[Path]:
        """Return the source and every own header that it includes, directly or not.

        Conditional includes count as included; a macro as the name of a header is not followed.

        Raises
        ------
        BuildError
            If the source does not exist.
        """
        if not self.source.is_file():
            raise BuildError(f"{self.name}: there is no {self.source}")
        seen: dict[Path, None] = {}
        waiting = [self.source]
        while waiting:
            path = waiting.pop()
            if path in seen:
                continue
            seen[path] = None
            for name in re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(), re.M):
                folders = (path.parent, *self.include_dirs)
                found = next((f / name for f in folders if (f / name).is_file()), None)
                if found is not None:
                    waiting.append(found.resolve())
        return list(seen)

    def key(self, nvcc_version: str) -> str:
        """Return a hex digest of everything that decides the image; paths do not."""
        digest = hashlib.sha256()
        facts = [self.name, self.flags, self.abi_hash, self.kernels, self.strict, nvcc_version]
        extra = [os.environ.get(name) for name in NVCC_VARIABLES]
        digest.update(json.dumps([*facts, *extra]).encode())
        for path in self.sources():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class Image:
    """A compiled source.

    Attributes
    ----------
    cubin, ptx
        Paths of the two forms.
    kernels
        Facts about each entry point, by name.
    """

    cubin: Path
    ptx: Path
    kernels: dict[str, abi.KernelFacts]


def compile_source(
    source: str | Path,
    arch: str,
    out_dir: str | Path = TEST_OUTPUT,
    *,
    macros: Mapping[str, int | str] | None = None,
    include_dirs: Sequence[str | Path] = (),
    nvcc: Nvcc | None = None,
    strict: bool = False,
) -> Image:
    """Compile one ``.cu`` for one architecture into a cache folder; the test suite's door to nvcc.

    The result depends on the sources, flags and compiler only, and a second call with the same
    ones returns the files that are there. Safe to call from several processes at once. No GPU is
    needed.

    Parameters
    ----------
    source
        The ``.cu`` file. It may include what is below ``cuda_src`` (``"generated/abi.h"``,
        ``"ptx/mbarrier.cuh"``) and beside it. Entry points are best declared ``extern "C"``.
    arch
        ``"sm_90a"``, ``"sm_100f"``, or any other that nvcc knows.
    out_dir
        The cache folder, made if missing; by default ``build/kernels``, which git ignores.
    macros
        ``-D`` flags.
    include_dirs
        Further folders for ``#include``.
    nvcc
        The compiler; None finds one (`find_nvcc`).
    strict
        Whether spills, local memory and serialised wgmma are errors, as for shipped kernels.

    Returns
    -------
    Image
        Paths of cubin and PTX, and facts by kernel.

    Raises
    ------
    BuildError
        If there is no nvcc, or it fails; the text has nvcc's own message.

    Examples
    --------
    >>> image = compile_source("tests/kernels/copy.cu", "sm_90a")  # doctest: +SKIP
    >>> module = device.load(image.ptx.read_bytes())  # doctest: +SKIP
    """
    nvcc = nvcc or find_nvcc()
    check_supports(nvcc, arch)
    folders = (SOURCES, *(Path(folder).resolve() for folder in include_dirs))
    if SOURCES.is_dir():
        write_header(SOURCES)
    source = Path(source).resolve()
    job = Job(source.stem, source, arch, macros or {}, folders, strict=strict)
    out_dir = Path(out_dir).resolve()
    stem = f"{source.stem}-{arch}-{job.key(nvcc.version)[:16]}"
    facts = out_dir / f"{stem}.json"  # Written last: where it is, the other two are.
    if not facts.is_file():
        out_dir.mkdir(parents=True, exist_ok=True)
        kernels, _ = run_nvcc(job, nvcc, out_dir / stem)
        _write(facts, json.dumps(_kernels_record(kernels)))
    kernels = _read_kernels(json.loads(facts.read_text()))
    return Image(out_dir / f"{stem}.cubin", out_dir / f"{stem}.ptx", kernels)


def _kernels_record(kernels: Mapping[str, abi.KernelFacts]) -> dict[str, Any]:
    return {name: facts.to_json() for name, facts in kernels.items()}


def _read_kernels(record: Mapping[str, Any]) -> dict[str, abi.KernelFacts]:
    return {name: abi.KernelFacts.from_json(facts) for name, facts in record.items()}


def run_nvcc(job: Job, nvcc: Nvcc, target: Path) -> tuple[dict[str, abi.KernelFacts], str]:
    """Compile `job` to ``{target}.cubin`` and ``{target}.ptx``; both appear only on success.

    Returns
    -------
    tuple
        Facts by kernel, and the command line.

    Raises
    ------
    BuildError
        With nvcc's message, or with what `job` demands and the image lacks.
    """
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=target.parent) as temporary:
        cubin, ptx = Path(temporary) / "image.cubin", Path(temporary) / "image.ptx"
        flags, folders = job.flags[1:], [f"-I{path}" for path in job.include_dirs]
        to_ptx = [str(nvcc.path), "-ptx", *flags, *folders, "-o", str(ptx), str(job.source)]
        to_cubin = [str(nvcc.path), "-cubin", *flags, "-o", str(cubin), str(ptx)]
        line = f"{shlex.join(to_ptx)} && {shlex.join(to_cubin)}"
        output = _run(job, to_ptx, line)
        ptx.write_text(name_sources(ptx.read_text(), job))
        output += _run(job, to_cubin, line)
        kernels = read_facts(output, ptx.read_text())
        problems = list(_problems(job, kernels, output))
        if problems:
            raise BuildError(f"{job.name}: " + f"\n{job.name}: ".join(problems) + f"\n{output}")
        cubin.replace(target.with_name(target.name + ".cubin"))
        ptx.replace(target.with_name(target.name + ".ptx"))
    return kernels, line


def _run(job: Job, command: list[str], line: str) -> str:
    """Run one step of a compilation and return what it printed."""
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = run.stdout + run.stderr
    if run.returncode:
        hint = ""
        if "host compiler" in output:
            hint = "nvcc preprocesses with a host C++ compiler: install g++ or set NVCC_CCBIN"
        raise BuildError(f"{job.name}: nvcc failed ({run.returncode}): {line}\n{output}{hint}")
    return output


def name_sources(ptx: str, job: Job) -> str:
    """Name the sources in line information as from the repository's root.

    nvcc writes absolute paths, which would go into every wheel. Others are named without a folder.
    """
    roots = [*(folder.parent for folder in job.include_dirs), job.source.parent]

    def name(found: re.Match[str]) -> str:
        path = Path(os.path.normpath(found[2]))
        inside = [path.relative_to(root) for root in roots if path.is_relative_to(root)]
        return f'{found[1]}"{(inside or [Path(path.name)])[0].as_posix()}"'

    return re.sub(r'^(\s*\.file\s+\d+\s+)"([^"]*)"', name, ptx, flags=re.M)


def _problems(job: Job, kernels: Mapping[str, abi.KernelFacts], output: str) -> Iterator[str]:
    if job.kernels is not None and set(kernels) != set(job.kernels):
        yield f"has the kernels {sorted(kernels)}, its variant declares {sorted(job.kernels)}"
    for name, facts in kernels.items():
        shared = facts.static_shared_bytes + facts.dynamic_shared_bytes
        if shared > MAX_SHARED_BYTES:
            yield f"{name} needs {shared} bytes of shared memory; a CTA has {MAX_SHARED_BYTES}"
    if not job.strict:
        return
    function = ""
    for line in output.splitlines():
        if found := re.search(r"Function properties for (\S+)", line):
            function = found[1]
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill st\D+(\d+) bytes", line)
        if stack and any(map(int, stack.groups())):
            yield (
                f"{function} spills or uses local memory ({stack[0]} spill loads); use fewer"
                " registers or index arrays by constants"
            )
        if re.search(r"\(C75\d\d\)", line):
            yield f"wgmma is serialised: {line.strip()}"


def read_facts(log: str, ptx: str) -> dict[str, abi.KernelFacts]:
    """Read the facts of every entry point from ``ptxas -v`` and from the PTX.

    The launch facts are in the PTX: ``.maxntid`` or ``.reqntid``, ``.reqnctapercluster``, and the
    constant ``{kernel}_smem_bytes``.
    """
    entries = dict(re.findall(r"\.entry\s+([\w$]+)\s*(?:\([^)]*\))?([^{;]*)", ptx))
    exported = dict(re.findall(r"\.const\s[^;=]*?([\w$]+)_smem_bytes\s*=\s*(\d+)", ptx))
    kernels = {}
    for section in log.split("Compiling entry function ")[1:]:
        name = section.split("'")[1]
        used = section[section.index("Used ") :].splitlines()[0]
        own = re.search(rf"properties for {re.escape(name)}\n(.*)", section)
        stack, *spills = map(int, re.findall(r"(\d+) bytes", own[1] if own else ""))
        directives = entries[name]
        kernels[name] = abi.KernelFacts(
            registers=_number(r"Used (\d+) registers", used),
            spill_bytes=sum(spills),
            local_bytes=stack,
            static_shared_bytes=_number(r"(\d+) bytes smem", used),
            dynamic_shared_bytes=int(exported.get(name, 0)),
            max_threads=_dim3(r"\.(?:maxntid|reqntid)", directives),
            cluster=_dim3(r"\.reqnctapercluster", directives) or (1, 1, 1),
        )
    return dict(sorted(kernels.items()))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _dim3(directive: str, text: str) -> tuple[int, int, int] | None:
    found = re.search(rf"{directive}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text)
    return (int(found[1]), int(found[2] or 1), int(found[3] or 1)) if found else None


# ---------------------------------------------------------------------------- all variants


def write_header(source_dir: Path) -> None:
    """Write ``generated/abi.h`` below `source_dir` if its text has changed."""
    path = source_dir / "generated" / "abi.h"
    text = abi.header_text()
    with _writable(path.parent):
        if not (path.is_file() and path.read_text() == text):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, text)


def _write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if folder.exists() and not folder.is_dir():
            raise BuildError(
                f"cannot write to {folder}: it is a file, and must be a folder; remove it: "
                "python build.py --clean"
            ) from error
        raise BuildError(
            f"cannot write to {folder}: {error}; build in a copy of the repository that you can"
            " write to"
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold `folder` against other builds."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another build to finish", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_manifest(output_dir: Path) -> dict[str, Any]:
    """Return the images in the manifest, by name; empty if there is none that can be read."""
    try:
        manifest = json.loads((output_dir / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(manifest, dict) or manifest.get("format") != abi.MANIFEST_FORMAT:
        return {}
    images = manifest.get("images")
    if not isinstance(images, dict):
        return {}
    return {
        name: image
        for name, image in images.items()
        if isinstance(image, dict) and set(image) >= RECORD_KEYS
    }


def _write_manifest(output_dir: Path, records: Mapping[str, Any]) -> None:
    manifest = {"format": abi.MANIFEST_FORMAT, "images": dict(sorted(records.items()))}
    path, text = output_dir / "manifest.json", json.dumps(manifest, indent=1) + "\n"
    if not path.is_file() or path.read_text() != text:
        _write(path, text)


def variant_jobs(variants: Iterable[abi.Variant], source_dir: Path) -> dict[str, Job]:
    """Return what there is to compile, by name of the variant."""
    return {
        v.name: Job(
            name=v.name,
            source=source_dir / v.source,
            arch=v.arch,
            macros=v.macros,
            include_dirs=(source_dir,),
            abi_hash=abi.abi_hash(v),
            kernels=v.kernels,
        )
        for v in variants
    }


def is_current(job: Job, record: Mapping[str, Any] | None, version: str, output_dir: Path) -> bool:
    """Whether the image that `record` describes is what compiling `job` would make."""
    if record is None or record["key"] != job.key(version):
        return False
    for kind in ("cubin", "ptx"):
        path = output_dir / f"{job.name}.{kind}"
        if not path.is_file() or _sha256(path) != record[kind]["sha256"]:
            return False
    return True


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(
    archs: Sequence[str] = (),
    *,
    nvcc: Nvcc | None = None,
    jobs: int | None = None,
    verbose: bool = False,
    source_dir: Path = SOURCES,
    output_dir: Path = OUTPUT,
) -> list[str]:
    """Compile the variants that are not current.

    Parameters
    ----------
    archs
        Architectures to build (`fp4rt.abi.ARCHS`); empty builds all.
    nvcc
        The compiler; None finds one.
    jobs
        Compiler runs at a time; None takes one for each core.
    verbose
        Print the command lines.
    source_dir, output_dir
        Where the sources are, and where the images go.

    Returns
    -------
    list of str
        Names of the images that were compiled.

    Raises
    ------
    BuildError
        If any of them fails; the others are built all the same.
    """
    nvcc = nvcc or find_nvcc()
    known = variant_jobs(abi.VARIANTS, source_dir)
    wanted = [job for job in known.values() if not archs or job.arch in archs]
    for arch in dict.fromkeys(job.arch for job in wanted):
        check_supports(nvcc, arch)
    print(f"nvcc {nvcc.version_id} ({nvcc.path})", flush=True)
    with _writable(output_dir), _locked(output_dir.parent):
        write_header(source_dir)
        output_dir.mkdir(exist_ok=True)
        manifest = read_manifest(output_dir)
        records = {name: record for name, record in manifest.items() if name in known}
        _remove_strays(output_dir, known)
        stale = [
            job
            for job in wanted
            if not is_current(job, records.get(job.name), nvcc.version, output_dir)
        ]
        _write_manifest(output_dir, records)
        failures = []
        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            futures = [pool.submit(_build_one, job, nvcc, output_dir) for job in stale]
            try:
                for future in as_completed(futures):
                    try:
                        name, record, line, seconds = future.result()
                    except BuildError as error:
                        failures.append(str(error))
                        continue
                    records[name] = record
                    _write_manifest(output_dir, records)
                    print(f"{name}: compiled in {seconds:.1f} s", flush=True)
                    if verbose:
                        print(f"  {line}", flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    if failures:
        raise BuildError(_merge(failures))
    if not stale:
        print(f"nothing to compile: {len(wanted)} of {len(wanted)} images are up to date")
    return [job.name for job in stale]


def _merge(failures: Iterable[str]) -> str:
    """Join the texts of failed compiler runs; what several of them say appears once."""
    heads: dict[str, list[str]] = {}
    for failure in failures:
        head, _, message = failure.partition("\n")
        heads.setdefault(message, []).append(head)
    return "\n".join("\n".join([*first, message]) for message, first in heads.items())


def _build_one(job: Job, nvcc: Nvcc, output_dir: Path) -> tuple[str, dict[str, Any], str, float]:
    start = time.perf_counter()
    key = job.key(nvcc.version)  # Before nvcc reads the sources: a later edit must rebuild.
    kernels, line = run_nvcc(job, nvcc, output_dir / job.name)
    record: dict[str, Any] = {"arch": job.arch, "key": key, "abi_hash": job.abi_hash}
    record["nvcc"] = nvcc.version
    for kind in ("cubin", "ptx"):
        path = output_dir / f"{job.name}.{kind}"
        record[kind] = {"sha256": _sha256(path), "bytes": path.stat().st_size}
    record["kernels"] = _kernels_record(kernels)
    return job.name, record, line, time.perf_counter() - start


def _remove_strays(output_dir: Path, known: Mapping[str, Job]) -> None:
    """Remove images of variants that are gone, and what a killed build has left."""
    keep = {"manifest.json"} | {f"{name}.{kind}" for name in known for kind in ("cubin", "ptx")}
    for path in output_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


# ---------------------------------------------------------------------------- command line


def table(
    archs: Sequence[str] = (),
    nvcc: Nvcc | None = None,
    *,
    source_dir: Path = SOURCES,
    output_dir: Path = OUTPUT,
) -> str:
    """Return a table of the variants: whether each is built, and the facts of its kernels.

    Without `nvcc`, whether a newer compiler would rebuild an image is not considered.
    """
    head = (
        "image",
        "arch",
        "state",
        "kernel",
        "registers",
        "spills",
        "shared",
        "threads",
        "cluster",
        "CTAs/SM",
    )
    rows: list[tuple[str, ...]] = [head]
    records = read_manifest(output_dir)
    for name, job in variant_jobs(abi.VARIANTS, source_dir).items():
        if archs and job.arch not in archs:
            continue
        record = records.get(name)
        if record is None:
            rows.append((name, job.arch, "not built", *("-",) * 7))
            continue
        try:
            current = is_current(job, record, nvcc.version if nvcc else record["nvcc"], output_dir)
            state = "current" if current else "stale"
        except BuildError:
            state = "no source"
        for kernel, facts in _read_kernels(record["kernels"]).items():
            numbers = (
                facts.registers,
                facts.spill_bytes,
                facts.static_shared_bytes + facts.dynamic_shared_bytes,
            )
            shapes = (
                "x".join(map(str, shape or ["-"])) for shape in (facts.max_threads, facts.cluster)
            )
            fit = str(facts.ctas_per_sm or "-")
            rows.append((name, job.arch, state, kernel, *map(str, numbers), *shapes, fit))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def clean(source_dir: Path = SOURCES, output_dir: Path = OUTPUT) -> None:
    """Remove everything that `build` writes, and setuptools' copies of the package.

    It leaves those in build/lib and packs all that is there into the next wheel: kernels and
    modules that are gone from the package as well.
    """
    copies = (output_dir.parents[1] / "build").glob("lib*")
    with _writable(output_dir), _locked(output_dir.parent):
        for path in (output_dir, source_dir / "generated", *copies):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _arch(spelling: str) -> str:
    arch = abi.image_arch(spelling)
    if arch is None:
        known = ", ".join(abi.ARCHS)
        raise argparse.ArgumentTypeError(f"{spelling!r} is no architecture of fp4rt; use {known}")
    return arch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="build.py", description="Compile the CUDA kernels into fp4rt/_kernels."
    )
    parser.add_argument(
        "--arch",
        action="extend",
        nargs="+",
        type=_arch,
        default=[],
        metavar="ARCH",
        help=f"build these only: {', '.join(abi.ARCHS)} (default: all)",
    )
    parser.add_argument("--list", action="store_true", help="print what is built, and stop")
    parser.add_argument(
        "--clean", action="store_true", help="remove the outputs and build/lib, and stop"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print the command lines")
    parser.add_argument("-j", "--jobs", type=int, metavar="N", help="compiler runs at a time")
    parser.add_argument("--nvcc", metavar="PATH", help="the compiler (default: see below)")
    parser.epilog = (
        f"nvcc is looked for in $NVCC, $CUDA_HOME, $PATH and pip wheels ({PIP_COMMAND})."
    )
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"-j is {args.jobs}; use 1 or more")
    try:
        if args.clean:
            clean()
        elif args.list:
            nvcc = None
            with contextlib.suppress(BuildError):
                nvcc = find_nvcc(args.nvcc)
            print(table(args.arch, nvcc), flush=True)
        else:
            build(args.arch, nvcc=find_nvcc(args.nvcc), jobs=args.jobs, verbose=args.verbose)
    except BuildError as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has left (`… | head`); what Python flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("build.py: interrupted; what was built before is as it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
