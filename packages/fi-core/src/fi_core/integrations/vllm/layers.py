"""vLLM's norms, activation, rotary embedding, products of few tokens, experts, gated delta nets and sampling on fi's
kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm.model_executor.layers.rotary_embedding as rotary
from vllm.ir import ops
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.quantization import register_quantization_config

import fi_core
from fi_core.integrations.vllm import gdn, linear, moe, qk_norm, reduced_norm, sampler

if TYPE_CHECKING:
    import torch

PROVIDER = "fi"
# Which differ in their angles only.
_ROTARY = ("RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding", "LinearScalingRotaryEmbedding")


def register() -> None:
    """Adds the provider "fi" of vLLM's norms, and replaces the layers that vLLM makes from now on."""
    _provide(ops.rms_norm, rms_norm, supports_norm)
    _provide(ops.fused_add_rms_norm, fused_add_rms_norm, supports_add_norm, inplace=True)
    _replace(GemmaRMSNorm, GemmaNorm)
    _replace(SiluAndMul, Activation)
    for name in _ROTARY:
        _replace(getattr(rotary, name), Rotary)
    _replace(rotary.DeepseekScalingRotaryEmbedding, DeepseekRotary)
    qk_norm.register(Rotary)
    linear.register()
    reduced_norm.register()
    sampler.register()
    gdn.register(_replace)
    for name, config in moe.register(_replace):
        register_quantization_config(name)(config)


def _provide(op: Any, norm: Any, supports: Callable[..., bool], **options: bool) -> None:
    # vLLM compares types, which are text in this module.
    norm.__signature__ = inspect.signature(op.impls["native"].impl_fn)
    op.register_impl(PROVIDER, supports_args=supports, **options)(norm)


def _replace(layer: Any, part: type) -> None:
    """Makes vLLM instantiate a class of the layer's name with the methods of part."""
    made = type(layer.__name__, (part, layer), {"__module__": part.__module__})
    owner = PluggableLayer if issubclass(layer, PluggableLayer) else CustomOp
    owner.register_oot(made, name=layer.__name__)
    made.name = layer.name  # type: ignore[attr-defined]  # by which users enable and disable it


def supports_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    if variance_size is not None or weight is None or weight.dtype != x.dtype:
        return False
    return x.ndim in (2, 3) and x.stride(-1) == 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, variance_size: int | None = None) -> torch.Tensor:
    out: torch.Tensor = fi_core.rmsnorm(x, weight, epsilon)
    return out


def supports_add_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return x.ndim == 2 and x_residual.stride(-1) == 1 and supports_norm(x, weight, epsilon, variance_size)


def fused_add_rms_norm(
    x: torch.Tensor, x_residual: torch.Tensor, weight: torch.Tensor, epsilon: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    fi_core.fused_add_rmsnorm(x, x_residual, weight, epsilon)
    return x, x_residual


class GemmaNorm:
    """Of `GemmaRMSNorm` (Gemma, Qwen3-Next), whose fp32 weights no provider of the norms takes but torch."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """In place with a residual."""
        given = self.weight, self.variance_epsilon
        if residual is None and supports_norm(x, *given):
            out: torch.Tensor = fi_core.gemma_rmsnorm(x, *given)
            return out
        if residual is not None and supports_add_norm(x, residual, *given):
            fi_core.gemma_fused_add_rmsnorm(x, residual, *given)
            return x, residual
        return super().forward_cuda(x, residual)  # type: ignore[misc,no-any-return]


class Activation:
    """Of `SiluAndMul`."""

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fi_core.silu_and_mul(x)
        return out


class Rotary:
    """Of rotary embeddings with a table of angles."""

    head_size: int
    is_neox_style: bool
    cos_sin_cache: torch.Tensor

    def __init__(self, *given: Any, **named: Any) -> None:
        self.is_enabled = self.enabled()  # type: ignore[attr-defined]  # else vLLM leaves it to its compiler
        super().__init__(*given, **named)

    @property
    def use_flashinfer(self) -> bool:
        """vLLM keeps the table in fp32 then."""
        return bool(self.is_enabled)

    @use_flashinfer.setter
    def use_flashinfer(self, chosen: bool) -> None:
        """vLLM's own choice is for where FlashInfer is installed."""

    def forward_cuda(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        positions = positions.flatten()
        other = query.new_empty(len(positions), 0) if key is None else key  # a layer that shares the keys of another
        fi_core.apply_rope_with_cos_sin_cache_inplace(
            positions, query, other, self.head_size, self.cos_sin_cache, self.is_neox_style
        )
        return query, key


class DeepseekRotary(Rotary):
    """Of `DeepseekScalingRotaryEmbedding`, which torch computes in a dozen kernels."""

    def forward_cuda(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward_cuda(positions if offsets is None else positions + offsets, query, key)
