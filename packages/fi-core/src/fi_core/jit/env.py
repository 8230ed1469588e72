"""Where things lie, as path constants: `FI_JIT_DIR` and its like, also under the prefix FLASHINFER_.

A constant is computed each time it is read, so FI_CACHE_DIR may change; nothing is created by reading one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from fi_core.build import sources
from fi_core.env import env
from fi_core.resolve import store
from fi_core.resolve.provider import ENV_NAME, providers

GENERATED = "generated"


def _provided(name: str) -> Path | None:
    return next((provider.directory for provider in providers() if provider.name == name), None)


_PATHS: dict[str, Callable[[], Path | None]] = {
    "BASE_DIR": lambda: env.workspace_base,
    "CACHE_DIR": lambda: env.cache_dir,
    "WORKSPACE_DIR": lambda: env.cache_dir,  # names of entries tell versions and architectures apart, not folders
    "JIT_DIR": lambda: env.cache_dir / store.ENTRIES,
    "GEN_SRC_DIR": lambda: env.cache_dir / GENERATED,
    "CUBIN_DIR": lambda: _provided(ENV_NAME) or _provided("fi-cubin"),
    "AOT_DIR": lambda: _provided("fi-jit-cache"),
    "DATA": sources.root,
    "INCLUDE_DIR": sources.include_dir,
    "CSRC_DIR": lambda: sources.root() / "csrc",
}


def __getattr__(name: str) -> Path | None:
    prefix, _, stem = name.partition("_")
    if prefix not in ("FI", "FLASHINFER") or stem not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _PATHS[stem]()


def __dir__() -> list[str]:
    return sorted({*globals(), *(f"FI_{stem}" for stem in _PATHS)})


def has_fi_cubin() -> bool:
    """Whether the package of prebuilt device binaries can be imported; `doctor` says whether it fits."""
    return importlib.util.find_spec("fi_cubin") is not None


def has_fi_jit_cache() -> bool:
    """Whether the package of prebuilt host modules can be imported."""
    return importlib.util.find_spec("fi_jit_cache") is not None


has_flashinfer_cubin, has_flashinfer_jit_cache = has_fi_cubin, has_fi_jit_cache
