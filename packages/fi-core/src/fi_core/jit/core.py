"""The names that FlashInfer's module of specs has: those of `base`, and `gen_jit_spec`."""

from __future__ import annotations

from typing import Any

from fi_core.jit import base
from fi_core.jit.base import (
    JitSpec,
    JitSpecRegistry,
    JitSpecStatus,
    build_jit_specs,
    check_cuda_arch,
    clear_cache_dir,
    jit_spec_registry,
    logger,
)
from fi_core.jit.custom import gen_jit_spec
from fi_core.runtime.errors import missing_attribute

__all__ = [
    "JitSpec",
    "JitSpecRegistry",
    "JitSpecStatus",
    "build_jit_specs",
    "check_cuda_arch",
    "clear_cache_dir",
    "gen_jit_spec",
    "jit_spec_registry",
    "logger",
]


def __getattr__(name: str) -> Any:
    if name == "current_compilation_context":  # queries the driver: not at import
        return base.context()
    raise missing_attribute(__name__, name, __all__)
