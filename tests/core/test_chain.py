"""Recorded chains: later calls of a public function give what the first call gives, and refuse what it refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fi_core.fused_moe import (
    cutlass_fused_moe,
    trtllm_bf16_moe,
    trtllm_bf16_routed_moe,
    trtllm_fp4_block_scale_moe,
)
from fi_core.runtime.launch import chain as chains
from fi_core.runtime.launch.operator import operators

BF16 = torch.bfloat16
plain: Any = cutlass_fused_moe.__wrapped__.__wrapped__  # type: ignore[attr-defined]


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
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a chain computed its result."""
    found: list[bool] = []
    run = chains.Chain.run

    def counted(self: Any, *given: Any) -> Any:
        result = run(self, *given)
        found.append(result is not None)
        return result

    monkeypatch.setattr(chains.Chain, "run", counted)
    operators()["moe_sort"].forget()
    return found


def test_later_calls_give_what_the_function_gives(calls: list[bool]) -> None:
    """Other values and other tensors of the same shapes, with a result given and without."""
    for seed in range(4):
        given = arguments(5, seed)
        want = plain(**given)
        assert torch.equal(cutlass_fused_moe(**given), want)
        out = torch.full_like(want, float("nan"))
        assert cutlass_fused_moe(**given, output=out) is out
        assert torch.equal(out, want)
    assert calls == [True] * 7


def test_other_facts_are_recorded_anew(calls: list[bool]) -> None:
    """Other strides, dtypes and optional tensors under the same shapes."""
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
    )
    for change in changes:
        calls.clear()
        want = plain(**given | change).clone()
        assert torch.equal(cutlass_fused_moe(**given | change), want)
        assert torch.equal(cutlass_fused_moe(**given | change), want)
        assert calls == [False, True]


def test_what_the_first_call_refuses_is_refused_later(calls: list[bool]) -> None:
    given = arguments(5)
    cutlass_fused_moe(**given)
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
    assert True not in calls


def test_one_tensor_in_two_places_is_not_recorded(calls: list[bool]) -> None:
    """The places of the recorded call do not tell which of them a later call means."""
    given = arguments(5)
    bias = torch.ones(6, 64, dtype=BF16)
    own = given | {"fc1_expert_biases": bias, "fc2_expert_biases": bias}
    for _ in range(2):
        assert torch.equal(cutlass_fused_moe(**own), plain(**own))
    other = own | {"fc2_expert_biases": 2 * bias}
    assert torch.equal(cutlass_fused_moe(**other), plain(**other))


def test_memory_of_a_tensor_that_torch_makes_is_not_recorded(calls: list[bool]) -> None:
    """The scale of int4 inputs is multiplied by torch: a chain would read what the first call made."""
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
    assert True not in calls


def test_threads_record_their_own_calls(calls: list[bool]) -> None:
    """Each of eight threads with its own number of tokens, while the others record and call."""
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
    assert sum(calls) == 8 * 5


def test_another_implementation_by_name_is_not_passed_over(calls: list[bool]) -> None:
    given = arguments(5)
    cutlass_fused_moe(**given)
    with operators()["moe_finalize"].using("cpu"):
        cutlass_fused_moe(**given)
    cutlass_fused_moe(**given)
    assert calls == []


def finished(result: Any) -> tuple[torch.Tensor, ...]:
    """What is defined of a result: with partial results, the rows of experts that are here."""
    rows, *others = result if isinstance(result, list) else [result]
    return rows[: int((others[1] >= 0).sum())] if others else rows, *others


@pytest.mark.parametrize("do_finalize", [False, True])
@pytest.mark.parametrize("form", ["logits", "packed ids", "fp4"])
def test_forms_of_trtllm_are_recorded(form: str, do_finalize: bool, calls: list[bool]) -> None:
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
        got, want = function(*given, **options), function.__wrapped__.__wrapped__(*given, **options)
        for a, b in zip(finished(got), finished(want), strict=True):
            assert torch.equal(a, b)
    assert calls == ([] if packed and not do_finalize else [True] * 2)
