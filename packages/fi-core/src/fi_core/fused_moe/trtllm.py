"""Layers with the router inside, in the layouts of weights of TensorRT-LLM's kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from fi_core.fused_moe.core import get_reorder_rows_for_gated_act_gemm_row_indices
from fi_core.fused_moe.launches import compute_layer, run_experts, sort_slots
from fi_core.fused_moe.layer import Layer, Projection, Tables, TokenExperts
from fi_core.fused_moe.ops import moe_finalize
from fi_core.tllm_enums import WeightLayout, is_gated_activation
from fi_core.utils import get_shuffle_matrix_a_row_indices

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation
    from fi_core.fused_moe.routing import Routed


class LayerCall(NamedTuple):
    """What every form says of a call: the experts, their width, and the result."""

    num_experts: int  # of all ranks
    intermediate_size: int
    local_expert_offset: int
    local_num_experts: int
    do_finalize: bool
    output: torch.Tensor | None


_BLOCK_BYTES = 128  # of a row in BlockMajorK


@functools.lru_cache(maxsize=256)
def places_of_rows(rows: int, tile: int, alternates: bool, device: torch.device) -> torch.Tensor:
    """Where prepared weights hold each row: shuffled for an epilogue tile, after gate and linear rows alternate."""
    import torch

    order = get_shuffle_matrix_a_row_indices(torch.empty(rows, 1), tile)
    if alternates:
        order = get_reorder_rows_for_gated_act_gemm_row_indices(torch.empty(rows, 1))[order]
    return order.argsort().int().to(device)


def check_layout(name: str, weight: torch.Tensor, layout: int) -> None:
    """Raises unless a weight has the shape of its layout."""
    layout = WeightLayout(layout)
    if layout is WeightLayout.MajorK:
        if weight.ndim != 3:
            raise ValueError(f"{name} must have shape [experts, n, k] in layout MajorK; got {list(weight.shape)}")
        return
    if layout is not WeightLayout.BlockMajorK:
        raise NotImplementedError("weight_layout MajorMn is not supported: use MajorK or BlockMajorK")
    if weight.ndim != 4 or weight.shape[3] * weight.element_size() != _BLOCK_BYTES:
        raise ValueError(
            f"{name} must have shape [experts, k / b, n, b] with b of {_BLOCK_BYTES} bytes in layout BlockMajorK; got "
            f"{weight.dtype} {list(weight.shape)}"
        )


def _check(layer: Layer, kind: int, routed: Routed, call: LayerCall) -> None:
    """Raises ValueError unless weights, slots and the output have the sizes of the call."""
    (tokens, hidden), (ids, weights) = layer.x.shape, routed
    columns = call.intermediate_size * (2 if is_gated_activation(kind) else 1)
    for name, p, rows, k in (
        ("gemm1_weights", layer.up, columns, hidden),
        ("gemm2_weights", layer.down, hidden, call.intermediate_size),
    ):
        if (len(p.weight), p.rows, p.columns_of_k) != (call.local_num_experts, rows, k):
            raise ValueError(
                f"{name} must be of {call.local_num_experts} experts, {rows} rows and {k} columns; got "
                f"{list(p.weight.shape)}"
            )
    if not 1 <= call.local_num_experts <= call.num_experts:
        raise ValueError(f"local_num_experts must be in 1..{call.num_experts}; got {call.local_num_experts}")
    for name, x in (("topk_ids", ids), ("topk_ids[1]", weights)):
        if x.ndim != 2 or x.shape[0] != tokens or x.shape != ids.shape or not x.shape[1]:
            raise ValueError(f"{name} must have shape [{tokens}, top_k], top_k at least 1; got {list(x.shape)}")
    output, device = call.output, layer.x.device
    if output is not None and (output.shape != (tokens, hidden) or output.device != device):
        raise ValueError(
            f"output must have shape [{tokens}, {hidden}] on {device}; got {list(output.shape)} on {output.device}"
        )


def _finished_rows(rows: torch.Tensor, tables: Tables, down: Projection) -> torch.Tensor:
    """The outputs of the experts with columns in order and biases; zeros in rows of no expert."""
    import torch

    if down.columns is None and down.bias is None:
        return rows
    out = torch.empty_like(rows)
    moe_finalize(
        out, rows, _identity(len(rows), rows.device), offsets=tables.offsets, bias=down.bias, columns=down.columns
    )
    return out


@functools.lru_cache(maxsize=64)
def _identity(rows: int, device: torch.device) -> torch.Tensor:
    """`[rows, 1]`: each row's own number."""
    import torch

    return torch.arange(rows, dtype=torch.int32, device=device).view(-1, 1)


def _weights_of_rows(routed: Routed, tables: Tables) -> torch.Tensor:
    """The routing weights of the sorted rows, fp32."""
    import torch

    slots = tables.rows.shape[0]
    out = torch.ones(slots + 1, dtype=torch.float32, device=tables.rows.device)
    at = torch.where(tables.positions < 0, slots, tables.positions).flatten().long()
    at.clamp_(max=slots)  # a dry run, which begins to compile kernels, has no positions yet
    return out.scatter_(0, at, routed.weights.float().flatten())[:slots]


def run_layer(
    layer: Layer, activation: Activation, routed: Routed, call: LayerCall, *, scales_input: bool = False
) -> torch.Tensor | list[torch.Tensor]:
    """The layer's `[tokens, hidden]`, or without do_finalize what is to be summed.

    Returns:
        output; or `[rows [slots, hidden], weights [tokens, top_k] bf16, expanded_idx_to_permuted_idx [slots] int32]`,
        -1 for slots of other ranks' experts.
    """
    import torch

    _check(layer, activation.kind, routed, call)
    (ids, weights), first, output = routed, call.local_expert_offset, call.output
    tables = row_scale = None
    if scales_input or not call.do_finalize:
        tables = sort_slots(ids, call.local_num_experts, first)
        row_scale = _weights_of_rows(routed, tables) if scales_input else None
        if not call.do_finalize:
            rows, down = run_experts(layer, tables, activation, call.num_experts, row_scale)
            return [_finished_rows(rows, tables, down), weights.bfloat16(), tables.positions.view(-1)]
    if output is None:
        output = torch.empty(layer.x.shape, dtype=layer.dtype, device=layer.x.device)
    to_sum = TokenExperts(ids, None if scales_input else weights, first)
    compute_layer(output, layer, activation, call.num_experts, to_sum, tables, row_scale)
    return output


def prepared(
    p: Projection, name: str, layout: int, tile: int, alternates: bool, shuffled: bool, bias: torch.Tensor | None
) -> Projection:
    """A projection from a weight in a layout, its rows shuffled for a tile."""
    check_layout(name, p.weight, layout)
    if not shuffled:
        return p._replace(bias=bias)
    columns = places_of_rows(p.rows, tile, alternates, p.weight.device)
    return p._replace(columns=columns, bias=bias, shuffle_tile=tile)
