"""The JIT under FlashInfer's names: specs that can be built ahead or one by one, and users' modules. Lazy; no torch."""

from __future__ import annotations

import importlib
from typing import Any

from fi_core.runtime.errors import missing_attribute

# Where each public name lives.
_HOMES = {
    "fi_core.jit.base": (
        "JitSpec",
        "JitSpecStatus",
        "build_jit_specs",
        "check_cuda_arch",
        "clear_cache_dir",
        "jit_spec_registry",
    ),
    "fi_core.jit.attention": (
        "gen_batch_attention_module",
        "gen_batch_decode_module",
        "gen_batch_mla_module",
        "gen_batch_pod_module",
        "gen_batch_prefill_module",
        "gen_customize_batch_attention_module",
        "gen_customize_batch_decode_module",
        "gen_customize_batch_pod_module",
        "gen_customize_batch_prefill_module",
        "gen_customize_pod_module",
        "gen_customize_single_decode_module",
        "gen_customize_single_prefill_module",
        "gen_pod_module",
        "gen_single_decode_module",
        "gen_single_prefill_module",
    ),
    "fi_core.jit.core": ("current_compilation_context",),
    "fi_core.jit.custom": ("gen_jit_spec",),
    "fi_core.jit.ops": ("gen_act_and_mul_module", "gen_module"),
    "fi_core.compat.compilation_context": ("CompilationContext",),
    "fi_core.runtime.errors": ("MissingJITCacheError",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_SUBMODULES = ("attention", "base", "core", "cpp_ext", "custom", "env", "ops", "utils")
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """The public names, the modules, and `gen_<word>_module` for every family and every op."""
    if name in _SUBMODULES:
        return importlib.import_module(f"fi_core.jit.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name.startswith("gen_"):
        from fi_core.jit import ops

        if name in (names := ops.generators()):
            return getattr(ops, name)
        raise missing_attribute(__name__, name, [*__all__, *names])
    raise missing_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    from fi_core.jit import ops

    return sorted({*globals(), *__all__, *ops.generators()})
