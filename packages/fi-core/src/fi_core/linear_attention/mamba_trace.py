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


def _checkpointing_reference(  # type: ignore[no-untyped-def]
    state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, D, z, dt_bias,
    state_batch_indices, dt_softplus=False,
):  # fmt: skip
    import torch

    batch, tokens = x.shape[:2]
    ring, group = x_cache.shape[2], x.shape[2] // B.shape[2]
    output, pool = x.double(), state.double()
    rings = [t.clone() for t in (x_cache, B_cache, dt_cache)]
    for i in range(batch):
        slot = int(state_batch_indices[i])
        if slot < 0:
            continue  # rows of padding are not written
        held = int(prev_num_accepted_tokens[slot])
        s = pool[slot].clone()
        for j in range(held + tokens):
            row, t = (int(ring_start[slot]) + j) % ring, j - held
            if t == 0 and held + 2 * tokens > ring:
                pool[slot] = s
            if t >= 0:
                step = dt[i, t, :, 0].double() + dt_bias[:, 0].double()
                rings[0][slot, :, row], rings[1][slot, :, row] = x[i, t], B[i, t]
                rings[2][slot, :, row] = torch.nn.functional.softplus(step) if dt_softplus else step
            value, key = rings[0][slot, :, row].double(), rings[1][slot, :, row].double().repeat_interleave(group, 0)
            step = rings[2][slot, :, row].double()[:, None, None]
            s = s * torch.exp(step * A.double()) + step * value[..., None] * key[:, None]
            if t >= 0:
                y = (s * C[i, t].double().repeat_interleave(group, 0)[:, None]).sum(-1) + D.double() * value
                output[i, t] = y * torch.nn.functional.silu(z[i, t].double())
    return output, pool, *rings


@sized(
    dtype="bfloat16", state_dtype="float32", batch_size=3, seq_len=4, ring=12, nheads=4, dim=64, dstate=128, ngroups=2,
    dt_softplus=True,
)  # fmt: skip
def _make_checkpointing(draw: Draw, s: Any) -> dict[str, Any]:
    """Of each slot some tokens are held: as many as a server has on average."""
    slots, tokens, heads = s.batch_size, (s.batch_size, s.seq_len), (s.nheads, s.dim)
    room = s.ring - s.seq_len

    def of_heads(x: Any, *shape: int) -> Any:
        return x.view(*x.shape, *[1] * (len(shape) - x.ndim)).expand(shape)

    held = draw.integers(0, room + 1, (slots,)) if draw.nasty else draw.integers(s.seq_len, s.seq_len + 1, (slots,))
    x, z = (draw.rows(draw.normal((*tokens, *heads), s.dtype)) for _ in range(2))
    b, c = (draw.rows(draw.normal((*tokens, s.ngroups, s.dstate), s.dtype)) for _ in range(2))
    return {
        "state": draw.rows(draw.normal((slots, *heads, s.dstate), s.state_dtype)),
        "x_cache": draw.rows(draw.normal((slots, s.nheads, s.ring, s.dim), s.dtype)),
        "B_cache": draw.rows(draw.normal((slots, s.ngroups, s.ring, s.dstate), s.dtype)),
        "dt_cache": draw.normal((slots, s.nheads, s.ring), "float32").abs(),
        "ring_start": draw.integers(0, s.ring, (slots,)),
        "prev_num_accepted_tokens": held,
        "x": x,
        "dt": of_heads(draw.normal((*tokens, s.nheads), s.dtype).abs(), *tokens, *heads),
        "A": of_heads(-draw.normal((s.nheads,), "float32").abs(), *heads, s.dstate),
        "B": b,
        "C": c,
        "out": draw.rows(draw.normal((*tokens, *heads), s.dtype)),
        "D": of_heads(draw.normal((s.nheads,), "float32"), *heads),
        "z": z,
        "dt_bias": of_heads(draw.normal((s.nheads,), "float32").abs(), *heads),
        "dt_softplus": s.dt_softplus,
        "state_batch_indices": draw.permutation(slots),
    }


def _checkpointing_work(arguments: Mapping[str, Any]) -> Work:
    """Reads the states of the batch, inputs and held tokens, writes outputs and rings; and the states where it must."""
    state, x, b = (arguments[name] for name in ("state", "x", "B"))
    held, ring = arguments["prev_num_accepted_tokens"], arguments["x_cache"].shape[2]
    slots, tokens = arguments["state_batch_indices"].long(), x.shape[1]
    moved = nbytes(x, b) * 2 + nbytes(*(arguments[name] for name in ("C", "z", "out")))
    each = (x[:1, :1].numel() + b[:1, :1].numel()) * x.element_size()  # of a held token
    stored = int((held[slots] + 2 * tokens > ring).sum())
    replayed = int(held[slots].sum())
    states = (slots.numel() + stored) * state[:1].numel() * state.element_size()
    return Work(6 * state[:1].numel() * (slots.numel() * tokens + replayed), states + moved + replayed * each)


CHECKPOINTING = TraceTemplate(
    "mamba_ssu",
    name_prefix="checkpointing_ssu",
    axes={
        **{name: Var() for name in ("batch_size", "seq_len", "num_slots", "ring_len")},
        "nheads": Const(abbrev="h"),
        "dim": Const(abbrev="d"),
        "dstate": Const(abbrev="s"),
        "ngroups": Const(abbrev="ng"),
    },
    inputs={
        **tensors(state="num_slots nheads dim dstate", x_cache="num_slots nheads ring_len dim"),
        **tensors(B_cache="num_slots ngroups ring_len dstate", dt_cache="num_slots nheads ring_len"),
        **tensors(ring_start="num_slots", prev_num_accepted_tokens="num_slots"),
        **tensors(x="batch_size seq_len nheads dim", dt="batch_size seq_len nheads dim", A="nheads dim dstate"),
        **tensors(B="batch_size seq_len ngroups dstate", C="batch_size seq_len ngroups dstate", D="nheads dim"),
        **tensors(z="batch_size seq_len nheads dim", dt_bias="nheads dim", state_batch_indices="batch_size"),
        **options(bool="dt_softplus"),
    },
    outputs={
        "output": Tensor(["batch_size", "seq_len", "nheads", "dim"], param="out", dtype_from="x"),
        "state": Tensor(["num_slots", "nheads", "dim", "dstate"], param="state", dtype_from="state"),
        "x_cache": Tensor(["num_slots", "nheads", "ring_len", "dim"], param="x_cache", dtype_from="x"),
        "B_cache": Tensor(["num_slots", "ngroups", "ring_len", "dstate"], param="B_cache", dtype_from="x"),
        "dt_cache": Tensor(["num_slots", "nheads", "ring_len"], param="dt_cache", dtype="float32"),
    },
    reference=_checkpointing_reference,
    op="checkpointing_ssu",
    make=_make_checkpointing,
    samples=samples(
        {
            "dtype": ("bfloat16", "float16"),
            "state_dtype": ("float32", "bfloat16"),
            "seq_len, ring, dim, dstate": ((4, 16, 64, 128), (1, 5, 40, 64), (6, 16, 16, 256)),
        }
    ),
    work=_checkpointing_work,
    tolerance={"state": (1e-2, 1e-2)},
    others=words(
        "pad_slot_id state_scale rand_seed philox_rounds d_split cu_seqlens max_seqlen cb_scaled cumAdt_vec cb_old",
        "precompute_heads_per_cta algorithm enable_pdl",
    ),
    description="Mamba-2: new tokens from a state and a ring of the inputs behind it.",
)


def _ssd_reference(x, dt, A, B, C, D, dt_bias, cu_seqlens, initial_states, z=None, dt_softplus=False):  # type: ignore[no-untyped-def]
    import torch

    output, states, heads = x.double() * 0, initial_states.double(), x.shape[2]
    b, c = (t[0].double().repeat_interleave(heads // t.shape[2], 1) for t in (B, C))
    step = dt[0].double() + dt_bias.double()
    step = (torch.nn.functional.softplus(step) if dt_softplus else step).clamp(min=0)
    for i, (first, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        s = states[i]
        for t in range(first, end):
            added = (step[t, :, None] * x[0, t].double())[..., None] * b[t, :, None]
            s = torch.exp(step[t] * A.double())[:, None, None] * s + added
            output[0, t] = (s * c[t, :, None]).sum(-1) + D.double()[:, None] * x[0, t].double()
        states[i] = s
    return output if z is None else output * torch.nn.functional.silu(z.double()), states


@sized(
    dtype="bfloat16", state_dtype="float32", batch_size=3, seq_len=70, nheads=4, dim=64, dstate=128, ngroups=2,
    has_z=True, dt_softplus=True,
)  # fmt: skip
def _make_ssd(draw: Draw, s: Any) -> dict[str, Any]:
    lengths = [s.seq_len] * s.batch_size
    if draw.nasty and s.batch_size > 1:  # one sequence is longer, one empty
        lengths[:2] = [2 * s.seq_len, 0]
    rows = (1, sum(lengths))
    x, z = (draw.rows(draw.normal((*rows, s.nheads, s.dim), s.dtype)) for _ in range(2))
    b, c = (draw.rows(draw.normal((*rows, s.ngroups, s.dstate), s.dtype)) for _ in range(2))
    bias = draw.normal((s.nheads,), "float32")
    steps = draw.normal((*rows, s.nheads), s.dtype)
    return {
        "x": x,
        "dt": draw.rows(steps if s.dt_softplus else steps.abs()),
        "A": -draw.normal((s.nheads,), "float32").abs(),
        "B": b,
        "C": c,
        "D": draw.normal((s.nheads,), s.dtype),
        "z": z if s.has_z else None,
        "dt_bias": bias if s.dt_softplus else bias.abs(),
        "dt_softplus": s.dt_softplus,
        "cu_seqlens": draw.offsets(lengths),
        "initial_states": draw.rows(draw.normal((s.batch_size, s.nheads, s.dim, s.dstate), s.state_dtype)),
    }


def _ssd_work(arguments: Mapping[str, Any]) -> Work:
    """The recurrence as products: of each element of a state for each token an update and a product."""
    x, states = arguments["x"], arguments["initial_states"]
    given = [arguments.get(name) for name in ("x", "dt", "B", "C", "z")]
    moved = nbytes(*(t for t in given if t is not None), x) + 2 * nbytes(states)
    return Work(4 * x.numel() * states.shape[-1], moved)


def _written_ssd(cu_seqlens: Any, x: Any, **_: Any) -> dict[str, Any]:
    """Tokens of no sequence are not written."""
    import torch

    token = torch.arange(x.shape[1], device=x.device)
    return {"output": ((token >= cu_seqlens[0]) & (token < cu_seqlens[-1])).view(1, -1, 1, 1)}


SSD = TraceTemplate(
    "mamba_ssd",
    name_prefix="ssd_combined_fwd",
    axes={
        **{name: Var() for name in ("batch_size", "total_tokens", "num_seqs", "len_cu_seqlens")},
        "nheads": Const(abbrev="h"),
        "dim": Const(abbrev="d"),
        "dstate": Const(abbrev="s"),
        "ngroups": Const(abbrev="ng"),
    },
    inputs={
        **tensors(x="batch_size total_tokens nheads dim", dt="batch_size total_tokens nheads", A="nheads"),
        **tensors(B="batch_size total_tokens ngroups dstate", C="batch_size total_tokens ngroups dstate"),
        **tensors(D="nheads", dt_bias="nheads", cu_seqlens="len_cu_seqlens"),
        **tensors(initial_states="num_seqs nheads dim dstate"),
        **tensors({"optional": True}, z="batch_size total_tokens nheads dim"),
        **options(bool="dt_softplus"),
    },
    outputs={
        "output": Tensor(["batch_size", "total_tokens", "nheads", "dim"], dtype_from="x"),
        "final_states": Tensor(["num_seqs", "nheads", "dim", "dstate"], dtype_from="initial_states"),
    },
    reference=_ssd_reference,
    op="ssd_combined",
    make=_make_ssd,
    written=_written_ssd,
    samples=samples(
        {
            "dtype": ("bfloat16", "float16"),
            "has_z, dt_softplus": ((True, True), (False, False)),
            "dim, dstate": ((64, 128), (32, 16), (128, 80)),
        }
    ),
    work=_ssd_work,
    # Products take operands of 16 bits: an fp64 emulation of their rounding to bf16 lies 0.68 and 0.054 beyond the
    # relative part, over 18 draws of up to 400 tokens.
    tolerance={"output": (2e-2, 8e-1), "final_states": (1e-2, 6e-2)},
    others=words(
        "dt_limit seq_idx chunk_indices chunk_offsets seq_chunk_cumsum update_seq_chunk_cumsum num_seqs final_states",
        "checkpoint_token_indices checkpoint_state_slots checkpoint_states return_final_states initial_state_indices",
        "final_state_indices",
    ),
    description="Mamba-2: selective state spaces over packed sequences, with softplus of dt and a gate.",
)
