"""The plugin of vLLM: `vllm serve MODEL --attention-backend CUSTOM` attends with fi's kernels."""

from __future__ import annotations

import importlib.metadata
import logging

VERSIONS = ("0.24", "0.33")  # whose interfaces tests/engine_calls/vllm_seams.json holds
BACKEND = "fi_core.integrations.vllm.attention.Backend"

# vLLM prints what is logged below its own name.
_log = logging.getLogger("vllm.plugins.fi_core")


def register() -> None:
    """Registers the attention backend that `--attention-backend CUSTOM` selects.

    vLLM finds this function by the entry point `vllm.general_plugins` and calls it in each of its processes. It changes
    nothing for an engine that selects another backend, and nothing at all in a vLLM of another version than VERSIONS,
    or where another plugin owns CUSTOM; it logs one line then.
    """
    version = importlib.metadata.version("vllm")
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        _log.info("fi is not registered: it supports vLLM %s, this is %s", " and ".join(VERSIONS), version)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, BACKEND)
    elif custom.get_path() != BACKEND:
        _log.info("fi is not registered: %s is the CUSTOM attention backend", custom.get_path())
