"""The plugin of vLLM: `vllm serve MODEL --attention-backend CUSTOM` attends with fi's kernels.

With FI_VLLM_LAYERS=1 SwiGLU, rotary embeddings, experts and gated delta nets are fi's too, and the norms for which the
engine is given `--ir-op-priority.rms_norm fi --ir-op-priority.fused_add_rms_norm fi`. With VLLM_BATCH_INVARIANT=1 all
calls of the process are batch invariant, and attention computes every token as prefill, without graphs.
"""

from __future__ import annotations

import importlib.metadata
import logging

from fi_core.runtime import invariance
from fi_core.runtime.env import env

VERSIONS = ("0.24", "0.33")  # whose interfaces tests/engine_calls/vllm_seams.json holds
BACKEND = "fi_core.integrations.vllm.selected.Backend"
PROMPTS = "fi_core.integrations.vllm.mla_prompts.Prompts"

# vLLM prints what is logged below its own name.
_log = logging.getLogger("vllm.plugins.fi_core")


def register() -> None:
    """Registers the attention backends that `--attention-backend CUSTOM` and `--attention-config.mla_prefill_backend
    CUSTOM` select, and with FI_VLLM_LAYERS=1 layers.

    vLLM finds this function by the entry point `vllm.general_plugins` and calls it in each of its processes. It changes
    nothing for an engine that selects another backend without FI_VLLM_LAYERS, and nothing at all in a vLLM of another
    version than VERSIONS, or where another plugin owns CUSTOM; it logs one line then.
    """
    version = importlib.metadata.version("vllm")
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        _log.info("fi is not registered: it supports vLLM %s, this is %s", " and ".join(VERSIONS), version)
        return
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden():
        if custom.get_path() != BACKEND:
            _log.info("fi is not registered: %s is the CUSTOM attention backend", custom.get_path())
        return
    register_backend(custom, BACKEND)
    from vllm import envs

    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        invariance.word.value += 1  # never closed: it is the engine's for the whole process
    if not MLAPrefillBackendEnum.CUSTOM.is_overridden():
        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, PROMPTS)
    from fi_core.integrations.vllm import late

    late.register()
    if env.vllm_layers:
        from fi_core.integrations.vllm import layers

        layers.register()
