"""The built kernels: what ``build.py`` left in ``fp4rt/_kernels``, checked before use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp4rt.abi import (
    ARCHS,
    MANIFEST_FORMAT,
    VARIANTS,
    KernelFacts,
    Variant,
    abi_hash,
    image_arch,
)
from fp4rt.device import Attached, Device, Module, NoKernelError

KERNELS = Path(__file__).parent / "_kernels"
"""Where ``build.py`` puts the images, and where an installed wheel has them."""


def _remedy(arch: str | None = None) -> str:
    command = "python build.py" + (f" --arch {arch}" if arch else "")
    return (
        f"run `{command}` in the fp4rt repository (and install fp4rt again, unless it was"
        " installed with -e)"
    )


@dataclass(frozen=True)
class Image:
    """A built variant.

    Attributes
    ----------
    variant
        Its declaration.
    kernels
        Facts about each entry point, by name.
    nvcc
        What the compiler that built it answers to ``--version``.
    """

    variant: Variant
    kernels: Mapping[str, KernelFacts]
    nvcc: str
    _folder: Path = field(repr=False)
    _files: Mapping[str, Mapping[str, Any]] = field(repr=False)

    def read(self, kind: Literal["cubin", "ptx"]) -> bytes:
        """Return the bytes of one form, whole and unchanged since they were built.

        Raises
        ------
        NoKernelError
            If the file is missing, truncated or changed: a driver may crash on such an image.
        ValueError
            If `kind` is neither ``"cubin"`` nor ``"ptx"``.
        """
        if kind not in ("cubin", "ptx"):
            raise ValueError(f"kind is {kind!r}; use 'cubin' or 'ptx'")
        path, expected = self._folder / f"{self.variant.name}.{kind}", self._files[kind]
        try:
            image = path.read_bytes()
        except OSError as error:
            raise NoKernelError(f"cannot read {path}: {error.strerror}; {_remedy()}") from error
        if len(image) != expected["bytes"]:
            raise NoKernelError(
                f"{path} has {len(image)} bytes, {expected['bytes']} were built; {_remedy()}"
            )
        if hashlib.sha256(image).hexdigest() != expected["sha256"]:
            raise NoKernelError(f"{path} has changed since it was built; {_remedy()}")
        return image


class Library:
    """The images of one folder, as its manifest lists them.

    Parameters
    ----------
    folder
        Output folder of ``build.py``.

    Raises
    ------
    NoKernelError
        If nothing was built there, or the manifest cannot be read; the text names the command.

    Examples
    --------
    >>> library = Library()  # doctest: +SKIP
    >>> image = library.images("sm_90a")[0]  # doctest: +SKIP
    >>> image.kernels["grouped_gemm"].dynamic_shared_bytes  # doctest: +SKIP
    """

    def __init__(self, folder: Path = KERNELS) -> None:
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise NoKernelError(f"no kernels are built: there is no {path}; {_remedy()}") from error
        except (OSError, ValueError) as error:
            raise NoKernelError(f"cannot read {path}: {error}; {_remedy()}") from error
        found = manifest.get("format") if isinstance(manifest, dict) else None
        if found != MANIFEST_FORMAT:
            raise NoKernelError(
                f"{path} has format {found}, this fp4rt reads {MANIFEST_FORMAT}; {_remedy()}"
            )
        self._images: dict[str, Image] = {}
        self._stale: dict[str, Variant] = {}
        try:
            for variant in VARIANTS:
                if variant.name in manifest["images"]:
                    self._add(variant, manifest["images"][variant.name])
        except (KeyError, TypeError, AttributeError) as error:
            raise NoKernelError(f"{path} is not as build.py writes it; {_remedy()}") from error

    def _add(self, variant: Variant, record: Mapping[str, Any]) -> None:
        if record["abi_hash"] != abi_hash(variant):
            self._stale[variant.name] = variant
            return
        kernels = {name: KernelFacts.from_json(k) for name, k in record["kernels"].items()}
        files = {kind: record[kind] for kind in ("cubin", "ptx")}
        self._images[variant.name] = Image(variant, kernels, record["nvcc"], self.folder, files)

    def archs(self) -> tuple[str, ...]:
        """Return the architectures that have an image, in the order of `fp4rt.abi.ARCHS`."""
        built = {image.variant.arch for image in self._images.values()}
        return tuple(arch for arch in ARCHS if arch in built)

    def images(self, arch: str) -> tuple[Image, ...]:
        """Return the images for a GPU, in the order of `fp4rt.abi.VARIANTS`.

        Parameters
        ----------
        arch
            The GPU's architecture in any spelling of `fp4rt.abi.ARCHS`: ``"sm_90a"``,
            ``"sm_103a"``, ``"10.0"``.

        Raises
        ------
        NoKernelError
            If there are none, or they were built against other declarations than those of
            `fp4rt.abi`; the text says what was built and names the command.
        """
        known = image_arch(arch)
        built = ", ".join(self.archs()) or "none"
        if known is None:
            raise NoKernelError(
                f"fp4rt has no kernel for {arch} (it has kernels for {', '.join(ARCHS)}; built:"
                f" {built}); use device 'cpu'"
            )
        for variant in self._stale.values():
            if variant.arch == known:
                self._refuse(variant)
        images = tuple(image for image in self._images.values() if image.variant.arch == known)
        if not images:
            raise NoKernelError(f"no kernel is built for {arch} (built: {built}); {_remedy(known)}")
        return images

    def find(self, variant: str) -> Image:
        """Return the image of the variant with this name.

        Raises
        ------
        NoKernelError
            If it was not built, or against other declarations; the text names the command.
        ValueError
            If there is no such variant.
        """
        declared = {v.name: v for v in VARIANTS}
        if variant not in declared:
            raise ValueError(f"no variant is named {variant!r}; there are {', '.join(declared)}")
        if variant in self._stale:
            self._refuse(self._stale[variant])
        if variant not in self._images:
            built = ", ".join(self._images) or "none"
            raise NoKernelError(
                f"{variant} is not built (built: {built}); {_remedy(declared[variant].arch)}"
            )
        return self._images[variant]

    def image(self, variant: str, kind: Literal["cubin", "ptx"]) -> bytes:
        """Return one form of a variant's image; raises as `find` and `Image.read` do."""
        return self.find(variant).read(kind)

    def _refuse(self, variant: Variant) -> None:
        raise NoKernelError(
            f"{variant.name} in {self.folder} was built against other parameter structs or tile"
            f" facts than this fp4rt has; {_remedy(variant.arch)}"
        )


class LoadedImages(Attached):
    """The images that a device has loaded, for all plans there."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Image, Module]] = {}

    def find(self, device: Device, variant: str) -> tuple[Image, Module]:
        """Return a variant's image and the module that `device` made of it.

        Raises
        ------
        NoKernelError
            If it was not built, or is not as it was built.
        """
        found = self._found.get(variant)
        if found is None:
            image = Library().find(variant)
            assert device.image_kind is not None
            module = device.load(image.read(device.image_kind))
            found = self._found.setdefault(variant, (image, module))
        return found

    def clear(self) -> None:
        """Let go of them; plans keep what they use."""
        self._found.clear()
