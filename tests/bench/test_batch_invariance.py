"""benchmarks/batch_invariance.py: its steps run for every model, and it times in turns."""

from __future__ import annotations

import importlib.util
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from fi_core.runtime.invariance import is_on

PATH = Path(__file__).resolve().parents[2] / "benchmarks/batch_invariance.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("batch_invariance", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PROMPT = 20
    return module


def small(m: Any) -> Any:
    some = {"width": 256 if m.width else 0, "kv_heads": 4 if m.latent else 2, "linear": 4 if m.linear else 0}
    few = {"experts": 8, "top_k": 2, "expert_width": 128} if m.experts else {}
    kept = {"name": m.name, "dim": m.dim, "latent": m.latent, "layers": m.layers}
    return type(m)(hidden=256, heads=4, vocab=500, **kept, **some, **few)


@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("number", range(4))
def test_a_step_draws_a_token_for_each_request(script: Any, number: int, is_decode: bool) -> None:
    make = script.step(script.Room("cpu"), small(script.MODELS[number]), 3, is_decode, 64)
    first = make()
    assert first.shape == (3,) and int(first.min()) >= 0 and int(first.max()) < 500


def test_times_are_of_both_in_turns(script: Any) -> None:
    seen = []

    def make(batch: int) -> Any:
        return lambda: seen.append(is_on())

    off, on = script.timed(make, 2, "cpu", times=3)
    assert off > 0 and on > 0 and seen[-6:] == [False, True] * 3


def test_what_a_graph_reads_lives_until_it_is_timed(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def make(batch: int) -> Any:
        weight = torch.ones(batch)
        return lambda: weight.sum()

    def recorded(call: Any, device: str) -> Any:
        kept = weakref.ref(call)
        return lambda: seen.append(kept() is not None)

    monkeypatch.setattr(script, "repeated", recorded)
    script.timed(make, 2, "cpu", times=2)
    assert seen == [True] * 4
