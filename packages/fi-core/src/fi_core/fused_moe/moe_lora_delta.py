"""What adapters add to a layer of experts whose tables the caller keeps, as FlashInfer's functions give it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.fused_moe.pair_lora import _table
from fi_core.lora.ops import lora_delta, lora_sum
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = ["bgmv_moe_gemm1_lora_delta", "bgmv_moe_gemm2_lora_delta"]

_MOST_COLUMNS = 1 << 30  # twice as many fit 32 bits


def _check(topk_ids: torch.Tensor, lora_ids: torch.Tensor, tables: dict[str, torch.Tensor], slices: int) -> None:
    if topk_ids.ndim != 2 or lora_ids.shape != topk_ids.shape[:1]:
        raise ValueError(
            f"topk_ids must have shape [tokens, top_k] and lora_ids [tokens]; got {list(topk_ids.shape)} and "
            f"{list(lora_ids.shape)}"
        )
    for name, table in tables.items():
        if len(table) != slices:
            raise ValueError(f"{name} must have {slices} slices; got shape {list(table.shape)}")


def _check_size(name: str, size: int) -> None:
    if not 0 <= size < _MOST_COLUMNS:
        raise ValueError(f"{name} must be 0 or more and below {_MOST_COLUMNS}; got {size}")


@fi_api
def bgmv_moe_gemm1_lora_delta(
    hidden_states: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    intermediate_size: int,
    *,
    lora_dtype: torch.dtype | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes what adapters add to the first product of experts, for `gemm1_lora_delta=` of the trtllm functions.

    `delta[t, j] = scale [B_gate (A_gate x[t]), B_up (A_up x[t])]` of the expert topk_ids[t, j] and the adapter of t.

    Args:
        hidden_states: `[tokens, hidden]`; cast to lora_dtype if it has another dtype.
        w_ptr_a: `[2, experts]`, int64, of `fill_w_ptr`: addresses of A_gate and A_up, `[rank, hidden]` each; or
            `[experts]`: one A for both, with w_ptr_b `[experts]` of `[2 intermediate_size, rank]`, the gate first.
        lora_stride_a, lora_stride_b: elements between adapters.
        w_ptr_b: `[2, experts]`, int64: addresses of B_gate and B_up, `[intermediate_size, rank]` each.
        topk_ids: `[tokens, top_k]`, int32 or int64, experts.
        lora_ids: `[tokens]`, int32 or int64, adapters; -1: none.
        rank: of the adapters, 8 to 256, a multiple of 8.
        intermediate_size: columns of the gate, a multiple of 8.
        lora_dtype: of the weights, bf16 (None) or fp16.
        scale: a factor of the result.
        out_dtype: of the result: bf16 (None), fp16 or fp32.

    Returns:
        `[tokens, top_k, 2 intermediate_size]`, the gate's columns first; -0 for tokens without an adapter.

    Raises:
        ValueError: a shape, stride or device does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    import torch

    if w_ptr_a.ndim != w_ptr_b.ndim:
        raise ValueError(
            f"w_ptr_a and w_ptr_b must both have one dimension or two; got {w_ptr_a.ndim} and {w_ptr_b.ndim}"
        )
    _check_size("intermediate_size", intermediate_size)
    slices = w_ptr_a.ndim
    a, b = _table(w_ptr_a), _table(w_ptr_b)
    _check(topk_ids, lora_ids, {"w_ptr_a": a, "w_ptr_b": b}, slices)
    x = hidden_states.to(lora_dtype or torch.bfloat16)
    (tokens, top_k), columns = topk_ids.shape, 2 * intermediate_size
    out = torch.empty(tokens * top_k, columns, dtype=out_dtype or torch.bfloat16, device=x.device)
    sizes: dict[str, Any] = {"rank": rank, "columns": columns // slices, "scale": scale}
    strides = {"a_stride": lora_stride_a, "b_stride": lora_stride_b}
    lora_delta(out, x, lora_ids, a=a, b=b, experts=topk_ids, fill=True, **sizes, **strides)
    return out.view(tokens, top_k, columns)


@fi_api
def bgmv_moe_gemm2_lora_delta(
    gemm1_activation_output: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    hidden_size: int,
    *,
    lora_dtype: torch.dtype | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes what adapters add to the output of a layer of experts, behind the second product.

    `delta[t] = scale sum over j of topk_weights[t, j] B_down (A_down a[t, j])`, a the activated values of the slot.

    Args:
        gemm1_activation_output: `[rows, inter]`, as a trtllm function with gemm1_lora_delta returns it; cast to
            lora_dtype if it has another dtype.
        expanded_idx_to_permuted_idx: `[tokens * top_k]`, int32 or int64: the row of each slot; negative: none.
        w_ptr_a, w_ptr_b: `[1, experts]`, int64, of `fill_w_ptr`: addresses of A_down `[rank, inter]` and B_down
            `[hidden_size, rank]`.
        lora_stride_a, lora_stride_b: elements between adapters.
        topk_ids: `[tokens, top_k]`, int32 or int64, experts.
        topk_weights: `[tokens, top_k]`, fp32, bf16 or fp16.
        lora_ids: `[tokens]`, int32 or int64, adapters; -1: none.
        rank: of the adapters, 8 to 256, a multiple of 8.
        hidden_size: columns of the result, a multiple of 8.
        lora_dtype: of the weights, bf16 (None) or fp16.
        scale: a factor of the result.
        out_dtype: of the result: bf16 (None), fp16 or fp32.

    Returns:
        `[tokens, hidden_size]`, to be added to the layer's output; zeros for tokens without an adapter.

    Raises:
        ValueError: a shape, stride or device does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    import torch

    _check_size("hidden_size", hidden_size)
    a, b = _table(w_ptr_a), _table(w_ptr_b)
    _check(topk_ids, lora_ids, {"w_ptr_a": a, "w_ptr_b": b}, 1)
    slots, tokens = topk_ids.numel(), len(topk_ids)
    if expanded_idx_to_permuted_idx.numel() != slots or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"expanded_idx_to_permuted_idx must have {slots} elements and topk_weights the shape of topk_ids; got "
            f"{list(expanded_idx_to_permuted_idx.shape)} and {list(topk_weights.shape)}"
        )
    place = expanded_idx_to_permuted_idx.flatten()
    rows = gemm1_activation_output.to(lora_dtype or torch.bfloat16)[place.clamp(min=0).long()]
    experts = topk_ids.where(place.view(topk_ids.shape) >= 0, -1)
    found = torch.empty(slots, hidden_size, dtype=torch.float32, device=rows.device)
    sizes: dict[str, Any] = {"rank": rank, "columns": hidden_size, "scale": scale, "per_pair": True}
    strides = {"a_stride": lora_stride_a, "b_stride": lora_stride_b}
    lora_delta(found, rows, lora_ids, a=a, b=b, experts=experts, fill=True, **sizes, **strides)
    out = torch.zeros(tokens, hidden_size, dtype=torch.float32, device=rows.device)
    lora_sum(out, found, lora_ids, weights=topk_weights.float().contiguous())
    return out.to(out_dtype or torch.bfloat16)
