"""Cases of merging attention states."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Tolerance, Work, dtype_of
from fi_bench.cases.common import nbytes, normal

if TYPE_CHECKING:
    import torch

_LSE = {"s": Tolerance(1e-5, 1e-5)}


def _pair(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    v = (p.batch_size, p.num_qo_heads, p.head_dim)
    dtype = dtype_of(p.input_dtype)
    return Inputs(
        v_a=normal(v, dtype, device, generator),
        s_a=normal(v[:2], torch.float32, device, generator, 4.0),
        v_b=normal(v, dtype, device, generator),
        s_b=normal(v[:2], torch.float32, device, generator, 4.0),
    )


def _stack(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    v = (p.batch_size, p.num_states, p.num_qo_heads, p.head_dim)
    return Inputs(
        v=normal(v, dtype_of(p.input_dtype), device, generator),
        s=normal(v[:3], torch.float32, device, generator, 4.0),
    )


def _merge(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States along dim 1, with base-2 LSE, in the precision of s."""
    import torch

    top = s.amax(1, keepdim=True)
    weight = torch.exp2(s - top)
    total = weight.sum(1, keepdim=True)
    merged = (v.to(s.dtype) * (weight / total).unsqueeze(-1)).sum(1)
    return merged, (top + torch.log2(total)).squeeze(1)


def _stacked(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    if "v" in x:
        return x.v, x.s
    return torch.stack([x.v_a, x.v_b], 1), torch.stack([x.s_a, x.s_b], 1)


def _reference(x: Inputs) -> Outputs:
    v, s = _stacked(x)
    merged, lse = _merge(v.double(), s.double())
    return {"v": merged, "s": lse}


def _torch(x: Inputs) -> Any:
    v, s = _stacked(x)
    merged, lse = _merge(v, s)
    return merged.to(v.dtype), lse


def _returned(x: Inputs, returned: Any) -> Outputs:
    return {"v": returned[0], "s": returned[1]}


def _work(p: Namespace, x: Inputs) -> Work:
    """Read every state, write one."""
    v, s = (x.v, x.s) if "v" in x else (x.v_a, x.s_a)
    states = p.num_states if "v" in x else 2
    one = nbytes(v, s) // (states if "v" in x else 1)
    return Work(3 * states * p.batch_size * p.num_qo_heads * p.head_dim, (states + 1) * one)


CASES = (
    Case("merge_state", "cascade.merge_state", _pair, lambda f, x: f(x.v_a, x.s_a, x.v_b, x.s_b), _returned,
         _reference, _work, _torch, op="merge_state", tolerance=_LSE),
    Case("merge_state_in_place", "cascade.merge_state_in_place", _pair, lambda f, x: f(x.v_a, x.s_a, x.v_b, x.s_b),
         lambda x, _: {"v": x.v_a, "s": x.s_a}, _reference, _work, _torch, op="merge_state", tolerance=_LSE,
         torch_outputs=_returned),
    Case("merge_states", "cascade.merge_states", _stack, lambda f, x: f(x.v, x.s), _returned, _reference, _work, _torch,
         op="merge_states", tolerance=_LSE),
)  # fmt: skip
