"""Records the interfaces of engines that fi's plugins implement or call, from the engines' wheels.

`python tools/engine_seams.py vllm=downloads/vllm-0.24.0.whl vllm=downloads/vllm-0.33.0.whl` rewrites
tests/engine_calls/vllm_seams.json: for each version the parameters of functions (`=`: has a default; `*`: by name
only) and the fields of classes. Nothing of an engine is run.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import sys
import types
from collections import defaultdict

from engine_names import RECORDS, sources

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Of each file its functions, methods and classes. A name that a version lacks is left out. With () behind a method: the
# names that its code reads, in order.
SEAMS = {
    "vllm": {
        "vllm/v1/attention/backend.py": (
            "AttentionBackend", "AttentionBackend.get_supported_kernel_block_sizes",
            "AttentionBackend.get_kv_cache_shape", "AttentionBackend.get_kv_cache_stride_order",
            "AttentionBackend.get_required_kv_cache_layout",
            "AttentionBackend.supported_kv_cache_layouts", "AttentionBackend.supports_sink",
            "AttentionBackend.supports_sliding_window", "AttentionBackend.supports_compute_capability",
            "AttentionBackend.get_supported_head_sizes", "AttentionMetadataBuilder",
            "AttentionMetadataBuilder.__init__",
            "AttentionMetadataBuilder._init_reorder_batch_threshold", "AttentionMetadataBuilder.build",
            "AttentionImpl.process_weights_after_loading", "AttentionImplBase.process_weights_after_loading",
            "AttentionImpl.forward", "AttentionCGSupport", "CommonAttentionMetadata", "MultipleOf",
        ),
        "vllm/v1/attention/backends/flashinfer.py": ("FlashInferImpl.__init__", "FlashInferImpl.do_kv_cache_update"),
        "vllm/v1/attention/backends/registry.py": ("AttentionBackendEnum.is_overridden", "register_backend"),
        "vllm/v1/attention/backends/utils.py": ("PerLayerParameters", "get_per_layer_parameters"),
        "vllm/v1/kv_cache_layout.py": ("KVCacheLayout",),
        "vllm/_custom_ops.py": ("reshape_and_cache_flash",),
        "vllm/triton_utils/jit_monitor.py": ("activate",), "vllm/utils/jit_monitor.py": ("activate",),
        "vllm/ir/op.py": ("IrOp.register_impl",),
        "vllm/ir/ops/layernorm.py": ("rms_norm", "fused_add_rms_norm"),
        "vllm/model_executor/custom_op.py": ("CustomOp.register_oot", "PluggableLayer.register_oot"),
        "vllm/config/vllm.py": ("get_current_vllm_config", "get_current_vllm_config_or_none"),
        "vllm/model_executor/utils.py": ("replace_parameter",),
        "vllm/model_executor/layers/fused_moe/activation.py": ("MoEActivation",),
        "vllm/model_executor/layers/fused_moe/config.py": ("FusedMoEConfig", "FusedMoEParallelConfig"),
        "vllm/model_executor/layers/fused_moe/modular_kernel.py": (
            "FusedMoEExperts.__init__", "FusedMoEExperts.is_supported_config", "FusedMoEExperts.activation_format",
            "FusedMoEExperts.expects_unquantized_inputs", "FusedMoEExperts._supports_current_device",
            "FusedMoEExperts._supports_no_act_and_mul", "FusedMoEExperts._supports_quant_scheme",
            "FusedMoEExperts._supports_activation", "FusedMoEExperts._supports_parallel_config",
            "FusedMoEExpertsModular.workspace_shapes", "FusedMoEExpertsModular.finalize_weight_and_reduce_impl",
            "FusedMoEExpertsModular.apply",
        ),
        "vllm/model_executor/layers/fused_moe/fused_moe_method_base.py": ("FusedMoEMethodBase.maybe_roundup_sizes",),
        "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py": (
            "UnquantizedFusedMoEMethod.__init__", "UnquantizedFusedMoEMethod.process_weights_after_loading",
        ),
        "vllm/model_executor/layers/fused_moe/oracle/fp8.py": ("Fp8MoeBackend",),
        "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py": ("Mxfp4MoeBackend", "make_mxfp4_moe_kernel"),
        "vllm/model_executor/layers/fused_moe/oracle/unquantized.py": ("UnquantizedMoeBackend",),
        "vllm/model_executor/layers/quantization/__init__.py": ("register_quantization_config",),
        "vllm/model_executor/layers/quantization/fp8.py": (
            "Fp8Config.get_quant_method", "Fp8MoEMethod.__init__", "Fp8MoEMethod.process_weights_after_loading",
        ),
        "vllm/model_executor/layers/quantization/mxfp4.py": (
            "Mxfp4Config.get_quant_method", "GptOssMxfp4MoEMethod.__init__",
            "GptOssMxfp4MoEMethod.maybe_roundup_sizes", "GptOssMxfp4MoEMethod.get_fused_moe_quant_config",
            "GptOssMxfp4MoEMethod.process_weights_after_loading",
        ),
        "vllm/model_executor/layers/mamba/mamba_utils.py": ("is_conv_state_dim_first",),
        "vllm/model_executor/layers/mamba/ops/causal_conv1d.py": ("causal_conv1d_update",),
        "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": (
            "ChunkGatedDeltaRule.__init__", "ChunkGatedDeltaRule.forward_cuda",
            "QwenGatedDeltaNetAttention.__init__", "QwenGatedDeltaNetAttention._forward_core_decode_non_spec",
        ),
        "vllm/v1/attention/backends/gdn_attn.py": ("GDNAttentionMetadata",),
        "vllm/model_executor/layers/utils.py": ("default_unquantized_gemm",),
        "vllm/v1/sample/ops/topk_topp_sampler.py": ("flashinfer_sampler_supported", "flashinfer_sample"),
        "vllm/distributed/parallel_state.py": ("GroupCoordinator", "get_tp_group"),
        "vllm/model_executor/layers/linear.py": ("RowParallelLinear.__init__", "RowParallelLinear.forward()"),
        "vllm/model_executor/models/llama.py": (
            "LlamaModel.__init__", "LlamaModel.forward()", "LlamaDecoderLayer.forward()",
        ),
        "vllm/model_executor/models/qwen2.py": (
            "Qwen2Model.__init__", "Qwen2Model.forward()", "Qwen2DecoderLayer.forward()",
        ),
        "vllm/model_executor/models/qwen3.py": (
            "Qwen3Attention.forward", "Qwen3Attention.forward()", "Qwen3DecoderLayer.forward()",
        ),
        "vllm/model_executor/models/qwen3_moe.py": ("Qwen3MoeAttention.forward", "Qwen3MoeAttention.forward()"),
        "vllm/model_executor/layers/attention/mla_attention.py": (
            "QueryLenSupport", "MLACommonDecodeMetadata", "MLACommonMetadata", "MLACommonMetadataBuilder.__init__",
            "MLACommonMetadataBuilder.build", "MLACommonMetadataBuilder._build_decode", "MLACommonImpl.__init__",
        ),
        "vllm/v1/attention/backends/mla/prefill/base.py": (
            "MLADimensions", "MLAPrefillBackend.__init__", "MLAPrefillBackend.supports_compute_capability",
            "MLAPrefillBackend.run_prefill_new_tokens", "MLAPrefillBackend.run_prefill_context_chunk",
        ),
        "vllm/v1/attention/backends/mla/prefill/registry.py": (
            "MLAPrefillBackendEnum.is_overridden", "register_mla_prefill_backend",
        ),
        "vllm/v1/attention/backends/mla/flashattn_mla.py": (
            "FlashAttnMLAImpl.__init__", "FlashAttnMLAImpl.forward_mqa",
        ),
        "vllm/model_executor/layers/activation.py": ("SiluAndMul.__init__", "SiluAndMul.forward_cuda"),
        "vllm/model_executor/layers/layernorm.py": ("GemmaRMSNorm.__init__", "GemmaRMSNorm.forward_cuda"),
        "vllm/model_executor/layers/rotary_embedding/deepseek_scaling_rope.py": (
            "DeepseekScalingRotaryEmbedding.forward_cuda",
        ),
        "vllm/model_executor/layers/rotary_embedding/base.py": (
            "RotaryEmbeddingBase.__init__", "RotaryEmbedding.forward_cuda",
        ),
    },
    "sglang": {
        "sglang/srt/layers/attention/attention_registry.py": ("register_attention_backend",),
        "sglang/srt/layers/attention/base_attn_backend.py": (
            "AttentionBackend", "AttentionBackend.forward", "AttentionBackend.forward_decode",
            "AttentionBackend.forward_extend", "AttentionBackend.init_forward_metadata",
            "AttentionBackend.init_forward_metadata_out_graph", "AttentionBackend.init_forward_metadata_in_graph",
            "AttentionBackend.init_cuda_graph_state", "AttentionBackend.get_cuda_graph_seq_len_fill_value",
        ),
        "sglang/srt/layers/attention/hybrid_linear_attn_backend.py": ("HybridLinearAttnBackend.__init__()",),
        "sglang/srt/layers/attention/linear/gdn_backend.py": (
            "GDNKernelDispatcher.__init__", "GDNKernelDispatcher.decode", "GDNKernelDispatcher.extend",
            "GDNKernelDispatcher.target_verify",
        ),
        "sglang/srt/layers/attention/linear/kernels/gdn_flashinfer.py": (
            "FlashInferGDNKernel.decode", "FlashInferGDNKernel.extend", "FlashInferGDNKernel.target_verify",
        ),
        "sglang/srt/layers/attention/linear/kernels/kernel_backend.py": ("LinearAttnKernelBase",),
        "sglang/srt/layers/attention/linear/utils.py": ("LinearAttnKernelBackend", "LinearAttnBackends"),
        "sglang/srt/layers/radix_attention.py": ("AttentionType", "RadixAttention.__init__"),
        "sglang/srt/mem_cache/layout/paged_view.py": ("paged_kv_view",),
        "sglang/srt/mem_cache/memory_pool.py": (
            "KVWriteLoc", "KVWriteLoc.for_batch", "MHATokenToKVPool.get_kv_buffer", "MHATokenToKVPool.set_kv_buffer",
            "MLATokenToKVPool.get_key_buffer", "MLATokenToKVPool.set_kv_buffer",
        ),
        "sglang/srt/mem_cache/swa_memory_pool.py": (
            "SWAKVPool.set_kv_buffer", "SWAKVPool.translate_loc_from_full_to_swa",
        ),
        "sglang/srt/model_executor/forward_batch_info.py": ("ForwardMode", "ForwardBatch"),
        "sglang/srt/model_executor/forward_batch_deepseek_mha_mixin.py": ("ForwardBatchDeepSeekMHAMixin",),
        "sglang/srt/models/deepseek_common/attention_backend_handler.py": (
            "AttentionBackendRegistry.register", "handle_attention_trtllm_mla",
        ),
        "sglang/srt/layers/moe/moe_runner/base.py": (
            "MoeRunnerConfig", "DispatchMoeRunnerCore.__init__", "DispatchMoeRunnerCore.run_from_dispatch",
        ),
        "sglang/srt/layers/moe/moe_runner/runner.py": (
            "register_moe_runner_core", "MoeRunner.__init__", "MoeRunner.run",
        ),
        "sglang/srt/layers/moe/moe_runner/triton.py": ("TritonMoeQuantInfo",),
        "sglang/srt/layers/moe/token_dispatcher/standard.py": ("StandardDispatchOutput", "StandardCombineInput"),
        "sglang/srt/layers/moe/utils.py": ("get_moe_runner_backend", "resolve_moe_runner_backend"),
        "sglang/srt/layers/quantization/fp8.py": (
            "Fp8MoEMethod.create_moe_runner", "Fp8MoEMethod.apply", "Fp8MoEMethod.get_triton_quant_info",
        ),
        "sglang/srt/layers/quantization/unquant.py": (
            "UnquantizedFusedMoEMethod.create_moe_runner", "UnquantizedFusedMoEMethod.load_up_proj_weight_first",
        ),
        "sglang/srt/plugins/hook_registry.py": ("HookType", "HookRegistry.register"),
    },
}  # fmt: skip


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The parameters of a function in order."""
    a = function.args
    first = [*a.posonlyargs, *a.args]
    optional = len(first) - len(a.defaults)
    names = [f"{x.arg}=" if i >= optional else x.arg for i, x in enumerate(first)]
    by_name = [f"*{x.arg}" + ("=" if default else "") for x, default in zip(a.kwonlyargs, a.kw_defaults)]
    rest = [f"{stars}{x.arg}" for stars, x in (("*", a.vararg), ("**", a.kwarg)) if x]
    return names + by_name + rest


def fields(node: ast.ClassDef) -> list[str]:
    """The names that the body of a class assigns or declares."""
    found: list[str] = []
    for child in node.body:
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        found += [target.id for target in targets if isinstance(target, ast.Name)]
    return found


def names_read(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The attributes and globals that a function reads, as its `__code__.co_names` has them."""
    bare = ast.Module([copy.deepcopy(node)], [])
    function = bare.body[0]
    assert isinstance(function, FUNCTIONS)
    function.decorator_list = []
    code = compile(ast.unparse(bare), "", "exec", flags=annotations.compiler_flag)
    return next(list(x.co_names) for x in code.co_consts if isinstance(x, types.CodeType) and x.co_name == node.name)


def interface(text: str) -> dict[str, str]:
    """The functions, methods and classes of a file by name."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, FUNCTIONS):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = fields(node)
            methods = [x for x in node.body if isinstance(x, FUNCTIONS)]
            found |= {f"{node.name}.{x.name}": parameters(x) for x in methods}
            found |= {f"{node.name}.{x.name}()": names_read(x) for x in methods}
    return {name: ", ".join(parts) for name, parts in found.items()}


def record(engine: str, files: dict[str, str]) -> dict[str, dict[str, str]]:
    """The interfaces of a version, by file and name."""
    found = {path: interface(files[path]) for path in SEAMS[engine] if path in files}
    return {path: {n: names[n] for n in SEAMS[engine][path] if n in names} for path, names in found.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+", help="ENGINE=WHEEL, or the name of an installed engine")
    versions: dict[str, dict[str, dict[str, dict[str, str]]]] = defaultdict(dict)
    for place in parser.parse_args(arguments).engines:
        engine = place.partition("=")[0]
        version, files = sources(place)
        versions[engine][version] = record(engine, files)
    for engine, seams in versions.items():
        (RECORDS / f"{engine}_seams.json").write_text(json.dumps(seams, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
