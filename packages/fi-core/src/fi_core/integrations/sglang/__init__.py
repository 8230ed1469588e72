"""The plugin of SGLang: `--attention-backend fi --page-size 16` and `--moe-runner-backend fi`."""

from __future__ import annotations

import importlib.metadata
import logging

NAME = "fi"
VERSIONS = ("0.5.23",)  # whose interfaces tests/engine_calls/sglang_seams.json holds

_log = logging.getLogger("sglang.srt.plugins.fi_core")
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod"
_RUNNER = "sglang.srt.layers.moe.moe_runner.runner.MoeRunner.__init__"


def register() -> None:
    """Adds "fi" to the attention and MoE backends that SGLang's options take.

    SGLang finds this function by the entry point `sglang.srt.plugins` and calls it in each of its processes. It changes
    nothing for an engine that selects other backends, and nothing at all in a SGLang of another version than VERSIONS;
    it logs one line then.
    """
    version = importlib.metadata.version("sglang")
    if version not in VERSIONS:
        _log.info("fi is not registered: it supports SGLang %s, this is %s", " and ".join(VERSIONS), version)
        return
    from sglang.srt.arg_groups.choices import add_attention_backend_choices, add_moe_runner_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.layers.moe.moe_runner import register_moe_runner_core
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKENDS:
        return
    from fi_core.integrations.sglang.attention import Backend
    from fi_core.integrations.sglang.experts import Experts, Method, check_runner

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(Backend)
    add_moe_runner_backend_choices([NAME])
    register_moe_runner_core(NAME, Experts)
    HookRegistry.register(_UNQUANTIZED, Method, HookType.REPLACE)
    HookRegistry.register(_RUNNER, check_runner, HookType.BEFORE)
