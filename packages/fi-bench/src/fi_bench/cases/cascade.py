"""Cases of merging attention states."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch


def _sizes(p: Namespace) -> dict[str, Any]:
    return sizes_of(p, "head_dim", n="batch_size", num_heads="num_qo_heads", dtype="input_dtype")


def _sizes_of_many(p: Namespace) -> dict[str, Any]:
    return _sizes(p) | sizes_of(p, "num_states")


def _merge(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States along dim 1, with base-2 LSE, in fp32."""
    import torch

    top = s.amax(1, keepdim=True)
    weight = torch.exp2(s - top)
    total = weight.sum(1, keepdim=True)
    merged = (v.to(s.dtype) * (weight / total).unsqueeze(-1)).sum(1)
    return merged.to(v.dtype), (top + torch.log2(total)).squeeze(1)


def _merge_pair(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    names = ("v_a", "v_b", "s_a", "s_b") if "v_a" in x else ("v", "v_other", "s", "s_other")
    v, v_other, s, s_other = (x[name] for name in names)
    return _merge(torch.stack([v, v_other], 1), torch.stack([s, s_other], 1))


CASES = (
    described("cascade.merge_state", _sizes, lambda f, x: f(x.v_a, x.s_a, x.v_b, x.s_b), _merge_pair, op="merge_state"),
    described(
        "cascade.merge_state_in_place",
        _sizes,
        lambda f, x: f(x.v, x.s, x.v_other, x.s_other),
        _merge_pair,
        op="merge_state",
    ),
    described(
        "cascade.merge_states", _sizes_of_many, lambda f, x: f(x.v, x.s), lambda x: _merge(x.v, x.s), op="merge_states"
    ),
)
