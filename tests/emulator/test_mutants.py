"""A sample of the single faults of `mutants`: each must give a fault or a wrong result."""

import pytest
from mutants import Kernel, explanations

from fp4rt.device import NoKernelError
from fp4rt.library import Library

pytestmark = pytest.mark.slow

# Kernel, how many of its problems (those with the least work), kinds (None: all that it has).
SAMPLES = {
    "sm_100f_n128": (9, None),
    "pack_weights_sm_90a": (None, None),
    "sm_90a_skinny_split": (
        5,
        ["waits for the other phase", "16 bytes too few expected", "drop mbarrier.init",
         "drop fence.mbarrier_init", "drop cp.async.bulk",
         "drop st.async", "drop barrier.cluster.wait", "another CTA of the cluster"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=SAMPLES)
def kernel(request):
    try:
        Library().images("sm_90a" if "90a" in request.param else "sm_100f")
    except NoKernelError as error:
        pytest.skip(str(error))
    return Kernel(request.param, SAMPLES[request.param][0])


def test_a_mutant_of_each_kind_is_caught(kernel):
    """`Kernel` has run the unchanged kernel on every problem and compared it with the oracle."""
    wanted = SAMPLES[kernel.name][1]
    kinds = {}
    for mutant in kernel.mutants:  # in a random order
        known = any(each.covers(mutant.kind, mutant.place) for each in explanations())
        if (not wanted or mutant.kind in wanted) and not known and kernel.reaching(mutant):
            kinds.setdefault(mutant.kind, mutant)
    assert set(kinds) >= set(wanted or ()), "a kind has no place"
    assert len(kinds) >= 5
    survivors = [f"{m.kind}: {m.place}" for m in kinds.values() if not kernel.caught(m)]
    assert not survivors, "\n".join(survivors)
