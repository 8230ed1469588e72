"""transformers on fi's kernels: attention, experts, and replacements of norms, rotary embedding and gated MLPs.

    import fi_core.integrations.transformers as fi
    fi.register()
    fi.register_experts()  # of models that have some
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="fi", experts_implementation="fi")
    fi.replace(model)  # optional

It requires transformers 5, and runs under `torch.no_grad()` or `torch.inference_mode()`: the kernels have no backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_core.integrations.experts import experts, register_experts, require
from fi_core.integrations.plans import attend, attend_ragged
from fi_core.integrations.replace import replace

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONTINUOUS",
    "NAME",
    "attention",
    "experts",
    "mask",
    "register",
    "register_experts",
    "replace",
    "use_in_continuous_batching",
]

NAME, CONTINUOUS = "fi", "fi_flash"


def register() -> None:
    """Adds `attn_implementation="fi"` to transformers.

    Raises:
        ImportError: transformers is missing, or has no AttentionInterface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (NAME, CONTINUOUS):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


def use_in_continuous_batching(model: Any) -> None:
    """Lets `model.generate_batch` run on fi's kernels, until another `set_attn_implementation`.

    transformers accepts a foreign implementation there only if its name has "flash", and loads such names from the hub
    unless they are written into the configuration. Keys and values of the batch are gathered by transformers.

    Raises:
        ImportError: transformers is older than 5.23, which had other names for implementations of continuous batching.
    """
    require("use_in_continuous_batching", 23)
    register()
    for config in (model.config, model.config.get_text_config()):
        config._attn_implementation_internal = CONTINUOUS


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> torch.Tensor | None:
    """The mask that `attention` is given; transformers calls it once a forward pass and kind of layer.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
            allow_is_causal_skip, options: as of transformers' `sdpa_mask`.

    Returns:
        None: causal, with the window of the layer, if it has one. Bool `[batch, kv_length]`: so, and only these keys.
        Bool `[batch, 1, q_length, kv_length]`: all bits, for masks of other kinds and for static caches.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = mask_function or causal_mask_function
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if at_end and allow_is_causal_skip and _is_window(function, local_size):
        if attention_mask is None:
            return None
        kept = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        return None if bool(kept.all()) else kept
    bits: torch.Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **options,
    )
    return bits


def _is_window(function: Callable[..., Any], local_size: int | None) -> bool:
    """Whether a causal mask has no further limit than a sliding window: chunks see no key of the chunk before."""
    if local_size is None:
        from transformers.masking_utils import causal_mask_function

        return function is causal_mask_function
    import torch

    first = torch.tensor(0)
    return local_size == 1 or bool(function(first, first, first + 2 * local_size, first + 2 * local_size - 1))


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer, with grouped heads, windows, soft caps and sinks.

    Args:
        module: the layer.
        query: `[batch, num_qo_heads, qo_len, head_dim]`.
        key, value: `[batch, num_kv_heads, kv_len, head_dim]`; the queries are the last tokens.
        attention_mask: a result of `mask`.
        dropout: must be 0.
        scaling: of the scores; None: `1 / sqrt(head_dim)`.
        sliding_window: keys that a query attends to, with its own; None: all.
        softcap: c replaces scores by `c tanh(score / c)`.
        is_causal: None: that of the module.
        s_aux: `[num_qo_heads]`, sinks.
        position_bias: must be None.
        cache: the paged cache of continuous batching, whose tables are in options.
        options: others of transformers, without effect.

    Returns:
        (output `[batch, qo_len, num_qo_heads, head_dim]`, None).

    Raises:
        ValueError: dropout, position_bias, or a layer with a window that the model does not pass.
        UnsupportedError: no kernel supports the dtype or the head dim on this device.
    """
    if dropout:
        raise ValueError(f"dropout: 0 is required, because the kernels have no backward; got {dropout}")
    if position_bias is not None:
        raise ValueError('position_bias: None is required; use attn_implementation="eager" or "sdpa"')
    if sliding_window is None and attention_mask is None and _has_window(module):
        raise ValueError(
            f"sliding_window: {type(module).__name__} has a window that it does not pass to its attention; use "
            'attn_implementation="eager" or "sdpa"'
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    window_left = -1 if sliding_window is None or not causal else sliding_window - 1
    sinks = None if s_aux is None else s_aux.float()
    if cache is None:
        out = attend(query, key, value, attention_mask, causal, scale, window_left, softcap or 0.0, sinks)
        return out, None
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
    qo_indptr, kv_indptr = options["cu_seq_lens_q"], options["cu_seq_lens_k"]
    out = attend_ragged(query, key, value, qo_indptr, kv_indptr, causal, scale, window_left, softcap or 0.0, sinks)
    return out, None


def _has_window(module: Any) -> bool:
    kinds: Any = getattr(getattr(module, "config", None), "layer_types", None)
    layer: Any = getattr(module, "layer_idx", None)
    return bool(kinds) and layer is not None and kinds[layer] in ("sliding_attention", "chunked_attention")
