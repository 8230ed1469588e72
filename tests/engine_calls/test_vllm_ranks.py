"""vLLM's dense models on tensor-parallel ranks: the norms add what row-parallel layers leave on each rank."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine_calls import fake_vllm
from engine_calls import fake_vllm_ranks as fakes
from engine_calls.fake_vllm import PLUGIN, recorded
from families.ranks import run_ranks


def _registered(version: str, patch: pytest.MonkeyPatch) -> Any:
    """The module of the plugin, which takes the stand-in for a model of the version."""
    patch.setenv("FI_VLLM_LAYERS", "1")
    fake_vllm.install(version, patch).register()
    found = importlib.import_module(f"{PLUGIN}.reduced_norm")
    patch.setattr(found, "MODEL", (" ".join(fakes.LlamaModel.forward.__code__.co_names),))
    found.say.cache_clear()
    return found


def _same_on_all_ranks(x: torch.Tensor) -> bool:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, x.cpu().view(torch.int16).tolist())
    return all(other == every[0] for other in every)


def _serve(rank: int, world: int, device: torch.device, version: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        own = fakes.LlamaModel(vllm_config=fakes.engine(device, 1))  # before the plugin is registered
        found = _registered(version, patch)
        model = fakes.LlamaModel(vllm_config=fakes.engine(device, world))
        assert all(x.reduce_results for x in own.modules() if isinstance(x, fakes.RowParallelLinear))
        assert not any(x.reduce_results for x in model.modules() if isinstance(x, fakes.RowParallelLinear))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for tokens in (1, 5, 64, 200):  # of which the last is more than the engine has promised
            drawn = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, fakes.HIDDEN, generator=drawn).bfloat16().to(device)
            want = own(x.clone())
            for each in (model, compiled) if device.type == "cpu" or tokens < 64 else (model,):
                got = each(x.clone())
                torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05)
                assert _same_on_all_ranks(got)
        for workspace in found.workspaces:
            workspace.destroy()


@pytest.mark.parametrize(
    ("world", "device"),
    [(2, "cpu"), *(pytest.param(n, "gpus", marks=[pytest.mark.gpu, pytest.mark.multigpu]) for n in (2, 4, 8))],
)
def test_a_model_on_ranks(version: str, world: int, device: str) -> None:
    """Eager and compiled, for few tokens and many, the results of vLLM's own sums, with the same bits on all ranks."""
    run_ranks(_serve, world, device, version)


def test_what_is_replaced_is_that_of_a_supported_vllm(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_VLLM_LAYERS", "1")
    fake_vllm.install(version, monkeypatch).register()
    found, seams = sys.modules[f"{PLUGIN}.reduced_norm"], recorded(version)
    for name in ("LlamaModel", "Qwen2Model"):
        assert " ".join(seams[f"{name}.forward()"]) in found.MODEL
        assert "*vllm_config" in seams[f"{name}.__init__"]
    for name in ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"):
        assert tuple(seams[f"{name}.forward()"]) == found.LAYER
    assert {"reduce_results", "tp_size"} <= set(seams["RowParallelLinear.forward()"])
    assert "reduce_results=" in seams["RowParallelLinear.__init__"]
    assert "cpu_group" in seams["GroupCoordinator"] and seams["get_tp_group"] == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline ranks"),
        ({"parallel": {"tensor_parallel_size": 16}}, "more than 8 ranks"),
        ({"parallel": {"nnodes": 2}}, "or one host"),
        ({"speculative_config": object()}, "drafts or adapters"),
        ({"lora_config": object()}, "drafts or adapters"),
        ({"passes": {"fuse_allreduce_rms": True}}, "a pass of vLLM's compiler"),
        ({"layer": "another"}, "is not that of a supported vLLM"),
    ],
)
def test_models_whose_sums_stay(
    version: str, changed: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why, once."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    found = _registered(version, monkeypatch)
    if "layer" in changed:
        monkeypatch.setattr(found, "LAYER", ("another",))
    given = {name: value for name, value in changed.items() if name != "layer"}
    with caplog.at_level(logging.INFO, "vllm"):
        for _ in range(2):
            model = fakes.LlamaModel(vllm_config=fakes.engine(torch.device("cpu"), 2, **given))
    assert model.layers[0].self_attn.o_proj.reduce_results is True
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("fi does not sum over the ranks in the norms: ") and words in said


def test_one_rank_has_nothing_to_add(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    _registered(version, monkeypatch)
    with caplog.at_level(logging.INFO, "vllm"):
        model = fakes.LlamaModel(vllm_config=fakes.engine(torch.device("cpu"), 1))
    assert not caplog.records and "forward" not in vars(model.norm)
