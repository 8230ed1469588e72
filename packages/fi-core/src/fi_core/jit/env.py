"""Path constants, such as `FI_JIT_DIR`; each exists with the prefix FLASHINFER_ too.

A constant is computed at each read, so FI_CACHE_DIR may change. Reading a constant creates no file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from fi_core.runtime.build import sources
from fi_core.runtime.env import env
from fi_core.runtime.resolve import store
from fi_core.runtime.resolve.provider import ENV_NAME, providers

GENERATED = "generated"


def _provided(name: str) -> Path | None:
    return next((provider.directory for provider in providers() if provider.name == name), None)


_PATHS: dict[str, Callable[[], Path | None]] = {
    "BASE_DIR": lambda: env.workspace_base,
    "CACHE_DIR": lambda: env.cache_dir,
    "WORKSPACE_DIR": lambda: env.cache_dir,  # entry names contain version and architecture; folders do not
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
    """Whether the package of prebuilt device binaries is installed; `fi-core doctor` reports whether it matches."""
    return importlib.util.find_spec("fi_cubin") is not None


def has_fi_jit_cache() -> bool:
    """Whether the package of prebuilt host modules is installed."""
    return importlib.util.find_spec("fi_jit_cache") is not None


has_flashinfer_cubin, has_flashinfer_jit_cache = has_fi_cubin, has_fi_jit_cache
