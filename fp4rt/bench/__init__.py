"""Benchmarks: ``python -m fp4rt bench``, and what it found, as objects.

On a CUDA device every kernel variant that takes a problem is timed against its peers (`peers`) and
against what the machine allows (`ceilings`); on a machine without a GPU, the host's part (`host`).
Results are checked first. The things that are compared take turns (`timing`), and go through copies
of the operands that together exceed the L2 cache (`workload`). Every group of a problem has the
same random weights, each in memory of its own.
"""

from fp4rt.bench.command import add_arguments, main
from fp4rt.bench.report import Report, changes, markdown, read, table

__all__ = ["Report", "add_arguments", "changes", "main", "markdown", "read", "table"]
