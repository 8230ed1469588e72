"""Compares a backend's outputs with the fp64 reference; computes the numbers of a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs, Outputs, Tolerance

if TYPE_CHECKING:
    import torch

# One rounding of the output plus the arithmetic before it.
_BY_DTYPE = {
    "float64": Tolerance(1e-6, 1e-6),
    "float32": Tolerance(1e-4, 1e-5),
    "float16": Tolerance(2e-3, 2e-3),
    "bfloat16": Tolerance(1e-2, 1e-2),
    # one step of the format: a value halfway between two may round either way
    "float8_e4m3fn": Tolerance(0.125, 2.0**-9),
    "float8_e5m2": Tolerance(0.25, 2.0**-16),
}


@dataclass(frozen=True)
class Difference:
    """One output against its reference."""

    output: str
    dtype: str
    rtol: float
    atol: float
    elements: int = 0
    mismatches: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    rel_l2: float = 0.0
    cosine: float = 1.0
    nan: int = 0
    inf: int = 0
    worst_index: tuple[int, ...] = ()
    worst_got: float = 0.0
    worst_want: float = 0.0

    @property
    def ok(self) -> bool:
        return self.mismatches == 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"mismatch_pct": self.percent}

    @property
    def percent(self) -> float:
        return 100.0 * self.mismatches / max(self.elements, 1)


def compare(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance | None = None) -> Difference:
    """Elements differ where |got - want| > atol + rtol |want|, or where one is NaN or infinite and the other not."""
    import torch

    if got.shape != want.shape:
        raise ValueError(f"output {name}: shape must be {tuple(want.shape)}, got {tuple(got.shape)}")
    dtype = str(got.dtype).removeprefix("torch.")
    rtol, atol = tolerance or _BY_DTYPE.get(dtype, Tolerance(0.0, 0.0))
    a, b = got.double().flatten(), want.double().flatten()
    if not a.numel():
        return Difference(name, dtype, rtol, atol)
    same = a == b  # also equal infinities
    gap = torch.where(same, 0.0, (a - b).abs())
    wrong = ~same & ~(b.isfinite() & (gap <= atol + rtol * b.abs()))
    gap = gap.nan_to_num(math.inf, math.inf)
    worst = int(torch.where(wrong, gap, -1.0).argmax() if bool(wrong.any()) else gap.argmax())
    relative = gap / b.abs().clamp(min=max(atol, 1e-12))
    norm_a, norm_b = a.norm(), b.norm()
    cosine = float(torch.dot(a, b) / (norm_a * norm_b)) if float(norm_a) and float(norm_b) else float(bool(same.all()))
    return Difference(
        output=name,
        dtype=dtype,
        rtol=rtol,
        atol=atol,
        elements=a.numel(),
        mismatches=int(wrong.sum()),
        max_abs=float(gap.max()),
        max_rel=float(relative.nan_to_num(math.inf, math.inf).max()),
        rel_l2=float((a - b).norm() / norm_b) if float(norm_b) else float(norm_a),
        cosine=cosine,
        nan=int(a.isnan().sum()),
        inf=int(a.isinf().sum()),
        worst_index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)),
        worst_got=float(a[worst]),
        worst_want=float(b[worst]),
    )


def check(
    outputs: Outputs, reference: Outputs, tolerances: Mapping[str, Tolerance], partial: bool = False
) -> list[Difference]:
    """Compares all outputs of the reference. A missing one is an error, except for peers that compute only some."""
    missing = reference.keys() - outputs.keys()
    if (missing and not partial) or missing == reference.keys():
        raise ValueError(f"no output named {', '.join(sorted(missing))}")
    return [
        compare(name, outputs[name], want, tolerances.get(name)) for name, want in reference.items() if name in outputs
    ]


def poison(inputs: Inputs, names: tuple[str, ...]) -> None:
    """Fills pure outputs with NaN, and integers with their smallest value, so that unwritten elements show."""
    import torch

    for name in names:
        tensor = inputs.get(name)
        if tensor is None:
            continue
        if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
            tensor.view(torch.uint8).fill_(0x7F)  # NaN of both fp8 formats
        elif tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
