"""Bad images on a real GPU: a typed error before the driver sees them, and nothing changed."""

import numpy as np
import pytest
import runtime_kernels as rk

import fp4rt
from fp4rt.device import LaunchConfig

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]


def works(gpu, kernels):
    buffer = gpu.upload(np.zeros(10, np.uint32))
    params = rk.record(rk.ADD, buffer.address, buffer.address, 10, 1)
    gpu.stream.launch(kernels.kernel("add"), LaunchConfig((1, 1, 1), (32, 1, 1)), params)
    return bool(np.all(buffer.to_numpy() == 1))


def test_truncated_cubins_are_refused(gpu, kernels):
    image = rk.image_bytes(gpu)
    before = gpu.mem_info().used
    for length in (0, 3, 64, len(image) // 2, len(image) - 1):
        with pytest.raises(ValueError, match="no usable cubin"):
            gpu.load(image[:length])
    assert gpu.mem_info().used == before
    assert works(gpu, kernels)


def test_cubin_of_another_gpu_is_refused(gpu, kernels):
    other = "sm_80" if gpu.arch.startswith(("sm_9", "sm_1")) else "sm_90a"
    image = rk.compile_kernels(other, "minimal").cubin.read_bytes()
    with pytest.raises(fp4rt.NoKernelError, match=rf"{other[:5]}.*{gpu.arch}"):
        gpu.load(image)
    assert works(gpu, kernels)


def test_ptx_and_other_files_are_refused(gpu, kernels):
    ptx = rk.compile_kernels(gpu.arch).ptx.read_bytes()
    for image, words in ((ptx, "PTX"), (b"\x7fELF" + bytes(200), "ELF"), (b"text", "signature")):
        with pytest.raises(ValueError, match=words):
            gpu.load(image)
    assert works(gpu, kernels)


def test_kernel_with_two_parameters_is_refused(gpu, kernels):
    with pytest.raises(ValueError, match="2 parameters"):
        kernels.kernel("two_parameters")


def test_same_bytes_are_loaded_once(gpu):
    image = rk.compile_kernels(gpu.arch, "minimal").cubin.read_bytes()
    first, second = gpu.load(image), gpu.load(image)
    assert first._image is second._image
    with fp4rt.device("cuda:0") as other:
        assert other.load(image)._image is not first._image
