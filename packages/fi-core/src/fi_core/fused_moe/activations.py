"""The activation of an expert from the arguments of the public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.fused_moe.layer import Activation
from fi_core.tllm_enums import ActivationType

if TYPE_CHECKING:
    import torch

UNBOUNDED = 3.4e38  # as alpha of Situ: the linear projection is not bounded, see kUnbounded of the kernels

_NAMES = ("alpha", "beta", "limit", "clamped_relu2_limit", "situ_beta", "situ_linear_beta")
_CONSTANTS = {  # that an activation has
    ActivationType.Swiglu: _NAMES[:3],
    ActivationType.SwigluBias: _NAMES[:3],
    ActivationType.SwigluStep: ("limit",),
    ActivationType.Situ: ("situ_beta", "situ_linear_beta"),
    ActivationType.ClampedRelu2: ("clamped_relu2_limit",),
}


def kind_of(activation_type: int) -> ActivationType:
    """The kind of an activation. Raises ValueError for what is none."""
    try:
        kind = ActivationType(activation_type)
    except ValueError:
        kind = ActivationType.InvalidType
    if kind is ActivationType.InvalidType:
        raise ValueError(f"activation_type must be a value of ActivationType; got {activation_type!r}")
    return kind


def _of_situ(
    name: str, value: float | torch.Tensor | None, default: float, experts: int
) -> tuple[torch.Tensor | None, float]:
    """A constant of Situ as (fp32 of each expert, number)."""
    if value is None or isinstance(value, (int, float)):
        if value == 0:
            raise ValueError(f"{name} must not be 0 for Situ, which divides by it; got 0")
        return None, default if value is None else float(value)
    if value.numel() not in (1, experts):
        raise ValueError(f"{name} must be a number, or have 1 or {experts} elements; got {list(value.shape)}")
    return value.reshape(-1).float().expand(experts).contiguous(), default


def _short(value: float | torch.Tensor) -> str:
    return f"{value}" if isinstance(value, (int, float)) else f"a tensor {list(value.shape)}"


def activation_of(
    activation_type: int,
    alpha: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
    clamped_relu2_limit: float | None = None,
    situ_beta: float | torch.Tensor | None = None,
    situ_linear_beta: float | torch.Tensor | None = None,
    experts: int = 1,
    words: tuple[str, str, str] = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"),
) -> Activation:
    """The activation with its constants; alpha, beta or limit turn Swiglu into SwigluBias.

    The constants of Situ are numbers, or tensors of one element or of one for each of the experts. words: alpha, beta
    and limit as the caller names them.

    Raises:
        ValueError: activation_type is no activation, lacks its constant, or has none of a name; a constant is NaN, or 0
            for Situ.
    """
    kind = kind_of(activation_type)
    values = (alpha, beta, limit, clamped_relu2_limit, situ_beta, situ_linear_beta)
    for name, said, value in zip(_NAMES, (*words, *_NAMES[3:]), values):
        if value is not None and name not in _CONSTANTS.get(kind, ()):
            takers = " or ".join(taker.name for taker, taken in _CONSTANTS.items() if name in taken)
            raise ValueError(f"{said} must be None for {kind.name}: it is a constant of {takers}; got {_short(value)}")
        if isinstance(value, (int, float)) and value != value:
            raise ValueError(f"{said} must be a number; got NaN")
    if kind is ActivationType.Swiglu and not (alpha is None and beta is None and limit is None):
        kind = ActivationType.SwigluBias
    if kind is ActivationType.SwigluBias:
        return Activation(kind, alpha, beta, limit)
    if kind is ActivationType.SwigluStep:
        return Activation(kind, limit=limit, limit_value=7.0)
    if kind is ActivationType.Situ:
        alpha, alpha_value = _of_situ("situ_linear_beta", situ_linear_beta, 25.0, experts)
        beta, beta_value = _of_situ("situ_beta", situ_beta, 4.0, experts)
        return Activation(kind, alpha, beta, alpha_value=alpha_value, beta_value=beta_value)
    if kind is ActivationType.ClampedRelu2:
        if clamped_relu2_limit is None or not clamped_relu2_limit > 0:
            raise ValueError(f"clamped_relu2_limit must be positive for ClampedRelu2; got {clamped_relu2_limit}")
        return Activation(kind, limit_value=clamped_relu2_limit)
    return Activation(kind)
