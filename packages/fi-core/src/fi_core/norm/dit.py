"""LayerNorms of diffusion transformers: behind a residual, with the modulation of the time step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def _check(input: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises unless the tensors fit: in 16 bits like input, or fp32 rows of its width by a name that ends in `_row`."""
    import torch

    if input.ndim != 3 or input.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"input must be bfloat16 or float16 of shape [batch, num_rows, hidden_dim]; got {input.dtype}, "
            f"{list(input.shape)}"
        )
    for name, x in others.items():
        if x is None:
            continue
        row, name = name.endswith("_row"), name.removesuffix("_row")
        kind = torch.float32 if row else input.dtype
        shapes = [(input.shape[-1],), (1, input.shape[-1])] if row else [tuple(input.shape)]
        if not row and x.ndim == 2 and input.shape[0] == 1:
            shapes.append(tuple(input.shape[1:]))
        if x.dtype is not kind or tuple(x.shape) not in shapes:
            raise ValueError(f"{name} must be {kind} of shape {list(shapes[0])}; got {x.dtype}, {list(x.shape)}")


def _refuse(use_nvfp4: bool, use_mxfp8: bool, *tensors: torch.Tensor | None) -> None:
    """Raises for a quantized form. tensors: the two factors and sf_out."""
    given = (use_nvfp4, use_mxfp8, *(x is not None for x in tensors))
    names = ("use_nvfp4", "use_mxfp8", "global_scaling_factor", "input_global_scaling_factor", "sf_out")
    if any(given):
        raise UnsupportedError(
            f"{', '.join(name for name, is_given in zip(names, given) if is_given)}: "
            "results have the dtype of input; call nvfp4_quantize or mxfp8_quantize on norm_out"
        )


def _layer_norm(
    x: torch.Tensor, epsilon: float, gamma: torch.Tensor | None = None, beta: torch.Tensor | None = None
) -> torch.Tensor:
    import torch

    if not epsilon >= 0:
        raise ValueError(f"epsilon must be 0 or more; got {epsilon}")
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gamma, beta, epsilon)


def _biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.float() if bias is None else x.float() + bias


def _gated(
    input: torch.Tensor, residual: torch.Tensor, gate: torch.Tensor, gate_bias: torch.Tensor | None
) -> torch.Tensor:
    """`residual + input * (gate + gate_bias)` in fp32."""
    return residual.float() + input.float() * _biased(gate, gate_bias)


def _written(wide: torch.Tensor, input: torch.Tensor, name: str, out: torch.Tensor | None) -> torch.Tensor:
    """The result in the dtype of input: in `out` if the caller gave it."""
    if out is None:
        return wide.to(input.dtype)
    if out.shape != input.shape or out.dtype is not input.dtype:
        raise ValueError(
            f"{name} must be {input.dtype} of shape {list(input.shape)}; got {out.dtype}, {list(out.shape)}"
        )
    return out.copy_(wide)


def _modulated(
    total: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    scale_bias: torch.Tensor | None,
    shift_bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    normed = _layer_norm(total, epsilon)
    return normed * (1 + _biased(scale, scale_bias)) + _biased(shift, shift_bias)


@fi_api
def fused_dit_gate_residual_layernorm_gamma_beta(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `r = residual + input * (gate + gate_bias)` and `LayerNorm(r) * gamma + beta`, in fp32.

    Each result is rounded once; the norm is that of the unrounded r. It consists of torch's operators.

    Args:
        input: `[batch, num_rows, hidden_dim]`, bf16 or fp16, as all others without a dtype; any hidden_dim and strides.
        residual: like input.
        gate: like input, such as a chunk of the modulation; `[num_rows, hidden_dim]` if batch is 1.
        gamma: `[hidden_dim]`, fp32.
        beta: `[hidden_dim]`, fp32.
        gate_bias: `[hidden_dim]` or `[1, hidden_dim]`, fp32; None: 0.
        epsilon: of the LayerNorm.
        use_nvfp4: must be False, as use_mxfp8; scales of quantized inputs and outputs must be None.
        residual_out: receives r; allocated if None.
        norm_out: receives the norm; allocated if None.

    Returns:
        residual_out: r, like input.
        norm_out: like input.

    Raises:
        ValueError: a shape or dtype is wrong.
        UnsupportedError: a quantized input or output.
    """

    _refuse(use_nvfp4, use_mxfp8, global_scaling_factor, input_global_scaling_factor, sf_out)
    _check(input, residual=residual, gate=gate, gamma_row=gamma, beta_row=beta, gate_bias_row=gate_bias)
    total = _gated(input, residual, gate, gate_bias)
    normed = _layer_norm(total, epsilon, gamma.view(-1), beta.view(-1))
    return _written(total, input, "residual_out", residual_out), _written(normed, input, "norm_out", norm_out)


@fi_api
def fused_dit_gate_residual_layernorm_scale_shift(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fused_dit_gate_residual_layernorm_gamma_beta`, with a scale and a shift for each row.

    `norm_out = LayerNorm(r) * (1 + scale + scale_bias) + shift + shift_bias`.

    Args:
        input: `[batch, num_rows, hidden_dim]`, bf16 or fp16, as all others without a dtype.
        residual: like input.
        gate: like input; `[num_rows, hidden_dim]` if batch is 1, as scale and shift.
        scale: likewise.
        shift: likewise.
        gate_bias: `[hidden_dim]` or `[1, hidden_dim]`, fp32; None: 0, as the other two.
        scale_bias: likewise.
        shift_bias: likewise.
        epsilon: of the LayerNorm.
        use_nvfp4: must be False, as use_mxfp8; scales of quantized inputs and outputs must be None.
        residual_out: receives r; allocated if None.
        norm_out: receives the norm; allocated if None.

    Returns:
        residual_out, norm_out: like input.

    Raises:
        ValueError: a shape or dtype is wrong.
        UnsupportedError: a quantized input or output.
    """
    _refuse(use_nvfp4, use_mxfp8, global_scaling_factor, input_global_scaling_factor, sf_out)
    biases = {"gate_bias_row": gate_bias, "scale_bias_row": scale_bias, "shift_bias_row": shift_bias}
    _check(input, residual=residual, gate=gate, scale=scale, shift=shift, **biases)
    total = _gated(input, residual, gate, gate_bias)
    normed = _modulated(total, scale, shift, scale_bias, shift_bias, epsilon)
    return _written(total, input, "residual_out", residual_out), _written(normed, input, "norm_out", norm_out)


@fi_api
def fused_dit_residual_layernorm_scale_shift(
    input: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fused_dit_gate_residual_layernorm_scale_shift`, with `r = residual + input`, or `r = input` without residual.

    Args:
        input: `[batch, num_rows, hidden_dim]`, bf16 or fp16, as all others without a dtype.
        scale: like input; `[num_rows, hidden_dim]` if batch is 1, as shift.
        shift: likewise.
        residual: like input, or None.
        scale_bias: `[hidden_dim]` or `[1, hidden_dim]`, fp32; None: 0, as shift_bias.
        shift_bias: likewise.
        epsilon: of the LayerNorm.
        use_nvfp4: must be False, as use_mxfp8; scales of quantized inputs and outputs must be None.
        residual_out: receives r; allocated if None.
        norm_out: receives the norm; allocated if None.

    Returns:
        residual_out, norm_out: like input.

    Raises:
        ValueError: a shape or dtype is wrong.
        UnsupportedError: a quantized input or output.
    """
    _refuse(use_nvfp4, use_mxfp8, global_scaling_factor, input_global_scaling_factor, sf_out)
    _check(input, residual=residual, scale=scale, shift=shift, scale_bias_row=scale_bias, shift_bias_row=shift_bias)
    total = input.float() if residual is None else input.float() + residual.float()
    normed = _modulated(total, scale, shift, scale_bias, shift_bias, epsilon)
    return _written(total, input, "residual_out", residual_out), _written(normed, input, "norm_out", norm_out)
