"""Cases of bit packing."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Work
from fi_bench.cases.common import ceil_div

if TYPE_CHECKING:
    import torch


def _make(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    bits = torch.randint(0, 2, (p.m * p.k,), device=device, generator=generator, dtype=torch.uint8).bool()
    indptr = torch.arange(p.m + 1, dtype=torch.int32, device=device) * p.k
    return Inputs(x=bits, indptr=indptr, bitorder=p.bitorder, m=p.m, k=p.k)


def _pack(rows: torch.Tensor, bitorder: str) -> torch.Tensor:
    """Bits along the last dimension to bytes, zero padded."""
    import torch

    padded = torch.nn.functional.pad(rows.to(torch.uint8), (0, -rows.shape[-1] % 8))
    shifts = torch.arange(8, device=rows.device, dtype=torch.uint8)
    weights = 1 << (7 - shifts if bitorder == "big" else shifts)
    packed: torch.Tensor = (padded.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return packed


def _segments(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    packed = _pack(x.x.view(x.m, x.k), x.bitorder).flatten()
    return packed, torch.arange(x.m + 1, dtype=torch.int32, device=x.x.device) * ceil_div(x.k, 8)


def _segment_outputs(x: Inputs, returned: Any) -> Outputs:
    return {"y": returned[0], "indptr": returned[1]}


CASES = (
    Case(
        routine="packbits",
        function="quantization.packbits",
        op="packbits",
        make=_make,
        call=lambda f, x: f(x.x, x.bitorder),
        outputs=lambda x, returned: {"y": returned},
        reference=lambda x: {"y": _pack(x.x, x.bitorder)},
        work=lambda p, x: Work(0, x.x.numel() + ceil_div(x.x.numel(), 8)),
        torch=lambda x: _pack(x.x, x.bitorder),
    ),
    Case(
        routine="segment_packbits",
        function="quantization.segment_packbits",
        op="packbits",
        make=_make,
        call=lambda f, x: f(x.x, x.indptr, x.bitorder),
        outputs=_segment_outputs,
        reference=lambda x: _segment_outputs(x, _segments(x)),
        work=lambda p, x: Work(0, x.x.numel() + p.m * ceil_div(p.k, 8) + 8 * (p.m + 1)),
        torch=_segments,
    ),
)
