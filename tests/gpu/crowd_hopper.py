"""Plans on many streams at once, for thousands of launches (test_grouped_gemm_cuda.py).

Kernels in which a CTA waits for another one of the same launch could stop for ever if that one
found no place among the CTAs of other launches, which wait too.
"""

import numpy as np
from helpers import exact_operand, oracle

import fp4rt

ROUNDS = 3000
VARIANTS = ["skinny", "skinny", "skinny_split", "skinny", "medium", "skinny"]


def main():
    rng = np.random.default_rng(0)
    groups, n, k = 20, 2048, 1024
    b = exact_operand(rng, (groups, n, k))
    with fp4rt.device("cuda:0") as gpu:
        weights = fp4rt.upload_weights(gpu, b)
        plans, streams, expected = [], [], []
        for variant in VARIANTS:
            sizes = rng.integers(0, 3, groups)
            a = exact_operand(rng, (int(sizes.sum()), k))
            plan = fp4rt.GroupedGemmPlan(gpu, weights, max_m=60, variant=variant)
            plan.set_inputs(a, sizes)
            plans.append(plan)
            streams.append(gpu.new_stream())
            expected.append(oracle(a, b, sizes))
        for turn in range(ROUNDS):
            for i in rng.permutation(len(plans)):
                plans[i].launch(streams[i])
            if turn % 500 == 499:
                gpu.synchronize()
                for plan, wanted in zip(plans, expected, strict=True):
                    np.testing.assert_array_equal(plan.output(), wanted)
                    plan.poison_output()
        gpu.synchronize()
    print("done")


if __name__ == "__main__":
    main()
