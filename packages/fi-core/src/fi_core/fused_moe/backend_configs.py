"""The formats of experts that a `MoELayer` computes: how bf16 weights are prepared, and what the call is given.

Each is named after FlashInfer's configuration of it, and prepares by the rule that its documentation states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fi_core.fused_moe.configs import ActivationConfig, Readable, SwiGLU
from fi_core.fused_moe.core import preprocess_moe_weights_for_sm90_mixed_gemm_humming
from fi_core.tllm_enums import QuantFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

View = dict[str, "torch.Tensor"]
_BLOCK = 128  # rows and columns that share a scale, values of an int4 group
_E4M3_MAX, _INT4_MAX, _E2M1_MAX = 448.0, 7.0, 6.0
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of e2m1
_RESIDUAL_FACTOR = 64  # of use_wfp4afp8_humming


def _checked(
    weights: tuple[torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, int],
    activation: ActivationConfig | None,
    device: torch.device | None,
    multiple: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights on the device. Raises ValueError or TypeError unless they are bf16 of these sizes."""
    import torch

    experts, hidden, width = sizes
    rows = width * (2 if (activation or SwiGLU()).is_gated else 1)
    for name, value in (("hidden_size", hidden), ("intermediate_size", width)):
        if value % multiple:
            raise ValueError(f"{name} must be a multiple of {multiple}; got {value}")
    for name, w, shape in zip(("w1_bf16", "w2_bf16"), weights, ((experts, rows, hidden), (experts, hidden, width))):
        if w.dtype is not torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16; got {w.dtype}")
        if w.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}; got {list(w.shape)}")
    up, down = (w.to(w.device if device is None else device).contiguous() for w in weights)
    return up, down


class BackendConfig(Readable):
    """A format of weights and activations.

    `prepare_weights` takes bf16 weights: w1 `[experts, 2 inter, hidden]`, the linear projections and then the gates, or
    `[experts, inter, hidden]` of an activation without a gate; w2 `[experts, hidden, inter]`. It returns the tensors
    of a `MoEWeightPack` view under `backend_key`, on `device` or where the weights are.
    """

    backend_key: ClassVar[str]
    pair: ClassVar[tuple[QuantFormat, QuantFormat]]
    scales: ClassVar[tuple[str, ...]] = ()  # the keys of quant_scales in their order
    options: ClassVar[tuple[str, ...]] = ()  # that are True
    multiple: ClassVar[int] = 1

    @classmethod
    def supported(cls, arch: int) -> bool:
        """Whether a GPU of compute capability arch, as 90, computes it: from 80 on, as the CPU does."""
        return arch >= 80

    @classmethod
    def prepare_weights(
        cls,
        w1_bf16: torch.Tensor,
        w2_bf16: torch.Tensor,
        *,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: ActivationConfig | None = None,
        device: torch.device | None = None,
    ) -> View:
        """The view of these weights. Raises ValueError or TypeError for others."""
        sizes = num_local_experts, hidden_size, intermediate_size
        return cls._view(*_checked((w1_bf16, w2_bf16), sizes, activation, device, cls.multiple))

    @classmethod
    def _view(cls, up: torch.Tensor, down: torch.Tensor) -> View:
        return {"fc1_expert_weights": up, "fc2_expert_weights": down}

    @classmethod
    def arguments(cls, view: View) -> dict[str, Any]:
        """What `cutlass_fused_moe` is given. Raises KeyError for a view that lacks a tensor."""
        weights = {key: view[key] for key in ("fc1_expert_weights", "fc2_expert_weights")}
        return {**weights, "quant_scales": [view[key] for key in cls.scales], **dict.fromkeys(cls.options, True)}


@dataclass(frozen=True, repr=False)
class CutlassBf16Config(BackendConfig):
    """bf16 weights and activations."""

    backend_key = "cutlass_bf16"
    pair = (QuantFormat.BF16, QuantFormat.BF16)


def _by_expert(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """fp32, one by one: a whole model's experts in fp32 take twice its memory."""
    return (w.float() for w in weight)


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 pairs and ue8m0 scales of 32 values: `2^ceil(log2(amax / 6))`; ties go to the smaller value."""
    import torch

    codes, scales = [], []
    for w in _by_expert(weight):
        blocks = w.unflatten(1, (-1, 32))
        largest = blocks.abs().amax(-1) / _E2M1_MAX
        exponent = largest.where(largest > 0, 1.0).log2().ceil().clamp(-127, 127).where(largest > 0, -127)
        scaled = (blocks / torch.exp2(exponent)[..., None]).flatten(1)
        code = torch.bucketize(scaled.abs(), scaled.new_tensor(_MIDPOINTS)) | (scaled < 0).long() << 3
        codes.append((code[:, ::2] | code[:, 1::2] << 4).byte())
        scales.append((exponent + 127).byte())
    return torch.stack(codes), torch.stack(scales)


@dataclass(frozen=True, repr=False)
class CutlassW4A16Config(BackendConfig):
    """mxfp4 weights, bf16 activations; sizes are multiples of 128."""

    backend_key = "cutlass_w4a16"
    pair = (QuantFormat.MXFP4, QuantFormat.BF16)
    scales = ("fc1_expert_scales", "fc2_expert_scales")
    options = ("use_w4_group_scaling",)
    multiple = _BLOCK

    @classmethod
    def _view(cls, up: torch.Tensor, down: torch.Tensor) -> View:
        (w1, s1), (w2, s2) = _mxfp4(up), _mxfp4(down)
        return {"fc1_expert_weights": w1, "fc1_expert_scales": s1, "fc2_expert_weights": w2, "fc2_expert_scales": s2}


@dataclass(frozen=True, repr=False)
class CutlassHummingConfig(BackendConfig):
    """mxfp4 weights, activations quantised to e4m3 with a scale for each token; sizes are multiples of 128."""

    backend_key = "cutlass_humming"
    pair = (QuantFormat.MXFP4, QuantFormat.FP8PerTensor)
    scales = (
        "fc1_expert_scales",
        "fc1_residual_scale",
        "fc2_act_global",
        "fc2_expert_scales",
        "fc2_residual_scale",
    )
    options = ("use_w4_group_scaling", "use_wfp4afp8_humming")
    multiple = _BLOCK

    @classmethod
    def _view(cls, up: torch.Tensor, down: torch.Tensor) -> View:
        found: View = {}
        for name, weight in (("fc1", up), ("fc2", down)):
            codes, scales, residual = preprocess_moe_weights_for_sm90_mixed_gemm_humming(*_mxfp4(weight))
            found |= {f"{name}_expert_weights": codes, f"{name}_expert_scales": scales}
            found[f"{name}_residual_scale"] = residual * _RESIDUAL_FACTOR
        return {**found, "fc2_act_global": found["fc1_residual_scale"].new_ones(())}


def _e4m3(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    import torch

    return (weight / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _fp8_experts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and a scale of each expert, `amax / 448`."""
    import torch

    largest = weight.float().abs().amax((1, 2))
    if not largest.isfinite().all():
        raise ValueError("w1_bf16 and w2_bf16 must be finite")
    scale = (largest / _E4M3_MAX).where(largest > 0, 1.0)
    return torch.stack([_e4m3(w, s) for w, s in zip(_by_expert(weight), scale)]), scale


def _multiplier(name: str, value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    import torch

    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must have one element; got {list(value.shape)}")
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(()).clone()


@dataclass(frozen=True, repr=False)
class CutlassFp8PerTensorConfig(BackendConfig):
    """e4m3 weights with a scale for each expert, e4m3 activations with fixed multipliers."""

    backend_key = "cutlass_fp8_per_tensor"
    pair = (QuantFormat.FP8PerTensor, QuantFormat.FP8PerTensor)
    scales = ("fc1_dequant_scale", "fc2_act_quant_scale", "fc2_dequant_scale", "fc1_act_dequant_scale")

    @classmethod
    def prepare_weights(  # type: ignore[override]
        cls,
        w1_bf16: torch.Tensor,
        w2_bf16: torch.Tensor,
        *,
        hidden_states_scale_global: float | torch.Tensor,
        intermediate_scale_global: float | torch.Tensor,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: ActivationConfig | None = None,
        device: torch.device | None = None,
    ) -> View:
        """The view, for tokens and activated values that are multiplied by these before they become e4m3."""
        sizes = num_local_experts, hidden_size, intermediate_size
        up, down = _checked((w1_bf16, w2_bf16), sizes, activation, device, 1)
        (w1, s1), (w2, s2) = _fp8_experts(up), _fp8_experts(down)
        x = _multiplier("hidden_states_scale_global", hidden_states_scale_global, up.device)
        inner = _multiplier("intermediate_scale_global", intermediate_scale_global, up.device)
        return {
            "fc1_expert_weights": w1,
            "fc2_expert_weights": w2,
            "fc1_dequant_scale": s1 / x,
            "fc2_act_quant_scale": inner.clone(),
            "fc2_dequant_scale": s2 / inner,
            "fc1_act_dequant_scale": x.reciprocal(),
            "fc1_dequant": s1,
            "fc2_dequant": s2,
            "hidden_states_scale_global": x,
            "intermediate_scale_global": inner,
        }

    @staticmethod
    def prepare_activations(
        hidden_states_bf16: torch.Tensor, *, hidden_states_scale_global: float | torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """`[tokens, hidden]` times the multiplier, as e4m3; and None, for there are no scales."""
        import torch

        if hidden_states_bf16.ndim != 2 or hidden_states_bf16.dtype is not torch.bfloat16:
            raise ValueError(
                f"hidden_states_bf16 must be bfloat16 [tokens, hidden]; got {hidden_states_bf16.dtype} "
                f"{list(hidden_states_bf16.shape)}"
            )
        x = _multiplier("hidden_states_scale_global", hidden_states_scale_global, hidden_states_bf16.device)
        return (hidden_states_bf16.float() * x).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), None


@dataclass(frozen=True, repr=False)
class CutlassFp8BlockConfig(BackendConfig):
    """e4m3 weights with scales of 128 x 128, bf16 activations that are quantised inside; multiples of 128."""

    backend_key = "cutlass_fp8_block"
    pair = (QuantFormat.DeepSeekFp8, QuantFormat.DeepSeekFp8)
    scales = ("fc1_block_scale", "fc2_block_scale")
    options = ("use_deepseek_fp8_block_scale",)
    multiple = _BLOCK

    @classmethod
    def _view(cls, up: torch.Tensor, down: torch.Tensor) -> View:
        import torch

        found: View = {}
        for name, weight in (("fc1", up), ("fc2", down)):
            parts = []
            for w in _by_expert(weight):
                blocks = w.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))
                scale = (blocks.abs().amax((1, 3), keepdim=True) / _E4M3_MAX).clamp(min=1e-12)
                parts.append((_e4m3(blocks, scale).flatten(2).flatten(0, 1), scale[:, 0, :, 0]))
            found[f"{name}_expert_weights"] = torch.stack([q for q, _ in parts])
            found[f"{name}_block_scale"] = torch.stack([s for _, s in parts])
        return found


@dataclass(frozen=True, repr=False)
class CutlassW4A8Config(BackendConfig):
    """int4 weights with scales of 128 values; products are those of bf16, sizes multiples of 128."""

    backend_key = "cutlass_w4a8"
    pair = (QuantFormat.INT4, QuantFormat.FP8PerTensor)
    scales = (
        "fc1_expert_scales",
        "fc2_expert_scales",
        "fc1_act_scale",
        "fc2_act_scale",
        "fc1_zero",
        "fc2_zero",
        "fc1_alpha",
        "fc2_alpha",
    )
    options = ("use_w4_group_scaling", "use_packed_weights")
    multiple = _BLOCK

    @classmethod
    def _view(cls, up: torch.Tensor, down: torch.Tensor) -> View:
        import torch

        found: View = {}
        for name, weight in (("fc1", up), ("fc2", down)):
            parts = []
            for w in _by_expert(weight):
                groups = w.unflatten(1, (-1, _BLOCK))
                largest = groups.abs().amax(-1, keepdim=True)
                scale = (largest / _INT4_MAX).where(largest > 0, 1.0)
                code = (groups / scale).round().clamp(-8, 7).to(torch.int8).flatten(1) & 15
                parts.append(((code[:, ::2] | code[:, 1::2] << 4).view(torch.uint8), scale[..., 0].bfloat16()))
            found[f"{name}_expert_weights"] = torch.stack([q for q, _ in parts])
            found[f"{name}_expert_scales"] = torch.stack([s for _, s in parts])
            found[f"{name}_act_scale"] = weight.new_ones(weight.shape[2])
            found[f"{name}_zero"] = weight.new_empty(0)
            found[f"{name}_alpha"] = weight.new_ones(len(weight), dtype=torch.float32)
        return found


BACKENDS: tuple[type[BackendConfig], ...] = (
    CutlassBf16Config,
    CutlassW4A16Config,
    CutlassFp8BlockConfig,
    CutlassFp8PerTensorConfig,
    CutlassW4A8Config,
    CutlassHummingConfig,
)
