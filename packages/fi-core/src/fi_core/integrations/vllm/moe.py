"""vLLM's experts on fi's kernels: 16-bit weights, fp8 weights with scales of 128 x 128, and gpt-oss's mxfp4 weights."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, make_mxfp4_moe_kernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kMxfp4Static,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from fi_core.autotuner import autotune
from fi_core.fused_moe import ActivationType, cutlass_fused_moe
from fi_core.integrations.vllm.prepare import begin_to_compile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_BLOCK = 128  # rows and columns that share an fp8 scale
_GROUP = 64  # a multiple of those of an mxfp4 scale
_FP8, _MXFP4 = (kFp8Static128BlockSym, kFp8Dynamic128Sym), (kMxfp4Static, None)
_ACTIVATIONS = {
    MoEActivation.SILU: ActivationType.Swiglu,
    MoEActivation.GELU: ActivationType.Geglu,
    MoEActivation.GELU_TANH: ActivationType.GegluTanh,
    MoEActivation.RELU2_NO_MUL: ActivationType.Relu2,
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: ActivationType.SwigluBias,
    MoEActivation.SWIGLUOAI: ActivationType.SwigluBias,  # of gpt-oss
}
_log = logging.getLogger("vllm.plugins.fi_core")


class Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """The experts of a layer. The first weight has the rows of the linear projection, then those of the gate."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        parallel, self.is_tuned = moe_config.moe_parallel_config, False
        is_mxfp4 = self.weight_quant_dtype == "mxfp4"
        self.options: dict[str, Any] = {
            "quant_scales": [self.w1_scale, self.w2_scale] if is_mxfp4 or self.block_shape else None,
            "fc1_expert_biases": self.w1_bias,
            "fc2_expert_biases": self.w2_bias,
            "use_w4_group_scaling": is_mxfp4,
            "use_deepseek_fp8_block_scale": self.block_shape is not None,
            "tp_size": parallel.tp_size,
            "tp_rank": parallel.tp_rank,
        }
        for name, value in (
            ("swiglu_alpha", quant_config.gemm1_alpha),
            ("swiglu_beta", quant_config.gemm1_beta),
            ("swiglu_limit", quant_config.gemm1_clamp_limit),
        ):
            self.options[name] = None if value is None else self._of_each(value)

    def _of_each(self, value: float) -> torch.Tensor:
        import torch

        config = self.moe_config
        return torch.full((config.num_local_experts,), value, dtype=torch.float32, device=config.device)

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True  # the activations of fp8 weights are quantized here

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() and current_platform.is_device_capability(90))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) in ((None, None), _FP8, _MXFP4)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes `[tokens, hidden]`, the weighted sums of the experts of this rank."""
        if expert_map is not None:  # the number of an expert here, -1 for those of other ranks
            topk_ids = expert_map[topk_ids]
        # The first call measures the memory of a step. Behind it every kernel of the layer is loaded.
        with contextlib.nullcontext() if self.is_tuned else autotune():
            cutlass_fused_moe(
                hidden_states,
                topk_ids,
                None if apply_router_weight_on_input else topk_weights,
                w1,
                w2,
                output.dtype,
                ep_size=max(1, global_num_experts // len(w1)),
                output=output,
                activation_type=_ACTIVATIONS[activation],
                **self.options,
            )
        self.is_tuned = True


def reason_against(moe: Any, weight_key: Any = None, activation_key: Any = None) -> str | None:
    """Why `Experts` does not compute a layer; None if it does."""
    if moe.moe_backend != "auto":
        return f"--moe-backend {moe.moe_backend} is chosen"
    standard = mk.FusedMoEActivationFormat.Standard
    supported, reason = Experts.is_supported_config(Experts, moe, weight_key, activation_key, standard)
    if not supported:
        return str(reason)
    is_mxfp4 = (weight_key, activation_key) == _MXFP4
    if (moe.activation == MoEActivation.SWIGLUOAI) != is_mxfp4:
        return f"{moe.activation} activation, which is for mxfp4 weights alone, and they for it"
    if moe.has_bias and not is_mxfp4:
        return "biases, which are for mxfp4 weights alone"
    if is_mxfp4:
        return None
    sizes, multiple = (moe.hidden_dim, moe.intermediate_size_per_partition), 8 if weight_key is None else _BLOCK
    return f"sizes {sizes} that are no multiples of {multiple}" if any(n % multiple for n in sizes) else None


def take(method: Any, name: str, backend: Any, *keys: Any) -> bool:
    """Makes `Experts` the kernel of a method of vLLM, with the layout of weights of one of its backends; or logs why
    not. name: of the attribute that holds the backend.
    """
    reason = reason_against(method.moe, *keys)
    _say(reason)
    if reason is None:
        setattr(method, name, backend)
        method.experts_cls = Experts
        begin_to_compile()
    return reason is None


@functools.cache  # once for all layers
def _say(reason: str | None) -> None:
    if reason is None:
        _log.info("fi computes the experts")
    else:
        _log.info("vLLM's own kernels compute the experts: fi does not support %s", reason)


class Unquantized:
    """Of `UnquantizedFusedMoEMethod`."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)  # type: ignore[call-arg]  # of vLLM's class, which follows this one
        take(self, "unquantized_backend", UnquantizedMoeBackend.FLASHINFER_CUTLASS)


class Fp8(Fp8Config):  # type: ignore[misc]
    """fp8 checkpoints whose experts have fp32 scales of 128 x 128, by which tensor parallel ranks cut them."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        if type(method) is Fp8MoEMethod and list(method.weight_block_size or ()) == [_BLOCK, _BLOCK]:
            take(method, "fp8_backend", Fp8MoeBackend.FLASHINFER_CUTLASS, *_FP8)
        return method


class GptOss(GptOssMxfp4Config):  # type: ignore[misc]
    """gpt-oss checkpoints."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        if type(method) is GptOssMxfp4MoEMethod and reason_against(method.moe, *_MXFP4) is None:
            return Mxfp4(method.moe)
        return method


class Mxfp4(GptOssMxfp4MoEMethod):  # type: ignore[misc]
    """mxfp4 weights as they are stored, but for the order of the rows of the first."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        take(self, "mxfp4_backend", Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_BF16, *_MXFP4)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        # That of vLLM's method pads both to 128.
        roundup: Callable[..., tuple[int, int]] = super(GptOssMxfp4MoEMethod, self).maybe_roundup_sizes
        hidden, width = roundup(hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config)
        return hidden, -(-width // _GROUP) * _GROUP

    def process_weights_after_loading(self, layer: Any) -> None:
        """Gate and linear rows alternate in a checkpoint."""
        import torch

        for name in ("w13_weight", "w13_weight_scale", "w13_bias"):
            rows = getattr(layer, name).data
            replace_parameter(layer, name, torch.cat((rows[:, 1::2], rows[:, ::2]), 1))
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = make_mxfp4_moe_kernel(
            moe_quant_config=self.moe_quant_config,
            moe_config=self.moe,
            mxfp4_backend=self.mxfp4_backend,
            experts_cls=self.experts_cls,
            routing_tables=layer._expert_routing_tables(),
        )


def register(replace: Callable[[Any, type], None]) -> Sequence[tuple[str, type]]:
    """Replaces vLLM's method of unquantized experts; returns the configurations of quantization by their names."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    replace(UnquantizedFusedMoEMethod, Unquantized)
    return ("fp8", Fp8), ("gpt_oss_mxfp4", GptOss)
