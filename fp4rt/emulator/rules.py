"""The exception with which the units of the emulator report a broken rule."""

from __future__ import annotations


class RuleError(Exception):
    """A rule of the PTX ISA was broken.

    Raised by functions that know the rule but not who broke it; the machine turns it into an
    `EmulatorFault` with kernel, CTA, warp and line.
    """
