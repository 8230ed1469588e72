"""The gated delta rule on a pool of bf16 states: one token, or T drafted tokens, of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core import gdn_decode

if TYPE_CHECKING:
    import torch

__all__ = [
    "gated_delta_rule",
    "gated_delta_rule_bf16state_cooprow",
    "gated_delta_rule_bf16state_cooprow_mtp",
    "gated_delta_rule_mtp",
]


def gated_delta_rule_mtp(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    accepted_steps: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
) -> torch.Tensor:
    """`gdn_decode.gated_delta_rule_mtp` with other names of its arguments.

    Args:
        A_log, a, dt_bias, q, k, v, b, scale, output: as there; q, k, v and b must be given.
        softplus_beta, softplus_threshold: 1 and 20, those of the kernels.
        initial_state_source: its `initial_state`, a pool `[P, HV, V, K]`; must be given.
        initial_state_indices: as there; must be given.
        output_state_indices, intermediate_states_buffer, ssm_state_indices, disable_state_update: as there.
        use_qk_l2norm_in_kernel: its `use_qk_l2norm`.
        accepted_steps, disable_output, recovery_steps: None, False and 0: states are not computed anew from tokens;
            keep those between in intermediate_states_buffer.

    Returns:
        output.

    Raises:
        ValueError: an argument is missing or not served, or a shape, stride or device is wrong.
        TypeError: a dtype is wrong.
    """
    for name, given, served in (
        ("softplus_beta", softplus_beta, 1.0),
        ("softplus_threshold", softplus_threshold, 20.0),
        ("accepted_steps", accepted_steps, None),
        ("disable_output", disable_output, False),
        ("recovery_steps", recovery_steps, 0),
    ):
        if given is not served and (served is None or given != served):
            instead = "" if name.startswith("softplus") else "; keep states in intermediate_states_buffer"
            raise ValueError(f"{name}: {served!r} is required; got {given!r}{instead}")
    tensors: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "b": b,
        "initial_state_source": initial_state_source,
        "initial_state_indices": initial_state_indices,
    }
    for name, tensor in tensors.items():
        if tensor is None:
            raise ValueError(f"{name}: a tensor is required; got None")
    tensors["initial_state"] = tensors.pop("initial_state_source")
    result, _ = gdn_decode.gated_delta_rule_mtp(
        A_log=A_log,
        a=a,
        dt_bias=dt_bias,
        **tensors,
        scale=scale,
        output=output,
        intermediate_states_buffer=intermediate_states_buffer,
        ssm_state_indices=ssm_state_indices,
        disable_state_update=disable_state_update,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        output_state_indices=output_state_indices,
    )
    return result


def gated_delta_rule(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """`gated_delta_rule_mtp` for one token of each request; its arguments are those there."""
    return gated_delta_rule_mtp(
        A_log,
        a,
        dt_bias,
        softplus_beta,
        softplus_threshold,
        q,
        k,
        v,
        b,
        initial_state_source=initial_state_source,
        initial_state_indices=initial_state_indices,
        output_state_indices=output_state_indices,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        output=output,
    )


gated_delta_rule_bf16state_cooprow = gated_delta_rule
gated_delta_rule_bf16state_cooprow_mtp = gated_delta_rule_mtp
