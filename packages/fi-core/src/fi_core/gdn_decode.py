"""Decoding with a gated delta rule: one or a few tokens of each request, with the gates computed inside."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fi_core.linear_attention.ops import recurrent_gated_delta_rule
from fi_core.linear_attention.trace import DECODE, PRETRANSPOSE, drafts
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse

if TYPE_CHECKING:
    import torch

__all__ = ["gated_delta_rule_decode", "gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp"]

_BACKENDS = ("auto", "flashinfer", "cake_gdn", "rubin")


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")


def _output(output: torch.Tensor | None, q: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    return q.new_empty((*q.shape[:2], heads, v.shape[-1])) if output is None else output


def _scale(scale: float | None, q: torch.Tensor) -> float:
    return (q.shape[-1] or 1) ** -0.5 if scale is None else scale


@fi_api(trace=PRETRANSPOSE)
def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Updates states `[HV, V, K]` by one or more tokens of each request, and reads them (arXiv:2412.06464).

    For each token and head: `S *= alpha`, `u = beta (v - S k)`, `S += u k^T`, `output = scale S q`, all in fp32, with
    `alpha = exp(-exp(A_log) softplus(a + dt_bias))` and `beta = sigmoid(b)`.

    Args:
        q, k: `[B, T, H, K]`, bf16 or fp16; H divides HV: that many consecutive value heads share a head.
        v: `[B, T, HV, V]`, dtype of q.
        state: `[B, HV, V, K]`, fp32 or bf16, updated in place; None with a pool of states.
        A_log: `[HV]`, fp32.
        a: `[B, T, HV]`, or `[B, T, HV, K]` with a gate for each channel (Kimi Delta Attention).
        dt_bias: `[HV]`, or `[HV, K]` with a gate for each channel.
        b: `[B, T, HV]`.
        scale: of q; None means `1 / sqrt(K)`.
        output: `[B, T, HV, V]`, dtype of q; allocated if None.
        use_qk_l2norm: whether q and k are divided by `sqrt(sum(x^2) + 1e-6)` first.
        initial_state: a pool `[P, HV, V, K]` of states, instead of `state`.
        initial_state_indices: `[B]`, int32 or int64, the slot of each request. A negative index is padding: output is
            0, and no state is read or written.
        output_state_indices: `[B]`, the slots to write, if others than those read; negative ones are not written.
        intermediate_states_buffer: `[>= B, >= T, HV, V, K]`, dtype of the state; receives the state after each token.
        disable_state_update: whether the states stay as they are.
        backend: "auto", "flashinfer", "cake_gdn" or "rubin"; all of them select the kernels of this library.

    Returns:
        output, and state or the pool.

    Raises:
        ValueError: a shape, stride, device or the backend is wrong, or not exactly one of state and initial_state is
            given.
        TypeError: a dtype is wrong.
    """
    _check_backend(backend)
    if (state is None) == (initial_state is None):
        raise ValueError("exactly one of state and initial_state must be given")
    pool = state if initial_state is None else initial_state
    assert pool is not None
    if initial_state is not None and initial_state_indices is None:
        raise ValueError("initial_state_indices must be given with initial_state")
    output = _output(output, q, v, pool.shape[1])
    recurrent_gated_delta_rule(
        output,
        pool,
        q,
        k,
        v,
        A_log=A_log,
        a=a,
        dt_bias=dt_bias,
        b=b,
        scale=_scale(scale, q),
        use_qk_l2norm=use_qk_l2norm,
        state_indices=initial_state_indices,
        output_state_indices=output_state_indices,
        intermediate_states=intermediate_states_buffer,
        update_state=not disable_state_update,
    )
    return output, pool


@fi_api(trace=DECODE)
def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Updates states with V last by one token of each request, and reads them.

    Args:
        q, k: `[B, 1, H, K]`, bf16 or fp16.
        v: `[B, 1, HV, V]`, dtype of q; V is a multiple of 4.
        state: `[B, HV, K, V]`, fp32, updated in place.
        A_log, a, dt_bias, b, scale, use_qk_l2norm, backend: as in gated_delta_rule_decode_pretranspose.
        output: `[B, 1, HV, V]`, dtype of q; allocated if None.

    Returns:
        output, state.

    Raises:
        ValueError: a shape, stride, device or the backend is wrong.
        TypeError: a dtype is wrong.
    """
    _check_backend(backend)
    if q.ndim != 4 or q.shape[1] != 1:
        raise ValueError(f"q must have shape [B, 1, H, K]; got {list(q.shape)}")
    output = _output(output, q, v, state.shape[1])
    recurrent_gated_delta_rule(
        output,
        state.mT,
        q,
        k,
        v,
        A_log=A_log,
        a=a,
        dt_bias=dt_bias,
        b=b,
        scale=_scale(scale, q),
        use_qk_l2norm=use_qk_l2norm,
    )
    return output, state


@fi_api(trace=drafts)
def gated_delta_rule_mtp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: torch.Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verifies T drafted tokens of each request: reads a state of a pool, and keeps the states between if asked to.

    Args:
        q, k: `[B, T, H, K]`, bf16 or fp16.
        v: `[B, T, HV, V]`, dtype of q.
        initial_state: a pool `[P, HV, V, K]`, fp32 or bf16.
        initial_state_indices: `[B]`, int32 or int64; a negative index is padding: output is 0, and no state is read or
            written.
        A_log, a, dt_bias, b, scale, use_qk_l2norm, backend: as in gated_delta_rule_decode_pretranspose.
        output: `[B, T, HV, V]`, dtype of q; allocated if None.
        intermediate_states_buffer: `[>= B, >= T, HV, V, K]`, dtype of the pool; receives the state after each token.
        ssm_state_indices: `[B, T]`, the slot of the pool that receives the state after each token; negative ones are
            skipped. The last state goes nowhere else.
        disable_state_update: whether the slots that were read stay as they are. None means True, with a warning.
        output_state_indices: `[B]`, the slots of the last states, if others than those read.
        cache_replayssm, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta: False and None: the states after
            each token are kept, not what they are computed from.

    Returns:
        output, initial_state.

    Raises:
        ValueError: a shape, stride, device or the backend is wrong; both intermediate_states_buffer and
            ssm_state_indices are given; or ssm_state_indices come without disable_state_update=False.
        TypeError: a dtype is wrong.
        NotImplementedError: cache_replayssm or one of its caches is given.
    """
    _check_backend(backend)
    refuse(
        "keep the state after each token in intermediate_states_buffer",
        cache_replayssm=cache_replayssm,
        replayssm_rawv=replayssm_rawv,
        replayssm_rawk=replayssm_rawk,
        replayssm_g=replayssm_g,
        replayssm_beta=replayssm_beta,
    )
    if disable_state_update is None:
        warnings.warn("disable_state_update is None, which means True: pass it explicitly", stacklevel=2)
        disable_state_update = True
    if ssm_state_indices is not None and intermediate_states_buffer is not None:
        raise ValueError("at most one of intermediate_states_buffer and ssm_state_indices may be given")
    if ssm_state_indices is not None and disable_state_update:
        raise ValueError("disable_state_update must be False with ssm_state_indices")
    output = _output(output, q, v, initial_state.shape[1])
    recurrent_gated_delta_rule(
        output,
        initial_state,
        q,
        k,
        v,
        A_log=A_log,
        a=a,
        dt_bias=dt_bias,
        b=b,
        scale=_scale(scale, q),
        use_qk_l2norm=use_qk_l2norm,
        state_indices=initial_state_indices,
        output_state_indices=output_state_indices,
        intermediate_states=intermediate_states_buffer,
        token_state_indices=ssm_state_indices,
        update_state=not disable_state_update,
    )
    return output, initial_state
