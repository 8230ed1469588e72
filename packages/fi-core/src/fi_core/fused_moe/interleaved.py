"""Layers of 16-bit weights whose linear and gate rows alternate by 32, and whose experts the caller has chosen."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from fi_core.fused_moe.activations import UNBOUNDED
from fi_core.fused_moe.launches import compute_layer
from fi_core.fused_moe.layer import TOKENS, Activation, Layer, Projection, TokenExperts
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse
from fi_core.runtime.launch.plan import Launches, plans_launches
from fi_core.tllm_enums import (
    DEFAULT_SWIGLU_ALPHA,
    DEFAULT_SWIGLU_BETA,
    DEFAULT_SWIGLU_LIMIT,
    ActivationType,
    is_gated_activation,
)

if TYPE_CHECKING:
    import torch

_GROUP = 32  # rows of the linear projection before those of their gates


@functools.lru_cache(maxsize=64)
def _places_of_rows(width: int, device: torch.device) -> torch.Tensor:
    """Where a weight holds the rows of the linear projection, then those of the gate."""
    import torch

    linear = torch.arange(width).view(-1, _GROUP) + torch.arange(0, width, _GROUP)[:, None]
    return torch.cat((linear.flatten(), linear.flatten() + _GROUP)).int().to(device)


def _activation(
    activation_type: int,
    alpha: float,
    beta: float,
    limit: float,
    situ_beta: float | None,
    situ_linear_beta: float | None,
) -> Activation:
    """Raises ValueError for another activation than Swiglu, GegluTanh and Relu2, and for constants without sense."""
    allowed = ActivationType.Swiglu, ActivationType.GegluTanh, ActivationType.Relu2
    if activation_type not in allowed:
        raise ValueError(
            f"activation_type must be one of {[a.name for a in allowed]}; got {activation_type!r}: cutlass_fused_moe "
            "computes the others"
        )
    for name, value, positive in (
        ("swiglu_alpha", alpha, False),
        ("swiglu_beta", beta, False),
        ("swiglu_limit", limit, True),
        ("situ_beta", situ_beta, True),
        ("situ_linear_beta", situ_linear_beta, True),
    ):
        if value is not None and not (math.isfinite(value) and (value > 0 or not positive)):
            raise ValueError(f"{name} must be finite{' and positive' if positive else ''}; got {value}")
    if situ_beta is None and situ_linear_beta is not None:
        raise ValueError("situ_linear_beta must be given with situ_beta only")
    kind = ActivationType(activation_type)
    if situ_beta is not None:
        if kind is not ActivationType.Swiglu:
            raise ValueError(f"situ_beta must be None with {kind.name}; it changes Swiglu")
        linear = UNBOUNDED if situ_linear_beta is None else situ_linear_beta
        return Activation(ActivationType.Situ, alpha_value=linear, beta_value=situ_beta)
    if kind is ActivationType.Swiglu and (alpha, beta, limit) != (1.0, 0.0, DEFAULT_SWIGLU_LIMIT):
        return Activation(ActivationType.SwigluBias, alpha_value=alpha, beta_value=beta, limit_value=limit)
    return Activation(kind)


@fi_api
@plans_launches("moe_output", by="x", tokens={**TOKENS, "x": 0, "moe_output": 0})
def cute_dsl_fused_moe_bf16(
    p: Launches,
    x: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    w1_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    num_experts: int,
    top_k: int,
    num_local_experts: int | None = None,
    local_expert_offset: int = 0,
    use_fused_finalize: bool = True,
    moe_output: torch.Tensor | None = None,
    enable_pdl: bool = True,
    activation_type: int = ActivationType.Swiglu,
    swiglu_alpha: float = DEFAULT_SWIGLU_ALPHA,
    swiglu_beta: float = DEFAULT_SWIGLU_BETA,
    swiglu_limit: float = DEFAULT_SWIGLU_LIMIT,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    intermediate_buffer: torch.Tensor | None = None,
    tactic: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """Computes a mixture of experts in 16 bits: `out[t] = sum over j of scales[t, j] w2_e act(w1_e x[t])`.

    It runs the kernels of `cutlass_fused_moe`, so the result is the same in every run.

    Args:
        x: `[tokens, hidden]`, bf16 or fp16; any number of tokens, 0 too.
        token_selected_experts: `[tokens, top_k]`, int32, of all ranks' experts; those of other ranks add 0.
        token_final_scales: `[tokens, top_k]`, fp32.
        w1_weight: x's dtype; `[experts here, 2 inter, hidden]`, 32 rows of the linear projection and then the 32 of
            their gates, inter a multiple of 32; for Relu2 `[experts here, inter, hidden]`.
        w2_weight: `[experts here, hidden, inter]`.
        num_experts: of all ranks.
        top_k: experts of a token.
        num_local_experts: experts here; None means num_experts.
        local_expert_offset: number of the first expert here.
        use_fused_finalize, enable_pdl, intermediate_buffer: accepted; sums have an order, and memory between kernels
            comes from torch.
        moe_output: `[tokens, hidden]`, x's dtype; allocated if None.
        activation_type: Swiglu, GegluTanh or Relu2.
        swiglu_alpha, swiglu_beta, swiglu_limit: `g sigmoid(alpha g) (u + beta)` with g at most limit, u within +-limit.
        situ_beta, situ_linear_beta: with Swiglu, `b tanh(g / b) sigmoid(g) l tanh(u / l)`, or u without l.
        tactic: None.

    Returns:
        moe_output.

    Raises:
        ValueError: a shape, device or number does not fit; the text names the argument.
        TypeError: a dtype does not fit.
        NotImplementedError: a tactic is given.
    """
    import torch

    refuse("leave it out: kernels are chosen by the number of tokens", tactic=tactic)
    activation = _activation(activation_type, swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta)
    gated, local = is_gated_activation(activation.kind), num_experts if num_local_experts is None else num_local_experts
    for name, t, axes in (("x", x, 2), ("w1_weight", w1_weight, 3), ("w2_weight", w2_weight, 3)):
        if t.dtype not in (torch.bfloat16, torch.float16) or t.dtype is not x.dtype:
            raise TypeError(f"{name} must be bfloat16, or all three float16; got {t.dtype}")
        if t.ndim != axes:
            raise ValueError(f"{name} must have {axes} dimensions; got {list(t.shape)}")
    (tokens, hidden), width = x.shape, w2_weight.shape[2]
    if gated and width % _GROUP:
        raise ValueError(f"w2_weight must have a multiple of {_GROUP} columns; got {list(w2_weight.shape)}")
    for name, t, shape in (
        ("w1_weight", w1_weight, (local, width * (1 + gated), hidden)),
        ("w2_weight", w2_weight, (local, hidden, width)),
        ("token_selected_experts", token_selected_experts, (tokens, top_k)),
        ("token_final_scales", token_final_scales, (tokens, top_k)),
        *([] if moe_output is None else [("moe_output", moe_output, (tokens, hidden))]),
    ):
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}; got {list(t.shape)}")
    if moe_output is None:
        moe_output = p.result(x.shape, x.dtype)
    elif moe_output.dtype is not x.dtype:
        raise TypeError(f"moe_output must be {x.dtype}, as x; got {moe_output.dtype}")
    if tokens:
        columns = p.constant(_places_of_rows(width, p.device)) if gated else None
        layer = Layer(x, Projection(w1_weight, columns=columns), Projection(w2_weight), x.dtype)
        routed = TokenExperts(token_selected_experts, token_final_scales, local_expert_offset)
        compute_layer(p, moe_output, layer, activation, num_experts, routed)
    return moe_output


class CuteDslBf16MoEWrapper:
    """Keeps what `cute_dsl_fused_moe_bf16` takes besides tensors, under the names that it has there.

    Args:
        hidden_size, intermediate_size: columns of x and of w2_weight.
        output_dtype: of x and of the result.
        others: as for `cute_dsl_fused_moe_bf16`.

    Raises:
        ValueError: an activation or a constant does not fit.
    """

    @fi_api
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        num_local_experts: int | None = None,
        local_expert_offset: int = 0,
        output_dtype: torch.dtype | None = None,
        enable_pdl: bool = True,
        use_fused_finalize: bool = True,
        activation_type: int = ActivationType.Swiglu,
        swiglu_alpha: float = DEFAULT_SWIGLU_ALPHA,
        swiglu_beta: float = DEFAULT_SWIGLU_BETA,
        swiglu_limit: float = DEFAULT_SWIGLU_LIMIT,
        situ_beta: float | None = None,
        situ_linear_beta: float | None = None,
    ) -> None:
        import torch

        _activation(activation_type, swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta)
        self._sizes = hidden_size, intermediate_size
        self._dtype = torch.bfloat16 if output_dtype is None else output_dtype
        self._options: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "num_local_experts": num_local_experts,
            "local_expert_offset": local_expert_offset,
            "use_fused_finalize": use_fused_finalize,
            "enable_pdl": enable_pdl,
            "activation_type": activation_type,
            "swiglu_alpha": swiglu_alpha,
            "swiglu_beta": swiglu_beta,
            "swiglu_limit": swiglu_limit,
            "situ_beta": situ_beta,
            "situ_linear_beta": situ_linear_beta,
        }

    @fi_api
    def run(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        w1_weight: torch.Tensor,
        w2_weight: torch.Tensor,
        tactic: tuple[Any, ...] | None = None,
        moe_output: torch.Tensor | None = None,
        intermediate_buffer: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `cute_dsl_fused_moe_bf16`. Raises ValueError or TypeError unless x and w2_weight are as described."""
        if x.dtype is not self._dtype:
            raise TypeError(f"x must be {self._dtype}, the wrapper's output_dtype; got {x.dtype}")
        for name, found, wanted in zip(("x", "w2_weight"), (x.shape[-1], w2_weight.shape[-1]), self._sizes):
            if found != wanted:
                raise ValueError(f"{name} must have {wanted} columns, as the wrapper says; got {found}")
        result: torch.Tensor = cute_dsl_fused_moe_bf16(
            x,
            token_selected_experts,
            token_final_scales,
            w1_weight,
            w2_weight,
            moe_output=moe_output,
            tactic=tactic,
            intermediate_buffer=intermediate_buffer,
            **self._options,
        )
        return result
