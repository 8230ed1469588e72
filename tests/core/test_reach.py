"""What the first call of a layer begins to compile holds every kernel that later calls of the layer need."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fi_core import fused_moe
from fi_core.autotuner import autotune
from fi_core.compat import begun as begun_module
from fi_core.compat.begun import load_begun
from fi_core.registry import load, loaded_kernels, operator
from fi_core.runtime import machine, resolve
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.launch import operator as operators
from fi_core.runtime.launch.kernel import Kernel
from fi_core.runtime.launch.plan import AtOnce
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.resolve import ahead
from fi_core.runtime.resolve.pool import Pool
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import Target

HOPPER = Target("cuda", "90a")
MACHINE = (HOPPER, 132, 227 * 1024)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """The specs whose compilers would have been started."""
    found: list[Spec] = []
    monkeypatch.setattr(ahead, "begin", found.append)
    monkeypatch.setattr(operators, "begin", found.append)

    def said(level: int, text: str) -> None:
        assert "compiled ahead" not in text

    monkeypatch.setattr(ahead.diagnose, "once", said)
    monkeypatch.setattr(begun_module, "begun", found)
    return found


@pytest.mark.parametrize("given", [{"a": "bf16", "b": "bf16"}, {"a": "e4m3", "b": "e4m3", "scales": "blocks"}])
@pytest.mark.parametrize("k", ["short", "long"])
def test_products_of_any_number_of_tokens(begun: list[Spec], given: dict[str, str], k: str) -> None:
    """The kernel of the call is the first to begin: it has a compiler for itself."""
    op = operator("gemm").op
    for m in (300, 3):
        begun.clear()
        first = Request.of(op, HOPPER, {**given, "m": m, "k": k})
        ahead.begin_reached(first, {})
        assert begun[0] == choose(first).spec
    assert {choose(Request.of(op, HOPPER, {**given, "m": m, "k": k})).spec for m in range(1, 300)} <= {*begun}


@pytest.mark.parametrize(
    ("name", "given"),
    [("gemm", {"a": "e4m3", "b": "e4m3", "tiles": "groups", "m": 300}), ("moe_gated_gemm", {"x": "e4m3"})],
)
@pytest.mark.parametrize("first", ["blocks", "row_blocks"])
def test_products_with_block_scales_in_both_orders(begun: list[Spec], name: str, given: Any, first: str) -> None:
    """Which of them a product of a layer has depends on its k."""
    op = operator(name).op
    ahead.begin_reached(Request.of(op, HOPPER, {**given, "scales": first}), {})
    orders = ("blocks", "row_blocks")
    assert {choose(Request.of(op, HOPPER, {**given, "scales": scales})).spec for scales in orders} <= {*begun}


@pytest.mark.parametrize(("weight", "tiles"), [("bf16", {8, 16, 32}), ("e4m3", {8}), ("u8", {8, 16, 32})])
def test_only_tiles_that_a_layer_chooses(begun: list[Spec], weight: str, tiles: set[int]) -> None:
    """A mean of more rows than these is computed by grouped products."""
    op = operator("moe_experts").op
    ahead.begin_reached(Request.of(op, HOPPER, {"weight": weight}), {})
    assert {dict(spec.axes)["tokens"] for spec in begun} == tiles


def test_a_decode_begins_the_prefill_of_its_layer(begun: list[Spec]) -> None:
    """And the reverse, with the kernels that plan: an engine that captured graphs of decode waits for no compiler."""
    known = {name: found.op for name, found in load().items()}
    given = {"head_dim_qk": 256, "head_dim_vo": 256, "group_size": 8}
    decode, prefill = (Request.of(known[name], HOPPER, given) for name in ("batch_decode", "batch_prefill"))
    for one, other, plan in ((decode, prefill, "prefill_plan"), (prefill, decode, "decode_plan")):
        begun.clear()
        ahead.begin_reached(one, known)
        assert {choose(other).spec, choose(Request.of(known[plan], HOPPER)).spec} <= {*begun}


def layer(tokens: int, form: str) -> tuple[Any, dict[str, Any]]:
    """A public function of a layer and the arguments of a call, whose contents nothing reads."""
    experts, top_k, hidden, inter = 128, 8, 2048, 768
    up, down = (experts, 2 * inter, hidden), (experts, hidden, inter)
    if form.startswith("cutlass"):
        given: dict[str, Any] = {
            "input": torch.empty(tokens, hidden, dtype=BF16),
            "token_selected_experts": torch.empty(tokens, top_k, dtype=torch.int32),
            "token_final_scales": torch.empty(tokens, top_k), "output_dtype": BF16,
        }  # fmt: skip
        if form == "cutlass bf16":
            weights = [torch.empty(shape, dtype=BF16) for shape in (up, down)]
        else:
            weights = [torch.empty(shape, dtype=FP8) for shape in (up, down)]
            scales = [torch.empty(e, n // 128, k // 128) for e, n, k in (up, down)]
            given |= {"quant_scales": scales, "use_deepseek_fp8_block_scale": True}
        return fused_moe.cutlass_fused_moe, given | dict(zip(("fc1_expert_weights", "fc2_expert_weights"), weights))
    return fused_moe.trtllm_fp8_block_scale_moe, {
        "routing_logits": torch.empty(tokens, experts), "routing_bias": None,
        "hidden_states": torch.empty(tokens, hidden, dtype=FP8),
        "hidden_states_scale": torch.empty(hidden // 128, tokens),
        "gemm1_weights": torch.empty(up, dtype=FP8), "gemm1_weights_scale": torch.empty(experts, 12, 16),
        "gemm2_weights": torch.empty(down, dtype=FP8), "gemm2_weights_scale": torch.empty(experts, 16, 6),
        "num_experts": experts, "top_k": top_k, "n_group": None, "topk_group": None, "intermediate_size": inter,
        "local_expert_offset": 0, "local_num_experts": experts, "routed_scaling_factor": None,
        "routing_method_type": 1,
    }  # fmt: skip


COUNTS = (1, 2, 3, 5, 8, 13, 31, 64, 100, 180, 240, 300, 390, 500, 700, 1000, 3000, 8192)
FORMS = pytest.mark.parametrize("form", ["cutlass bf16", "cutlass fp8", "trtllm fp8"])


def needed(form: str, tokens: int) -> set[Spec]:
    """The kernels of a call of a layer on Hopper."""
    with Rehearsal(*MACHINE) as rehearsal:
        one, given = layer(tokens, form)
        one.__wrapped__.__wrapped__(AtOnce(torch.device("cpu")), **given)
    return {choice.spec for choice, _ in rehearsal.calls if not choice.spec.op.is_composite}


@FORMS
def test_a_layer_of_experts_with_any_number_of_tokens(
    begun: list[Spec], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of 64 tokens begins the kernels of all ways to compute the layer on Hopper, and they are loaded before
    an engine serves.
    """
    monkeypatch.setattr(machine, "_target_of", lambda device: HOPPER)
    bound: list[Spec] = []
    monkeypatch.setattr(operators, "bind", lambda spec, device: bound.append(spec) or Kernel(None, spec.name, {}, None))
    for known in operators.operators().values():
        monkeypatch.setattr(known, "kernels", {})
    function, given = layer(64, form)
    call = inspect.signature(function).bind(**given)
    call.apply_defaults()
    device = torch.device("cuda", 0)
    function.__wrapped__.begin_other_counts(device, call.arguments)
    first = len(begun)
    function.__wrapped__.begin_other_counts(device, call.arguments)
    assert first and len(begun) == first  # once for a layer
    load_begun(device)
    assert not begun and len(bound) == len({*bound})
    assert {*loaded_kernels()} == {spec.name for spec in bound}
    for tokens in COUNTS:
        assert needed(form, tokens) <= {*bound}, tokens


@pytest.mark.gpu
@FORMS
def test_no_kernel_is_loaded_after_autotune(form: str) -> None:
    """An engine's requests of any length wait for no compiler and no driver."""

    def call(tokens: int) -> None:
        function, given = layer(tokens, form)
        given = {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        if "quant_scales" in given:
            given["quant_scales"] = [x.cuda() for x in given["quant_scales"]]
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                given[name] = torch.zeros_like(x)
        function(**given)

    with autotune():
        call(64)
    before = loaded_kernels()
    for tokens in COUNTS:
        call(tokens)
    assert loaded_kernels().keys() == before.keys()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A compiler at work, until the event is set; those that other tests have begun are not waited for."""
    done, jobs = threading.Event(), Pool(1)
    monkeypatch.setattr(resolve, "pool", lambda: jobs)
    jobs.start("slow", done.wait)
    yield done
    done.set()


def test_autotune_ends_when_compilers_have_ended(slow: threading.Event) -> None:
    ended = threading.Event()

    def tune(mode: bool) -> None:
        with autotune(mode):
            pass
        ended.set()

    tune(False)
    assert ended.is_set()
    ended.clear()
    thread = threading.Thread(target=tune, args=(True,))
    thread.start()
    assert not ended.wait(0.05)
    slow.set()
    thread.join(10)
    assert ended.is_set()
