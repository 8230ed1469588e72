"""The norms of queries and keys, their rotation and the write to the cache in one pass, in vLLM's Qwen3 models.

There vLLM has no seam between the projection and attention, so `forward` of TARGETS is replaced, where it is the one
that FORWARD names.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.rope import apply_rope_with_cos_sin_cache_inplace

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

TARGETS = (
    "vllm.model_executor.models.qwen3.Qwen3Attention",
    "vllm.model_executor.models.qwen3_moe.Qwen3MoeAttention",
)
# The names that it reads, in order, in vLLM 0.24.0 and 0.33.0.
FORWARD = (
    "qkv_proj",
    "split",
    "q_size",
    "kv_size",
    "view",
    "shape",
    "head_dim",
    "q_norm",
    "k_norm",
    "rotary_emb",
    "attn",
    "o_proj",
)
_HEAD_SIZES = (64, 128, 256)
_log = logging.getLogger("vllm.plugins.fi_core")


def register(rotary: type) -> None:
    """Replaces `forward` of TARGETS; the log names one that has changed, which stays.

    rotary: the part of the rotary embeddings that fi computes.
    """
    for target in TARGETS:
        path, _, name = target.rpartition(".")
        layer = getattr(importlib.import_module(path), name)
        own = layer.forward
        if own.__code__.co_names == FORWARD:
            layer.forward = _replaced(own, rotary)
        else:
            _log.info("fi does not replace %s.forward: it is not that of a supported vLLM", target)


def _replaced(own: Callable[..., torch.Tensor], rotary: type) -> Callable[..., torch.Tensor]:
    @functools.wraps(own)
    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if not fits(self, rotary):
            return own(self, positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        rotate = Rotation(positions, q, self)
        if appends(self.attn):
            self.attn.impl.rotation = rotate  # when vLLM has the keys written
        else:
            rotate(k)
        output, _ = self.o_proj(self.attn(q, k, v))
        result: torch.Tensor = output
        return result

    return forward


class Rotation(NamedTuple):
    """The norms and the rotation of a layer that are yet to be computed."""

    positions: torch.Tensor
    query: torch.Tensor
    layer: Any

    def __call__(self, key: torch.Tensor, **cache: Any) -> None:
        """In place, or into the cache and in place of queries: for so many rows as it has slots."""
        layer, rows = self.layer, slice(len(cache["slot_mapping"]) if cache else None)
        apply_rope_with_cos_sin_cache_inplace(
            self.positions[rows],
            self.query[rows],
            key[rows],
            layer.head_dim,
            layer.rotary_emb.cos_sin_cache,
            layer.rotary_emb.is_neox_style,
            q_weight=layer.q_norm.weight,
            k_weight=layer.k_norm.weight,
            eps=layer.q_norm.variance_epsilon,
            **cache,
        )


def appends(attn: Any) -> bool:
    """Whether the attention of a layer is fi's, over a cache of the activations' dtype, which vLLM has it write now."""
    import torch

    appends = getattr(attn, "impl", None) is not None and getattr(attn.impl, "appends", False)
    return bool(appends and not attn.calculate_kv_scales and not torch.compiler.is_compiling())


def fits(layer: Any, rotary: type) -> bool:
    """Whether one pass does what the norms and the rotary embedding of a layer do, and vLLM has not left them to its
    compiler.
    """
    embedding, q_norm, k_norm = layer.rotary_emb, layer.q_norm, layer.k_norm
    return (
        isinstance(embedding, rotary)
        and embedding.is_enabled  # type: ignore[attr-defined]
        and layer.head_dim in _HEAD_SIZES
        and embedding.rotary_dim % 16 == 0  # type: ignore[attr-defined]
        and q_norm.variance_epsilon == k_norm.variance_epsilon
        and q_norm.weight.dtype == k_norm.weight.dtype == layer.qkv_proj.params_dtype
    )
