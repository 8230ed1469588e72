"""The experts of a layer, from rows sorted by expert to the weighted sum: the kernels that every public form calls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fi_core.fused_moe.decode import stream_experts, sums_slots, tile_tokens
from fi_core.fused_moe.layer import Scratch, Tables
from fi_core.fused_moe.ops import (
    moe_activation,
    moe_finalize,
    moe_gated_gemm,
    moe_gather,
    moe_mixed_gemm,
    moe_sort,
)
from fi_core.fused_moe.workspace import table_words
from fi_core.gemm.ops import gemm
from fi_core.runtime.launch.operator import target_of
from fi_core.tllm_enums import ActivationType, is_gated_activation

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation, Layer, Projection, TokenExperts

_BLOCK = 128  # columns that share a scale
# H200, us of a layer by two launches and by one: Mixtral T400 (100 rows) 419 and 398, T1024 (256) 956 and 796,
# Qwen3-30B T2048 (128) 326 and 297, T8192 (512) 929 and 822.
_LEAST_FUSED = 65  # rows of an expert from which the activation is part of the first product
_MOST_STREAMED = 48  # mean rows of an expert up to which the stream of weights takes most time


def sort_slots(ids: torch.Tensor, experts: int, first_expert: int, scratch: Scratch | None = None) -> Tables:
    """Sorts the slots of `[tokens, top_k]` expert numbers by local expert, on the device."""
    import torch

    tokens, top_k = ids.shape
    sizes = table_words(experts, tokens * top_k)
    memory = (scratch or Scratch(None, ids.device)).new((sum(sizes),), torch.int32)
    offsets, active, counters, rows, positions = memory.split(sizes)
    tables = Tables(offsets, rows, positions.view(tokens, top_k), active, counters)
    moe_sort(offsets, rows, tables.positions, active, ids, zeros=counters, first_expert=first_expert)
    return tables


def expected_rows(mean: float, quantized: bool) -> int:
    """The rows of an expert for which tiles are chosen, from their mean.

    While an expert has one tile of tokens, weights are streamed once; so nearly all experts of an even routing are to
    have one. H200, bf16, DeepSeek-V3 with 1024 tokens: 7544 us with tiles for the mean of 32. Mean of 64, tiles of 64
    rows and larger ones: Mixtral with 256 tokens 794 and 775 us, Qwen3-30B with 1024 tokens 406 and 380.
    """
    if 60 < mean <= 64 and not quantized:
        return 65
    return math.ceil(mean) if mean > _MOST_STREAMED else min(64, math.ceil(mean + 1.65 * mean**0.5))


def _fuses_activation(layer: Layer, activation: Activation, expected: int) -> bool:
    """Whether `moe_gated_gemm` computes the first product of rows that `moe_gather` writes."""
    up = layer.up
    return (
        layer.blocks
        and expected >= _LEAST_FUSED
        and activation.kind == ActivationType.Swiglu
        and up.mixed is None
        and up.scale is not None
        and up.bias is None
        and up.columns is None
        and up.weight.ndim == 3
        and up.weight.stride(-1) == 1
        and up.weight.data_ptr() % 16 == 0
        and all(step % 16 == 0 for step in up.weight.stride()[:-1])
        and up.rows % (2 * _BLOCK) == 0
        and up.weight.shape[-1] % _BLOCK == 0
        and layer.quant is None
        and target_of(layer.x.device).capability == 90
    )


def run_experts(
    layer: Layer,
    tables: Tables,
    activation: Activation,
    all_experts: int,
    row_scale: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> tuple[torch.Tensor, Projection]:
    """The outputs of the experts for the sorted rows, and the projection by which they are finished.

    Args:
        layer, tables, activation: what to compute.
        all_experts: experts of all ranks, for the expected number of rows of one.
        row_scale: fp32 `[slots]`, factors of the inputs of the sorted rows.
        scratch: the memory of the call; None: new tensors.

    Returns:
        `[slots, hidden]`, whose rows of no expert are not written; the projection whose bias and order of columns
        remain for the sum.
    """
    import torch

    scratch = scratch or Scratch(None, layer.x.device)
    if row_scale is None and (tile := tile_tokens(layer, activation, tables, all_experts)):
        rows = stream_experts(layer, tables, activation, tile, scratch)
        return rows, layer.down._replace(columns=None)
    x, up, down = layer.x, layer.up.by_rows(), layer.down.by_rows()
    slots, columns, hidden = tables.rows.shape[0], up.rows, x.shape[1]
    width = columns // 2 if is_gated_activation(activation.kind) else columns
    quantized = up.mixed is None and up.weight.dtype is torch.float8_e4m3fn
    narrow = torch.float8_e4m3fn if quantized else layer.dtype
    expected = expected_rows(slots / all_experts, quantized)

    def new(width: int, dtype: torch.dtype) -> torch.Tensor:
        return scratch.new((slots, width), dtype)

    def project(
        p: Projection, of: torch.Tensor, scales: torch.Tensor | None, rows: torch.Tensor | None
    ) -> torch.Tensor:
        out = new(p.rows, layer.dtype)
        if p.mixed is None:
            gemm(out, of, p.weight, scales, p.scale, m_indptr=tables.offsets, expected_m=expected, b_constant=True)
            return out
        assert p.scale is not None
        if p.mixed.input_scale is not None:
            of = of * p.mixed.input_scale
        moe_mixed_gemm(out, of, p.weight, p.scale, tables.offsets, rows=rows, alpha=p.mixed.alpha,
                       format=p.mixed.format, layout=p.mixed.layout, expected_m=expected)  # fmt: skip
        return out

    scales = new(hidden // _BLOCK, torch.float32) if layer.blocks else None
    if up.mixed is None:
        gathered = new(hidden, narrow)
        moe_gather(gathered, scales, x, layer.x_scale, tables.positions)
        if _fuses_activation(layer, activation, expected):
            activated, activated_scales = new(width, narrow), new(width // _BLOCK, torch.float32)
            moe_gated_gemm(activated, activated_scales, gathered, scales, up.weight,
                           weight_scale=up.scale, offsets=tables.offsets, expected_m=expected)  # fmt: skip
            return project(down, activated, activated_scales, None), down
        projected = project(up, gathered, row_scale if scales is None else scales, None)
    else:
        projected = project(up, x, None, tables.rows)
    activated = new(width, narrow)
    scales = new(width // _BLOCK, torch.float32) if layer.blocks else None
    a = activation
    moe_activation(activated, scales, projected, tables.offsets, bias=up.bias, alpha=a.alpha, beta=a.beta,
                   limit=a.limit, quant=layer.quant, columns=up.columns, activation=a.kind, alpha_value=a.alpha_value,
                   beta_value=a.beta_value, limit_value=a.limit_value)  # fmt: skip
    return project(down, activated, scales, None), down


def compute_layer(
    out: torch.Tensor,
    layer: Layer,
    tables: Tables,
    activation: Activation,
    all_experts: int,
    routed: TokenExperts,
    row_scale: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Writes the weighted sum of the experts of each token to `out`; the arguments are those of `run_experts`."""
    tile = tile_tokens(layer, activation, tables, all_experts) if row_scale is None else 0
    if tile and sums_slots(layer, routed, out, tile):
        stream_experts(layer, tables, activation, tile, scratch or Scratch(None, out.device), out, routed)
        return
    rows, down = run_experts(layer, tables, activation, all_experts, row_scale, scratch)
    sum_experts(out, rows, tables, routed.weights, down)


def sum_experts(
    out: torch.Tensor, rows: torch.Tensor, tables: Tables, weights: torch.Tensor | None, down: Projection
) -> None:
    """Writes the weighted sum of the experts of each token to `out`, biases included."""
    moe_finalize(out, rows, tables.positions, weights=weights, offsets=None if down.bias is None else tables.offsets,
                 bias=down.bias, columns=down.columns)  # fmt: skip
