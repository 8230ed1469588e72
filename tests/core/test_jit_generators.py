"""FlashInfer's generators of modules: its arguments by position, its import paths, and the kernels of each."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

from fi_core import jit
from fi_core.compat import names
from fi_core.jit import ops
from fi_core.runtime.spec.target import CPU, Target

HOPPER = Target("cuda", "90a")
BF16, I32 = torch.bfloat16, torch.int32
DTYPES = (BF16, BF16, BF16)
POD = (*DTYPES, 128, 0, False, True, False, I32, 0, False, False)

# The name of a generator, its arguments as FlashInfer takes them, and ops of which it has kernels.
CALLS: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "single_decode": ((*DTYPES, 128, 128, 0, False, False), {"single_attention"}),
    "single_prefill": (("fa3", *DTYPES, 128, 128, 0, False, False, False), {"single_attention"}),
    "batch_decode": ((*DTYPES, I32, 128, 128, 0, False, True), {"batch_decode"}),
    "batch_prefill": (("fa3", *DTYPES, I32, 128, 128, 0, False, False, False), {"batch_prefill"}),
    "batch_attention": ((*DTYPES, I32, 128, 128, 0, False, False), {"batch_decode", "batch_prefill"}),
    "batch_mla": (("fa2", *DTYPES, I32, 512, 64, False), {"batch_mla"}),
    "pod": (POD, {"batch_decode", "batch_prefill"}),
    "batch_pod": (POD, {"batch_decode", "batch_prefill"}),
    "act_and_mul": (("silu",), {"act_and_mul"}),
    "gemm": ((), {"gemm", "gemm_few_bits"}),
    "gemm_sm90": ((), {"gemm"}),
    "fp8_blockscale_gemm_sm90": ((), {"gemm"}),
    "tinygemm2": ((), {"gemm"}),
    "dsv3_router_gemm": ((), {"gemm"}),
    "cutlass_fused_moe_sm90": ((True,), {"moe_experts", "moe_sort"}),
    "dsv3_fused_routing": (("default",), {"moe_route"}),
    "hash_topk": ((), {"moe_route"}),
    "moe_utils": ((), {"moe_sort", "moe_finalize"}),
    "trtllm_comm": ((), {"all_reduce"}),
    "trtllm_mnnvl_comm": ((), {"all_reduce"}),
    "vllm_comm": ((), {"all_reduce"}),
    "comm_alltoall": ((), {"moe_dispatch", "moe_combine"}),
    "moe_alltoall": (("legacy",), {"moe_dispatch", "moe_combine"}),
    "dcp_alltoall": ((), {"all_to_all"}),
    "fp4_quantization_sm90": ((), {"block_quantize"}),
    "fp4_kv_quantization": ((), {"append_nvfp4_kv_cache"}),
    "fp4_kv_dequantization": ((), {"block_dequantize"}),
    "cascade": ((), {"merge_state", "merge_states"}),
    "norm": ((), {"rmsnorm", "layernorm"}),
    "page": ((), {"append_paged_kv_cache"}),
    "quantization": ((), {"packbits"}),
    "rope": ((), {"rope"}),
    "sampling": ((), {"sample"}),
    "topk": ((), {"top_k"}),
}


@pytest.fixture(autouse=True)
def no_driver(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fi_core.runtime.build.driver.LIBRARY", "libno-driver-here.so")


@pytest.mark.parametrize("word", CALLS)
def test_arguments_by_position(word: str) -> None:
    given, wanted = CALLS[word]
    spec = getattr(jit, f"gen_{word}_module")(*given, targets=[HOPPER])
    assert isinstance(spec, jit.JitSpec)
    assert wanted <= {made.op.name for made in spec.specs}  # type: ignore[attr-defined]
    assert {artifact.kind for artifact in spec.artifacts} == {"cuda", "cubin"}


def test_the_kernels_are_those_of_one_configuration() -> None:
    """Both sizes of a prompt, the narrow and wide rows of MLA, and a name for each configuration."""
    made = {word: getattr(jit, f"gen_{word}_module")(*CALLS[word][0], targets=[HOPPER]) for word in list(CALLS)[:7]}
    assert len({spec.name for spec in made.values()}) == len(made)
    few = {dict(spec.axes).get("few") for spec in made["single_prefill"].specs}
    assert few == {False, True}
    assert len(made["batch_mla"].specs) > 1
    assert made["batch_decode"].name.startswith("batch_decode_with_kv_cache_q_bf16_")
    capped = jit.gen_single_decode_module(*DTYPES, 128, 128, 0, False, True, targets=[CPU])
    assert capped.name.endswith("soft_cap_True_decode_True")


def test_every_generator_that_is_listed_takes_its_parameters() -> None:
    """By position, up to the last that FlashInfer gives it."""
    listed = [e for p, e in names.read().items() if p.startswith("jit.gen_") and e.kind == "here" and not e.same]
    listed = [entry for entry in listed if "customize" not in entry.path and entry.name != "gen_jit_spec"]
    assert {entry.name.removeprefix("gen_").removesuffix("_module") for entry in listed} <= set(CALLS)
    for entry in listed:
        word = entry.name.removeprefix("gen_").removesuffix("_module")
        parameters = [p for p in (entry.parameters or "").split(", ") if p]
        assert len(CALLS[word][0]) == len(parameters), entry.name
        inspect.signature(getattr(jit, entry.name)).bind(*CALLS[word][0])


@pytest.mark.parametrize(
    ("word", "change", "message"),
    [
        ("batch_prefill", {0: "fa4"}, "backend: auto, fa2 or fa3 is required; got 'fa4'"),
        ("batch_decode", {0: torch.int8}, "requires q in f16"),
        ("batch_mla", {5: 256}, r"head_dim_ckv, head_dim_kpe: 512 and 64 \(or 0\) are required; got 256, 64"),
        ("batch_mla", {3: torch.float16}, "dtype_o: the dtype of q, torch.bfloat16, is required; got torch.float16"),
        ("batch_attention", {8: True}, "use_profiler: False is required"),
        ("moe_alltoall", {0: "sm100a"}, "target: 'legacy' is required; got 'sm100a'"),
    ],
)
def test_what_has_no_kernels_is_refused(word: str, change: dict[int, Any], message: str) -> None:
    given = [change.get(place, value) for place, value in enumerate(CALLS[word][0])]
    with pytest.raises(ValueError, match=message):
        getattr(jit, f"gen_{word}_module")(*given, targets=[HOPPER])
    with pytest.raises(ValueError, match="act_func_def: must be None"):
        jit.gen_act_and_mul_module("silu", "x", targets=[CPU])
    with pytest.raises(TypeError, match="gen_norm_module: no positional parameter is expected"):
        jit.gen_norm_module(3, targets=[CPU])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("module", "name"),
    {
        "attention": "gen_pod_module",
        "attention.modules": "gen_customize_batch_prefill_module",
        "gemm": "gen_gemm_module",
        "gemm.core": "gen_gemm_sm90_module",
        "fused_moe": "gen_cutlass_fused_moe_sm90_module",
        "comm": "gen_vllm_comm_module",
        "norm": "gen_norm_module",
    }.items(),
)
def test_import_paths(module: str, name: str) -> None:
    """FlashInfer's modules of generators, each the same object as in `jit`."""
    assert getattr(importlib.import_module(f"fi_core.jit.{module}"), name) is getattr(jit, name)


def test_a_generator_that_is_not_there() -> None:
    with pytest.raises(ImportError, match="gen_gemm_sm100_module is not in fi: its kernels are for Blackwell"):
        from fi_core.jit.gemm import gen_gemm_sm100_module  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(AttributeError, match=r"gen_rmsnrm_module'; did you mean 'gen_rmsnorm_module'\?"):
        ops.gen_rmsnrm_module  # noqa: B018
