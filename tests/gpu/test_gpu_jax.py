"""JAX in one process with fp4rt, imported before and after it."""

import importlib.util
import os
import subprocess
import sys

import pytest
import runtime_kernels as rk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed"),
]

# A process of its own: JAX takes memory and signal handlers when it is imported.
CODE = """
import numpy as np
{first}
{second}
from cuda.bindings import driver

def current():
    return int(driver.cuCtxGetCurrent()[1])

x = jnp.arange(1000, dtype=jnp.float32).reshape(10, 100)
total = float(x.sum())
with fp4rt.device("cuda:0") as gpu:
    before = current()
    shared = gpu.as_buffer(x)
    assert shared.address == x.unsafe_buffer_pointer(), "a copy was made"
    assert np.array_equal(shared.to_numpy(), np.asarray(x))
    ours = gpu.upload(np.arange(64, dtype=np.int32))
    theirs = jnp.from_dlpack(ours)
    assert theirs.unsafe_buffer_pointer() == ours.address, "a copy was made"
    assert int(theirs.sum()) == 2016
    assert current() == before, "the current context changed"
assert float((x * 2).sum()) == 2 * total
assert int(theirs.sum()) == 2016
print("done")
"""
JAX, OURS = "import jax, jax.numpy as jnp; jnp.zeros(1).block_until_ready()", "import fp4rt"


@pytest.mark.parametrize("order", [(JAX, OURS), (OURS, JAX)], ids=["jax first", "fp4rt first"])
def test_jax_and_fp4rt_share_arrays_and_leave_each_other_alone(order):
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(first=order[0], second=order[1])],
        cwd=rk.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
