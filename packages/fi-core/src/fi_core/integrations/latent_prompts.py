"""Attention of prompts over the keys and values that an engine expands from a latent cache (DeepSeek)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fi_core.prefill import trtllm_ragged_attention_deepseek

if TYPE_CHECKING:
    import torch

_LN2 = math.log(2)


def attend_expanded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: int,
    *,
    causal: bool,
    return_lse: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """New tokens attend to each other, or to a chunk of those before them.

    Args:
        q, k: `[tokens, heads, 192]`, those of keys may be more.
        v: `[keys, heads, 128]`.
        scale: factor of the scores.
        starts: int32 `[requests + 1]` of queries and of keys.
        longest: an upper bound of the tokens of a request.
        causal: whether queries and keys are the same tokens, of which each attends to those up to itself.
        return_lse: whether the logarithms are returned too.
        out: `[tokens, heads, 128]`; allocated if None.

    Returns:
        out, or out and the natural logarithms of the sums of the exponentials, fp32 `[tokens, heads]`.
    """
    found: Any = trtllm_ragged_attention_deepseek(
        q,
        k,
        v,
        workspace_buffer=q.view(-1)[:0],  # not needed
        seq_lens=None,
        max_q_len=longest,
        max_kv_len=longest,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        o_sf_scale=None,
        batch_size=len(starts[0]) - 1,
        window_left=-1,
        cum_seq_lens_q=starts[0],
        cum_seq_lens_kv=starts[1],
        enable_pdl=None,
        is_causal=causal,
        return_lse=return_lse,
        out=out,
    )
    return (found[0], found[1] * _LN2) if return_lse else found
