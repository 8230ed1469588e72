"""`fi-core why` of names without a description, and of wrappers with a variant: the store stays empty."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import fi_core
from core.console import Cli
from fi_core.cli import why
from fi_core.cli.arguments import parser
from fi_core.registry import described, ops
from fi_core.runtime.resolve import store


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
        data = cli.json("why", name, "--target", target)
        attention = data["calls"][-1]
        assert (attention["op"], attention["chosen"]) == ("batch_prefill", chosen)
        assert any("causal_or_in_range" in file["file"] for file in attention["files"])
        assert attention["launches"]
    assert store.entries() == []


@pytest.mark.parametrize("m", [16, 1000])
def test_why_predicts_the_times_of_products(cli: Cli, m: int) -> None:
    """Of the configuration that the launcher takes, and of the next two."""
    asked = "why", "mm_bf16", f"m={m}", "n=4608", "k=7168", "--target", "sm_90a"
    (call,) = cli.json(*asked)["calls"]
    (launch,) = call["launches"]
    (chosen, _), *_ = launch["predicted"]
    times = [us for _, us in launch["predicted"]]
    assert len(times) == 3 and times == sorted(times) and times[0] > 10
    assert chosen.split(",")[0] == launch["entry"]
    assert f"predicted {times[0]:.1f} us: {chosen}\n" in cli(*asked)
