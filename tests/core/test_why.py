"""`fi-core why` of names without a description, of wrappers with a variant, and without launchers: it only looks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import fi_core
from core.console import Cli
from fi_core.cli import why
from fi_core.cli.arguments import parser
from fi_core.cli.declared import WAY_OUT
from fi_core.registry import described, ops
from fi_core.runtime.build import sources
from fi_core.runtime.resolve import build_missing, store


def test_why_answers_for_every_public_name(cli: Cli, fresh: Any, tmp_path: Path) -> None:
    """By its description, or by the ops that its code reaches; also for a GPU that is not there."""
    undescribed = []
    for module, names in vars(fi_core)["_MODULES"].items():
        home = importlib.import_module(f"fi_core.{module}")
        for name in dict.fromkeys((*names, *getattr(home, "__all__", ()))):
            if callable(getattr(home, name)) and not name.startswith("_") and described(name) is None:
                undescribed.append((f"fi_core.{module}.{name}", name))
    assert len(undescribed) > 50
    for path, name in undescribed:
        answers = [why.run(parser().parse_args(["why", word, "--target", "sm_103a"])) for word in (path, name)]
        assert all(answer.ok for answer in answers), path
        by_path, by_name = (answer.data for answer in answers)
        if name in ops():  # the name alone is that of the op
            assert by_name["chosen"] == by_path["calls"][0]["chosen"] and by_name["op"] == name, path
        else:
            assert by_path["calls"] == by_name["calls"], path
    assert not (tmp_path / "cache" / "cached_ops").exists()
    text = cli("why", "fi_core.fused_moe.trtllm_bf16_moe", "weights=bf16", "--target", "sm_90a")
    assert text.startswith("fi_core.fused_moe.trtllm_bf16_moe on sm_90a: reaches moe_route, ")
    assert "\n  moe_route(logits=bf16, weights=bf16" in text
    assert "runs on the host" in cli("why", "vllm_meta_size")


def test_why_of_a_wrapper_with_a_variant_compiles_no_variant(cli: Cli, fresh: Any) -> None:
    name = "BatchPrefillWithCausalBidirectionalRangesWrapper"
    for target, chosen in (("sm_90a", "wgmma_sm90"), ("sm_80", "mma_sm80")):
        data = cli.json("why", name, "--target", target, "--compile")
        attention = data["calls"][-1]
        assert (attention["op"], attention["chosen"]) == ("batch_prefill", chosen)
        assert any("causal_or_in_range" in file["file"] for file in attention["files"])
        assert attention["launches"]
    assert store.entries() == []


@pytest.mark.parametrize("m", [16, 1000])
@pytest.mark.parametrize(
    "form",
    [
        "mm_bf16",
        "mm_fp8 rowwise=1",
        "gemm_fp8_nt_groupwise",
        "bmm_fp8",
        "grouped_mm_bf16",
        "group_gemm_fp8_nt_groupwise",
    ],
)
def test_why_predicts_the_times_of_products(cli: Cli, form: str, m: int) -> None:
    """Of the configuration that the launcher takes, and of the next two."""
    asked = "why", *form.split(), f"m={m}", "n=4608", "k=7168", "--target", "sm_90a", "--compile"
    (call,) = cli.json(*asked)["calls"]
    (launch,) = call["launches"]
    (chosen, _), *_ = launch["predicted"]
    times = [us for _, us in launch["predicted"]]
    assert len(times) == 3 and times == sorted(times) and times[0] > 10
    assert chosen.split(",")[0] == launch["entry"]
    assert f"predicted {times[0]:.1f} us: {chosen}\n" in cli(*asked)


def test_why_counts_the_clusters_of_a_card(cli: Cli) -> None:
    """30 clusters of four CTAs run at a time on an H200, not 132 / 4: 30 tiles are split by four, and 33 are not."""
    for n, splits in ((30 * 128, True), (33 * 128, False)):
        asked = "why", "mm_bf16", "m=192", f"n={n}", "k=14336", "--target", "sm_90a", "--compile"
        (call,) = cli.json(*asked)["calls"]
        assert any("k split by 4" in words for words, _ in call["launches"][0]["predicted"]) == splits


def test_why_predicts_the_times_of_both_products_of_experts(cli: Cli) -> None:
    calls = cli.json("why", "cutlass_fused_moe", "num_tokens=4096", "--target", "sm_90a", "--compile")["calls"]
    predicted = {call["op"]: call["launches"][0]["predicted"] for call in calls if call["launches"]}
    assert {op: len(times) for op, times in predicted.items() if times} == {"moe_gated_gemm": 3, "gemm": 3}


@pytest.fixture
def refusing(fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own, and a C++ compiler that fails; the file has the words of its calls."""
    compiler, said = tmp_path / "c++", tmp_path / "said"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {said}\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return said


@pytest.mark.parametrize("target", ["sm_90a", "sm_80", "cpu"])
@pytest.mark.parametrize(
    ("name", "ops_of_it"),
    [
        ("fi_core.mm_bf16", ["gemm"]),
        ("cutlass_fused_moe", ["moe_sort"]),
        ("BatchDecodeWithPagedKVCacheWrapper", ["decode_plan", "batch_decode"]),
        ("BatchPrefillWithCausalBidirectionalRangesWrapper", ["batch_prefill"]),
    ],
)
def test_why_compiles_nothing(
    cli: Cli, refusing: Path, tmp_path: Path, target: str, name: str, ops_of_it: list[str]
) -> None:
    """Without launchers it shows what is declared, and how to learn more."""
    data = cli.json("why", name, "--target", target)
    shown = {call["op"]: call for call in data["calls"]}
    assert set(ops_of_it) <= shown.keys()
    assert "add --compile" in data["incomplete"] and "pip install fi-jit-cache" in data["incomplete"]
    for op, call in shown.items():
        assert not call["launches"], op
        if call["request"] is None:  # else the choice was made in Python
            declared = [i.name for i in ops()[op].implementations]
            assert list(call["implementations"]) == declared
            assert any(not one["why_not"] for one in call["implementations"].values())
            assert call["files"][0]["from"].startswith("would compile with")
    assert not (tmp_path / "cache").exists() and store.entries() == []
    assert not refusing.exists() or set(refusing.read_text().splitlines()) == {"--version"}
    text = cli("why", name, "--target", target)
    assert text.rstrip().endswith(WAY_OUT)


def test_why_shows_the_conditions_that_are_declared(cli: Cli, refusing: Path) -> None:
    found = cli.json("why", "mm_bf16", "--target", "sm_80")["calls"][0]["implementations"]
    assert found["wgmma_sm90"]["why_not"] == ["requires capability == 90, got 80"]
    assert "requires b of a's dtype, or both fp8, one of them e4m3" in found["mma_sm80"]["requires"]
    assert found["mma_sm80"]["modules"] > 0 == found["mma_sm80"]["modules_there"]
    assert "runs only where the caller passes backend='cudnn'" in (
        cli("why", "BatchDecodeWithPagedKVCacheWrapper", "--target", "sm_90a")
    )
    assert "CompileError" in cli.json("why", "mm_bf16", "--target", "sm_80", "--compile", code=1)["error"] or cli.err


def test_one_16_bit_dtype_is_that_of_the_other_fields(cli: Cli) -> None:
    assert cli("why", "rmsnorm", "dtype=bf16", "--target", "cpu").startswith("rmsnorm(dtype=bf16, out=bf16, ")
    assert "kv=e4m3, out=bf16" in cli("why", "batch_decode", "q=bf16", "kv=e4m3", "--target", "sm_90a")


def test_why_shows_all_where_the_launcher_is_there(cli: Cli, fresh: Any) -> None:
    """A store that a call, or prebuild, has filled is enough."""
    assert cli.json("why", "fi_core.get_seq_lens", "--target", "cpu")["calls"][0]["request"] is None
    build_missing([sources.host_module(ops()["get_seq_lens"], "cpu")])
    data = cli.json("why", "fi_core.get_seq_lens", "--target", "cpu")
    assert "incomplete" not in data and data["calls"][0]["chosen"] == "cpu"
