"""Runs of a planned MLA wrapper: what changes the plan between them, and the merge of split requests."""

from __future__ import annotations

import pytest
import torch

from families.harness import using
from families.test_mla import Wrapper, batch, workspace
from fi_core.runtime.errors import UnsupportedError


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_splits_need_not_run_together(heads: int) -> None:
    """While another stream holds SMs the CTAs of one request run one after another; the bits stay."""
    b, wrapper = batch((20_000, 9, 3000), heads=heads, device="cuda"), Wrapper(workspace("cuda"))
    wrapper.plan(*b.plan_arguments())
    want = wrapper.run(*b.run_arguments())
    busy, side = torch.randn(8192, 8192, device="cuda"), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            busy @ busy
        assert torch.equal(wrapper.run(*b.run_arguments()), want)


@pytest.mark.parametrize(
    ("name", "value"), [("_sm_scale", 0.5), ("_causal", True), ("_page_size", 64), ("_kv_indices_buf", None)]
)
def test_what_engines_assign_between_runs_counts(name: str, value: object, device: str) -> None:
    """The next run computes what a wrapper computes that was planned so."""
    b, wrapper = batch((128, 64), qo_len=3, device=device), Wrapper(workspace(device))
    wrapper.plan(*b.plan_arguments())
    before = wrapper.run(*b.run_arguments())
    if name == "_kv_indices_buf":
        value = getattr(wrapper, name).flip(0).contiguous()
    setattr(wrapper, name, value)
    got = wrapper.run(*b.run_arguments())
    fresh = Wrapper(workspace(device))
    fresh.plan(*b.plan_arguments())
    fresh.run(*b.run_arguments())
    setattr(fresh, name, value)
    assert torch.equal(got, fresh.run(*b.run_arguments()))
    assert torch.equal(got, before) is (name == "_page_size")


def test_a_run_after_a_failed_plan_is_refused(device: str) -> None:
    b, wrapper = batch((70, 3), device=device), Wrapper(workspace(device))
    wrapper.plan(*b.plan_arguments())
    wrapper.run(*b.run_arguments())
    arguments = list(b.plan_arguments())
    arguments[4] = 0  # num_heads
    with pytest.raises(ValueError, match="num_heads: a positive integer"):
        wrapper.plan(*arguments)
    with pytest.raises(RuntimeError, match="the last plan failed"):
        wrapper.run(*b.run_arguments())


def test_a_forced_implementation_counts_for_a_plan_made_before() -> None:
    b, wrapper = batch((70, 3)), Wrapper(workspace("cpu"))
    wrapper.plan(*b.plan_arguments())
    want = wrapper.run(*b.run_arguments())
    with using("batch_mla", "mma_sm80"), pytest.raises(UnsupportedError, match="requires device == cuda"):
        wrapper.run(*b.run_arguments())
    assert torch.equal(wrapper.run(*b.run_arguments()), want)
