"""The self-test: cases are reproducible, faults are found, shrunk and printed as a program."""

import contextlib
import io

import numpy as np
import pytest

import fp4rt
from fp4rt import __main__ as cli
from fp4rt import plan, verify
from fp4rt.device import EmulatorFault
from fp4rt.library import Library
from fp4rt.verify import Case, check, error_bound, judge, random_case, shrink

LIMITS = verify.LIMITS["cpu"]
KINDS = ("nvfp4", "float16", "bfloat16")


@pytest.fixture(scope="module")
def cpu():
    with fp4rt.device("cpu") as opened:
        yield opened


def corrupt(dev, case, a, b):
    """Compute, and spoil one element of every group with at least 4 rows and K of at least 48."""
    results = verify.multiply(dev, case, a, b)
    parts = np.split(results[0], np.cumsum(case.sizes)[:-1]) if case.ragged else results
    for part, (_, k) in zip(parts, case.shapes, strict=True):
        if part.shape[0] >= 4 and part.shape[1] and k >= 48:
            part[3, -1] += 1 + abs(part[3, -1])
    return results


def test_right_results_pass(cpu, rng):
    report = verify.verify(cpu, cases=25, seed=int(rng.integers(2**31)))
    assert report.failure is None and report.passed == 25
    assert 0 < report.exact < 25


def test_a_seed_gives_the_same_problems(rng):
    seed = int(rng.integers(2**31))
    first, again = (random_case(np.random.default_rng(seed), LIMITS, KINDS) for _ in range(2))
    assert first == again
    for x, y in zip(first.groups()[1], again.groups()[1], strict=True):
        assert (x.values == y.values).all() and x.global_scale == y.global_scale


def test_random_cases_cover_what_they_should():
    cases = [random_case(np.random.default_rng((0, i)), LIMITS, KINDS) for i in range(400)]
    assert {c.activations for c in cases} == set(KINDS)
    assert {c.out_dtype for c in cases} == {"float16", "bfloat16", "float32"}
    for trait in ("ragged", "exact", "graph", "batch_invariant"):
        assert {getattr(c, trait) for c in cases} == {True, False}, trait
    assert any(0 in c.sizes for c in cases), "no empty group"
    assert any(not c.sizes for c in cases), "no problem without groups"
    assert any(n == 0 for c in cases for n, _ in c.shapes), "no empty N"
    assert any(k == 16 for c in cases for _, k in c.shapes), "no K of one scale block"
    exact_k = [k for limits in verify.LIMITS.values() for k in limits.k]
    assert max(exact_k) <= verify.MAX_EXACT_K


def test_a_smaller_case_has_the_same_first_rows():
    case = Case(sizes=(9,), shapes=((7, 64),), seeds=(5,), exact=False)
    part = Case(sizes=(4,), shapes=((3, 64),), seeds=(5,), exact=False)
    for whole, first in zip(case.operands(), part.operands(), strict=True):
        whole, first = (x if x.ndim == 2 else x[0] for x in (whole, first))
        rows = first.shape[0]
        np.testing.assert_array_equal(whole.values[:rows], first.values)
        np.testing.assert_array_equal(
            whole.scales.view(np.uint8)[:rows], first.scales.view(np.uint8)
        )
        assert whole.global_scale == first.global_scale


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_one_wrong_element_is_found_and_shrunk(cpu, ragged, exact):
    case = Case(
        sizes=(2, 40, 9),
        shapes=((20, 96),) * 3,
        seeds=(1, 2, 3),
        ragged=ragged,
        exact=exact,
        alpha=(1.0, 2.0, -1.0),
        out_dtype="bfloat16",
        graph=True,
    )
    assert check(cpu, case) is None
    message = check(cpu, case, corrupt)
    assert message is not None and "group 1" in message and "(3, 19)" in message
    smallest = shrink(case, lambda c: check(cpu, c, corrupt) is not None)
    assert smallest.sizes == (4,) and smallest.shapes == ((1, 48),)
    assert not smallest.graph and smallest.alpha == (1.0,)


def test_an_element_that_is_never_written_is_found(cpu):
    def forgetful(dev, case, a, b):
        results = verify.multiply(dev, case, a, b)
        results[0][-1, -1] = np.nan
        return results

    case = Case(sizes=(3,), shapes=((5, 32),), seeds=(1,), exact=False)
    assert "is nan" in check(cpu, case, forgetful)


@pytest.mark.parametrize("error", [EmulatorFault("barrier"), fp4rt.DriverError("gone")])
def test_a_fault_is_a_finding(cpu, error):
    def faulty(dev, case, a, b):
        raise error

    assert str(error) in check(cpu, Case(sizes=(1,), shapes=((1, 16),), seeds=(0,)), faulty)


def test_after_a_driver_error_nothing_more_is_run(cpu):
    runs = []

    def dead(dev, case, a, b):
        runs.append(case)
        raise fp4rt.DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")

    report = verify.verify(cpu, cases=3, seed=1, run=dead)
    assert report.failure.smallest == runs[0] and len(runs) == 1


def test_shrinking_ends():
    case = Case(sizes=(50,) * 9, shapes=((200, 640),) * 9, seeds=tuple(range(9)))
    calls = []
    shrink(case, lambda c: calls.append(c) or True, attempts=40)
    assert len(calls) <= 40


def test_the_bound_holds_for_truncating_sums_and_is_not_loose():
    """One huge product, then K - 16 that each vanish when they are cut to the sum's last place."""
    k = 4096
    values, scales = np.full((1, k // 2), 0x11, np.uint8), np.full((1, k // 16), 0x39, np.uint8)
    values[0, :8], scales[0, 0] = 0, 0x7E
    values[0, 0] = 0x07  # 6 · 448, and then 0.5 · 1.125
    a = fp4rt.Nvfp4Array.from_parts(values, scales, 1.0)
    products = fp4rt.dequantize(a, np.float64)[0] ** 2
    total = 0.0
    for product in products:
        place = 2.0 ** (np.floor(np.log2(total + product)) - 23)
        total = np.floor((total + product) / place) * place
    error, bound = products.sum() - total, error_bound(a, a, 1.0)[0, 0]
    assert bound / 5 < error <= bound


def run_cli(argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(argv)
    return code, out.getvalue()


def test_the_command_passes():
    code, out = run_cli(["verify", "--device", "cpu", "--cases", "5", "--seed", "3"])
    assert code == 0 and "cpu: 5 problems right" in out and "seed 3" in out


def test_the_command_stops_in_time():
    code, out = run_cli(["verify", "--device", "cpu", "--time", "0.05"])
    assert code == 0 and "problems right" in out


def test_a_failure_prints_a_program_that_shows_it(monkeypatch):
    right = verify.multiply

    def wrong(dev, case, a, b):
        results = right(dev, case, a, b)
        for result in results:
            result[:1] += 1 + abs(result[:1])
        return results

    monkeypatch.setattr(judge, "multiply", wrong)
    code, out = run_cli(["verify", "--device", "cpu", "--cases", "20", "--seed", "1"])
    assert code == 1 and "FAILED" in out
    program = out[out.index("import fp4rt") :]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    assert "1 of 1 elements wrong" in printed.getvalue()


def test_a_variant_runs_every_problem(monkeypatch):
    """On an emulator: where the chosen variant would be another, the named one is launched."""
    try:
        Library().images("sm_90a")
    except fp4rt.NoKernelError as error:
        pytest.skip(str(error))
    ran = []

    def noted(device, weights, problem, choice):
        ran.append(choice)
        raise ValueError("not run")

    monkeypatch.setattr(plan, "KernelPlan", noted)
    with fp4rt.device("emulator:sm_90a") as dev:
        assert "large" in verify.variants(dev)
        report = verify.verify(dev, cases=1, variant="large")
    assert report.failure.smallest.variant is None  # whatever runs it, it fails
    assert report.failure.case.variant == "large"
    assert ran[0].variant.startswith("grouped_gemm_sm_90a_large")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--device", "gpu"], "unknown device"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--device", "cpu", "--variant", "large"], "it runs none; leave --variant out"),
        (["--device", "emulator:sm_90a", "--variant", "huge"], "has no variant 'huge'; choose of"),
    ],
)
def test_wrong_use_exits_with_2(argv, text, capsys):
    assert cli.main(["verify", *argv]) == 2
    assert text in capsys.readouterr().err


def test_a_device_without_a_kernel_is_told_as_elsewhere(capsys):
    arch = "sm_80"
    operand = fp4rt.quantize(np.ones((4, 32), np.float32))
    with pytest.raises(fp4rt.NoKernelError) as caught:
        fp4rt.grouped_gemm(f"emulator:{arch}", operand, operand)
    assert cli.main(["verify", "--device", f"emulator:{arch}", "--cases", "1"]) == 1
    assert str(caught.value) in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--cases", "0"], ["--time", "-1"], ["--cases", "x"]])
def test_wrong_counts_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", *argv])
    assert caught.value.code == 2
    assert "is not a number above 0" in capsys.readouterr().err
