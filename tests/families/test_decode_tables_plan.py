"""One plan a step for decode over block tables: layers launch attention alone, with the bits of a call that plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import rand
from families.paged import Paged, paged
from families.test_decode_block_tables import arguments
from fi_core import batch_invariant
from fi_core.decode import BlockTablesPlan, trtllm_batch_decode_with_kv_cache
from fi_core.runtime.machine import Rehearsal
from fi_core.runtime.spec.target import Target

LENGTHS = (300, 1, 0, 65, 1000, 16)


def plan_arguments(p: Paged, given: dict[str, Any], **more: Any) -> dict[str, Any]:
    kv_heads = p.cache[0].shape[2 if p.kv_layout == "NHD" else 1]
    page_size = p.cache[0].shape[1 if p.kv_layout == "NHD" else 2]
    return {
        "block_tables": given["block_tables"], "seq_lens": given["seq_lens"], "num_qo_heads": p.q.shape[1],
        "num_kv_heads": kv_heads, "head_dim": p.q.shape[2], "page_size": page_size, "q_data_type": p.q.dtype,
        "kv_data_type": p.cache[0].dtype, "q_len_per_req": p.q_len,
    } | more  # fmt: skip


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [{}, {"window_left": 40}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("q_len", [1, 3])
def test_layers_of_a_step_share_a_plan(kv_layout: str, options: dict[str, Any], q_len: int, device: str) -> None:
    lengths = tuple(max(n, q_len) for n in LENGTHS)
    p = paged(lengths, heads=(6, 2), kv_layout=kv_layout, q_len=q_len, device=device)
    given = arguments(p, **options)
    step = BlockTablesPlan(given["workspace_buffer"])
    step.plan(**plan_arguments(p, given, **options))
    for seed in range(3):
        query = rand(*p.q.shape, dtype=p.q.dtype, device=device, seed=seed)
        layer = given | {"query": query}
        assert torch.equal(
            trtllm_batch_decode_with_kv_cache(**layer, plan=step), trtllm_batch_decode_with_kv_cache(**layer)
        )


def test_the_next_step_is_planned_from_lengths_that_change_in_place(device: str) -> None:
    p = paged(LENGTHS, heads=(6, 2), device=device)
    given = arguments(p)
    step = BlockTablesPlan(given["workspace_buffer"])
    for lengths in (LENGTHS, (299, 1, 0, 1, 2, 16), (1, 1, 0, 65, 999, 3)):
        given["seq_lens"].copy_(torch.tensor(lengths))
        step.plan(**plan_arguments(p, given))
        assert torch.equal(
            trtllm_batch_decode_with_kv_cache(**given, plan=step), trtllm_batch_decode_with_kv_cache(**given)
        )


def test_steps_of_several_batches_take_turns(device: str) -> None:
    """A step that comes again is planned as before; tensors of the same memory in another form are another step."""
    p = paged(LENGTHS, heads=(6, 2), device=device)
    given = arguments(p)
    first = {name: given[name][:3] for name in ("query", "block_tables", "seq_lens")}
    wide = given | {"seq_lens": given["seq_lens"].long()}
    step = BlockTablesPlan(given["workspace_buffer"])
    for call in 2 * [given, given | first, wide, given | {"window_left": 40}]:
        step.plan(**plan_arguments(p, call, window_left=call.get("window_left", -1)))
        assert torch.equal(
            trtllm_batch_decode_with_kv_cache(**call, plan=step), trtllm_batch_decode_with_kv_cache(**call)
        )
    with pytest.raises(ValueError, match="seq_lens: a length for each"):
        step.plan(**plan_arguments(p, given) | {"seq_lens": given["seq_lens"][:1]})
    with pytest.raises(RuntimeError, match="plan: the last plan failed: call plan again"):
        trtllm_batch_decode_with_kv_cache(**given, plan=step)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"window_left": 7}, "window_left: -1 was planned, got 7"),
        ({"q_len_per_req": 2}, "q_len: 1 was planned, got 2"),
        ({"disable_split_kv": True}, "split_kv: 0 was planned, got -1"),
        ({"seq_lens": "other"}, "seq_lens: "),
        ({"block_tables": "other"}, "block_tables: "),
    ],
    ids=str,
)
def test_a_call_of_another_step_is_refused(change: dict[str, Any], wrong: str) -> None:
    p = paged((300, 65, 16, 16), heads=(6, 2))
    given = arguments(p)
    step = BlockTablesPlan(given["workspace_buffer"])
    with pytest.raises(RuntimeError, match="plan: call plan of it first"):
        trtllm_batch_decode_with_kv_cache(**given, plan=step)
    step.plan(**plan_arguments(p, given))
    other = given | {name: given[name].clone() if value == "other" else value for name, value in change.items()}
    if "q_len_per_req" in change:
        step.plan(
            **plan_arguments(p, given | {"seq_lens": given["seq_lens"][:2], "block_tables": given["block_tables"][:2]})
        )
        other |= {"seq_lens": given["seq_lens"][:2], "block_tables": given["block_tables"][:2]}
    with pytest.raises(ValueError, match=f"plan: what it was made for is required; .*{wrong}"):
        trtllm_batch_decode_with_kv_cache(**other, plan=step)


def test_the_switch_of_batch_invariance_makes_another_step(device: str) -> None:
    p = paged((300, 65), heads=(6, 2), device=device)
    given = arguments(p)
    step = BlockTablesPlan(given["workspace_buffer"])
    for _ in range(2):
        step.plan(**plan_arguments(p, given))
        outside = trtllm_batch_decode_with_kv_cache(**given, plan=step)
        assert torch.equal(outside, trtllm_batch_decode_with_kv_cache(**given))
        with batch_invariant():
            with pytest.raises(ValueError, match="batch_invariant: False was planned, got True; split_kv") as error:
                trtllm_batch_decode_with_kv_cache(**given, plan=step)
            assert len(str(error.value)) < 200
            step.plan(**plan_arguments(p, given))
            inside = trtllm_batch_decode_with_kv_cache(**given, plan=step)
            assert torch.equal(inside, trtllm_batch_decode_with_kv_cache(**given))


def test_wrong_plans_are_refused() -> None:
    p = paged((300, 65), heads=(6, 2))
    given = arguments(p)
    step = BlockTablesPlan(given["workspace_buffer"])
    with pytest.raises(ValueError, match="seq_lens: a length for each of the 2 rows"):
        step.plan(**plan_arguments(p, given) | {"seq_lens": given["seq_lens"][:1]})
    with pytest.raises(ValueError, match="num_qo_heads: a multiple of 4 kv heads"):
        step.plan(**plan_arguments(p, given, num_kv_heads=4))
    step.plan(**plan_arguments(p, given))
    ragged = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="leave it out with cum_seq_lens_q"):
        trtllm_batch_decode_with_kv_cache(**given, cum_seq_lens_q=ragged, max_q_len=1, plan=step)


def test_only_attention_is_launched_in_a_layer() -> None:
    """On Hopper: 16 layers take 17 launches, not 32."""
    p = paged((300, 65), heads=(8, 2), dim=128, page_size=16, kv_layout="HND")
    given = arguments(p)
    step = BlockTablesPlan(given["workspace_buffer"])
    with Rehearsal(Target("cuda", "90a"), 132, 227 * 1024) as rehearsal:
        step.plan(**plan_arguments(p, given))
        for _ in range(16):
            trtllm_batch_decode_with_kv_cache(**given, plan=step)
    names = [choice.spec.op.name for choice, _ in rehearsal.calls]
    assert names == ["decode_plan", *16 * ["batch_decode"]]
    assert sum(len(launches) for _, launches in rehearsal.calls) == 17
