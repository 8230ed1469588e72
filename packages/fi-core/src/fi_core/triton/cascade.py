"""Merging of attention states under FlashInfer's names for Triton: log-sum-exp in base 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.attention.merge import merge_state, merge_state_in_place, merge_states

if TYPE_CHECKING:
    import torch

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]


def variable_length_merge_states(
    v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` of a number of states that differs between rows.

    Args:
        v: `[nnz, num_heads, head_dim]`, fp16, bf16 or fp32.
        s: `[nnz, num_heads]`, log-sum-exp in base 2.
        indptr: `[n + 1]`, int32 or int64; row i merges states `indptr[i]` to `indptr[i + 1] - 1`, from 0 to nnz.

    Returns:
        (v `[n, num_heads, head_dim]`, s `[n, num_heads]` fp32); rows without states have v = 0 and s = -inf.

    Raises:
        ValueError: A shape does not fit; the text names the argument.
    """
    import torch

    if v.ndim != 3 or s.shape != v.shape[:2]:
        raise ValueError(
            f"v and s: shapes [nnz, num_heads, head_dim] and [nnz, num_heads] are required; got {list(v.shape)} and "
            f"{list(s.shape)}"
        )
    if indptr.ndim != 1 or not indptr.numel():
        raise ValueError(f"indptr: shape [n + 1] is required; got {list(indptr.shape)}")
    offsets, s = indptr.long(), s.float()
    row = torch.searchsorted(offsets, torch.arange(len(v), device=v.device), right=True) - 1
    row.clamp_(0, max(len(offsets) - 2, 0))

    def reduced(x: torch.Tensor, how: str, initial: float) -> torch.Tensor:
        return torch.segment_reduce(x, how, offsets=offsets, axis=0, unsafe=True, initial=initial)

    most = reduced(s, "max", -torch.inf)
    base = most.masked_fill(most == -torch.inf, 0.0)
    weights = torch.exp2(s - base[row])
    total = reduced(weights, "sum", 0.0)
    merged = reduced(weights.unsqueeze(-1) * v.float(), "sum", 0.0) / total.unsqueeze(-1)
    return merged.masked_fill(total.unsqueeze(-1) == 0, 0.0).to(v.dtype), base + torch.log2(total)
