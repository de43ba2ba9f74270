"""A user's program, for mypy (see pyproject.toml): what calls return, in types. Not run."""

from typing import Any, assert_type

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import fp4rt

Array = NDArray[Any]


def arrays(x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float16]:
    """Ragged rows give one array, lists give a list."""
    a, b = fp4rt.quantize(x), fp4rt.quantize(w)
    with fp4rt.device("cpu") as dev:
        y = fp4rt.grouped_gemm(dev, a, b, group_sizes=[1, 2], alpha=[1, 2.5])
        assert_type(y, Array)
        half = x.astype(np.float16)
        assert_type(fp4rt.grouped_gemm(dev, half, b, np.array([1, 2]), stream=dev.stream), Array)
        ys = fp4rt.grouped_gemm(dev, [a, a], list(b), out_dtype=ml_dtypes.bfloat16)
        assert_type(ys, list[Array])
        assert_type(fp4rt.grouped_gemm("cpu", [half], [b[0]], out=[y]), list[Array])
        print(y.shape, ys[0].shape)
        return y


def plans(weights: list[fp4rt.Nvfp4Array], x: NDArray[np.float32]) -> None:
    """A plan, a graph, and what it gives."""
    with fp4rt.GroupedGemmPlan("auto", weights, max_m=3, out_dtype="bfloat16") as plan:
        plan.set_inputs(fp4rt.quantize(x), [1, 2])
        graph = plan.capture()
        graph.launch()
        assert_type(plan.output(np.empty((3, 8), ml_dtypes.bfloat16)), Array)
        assert_type(plan.output([np.empty((3, 8), np.float16)]), list[Array])
        result: Array = plan.output()
        print(result.sum(), [info.name for info in fp4rt.devices() if info.available])
