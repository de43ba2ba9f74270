"""Images are checked in Python before the driver, which crashes on a truncated one."""

import struct

import pytest
import runtime_kernels as rk

import fp4rt
from fp4rt.cuda.image import check_cubin, sm_version


@pytest.fixture(scope="module")
def cubin():
    return rk.compile_kernels("sm_90a").cubin.read_bytes()


@pytest.mark.nvcc
def test_a_whole_cubin_passes(cubin):
    check_cubin(cubin, "sm_90a")
    assert sm_version(cubin) == 90


@pytest.mark.nvcc
def test_every_truncation_is_found(cubin):
    for length in {0, 1, 4, 63, 64, 65, len(cubin) // 2, len(cubin) - 1, *range(0, len(cubin), 97)}:
        with pytest.raises(ValueError, match=r"no usable cubin.*build"):
            check_cubin(cubin[:length], "sm_90a")


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120a"])
def test_another_architecture_names_both_and_the_command(cubin, arch):
    with pytest.raises(fp4rt.NoKernelError, match=rf"sm_90.*{arch}.*build\.py --arch {arch}"):
        check_cubin(cubin, arch)


@pytest.mark.nvcc
def test_offsets_beyond_the_file_are_found(cubin):
    sections = struct.unpack_from("<Q", cubin, 40)[0]
    for place, size in [(40, "<Q"), (32, "<Q"), (60, "<H"), (56, "<H"), (sections + 64 + 24, "<Q")]:
        broken = bytearray(cubin)
        struct.pack_into(size, broken, place, (1 << 8 * struct.calcsize(size)) - 1)
        with pytest.raises(ValueError, match="no usable cubin"):
            check_cubin(bytes(broken), "sm_90a")


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"", "empty"),
        (b"not a cubin at all", "ELF signature"),
        (b"//\n.version 8.0\n.target sm_90a\n", "PTX"),
        (b"\x50\xed\x55\xba" + bytes(100), "fatbin"),
        (b"\x7fELF\x02\x01\x01" + bytes(11) + b"\x3e\x00" + bytes(60), "machine 62"),
    ],
)
def test_what_is_no_cubin_is_named(image, words):
    with pytest.raises(ValueError, match=words):
        check_cubin(image, "sm_90a")


def test_a_path_is_no_image():
    with pytest.raises(TypeError, match="bytes"):
        check_cubin("kernels.cubin", "sm_90a")
