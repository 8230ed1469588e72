"""Serving profiles: what engines call of each model is listed, shipped, and found where nothing may be compiled."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from core.console import Cli
from core.serving_calls import KV_DTYPES, PAGES, SERVED, Sizes, calls
from fi_core import aot, profiles
from fi_core.ahead import Options, iterate_specs, specs_of_model
from fi_core.observe.draw import Outline
from fi_core.profiles import MODELS, model_of
from fi_core.registry import described
from fi_core.runtime.build import sources
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import CPU, PREBUILT_ARCHS, Target

HOPPER = Target("cuda", "90a")


def chosen(target: Target, name: str, sizes: Sizes) -> set[Spec]:
    """The specs with kernels that a call of a public function chooses on a target."""
    found = described(name)
    assert found and found.template.make, name
    with Rehearsal(target, 132, 227 << 10) as rehearsal:  # of an H200
        found.call(found.template.make(Outline(), **sizes))
    specs = {choice.spec for choice, _ in rehearsal.calls}
    return {spec for spec in specs if not spec.op.is_composite and spec.unit() is not None}


OTHERS = [Target("cuda", arch) for arch in PREBUILT_ARCHS if arch != HOPPER.arch]
# Each model on Hopper and on one of the other targets, which have fewer kernels.
PLACES = [(target, *served) for n, served in enumerate(SERVED) for target in (HOPPER, OTHERS[n % len(OTHERS)])]


@pytest.mark.parametrize(("target", "name", "dtype"), PLACES, ids=lambda value: str(value))
def test_serving_calls_are_shipped_and_listed(target: Target, name: str, dtype: str) -> None:
    """Each call is rehearsed; a kernel that no package has, or that `prebuild --model` does not list, is named."""
    model, shipped = MODELS[name], {a.id for a in aot.grid(("cubin",))}
    missing: set[str] = set()
    for kv, page in itertools.product(KV_DTYPES, PAGES):
        if not (asked := list(calls(name, dtype, kv, page))):
            continue
        listed = set(iterate_specs(model, target, Options(dtype, kv, page, lora=True)))
        for function, sizes in asked:
            for spec in chosen(target, function, sizes):
                files = [artifact.id for artifact in sources.artifacts(spec)[1:]]
                missing |= {f"not shipped: {function}: {file}" for file in files if file not in shipped}
                if spec not in listed:
                    missing.add(f"not listed: {function}: {spec.name}")
    assert sorted(missing) == []


def test_every_listed_kernel_is_shipped() -> None:
    """For each model, target and option: prebuilt packages leave nothing to compile."""
    shipped = {artifact.id for artifact in aot.grid(("cubin",))}
    wrong = set()
    for (name, model), arch, kv in itertools.product(MODELS.items(), PREBUILT_ARCHS, profiles.KV_DTYPES):
        if model.latent and kv == "e5m2":
            continue
        dtypes = (None, "f16") if model.serves_fp16 else (None,)
        for (tp, page), dtype in itertools.product(((1, 16), (2, 1), (8, 64)), dtypes):
            options = Options(dtype, kv, page, tp, spec_tokens=4, lora=True)
            specs = iterate_specs(model, Target("cuda", arch), options)
            wrong |= {f"{name}: {a.id}" for spec in specs for a in sources.artifacts(spec)[1:] if a.id not in shipped}
    assert sorted(wrong) == []


def ops_of(name: str, **options: Any) -> set[str]:
    return {spec.op.name for spec in specs_of_model(name, HOPPER, **options)}


def test_models_have_the_kernels_of_their_layers() -> None:
    """Experts, latent attention and linear attention are not those of a dense model."""
    dense = ops_of("llama-8b")
    assert ops_of("mixtral-8x7b") - dense >= {"moe_route", "moe_sort", "moe_experts", "moe_gated_gemm", "gemm"}
    assert ops_of("gpt-oss-20b") - dense >= {"moe_route", "moe_mixed_gemm", "moe_experts"}
    deepseek = ops_of("deepseek-v3")
    assert {"batch_mla", "mla_plan", "concat_mla_k", "moe_experts"} <= deepseek and "batch_decode" not in deepseek
    assert ops_of("qwen3-next-80b-a3b") - dense >= {"chunk_gated_delta_rule", "recurrent_gated_delta_rule"}
    assert ops_of("llama-8b", tp=4, spec_tokens=3, lora=True) - dense == {"all_reduce", "chain_speculative", "gemm"}


def test_the_guide_counts_the_files_of_a_step() -> None:
    """docs/guides/caching.md: what `prepare` compiles with an empty store."""
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/caching.md").read_text()
    files = {artifact.id for spec in specs_of_model("llama-8b", HOPPER) for artifact in sources.artifacts(spec)}
    assert f"the {len(files)} files of a step of llama-8b" in guide


def names_of(**options: Any) -> set[str]:
    return {spec.name for spec in specs_of_model("llama-8b", HOPPER, **options)}


def test_options_change_what_is_listed() -> None:
    assert any("q_f16_kv_f16" in name for name in names_of(dtype="float16"))
    assert any("kv_e5m2" in name for name in names_of(kv_dtype="float8_e5m2"))
    assert {name for name in names_of(logits_dtype="float32") if name.startswith("sample")} < names_of()
    for wrong in ({"tp": 3}, {"tp": 0}):
        with pytest.raises(ValueError, match="tp: a divisor of the 32 heads is required"):
            names_of(**wrong)
    with pytest.raises(ValueError, match=r"logits_dtype: .* got 'fp9'"):
        names_of(logits_dtype="fp9")


CONFIGS = {
    "deepseek-v3": {
        "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "hidden_size": 7168,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "gpt-oss-20b": {
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
    },
    "mixtral-8x7b": {
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_local_experts": 8,
    },
    "qwen3-next-80b-a3b": {
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_the_model_of_its_name(name: str) -> None:
    assert model_of(CONFIGS[name]) == MODELS[name]


def test_vllms_name_of_gpt_oss_weights() -> None:
    given = CONFIGS["gpt-oss-20b"] | {"quantization_config": {"quant_method": "gpt_oss_mxfp4"}}
    assert model_of(given) == MODELS["gpt-oss-20b"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 64}, r"kv_lora_rank and qk_rope_head_dim of \(512, 64\)"),
        ({"mamba_d_state": 128}, "Mamba layers are in no profile"),
        ({"num_experts": 8, "quantization_config": {"quant_method": "awq"}}, "experts in fp8 blocks or mxfp4"),
        ({"linear_num_key_heads": 4, "linear_key_head_dim": 64}, "a linear_key_head_dim of 128"),
    ],
)
def test_a_configuration_that_no_profile_describes(change: Sizes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        model_of({"num_attention_heads": 8, "head_dim": 64, **change})


def test_the_list_of_a_model(cli: Cli, bare: None) -> None:
    """Name, op, file and place of each file; nothing is compiled."""
    data = cli.json("prebuild", "--model", "deepseek-v3", "--target", "sm_90a", "--kv-dtype", "e4m3", "--list")
    assert data["options"]["kv_dtype"] == "e4m3" and data["missing"] == len(data["files"])
    ops = {file["op"] for file in data["files"]}
    assert {"batch_mla", "moe_experts", "sample"} <= ops
    assert {"batch_mla_cuda.so", "mla_plan_cuda_sm_90a.cubin"} <= {file["file"] for file in data["files"]}
    assert {file["from"] for file in data["files"]} == {None}
    assert "would compile" in cli("prebuild", "--model", "llama-8b", "--target", "sm_90a", "--list")


def test_a_folder_of_a_build_image_serves(
    cli: Cli, bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prebuild --output` in an image with compilers, FI_CUBIN_DIR in one without."""
    from fi_core.runtime.build import toolchain
    from fi_core.runtime.resolve import provider, where

    folder = tmp_path / "kernels"
    command = ("prebuild", "--ops", "get_seq_lens", "--target", "cpu", "--target", "sm_90a")
    assert "FI_CUBIN_DIR=" in cli(*command, "--output", folder)
    index = json.loads((folder / "index.json").read_text())
    assert len(index["artifacts"]) == 3
    cli(*command, "--output", folder, code=1)
    assert "a folder that is missing or empty is required" in cli.err
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(provider, "providers", lambda: (provider.load_provider("FI_CUBIN_DIR", folder),))
    monkeypatch.setattr("fi_core.runtime.resolve.providers", provider.providers)
    monkeypatch.setenv("FI_JIT", "off")
    for name in ("nvrtc", "nvcc"):
        monkeypatch.setattr(toolchain, name, lambda: None)
    monkeypatch.setattr(toolchain, "cxx", lambda machine="": None)
    for target in (CPU, HOPPER):
        for spec in aot.specs(aot.ops()["get_seq_lens"], target):
            assert {found.origin for a in sources.artifacts(spec) if (found := where(a))} == {"FI_CUBIN_DIR"}
