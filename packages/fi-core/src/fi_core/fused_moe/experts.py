"""The experts of a layer, from rows sorted by expert to the weighted sum: the kernels that every public form calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.fused_moe.composition import compose_layer, expected_rows, tile_tokens
from fi_core.fused_moe.decode import stream_experts, sums_slots
from fi_core.fused_moe.few_tokens import compute_few_tokens, takes_slots
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
from fi_core.tllm_enums import is_gated_activation

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation, Layer, Projection, TokenExperts

_BLOCK = 128  # columns that share a scale


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


def run_experts(
    layer: Layer,
    tables: Tables,
    activation: Activation,
    all_experts: int,
    row_scale: torch.Tensor | None = None,
    scratch: Scratch | None = None,
    chosen: str | None = None,
) -> tuple[torch.Tensor, Projection]:
    """The outputs of the experts for the sorted rows, and the projection by which they are finished.

    Args:
        layer, tables, activation: what to compute.
        all_experts: experts of all ranks, for the expected number of rows of one.
        row_scale: fp32 `[slots]`, factors of the inputs of the sorted rows.
        scratch: the memory of the call; None: new tensors.
        chosen: what `compose_layer` has chosen; None: it is asked.

    Returns:
        `[slots, hidden]`, whose rows of no expert are not written; the projection whose bias and order of columns
        remain for the sum.
    """
    import torch

    scratch = scratch or Scratch(None, layer.x.device)
    slots = tables.rows.shape[0]
    chosen = chosen or compose_layer(layer, slots, activation, all_experts, row_scale is not None, False)
    mean = slots / all_experts
    if chosen == "moe_experts":
        rows = stream_experts(layer, tables, activation, tile_tokens(layer.x.shape[0], mean), scratch)
        return rows, layer.down._replace(columns=None)
    x, up, down = layer.x, layer.up.by_rows(), layer.down.by_rows()
    columns, hidden = up.rows, x.shape[1]
    width = columns // 2 if is_gated_activation(activation.kind) else columns
    quantized = up.mixed is None and up.weight.dtype is torch.float8_e4m3fn
    narrow = torch.float8_e4m3fn if quantized else layer.dtype
    expected, a = expected_rows(mean, quantized), activation

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
        if chosen == "moe_gated_gemm":
            activated = new(width, narrow)
            activated_scales = new(width // _BLOCK, torch.float32) if layer.blocks else None
            moe_gated_gemm(activated, activated_scales, gathered, scales, up.weight, weight_scale=up.scale,
                           offsets=tables.offsets, bias=up.bias, alpha=a.alpha, beta=a.beta, limit=a.limit,
                           activation=a.kind, alpha_value=a.alpha_value, beta_value=a.beta_value,
                           limit_value=a.limit_value, expected_m=expected)  # fmt: skip
            return project(down, activated, activated_scales, None), down
        projected = project(up, gathered, row_scale if scales is None else scales, None)
    else:
        projected = project(up, x, None, tables.rows)
    activated = new(width, narrow)
    scales = new(width // _BLOCK, torch.float32) if layer.blocks else None
    moe_activation(activated, scales, projected, tables.offsets, bias=up.bias, alpha=a.alpha, beta=a.beta,
                   limit=a.limit, quant=layer.quant, columns=up.columns, activation=a.kind, alpha_value=a.alpha_value,
                   beta_value=a.beta_value, limit_value=a.limit_value)  # fmt: skip
    return project(down, activated, scales, None), down


def compute_layer(
    out: torch.Tensor,
    layer: Layer,
    activation: Activation,
    all_experts: int,
    routed: TokenExperts,
    tables: Tables | None = None,
    row_scale: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Writes the weighted sum of the experts of each token to `out`.

    tables: the sorted slots; None: they are sorted here, unless the chosen kernel needs no tables. The other arguments
    are those of `run_experts`.
    """
    scratch = scratch or Scratch(None, out.device)
    (tokens, _), slots, experts = layer.x.shape, routed.ids.numel(), layer.up.weight.shape[0]
    in_order = takes_slots(layer, routed, out)
    chosen = compose_layer(layer, slots, activation, all_experts, row_scale is not None, in_order)
    if chosen == "moe_few_tokens":
        expected = -(-slots * experts // all_experts)
        compute_few_tokens(out, layer, activation, routed, expected, scratch)
        return
    if tables is None:
        tables = sort_slots(routed.ids, experts, routed.first_expert, scratch)
    tile = tile_tokens(tokens, slots / all_experts)
    if chosen == "moe_experts" and sums_slots(layer, routed, out, tile):
        stream_experts(layer, tables, activation, tile, scratch, out, routed)
        return
    rows, down = run_experts(layer, tables, activation, all_experts, row_scale, scratch, chosen)
    sum_experts(out, rows, tables, routed.weights, down)


def sum_experts(
    out: torch.Tensor, rows: torch.Tensor, tables: Tables, weights: torch.Tensor | None, down: Projection
) -> None:
    """Writes the weighted sum of the experts of each token to `out`, biases included."""
    moe_finalize(out, rows, tables.positions, weights=weights, offsets=None if down.bias is None else tables.offsets,
                 bias=down.bias, columns=down.columns)  # fmt: skip
