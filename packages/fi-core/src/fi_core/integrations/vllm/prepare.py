"""The kernels of an engine's model begin to compile when its first layer is made."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import get_current_vllm_config

from fi_core import ahead
from fi_core.errors import UnsupportedError
from fi_core.integrations.vllm.linear import is_used
from fi_core.runtime.env import env

# vLLM's names of fp8 caches.
FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}

_log = logging.getLogger("vllm.plugins.fi_core")
_begun: list[Any] = []  # configurations of models


def begin_to_compile() -> None:
    """Begins on other threads, once for a model: a call that needs a kernel waits for that kernel alone.

    The log names a model that no profile describes; its kernels compile when a layer runs first.
    """
    import torch

    config = get_current_vllm_config()
    model = config.model_config
    if model is None or not torch.cuda.is_available() or any(model.hf_text_config is x for x in _begun):
        return
    _begun.append(model.hf_text_config)
    try:
        count = ahead.prepare(model.hf_text_config, wait=False, **options(config))
        _log.info("fi compiles %d files of kernels while the engine starts", count)
    except (ValueError, UnsupportedError) as error:
        _log.info("fi compiles kernels at their first use: %s", error)


def options(config: Any) -> dict[str, Any]:
    """How an engine of this configuration serves its model, as `fi_core.ahead.Options`."""
    cache, drafts = config.cache_config, config.speculative_config
    kv = FP8.get(cache.cache_dtype, cache.cache_dtype)
    return {
        "dtype": config.model_config.dtype,
        "kv_dtype": None if kv == "auto" else kv,
        "page_size": cache.block_size,
        "tp": config.parallel_config.tensor_parallel_size,
        "spec_tokens": drafts.num_speculative_tokens if drafts else 0,
        "lora": config.lora_config is not None,
        "products": env.vllm_layers and is_used(),
    }
