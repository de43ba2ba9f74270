"""Self-test: random problems on a device against the oracle, and a small one where it fails.

``python -m fp4rt verify`` makes problems of odd shapes (ragged and list forms, empty groups, K from
16, every output type, alpha, 16-bit rows where the device takes them), runs each through a plan
whose output is poisoned with NaN, launched or replayed from a graph, and compares every element.

Half of the problems hold *exact* data: codes and powers of two whose every partial sum is a
multiple of 1/16 below 144 · K, so float32 holds it, the order of the sum can't matter, and the
result must be the oracle's, rounded once, bit for bit. The others hold *real* data, any codes with
scales over many powers of two, and must lie between ``oracle ± bound`` (`error_bound`), both ends
rounded to the output type; rounding never changes an order, so nothing right is refused.

A problem that fails is made smaller for as long as it still fails, and printed as a program.
"""

from .case import MAX_EXACT_K, Case
from .command import Failure, Report, add_arguments, main, verify
from .draw import LIMITS, Limits, activation_kinds, random_case, shrink, variants
from .judge import Run, check, error_bound, multiply

__all__ = [
    "LIMITS",
    "MAX_EXACT_K",
    "Case",
    "Failure",
    "Limits",
    "Report",
    "Run",
    "activation_kinds",
    "add_arguments",
    "check",
    "error_bound",
    "main",
    "multiply",
    "random_case",
    "shrink",
    "variants",
    "verify",
]
