"""Hyper-connections: what the descriptions do not express."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import assert_close, rand
from fi_core import mhc


def pre_inputs(*outer: int, splits: int, h: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of mhc_pre_big_fuse in splits, and those of one split with the same sums."""
    generator = torch.Generator().manual_seed(h)
    logits, squares = (torch.rand(splits, *outer, *last, generator=generator) for last in ((24,), ()))
    rest = {
        "residual": rand(*outer, 4, h, dtype=torch.bfloat16, device=device),
        "mhc_scale": rand(3, dtype=torch.float32, device=device),
        "mhc_base": rand(24, dtype=torch.float32, device=device),
        "k": 4 * h,
    }
    parts = {"dot_mix": logits.to(device), "sqrsum": squares.to(device)}
    whole = {name: x.double().sum(0).float() for name, x in parts.items()}
    if splits == 1:
        parts = whole
    return {**parts, **rest, "num_splits": splits}, {**whole, **rest}


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_pre_sums_splits_of_any_outer_shape(splits: int, device: str) -> None:
    parts, whole = pre_inputs(2, 3, splits=splits, h=48, device=device)
    got, want = mhc.mhc_pre_big_fuse(**parts, sinkhorn_repeat=4), mhc.mhc_pre_big_fuse(**whole, sinkhorn_repeat=4)
    assert [tuple(x.shape) for x in got] == [(2, 3, 4, 1), (2, 3, 4, 4), (2, 3, 48)]
    for own, other in zip(got, want):
        assert_close(own, other.double())


def test_comb_is_doubly_stochastic(device: str) -> None:
    parts, _ = pre_inputs(7, splits=1, h=64, device=device)
    comb = mhc.mhc_pre_big_fuse(**parts, sinkhorn_repeat=200)[1].double()
    for axis in (-1, -2):
        assert_close(comb.sum(axis), torch.ones(7, 4), tolerance=(0, 1e-3))


def test_prenorm_is_the_sum_of_the_squares_of_the_residual(device: str) -> None:
    parts, _ = pre_inputs(5, splits=1, h=4100, device=device)
    parts["sqrsum"] = parts["residual"].double().square().sum((-1, -2)).float()
    named = {name: parts[name] for name in ("residual", "mhc_scale", "mhc_base")}
    want = mhc.mhc_pre_big_fuse(**parts)
    for dot_mix in (parts["dot_mix"], parts["dot_mix"][None]):
        for own, other in zip(mhc.mhc_pre_big_fuse_with_prenorm(dot_mix, **named), want):
            assert_close(own, other.double())


def test_post_of_streams_in_columns(device: str) -> None:
    """Views whose tokens lie apart, and mixing weights of three and four dimensions."""
    x = rand(2, 3, 40, dtype=torch.float16, device=device)
    residual = rand(2, 3, 4, 50, dtype=torch.float16, device=device, seed=1)[..., 5:45]
    post, comb = (rand(2, 3, *last, dtype=torch.float32, device=device) for last in ((4, 1), (4, 4)))
    want = x.double().unsqueeze(2) * post.double() + comb.double().mT @ residual.double()
    assert_close(mhc.mhc_post(x, residual, post, comb), want)
    assert_close(mhc.mhc_post(x, residual, post[..., 0], comb.mT.contiguous().mT), want)


def test_wrong_arguments_are_named() -> None:
    parts, _ = pre_inputs(5, splits=2, h=32, device="cpu")
    for change, words in (
        ({"residual": torch.zeros(5, 3, 32)}, r"residual must have shape \[..., 4, H\]; got \[5, 3, 32\]"),
        ({"num_splits": 1}, r"dot_mix must have shape \[5, 24\]; got \[2, 5, 24\]"),
        ({"sqrsum": torch.zeros(5)}, r"sqrsum must have shape \[2, 5\]"),
        ({"mhc_scale": torch.zeros(2)}, r"mhc_scale must have shape \[3\]"),
        ({"rms_eps": 0.0}, r"rms_eps must be strictly positive; got 0\.0"),
        ({"mhc_sinkhorn_eps": float("nan")}, "mhc_sinkhorn_eps must be strictly positive"),
        ({"sinkhorn_repeat": 0}, "sinkhorn_repeat must be 1 or more; got 0"),
        ({"k": 0}, "k must be positive; got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            mhc.mhc_pre_big_fuse(**{**parts, **change})
    x, residual, post, comb = torch.zeros(5, 8), torch.zeros(5, 4, 8), torch.zeros(5, 4), torch.zeros(5, 4, 4)
    with pytest.raises(ValueError, match=r"post_layer_mix must have shape \[5, 4, 1\]; got \[5, 3\]"):
        mhc.mhc_post(x, residual, post[:, :3], comb)
    with pytest.raises(TypeError, match="comb_res_mix must be float32"):
        mhc.mhc_post(x, residual, post, comb.half())
