"""Trace templates of linear attention: references, inputs and work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fi_core.observe.describe import with_sizes
from fi_core.observe.draw import FLOATS, Draw, nbytes
from fi_core.observe.trace import (
    Const,
    Scalar,
    Tensor,
    TraceTemplate,
    Var,
    Work,
    options,
    samples,
    sized,
    tensors,
    words,
)

_OPERATIONS = 6  # of an element of a state for each token: two products with vectors and an update


def _gated_delta_rule(q, k, v, alpha, beta, state, scale, l2norm):  # type: ignore[no-untyped-def]
    """One sequence: q, k [T, heads, K], v [T, heads, V], gates [T, heads], alpha also [T, heads, K], state
    [heads, V, K]; output and states.
    """
    import torch

    states, outputs = [], []
    for t in range(q.shape[0]):
        query, key = q[t], k[t]
        if l2norm:
            query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        state = state * alpha[t].reshape(len(state), 1, -1)
        u = beta[t, :, None] * (v[t] - (state @ key[..., None])[..., 0])
        state = state + u[..., None] * key[:, None, :]
        outputs.append(scale * (state @ query[..., None])[..., 0])
        states.append(state)
    return torch.stack(outputs) if outputs else v[:0], state, states


def _prefill_reference(q, k, v, g, beta, cu_seqlens, initial_state, use_qk_l2norm_in_kernel=False, scale=None):  # type: ignore[no-untyped-def]
    import torch

    heads, scale = initial_state.shape[1], scale or q.shape[-1] ** -0.5
    q, k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    output, state = torch.zeros_like(v), initial_state.double()
    for i, (first, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        own = slice(first, end)
        output[own], state[i], _ = _gated_delta_rule(
            q[own], k[own], v[own], g[own].double(), beta[own].double(), state[i], scale, use_qk_l2norm_in_kernel
        )
    return output, state


def _decode_reference(q, k, v, state, A_log, a, dt_bias, b, use_qk_l2norm=True, scale=None):  # type: ignore[no-untyped-def]
    import torch

    heads, scale = state.shape[1], scale or q.shape[-1] ** -0.5
    q, k, v = (x.double().repeat_interleave(heads // x.shape[2], 2) for x in (q, k, v))
    alpha = torch.exp(-A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double()))
    output, state = torch.zeros_like(v), state.double()
    for i in range(q.shape[0]):
        output[i], state[i], _ = _gated_delta_rule(
            q[i], k[i], v[i], alpha[i], b[i].double().sigmoid(), state[i], scale, use_qk_l2norm
        )
    return output, state


def _decode_v_last_reference(q, k, v, state, A_log, a, dt_bias, b, use_qk_l2norm=True, scale=None):  # type: ignore[no-untyped-def]
    output, state = _decode_reference(q, k, v, state.mT, A_log, a, dt_bias, b, use_qk_l2norm, scale)
    return output, state.mT


def _mtp_reference(  # type: ignore[no-untyped-def]
    q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, use_qk_l2norm=True, scale=None
):
    real, pool = initial_state_indices >= 0, initial_state.double()
    slots = initial_state_indices[real].long()
    output = v.double() * 0.0
    output[real], pool[slots] = _decode_reference(
        q[real], k[real], v[real], initial_state[slots], A_log, a[real], dt_bias, b[real], use_qk_l2norm, scale
    )
    return output, pool


def _selective_reference(  # type: ignore[no-untyped-def]
    state, x, dt, A, B, C, D, dt_bias, state_batch_indices, z=None, dt_softplus=False
):
    import torch

    real, pool, heads = state_batch_indices >= 0, state.double(), state.shape[1]
    slots, out = state_batch_indices[real].long(), x.double()  # rows of padding are not written
    x, dt, B, C = x[real], dt[real], B[real], C[real]
    b, c = (t.double().repeat_interleave(heads // t.shape[1], 1)[:, :, None, :] for t in (B, C))
    step = (dt.double() + dt_bias.double())[..., None]
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    pool[slots] = pool[slots] * torch.exp(step * A.double()) + step * x.double()[..., None] * b
    y = (pool[slots] * c).sum(-1) + D.double() * x.double()
    out[real] = y if z is None else y * torch.nn.functional.silu(z[real].double())
    return out, pool


def _written(slots: Any) -> dict[str, Any]:
    """A negative slot is padding; of rows that share a slot any may write it, after any has read it."""
    alone = (slots[:, None] == slots).sum(1) == 1
    return {"rows": (slots >= 0) & alone, "shared": slots[~alone & (slots >= 0)].unique().long()}


def _written_of_pool(slots: Any, pool: Any, ndim: int) -> dict[str, Any]:
    import torch

    found = _written(slots)
    state = torch.ones(pool.shape[0], dtype=torch.bool, device=pool.device)
    state[found["shared"]] = False
    return {"output": found["rows"].view(-1, *[1] * (ndim - 1)), "state": state.view(-1, 1, 1, 1)}


def _written_prefill(cu_seqlens: Any, v: Any, **_: Any) -> dict[str, Any]:
    """Tokens of no sequence are not written."""
    import torch

    token = torch.arange(v.shape[0], device=v.device)
    return {"output": ((token >= cu_seqlens[0]) & (token < cu_seqlens[-1])).view(-1, 1, 1)}


def _written_drafts(initial_state: Any, initial_state_indices: Any, q: Any, **_: Any) -> dict[str, Any]:
    return _written_of_pool(initial_state_indices, initial_state, q.ndim)


def _written_selective(state: Any, state_batch_indices: Any, x: Any, **_: Any) -> dict[str, Any]:
    return _written_of_pool(state_batch_indices, state, x.ndim)


def _heads(draw: Draw, rows: tuple[int, ...], dtype: Any, heads: tuple[int, int], size: int) -> dict[str, Any]:
    h, hv = heads
    unit = size**-0.5  # keys of length 1: without the norm in the kernel, longer ones let states explode
    given = {"q": (h, 1.0), "k": (h, unit), "v": (hv, 1.0)}
    return {name: draw.rows(draw.normal((*rows, n, size), dtype, scale)) for name, (n, scale) in given.items()}


_SIZES: dict[str, Any] = {"dtype": "bfloat16", "state_dtype": "float32", "batch_size": 3}


@sized(**_SIZES, seq_len=70, num_q_heads=2, num_v_heads=4, head_size=64, channels=False)
def _make_prefill(draw: Draw, s: Any) -> dict[str, Any]:
    lengths = [s.seq_len] * s.batch_size
    if draw.nasty and s.batch_size > 1:  # one sequence is longer, one empty
        lengths[:2] = [2 * s.seq_len, 0]
    rows = sum(lengths)
    of_channels = (s.head_size,) if s.channels else ()
    gates = (draw.normal((rows, s.num_v_heads, *more), "float32", 2.0).sigmoid() for more in (of_channels, ()))
    g, beta = (draw.special(x, 0.0, 1.0) for x in gates)
    states = (s.batch_size, s.num_v_heads, s.head_size, s.head_size)
    return {
        **_heads(draw, (rows,), s.dtype, (s.num_q_heads, s.num_v_heads), s.head_size),
        "g": g,
        "beta": beta,
        "cu_seqlens": draw.offsets(lengths),
        "use_qk_l2norm_in_kernel": True,
        "initial_state": draw.rows(draw.normal(states, s.state_dtype)),
        "output_final_state": True,
    }


@sized(**_SIZES, seq_len=1, num_q_heads=2, num_v_heads=4, head_size=128)
def _make_decode(draw: Draw, s: Any) -> dict[str, Any]:
    rows, heads = (s.batch_size, s.seq_len), (s.num_q_heads, s.num_v_heads)
    return {
        **_heads(draw, rows, s.dtype, heads, s.head_size),
        "state": draw.rows(draw.normal((s.batch_size, s.num_v_heads, s.head_size, s.head_size), s.state_dtype)),
        "A_log": draw.normal((s.num_v_heads,), "float32"),
        "a": draw.rows(draw.normal((*rows, s.num_v_heads), s.dtype)),
        "dt_bias": draw.normal((s.num_v_heads,), "float32"),
        "b": draw.special(draw.normal((*rows, s.num_v_heads), s.dtype), -100.0, 100.0),
    }


@sized(dtype="bfloat16", batch_size=3, seq_len=4, num_q_heads=2, num_v_heads=4, head_size=128)
def _make_mtp(draw: Draw, s: Any) -> dict[str, Any]:
    arguments = _make_decode(draw, **vars(s))
    del arguments["state"]
    pool = draw.normal((s.batch_size + 1, s.num_v_heads, s.head_size, s.head_size), "float32")
    slots = draw.permutation(s.batch_size + 1)[: s.batch_size].contiguous()
    found = {**arguments, "initial_state": draw.rows(pool), "initial_state_indices": slots}
    return {**found, "disable_state_update": False}


@sized(**_SIZES, nheads=4, dim=64, dstate=128, ngroups=2, has_z=True, dt_softplus=True)
def _make_selective(draw: Draw, s: Any) -> dict[str, Any]:
    def of_heads(x: Any, *shape: int) -> Any:
        """One number for each head."""
        return x.view(*x.shape, *[1] * (len(shape) - x.ndim)).expand(shape)

    def time_steps(*shape: int, kind: str) -> Any:
        """Positive, unless softplus makes them so: a negative step makes states grow without bound."""
        drawn = draw.normal(shape, kind)
        return drawn if s.dt_softplus else drawn.abs()

    x, z = (draw.rows(draw.normal((s.batch_size, s.nheads, s.dim), s.dtype)) for _ in range(2))
    b, c = (draw.rows(draw.normal((s.batch_size, s.ngroups, s.dstate), s.dtype)) for _ in range(2))
    return {
        "state": draw.rows(draw.normal((s.batch_size + 1, s.nheads, s.dim, s.dstate), s.state_dtype)),
        "x": x,
        "dt": of_heads(time_steps(s.batch_size, s.nheads, kind=s.dtype), s.batch_size, s.nheads, s.dim),
        "A": of_heads(-draw.normal((s.nheads,), "float32").abs(), s.nheads, s.dim, s.dstate),
        "B": b,
        "C": c,
        "z": z if s.has_z else None,
        "D": of_heads(draw.normal((s.nheads,), "float32"), s.nheads, s.dim),
        "dt_bias": of_heads(time_steps(s.nheads, kind="float32"), s.nheads, s.dim),
        "dt_softplus": s.dt_softplus,
        "state_batch_indices": draw.permutation(s.batch_size + 1)[: s.batch_size].contiguous(),
    }


def _work(arguments: Mapping[str, Any]) -> Work:
    """Reads the inputs and the states of the batch, writes these and the outputs."""
    found = dict(arguments)
    pool = next(found.pop(name) for name in ("state", "initial_state") if found.get(name) is not None)
    last = found["v"] if "v" in found else found["x"]
    slots = found.get("state_batch_indices", found.get("initial_state_indices"))
    states = pool.shape[0] if slots is None else slots.shape[0]
    elements = states * pool[:1].numel()
    tokens = last.numel() // last.shape[-1] // last.shape[-2]  # of all rows
    operations = _OPERATIONS * tokens * pool[:1].numel()
    dense = [x for x in found.values() if hasattr(x, "stride") and 0 not in x.stride()]
    return Work(operations, 2 * elements * pool.element_size() + nbytes(*dense, last))


_HEADS: dict[str, Var | Const] = {
    "num_q_heads": Const(abbrev="qk"),
    "num_k_heads": Const(abbrev=""),
    "num_v_heads": Const(abbrev="v"),
    "head_size": Const(abbrev="d"),
}
_ROWS = tensors(
    q="batch_size seq_len num_q_heads head_size",
    k="batch_size seq_len num_k_heads head_size",
    v="batch_size seq_len num_v_heads head_size",
)
_GATES: dict[str, Tensor | Scalar] = {
    **tensors(A_log="num_v_heads", dt_bias="num_v_heads"),
    **tensors(a="batch_size seq_len num_v_heads", b="batch_size seq_len num_v_heads"),
    **options(bool="use_qk_l2norm", float32="scale"),
}
_BATCH: dict[str, Var | Const] = {"batch_size": Var(), "seq_len": Var(), "num_slots": Var()}
_STATE = {"state": (1e-2, 1e-2)}  # of bf16; fp32 states are closer, see tests/families
_OUTPUT = Tensor(["batch_size", "seq_len", "num_v_heads", "head_size"], dtype_from="q")

_PREFILL = TraceTemplate(
    "gdn",
    name_prefix="gdn_prefill",
    axes={"total_tokens": Var(), "num_seqs": Var(), "len_cu_seqlens": Var(), **_HEADS},
    inputs={
        **tensors(q="total_tokens num_q_heads head_size", k="total_tokens num_k_heads head_size"),
        **tensors(v="total_tokens num_v_heads head_size", cu_seqlens="len_cu_seqlens"),
        **tensors(g="total_tokens num_v_heads", beta="total_tokens num_v_heads"),
        **tensors(initial_state="num_seqs num_v_heads head_size head_size"),
        **options(bool="use_qk_l2norm_in_kernel", float32="scale"),
    },
    outputs={
        "output": Tensor(["total_tokens", "num_v_heads", "head_size"], dtype_from="q"),
        "final_state": Tensor(["num_seqs", "num_v_heads", "head_size", "head_size"], dtype="float32"),
    },
    reference=(_gated_delta_rule, _prefill_reference),
    op="chunk_gated_delta_rule",
    make=_make_prefill,
    written=_written_prefill,
    samples=samples({"dtype": ("bfloat16", "float16"), "num_q_heads, num_v_heads": ((2, 4), (2, 2))}),
    work=_work,
    # CUDA kernels round operands of products to the dtype of q: in an emulation in fp64 states of bf16 calls are off by
    # up to 3.3e-3 (1 + |state|), of fp16 calls by 5e-4. On the CPU they are closer, see tests/families.
    tolerance={"final_state": (1e-2, 1e-2)},
    others=words("state_indices output_state_indices state_checkpoints checkpoint_cu_starts checkpoint_every_n_tokens"),
    description="Gated delta rule over packed sequences.",
)
_PREFILL_CHANNELS = dataclasses.replace(
    _PREFILL,
    name_prefix="kda_prefill",
    inputs={**_PREFILL.inputs, "g": Tensor(["total_tokens", "num_v_heads", "head_size"])},
    make=with_sizes(_make_prefill, ("channels",), channels=True),
    tags=("gate:channel",),
    description="Gated delta rule over packed sequences, with a gate for each channel of keys.",
)


def prefill(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate:
    """The template of the gates."""
    g = arguments.get("g")
    return _PREFILL_CHANNELS if g is not None and g.ndim == 3 else _PREFILL


prefill.templates = (_PREFILL, _PREFILL_CHANNELS)  # type: ignore[attr-defined]

PRETRANSPOSE = TraceTemplate(
    "gdn",
    name_prefix="gdn_decode",
    axes={"batch_size": Var(), "seq_len": Var(), **_HEADS},
    inputs={**_ROWS, "state": Tensor(["batch_size", "num_v_heads", "head_size", "head_size"]), **_GATES},
    outputs={
        "output": _OUTPUT,
        "state": Tensor(["batch_size", "num_v_heads", "head_size", "head_size"], param="state", dtype_from="state"),
    },
    reference=(_gated_delta_rule, _decode_reference),
    tags=("state_layout:k_last",),
    op="recurrent_gated_delta_rule",
    make=_make_decode,
    samples=samples({"dtype": ("bfloat16", "float16"), "state_dtype": ("float32", "bfloat16"), "seq_len": (1, 3)}),
    work=_work,
    tolerance=_STATE,
    others=words(
        "initial_state initial_state_indices output_state_indices intermediate_states_buffer disable_state_update"
    ),
    description="Gated delta rule for one or a few tokens of each request, on states with K last.",
)

DECODE = TraceTemplate(
    "gdn",
    name_prefix="gdn_decode_v_last",
    axes={"batch_size": Var(), "seq_len": Var(), **_HEADS},
    inputs={**_ROWS, "state": Tensor(["batch_size", "num_v_heads", "head_size", "head_size"]), **_GATES},
    outputs=PRETRANSPOSE.outputs,
    reference=(_gated_delta_rule, _decode_reference, _decode_v_last_reference),
    tags=("state_layout:v_last",),
    op="recurrent_gated_delta_rule",
    make=_make_decode,
    samples=samples({"dtype": ("bfloat16", "float16")}),
    work=_work,
    tolerance=_STATE,
    description="Gated delta rule for one token of each request, on states with V last.",
)

_DRAFTS = TraceTemplate(
    "gdn",
    name_prefix="gdn_mtp",
    axes={**_BATCH, **_HEADS},
    inputs={
        **_ROWS,
        **tensors(initial_state="num_slots num_v_heads head_size head_size", initial_state_indices="batch_size"),
        **_GATES,
    },
    outputs={
        "output": _OUTPUT,
        "state": Tensor(
            ["num_slots", "num_v_heads", "head_size", "head_size"], param="initial_state", dtype_from="initial_state"
        ),
    },
    reference=(_gated_delta_rule, _decode_reference, _mtp_reference),
    op="recurrent_gated_delta_rule",
    make=_make_mtp,
    written=_written_drafts,
    samples=samples({"dtype": ("bfloat16",), "seq_len": (1, 4)}),
    work=_work,
    tolerance=_STATE,
    others=words(
        "intermediate_states_buffer ssm_state_indices output_state_indices cache_replayssm replayssm_rawv "
        "replayssm_rawk replayssm_g replayssm_beta"
    ),
    description="Gated delta rule for drafted tokens, on a pool of states.",
)


def drafts(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of a call that writes its states; None, the default of the parameter, does not."""
    return _DRAFTS if arguments.get("disable_state_update") is False else None


drafts.templates = (_DRAFTS,)  # type: ignore[attr-defined]

SELECTIVE = TraceTemplate(
    "mamba_ssu",
    axes={
        **{name: Var() for name in ("batch_size", "num_slots")},
        "nheads": Const(abbrev="h"),
        "dim": Const(abbrev="d"),
        "dstate": Const(abbrev="s"),
        "ngroups": Const(abbrev="ng"),
    },
    inputs={
        **tensors(state="num_slots nheads dim dstate", x="batch_size nheads dim", dt="batch_size nheads dim"),
        **tensors(A="nheads dim dstate", B="batch_size ngroups dstate", C="batch_size ngroups dstate"),
        **tensors(D="nheads dim", dt_bias="nheads dim", state_batch_indices="batch_size"),
        **tensors({"optional": True}, z="batch_size nheads dim"),
        **options(bool="dt_softplus"),
    },
    outputs={
        "output": Tensor(["batch_size", "nheads", "dim"], dtype_from="x"),
        "state": Tensor(["num_slots", "nheads", "dim", "dstate"], param="state", dtype_from="state"),
    },
    reference=_selective_reference,
    op="selective_state_update",
    make=_make_selective,
    written=_written_selective,
    samples=samples(
        {
            "dtype": FLOATS,
            "state_dtype": ("float32", "bfloat16", "float16"),
            "has_z, dt_softplus": ((True, True), (False, False)),
        }
    ),
    work=_work,
    tolerance={**_STATE, "float32": (1e-5, 1e-4)},  # an output sums dstate terms of 10 that may cancel
    others=words(
        "pad_slot_id state_scale disable_state_update intermediate_states_buffer cache_steps rand_seed cu_seqlens",
        "intermediate_state_indices intermediate_state_scales dst_state_batch_indices num_accepted_tokens",
    ),
    description="Mamba-2: one step of selective state spaces, with softplus of dt and a gate.",
)
