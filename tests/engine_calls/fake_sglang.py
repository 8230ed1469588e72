"""Stand-ins for the parts of SGLang that fi's plugin implements or calls, with the interfaces of a recorded version.

Where SGLang itself can be imported the tests run over its own modules instead.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

SEAMS: dict[str, dict[str, dict[str, str]]] = json.loads((Path(__file__).parent / "sglang_seams.json").read_text())
PLUGIN = "fi_core.integrations.sglang"
IS_REAL = importlib.util.find_spec("sglang") is not None


class ForwardMode(enum.Enum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2 = range(6)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self, include_draft_extend_v2: bool = False) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2


class AttentionBackend:
    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        own: Any = self
        run = own.forward_decode if forward_batch.forward_mode.is_decode() else own.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(torch.nn.Module):
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE",
        logit_capping_method: str = "tanh",
        quant_config: Any = None,
        attn_type: AttentionType = AttentionType.DECODER,
        use_irope: bool = False,
        prefix: str = "",
        use_prefill_attention_wrapper: bool = True,
    ) -> None:
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.head_dim, self.scaling = num_heads, num_kv_heads, head_dim, scaling
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.layer_id, self.logit_cap, self.attn_type = layer_id, logit_cap, attn_type
        self.sliding_window_size, self.is_cross_attention = sliding_window_size or -1, is_cross_attention
        self.logit_capping_method, self.xai_temperature_len = logit_capping_method, -1
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None
    full_loc: torch.Tensor | None = None
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: Any = None, full_loc: Any = None) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc)


class MHATokenToKVPool:
    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int, layer_num: int, device: str,
        enable_memory_saver: bool,
    ) -> None:  # fmt: skip
        shape = layer_num, 2, size + page_size, head_num, head_dim
        self.dtype, self.buffers = dtype, torch.zeros(shape, device=device).to(dtype)

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.buffers[layer_id].unbind()

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: Any = None,
    ) -> None:
        loc = getattr(loc_info, "loc", loc_info)
        own = self.buffers[layer.layer_id if layer_id_override is None else layer_id_override]
        for cache, x, scale in zip(own, (cache_k, cache_v), (k_scale, v_scale)):
            x = x if scale is None or x.dtype is self.dtype else x / scale
            cache.view(torch.uint8)[loc] = x.to(self.dtype).contiguous().view(torch.uint8)


class MLATokenToKVPool:
    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, kv_lora_rank: int, qk_rope_head_dim: int, layer_num: int,
        device: str, enable_memory_saver: bool,
    ) -> None:  # fmt: skip
        shape = layer_num, size + page_size, 1, kv_lora_rank + qk_rope_head_dim
        self.dtype, self.kv_buffer = dtype, torch.zeros(shape, device=device).to(dtype)

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.kv_buffer[layer_id]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: Any, layer_id_override: int | None = None
    ) -> None:
        rows = cache_k.to(self.dtype).view(torch.uint8)
        self.kv_buffer[layer.layer_id].view(torch.uint8)[getattr(loc_info, "loc", loc_info)] = rows


class AttentionBackendRegistry:
    handlers: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register(cls, backend_name: str, handler_func: Any) -> None:
        cls.handlers[backend_name] = handler_func


def handle_attention_trtllm_mla(attn: Any, forward_batch: Any) -> str:
    return "MHA_CHUNKED_KV"


class LinearAttnKernelBackend(enum.Enum):
    TRITON, FLASHINFER, CUSTOM = "triton", "flashinfer", "custom"

    @classmethod
    def _missing_(cls, value: object) -> LinearAttnKernelBackend:
        return cls.CUSTOM

    def is_custom(self) -> bool:
        return self is LinearAttnKernelBackend.CUSTOM


class LinearAttnKernelBase:
    uses_state_checkpoints = False


class GDNKernelDispatcher:
    def __init__(self, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None) -> None:
        for backend in (decode_backend, prefill_backend):
            if backend.is_custom():
                raise ValueError(f"Unsupported GDN backend: {backend}")
        self.decode_kernel: Any = LinearAttnKernelBase()
        self.extend_kernel: Any = self.decode_kernel
        self.verify_kernel: Any = self.decode_kernel
        self.supports_packed_decode = True

    def decode(
        self, q: Any, k: Any, v: Any, a: Any, b: Any, *, A_log: Any, dt_bias: Any, ssm_states: Any,
        cache_indices: Any, query_start_loc: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        named = {"A_log": A_log, "dt_bias": dt_bias, "ssm_states": ssm_states, "cache_indices": cache_indices}
        return self.decode_kernel.decode(q, k, v, a, b, query_start_loc=query_start_loc, **named, **kwargs)

    def extend(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, *, ssm_states: Any, cache_indices: Any,
        query_start_loc: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        named = {"ssm_states": ssm_states, "cache_indices": cache_indices, "query_start_loc": query_start_loc}
        return self.extend_kernel.extend(q, k, v, g, beta, **named, **kwargs)

    def target_verify(
        self, A_log: Any, dt_bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any, *, ssm_states: Any,
        cache_indices: Any, query_start_loc: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        named = {"ssm_states": ssm_states, "cache_indices": cache_indices, "query_start_loc": query_start_loc}
        return self.verify_kernel.target_verify(
            A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, **named, **kwargs
        )


class SWAKVPool:
    def __init__(
        self, size: int, size_swa: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int,
        swa_attention_layer_ids: list[int], full_attention_layer_ids: list[int], device: str,
    ) -> None:  # fmt: skip
        shape: Any = page_size, dtype, head_num, head_dim
        self.pools = [
            MHATokenToKVPool(tokens, *shape, len(ids), device, False)
            for tokens, ids in ((size, full_attention_layer_ids), (size_swa, swa_attention_layer_ids))
        ]
        self.layers_mapping = {i: (n, False) for n, i in enumerate(full_attention_layer_ids)}
        self.layers_mapping |= {i: (n, True) for n, i in enumerate(swa_attention_layer_ids)}
        self.full_to_swa_index_mapping: Any = None

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> Any:
        return self.full_to_swa_index_mapping[kv_indices]

    def get_kv_buffer(self, layer_id: int) -> Any:
        index, windowed = self.layers_mapping[layer_id]
        return self.pools[windowed].get_kv_buffer(index)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any, k_scale: Any = 1.0, v_scale: Any = 1.0
    ) -> None:
        index, windowed = self.layers_mapping[layer.layer_id]
        loc = loc_info.swa_loc if windowed else loc_info.loc
        self.pools[windowed].set_kv_buffer(None, loc, cache_k, cache_v, k_scale, v_scale, layer_id_override=index)


def paged_kv_view(buf: torch.Tensor, page_size: int, head_num: int, head_dim: int) -> torch.Tensor:
    return buf.view(-1, page_size, head_num, head_dim)


@dataclass
class MoeRunnerConfig:
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True


@dataclass
class TritonMoeQuantInfo:
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any
    hidden_states_pre_quant: Any = None


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class DispatchMoeRunnerCore:
    def __init__(self, config: Any) -> None:
        self.config = config


class MoeRunner:
    def __init__(self, runner_backend: Any, config: Any, lora_enabled: bool = False) -> None:
        for hook in HookRegistry.before:
            hook(self, runner_backend, config, lora_enabled)
        self.runner_backend, self.config = runner_backend, config
        self.runner_core = _cores[runner_backend.value](config)

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        return self.runner_core.run_from_dispatch(dispatch_output, quant_info, self.config, hooks=None)


def register_moe_runner_core(backend_name: str, factory: Callable[..., Any]) -> None:
    _cores[backend_name] = factory


def get_moe_runner_backend() -> Any:
    return SimpleNamespace(value=_settings.moe)


def resolve_moe_runner_backend(backend: Any) -> Any:
    return SimpleNamespace(value=backend)


class UnquantizedFusedMoEMethod:
    runner: Any = None

    @property
    def load_up_proj_weight_first(self) -> bool:
        return False

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self.runner = MoeRunner(SimpleNamespace(value="triton"), moe_runner_config)


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    def get_triton_quant_info(self, layer: Any) -> TritonMoeQuantInfo:
        return TritonMoeQuantInfo(
            layer.w13_weight, layer.w2_weight, None, None, layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
        )

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        raise AssertionError("the plugin's method is for another backend here")


class HookType(enum.Enum):
    BEFORE = "before"
    REPLACE = "replace"


class HookRegistry:
    before: tuple[Any, ...] = ()
    replaced: tuple[Any, ...] = ()

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any = None, *, source: Any = None) -> None:
        where, name = target.rsplit(".", 1)
        if hook_type is HookType.BEFORE:
            assert where.endswith("runner.MoeRunner") and name == "__init__"
            cls.before += (hook,)
        else:
            assert issubclass(hook, getattr(sys.modules[where], name))
            cls.replaced += (hook,)


@dataclass
class _Settings:
    moe: str = "auto"
    mamba: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)


_settings = _Settings()
_cores: dict[str, Any] = {"triton": DispatchMoeRunnerCore}
ATTENTION_BACKENDS: dict[str, Any] = {}
CHOICES: dict[str, list[str]] = {"attention": [], "moe": [], "linear": [], "chunked": []}


def register_attention_backend(name: str) -> Callable[[Any], Any]:
    return lambda fn: ATTENTION_BACKENDS.setdefault(name, fn)


MODULES: dict[str, dict[str, Any]] = {
    "": {},
    "arg_groups.choices": {
        "add_attention_backend_choices": CHOICES["attention"].extend,
        "add_moe_runner_backend_choices": CHOICES["moe"].extend,
        "add_linear_attn_kernel_backend_choices": CHOICES["linear"].extend,
        "add_chunked_prefix_cache_attention_backend": CHOICES["chunked"].append,
    },
    "layers.attention.attention_registry": {
        "ATTENTION_BACKENDS": ATTENTION_BACKENDS, "register_attention_backend": register_attention_backend,
    },
    "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
    "layers.attention.linear.gdn_backend": {"GDNKernelDispatcher": GDNKernelDispatcher},
    "layers.attention.linear.kernels.kernel_backend": {"LinearAttnKernelBase": LinearAttnKernelBase},
    "layers.attention.linear.utils": {"LinearAttnKernelBackend": LinearAttnKernelBackend},
    "models.deepseek_common.attention_backend_handler": {
        "AttentionBackendRegistry": AttentionBackendRegistry,
        "handle_attention_trtllm_mla": handle_attention_trtllm_mla,
    },
    "layers.radix_attention": {"AttentionType": AttentionType, "RadixAttention": RadixAttention},
    "mem_cache.layout.paged_view": {"paged_kv_view": paged_kv_view},
    "mem_cache.memory_pool": {
        "KVWriteLoc": KVWriteLoc, "MHATokenToKVPool": MHATokenToKVPool, "MLATokenToKVPool": MLATokenToKVPool,
    },
    "mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
    "model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
    "runtime_context": {
        "get_spec": lambda: SimpleNamespace(
            **{"speculative_algorithm": None, "speculative_eagle_topk": None, "speculative_num_draft_tokens": None}
            | _settings.spec
        ),
        "get_exec": lambda: SimpleNamespace(
            mamba=SimpleNamespace(
                **dict.fromkeys(f"linear_attn_{x}_backend" for x in ("decode", "prefill", "verify"))
                | {"linear_attn_backend": "triton"}
                | _settings.mamba
            )
        ),
        "get_parallel": lambda: SimpleNamespace(attn_cp_size=1, attn_dcp_size=1),
    },
    "layers.moe.moe_runner": {"MoeRunner": MoeRunner, "register_moe_runner_core": register_moe_runner_core},
    "layers.moe.moe_runner.base": {
        "DispatchMoeRunnerCore": DispatchMoeRunnerCore, "MoeRunnerConfig": MoeRunnerConfig,
    },
    "layers.moe.moe_runner.runner": {"MoeRunner": MoeRunner},
    "layers.moe.moe_runner.triton": {"TritonMoeQuantInfo": TritonMoeQuantInfo},
    "layers.moe.token_dispatcher.standard": {
        "StandardCombineInput": StandardCombineInput, "StandardDispatchOutput": StandardDispatchOutput,
    },
    "layers.moe.utils": {
        "get_moe_runner_backend": get_moe_runner_backend, "resolve_moe_runner_backend": resolve_moe_runner_backend,
    },
    "layers.quantization": {}, "layers.quantization.fp8": {"Fp8MoEMethod": Fp8MoEMethod},
    "layers.quantization.unquant": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
    "plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
}  # fmt: skip
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    register_attention_backend, RadixAttention.__init__, paged_kv_view, AttentionBackend.forward,
    vars(KVWriteLoc)["for_batch"].__func__, MHATokenToKVPool.get_kv_buffer, MHATokenToKVPool.set_kv_buffer,
    MLATokenToKVPool.get_key_buffer, MLATokenToKVPool.set_kv_buffer, GDNKernelDispatcher.__init__,
    GDNKernelDispatcher.decode, GDNKernelDispatcher.extend, GDNKernelDispatcher.target_verify,
    vars(AttentionBackendRegistry)["register"].__func__, handle_attention_trtllm_mla,
    SWAKVPool.set_kv_buffer, SWAKVPool.translate_loc_from_full_to_swa, DispatchMoeRunnerCore.__init__,
    register_moe_runner_core, MoeRunner.__init__, MoeRunner.run, get_moe_runner_backend, resolve_moe_runner_backend,
    UnquantizedFusedMoEMethod.create_moe_runner, Fp8MoEMethod.apply, Fp8MoEMethod.get_triton_quant_info,
    vars(HookRegistry)["register"].__func__,
)  # fmt: skip


def parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function as the record writes them."""
    given = inspect.signature(function).parameters.values()
    stars = {inspect.Parameter.KEYWORD_ONLY: "*", inspect.Parameter.VAR_POSITIONAL: "*"}
    stars[inspect.Parameter.VAR_KEYWORD] = "**"
    return [stars.get(x.kind, "") + x.name + ("" if x.default is inspect.Parameter.empty else "=") for x in given]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"sglang.srt.{name}")


def batch(requests: Sequence[tuple[int, int]], mode: str, device: str, modes: Any = None) -> Any:
    """A step of requests of (kv_len, qo_len). With drafts seq_lens does not count them, as SGLang passes them."""
    modes = modes or module("model_executor.forward_batch_info").ForwardMode
    kv_lens, qo_lens = (torch.tensor(x) for x in zip(*requests))
    return SimpleNamespace(
        forward_mode=modes[mode], batch_size=len(requests),
        req_pool_indices=torch.arange(1, len(requests) + 1).to(device),
        seq_lens=(kv_lens - qo_lens if mode == "TARGET_VERIFY" else kv_lens).to(device),
        extend_seq_lens=qo_lens.to(device), extend_seq_lens_cpu=qo_lens.tolist(), spec_info=None,
        out_cache_loc=torch.empty(0), out_cache_loc_is_physical=False,
    )  # fmt: skip


def settings(moe: str = "auto", **spec: Any) -> AbstractContextManager[Any]:
    """The options of a server, for the backends that a test makes."""
    if IS_REAL:
        context = module("runtime_context").get_context()
        return context.override_server_args(moe_runner_backend=moe, **spec)  # type: ignore[no-any-return]
    mamba = {name: value for name, value in spec.items() if name.startswith("linear_attn_")}
    _settings.moe, _settings.spec, _settings.mamba = moe, {n: spec[n] for n in spec.keys() - mamba.keys()}, mamba
    return nullcontext()


def install(version: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """Makes SGLang, or the stand-ins of a version, importable; returns fi's plugin, imported over them."""
    if IS_REAL:  # its pool of latent rows asks
        module("runtime_context").get_parallel().override_permanently(dcp_enabled=False, attn_dcp_size=1)
    else:
        ATTENTION_BACKENDS.clear()
        HookRegistry.before = HookRegistry.replaced = ()
        for names in CHOICES.values():
            names.clear()
        patch.setattr(importlib.metadata, "version", {"sglang": version}.__getitem__)
        for path, contents in MODULES.items():
            parts = f"sglang.srt.{path}".rstrip(".").split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules:
                    made = ModuleType(name)
                    vars(made)["__path__"] = []
                    patch.setitem(sys.modules, name, made)
            vars(sys.modules[".".join(parts)]).update(contents)
    for name in [name for name in sys.modules if name.split(".", 3)[:3] == PLUGIN.split(".")]:
        patch.delitem(sys.modules, name)
    return importlib.import_module(PLUGIN)
