"""The gated delta rule of drafted tokens whose states stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.gdn_kernels import gdn_decode_bf16_state

if TYPE_CHECKING:
    import torch

__all__ = ["gated_delta_rule_mtp"]


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
    """`gdn_kernels.gated_delta_rule_mtp` that writes no state, whatever disable_state_update is.

    Args:
        A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices,
            use_qk_l2norm_in_kernel, scale, output, accepted_steps, disable_output, recovery_steps: as there.
        output_state_indices, intermediate_states_buffer, ssm_state_indices: None: no state is written.
        disable_state_update: accepted.

    Returns:
        output.

    Raises:
        ValueError: a place for states is given, or as there.
        TypeError: a dtype is wrong.
    """
    written: dict[str, Any] = {
        "output_state_indices": output_state_indices,
        "intermediate_states_buffer": intermediate_states_buffer,
        "ssm_state_indices": ssm_state_indices,
    }
    for name, tensor in written.items():
        if tensor is not None:
            raise ValueError(f"{name}: None is required; got a tensor; gdn_kernels.gated_delta_rule_mtp writes states")
    return gdn_decode_bf16_state.gated_delta_rule_mtp(
        A_log,
        a,
        dt_bias,
        softplus_beta,
        softplus_threshold,
        q,
        k,
        v,
        b,
        initial_state_source,
        initial_state_indices,
        accepted_steps=accepted_steps,
        disable_state_update=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        output=output,
        disable_output=disable_output,
        recovery_steps=recovery_steps,
    )
