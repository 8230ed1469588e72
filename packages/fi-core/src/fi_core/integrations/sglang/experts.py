"""SGLang's experts on fi's kernels: weights of 16 bits, and of fp8 with scales of 128 x 128."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_runner_backend, resolve_moe_runner_backend
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

from fi_core.autotuner import autotune
from fi_core.fused_moe import cutlass_fused_moe
from fi_core.integrations.sglang import refusals
from fi_core.tllm_enums import ActivationType

if TYPE_CHECKING:
    import torch

_BLOCK = [128, 128]  # rows and columns that share an fp8 scale
_ACTIVATIONS = {"silu": ActivationType.Swiglu, "gelu": ActivationType.Geglu}


_refuse = functools.partial(refusals.refuse, "--moe-runner-backend")


def is_selected() -> bool:
    return bool(get_moe_runner_backend().value == "fi")


def check_runner(runner: Any, runner_backend: Any, *arguments: Any, **options: Any) -> None:
    """A hook before `MoeRunner.__init__`: no layer gets another runner without a word."""
    if is_selected() and runner_backend.value != "fi":
        _refuse("quantization", "experts of 16-bit or fp8 weights", f"a layer of the runner {runner_backend.value}")
    if is_selected() and (options.get("lora_enabled") or any(arguments[1:])):
        _refuse("--enable-lora", "its absence", True)


class Method(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """SGLang's method for weights of 16 bits; with `--moe-runner-backend fi` its runner is fi's."""

    @property
    def load_up_proj_weight_first(self) -> bool:  # the order of `cutlass_fused_moe`
        return is_selected() or bool(super().load_up_proj_weight_first)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        if not is_selected():
            super().create_moe_runner(layer, moe_runner_config)
            return
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend("fi"), moe_runner_config)


class Fp8Method(Fp8MoEMethod):  # type: ignore[misc]
    """SGLang's method for weights of fp8; with `--moe-runner-backend fi` its runner is fi's."""

    @property
    def load_up_proj_weight_first(self) -> bool:
        return is_selected()

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        if not is_selected():
            super().create_moe_runner(layer, moe_runner_config)
            return
        if self.use_mxfp8 or self.is_fp4_expert or not self.quant_config.is_checkpoint_fp8_serialized:
            _refuse("quantization", "experts of 16-bit or fp8 weights", "mxfp8, fp4, or weights that SGLang quantizes")
        if self.weight_block_size is None or list(self.weight_block_size) != _BLOCK:
            _refuse("weight_block_size", str(_BLOCK), self.weight_block_size)
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend("fi"), moe_runner_config)

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        if not is_selected():
            return super().apply(layer, dispatch_output)
        return self.runner.run(dispatch_output, self.get_triton_quant_info(layer))


class Experts(DispatchMoeRunnerCore):  # type: ignore[misc]
    """The experts of a layer, of this rank."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.activation not in _ACTIVATIONS or not config.is_gated:
            _refuse("activation", "silu or gelu with a gate", (config.activation, config.is_gated))
        if config.no_combine or config.apply_router_weight_on_input:
            _refuse("apply_router_weight_on_input, no_combine", "False", True)
        if config.gemm1_alpha is not None and config.gate_up_interleaved:
            _refuse("gate_up_interleaved", "halves of gate and up rows", True)
        self._of_layer: dict[str, Any] | None = None

    @property
    def runner_backend(self) -> Any:
        return resolve_moe_runner_backend("fi")

    def _activation(self, weight: torch.Tensor) -> dict[str, Any]:
        """The activation with its constants for each expert."""
        import torch

        config, kind = self.config, _ACTIVATIONS[self.config.activation]
        numbers: dict[str, float | None] = {}
        if config.swiglu_limit is not None:  # of the product with the sigmoid
            kind, numbers = ActivationType.SwigluStep, {"swiglu_limit": config.swiglu_limit}
        elif config.gemm1_alpha is not None:
            beta = 1.0 if config.gemm1_beta is None else config.gemm1_beta
            numbers = {
                "swiglu_alpha": config.gemm1_alpha,
                "swiglu_beta": beta,
                "swiglu_limit": config.gemm1_clamp_limit,
            }
        of_each = {
            n: torch.full(weight.shape[:1], x, device=weight.device) for n, x in numbers.items() if x is not None
        }
        return {"activation_type": kind, **of_each}

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
        """SGLang's combine input `[tokens, hidden]`: a partial sum, if ranks share the experts or their columns."""
        x, (scales, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
        is_tuned = self._of_layer is not None
        if self._of_layer is None:
            self._of_layer = self._activation(quant_info.w13_weight)
            if quant_info.w13_scale is not None:
                self._of_layer["quant_scales"] = [quant_info.w13_scale, quant_info.w2_scale]
                self._of_layer["use_deepseek_fp8_block_scale"] = True
        if runner_config.routed_scaling_factor is not None:
            scales = scales * runner_config.routed_scaling_factor
        # The first call is one of SGLang's start. Behind it every kernel of the layer is loaded.
        with contextlib.nullcontext() if is_tuned else autotune():
            out = cutlass_fused_moe(
                x,
                ids,
                scales,
                quant_info.w13_weight,
                quant_info.w2_weight,
                x.dtype,
                fc1_expert_biases=quant_info.b13,
                fc2_expert_biases=quant_info.b2,
                **self._of_layer,
            )
        return StandardCombineInput(hidden_states=out)
