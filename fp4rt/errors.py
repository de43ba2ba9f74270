"""What goes wrong on a device, by kind; `fp4rt.device` has the names too."""

from __future__ import annotations


class DriverError(RuntimeError):
    """A CUDA driver call failed: its name, the CUresult's name and text, and what to try.

    Attributes
    ----------
    code
        The CUresult's name (``"CUDA_ERROR_ILLEGAL_ADDRESS"``); empty if no call was made.
    """

    code: str = ""


class OutOfMemoryError(DriverError, MemoryError):
    """The device could not supply an allocation; the text gives the sizes asked, free and held."""


class NoKernelError(RuntimeError):
    """No kernel was built for this device or problem; the text names the command that builds it."""


class EmulatorFault(RuntimeError):
    """An emulated kernel broke a rule; the text gives kernel, CTA, warp, PTX line and source."""


class ClosedError(RuntimeError):
    """An object was used after it was closed, or in a process forked after CUDA was in use."""
