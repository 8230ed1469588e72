"""FlashInfer's places of the gated delta rule over prompts on Hopper; they run that of `gdn_prefill`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core import gdn_prefill

if TYPE_CHECKING:
    import torch

__all__ = ["chunk_gated_delta_rule_sm90", "cp_delta_rule_dsl_sm90"]


def chunk_gated_delta_rule_sm90(
    o: torch.Tensor,
    state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    init_state: torch.Tensor | None,
    alpha: torch.Tensor | None,
    beta: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    state_indices: torch.Tensor | None = None,
) -> None:
    """`gdn_prefill.chunk_gated_delta_rule` with other names of its arguments; prompts are not split into segments.

    Args:
        o: its `output`, written.
        state: its `output_state`, written; None: it is not returned.
        init_state: its `initial_state`.
        alpha: its `g`.
        q, k, v, beta, cu_seqlens, scale: as there.
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, state_indices: as there.

    Raises:
        ValueError: a shape, stride or device is wrong.
        TypeError: a dtype is wrong.
    """
    gdn_prefill.chunk_gated_delta_rule(
        q,
        k,
        v,
        g=alpha,
        beta=beta,
        scale=scale,
        initial_state=init_state,
        cu_seqlens=cu_seqlens,
        output=o,
        output_state=state,
        use_cp=False,
        state_checkpoints=state_checkpoints,
        checkpoint_cu_starts=checkpoint_cu_starts,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        state_indices=state_indices,
    )


def cp_delta_rule_dsl_sm90(
    o: torch.Tensor,
    state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor | None,
    beta: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
    *,
    initial_state: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    max_seqlen: int | None = None,
    cp_chunk_len: int | None = None,
    cp_chunk_len_granularity: int = 64,
) -> None:
    """`gdn_prefill.chunk_gated_delta_rule(use_cp=True)`: long prompts are split into segments that run side by side.

    Args:
        o, state, q, k, v, alpha, beta, cu_seqlens, scale: as for `chunk_gated_delta_rule_sm90`.
        initial_state, state_indices, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens: as there.
        max_seqlen: accepted; it has no effect.
        cp_chunk_len: tokens of a segment; None: the library's choice.
        cp_chunk_len_granularity: accepted: segments are multiples of 64 tokens.

    Raises:
        ValueError: a shape, stride or device is wrong.
        TypeError: a dtype is wrong.
    """
    gdn_prefill.chunk_gated_delta_rule(
        q,
        k,
        v,
        g=alpha,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output=o,
        output_state=state,
        use_cp=True,
        state_checkpoints=state_checkpoints,
        checkpoint_cu_starts=checkpoint_cu_starts,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        state_indices=state_indices,
        _cp_chunk_len=cp_chunk_len,
        max_seqlen=max_seqlen,
    )
