"""Cases of gated delta rules and selective state spaces."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs, Tolerance
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch

# CUDA kernels round the operands of products to bf16: of states near 1, errors of 0.004 were measured.
_STATES = {"final_state": Tolerance(2e-2, 2e-2)}
_HEADS = ("num_q_heads", "num_v_heads", "head_size")


def _decode(p: Namespace) -> dict[str, Any]:
    sizes = sizes_of(p, "batch_size", *_HEADS, dtype="input_dtype", state_dtype="state_dtype")
    return {**sizes, "seq_len": p.seq_len or 1}


def _drafts(p: Namespace) -> dict[str, Any]:
    return {**sizes_of(p, "batch_size", *_HEADS, dtype="input_dtype"), "seq_len": p.seq_len or 4}


def _prefill(p: Namespace) -> dict[str, Any]:
    return sizes_of(p, "batch_size", *_HEADS, seq_len="s_qo", dtype="input_dtype")


def _prefill_channels(p: Namespace) -> dict[str, Any]:
    sizes = sizes_of(
        p, "batch_size", "num_q_heads", "head_size", seq_len="s_qo", dtype="input_dtype", state_dtype="state_dtype"
    )
    return {**sizes, "num_v_heads": p.num_q_heads}


def _selective(p: Namespace) -> dict[str, Any]:
    same = ("batch_size", "nheads", "dim", "dstate", "ngroups", "has_z", "dt_softplus")
    return {**sizes_of(p, *same, state_dtype="state_dtype", dtype="input_dtype")}


def _layout(_: str, p: Namespace) -> str | None:
    return None if p.state_layout == "pretranspose" else "the case has states [B, HV, V, K] only"


def _float_states(_: str, p: Namespace) -> str | None:
    return None if p.state_dtype == "float32" else "the case has states of float32 only"


def _gates_are_given(backend: str, p: Namespace) -> str | None:
    if p.offsets_dtype != "int32":
        return "the case has offsets of int32 only"
    return "its routine computes the gates inside" if backend.startswith("flashinfer") else None


def _recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32: q, k, v [batch, tokens, heads, dim], gates [batch, tokens, heads], alpha also
    [.., K], state [batch, heads, V, K].
    """
    import torch

    group, state, outputs = v.shape[2] // q.shape[2], state.float(), []
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).repeat_interleave(group, 2) for x in (q, k))
    for t in range(q.shape[1]):
        state = state * alpha[:, t].reshape(*state.shape[:2], 1, -1)
        u = beta[:, t, :, None] * (v[:, t].float() - torch.einsum("bhvk,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhv,bhk->bhvk", u, k[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1).to(v.dtype), state


def _torch_prefill(x: Inputs) -> Any:
    """Sequences of one length."""
    rows = (x.cu_seqlens.numel() - 1, -1)
    q, k, v, g, beta = (x[name].unflatten(0, rows) for name in ("q", "k", "v", "g", "beta"))
    out, state = _recurrence(q, k, v, g, beta, x.initial_state)
    return out.flatten(0, 1), state


def _torch_gates(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    rate = torch.nn.functional.softplus(x.a.float() + x.dt_bias)
    return torch.exp(-x.A_log.exp() * rate), x.b.float().sigmoid()


def _torch_decode(x: Inputs) -> Any:
    out, state = _recurrence(x.q, x.k, x.v, *_torch_gates(x), x.state)
    return out, x.state.copy_(state)


def _torch_drafts(x: Inputs) -> Any:
    slots = x.initial_state_indices.long()
    out, state = _recurrence(x.q, x.k, x.v, *_torch_gates(x), x.initial_state[slots])
    x.initial_state[slots] = state
    return out, x.initial_state


def _torch_selective(x: Inputs) -> Any:
    from torch.nn.functional import silu, softplus

    slots, group = x.state_batch_indices.long(), x.state.shape[1] // x.B.shape[1]
    b, c = (t.float().repeat_interleave(group, 1) for t in (x.B, x.C))
    step = x.dt.float() + x.dt_bias
    step = (softplus(step) if x.dt_softplus else step)[..., None]
    state = x.state[slots].float() * (step * x.A).exp() + step * x.x.float()[..., None] * b[:, :, None]
    x.state[slots] = state.to(x.state.dtype)
    out = (state * c[:, :, None]).sum(-1) + x.D * x.x.float()
    return (out if x.z is None else out * silu(x.z.float())).to(x.x.dtype), x.state


CASES = (
    described(
        "gdn_decode.gated_delta_rule_decode_pretranspose",
        _decode,
        None,
        _torch_decode,
        routine="gated_delta_rule_decode",
        op="recurrent_gated_delta_rule",
        unsupported=_layout,
    ),
    described(
        "gdn_decode.gated_delta_rule_mtp",
        _drafts,
        None,
        _torch_drafts,
        op="recurrent_gated_delta_rule",
        unsupported=_float_states,
    ),
    described(
        "gdn_prefill.chunk_gated_delta_rule",
        _prefill,
        None,
        _torch_prefill,
        op="chunk_gated_delta_rule",
        which=lambda _, template: "gate:channel" not in template.tags,
        unsupported=_float_states,
        tolerance=_STATES,
    ),
    described(
        "gdn_prefill.chunk_gated_delta_rule",
        _prefill_channels,
        None,
        _torch_prefill,
        op="chunk_gated_delta_rule",
        routine="recurrent_kda_prefill",
        which=lambda _, template: "gate:channel" in template.tags,
        unsupported=_gates_are_given,
        tolerance=_STATES,
    ),
    described("mamba.selective_state_update", _selective, None, _torch_selective, op="selective_state_update"),
)
