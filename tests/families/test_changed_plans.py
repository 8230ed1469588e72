"""What changes a wrapper between plan and run: the run computes what a fresh wrapper with that change computes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from families.harness import assert_close
from families.prefill_batch import batch, workspace
from families.test_failed_plan import SUBJECTS, Subject
from fi_core.attention.schedule import DecodePlan
from fi_core.attention.wrappers.side_by_side import divide
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.prefill import BatchPrefillWithPagedKVCacheWrapper

LENS = ((1, 240), (1, 17), (1, 3))
SCORES = {"window_left": 9, "logits_soft_cap": 3.0, "sm_scale": 0.3, "pos_encoding_mode": "ALIBI"}
CHANGES: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {  # of the wrapper, and of the fresh one's plan
    "_window_left": (lambda w: setattr(w, "_window_left", 9), {"window_left": 9}),
    "_logits_soft_cap": (lambda w: setattr(w, "_logits_soft_cap", 3.0), {"logits_soft_cap": 3.0}),
    "_sm_scale": (lambda w: setattr(w, "_sm_scale", 0.3), {"sm_scale": 0.3}),
    "_pos_encoding_mode": (lambda w: setattr(w, "_pos_encoding_mode", "ALIBI"), {"pos_encoding_mode": "ALIBI"}),
    "several": (lambda w: [setattr(w, f"_{name}", x) for name, x in SCORES.items()], SCORES),  # type: ignore[func-returns-value]
    "back": (lambda w: [setattr(w, "_window_left", x) for x in (2, -1)], {}),  # type: ignore[func-returns-value]
    "none": (lambda w: setattr(w, "_logits_soft_cap", None), {}),
}
SINGLE = [name for name in SUBJECTS if name != "cascade"]  # cascade has a wrapper for each level


def out_of(w: Subject, b: Any) -> torch.Tensor:
    found: torch.Tensor = w.wrapper.run(b.q, *w.keys)
    return found


@pytest.mark.parametrize("ran", [False, True], ids=["before a run", "between runs"])
@pytest.mark.parametrize(("subject", "change"), [  # the constructor of sinks fixes the window
    (subject, change) for subject in SINGLE for change in CHANGES
    if subject != "sinks" or "window_left" not in CHANGES[change][1]
])  # fmt: skip
def test_attributes_that_engines_assign(subject: str, change: str, ran: bool) -> None:
    b = batch(LENS)
    assign, planned = CHANGES[change]
    changed, fresh = SUBJECTS[subject](b), SUBJECTS[subject](b)
    changed.planned()
    if ran:
        out_of(changed, b)
    assign(changed.wrapper)
    fresh.planned(**planned)
    assert torch.equal(out_of(changed, b), out_of(fresh, b))
    assert torch.equal(out_of(changed, b), out_of(fresh, b)), "and again"
    changed.planned()
    fresh.planned()
    assert torch.equal(out_of(changed, b), out_of(fresh, b)), "a new plan has its own options"


@pytest.mark.parametrize("subject", SINGLE)
def test_a_plan_does_not_change(subject: str) -> None:
    b = batch(LENS)
    w = SUBJECTS[subject](b)
    w.planned()
    plan = w.wrapper._plan
    before = dict(vars(plan))
    w.wrapper._logits_soft_cap, w.wrapper._sm_scale = 5.0, 0.5
    out_of(w, b)
    w.planned()
    assert all(vars(plan)[name] is x for name, x in before.items()) and w.wrapper._plan is not plan
    declared = {name for owner in type(plan).__mro__ for name in vars(owner).get("__annotations__", ())}
    assert before.keys() <= declared, "a plan has the fields that it declares"
    with pytest.raises(AttributeError, match="window_left: a plan does not change"):
        plan.window_left = 3


@pytest.mark.parametrize("subject", [name for name in SINGLE if name != "sinks"])
def test_options_of_forward(subject: str) -> None:
    b = batch(LENS)
    changed, fresh = SUBJECTS[subject](b), SUBJECTS[subject](b)
    changed.planned()
    fresh.planned(**SCORES)
    want = out_of(fresh, b)
    assert torch.equal(changed.wrapper.forward(b.q, *changed.keys, **SCORES), want)
    assert torch.equal(out_of(changed, b), want), "they stay, as FlashInfer keeps them"
    plain = SUBJECTS[subject](b)
    plain.planned()
    assert torch.equal(changed.wrapper.forward(b.q, *changed.keys), out_of(plain, b)), (
        "an omitted option is the default"
    )


@pytest.mark.parametrize("subject", SINGLE)
def test_other_workspaces(subject: str) -> None:
    """The schedule of the last plan lies in the old workspaces, which may be used for anything."""
    b = batch(LENS)
    w = SUBJECTS[subject](b)
    w.planned()
    want = out_of(w, b)
    old = w.wrapper._float_workspace_buffer, w.wrapper._int_workspace_buffer
    w.wrapper.reset_workspace_buffer(workspace("cpu"), torch.empty(8 << 20, dtype=torch.uint8))
    for x in old:
        x.fill_(0x55)
    with pytest.raises(RuntimeError, match="run: call plan first"):
        w.wrapper.run(b.q, *w.keys)
    w.planned()
    assert torch.equal(out_of(w, b), want)


@pytest.mark.parametrize("form", ["pair", "whole"])
def test_values_of_other_head_dims_in_turns(form: str) -> None:
    """Decode is planned with the head dim of keys; values may have another one, whose partials have another size."""
    wide, narrow = batch(LENS, dims=(128, 128)), batch(LENS, dims=(128, 64))
    w = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_tensor_cores=True)
    w.plan(*wide.paged_plan()[1:])
    k, v = wide.cache
    cache = torch.stack((k, v), 1) if form == "whole" else (k, v)
    for _ in range(2):
        assert_close(w.run(wide.q, cache), wide.expected()[0])
        assert_close(w.run(narrow.q, narrow.cache), narrow.expected()[0])


def test_a_decode_that_gets_fewer_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    b = batch(LENS)
    w, fresh = (SUBJECTS["decode"](b) for _ in range(2))
    w.planned()
    fresh.planned()
    want = out_of(fresh, b)
    for ctas in (100, 0, 60, 60):  # of the prefill kernel beside it, on a device of 132 SMs
        monkeypatch.setattr("fi_core.attention.wrappers.side_by_side.prefill_ctas", lambda *_, n=ctas: n)
        monkeypatch.setattr("fi_core.attention.wrappers.side_by_side.multiprocessors_of", lambda _: 132)
        divide(w.wrapper, b.cache[1], 1.0)
        assert_close(out_of(w, b), want.double())
        assert w.wrapper._plan.num_ctas == min(64, 132 - ctas if ctas else 64)


@pytest.mark.parametrize("subject", ["paged", "paged_graph", "ragged"])
def test_the_mask_of_the_last_plan(subject: str) -> None:
    b = batch(((4, 40), (3, 17)))
    options = {"custom_mask_buf": torch.zeros(99, dtype=torch.uint8), "mask_indptr_buf": torch.zeros(3).int()}
    w = SUBJECTS[subject](b)
    if subject == "paged_graph":
        tables = {f"{name}_buf": w.plan[name].clone() for name in list(w.plan)[:4]}
        made = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), use_cuda_graph=True, **tables, **options)
        w = w._replace(wrapper=made)
    masks = [torch.rand(4 * 40 + 3 * 17, generator=torch.Generator().manual_seed(seed)) > 0.5 for seed in range(2)]
    for mask in masks:
        w.planned(custom_mask=mask)
        found = out_of(w, b)
        fresh = SUBJECTS["paged" if subject == "paged_graph" else subject](b)
        fresh.planned(custom_mask=mask)
        assert torch.equal(found, out_of(fresh, b))
    w.wrapper._causal = not w.wrapper._causal
    assert torch.equal(out_of(w, b), found), "a mask takes the place of the causal one"


def test_plans_of_many_page_counts_keep_little() -> None:
    """With fixed_split_size the buffers depend on the number of pages, which differs in each step of an engine."""
    b = batch(LENS)
    w = SUBJECTS["decode"](b)
    counts, before = [], plans_alive()
    for pages in range(1, 151):
        w.planned(indices=torch.zeros(w.plan["indices"].numel() + pages, dtype=torch.int32), fixed_split_size=1)
        if pages % 50 == 0:
            counts.append(plans_alive() - before)
    assert max(counts) < 100, counts


def plans_alive() -> int:
    gc.collect()
    return sum(type(x) is DecodePlan for x in gc.get_objects())


@pytest.mark.parametrize(
    ("planned", "argument", "value"),
    [
        ({"window_right": 0}, "window_right", 0.0),
        ({"window_right": 1}, "window_right", True),
        ({"page_size": 16}, "page_size", 16.0),
    ],
)
def test_an_equal_value_of_another_type_is_checked_like_the_first(
    planned: dict[str, Any], argument: str, value: Any
) -> None:
    w = SUBJECTS["decode"](batch(LENS))
    w.planned(**planned)
    with pytest.raises((TypeError, ValueError), match=argument):
        w.planned(**{argument: value})


@pytest.mark.parametrize("subject", SINGLE)
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_queries_of_fewer_dimensions_are_named(subject: str, shape: tuple[int, ...]) -> None:
    b = batch(LENS)
    w = SUBJECTS[subject](b)
    w.planned()
    with pytest.raises(ValueError, match=r"\bq\b"):
        w.wrapper.run(b.q.new_ones(shape), *w.keys)
