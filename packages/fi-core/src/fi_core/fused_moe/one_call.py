"""Routing and experts of a few tokens in one call, with the names of FlashInfer's kernel for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.fused_moe.cutlass import cutlass_fused_moe
from fi_core.fused_moe.workspace import cutlass_fused_moe_workspace_size
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = [
    "alloc_scratchpad",
    "get_scratchpad_size_bytes",
    "has_monomoe",
    "interleave_for_tma_wgmma_up",
    "mono_moe",
]

_BLOCK = 128  # rows and columns that share a scale
_TOKENS, _EXPERTS, _INTER, _HIDDEN, _TOP_K = 8, 256, 512, 2048, 8  # the largest call that FlashInfer's kernel takes
_PREPARED = "_fi_linear_first"  # marks what `interleave_for_tma_wgmma_up` returns
_KEPT = "_fi_interleaved_up"  # of a weight: what it became


def has_monomoe() -> bool:
    """Whether `mono_moe` works: True."""
    return True


def get_scratchpad_size_bytes() -> int:
    """Bytes of a scratchpad for up to 8 tokens of 256 experts, hidden 2048, intermediate 512, on the current device."""
    import torch

    return cutlass_fused_moe_workspace_size(
        _TOKENS,
        _HIDDEN,
        _INTER,
        _EXPERTS,
        _TOP_K,
        x_dtype=torch.bfloat16,
        weight_dtype=torch.float8_e4m3fn,
        use_deepseek_fp8_block_scale=True,
    )


def alloc_scratchpad(device: torch.device) -> torch.Tensor:
    """A scratchpad of `get_scratchpad_size_bytes()` bytes, uint8, zero."""
    import torch

    return torch.zeros(get_scratchpad_size_bytes(), dtype=torch.uint8, device=device)


def interleave_for_tma_wgmma_up(w_fp8: torch.Tensor) -> torch.Tensor:
    """Brings gate and up weights to the layout that `mono_moe` reads: the up rows first. It is not FlashInfer's.

    The result is kept with w_fp8, so that a later call returns the same tensor; w_fp8 must not change between.

    Args:
        w_fp8: `[experts, 2 n, hidden]`, e4m3: n gate rows, then n up rows; n is a multiple of 64.

    Returns:
        Of the same shape and dtype.

    Raises:
        ValueError: the shape does not fit.
    """
    import torch

    kept: torch.Tensor | None = getattr(w_fp8, _KEPT, None)
    if kept is not None:
        return kept
    if w_fp8.ndim != 3 or w_fp8.shape[1] % 128:
        raise ValueError(f"w_fp8 must have shape [experts, 2 n, hidden], n a multiple of 64; got {list(w_fp8.shape)}")
    half = w_fp8.shape[1] // 2
    result = torch.cat((w_fp8[:, half:].view(torch.uint8), w_fp8[:, :half].view(torch.uint8)), 1).view(w_fp8.dtype)
    setattr(result, _PREPARED, True)
    setattr(w_fp8, _KEPT, result)
    return result


@fi_api
def mono_moe(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    out: torch.Tensor | None = None,
    scratchpad: torch.Tensor | None = None,
    interleave_up: bool = True,
) -> torch.Tensor:
    """Routes tokens to experts and computes them: `out[t] = sum over j of w[t, j] down_e(silu(gate_e(x)) * up_e(x))`.

    The weights are the top-k scores of the logits, divided by their sum if renormalize. It is torch's softmax or
    sigmoid and top-k, and `cutlass_fused_moe` with scales of 128 x 128, so any number of tokens and any sizes work.

    Args:
        activations_in: `[tokens, hidden]`, bf16.
        router_logits: `[tokens, experts]`, bf16, fp16 or fp32.
        expert_weights_up: `[experts, 2 n, hidden]`, e4m3, n a multiple of 128: gate rows, then up rows; or, with
            interleave_up=False, what `interleave_for_tma_wgmma_up` has made of them.
        expert_scales_up: `[experts, 2 n / 128, hidden / 128]`, fp32, in the order of gate and up rows in either case.
        expert_weights_down: `[experts, hidden, n]`, e4m3.
        expert_scales_down: `[experts, hidden / 128, n / 128]`, fp32.
        top_k: experts of a token, 1 to 8.
        scoring_func: "softmax" or "sigmoid".
        renormalize: weights of a token sum to 1.
        out: `[tokens, hidden]`, bf16; allocated if None.
        scratchpad: of `alloc_scratchpad`; memory of torch if None.
        interleave_up: expert_weights_up is as it was stored; the layout of the kernels is made once and kept with it.

    Returns:
        out.

    Raises:
        ValueError: a shape or option does not fit.
        TypeError: a dtype does not fit.
    """
    import torch

    if isinstance(top_k, bool) or not 1 <= top_k <= min(_TOP_K, router_logits.shape[-1]):
        raise ValueError(f"top_k must be 1 to 8, at most the experts; got {top_k}")
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func must be 'softmax' or 'sigmoid'; got {scoring_func!r}")
    experts, rows, hidden = expert_weights_up.shape
    if rows % (2 * _BLOCK):
        raise ValueError(f"expert_weights_up must have 2 n rows, n a multiple of 128; got {rows}")
    for name, x, shape in (
        ("activations_in", activations_in, (len(activations_in), hidden)),
        ("router_logits", router_logits, (len(activations_in), experts)),
        ("expert_scales_up", expert_scales_up, (experts, rows // _BLOCK, hidden // _BLOCK)),
        ("expert_weights_down", expert_weights_down, (experts, hidden, rows // 2)),
        ("expert_scales_down", expert_scales_down, (experts, hidden // _BLOCK, rows // 2 // _BLOCK)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}; got {list(x.shape)}")
    if interleave_up:
        expert_weights_up = interleave_for_tma_wgmma_up(expert_weights_up)
    elif not hasattr(expert_weights_up, _PREPARED):
        raise ValueError(
            "expert_weights_up must come from interleave_for_tma_wgmma_up with interleave_up=False: its layout is "
            "not FlashInfer's; pass the stored weights with interleave_up=True"
        )
    wide = router_logits.float()
    scores = wide.softmax(-1) if scoring_func == "softmax" else wide.sigmoid()
    weights, chosen = scores.topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    scales_up = expert_scales_up.roll(rows // 2 // _BLOCK, 1)  # up first, as the weights
    result: torch.Tensor = cutlass_fused_moe(
        activations_in,
        chosen.int(),
        weights,
        expert_weights_up,
        expert_weights_down,
        torch.bfloat16,
        [scales_up, expert_scales_down],
        output=out,
        use_deepseek_fp8_block_scale=True,
        workspace_buffer=scratchpad,
    )
    return result
