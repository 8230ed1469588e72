"""The examples do what they claim; the serving engine gives the tokens of transformers."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["custom_attention.py", "decode.py", "decoder_block.py", "prefill.py"])
def test_help_runs_nothing(name: str) -> None:
    said = run(name, "--help")
    assert said.startswith(f"usage: {name} [-h]") and "largest error" not in said


def test_decode() -> None:
    said = run("decode.py", "3")
    assert "lengths [43, 4, 503]" in said and "largest error of the last step 0.0" in said


def test_prefill() -> None:
    assert "largest error of 382 tokens 0.0" in run("prefill.py", "50")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adapters(device: str) -> None:
    said = run("adapters.py", "--device", device).splitlines()
    assert said[:2] == [
        "18 tokens with an adapter, 6 without; those have the bits of the layers alone: True",
        "18 tokens with an adapter, 6 without; those have the bits of the layers alone: True",
    ]
    assert float(said[2].split()[-1]) < 0.01


def test_decoder_block() -> None:
    """A decoder block on the bytes of a text, every op checked; input that is not text is refused in one line."""
    command = [sys.executable, str(EXAMPLES / "decoder_block.py"), str(ROOT / "missing")]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert re.fullmatch(r"FILE: a text is required; .*No such file.*\n", refused.stderr)
    said = run("decoder_block.py", str(ROOT / "LICENSE"))
    assert "17 calls checked; all are right." in said
    for op in ("rmsnorm", "single_prefill_with_kv_cache", "single_decode_with_kv_cache", "merge_state", "silu_and_mul"):
        assert re.search(rf"^{op} .* ms .* us .*(jit|store|fi-\w+|kernel of a line above)", said, re.MULTILINE)


def test_transformers_models() -> None:
    """A row for each family: every token is that of eager attention. tests/integrations has the details."""
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    options = ("--device", "cpu", "--families", "llama,gpt-oss", "--new-tokens", "4", "--replace", "--json")
    rows = [json.loads(line) for line in run("transformers_models.py", *options).splitlines()]
    assert [row["model"] for row in rows] == ["llama", "gpt-oss"]
    assert all(row["equal"] == row["tokens"] == 12 and row["fi tokens/s"] > 0 for row in rows)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_latent_attention(device: str) -> None:
    """MLA in prefill and absorbed in decode give the tokens of transformers' eager attention.

    On the GPU, in float16, a token may be the second likeliest, within the rounding of the logits.
    """
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    said = json.loads(run("latent_attention.py", "--device", device, "--json"))
    assert said["tokens"] == sum(map(len, said["generated"])) == 96
    assert said["worst_gap"] <= (0.05 if device == "cuda" else 0.0)
    assert said["equal"] >= said["tokens"] - (3 if device == "cuda" else 0)
    assert len(set(map(tuple, said["generated"]))) == 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sparse_attention(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row chooses the keys that torch chooses, its layer gives transformers' output within the rounding of a bf16
    cache, and where all keys are chosen tokens are those of dense attention.

    On the GPU fp8 products are summed in 14 bits, so some rows choose another key at the threshold.
    """
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    monkeypatch.syspath_prepend(EXAMPLES)  # to run in this process, which has transformers
    monkeypatch.setattr(sys, "argv", ["sparse_attention.py", "--device", device, "--tokens", "4", "--json"])
    importlib.import_module("sparse_attention").main()
    said = json.loads(capsys.readouterr().out)
    assert said["all"]["top_k"] == 44, "as many as the longest text has tokens"
    for one in said.values():
        least = one["rows"] if device == "cpu" or one["top_k"] == 44 else 0.9 * one["rows"]
        assert one["rows"] == 2 * (63 + 4 * 3) and one["equal"] >= least
        assert one["worst_error"] <= (0.01 if one["equal"] == one["rows"] else 0.3)
    assert said["all"]["gap"] <= 0.02
    assert said["all"]["generated"] != said["few"]["generated"], "few keys are another attention"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mixture_of_experts(device: str) -> None:
    """Two of sixteen experts for each token, prompts in chunks beside decoding: the tokens of transformers' loop over
    the experts.

    On the GPU, in float16, a token may be the second likeliest, within the rounding of the logits.
    """
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    said = json.loads(run("mixture_of_experts.py", "--device", device, "--json"))
    assert said["tokens"] == sum(map(len, said["generated"])) == 96
    assert said["worst_gap"] <= (0.05 if device == "cuda" else 0.0)
    assert said["equal"] >= said["tokens"] - (3 if device == "cuda" else 0)
    assert len(set(map(tuple, said["generated"]))) == 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_transformers_serving(device: str) -> None:
    """A Nemotron-H and a Qwen3-Next: prefixes and drafts save half of the steps, and change no bit of the logits."""
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    rows = [json.loads(line) for line in run("transformers_serving.py", "--device", device, "--json").splitlines()]
    assert [row["model"] for row in rows] == ["NemotronH", "Qwen3Next"]
    for row in rows:
        assert row["same bits"] and row["reused tokens"] == 128
        assert row["steps with prefixes and drafts"] <= row["steps"] / 2
        assert row["tokens"] == 72 and row["worst gap"] <= 0.25


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generate(device: str) -> None:
    """Requests come and go, prompts in chunks, pages run out: every token is that of transformers' eager generate().

    On the GPU, in float16, one request may leave them: at a tie within the rounding of transformers' own logits.
    """
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    said = json.loads(run("generate.py", "--device", device, "--json"))
    if device == "cpu":  # transformers' own generate() on fi's attention gives the same tokens
        through = json.loads(run("generate.py", "--device", device, "--attn", "fi", "--json"))
        assert through["check"]["passed"] and through["check"]["equal"] == said["check"]["tokens"]
    check = said["check"]
    assert check["passed"] and said["repeatable"]
    assert said["compiled_while_measured"] == 0, "a rate would count a compiler"
    assert check["tokens"] == sum(len(r["generated"]) for r in said["requests"]) > 200
    assert check["leave"] <= (1 if device == "cuda" else 0)
    assert check["leave"] or check["equal"] == check["tokens"]
    assert said["preemptions"] > 0 and said["steps"] > 50
    assert max(len(r["prompt"]) for r in said["requests"]) > 2 * said["token_budget"]
    assert len({tuple(r["generated"]) for r in said["requests"]}) == len(said["requests"])
    for op in ("batch_prefill", "batch_decode", "append_paged_kv_cache", "rmsnorm", "rope", "act_and_mul", "sample"):
        assert any(name.startswith(op) for name in said["kernels"]), op


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multigpu])])
def test_generate_on_several_ranks(device: str) -> None:
    """Four processes, or one for each of 2, 4 or 8 GPUs, share the weights and give the tokens of transformers."""
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    ranks = 4
    if device == "cuda":
        import torch

        ranks = max(n for n in (2, 4, 8) if n <= torch.cuda.device_count())
    said = json.loads(run("generate.py", "--device", device, "--tp", str(ranks), "--json"))
    assert said["tp"] == ranks and said["check"]["passed"] and said["repeatable"]
    assert said["check"]["leave"] <= (1 if device == "cuda" else 0)
    assert said["check"]["leave"] or said["check"]["equal"] == said["check"]["tokens"] > 200
    assert any(name.startswith("all_reduce") for name in said["kernels"])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generate_by_chance(device: str) -> None:
    """Drawn tokens are those of the seeds: a second run says the same; and all requests say something else."""
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    said = json.loads(run("generate.py", "--device", device, "--temperature", "0.8", "--top-p", "0.9", "--json"))
    assert said["repeatable"] and "check" not in said
    assert len({tuple(r["generated"]) for r in said["requests"]}) == len(said["requests"])


@pytest.mark.gpu
def test_generate_in_bfloat16() -> None:
    """With 8 bits rounding decides a few tokens: where it does, transformers' logits are as close as it errs."""
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s gpu` installs")
    said = json.loads(run("generate.py", "--device", "cuda", "--dtype", "bfloat16", "--no-cuda-graph", "--json"))
    assert said["check"]["passed"] and said["check"]["equal"] > said["check"]["tokens"] / 2
