"""The launches of a layer, from rows sorted by expert to the weighted sum, as every public form lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.fused_moe import expert_lora
from fi_core.fused_moe.layer import E4M3_TOKENS, Tables
from fi_core.fused_moe.moe_experts import stream_experts, sums_slots
from fi_core.fused_moe.moe_few_tokens import compute_few_tokens, takes_slots
from fi_core.fused_moe.moe_layer import compose_layer, expected_rows, tile_tokens
from fi_core.fused_moe.ops import (
    MOE_ACTIVATION,
    MOE_FINALIZE,
    MOE_GATED_GEMM,
    MOE_GATHER,
    MOE_MIXED_GEMM,
    MOE_SORT,
)
from fi_core.fused_moe.workspace import table_words
from fi_core.gemm.ops import GEMM
from fi_core.quantization.layout import SfLayout
from fi_core.quantization.ops import BLOCK_DEQUANTIZE, BLOCK_QUANTIZE, UE8M0_SCALE

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.expert_lora import Adapters
    from fi_core.fused_moe.layer import Activation, Layer, Projection, TokenExperts
    from fi_core.runtime.launch.plan import Launches

_BLOCK = 128  # columns that share a scale


def sort_slots(
    p: Launches, ids: torch.Tensor, experts: int, first_expert: int, positions: torch.Tensor | None = None
) -> Tables:
    """Sorts the slots of `[tokens, top_k]` expert numbers by local expert, on the device.

    positions: `[slots]`, receives those of the tables; None: they lie in scratch.
    """
    import torch

    sizes = table_words(experts, ids.numel())
    offsets, active, counters, rows, own = p.scratch((sum(sizes),), torch.int32).split(sizes)
    tables = Tables(offsets, rows, (own if positions is None else positions).view(ids.shape), active, counters)
    p.add(MOE_SORT, offsets, rows, tables.positions, active, ids, zeros=counters, first_expert=first_expert)
    return tables


class Rows(NamedTuple):
    """Values `[slots, k]`, and the scales of e4m3 ones: of blocks of them, or of rows.

    Values for mixed weights have 16 bits; those that were e4m3 before have a scale for each row, or none.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None


def _through_e4m3(p: Launches, x: torch.Tensor, activations: str) -> Rows:
    """Values rounded to e4m3, exact in bf16: times a ue8m0 scale for each 32 of them, or for a scale of each row."""
    import torch

    if activations == E4M3_TOKENS:
        amax = x.abs().amax(1, keepdim=True).float()
        scale = amax / torch.finfo(torch.float8_e4m3fn).max
        rounded = (x / scale.where(amax != 0, 1.0)).to(torch.float8_e4m3fn)
        return Rows(rounded.to(torch.bfloat16), scale)
    values, scales = p.scratch(x.shape, torch.float8_e4m3fn), p.scratch((x.shape[0], x.shape[1] // 32), torch.uint8)
    p.add(
        BLOCK_QUANTIZE, values, scales, x, block_size=32, scale_format=UE8M0_SCALE, layout=SfLayout.layout_linear.value
    )
    out = p.scratch(x.shape, torch.bfloat16)
    p.add(
        BLOCK_DEQUANTIZE,
        out,
        values,
        scales.view(-1),
        block_size=32,
        scale_format=UE8M0_SCALE,
        layout=SfLayout.layout_linear.value,
    )
    return Rows(out)


class _Grouped(NamedTuple):
    """The products of all experts with the sorted rows."""

    launches: Launches
    layer: Layer
    tables: Tables
    expected: int  # rows of an expert

    def rows(self, width: int, keeps: bool = False) -> Rows:
        """Memory for operands of a product. keeps: 16-bit ones are a result of the call."""
        import torch

        p, layer, slots = self.launches, self.layer, self.tables.rows.shape[0]
        own = p.result if keeps and not layer.blocks else p.scratch
        values = own((slots, width), torch.float8_e4m3fn if layer.quantizes else layer.dtype)
        return Rows(values, p.scratch((slots, width // _BLOCK), torch.float32) if layer.blocks else None)

    def product(self, w: Projection, x: Rows, rows: torch.Tensor | None = None) -> torch.Tensor:
        """`[slots, n]`. rows: the tokens of the sorted rows, where x has a row for each token."""
        p, offsets, expected = self.launches, self.tables.offsets, self.expected
        out = p.scratch((self.tables.rows.shape[0], w.rows), self.layer.dtype)
        if w.mixed is None:
            p.add(
                GEMM, out, x.values, w.weight, x.scale, w.scale, m_indptr=offsets, expected_m=expected, b_constant=True
            )
            return out
        factor = w.mixed.input_scale
        p.add(
            MOE_MIXED_GEMM,
            out,
            x.values if factor is None else x.values * factor,
            w.weight,
            w.scale,
            offsets,
            rows=rows,
            alpha=w.mixed.alpha,
            format=w.mixed.format,
            layout=w.mixed.layout,
            expected_m=expected,
        )
        if x.scale is None:
            return out
        # Rows without a token are not written by any kernel, nor read.
        return out.float() * (x.scale if rows is None else x.scale[rows.clamp(min=0)])


class Outputs(NamedTuple):
    """Of the experts for the sorted rows. Rows of no expert are not written."""

    rows: torch.Tensor  # [slots, hidden]
    down: Projection  # whose bias and order of columns remain for the sum
    activated: Rows  # operands of the second product, with 16 bits or e4m3 with scales of blocks

    def activated_16_bits(self, dtype: torch.dtype) -> torch.Tensor:
        """Those operands, `[slots, width]`."""
        values, scale = self.activated
        if scale is None:
            return values
        wide: torch.Tensor = values.float().unflatten(1, (-1, _BLOCK)) * scale[..., None]
        return wide.flatten(1).to(dtype)


def run_experts(
    p: Launches,
    layer: Layer,
    tables: Tables,
    activation: Activation,
    all_experts: int,
    row_scale: torch.Tensor | None = None,
    chosen: str | None = None,
    delta: torch.Tensor | None = None,
    keeps_activated: bool = False,
    ready: bool = False,
) -> Outputs:
    """The outputs of the experts for the sorted rows.

    Args:
        p, layer, tables, activation: what to compute.
        all_experts: experts of all ranks, for the expected number of rows of one.
        row_scale: fp32 `[slots]`, factors of the inputs of the sorted rows.
        chosen: what `compose_layer` has chosen; None: it is asked.
        delta: `[slots, n]`, of the sums' dtype: is added to the first product of the sorted rows, columns in order and
            those of the gate first.
        keeps_activated: the activated values are a result of the call.
        ready: the launches of the delta lie between those of the tables and of the products.
    """
    slots = tables.rows.shape[0]
    chosen = chosen or compose_layer(p, layer, slots, activation, all_experts, row_scale is not None, False)
    mean = slots / all_experts
    if chosen == "moe_experts":
        tile = tile_tokens(layer.x.shape[0], mean)
        rows, activated = stream_experts(p, layer, tables, activation, tile, None, None, delta, keeps_activated, ready)
        return Outputs(rows, layer.down._replace(columns=None), Rows(activated))
    layer = layer._replace(up=layer.up.by_rows(), down=layer.down.by_rows())
    grouped = _Grouped(p, layer, tables, expected_rows(mean, layer.quantizes))
    up, a, out = layer.up, activation, grouped.rows(activation.width(layer.up.rows), keeps_activated)
    if up.mixed is None:
        gathered = grouped.rows(layer.x.shape[1])
        p.add(MOE_GATHER, gathered.values, gathered.scale, layer.x, layer.x_scale, tables.positions)
        if chosen == "moe_gated_gemm":
            p.add(
                MOE_GATED_GEMM,
                out.values,
                out.scale,
                gathered.values,
                gathered.scale,
                up.weight,
                weight_scale=up.scale,
                offsets=tables.offsets,
                bias=up.bias,
                expected_m=grouped.expected,
                delta=delta,
                **a.options(),
            )
            return Outputs(grouped.product(layer.down, out), layer.down, out)
        projected = grouped.product(up, gathered if layer.blocks else Rows(gathered.values, row_scale))
    else:
        x = _through_e4m3(p, layer.x, layer.activations) if layer.activations else Rows(layer.x)
        projected = grouped.product(up, x, tables.rows)
    p.add(
        MOE_ACTIVATION,
        out.values,
        out.scale,
        projected,
        tables.offsets,
        bias=up.bias,
        quant=layer.quant,
        columns=up.columns,
        delta=delta,
        **a.options(),
    )
    operand = _through_e4m3(p, out.values, layer.activations) if layer.activations else out
    return Outputs(grouped.product(layer.down, operand), layer.down, out)


def compute_layer(
    p: Launches,
    out: torch.Tensor,
    layer: Layer,
    activation: Activation,
    all_experts: int,
    routed: TokenExperts,
    tables: Tables | None = None,
    row_scale: torch.Tensor | None = None,
    lora: Adapters | None = None,
) -> None:
    """Writes the weighted sum of the experts of each token to `out`.

    tables: the sorted slots; None: they are sorted here, unless the chosen kernel needs no tables. The other arguments
    are those of `run_experts`. With adapters the same kernels compute the layer: tokens without one get the same bits.
    """
    (tokens, _), slots, experts = layer.x.shape, routed.ids.numel(), layer.up.weight.shape[0]
    in_order = takes_slots(layer, routed, out)
    chosen = compose_layer(p, layer, slots, activation, all_experts, row_scale is not None, in_order)
    if chosen == "moe_few_tokens":
        expected = -(-slots * experts // all_experts)
        delta = None if lora is None else expert_lora.up_delta(p, lora, layer, layer.up.rows, routed)
        activated = compute_few_tokens(p, out, layer, activation, routed, expected, delta)
        if lora is not None:
            expert_lora.add_to_sums(p, lora, out, activated, routed)
        return
    if tables is None:
        tables = sort_slots(p, routed.ids, experts, routed.first_expert)
    tile = tile_tokens(tokens, slots / all_experts)
    if lora is None and chosen == "moe_experts" and sums_slots(p, layer, routed, out, tile):
        stream_experts(p, layer, tables, activation, tile, out, routed)
        return
    delta = None if lora is None else expert_lora.up_delta(p, lora, layer, layer.up.rows, tables)
    ready = delta is not None
    found = run_experts(p, layer, tables, activation, all_experts, row_scale, chosen, delta, ready=ready)
    if lora is not None:
        expert_lora.add_down(p, lora, found.rows, found.activated_16_bits(layer.x.dtype), tables)
    sum_experts(p, out, found.rows, tables, routed.weights, found.down)


def sum_experts(
    p: Launches,
    out: torch.Tensor,
    rows: torch.Tensor,
    tables: Tables,
    weights: torch.Tensor | None,
    down: Projection,
) -> None:
    """Writes the weighted sum of the experts of each token to `out`, biases included."""
    p.add(
        MOE_FINALIZE,
        out,
        rows,
        tables.positions,
        weights=weights,
        offsets=None if down.bias is None else tables.offsets,
        bias=down.bias,
        columns=down.columns,
    )
