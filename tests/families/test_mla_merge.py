"""The merge of split MLA requests, at the end of the kernel that computes them."""

from __future__ import annotations

import pytest
import torch

from families.test_mla import Wrapper, batch, workspace


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
