"""Checks of a cubin before the driver sees it: the driver itself crashes on a truncated one.

A cubin is an ELF file for machine EM_CUDA (190). Layout as in the System V ABI, "Object Files";
the architecture's place in ``e_flags`` was read from files that nvcc 12 and 13 wrote.
"""

from __future__ import annotations

import struct

from fp4rt.device import NoKernelError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_EM_CUDA = 190
_SHT_NOBITS = 8


def _wrong(text: str) -> ValueError:
    return ValueError(f"image is no usable cubin: {text}; build it again with `python build.py`")


def sm_version(image: bytes) -> int:
    """Return the SM version that a cubin is for, 90 for sm_90 and sm_90a.

    Raises
    ------
    ValueError
        If the image is not a whole cubin; the text says what is wrong.
    """
    if image[:4] != b"\x7fELF":
        raise _wrong(_what_it_is(image))
    if len(image) < _HEADER.size:
        raise _wrong(f"it ends inside its header, after {len(image)} bytes")
    fields = _HEADER.unpack_from(image)
    ident, machine = fields[0], fields[2]
    segments, sections, flags = fields[5], fields[6], fields[7]
    segment_size, segment_count, section_size, section_count, names = fields[9:14]
    if ident[4:6] != b"\x02\x01" or machine != _EM_CUDA:
        raise _wrong(f"it is an ELF file for machine {machine}, not {_EM_CUDA} (CUDA)")
    if section_size != _SECTION.size or (segment_count and segment_size != _SEGMENT.size):
        raise _wrong("its tables have entries of an unknown size")
    if not section_count or names >= section_count:
        raise _wrong("it has no section table")
    _inside(image, "section table", sections, section_count * section_size)
    _inside(image, "program headers", segments, segment_count * segment_size)
    for i in range(section_count):
        _, kind, _, _, offset, size = _SECTION.unpack_from(image, sections + i * section_size)[:6]
        if kind != _SHT_NOBITS:
            _inside(image, f"section {i}", offset, size)
    for i in range(segment_count):
        _, _, offset, _, _, size = _SEGMENT.unpack_from(image, segments + i * segment_size)[:6]
        _inside(image, f"segment {i}", offset, size)
    # ABI version 8 (CUDA 13) keeps the SM version in the second byte, older ones in the first.
    return int(flags >> 8 & 0xFF if ident[8] >= 8 else flags & 0xFF)


def _inside(image: bytes, what: str, offset: int, size: int) -> None:
    if offset + size > len(image):
        raise _wrong(
            f"it is truncated or damaged: its {what} would end at byte {offset + size:,} "
            f"of {len(image):,}"
        )


def _what_it_is(image: bytes) -> str:
    if not image:
        return "it is empty"
    if image[:4] == b"\x50\xed\x55\xba":
        return "it is a fatbin; extract the cubin, or compile with -cubin"
    if b".version" in image[:4096] and b".target" in image[:4096]:
        return "it is PTX, which only the emulator takes; compile with -cubin"
    return f"it starts with {bytes(image[:4])!r}, not with the ELF signature"


def check_cubin(image: bytes, arch: str) -> None:
    """Raise unless `image` is a whole cubin that a GPU of `arch` can load.

    Parameters
    ----------
    image
        The file's bytes.
    arch
        The GPU's architecture, such as ``"sm_90a"``.

    Raises
    ------
    TypeError
        If it is not bytes.
    ValueError
        If it is not a whole cubin.
    NoKernelError
        If it is for another architecture.

    Examples
    --------
    >>> check_cubin(b"not a cubin", "sm_90a")
    Traceback (most recent call last):
        ...
    ValueError: image is no usable cubin: it starts with b'not ', not with the ELF signature; build it again with `python build.py`
    """  # noqa: E501
    if not isinstance(image, (bytes, bytearray)):
        raise TypeError(f"image must be the bytes of a cubin, got {type(image).__name__}")
    found = sm_version(bytes(image))
    own = int("".join(c for c in arch if c.isdigit()))
    if found // 10 != own // 10 or found > own:
        raise NoKernelError(
            f"the image was built for sm_{found} and this GPU is {arch}; build one for it with "
            f"`python build.py --arch {arch}`"
        )
