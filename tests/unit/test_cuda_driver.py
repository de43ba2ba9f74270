"""The door to the driver, without one: what it says when something is missing or fails.

A stand-in for cuda.bindings answers with chosen codes; everything else is the product's own code.
"""

import enum
import subprocess
import sys
import types

import pytest

import fp4rt
from fp4rt.cuda import driver as door
from fp4rt.cuda import list_devices, open_device


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


def bindings(**functions):
    """A module like cuda.bindings.driver, of a machine that has a new driver and one GPU."""
    answers = {
        "cuInit": lambda flags: (Code.CUDA_SUCCESS,),
        "cuDriverGetVersion": lambda: (Code.CUDA_SUCCESS, 13000),
        "cuDeviceGetCount": lambda: (Code.CUDA_SUCCESS, 1),
        "cuGetErrorString": lambda code: (Code.CUDA_SUCCESS, b"text of " + str(int(code)).encode()),
        "CUresult": Code,
    }
    found = types.SimpleNamespace(**answers | functions)
    for name, value in vars(found).items():
        if callable(value) and name != "CUresult":
            value.__name__ = name
    return found


@pytest.fixture
def machine(monkeypatch):
    """Set up a process in which the driver was never used, with the given bindings."""
    monkeypatch.setattr(door, "driver", None)
    monkeypatch.setattr(door, "forked", [])
    monkeypatch.setattr(door.os, "register_at_fork", lambda **hooks: None)

    def install(found):
        monkeypatch.setattr(door, "_import_bindings", lambda: found)

    return install


def test_missing_driver_is_named(machine):
    def no_library(flags):
        raise RuntimeError("libcuda.so.1 cannot be opened")

    machine(bindings(cuInit=no_library))
    with pytest.raises(fp4rt.DriverError, match=r"no NVIDIA driver.*CUDA 13\.0.*580"):
        open_device("0")
    (info,) = list_devices()
    assert info.name == "cuda"
    assert not info.available
    assert "no NVIDIA driver" in info.detail


def test_missing_cuda_python_names_the_package(machine, monkeypatch):
    machine(None)
    monkeypatch.undo()
    monkeypatch.setattr(door, "driver", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(fp4rt.DriverError, match="pip install cuda-python"):
        open_device("0")


def test_old_driver_names_both_versions(machine):
    machine(bindings(cuDriverGetVersion=lambda: (Code.CUDA_SUCCESS, 12040)))
    with pytest.raises(fp4rt.DriverError, match=r"12\.4.*13\.0.*580"):
        open_device("")
    assert not list_devices()[0].available


def test_machine_without_gpu(machine):
    machine(bindings(cuInit=lambda flags: (Code.CUDA_ERROR_NO_DEVICE,)))
    with pytest.raises(fp4rt.DriverError, match=r"cuInit.*NO_DEVICE.*CUDA_VISIBLE_DEVICES"):
        open_device("0")


@pytest.mark.parametrize("index", ["1", "99999999999999999999"])
def test_number_of_no_gpu(machine, index):
    machine(bindings())
    with pytest.raises(ValueError, match=rf"no GPU number {index}.*sees 1"):
        open_device(index)


@pytest.mark.parametrize("index", ["-1", "x", "0x1", "1.0", " 0", "٣"])
def test_index_that_is_no_number(index):
    with pytest.raises(ValueError, match="'cuda:N'"):
        open_device(index)


def test_function_that_the_driver_lacks(machine):
    def cu_new():
        raise RuntimeError('Function "cuNew" not found')

    machine(bindings(cuNew=cu_new))
    door.init()
    with pytest.raises(fp4rt.DriverError, match=r"cuNew.*CUDA 13\.0"):
        door.call(door.driver.cuNew)


def test_results_are_unwrapped(machine):
    ok = Code.CUDA_SUCCESS
    machine(bindings(none=lambda: (ok,), one=lambda: (ok, 5), two=lambda: (ok, 5, 6)))
    door.init()
    assert door.call(door.driver.none) is None
    assert door.call(door.driver.one) == 5
    assert door.call(door.driver.two) == (5, 6)


def test_error_has_call_name_text_and_advice(machine):
    machine(
        bindings(
            cuBad=lambda: (Code.CUDA_ERROR_INVALID_VALUE,),
            cuSick=lambda: (Code.CUDA_ERROR_ILLEGAL_ADDRESS,),
        )
    )
    door.init()
    with pytest.raises(
        fp4rt.DriverError, match=r"^cuBad failed: CUDA_ERROR_INVALID_VALUE \(text of 1\)$"
    ) as caught:
        door.call(door.driver.cuBad)
    assert caught.value.code == "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(fp4rt.DriverError, match=r"cuSick.*ILLEGAL_ADDRESS.*restart the process"):
        door.call(door.driver.cuSick)
    door.quiet(door.driver.cuSick)


def test_wait_polls_until_ready_and_raises_errors(machine):
    answers = [Code.CUDA_ERROR_NOT_READY] * 3 + [Code.CUDA_SUCCESS]
    machine(
        bindings(
            cuQuery=lambda handle: (answers.pop(0),),
            cuSick=lambda handle: (Code.CUDA_ERROR_ILLEGAL_ADDRESS,),
        )
    )
    door.init()
    door.wait_for(door.driver.cuQuery, None)
    assert not answers
    with pytest.raises(fp4rt.DriverError, match="restart"):
        door.wait_for(door.driver.cuSick, None)


def test_forked_process_is_told_to_spawn(machine):
    machine(bindings())
    door.init()
    door.forked.append(True)
    for use in (
        lambda: open_device("0"),
        lambda: door.call(door.driver.cuDeviceGetCount),
        lambda: door.wait_for(door.driver.cuDeviceGetCount, None),
    ):
        with pytest.raises(fp4rt.ClosedError, match="spawn"):
            use()
    assert "spawn" in list_devices()[0].detail


def test_listing_and_opening_without_cuda_python():
    """In a process of its own, where neither cuda-python nor a driver can be found."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cuda":
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Block())
import fp4rt
from fp4rt.cuda import list_devices
print(list_devices())
try:
    fp4rt.device("cuda:0")
except fp4rt.DriverError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("pip install cuda-python") == 2
    assert not run.stderr
