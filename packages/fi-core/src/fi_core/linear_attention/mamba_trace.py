"""Trace templates of Mamba-2 layers: references, inputs and work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fi_core.observe.draw import FLOATS, Draw, nbytes
from fi_core.observe.trace import Const, Tensor, TraceTemplate, Var, Work, options, samples, sized, tensors, words


def _conv_reference(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state):  # type: ignore[no-untyped-def]
    import torch

    width = weight.shape[1]
    output, states = x.double() * 0, conv_states.clone()
    for i, (first, end) in enumerate(zip(query_start_loc.tolist(), query_start_loc.tolist()[1:])):
        slot = int(cache_indices[i])
        if slot < 0 or first == end:
            continue
        before = conv_states[slot][:, : width - 1]
        inputs = torch.cat([before if has_initial_state[i] else torch.zeros_like(before), x[:, first:end]], 1)
        windows = inputs.double().unfold(1, width, 1)
        y = (windows * weight.double()[:, None]).sum(-1) + bias.double()[:, None]
        output[:, first:end] = torch.nn.functional.silu(y)
        states[slot][:, : width - 1] = inputs[:, inputs.shape[1] - width + 1 :]
    return output, states


def _conv_update_reference(x, conv_state, weight, bias, conv_state_indices, activation="silu"):  # type: ignore[no-untyped-def]
    import torch

    width, real = weight.shape[1], conv_state_indices >= 0
    slots = conv_state_indices[real].long()
    inputs = torch.cat([conv_state[slots][:, :, : width - 1], x[real]], 2)
    output, states = x.double() * 0, conv_state.clone()
    y = (inputs.double().unfold(2, width, 1) * weight.double()[:, None]).sum(-1) + bias.double()[:, None]
    output[real] = torch.nn.functional.silu(y)
    kept = states[slots]
    kept[:, :, : width - 1] = inputs[:, :, inputs.shape[2] - width + 1 :]
    states[slots] = kept
    return output, states


def _conv_weights(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "weight": draw.normal((s.dim, s.width), s.dtype, 0.5),
        "bias": draw.normal((s.dim,), s.dtype),
    }


def _conv_states(draw: Draw, s: Any) -> Any:
    """`[slots, dim, width - 1]` whose channels lie next to each other."""
    return draw.rows(draw.normal((s.batch_size + 1, s.width - 1, s.dim), s.dtype)).transpose(1, 2)


_CONV_SIZES: dict[str, Any] = {"dtype": "bfloat16", "batch_size": 3, "dim": 136, "width": 4}


@sized(**_CONV_SIZES, seq_len=70)
def _make_conv(draw: Draw, s: Any) -> dict[str, Any]:
    lengths = [s.seq_len] * s.batch_size
    if draw.nasty and s.batch_size > 2:
        lengths[:3] = [3 * s.seq_len - 2, 0, 2]
    return {
        "x": draw.rows(draw.normal((sum(lengths), s.dim), s.dtype)).t(),
        **_conv_weights(draw, s),
        "conv_states": _conv_states(draw, s),
        "query_start_loc": draw.offsets(lengths),
        "cache_indices": draw.permutation(s.batch_size + 1)[: s.batch_size].contiguous(),
        "has_initial_state": draw.integers(0, 2, (s.batch_size,)).bool(),
    }


@sized(**_CONV_SIZES, seq_len=1)
def _make_conv_update(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "x": draw.rows(draw.normal((s.batch_size, s.seq_len, s.dim), s.dtype)).transpose(1, 2),
        "conv_state": _conv_states(draw, s),
        **_conv_weights(draw, s),
        "activation": "silu",
        "conv_state_indices": draw.permutation(s.batch_size + 1)[: s.batch_size].contiguous(),
    }


def _conv_work(arguments: Mapping[str, Any]) -> Work:
    """Reads inputs and the states of the batch, writes as much."""
    x, weight = arguments["x"], arguments["weight"]
    slots = arguments.get("cache_indices", arguments.get("conv_state_indices"))
    states = slots.shape[0] * weight.numel() // weight.shape[1] * (weight.shape[1] - 1) * x.element_size()
    return Work(2 * x.numel() * weight.shape[1], 2 * (nbytes(x) + states) + nbytes(weight))


def _written_conv(query_start_loc: Any, x: Any, **_: Any) -> dict[str, Any]:
    """Tokens of no sequence are not written."""
    import torch

    token = torch.arange(x.shape[1], device=x.device)
    return {"output": ((token >= query_start_loc[0]) & (token < query_start_loc[-1])).view(1, -1)}


_CONV_AXES: dict[str, Var | Const] = {
    "dim": Const(abbrev="d"),
    "width": Const(abbrev="w"),
    "num_slots": Var(),
    "state_len": Var(),
}
_CONV_TOLERANCE = {"float32": (1e-5, 1e-5)}

CONV = TraceTemplate(
    "causal_conv1d",
    name_prefix="causal_conv1d_fn",
    axes={"total_tokens": Var(), "num_seqs": Var(), "len_query_start_loc": Var(), **_CONV_AXES},
    inputs={
        **tensors(x="dim total_tokens", weight="dim width", bias="dim", conv_states="num_slots dim state_len"),
        **tensors(query_start_loc="len_query_start_loc", cache_indices="num_seqs", has_initial_state="num_seqs"),
    },
    outputs={
        "output": Tensor(["dim", "total_tokens"], dtype_from="x"),
        "state": Tensor(["num_slots", "dim", "state_len"], param="conv_states", dtype_from="x"),
    },
    reference=_conv_reference,
    op="causal_conv1d",
    make=_make_conv,
    written=_written_conv,
    samples=samples({"dtype": FLOATS, "width": (2, 3, 4, 5)}),
    work=_conv_work,
    tolerance=_CONV_TOLERANCE,
    others=words(
        "activation pad_slot_id null_block_id block_idx_first_scheduled_token block_idx_last_scheduled_token",
        "initial_state_idx num_computed_tokens block_size_to_align metadata validate_data",
    ),
    description="Causal depthwise convolution with silu over packed sequences, whose last inputs are kept.",
)

CONV_UPDATE = TraceTemplate(
    "causal_conv1d",
    name_prefix="causal_conv1d_update",
    axes={"batch_size": Var(), "seq_len": Var(), **_CONV_AXES},
    inputs={
        **tensors(x="batch_size dim seq_len", conv_state="num_slots dim state_len", weight="dim width", bias="dim"),
        **tensors(conv_state_indices="batch_size"),
        **options(string="activation"),
    },
    outputs={
        "output": Tensor(["batch_size", "dim", "seq_len"], dtype_from="x"),
        "state": Tensor(["num_slots", "dim", "state_len"], param="conv_state", dtype_from="x"),
    },
    reference=_conv_update_reference,
    op="causal_conv1d",
    make=_make_conv_update,
    samples=samples({"dtype": FLOATS, "seq_len": (1, 2, 5)}),
    work=_conv_work,
    tolerance=_CONV_TOLERANCE,
    others=words(
        "num_accepted_tokens query_start_loc max_query_len pad_slot_id null_block_id",
        "block_idx_last_scheduled_token initial_state_idx validate_data",
    ),
    description="Causal depthwise convolution with silu over the new tokens of each request.",
)
