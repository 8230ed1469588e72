"""Stand-ins for the parts of vLLM that fi's plugin implements or calls, with the interfaces of a recorded version."""

from __future__ import annotations

import enum
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

SEAMS: dict[str, dict[str, dict[str, str]]] = json.loads((Path(__file__).parent / "vllm_seams.json").read_text())
PLUGIN = "fi_core.integrations.vllm"


def recorded(version: str) -> dict[str, list[str]]:
    """The parameters and fields of a version by the name of a function or class."""
    files = SEAMS[version].values()
    return {name: text.split(", ") if text else [] for names in files for name, text in names.items()}


class AttentionCGSupport(enum.Enum):
    NEVER = 0
    UNIFORM_BATCH = 2


class KVCacheLayout(enum.Enum):
    LBHNC = enum.auto()
    BLHNC = enum.auto()


class AttentionBackendEnum(enum.Enum):
    CUSTOM = None

    def is_overridden(self) -> bool:
        return bool(_registered)

    def get_path(self) -> str:
        return _registered["CUSTOM"]


_registered: dict[str, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str | None = None, is_mamba: bool = False) -> None:
    assert class_path and not is_mamba
    _registered[backend.name] = class_path


@dataclass
class MultipleOf:
    base: int


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        drafts = self.vllm_config.num_speculative_tokens if supports_spec_as_decode else 0
        self.reorder_batch_threshold = max(reorder_batch_threshold or 0, 1 + drafts)


def get_per_layer_parameters(vllm_config: Any, layer_names: list[str], cls_: type) -> dict[str, Any]:
    impls = {name: vllm_config.layers[name] for name in layer_names}
    assert all(isinstance(impl, cls_) for impl in impls.values())
    return {
        name: SimpleNamespace(window_left=impl.sliding_window[0], logits_soft_cap=impl.logits_soft_cap)
        for name, impl in impls.items()
    }


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Writes `[tokens, heads, head_dim]` to slots of caches `[blocks, block_size, heads, head_dim]`; -1 is no slot."""
    block_size = key_cache.shape[1]
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        for row, slot in zip(rows, slot_mapping.tolist()):
            if slot >= 0 and kv_cache_dtype.startswith("fp8"):
                cache[slot // block_size, slot % block_size] = (row.float() / scale).to(FP8).view(torch.uint8)
            elif slot >= 0:
                cache[slot // block_size, slot % block_size] = row


class IrOp:
    """A norm of `vllm.ir.ops`, whose implementations must have the types of its own."""

    def __init__(self, native: Callable[..., Any]) -> None:
        self.native: Any = native
        self.native.__signature__ = inspect.signature(native, eval_str=True)  # the engine's annotations are no text
        self.impls = {"native": SimpleNamespace(impl_fn=native)}

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        supports_args: Callable[..., bool] | None = None,
        inplace: bool = False,
    ) -> Callable[[Callable[..., Any]], Any]:
        def register(f: Callable[..., Any]) -> Any:
            assert torch.library.infer_schema(f, mutates_args=[]) == torch.library.infer_schema(
                self.native, mutates_args=[]
            )
            assert supports_args and parameters(supports_args) == parameters(self.native)
            self.impls[provider] = SimpleNamespace(impl_fn=f, supports_args=supports_args, inplace=inplace)
            return f

        return register


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * (1 if weight is None else weight)).to(x)


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.float() + x_residual.float()
    return _rms_norm(total, weight, epsilon).to(x), total.to(x)


class CustomOp(torch.nn.Module):
    """A layer that makes an instance of the class that is registered for its name."""

    replaced: ClassVar[dict[str, type]] = {}
    name: str

    def __new__(cls, *given: Any, **named: Any) -> Any:
        return super().__new__(CustomOp.replaced.get(cls.__name__, cls))

    @classmethod
    def enabled(cls) -> bool:
        return True

    @classmethod
    def register_oot(cls, _decorated_op_cls: Any = None, name: str | None = None) -> Any:
        assert name and name not in cls.replaced
        _decorated_op_cls.name = name
        cls.replaced[name] = _decorated_op_cls
        return _decorated_op_cls


class SiluAndMul(CustomOp):
    name = "silu_and_mul"

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)


class GemmaRMSNorm(CustomOp):
    name = "gemma_rms_norm"

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.zeros(hidden_size), eps

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """In the precision of x at least fp32; nothing in place."""
        total = x if residual is None else x + residual
        scale = (total.double().square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        out = (total * scale * (1 + self.weight.double())).to(x.dtype)
        return out if residual is None else (out, total)


class RotaryEmbedding(CustomOp):
    name = "rotary_embedding"

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        init_cache: bool = True,
    ) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, is_neox_style
        positions, channels = torch.arange(max_position_embeddings), torch.arange(0, rotary_dim, 2) / rotary_dim
        angles = positions[:, None] / base**channels
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1)
        if not getattr(self, "use_flashinfer", False):
            self.cos_sin_cache = self.cos_sin_cache.to(dtype)

    def forward(self, *given: Any) -> Any:
        return self.forward_cuda(*given)

    def forward_cuda(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._rotated(positions, query), None if key is None else self._rotated(positions, key)

    def _rotated(self, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = rows.reshape(len(rows), -1, self.head_size).double()
        cos, sin = self.cos_sin_cache[positions].double()[:, None].chunk(2, -1)
        part, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        a, b = part.chunk(2, -1) if self.is_neox_style else (part[..., ::2], part[..., 1::2])
        turned = a * cos - b * sin, b * cos + a * sin
        part = torch.cat(turned, -1) if self.is_neox_style else torch.stack(turned, -1).flatten(-2)
        return torch.cat([part, rest], -1).view(rows.shape).to(rows.dtype)


class DeepseekScalingRotaryEmbedding(RotaryEmbedding):
    def __init__(self, *given: Any, **named: Any) -> None:
        self.use_flashinfer = False  # which is not installed
        super().__init__(*given, **named)

    def forward_cuda(  # type: ignore[override]
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward_cuda(positions if offsets is None else positions + offsets, query, key)


ROTARY = {
    name: RotaryEmbedding if name == "RotaryEmbedding" else type(name, (RotaryEmbedding,), {})
    for name in (
        "RotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "LinearScalingRotaryEmbedding",
    )
}
FP8 = torch.float8_e4m3fn
AttentionBackend = type("AttentionBackend", (), {})
BACKEND = {
    "AttentionBackend": AttentionBackend, "AttentionImpl": type("AttentionImpl", (), {}),
    "AttentionCGSupport": AttentionCGSupport, "AttentionMetadataBuilder": AttentionMetadataBuilder,
    "MultipleOf": MultipleOf,
}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {}, "vllm.ir": {}, "vllm.v1": {}, "vllm.v1.attention": {}, "vllm.v1.attention.backends": {},
    "vllm._custom_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
    "vllm.v1.kv_cache_interface": {"KVCacheLayout": KVCacheLayout},
    "vllm.v1.attention.backend": BACKEND,
    "vllm.model_executor": {}, "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.activation": {"SiluAndMul": SiluAndMul},
    "vllm.model_executor.layers.layernorm": {"GemmaRMSNorm": GemmaRMSNorm},
    "vllm.model_executor.layers.rotary_embedding": ROTARY
    | {"DeepseekScalingRotaryEmbedding": DeepseekScalingRotaryEmbedding},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend,
    },
    "vllm.v1.attention.backends.utils": {
        "get_per_layer_parameters": get_per_layer_parameters,
    },
}  # fmt: skip
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    get_per_layer_parameters, register_backend, reshape_and_cache_flash,
    *filter(inspect.isfunction, vars(AttentionMetadataBuilder).values()), IrOp.register_impl,
    vars(CustomOp)["register_oot"].__func__, SiluAndMul.__init__, SiluAndMul.forward_cuda,
    GemmaRMSNorm.__init__, GemmaRMSNorm.forward_cuda,
    DeepseekScalingRotaryEmbedding.forward_cuda, RotaryEmbedding.forward_cuda,
)  # fmt: skip


def parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function as the record writes them."""
    given = inspect.signature(function).parameters.values()
    stars = {inspect.Parameter.KEYWORD_ONLY: "*"}
    return [stars.get(x.kind, "") + x.name + ("" if x.default is inspect.Parameter.empty else "=") for x in given]


def install(version: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """Makes the stand-ins importable as vLLM of a version; returns fi's plugin, imported over them."""
    from engine_calls import fake_vllm_models as models  # which imports this
    from engine_calls import fake_vllm_ranks as ranks

    _registered.clear()
    CustomOp.replaced.clear()
    models.QUANTIZATION.clear()
    models.PROMPTS.clear()
    vars(models.CONFIG).clear()
    vars(models.CONFIG).update(model_config=None, additional_config={})
    patch.setattr(importlib.metadata, "version", {"vllm": version}.__getitem__)
    for name, contents in {**MODULES, **models.MODULES, **ranks.MODULES}.items():
        module = ModuleType(name)
        vars(module).update(contents, __path__=[])
        patch.setitem(sys.modules, name, module)
    vars(sys.modules["vllm.model_executor.layers.layernorm"])["RMSNorm"] = ranks.RMSNorm
    monitor = ModuleType(models.MONITORS[version.startswith("0.24")])
    vars(monitor).update(activate=models.activate_of(version))
    patch.setitem(sys.modules, monitor.__name__, monitor)
    for path, name in (("qwen3", "Qwen3Attention"), ("qwen3_moe", "Qwen3MoeAttention")):
        vars(sys.modules[f"vllm.model_executor.models.{path}"])[name] = models.attention_of_qwen3(name)
    norms = {"rms_norm": IrOp(_rms_norm), "fused_add_rms_norm": IrOp(_fused_add_rms_norm)}
    vars(sys.modules["vllm.ir"])["ops"] = SimpleNamespace(**norms)
    for name in (
        "",
        ".attention",
        ".backend",
        ".gdn",
        ".late",
        ".layers",
        ".mla",
        ".mla_prompts",
        ".moe",
        ".prepare",
        ".qk_norm",
        ".sampler",
        ".selected",
    ):
        patch.delitem(sys.modules, PLUGIN + name, raising=False)
    return importlib.import_module(PLUGIN)
