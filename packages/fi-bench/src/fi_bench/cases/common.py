"""Random data, sizes and exact casts that the cases of all families share."""

from __future__ import annotations

import math
import random
from argparse import Namespace
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_bench import sweep
from fi_core.observe.draw import Draw
from fi_core.testing.utils import count_bytes

if TYPE_CHECKING:
    import torch

FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
nbytes = count_bytes


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: Any, generator: Any, scale: float = 1.0) -> torch.Tensor:
    """N(0, scale^2), also for 8-bit floats; never zeros, which draw less power and run faster."""
    return Draw(device, generator, nasty=False).normal(shape, dtype, scale)


def integers(low: int, high: int, shape: tuple[int, ...], device: Any, generator: Any) -> torch.Tensor:
    """int32 in [low, high)."""
    import torch

    return torch.randint(low, high, shape, dtype=torch.int32, device=device, generator=generator)


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Saturating cast of fp64 values; torch's own cast gives NaN beyond the range."""
    bound = FP8_MAX[str(dtype).removeprefix("torch.")]
    return x.clamp(-bound, bound).float().to(dtype)


class Request(NamedTuple):
    """Lengths of one request of a batch; kv_len counts the new tokens too."""

    qo_len: int
    kv_len: int


def requests(p: Namespace) -> list[Request]:
    """The batch that attention flags ask for: --case, or --batch_size of --s_qo and --s_kv; with
    --random_actual_seq_len each uniform in [1, max], equal where the maxima are, and kv_len >= qo_len.
    """
    if p.case:
        return [Request(*lengths) for lengths in sweep.requests(p.case)]
    if not p.random_actual_seq_len:
        return [Request(p.s_qo, p.s_kv)] * p.batch_size
    rng = random.Random(p.random_seed)
    found = []
    for _ in range(p.batch_size):
        qo_len = rng.randint(1, p.s_qo)
        kv_len = qo_len if p.s_qo == p.s_kv else max(rng.randint(1, p.s_kv), qo_len)
        found.append(Request(qo_len, kv_len))
    return found


def ceil_div(a: int, b: int) -> int:
    return math.ceil(a / b)


def page_table(lengths: list[int], page_size: int, device: Any, generator: Any) -> dict[str, Any]:
    """kv_indptr, kv_indices (a random permutation over the pool) and kv_last_page_len for these lengths."""
    import torch

    pages = [ceil_div(n, page_size) for n in lengths]
    indptr = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = int(indptr[-1])
    last = [(n - 1) % page_size + 1 if n else 0 for n in lengths]
    return {
        "kv_indices": torch.randperm(total, device=device, generator=generator).to(torch.int32),
        "kv_indptr": indptr.to(device),
        "kv_last_page_len": torch.tensor(last, dtype=torch.int32, device=device),
        "num_pages": total,
    }


def block_table(kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> torch.Tensor:
    """The pages of all requests as a rectangle [requests, most pages], int32, zero where a request has fewer."""
    import torch

    pages = kv_indptr.diff().tolist()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=kv_indices.device)
    for row, own in zip(table, kv_indices.split(pages), strict=True):
        row[: len(own)] = own
    return table
