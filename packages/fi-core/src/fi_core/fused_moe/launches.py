"""The experts of a layer, from rows sorted by expert to the weighted sum: the kernels that every public form calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.fused_moe.layer import Scratch, Tables
from fi_core.fused_moe.moe_experts import stream_experts, sums_slots
from fi_core.fused_moe.moe_few_tokens import compute_few_tokens, takes_slots
from fi_core.fused_moe.moe_layer import compose_layer, expected_rows, tile_tokens
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


class Rows(NamedTuple):
    """Values `[slots, k]`, and the scales of e4m3 ones: of blocks of them, or of rows."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


class _Grouped(NamedTuple):
    """The products of all experts with the sorted rows."""

    layer: Layer
    tables: Tables
    scratch: Scratch
    expected: int  # rows of an expert

    def rows(self, width: int) -> Rows:
        """Memory for operands of a product."""
        import torch

        layer, slots = self.layer, self.tables.rows.shape[0]
        values = self.scratch.new((slots, width), torch.float8_e4m3fn if layer.quantizes else layer.dtype)
        return Rows(values, self.scratch.new((slots, width // _BLOCK), torch.float32) if layer.blocks else None)

    def product(self, p: Projection, x: Rows, rows: torch.Tensor | None = None) -> torch.Tensor:
        """`[slots, n]`. rows: the tokens of the sorted rows, where x has a row for each token."""
        out = self.scratch.new((self.tables.rows.shape[0], p.rows), self.layer.dtype)
        offsets, expected = self.tables.offsets, self.expected
        if p.mixed is None:
            gemm(out, x.values, p.weight, x.scale, p.scale, m_indptr=offsets, expected_m=expected, b_constant=True)
            return out
        assert p.scale is not None
        factor = p.mixed.input_scale
        moe_mixed_gemm(out, x.values if factor is None else x.values * factor, p.weight, p.scale, offsets, rows=rows,
                       alpha=p.mixed.alpha, format=p.mixed.format, layout=p.mixed.layout,
                       expected_m=expected)  # fmt: skip
        return out


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
    scratch = scratch or Scratch(None, layer.x.device)
    slots = tables.rows.shape[0]
    chosen = chosen or compose_layer(layer, slots, activation, all_experts, row_scale is not None, False)
    mean = slots / all_experts
    if chosen == "moe_experts":
        rows = stream_experts(layer, tables, activation, tile_tokens(layer.x.shape[0], mean), scratch)
        return rows, layer.down._replace(columns=None)
    layer = layer._replace(up=layer.up.by_rows(), down=layer.down.by_rows())
    grouped = _Grouped(layer, tables, scratch, expected_rows(mean, layer.quantizes))
    up, a, out = layer.up, activation, grouped.rows(activation.width(layer.up.rows))
    if up.mixed is None:
        gathered = grouped.rows(layer.x.shape[1])
        moe_gather(gathered.values, gathered.scale, layer.x, layer.x_scale, tables.positions)
        if chosen == "moe_gated_gemm":
            moe_gated_gemm(out.values, out.scale, gathered.values, gathered.scale, up.weight, weight_scale=up.scale,
                           offsets=tables.offsets, bias=up.bias, expected_m=grouped.expected,
                           **a.options())  # fmt: skip
            return grouped.product(layer.down, out), layer.down
        projected = grouped.product(up, gathered if layer.blocks else Rows(gathered.values, row_scale))
    else:
        projected = grouped.product(up, Rows(layer.x), tables.rows)
    moe_activation(out.values, out.scale, projected, tables.offsets, bias=up.bias, quant=layer.quant,
                   columns=up.columns, **a.options())  # fmt: skip
    return grouped.product(layer.down, out), layer.down


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
