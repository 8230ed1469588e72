"""Cases of bit packing."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fi_bench.case import Inputs
from fi_bench.cases.common import ceil_div
from fi_bench.described import described

if TYPE_CHECKING:
    import torch


def _sizes(p: Namespace) -> dict[str, Any]:
    return {"n": p.m * p.k, "bitorder": p.bitorder}


def _pack(rows: torch.Tensor, bitorder: str) -> torch.Tensor:
    """Bits along the last dimension to bytes, zero padded."""
    import torch

    padded = torch.nn.functional.pad(rows.to(torch.uint8), (0, -rows.shape[-1] % 8))
    shifts = torch.arange(8, device=rows.device, dtype=torch.uint8)
    weights = 1 << (7 - shifts if bitorder == "big" else shifts)
    packed: torch.Tensor = (padded.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return packed


def _segments(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs segments of equal length."""
    import torch

    packed = _pack(x.x.view(x.m, x.k), x.bitorder).flatten()
    return packed, torch.arange(x.m + 1, dtype=torch.int32, device=x.x.device) * ceil_div(x.k, 8)


CASES = (
    described(
        "quantization.packbits",
        _sizes,
        lambda f, x: f(x.x, x.bitorder),
        lambda x: _pack(x.x, x.bitorder),
        op="packbits",
    ),
    described(
        "quantization.segment_packbits",
        lambda p: {**_sizes(p), "num_segments": p.m},
        lambda f, x: f(x.x, x.indptr, x.bitorder),
        _segments,
        add=lambda p, x: {"m": p.m, "k": p.k},
        op="packbits",
    ),
)
