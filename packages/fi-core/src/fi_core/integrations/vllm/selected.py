"""`Backend`: what vLLM finds where the CUSTOM attention backend is selected."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The backend of the model that is being made: over a latent cache (MLA), or over keys and values."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        from fi_core.integrations.vllm import mla

        return mla.Backend
    from fi_core.integrations.vllm import attention

    return attention.Backend
