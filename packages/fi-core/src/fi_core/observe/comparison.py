"""When outputs count as equal to those of a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_TOLERANCES = {"float64": 1e-7, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


def default_tolerances(dtype: torch.dtype | str) -> tuple[float, float]:
    """(rtol, atol) by which an implementation may differ from the reference; 0 for integers."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        value = 0.1
    elif name.startswith("float4"):
        value = 1.0
    else:
        value = _TOLERANCES.get(name, 0.0)
    return value, value


def default_check(
    reference_outputs: Any,
    actual_outputs: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    max_mismatch_pct: float = 0.0,
    min_cos_sim: float = 1.0 - 0.001,
) -> bool:
    """Whether actual outputs equal those of the reference: few elements out of tolerance, and the same direction.

    Both are tensors, or tuples, lists or dicts of tensors. NaN equals NaN, and an infinity only itself.

    Args:
        rtol, atol: None: those of `default_tolerances` for the dtype of the reference's output.
        max_mismatch_pct: how many percent of the elements may be out of tolerance.
        min_cos_sim: the least cosine of both outputs as vectors.
    """
    import torch

    ref, actual = reference_outputs, actual_outputs
    options: dict[str, Any] = {
        "rtol": rtol,
        "atol": atol,
        "max_mismatch_pct": max_mismatch_pct,
        "min_cos_sim": min_cos_sim,
    }
    if ref is None or actual is None:
        return ref is None and actual is None
    if isinstance(ref, Mapping):
        return (
            isinstance(actual, Mapping)
            and ref.keys() == actual.keys()
            and all(default_check(ref[key], actual[key], **options) for key in ref)
        )
    if isinstance(ref, (tuple, list)):
        return (
            isinstance(actual, (tuple, list))
            and len(ref) == len(actual)
            and all(default_check(r, a, **options) for r, a in zip(ref, actual))
        )
    ref, actual = torch.as_tensor(ref), torch.as_tensor(actual)
    if ref.shape != actual.shape or ref.is_floating_point() != actual.is_floating_point():
        return False
    if ref.numel() == 0:
        return True
    usual = default_tolerances(ref.dtype)
    rtol, atol = usual[0] if rtol is None else rtol, usual[1] if atol is None else atol
    r, a = ref.detach().cpu().double(), actual.detach().cpu().double()
    wrong = ~torch.isclose(a, r, rtol=rtol, atol=atol, equal_nan=True)
    if 100.0 * wrong.sum().item() / r.numel() > max_mismatch_pct:
        return False
    return not ref.is_floating_point() or _cosine(r, a) >= min_cos_sim


standard_check = default_check


def _cosine(r: torch.Tensor, a: torch.Tensor) -> float:
    finite = r.isfinite() & a.isfinite()
    r, a = r[finite], a[finite]
    lengths = r.norm().item() * a.norm().item()
    if lengths == 0 or math.isinf(lengths):
        return 1.0 if r.norm() == a.norm() else 0.0
    return float((r @ a).item() / lengths)
