"""Layers with the router inside, in the layouts of weights of TensorRT-LLM's kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from fi_core.fused_moe.core import get_reorder_rows_for_gated_act_gemm_row_indices
from fi_core.fused_moe.launches import compute_layer, run_experts, sort_slots, sum_experts
from fi_core.fused_moe.layer import Layer, Projection, Tables, TokenExperts
from fi_core.fused_moe.moe_few_tokens import compute_few_tokens, takes_slots
from fi_core.fused_moe.moe_layer import compose_layer
from fi_core.fused_moe.ops import MOE_FINALIZE, MOE_GATHER
from fi_core.tllm_enums import WeightLayout, is_gated_activation, member
from fi_core.utils import get_shuffle_matrix_a_row_indices

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation
    from fi_core.fused_moe.routing import Routed
    from fi_core.runtime.launch.plan import Launches


class LayerCall(NamedTuple):
    """What every form says of a call: the experts, their width, and the result."""

    num_experts: int  # of all ranks
    intermediate_size: int
    local_expert_offset: int
    local_num_experts: int
    do_finalize: bool
    output: torch.Tensor | None
    gemm1_lora_delta: torch.Tensor | None = None


def shared_experts(count: int | None, num_experts: int, local_num_experts: int) -> int:
    """The number of shared experts; other ranks would add them too."""
    count = count or 0
    if count < 0 or (count and local_num_experts != num_experts):
        raise ValueError(
            f"num_fused_shared_experts must be 0 where {local_num_experts} of {num_experts} experts are here, else at "
            f"least 0; got {count}"
        )
    return count


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
    layout = member("weight_layout", WeightLayout, layout)
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


def check_tokens(routing_logits: torch.Tensor, hidden_states: torch.Tensor) -> None:
    """Raises ValueError unless each token has its logits."""
    if hidden_states.ndim and routing_logits.shape[:1] != hidden_states.shape[:1]:
        raise ValueError(
            f"routing_logits must have shape [{hidden_states.shape[0]}, num_experts]; got {list(routing_logits.shape)}"
        )


def check_scale_of_tokens(x: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raises ValueError unless quantized tokens have scales, and others have none."""
    quantized = x.element_size() == 1
    if quantized != (scale is not None):
        required = "given" if quantized else "None"
        got = "None" if scale is None else f"a tensor {list(scale.shape)}"
        raise ValueError(f"hidden_states_scale must be {required} with {x.dtype} hidden_states; got {got}")


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
    last = call.num_experts - call.local_num_experts
    if not 0 <= call.local_expert_offset <= last:
        of = f"{call.local_num_experts} of {call.num_experts} experts here"
        raise ValueError(f"local_expert_offset must be in 0..{last} with {of}; got {call.local_expert_offset}")
    for name, x in (("topk_ids", ids), ("topk_ids[1]", weights)):
        if x.ndim != 2 or x.shape[0] != tokens or x.shape != ids.shape or not x.shape[1]:
            raise ValueError(f"{name} must have shape [{tokens}, top_k], top_k at least 1; got {list(x.shape)}")
    output, device = call.output, layer.x.device
    if output is not None and (output.shape != (tokens, hidden) or output.device != device):
        raise ValueError(
            f"output must have shape [{tokens}, {hidden}] on {device}; got {list(output.shape)} on {output.device}"
        )


def _finished_rows(p: Launches, rows: torch.Tensor, tables: Tables, down: Projection) -> torch.Tensor:
    """The outputs of the experts with columns in order and biases, as a result; zeros in rows of no expert."""
    out = p.result(rows.shape, rows.dtype)
    identity = p.constant(_identity(len(rows), p.device))
    p.add(MOE_FINALIZE, out, rows, identity, offsets=tables.offsets, bias=down.bias, columns=down.columns)
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
    return out.scatter_(0, at, routed.weights.float().flatten())[:slots]


def _sort(p: Launches, out: torch.Tensor, x: torch.Tensor, positions: torch.Tensor) -> None:
    """Rows of slots to where the positions say."""
    p.add(MOE_GATHER, out, out_scale=None, x=x, x_scale=None, positions=positions.view(len(x), 1))


def _sorted_delta(p: Launches, layer: Layer, tables: Tables, delta: torch.Tensor) -> torch.Tensor:
    """The delta `[tokens, top_k, n]` in the order of the sorted rows. Raises for another shape or dtype."""
    slots, columns = tables.rows.shape[0], layer.up.rows
    expected = (*tables.positions.shape, columns)
    if tuple(delta.shape) != expected or not delta.is_contiguous() or delta.device != layer.x.device:
        raise ValueError(
            f"gemm1_lora_delta must be contiguous, of shape {list(expected)}, on {layer.x.device}; got "
            f"{list(delta.shape)} on {delta.device}"
        )
    if delta.dtype is not layer.dtype:
        raise TypeError(f"gemm1_lora_delta must be {layer.dtype}; got {delta.dtype}")
    rows = p.scratch((slots, columns), delta.dtype)
    _sort(p, rows, delta.view(slots, columns), tables.positions)
    return rows


def _run_with_delta(
    p: Launches, layer: Layer, activation: Activation, routed: Routed, call: LayerCall
) -> list[torch.Tensor]:
    """What `run_layer` returns with gemm1_lora_delta, computed by the kernels of the layer without it."""
    import torch

    (ids, weights), first, delta = routed, call.local_expert_offset, call.gemm1_lora_delta
    assert delta is not None
    positions = p.result((ids.numel(),), torch.int32)
    tables = sort_slots(p, ids, call.local_num_experts, first, positions)
    rows = _sorted_delta(p, layer, tables, delta)
    to_sum = TokenExperts(ids, weights, first)
    experts, columns, slots = call.num_experts, layer.up.rows, ids.numel()
    output = call.output
    if output is None and call.do_finalize:
        output = p.result(layer.x.shape, layer.dtype)
    in_order = output is not None and call.do_finalize and takes_slots(layer, to_sum, output)
    if compose_layer(p, layer, slots, activation, experts, False, in_order) == "moe_few_tokens":
        assert output is not None
        expected = -(-slots * call.local_num_experts // experts)
        own = compute_few_tokens(p, output, layer, activation, to_sum, expected, delta.view(slots, columns))
        activated = p.result(own.shape, own.dtype)
        _sort(p, activated, own, positions)
        return [output, positions, activated]
    found = run_experts(p, layer, tables, activation, experts, delta=rows, keeps_activated=True)
    activated = found.activated_16_bits(layer.dtype)
    if output is None or not call.do_finalize:
        finished = _finished_rows(p, found.rows, tables, found.down)
        return [finished, weights.bfloat16(), positions, activated]
    sum_experts(p, output, found.rows, tables, weights, found.down)
    return [output, positions, activated]


def run_layer(
    p: Launches, layer: Layer, activation: Activation, routed: Routed, call: LayerCall, *, scales_input: bool = False
) -> torch.Tensor | list[torch.Tensor]:
    """The layer's `[tokens, hidden]`, or without do_finalize what is to be summed.

    Returns:
        output; or `[rows [slots, hidden], weights [tokens, top_k] bf16, expanded_idx_to_permuted_idx [slots] int32]`,
        -1 for slots of other ranks' experts. With gemm1_lora_delta `[output, expanded_idx_to_permuted_idx, activated
        [slots, inter]]`, or those three and the activated values.
    """
    import torch

    _check(layer, activation.kind, routed, call)
    if call.gemm1_lora_delta is not None:
        return _run_with_delta(p, layer, activation, routed, call)
    (ids, weights), first, output = routed, call.local_expert_offset, call.output
    tables = row_scale = None
    if scales_input or not call.do_finalize:
        positions = None if call.do_finalize else p.result((ids.numel(),), torch.int32)
        tables = sort_slots(p, ids, call.local_num_experts, first, positions)
        row_scale = _weights_of_rows(routed, tables) if scales_input else None
        if positions is not None:
            found = run_experts(p, layer, tables, activation, call.num_experts, row_scale)
            return [_finished_rows(p, found.rows, tables, found.down), weights.bfloat16(), positions]
    if output is None:
        output = p.result(layer.x.shape, layer.dtype)
    to_sum = TokenExperts(ids, None if scales_input else weights, first)
    compute_layer(p, output, layer, activation, call.num_experts, to_sum, tables, row_scale)
    return output


def prepared(
    p: Launches, w: Projection, name: str, layout: int, tile: int, alternates: bool, shuffled: bool
) -> Projection:
    """A projection from a weight in a layout, its rows shuffled for a tile."""
    check_layout(name, w.weight, layout)
    if not shuffled:
        return w
    columns = p.constant(places_of_rows(w.rows, tile, alternates, p.device))
    return w._replace(columns=columns, shuffle_tile=tile)
