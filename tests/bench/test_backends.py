"""Backend names and their runners: planned calls, FlashInfer's own backends, builds inside other packages."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fi_bench import backends, case, cases, parsing
from fi_bench.case import Inputs, Planned
from fi_bench.errors import SkipError
from fi_bench.measure import Options, measure
from fi_bench.peers import FLASHINFER, Library
from fi_bench.runner import CaseRun

CPU = torch.device("cpu")


class Wrapper:
    """A call-compatible wrapper that records its calls."""

    made: ClassVar[list[tuple[str, ...]]] = []

    def __init__(self, backend: str) -> None:
        self.backend, self.plans, self.runs = backend, 0, 0
        Wrapper.made.append(("wrapper", backend))

    def plan(self, x: Inputs) -> Wrapper:
        self.plans += 1
        return self

    def run(self, x: torch.Tensor) -> torch.Tensor:
        assert self.plans == 1
        self.runs += 1
        return x.clone()


def wrapped(name: str, **more: Any) -> case.Case:
    """A case whose function is a wrapper class."""
    plain = cases.find("rmsnorm")
    assert plain is not None
    return dataclasses.replace(
        plain, routine=name, function="norm.Wrapper", op="none", poison=(),
        plan=lambda wrapper, x, backend: wrapper(backend).plan(x),
        call=lambda planned, x: planned.run(x.input), outputs=lambda x, returned: {"out": returned},
        reference=lambda x: {"out": x.input.double()}, torch_outputs=None, description=None, **more,
    )  # fmt: skip


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    import fi_core.norm

    Wrapper.made = []
    monkeypatch.setattr(fi_core.norm, "Wrapper", Wrapper, raising=False)
    return Wrapper


def test_a_wrapper_is_planned_once_and_untimed(ours: type[Wrapper]) -> None:
    runner = backends.bind("auto", wrapped("rmsnorm"), "cpu")
    x = Inputs(input=torch.ones(4))
    call = runner.prepare(x)
    assert ours.made == [("wrapper", "auto")]
    found = measure(call, x, 16, CPU, Options(num_iters=5, cache="warm"))
    assert len(found.samples_ns) == 5
    assert len(ours.made) == 1, "nothing is made or planned while it is timed"
    assert call.args[0].runs > 5  # type: ignore[attr-defined]


def test_a_planned_case_runs_end_to_end(ours: type[Wrapper], monkeypatch: pytest.MonkeyPatch) -> None:
    found = wrapped("rmsnorm", peers={"torch_math": Planned(lambda x: [0], lambda state, x: x.input * (state[0] + 1))})
    monkeypatch.setattr(cases, "find", lambda routine: found)
    line = "--routine rmsnorm --batch_size 2 --hidden_size 8 --refcheck --num_iters 3 --backends auto torch_math"
    args = parsing.parse(line.split())
    args.device = "cpu"
    records = CaseRun(args, "r", 0, lambda record: None).run()
    assert [r["status"] for r in records] == ["ok", "ok"], [r.get("reason") for r in records]
    assert len(ours.made) == 3, "one for the check, one for the time, one for the check behind it"


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for FlashInfer on a Hopper."""
    top, norm = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.norm")
    top.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)  # type: ignore[attr-defined]
    norm.Wrapper = Wrapper  # type: ignore[attr-defined]
    norm.rmsnorm = lambda input, weight, eps, out, enable_pdl: "plain"  # type: ignore[attr-defined]
    norm.chooses = lambda *args, backend="x", **kwargs: backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", top)
    monkeypatch.setitem(sys.modules, "flashinfer.norm", norm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    Wrapper.made = []
    return norm


def test_flash_mla_takes_sparse_rows_of_656_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("flash_mla")
    library.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)

    def decode(
        q: torch.Tensor, cache: torch.Tensor, table: None, lengths: None, width: int, metadata: str, **more: Any
    ) -> tuple[torch.Tensor, None]:
        assert metadata == "metadata" and (table, lengths) == (None, None)
        assert cache.dtype is torch.uint8 and cache.shape[1:] == (64, 1, 656)
        assert more["is_fp8_kvcache"] and more["indices"].shape == (*q.shape[:2], 13)
        return q[..., :width] * more["softmax_scale"], None

    library.get_mla_metadata = lambda: ("metadata", None)  # type: ignore[attr-defined]
    library.flash_mla_with_kvcache = decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    line = "--routine trtllm_batch_decode_with_kv_cache_mla --batch_size 2 --s_kv 70 --sparse_mla_top_k 13"
    p = parsing.parse(f"{line} --num_qo_heads 64 --num_kv_heads 1 --kv_dtype fp8_e4m3".split())
    found = cases.find(p.routine)
    assert found is not None and found.unsupported is not None
    x = found.make(p, CPU, torch.Generator().manual_seed(0))
    runner = backends.bind("flashmla", found, "cuda")
    returned = runner.prepare(x)(x)
    assert torch.equal(runner.outputs(x, returned)["out"], x.q[..., :512] * 192**-0.5)
    assert found.unsupported("flashmla", p) is None
    for change in ({"kv_dtype": "bfloat16"}, {"num_qo_heads": 16}, {"num_qo_heads": 192}, {"page_size": 32}):
        refused = argparse.Namespace(**vars(p) | change)
        assert found.unsupported("flashmla", refused) and found.unsupported("auto", refused) is None


def rmsnorm(**changes: Any) -> case.Case:
    found = cases.find("rmsnorm")
    assert found is not None
    return dataclasses.replace(found, **changes)


def test_flashinfer_by_its_own_backend_names(flashinfer: types.ModuleType) -> None:
    x = Inputs(input=torch.ones(2), weight=None, eps=0, out=None, enable_pdl=None)
    assert backends.bind("flashinfer", rmsnorm(), "cuda").prepare(x)(x) == "plain"
    choosing = rmsnorm(function="norm.chooses")
    for name, chosen in (("flashinfer", "x"), ("flashinfer:cute-dsl", "cute-dsl"), ("cute-dsl", "cute-dsl")):
        runner = backends.bind(name, choosing, "cuda")
        assert (runner.name, runner.library) == (name, "flashinfer")
        assert runner.prepare(x)(x) == chosen
    for name in ("flashinfer", "flashinfer:fa3"):
        backends.bind(name, wrapped("no table"), "cuda").prepare(x)
    assert Wrapper.made == [("wrapper", "auto"), ("wrapper", "fa3")]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("cutlass", {}, "FlashInfer has no backend 'cutlass' for rmsnorm; it has cute-dsl"),
        ("flashinfer:cute-dsl", {}, "flashinfer.norm.rmsnorm has one backend: use --backends flashinfer"),
        ("flashinfer", {"function": "norm.nothing"}, "this version of flashinfer has no norm.nothing"),
        ("cutlass", {"routine": "bmm_fp8"}, "FlashInfer has cutlass for compute capability 10.0, 10.3, 10.7, 12.0"),
        ("cudnn", {"routine": "bmm_bf16"}, "cudnn has no bmm_bf16"),
    ],
)
def test_what_flashinfer_has_not_is_said(
    flashinfer: types.ModuleType, name: str, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(SkipError) as caught:
        backends.bind(name, rmsnorm(**changes), "cuda")
    assert words in str(caught.value)


def test_library_names_of_flashinfers_guide_run_flashinfer(flashinfer: types.ModuleType) -> None:
    runner = backends.bind("cudnn", rmsnorm(routine="bmm_fp8", function="norm.chooses"), "cuda")
    x = Inputs(input=torch.ones(2), weight=None, eps=0, out=None, enable_pdl=None)
    assert (runner.library, runner.prepare(x)(x)) == ("flashinfer", "cudnn")


LABELS = {
    "BatchDecodeWithPagedKVCacheWrapper": {"cudnn", "trtllm-gen"},
    "BatchPrefillWithPagedKVCacheWrapper": {"cudnn", "trtllm-gen"},
    "BatchPrefillWithRaggedKVCacheWrapper": {"cudnn", "cutlass"},
    "bmm_fp8": {"cudnn", "cutlass", "cute-dsl"},
    "gemm_fp8_nt_groupwise": {"cutlass", "cutile"},
    "trtllm_fp8_block_scale_moe": {"trtllm"},
    "trtllm_fp4_block_scale_moe": {"trtllm"},
    "trtllm_fp8_per_tensor_scale_moe": {"trtllm"},
    "cutlass_fused_moe": {"cutlass"},
    "rmsnorm": set(),
}


@pytest.mark.parametrize("routine", LABELS)
def test_flashinfers_names_time_the_function_here(routine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own are `flashinfer:NAME`, which nobody can take for this library's."""
    found = cases.find(routine)
    assert found is not None
    assert set(backends.labels(found)) == LABELS[routine]
    for name in LABELS[routine]:
        assert backends.bind(name, found, "cuda").library == "fi_core"
        with pytest.raises(SkipError, match=r"needs a GPU of compute capability 8\.0 and later; --backends cpu"):
            backends.bind(name, found, "cpu")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        with pytest.raises(SkipError, match="flashinfer is not installed"):
            backends.bind(f"flashinfer:{name}", found, "cuda")


def test_a_label_asks_a_wrapper_for_its_backend(ours: type[Wrapper]) -> None:
    runner = backends.bind("trtllm-gen", wrapped("rmsnorm", labels=("trtllm-gen",)), "cuda")
    runner.prepare(Inputs(input=torch.ones(4)))
    assert ours.made == [("wrapper", "trtllm-gen")]


def test_an_implementation_with_the_name_of_a_library_has_a_prefix(
    ours: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "fi:cudnn" in backends.ours()
    assert "cudnn" not in backends.ours()
    assert backends.canonical("fi:cudnn") == ("fi:cudnn", None)
    monkeypatch.setattr(backends, "implementations", lambda case: ("cpu", "cudnn"))
    runner = backends.bind("fi:cudnn", wrapped("rmsnorm"), "cuda")
    runner.prepare(Inputs(input=torch.ones(4)))
    assert (runner.name, runner.library, runner.resolved) == ("fi:cudnn", "fi_core", "cudnn")
    assert ours.made == [("wrapper", "cudnn")]
    with pytest.raises(SkipError, match="does not run on --device cpu"):
        backends.bind("fi:cudnn", wrapped("rmsnorm"), "cpu")
    with pytest.raises(SkipError, match="rmsnorm has no backend 'cudnn'"):
        backends.bind("fi:cudnn", rmsnorm(), "cuda")


def test_a_build_inside_another_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer_package" / "inner").mkdir(parents=True)
    (tmp_path / "outer_package" / "inner" / "kernels.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    library = Library(("no_such_package", "outer_package.inner.kernels"), "pip install it")
    assert library.module() == "outer_package.inner.kernels"
    assert "outer_package" not in sys.modules
    assert Library(("outer_package.inner.other",), "").module() is None
    with pytest.raises(ModuleNotFoundError, match="pip install it"):
        Library(("no_such_package",), "pip install it").load()
    assert FLASHINFER.module() is None


def test_a_public_backend_that_is_no_implementation_goes_to_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fa2` stays a word of --backends whatever the implementations are named; their names are forced on the op."""
    decode = cases.find("BatchDecodeWithPagedKVCacheWrapper")
    assert decode is not None
    monkeypatch.setattr(backends, "implementations", lambda found: ("cpu", "tensor_core"))
    backends.ours.cache_clear()
    try:
        assert backends.canonical("tensor_core") == ("tensor_core", None)
        public, own = (backends.bind(name, decode, "cuda") for name in ("fa2", "tensor_core"))
        assert (public.library, own.library) == ("fi_core", "fi_core")
        assert public.context is contextlib.nullcontext
        assert own.context is not contextlib.nullcontext
        with pytest.raises(SkipError, match="does not run on --device cpu"):
            backends.bind("fa2", decode, "cpu")
        single = cases.find("single_decode_with_kv_cache")
        assert single is not None
        assert backends.is_ours("fa3", decode)
        assert not backends.is_ours("fa3", single), "FlashAttention-3, where fi-core has no backend of that name"
    finally:
        backends.ours.cache_clear()
