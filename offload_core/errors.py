"""Every error the library raises on purpose, each one sentence that says what is wrong, where, and what to do.

Anything else that escapes is a bug. Interrupts are not errors: `KeyboardInterrupt` and the host's own interrupt pass
through unchanged.
"""

from __future__ import annotations


class OffloadError(Exception):
    """Base of all errors raised on purpose. `str(error)` is fit to be shown to a person."""

    exit_code = 2


class InputError(OffloadError):
    """An argument can't be used as given (unknown dtype, bad size, seed out of range, unknown option)."""


class ModelError(OffloadError):
    """A model folder can't be used: missing, incomplete, damaged, changed underneath, or it wants pickle or code."""

    exit_code = 4


class DeviceError(OffloadError):
    """The requested device isn't there or can't run this job."""


class InsufficientMemoryError(OffloadError):
    """A phase ran out of device or host memory. Nothing of it is left behind."""

    exit_code = 3


class BudgetError(InsufficientMemoryError):
    """A memory budget is too small for what it has to hold. The message names the smallest that can work."""


class ManagedModuleError(OffloadError):
    """Something was done to a module or weight under offload that would lose data or load everything."""


class ColdWeightError(OffloadError):
    """A weight was touched while its component is not loaded: outside its phase, or in a phase that doesn't own it."""


class MissingRecordError(OffloadError):
    """Denoise asked for an encoding that the embeds don't hold and may not be made again."""


class RecordError(OffloadError):
    """Saved or passed-on embeds or latents can't be used here. The message names the field."""


class NumericalError(OffloadError):
    """A phase produced NaN or infinite values, so that no picture can come of it. The message names the phase."""


class TraceError(OffloadError):
    """A module's code can't be traced without its values; how much memory it takes can only be estimated."""


class PhaseBusyError(OffloadError):
    """A second phase was opened on a session while one is running."""
