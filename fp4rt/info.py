"""What is here: versions, devices with the reason where one is unusable, kernels that are built."""

from __future__ import annotations

import json
import os
import platform
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from textwrap import fill
from typing import Any

import numpy as np

from fp4rt import __version__, library
from fp4rt.device import NoKernelError, devices

PACKAGES = ("numpy", "ml_dtypes", "cuda-python", "cuda-bindings")


def collect() -> dict[str, Any]:
    """Return everything the command prints, in plain types that JSON takes.

    Works without cuda-python, without a driver and without built kernels: what is missing is
    None, or says why.

    Examples
    --------
    >>> from fp4rt.info import collect
    >>> sorted(collect())
    ['blas', 'devices', 'driver', 'fp4rt', 'kernels', 'packages', 'platform', 'python']
    """
    found = [asdict(info) for info in devices()]
    drivers = [d["facts"]["driver"] for d in found if d["facts"].get("driver")]
    return {
        "fp4rt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "blas": _blas(),
        "driver": drivers[0] if drivers else None,
        "devices": found,
        "kernels": _kernels(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _blas() -> dict[str, Any]:
    """Name and version of numpy's BLAS, and its threads where an environment variable says."""
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    limits = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    threads = next((os.environ[name] for name in limits if os.environ.get(name)), None)
    return {
        "name": blas.get("name"),
        "version": blas.get("version"),
        "threads": threads or f"{os.cpu_count()} (one per core)",
    }


def _kernels() -> dict[str, Any]:
    """Where the images lie and what they hold, or why there are none."""
    result: dict[str, Any] = {"folder": str(library.KERNELS), "images": [], "problem": None}
    try:
        built = library.Library(library.KERNELS)
        images = [image for arch in built.archs() for image in built.images(arch)]
    except NoKernelError as error:
        return {**result, "problem": str(error)}
    result["images"] = [
        {
            "name": image.variant.name,
            "arch": image.variant.arch,
            "nvcc": image.nvcc,
            "kernels": {name: asdict(facts) for name, facts in image.kernels.items()},
        }
        for image in images
    ]
    if not images:
        result["problem"] = "nothing is built; run `python build.py` in the fp4rt repository"
    return result


def format_info(info: dict[str, Any]) -> str:
    """Lay the result of `collect` out as text for a terminal."""
    packages = info["packages"].items()
    blas = info["blas"]
    lines = [
        f"fp4rt    {info['fp4rt']}",
        f"python   {info['python']} on {info['platform']}",
        "packages " + ", ".join(f"{name} {found or 'not installed'}" for name, found in packages),
        f"blas     {blas['name']} {blas['version']}, threads: {blas['threads']}",
        f"driver   {'CUDA ' + str(info['driver']) if info['driver'] else 'none found'}",
        "",
        f"{'device':<20}{'usable':<8}what it is, or why it can't be used",
    ]
    for entry in info["devices"]:
        usable = "yes" if entry["available"] else "no"
        head = f"{entry['name']:<20}{usable:<8}"
        lines.append(fill(entry["detail"], 100, initial_indent=head, subsequent_indent=" " * 28))
    kernels = info["kernels"]
    lines += ["", f"kernels in {kernels['folder']}"]
    for image in kernels["images"]:
        kinds = ", ".join(f"{n} ({k['registers']} registers)" for n, k in image["kernels"].items())
        lines.append(f"  {image['name']} for {image['arch']}: {kinds}")
    if kernels["problem"]:
        lines.append(f"  {kernels['problem']}")
    return "\n".join(lines)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: Namespace) -> int:
    """Run the command."""
    info = collect()
    print(json.dumps(info, indent=2) if args.json else format_info(info))
    return 0
