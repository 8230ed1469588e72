"""Stand-ins for what fi's plugin takes from vLLM's experts, gated delta nets and latent attention."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from engine_calls.fake_vllm import AttentionBackend, CustomOp

CONFIG: Any = SimpleNamespace()  # that of the engine; `install` resets it


def get_current_vllm_config() -> Any:
    return CONFIG


def get_current_vllm_config_or_none() -> Any:
    return CONFIG


class MoEActivation(enum.Enum):
    SILU, GELU, GELU_TANH, RELU2_NO_MUL, SWIGLUOAI, SWIGLUOAI_UNINTERLEAVE, SWIGLUSTEP = range(7)


class FusedMoEActivationFormat(enum.Enum):
    Standard = "standard"


class FusedMoEExperts:
    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    w1_scale = property(lambda self: self.quant_config.w1_scale)
    w2_scale = property(lambda self: self.quant_config.w2_scale)
    w1_bias = property(lambda self: self.quant_config.w1_bias)
    w2_bias = property(lambda self: self.quant_config.w2_bias)
    block_shape = property(lambda self: self.quant_config.block_shape)
    weight_quant_dtype = property(lambda self: self.quant_config.weight_quant_dtype)

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        supported = {
            "device": cls._supports_current_device(),
            "activation": cls._supports_activation(moe_config.activation),
            "quantization scheme": cls._supports_quant_scheme(weight_key, activation_key),
            "parallel config": cls._supports_parallel_config(None),
            "format": activation_format == cls.activation_format(),
            "LoRA": not moe_config.is_lora_enabled,
        }
        reason = next((name for name, found in supported.items() if not found), None)
        return reason is None, reason and f"kernel does not support {reason}"


class FusedMoEExpertsModular(FusedMoEExperts):
    pass


class FusedMoEMethodBase:
    """A method: what the oracle has chosen, then a kernel around the experts."""

    backend_name: ClassVar[str]

    def __init__(self, moe: Any) -> None:
        self.moe, self.experts_cls, self.moe_kernel = moe, FusedMoEExpertsModular, None
        setattr(self, self.backend_name, "TRITON")

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def make_kernel(self, layer: Any, **quantization: Any) -> None:
        given: dict[str, Any] = dict.fromkeys(
            ("w1_scale", "w2_scale", "w1_bias", "w2_bias", "block_shape", "weight_quant_dtype", "gemm1_alpha",
             "gemm1_beta", "gemm1_clamp_limit")
        )  # fmt: skip
        self.moe_quant_config = SimpleNamespace(**given | quantization)
        self.moe_kernel = self.experts_cls(self.moe, self.moe_quant_config)  # type: ignore[assignment]

    def swaps(self) -> bool:
        return str(getattr(self, self.backend_name)).endswith("FLASHINFER_CUTLASS")


def replace_parameter(layer: Any, param_name: str, new_data: torch.Tensor | None, prefer_copy: bool = False) -> None:
    getattr(layer, param_name).data = new_data


def _swap(layer: Any, *names: str) -> None:
    """As vLLM's swap_w13_to_w31: torch rolls no e4m3 on a GPU."""
    for name in names:
        rows = getattr(layer, name).data
        replace_parameter(layer, name, rows.unflatten(1, (2, -1)).flip(1).flatten(1, 2))


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, CustomOp):
    name = "unquantized_fused_moe"
    backend_name = "unquantized_backend"

    def __init__(self, moe: Any) -> None:
        torch.nn.Module.__init__(self)
        super().__init__(moe)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.swaps() and self.moe.is_act_and_mul:
            _swap(layer, "w13_weight")
        self.make_kernel(layer, gemm1_clamp_limit=layer.limit)


class Fp8MoEMethod(FusedMoEMethodBase):
    backend_name = "fp8_backend"

    def __init__(self, quant_config: Any, layer: Any) -> None:
        super().__init__(layer.moe_config)
        self.weight_block_size = quant_config.weight_block_size

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.swaps():
            _swap(layer, "w13_weight", "w13_weight_scale_inv")
        self.make_kernel(
            layer, w1_scale=layer.w13_weight_scale_inv, w2_scale=layer.w2_weight_scale_inv,
            block_shape=self.weight_block_size, weight_quant_dtype=torch.float8_e4m3fn,
        )  # fmt: skip


class Fp8Config:
    def __init__(self, weight_block_size: list[int] | None) -> None:
        self.weight_block_size = weight_block_size

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return Fp8MoEMethod(self, layer)


class GptOssMxfp4MoEMethod(FusedMoEMethodBase):
    backend_name = "mxfp4_backend"

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return -(-hidden_size // 128) * 128, -(-intermediate_size_per_partition // 128) * 128

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return {
            "w1_scale": layer.w13_weight_scale, "w2_scale": layer.w2_weight_scale, "w1_bias": layer.w13_bias,
            "w2_bias": layer.w2_bias, "gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0,
            "weight_quant_dtype": "mxfp4",
        }  # fmt: skip

    def process_weights_after_loading(self, layer: Any) -> None:
        raise AssertionError("the layout of another backend")


class GptOssMxfp4Config:
    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return GptOssMxfp4MoEMethod(layer.moe_config)


def make_mxfp4_moe_kernel(
    moe_quant_config: Any, moe_config: Any, experts_cls: Any, mxfp4_backend: Any, routing_tables: Any = None
) -> Any:
    method = SimpleNamespace(moe=moe_config, experts_cls=experts_cls)
    FusedMoEMethodBase.make_kernel(method, None, **moe_quant_config)  # type: ignore[arg-type]
    return method.moe_kernel


@dataclass(frozen=True, kw_only=True)
class MLADimensions:
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class MLAPrefillBackend:
    def __init__(self, num_heads: int, scale: float, *sizes: Any, **others: Any) -> None:
        self.num_heads, self.scale = num_heads, scale

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._prefill_metadata = prefill_metadata


class MLAPrefillBackendEnum(enum.Enum):
    CUSTOM = None

    def is_overridden(self) -> bool:
        return bool(PROMPTS)


PROMPTS: list[str] = []


def register_mla_prefill_backend(backend: MLAPrefillBackendEnum, class_path: str | None = None) -> None:
    assert class_path and backend is MLAPrefillBackendEnum.CUSTOM
    PROMPTS.append(class_path)


QUANTIZATION: dict[str, type] = {}


def register_quantization_config(quantization: str) -> Callable[[type], type]:
    def register(config: type) -> type:
        QUANTIZATION[quantization] = config
        return config

    return register


class PluggableLayer(torch.nn.Module):
    def __new__(cls, *given: Any, **named: Any) -> Any:
        return super().__new__(CustomOp.replaced.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_layer_cls: Any = None, name: str | None = None) -> Any:
        assert name and name not in CustomOp.replaced
        CustomOp.replaced[name] = _decorated_layer_cls
        return _decorated_layer_cls


class ChunkGatedDeltaRule(CustomOp):
    name = "chunk_gated_delta_rule"

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_native

    def forward(self, *given: Any, **named: Any) -> Any:
        return self._forward_method(*given, **named)

    def forward_native(self, *given: Any, **named: Any) -> Any:
        return "vLLM's"


def is_conv_state_dim_first() -> bool:
    return False


def causal_conv1d_update(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None,
    **named: Any,
) -> torch.Tensor:  # fmt: skip
    """Twice the rows, in the place of a convolution."""
    assert (
        conv_state.shape[1:] == (x.shape[1], weight.shape[1] - 1) and named["conv_state_indices"].shape == x.shape[:1]
    )
    return x * 2


class QwenGatedDeltaNetAttention(PluggableLayer):
    name = "qwen_gated_delta_net_attention"

    def __init__(self, heads: tuple[int, int], dims: tuple[int, int]) -> None:
        super().__init__()
        self.head_k_dim, self.head_v_dim = dims
        self.key_dim, self.value_dim, self.tp_size = heads[0] * dims[0], heads[1] * dims[1], 1
        self.conv1d, self.activation = SimpleNamespace(weight=torch.ones(1, 1, 4), bias=None), "silu"

    def decode(self, **given: Any) -> None:
        self._forward_core_decode_non_spec(**given)


class RMSNorm(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        factor = (wide.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return (wide * factor * self.weight.double()).to(x)


class Qwen3Attention(torch.nn.Module):
    """The projection and attention pass on what they get."""

    def __init__(self, rotary_emb: Any, heads: tuple[int, int], weights: list[torch.Tensor], eps: list[float]) -> None:
        super().__init__()
        self.rotary_emb, self.head_dim = rotary_emb, rotary_emb.head_size
        self.q_size, self.kv_size = (n * self.head_dim for n in heads)
        self.q_norm, self.k_norm = (RMSNorm(w, e) for w, e in zip(weights, eps))

    def qkv_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None

    qkv_proj.params_dtype = torch.bfloat16  # type: ignore[attr-defined]

    def o_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None

    def attn(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat([q, k, v], -1)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], -1)
        q_heads, k_heads = (q.view(*q.shape[:-1], -1, self.head_dim), k.view(*k.shape[:-1], -1, self.head_dim))
        q, k = self.q_norm(q_heads).view(q.shape), self.k_norm(k_heads).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        attended = self.attn(q, k, v)
        return self.o_proj(attended)[0]


class QueryLenSupport(enum.Enum):
    UNIFORM = "uniform"


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


@dataclass
class MLACommonDecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


@dataclass
class MLACommonMetadata:
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    prefill: Any = None
    decode: Any = None


class MLACommonMetadataBuilder:
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device,
        metadata_cls: Any = None, supports_dcp_with_varlen: bool = False,
    ) -> None:  # fmt: skip
        self.dcp_world_size = 1

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Of decode requests, with the arguments that every version passes by name."""
        build: Any = self._build_decode  # type: ignore[attr-defined]
        step, starts = common_attn_metadata, common_attn_metadata.query_start_loc
        return SimpleNamespace(decode=build(
            block_table_tensor=step.block_table_tensor, seq_lens_device=step.seq_lens, max_seq_len=step.max_seq_len,
            query_start_loc_cpu=starts.cpu(), query_start_loc_device=starts,
            num_decode_tokens=step.num_actual_tokens, dcp_tot_seq_lens_device=None,
        ))  # fmt: skip


class MLACommonImpl:
    need_to_return_lse_for_decode = False

    def __init__(self, num_heads: int, head_size: int, scale: float, *given: Any, **named: Any) -> None:
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, given[3]


def flashinfer_sampler_supported() -> bool:
    raise AssertionError("FlashInfer is not there")


def flashinfer_sample(logits: torch.Tensor, k: Any, p: Any, generators: Any = None) -> torch.Tensor:
    raise AssertionError("FlashInfer is not there")


def sampling() -> dict[str, Any]:
    """The functions of vLLM's sampler, for the plugin to change."""
    return {f.__name__: f for f in (flashinfer_sampler_supported, flashinfer_sample)}


def default_unquantized_gemm(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


MONITORS = ("vllm.utils.jit_monitor", "vllm.triton_utils.jit_monitor")  # of 0.33 and of 0.24
ACTIVATED: list[dict[str, Any]] = []


def activate_of(version: str) -> Callable[..., None]:
    """The end of a worker's warm-up, for the plugin to change."""

    def activate(*, verbose: bool = False) -> None:
        ACTIVATED.append({"verbose": verbose})

    def activate_by_mode(*, mode: str = "warn", verbose: bool = False) -> None:
        ACTIVATED.append({"mode": mode, "verbose": verbose})

    return activate if version.startswith("0.24") else activate_by_mode


def attention_of_qwen3(name: str) -> type:
    """A class for the plugin to change."""
    return type(name, (Qwen3Attention,), {"forward": Qwen3Attention.forward})


def members(name: str, *names: str) -> Any:
    return enum.Enum(name, names)


LAYERS = "vllm.model_executor.layers"
MOE = f"{LAYERS}.fused_moe"
MODULES: dict[str, dict[str, Any]] = {
    "vllm.config": {
        "get_current_vllm_config": get_current_vllm_config,
        "get_current_vllm_config_or_none": get_current_vllm_config_or_none,
    },
    "vllm.platforms": {
        "current_platform": SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda major: major == 90)
    },
    "vllm.model_executor.utils": {"replace_parameter": replace_parameter},
    "vllm.model_executor.custom_op": {"CustomOp": CustomOp, "PluggableLayer": PluggableLayer},
    MOE: {}, f"{MOE}.oracle": {}, f"{LAYERS}.quantization.utils": {},
    f"{MOE}.activation": {"MoEActivation": MoEActivation},
    f"{MOE}.modular_kernel": {
        "FusedMoEExpertsModular": FusedMoEExpertsModular, "FusedMoEActivationFormat": FusedMoEActivationFormat,
    },
    f"{MOE}.oracle.fp8": {"Fp8MoeBackend": members("Fp8MoeBackend", "FLASHINFER_CUTLASS")},
    f"{MOE}.oracle.mxfp4": {
        "Mxfp4MoeBackend": members("Mxfp4MoeBackend", "FLASHINFER_CUTLASS_MXFP4_BF16"),
        "make_mxfp4_moe_kernel": make_mxfp4_moe_kernel,
    },
    f"{MOE}.oracle.unquantized": {"UnquantizedMoeBackend": members("UnquantizedMoeBackend", "FLASHINFER_CUTLASS")},
    f"{MOE}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": type("TopKWeightAndReduceNoOP", (), {})},
    f"{MOE}.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
    f"{LAYERS}.quantization": {"register_quantization_config": register_quantization_config},
    f"{LAYERS}.quantization.fp8": {"Fp8Config": Fp8Config, "Fp8MoEMethod": Fp8MoEMethod},
    f"{LAYERS}.quantization.mxfp4": {
        "GptOssMxfp4Config": GptOssMxfp4Config, "GptOssMxfp4MoEMethod": GptOssMxfp4MoEMethod,
    },
    f"{LAYERS}.quantization.utils.quant_utils": {
        name: name for name in ("kFp8Dynamic128Sym", "kFp8Static128BlockSym", "kMxfp4Static")
    },
    f"{LAYERS}.mamba": {}, f"{LAYERS}.mamba.gdn": {}, f"{LAYERS}.mamba.ops": {},
    f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn": {
        "ChunkGatedDeltaRule": ChunkGatedDeltaRule, "QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention,
    },
    f"{LAYERS}.mamba.mamba_utils": {"is_conv_state_dim_first": is_conv_state_dim_first},
    f"{LAYERS}.mamba.ops.causal_conv1d": {"causal_conv1d_update": causal_conv1d_update},
    f"{LAYERS}.utils": {"default_unquantized_gemm": default_unquantized_gemm},
    "vllm.envs": {"VLLM_USE_FLASHINFER_SAMPLER": True},
    "vllm.v1.sample": {}, "vllm.v1.sample.ops": {}, "vllm.v1.sample.ops.topk_topp_sampler": sampling(),
    "vllm.v1.worker.gpu.sample.sampler": sampling(),
    "vllm.triton_utils": {}, "vllm.utils": {}, "vllm.model_executor.models": {},
    "vllm.model_executor.models.qwen3": {}, "vllm.model_executor.models.qwen3_moe": {},  # by `install`
    "vllm.v1.attention.backends.mla": {}, "vllm.v1.attention.backends.mla.prefill": {},
    "vllm.v1.attention.backends.mla.prefill.base": {
        "MLADimensions": MLADimensions, "MLAPrefillBackend": MLAPrefillBackend,
    },
    "vllm.v1.attention.backends.mla.prefill.registry": {
        "MLAPrefillBackendEnum": MLAPrefillBackendEnum, "register_mla_prefill_backend": register_mla_prefill_backend,
    },
    f"{LAYERS}.attention": {},
    f"{LAYERS}.attention.mla_attention": {
        "MLACommonBackend": MLACommonBackend, "MLACommonDecodeMetadata": MLACommonDecodeMetadata,
        "MLACommonImpl": MLACommonImpl, "MLACommonMetadata": MLACommonMetadata, "QueryLenSupport": QueryLenSupport,
        "MLACommonMetadataBuilder": MLACommonMetadataBuilder,
    },
}  # fmt: skip
