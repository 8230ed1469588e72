"""FI_CHECK: which kernels check the contents of index tensors, and the signs of tensors, before they run."""

from __future__ import annotations

from fi_core.runtime.env import env

_CHECK = env.check  # read once at import


def checks_signs() -> bool:
    """Whether each call looks for negated views, whose sign is not stored in their memory."""
    return _CHECK is True


def checks_contents(device: str) -> bool:
    """Whether kernels bound for "cpu" or "cuda" check contents.

    FI_CHECK decides: unset, on the CPU; 1, on CUDA too, where each call then waits for the stream; 0, nowhere.
    """
    return _CHECK is not False if device == "cpu" else _CHECK is True
