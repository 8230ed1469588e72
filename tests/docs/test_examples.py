"""The examples do what they claim; the serving engine gives the tokens of transformers."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_decode() -> None:
    said = run("decode.py", "3")
    assert "lengths [43, 4, 503]" in said and "largest error of the last step 0.0" in said


def test_prefill() -> None:
    assert "largest error of 382 tokens 0.0" in run("prefill.py", "50")


def test_decoder_block() -> None:
    """A decoder block on the bytes of a text, every op checked; what is no text is refused in one line."""
    command = [sys.executable, str(EXAMPLES / "decoder_block.py"), str(ROOT / "missing")]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert re.fullmatch(r"FILE: a text is required; .*No such file.*\n", refused.stderr)
    said = run("decoder_block.py", str(ROOT / "LICENSE"))
    assert "17 calls checked; all are right." in said
    for op in ("rmsnorm", "single_prefill_with_kv_cache", "single_decode_with_kv_cache", "merge_state", "silu_and_mul"):
        assert re.search(rf"^{op} .* ms .* us .*(jit|store|fi-\w+|kernel of a line above)", said, re.MULTILINE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generate(device: str) -> None:
    """Requests come and go, prompts in chunks, pages run out: every token is that of transformers' eager generate()."""
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s tests` installs")
    said = json.loads(run("generate.py", "--device", device, "--json"))
    check = said["check"]
    assert check["passed"] and said["repeatable"]
    assert check["equal"] == check["tokens"] == sum(len(r["generated"]) for r in said["requests"]) > 200
    assert said["preemptions"] > 0 and said["steps"] > 50
    assert max(len(r["prompt"]) for r in said["requests"]) > 2 * said["token_budget"]
    assert len({tuple(r["generated"]) for r in said["requests"]}) == len(said["requests"])
    for op in ("batch_prefill", "batch_decode", "append_paged_kv_cache", "rmsnorm", "rope", "act_and_mul", "sample"):
        assert any(name.startswith(op) for name in said["kernels"]), op


@pytest.mark.gpu
def test_generate_in_bfloat16() -> None:
    """With 8 bits rounding decides a few tokens: where it does, transformers' logits are as close as it errs."""
    pytest.importorskip("transformers", reason="needs transformers, which `nox -s gpu` installs")
    said = json.loads(run("generate.py", "--device", "cuda", "--dtype", "bfloat16", "--no-cuda-graph", "--json"))
    assert said["check"]["passed"] and said["check"]["equal"] > said["check"]["tokens"] / 2


@pytest.fixture(scope="module")
def serving() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("serving", EXAMPLES / "serving.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serving"]


LENGTHS = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 20))


@settings(max_examples=60, deadline=None, database=None)
@given(requests=st.lists(LENGTHS, min_size=1, max_size=8), pages=st.integers(13, 30), budget=st.integers(3, 50))
def test_scheduler(serving: ModuleType, requests: list[tuple[int, int, int]], pages: int, budget: int) -> None:
    """Whatever comes: steps within the budget, pages with one owner, nobody who generates waits, everybody finishes."""
    scheduler = serving.Scheduler(pages, 4, budget, max_running=3)
    todo = sorted((serving.Request([0] * n, new, arrival=at) for n, new, at in requests), key=lambda r: r.arrival)
    for request in todo:
        scheduler.add(request)
    for step in range(2000):
        waited = [r for r in scheduler.running if len(r.tokens) == r.cached + 1]
        chunks = scheduler.schedule(step)
        assert len(chunks) <= 3 and sum(chunk.length for chunk in chunks) <= budget
        owned = [page for request in scheduler.running for page in request.pages]
        assert sorted(owned + scheduler.free) == list(range(pages))
        served = [chunk.request for chunk in chunks]
        assert all(r in served or r in scheduler.waiting for r in waited)
        for request, length in chunks:
            assert request.arrival <= step and 0 < length <= len(request.tokens) - request.cached
            request.cached += length
            assert (len(request.pages) - 1) * 4 < request.cached <= len(request.pages) * 4
            if request.cached == len(request.tokens):
                request.tokens.append(0)
                if len(request.generated) == request.max_new_tokens:
                    scheduler.finish(request)
        if not scheduler.waiting and not scheduler.running:
            break
        assert chunks or scheduler.waiting[0].arrival > step, "nothing moves"
    assert [len(r.generated) for r in todo] == [r.max_new_tokens for r in todo]


def test_scheduler_refuses_what_never_fits(serving: ModuleType) -> None:
    scheduler = serving.Scheduler(4, 16, 32, max_running=8)
    scheduler.add(serving.Request([0] * 60, 4))
    with pytest.raises(ValueError, match="request: from 1 token to 4 pages are required; got 5"):
        scheduler.add(serving.Request([0] * 60, 5))
    with pytest.raises(ValueError, match="token_budget: at least max_running, 8, is required; got 7"):
        serving.Scheduler(4, 16, 7, max_running=8)
