"""Plans of launches: planned calls give what the function gives, and refuse what it refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fi_bench.backends import forcing
from fi_core.fused_moe import (
    cutlass_fused_moe,
    trtllm_bf16_moe,
    trtllm_bf16_routed_moe,
    trtllm_fp4_block_scale_moe,
)
from fi_core.fused_moe.ops import MOE_FINALIZE
from fi_core.runtime.launch.operator import operators
from fi_core.runtime.launch.plan import AtOnce, Launches, LaunchPlan, plans_launches
from fi_core.runtime.resolve import ahead

BF16 = torch.bfloat16


def plain(*values: Any, **named: Any) -> Any:
    """The layer, each of whose launches is made at once."""
    function: Any = cutlass_fused_moe.__wrapped__.__wrapped__  # type: ignore[attr-defined]
    return function(AtOnce(torch.device("cpu")), *values, **named)


def arguments(tokens: int, seed: int = 0, dtype: torch.dtype = BF16) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(tokens, 6, generator=g).topk(2)
    return {
        "input": torch.randn(tokens, 64, generator=g).to(dtype), "token_selected_experts": ids.int(),
        "token_final_scales": weights, "output_dtype": dtype,
        "fc1_expert_weights": torch.randn(6, 64, 64, generator=g).to(dtype) / 8,
        "fc2_expert_weights": torch.randn(6, 64, 32, generator=g).to(dtype) / 6,
    }  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tensors of the calls that plans have served."""
    found: list[int] = []
    run = LaunchPlan.run

    def counted(self: Any, workspace: Any, tensors: Any) -> Any:
        result = run(self, workspace, tensors)
        found.extend([] if result is None else [len(tensors)])
        return result

    monkeypatch.setattr(LaunchPlan, "run", counted)
    return found


def test_later_calls_give_what_the_function_gives(calls: list[int]) -> None:
    """Other values and other tensors of the same shapes, with a result given and without."""
    for seed in range(4):
        given = arguments(5, seed)
        want = plain(**given)
        assert torch.equal(cutlass_fused_moe(**given), want)
        out = torch.full_like(want, float("nan"))
        assert cutlass_fused_moe(**given, output=out) is out
        assert torch.equal(out, want)
    assert len(calls) == 8


def test_other_forms_are_planned_beside(calls: list[int]) -> None:
    """Other strides, addresses, dtypes and optional tensors under the same shapes: each has its plan, none is lost."""
    given = arguments(5)
    cutlass_fused_moe(**given)
    wide = torch.zeros(5, 80, dtype=BF16)
    wide[:, :64] = given["input"]
    changes: tuple[dict[str, Any], ...] = (
        {"input": wide[:, :64]},
        {"token_final_scales": given["token_final_scales"].bfloat16()},
        {"token_final_scales": None},
        {"token_selected_experts": given["token_selected_experts"].long()},
        {"fc2_expert_biases": torch.ones(6, 64, dtype=BF16)},
        {"output": torch.zeros(5, 72, dtype=BF16)[:, :64]},
        {"input": torch.cat((torch.zeros(1, dtype=BF16), given["input"].flatten()))[1:].view(5, 64)},
    )
    for _ in range(2):
        for change in changes:
            calls.clear()
            want = plain(**given | change).clone()
            assert torch.equal(cutlass_fused_moe(**given | change), want)
            assert len(calls) == 1


def test_what_the_first_call_refuses_is_refused_later(calls: list[int]) -> None:
    given = arguments(5)
    cutlass_fused_moe(**given)
    calls.clear()
    with pytest.raises(ValueError, match="token_final_scales must have the shape of token_selected_experts"):
        cutlass_fused_moe(**given | {"token_final_scales": torch.ones(5, 3)})
    with pytest.raises(ValueError, match="output must be "):
        cutlass_fused_moe(**given, output=torch.empty(5, 65, dtype=BF16))
    with pytest.raises(NotImplementedError, match="requires grad"):
        cutlass_fused_moe(**given | {"input": given["input"].clone().requires_grad_()})
    with pytest.raises(TypeError, match="fc2_expert_weights must be a dense tensor with data"):
        cutlass_fused_moe(**given | {"fc2_expert_weights": given["fc2_expert_weights"].to_sparse()})
    with pytest.raises(TypeError, match="activation_type must be an integer"):
        cutlass_fused_moe(**given, activation_type=[3])  # type: ignore[arg-type]
    assert not calls


def test_one_tensor_in_two_places(calls: list[int]) -> None:
    """A plan tells tensors apart by their place in the call: it serves a call with two tensors too."""
    given = arguments(5)
    bias = torch.ones(6, 64, dtype=BF16)
    own = given | {"fc1_expert_biases": bias, "fc2_expert_biases": bias}
    for _ in range(2):
        assert torch.equal(cutlass_fused_moe(**own), plain(**own))
    other = own | {"fc2_expert_biases": 2 * bias}
    assert torch.equal(cutlass_fused_moe(**other), plain(**other))
    assert len(calls) == 3


def test_a_tensor_that_torch_makes_is_made_in_each_call(calls: list[int]) -> None:
    """The scale of int4 inputs is multiplied by torch, so these calls have no plan."""
    g = torch.Generator().manual_seed(0)
    codes = [torch.randint(0, 256, shape, generator=g, dtype=torch.uint8) for shape in ((2, 256, 64), (2, 128, 64))]
    scales = [torch.rand(2, rows, 1, generator=g).bfloat16() for rows in (256, 128)]
    none = torch.empty(0)
    for factor in (1.0, 3.0):
        x = arguments(5)["input"].repeat(1, 2)
        quant = [*scales, torch.full((128,), factor), none, none, none, none, none]
        ids = torch.zeros(5, 1, dtype=torch.int32)
        given = (x, ids, None, *codes, BF16, quant)
        options: dict[str, Any] = {"use_w4_group_scaling": True, "use_packed_weights": True}
        assert torch.equal(cutlass_fused_moe(*given, **options), plain(*given, **options))
    assert not calls


def test_threads_plan_their_own_calls(calls: list[int]) -> None:
    """Each of eight threads with its own number of tokens, while the others plan and call."""
    errors: list[BaseException] = []

    def work(tokens: int) -> None:
        try:
            for seed in range(6):
                given = arguments(tokens, seed)
                assert torch.equal(cutlass_fused_moe(**given), plain(**given))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(calls) == 8 * 6


def test_another_implementation_by_name_is_not_passed_over(calls: list[int]) -> None:
    given = arguments(5)
    want = cutlass_fused_moe(**given)
    finalize = operators()["moe_finalize"]
    with forcing(finalize, "cpu"):
        assert torch.equal(cutlass_fused_moe(**given), want)
        assert finalize.choices[-1] and finalize.choices[-1].request.backend == "cpu"
    assert torch.equal(cutlass_fused_moe(**given), want)
    assert len(calls) == 3


def finished(result: Any) -> tuple[torch.Tensor, ...]:
    """What is defined of a result: with partial results, the rows of experts that are here."""
    rows, *others = result if isinstance(result, list) else [result]
    return rows[: int((others[1] >= 0).sum())] if others else rows, *others


@pytest.mark.parametrize("do_finalize", [False, True])
@pytest.mark.parametrize("form", ["logits", "packed ids", "fp4"])
def test_forms_of_trtllm_are_planned(form: str, do_finalize: bool, calls: list[int]) -> None:
    """Packed ids, whose halves are views of an argument; lists of results."""
    g = torch.Generator().manual_seed(0)
    fp4, packed = form == "fp4", form == "packed ids"
    function: Any = trtllm_fp4_block_scale_moe if fp4 else trtllm_bf16_routed_moe if packed else trtllm_bf16_moe
    hidden, inter, none = 128, 128, (None,) * 4
    if fp4:
        codes = [torch.randint(0, 256, (4, n, 64), generator=g, dtype=torch.uint8) for n in (2 * inter, hidden)]
        scales = [torch.full((4, n, 4), 120, dtype=torch.uint8) for n in (2 * inter, hidden)]
        weights: Any = None, codes[0], scales[0], *none, codes[1], scales[1], *none
    else:
        weights = [torch.randn(4, n, 128, generator=g).to(BF16) / 8 for n in (2 * inter, hidden)]
    options = {"do_finalize": do_finalize} | ({} if fp4 else {"use_shuffled_weight": True, "weight_layout": 0})
    for seed in range(3):
        x, logits = torch.randn(5, hidden, generator=g).to(BF16), torch.randn(5, 6, generator=g)
        ids = (logits.topk(2)[1] << 16).int() | 0x3F00 + seed  # and a weight in bf16
        given = *((ids,) if packed else (logits, None)), x, *weights, 6, *(2, None, None), inter, 1, 4, None
        got = function(*given, **options)
        want = function.__wrapped__.__wrapped__(AtOnce(x.device), *given, **options)
        for a, b in zip(finished(got), finished(want), strict=True):
            assert torch.equal(a, b)
    assert len(calls) == (0 if packed and not do_finalize else 3)


@plans_launches("out")
def sums(p: Launches, x: torch.Tensor, is_forgotten: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    """A row of each pair of rows; the second op is forgotten."""
    out = p.result((len(x) // 2, x.shape[1]), x.dtype) if out is None else out
    target = p.scratch(out.shape, out.dtype) if is_forgotten else out
    p.add(MOE_FINALIZE, target, x, p.constant(torch.arange(len(x), dtype=torch.int32).view(-1, 2)))
    return out


def test_a_result_that_no_step_writes_is_refused() -> None:
    x = torch.ones(6, 16)
    for out in (None, torch.empty(3, 16)):
        assert sums(x, False, out).eq(2).all()
        with pytest.raises(ValueError, match=r"a plan must write its results; no step writes torch.float32 \[3, 16\]"):
            sums(x, True, out)


@plans_launches("out", tokens={"x": 0, "out": 0})
def few_rows(p: Launches, x: torch.Tensor, most: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Each row, of few."""
    if len(x) > most:
        raise ValueError(f"x must have at most {most} rows; got {len(x)}")
    out = p.result(x.shape, x.dtype) if out is None else out
    p.add(MOE_FINALIZE, out, x, p.constant(torch.arange(len(x), dtype=torch.int32).view(-1, 1)))
    return out


def test_what_is_not_compiled_ahead_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that refuses more tokens serves those that it takes; the log names what a call of more would raise."""
    said: list[str] = []
    monkeypatch.setattr(ahead.diagnose, "once", lambda level, text: said.append(text))
    begin: Any = few_rows.begin_other_counts  # type: ignore[attr-defined]
    begin(torch.device("cpu"), {"x": torch.ones(4, 16), "most": 4096, "out": None})
    assert said == [
        f"few_rows of {count} tokens is not compiled ahead: ValueError: x must have at most 4096 rows; got {count}"
        for count in (5793, 8192)
    ]


def test_constants_live_with_their_plan(calls: list[int]) -> None:
    """The first call makes the table; later ones read it."""
    for factor in range(1, 4):
        x = torch.full((6, 16), float(factor))
        assert sums(x, False).eq(2 * factor).all()
    assert len(calls) == 3


@pytest.mark.parametrize("tokens", [5, 64])
def test_scratch_of_a_plan(tokens: int, calls: list[int]) -> None:
    """In a workspace that begins anywhere, a call writes nothing behind it; a smaller one is refused."""
    given = arguments(tokens)
    want, memory = plain(**given), torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
    for begin in (0, 1, 100):
        assert torch.equal(cutlass_fused_moe(**given, workspace_buffer=memory[begin : begin + (1 << 19)]), want)
    assert memory[100 + (1 << 19) :].eq(0xFF).all() and len(calls) == 3
    with pytest.raises(ValueError, match="workspace_buffer must have more than"):
        cutlass_fused_moe(**given, workspace_buffer=memory[:1000])


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")  # of the dispatcher, whose cache it does not use
def test_torch_traces_the_ops() -> None:
    """A compiled function meets the registered ops, and no plan."""
    given = arguments(5)
    want = plain(**given)
    compiled = torch.compile(lambda given: cutlass_fused_moe(**given) * 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(given), want)


def test_kernels_of_a_plan_begin_to_compile_before_one_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    operators()["moe_finalize"].forget()
    seen: list[tuple[str, str]] = []
    kind: Any = type(operators()["moe_finalize"])
    for name in ("prepare", "learn"):
        method = getattr(kind, name)
        monkeypatch.setattr(
            kind,
            name,
            lambda self, *given, name=name, method=method: (seen.append((name, self.op.name)), method(self, *given))[1],
        )
    cutlass_fused_moe(**arguments(5))
    names = [name for name, _ in seen]
    assert names == ["prepare"] * (len(names) // 2) + ["learn"] * (len(names) // 2) and len(names) >= 8
