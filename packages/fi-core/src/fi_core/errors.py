"""The exceptions that calls raise, for `except`; they live in fi_core.runtime.errors."""

from __future__ import annotations

from fi_core.runtime.errors import (
    BackendSupportedError,
    CompileError,
    ExperimentalWarning,
    FiError,
    GPUArchitectureError,
    LibraryError,
    MissingJITCacheError,
    MissingKernelError,
    UnknownWordError,
    UnsupportedError,
)

__all__ = [
    "BackendSupportedError",
    "CompileError",
    "ExperimentalWarning",
    "FiError",
    "GPUArchitectureError",
    "LibraryError",
    "MissingJITCacheError",
    "MissingKernelError",
    "UnknownWordError",
    "UnsupportedError",
]
