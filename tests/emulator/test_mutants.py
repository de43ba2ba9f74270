"""A sample of the single faults of mutants.py: each must give a fault or a wrong result."""

import mutants
import pytest

from fp4rt.device import NoKernelError
from fp4rt.library import Library

pytestmark = pytest.mark.slow

VARIANT = "skinny_split"
KINDS = [
    "no wait",
    "phase flipped",
    "wrong byte count",
    "drop mbarrier.init",
    "drop mbarrier.arrive",
    "drop fence.mbarrier_init",
    "drop griddepcontrol.wait",
    "drop cp.async.bulk",
    "drop st.async",
    "drop st.shared",
    "drop barrier.cluster.wait",
    "selection swapped",
]


@pytest.fixture(scope="module")
def places():
    try:
        Library().images("sm_90a")
    except NoKernelError as error:
        pytest.skip(str(error))
    return mutants.places(VARIANT)


def test_the_original_passes(places):
    assert mutants.caught(VARIANT, None, seeds=2) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_mutant_is_caught(places, kind):
    members = [mutant for mutant in places if mutant.kind == kind]
    assert members, f"no place for {kind!r}"
    assert mutants.caught(VARIANT, members[0], seeds=4)
