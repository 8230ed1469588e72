"""The plugin of SGLang: `--attention-backend fi`, `--linear-attn-backend fi`, `--moe-runner-backend fi`."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any

NAME = "fi"
VERSIONS = ("0.5.23",)  # whose interfaces tests/engine_calls/sglang_seams.json holds

_log = logging.getLogger("sglang.srt.plugins.fi_core")
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod"
_FP8 = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod"
_RUNNER = "sglang.srt.layers.moe.moe_runner.runner.MoeRunner.__init__"
_DELTA_NETS = "sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher"


def register() -> None:
    """Adds "fi" to the backends that SGLang's options take: of attention, of gated delta nets and of experts.

    SGLang finds this function by the entry point `sglang.srt.plugins` and calls it in each of its processes. It changes
    nothing for an engine that selects other backends, and nothing at all in a SGLang of another version than VERSIONS;
    it logs one line then.
    """
    version = importlib.metadata.version("sglang")
    if version not in VERSIONS:
        _log.info("fi is not registered: it supports SGLang %s, this is %s", " and ".join(VERSIONS), version)
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.layers.moe.moe_runner import register_moe_runner_core
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKENDS:
        return
    from fi_core.integrations.sglang.experts import Experts, Fp8Method, Method, check_runner
    from fi_core.integrations.sglang.gdn import Dispatcher

    choices.add_attention_backend_choices([NAME])
    choices.add_chunked_prefix_cache_attention_backend(NAME)
    register_attention_backend(NAME)(attention)
    choices.add_linear_attn_kernel_backend_choices([NAME])
    HookRegistry.register(_DELTA_NETS, Dispatcher, HookType.REPLACE)
    choices.add_moe_runner_backend_choices([NAME])
    register_moe_runner_core(NAME, Experts)
    HookRegistry.register(_UNQUANTIZED, Method, HookType.REPLACE)
    HookRegistry.register(_FP8, Fp8Method, HookType.REPLACE)
    HookRegistry.register(_RUNNER, check_runner, HookType.BEFORE)


def attention(runner: Any) -> Any:
    """The attention backend of a model: over a latent cache (MLA), or over keys and values."""
    from fi_core.integrations.sglang import attention as dense

    if not runner.use_mla_backend:
        return dense.Backend(runner)
    from fi_core.integrations.sglang import mla

    return mla.Backend(runner)
