"""Helpers of operator tests: nasty inputs, poisoned outputs with guard zones, and comparison with fp64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from fi_bench.backends import forcing
from fi_core.registry import operator

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Relative and absolute tolerance against fp64, by output dtype: about one rounding, plus the error of fp32 arithmetic.
TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (1.5e-3, 1e-3),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float8_e4m3fn: (0.07, 2e-3),
    torch.float8_e5m2: (0.14, 1e-4),
}
GUARD = 64  # elements of poison around every buffer


def rand(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values, equal on every device."""
    generator = torch.Generator().manual_seed(seed + 7919 * math.prod(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def _poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 0x55


def guarded(shape: Sequence[int], dtype: torch.dtype, device: str, *, row_padding: int = 0) -> torch.Tensor:
    """A poisoned buffer (NaN) of the shape in a larger poisoned allocation; rows are `row_padding` elements apart."""
    *rows, inner = shape
    pitch = inner + row_padding
    total = math.prod(rows) * pitch + 2 * GUARD
    canvas = torch.full((total,), _poison(dtype), dtype=torch.float32).to(dtype).to(device)
    strides = [pitch * math.prod(rows[i + 1 :]) for i in range(len(rows))] + [1]
    view = canvas.as_strided(tuple(shape), strides, GUARD)
    view.canvas = canvas  # type: ignore[attr-defined]
    return view


def strided(x: torch.Tensor, row_padding: int = 8) -> torch.Tensor:
    """The same values with NaN between the rows, such as a slice of a fused qkv."""
    view = guarded(x.shape, x.dtype, str(x.device), row_padding=row_padding)
    view.copy_(x)
    return view


def assert_guards(view: torch.Tensor) -> None:
    """Asserts that nothing outside the view is written."""
    outside = torch.ones(view.canvas.numel(), dtype=torch.bool)  # type: ignore[attr-defined]
    outside.as_strided(view.shape, view.stride(), GUARD).fill_(False)
    rest = view.canvas.cpu()[outside]  # type: ignore[attr-defined]
    clean = rest.float().isnan() if rest.is_floating_point() else rest == 0x55
    assert clean.all(), f"{int((~clean).sum())} elements outside the output were written"


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, tolerance: tuple[float, float] | None = None) -> None:
    """`actual` against an fp64 reference: NaN and inf in the same places, the rest within the tolerance of its dtype.

    fp8 saturates, so the reference is clamped to the largest finite value first; its infinities are too.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    if actual.dtype in FP8:
        top = torch.finfo(actual.dtype).max
        want = torch.where(want.isnan(), want, want.clamp(-top, top))
    elif actual.dtype != torch.float32:
        want = torch.where(want.abs() > torch.finfo(actual.dtype).max * (1 + 2**-12), want.sign() * math.inf, want)
    for name, test in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(want)
        assert not wrong.any(), (
            f"{name} differs at {wrong.nonzero()[0].tolist()} and {int(wrong.sum()) - 1} more places"
        )
    finite = torch.isfinite(want)
    relative, absolute = tolerance or TOLERANCE[actual.dtype]
    excess = torch.where(finite, (got - want).abs() - (absolute + relative * want.abs()), torch.zeros_like(want))
    if excess.numel() and excess.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{int((excess > 0).sum())} of {excess.numel()} differ, worst at {at}: {got[at]} for {want[at]}"
        )


@contextlib.contextmanager
def using(op: str, impl: str) -> Iterator[None]:
    """Runs the block with one implementation of the op."""
    with forcing(operator(op), impl):
        yield


def impls(op: str, device: str) -> list[str]:
    """The implementations of an op that run on this device."""
    from fi_core.runtime.machine import target_of

    target = target_of(torch.device(device, 0) if device == "cuda" else torch.device(device))
    values = {"device": target.kind, "capability": target.capability}
    kernels = [i for i in operator(op).op.implementations if i.unit is not None or device == "cpu"]
    return [i.name for i in kernels if all(c.holds(values) for c in i.constraints if getattr(c, "name", "") in values)]
