"""Whether cuDNN's Python frontend is installed, and keys as its kernels need them."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def _installed() -> bool:
    try:
        importlib.import_module("cudnn")
    except ImportError:
        return False
    return True


INSTALLED = _installed()


def backends(device: str) -> tuple[str, ...]:
    """The backend of the wrappers that runs by cuDNN, where it can."""
    return ("cudnn",) if INSTALLED and device == "cuda" else ()


def finite(cache: Any) -> Any:
    """A cache, or k and v, with 0 where no token lies: weights of 0 multiply what lies there."""
    if isinstance(cache, tuple):
        return tuple(finite(x) for x in cache)
    return torch.where(cache.isnan(), torch.zeros_like(cache), cache)
