"""Batch prefill where row_max grows late: kernels skip the rescale until row_max grows beyond a threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from families.harness import assert_close
from families.prefill_batch import Batch, batch, planned
from fi_core.prefill import BatchPrefillWithRaggedKVCacheWrapper

E4M3 = torch.float8_e4m3fn
KEYS = 900
# Added to the scores of a key, in base 2, as a function of its index; kernels process the last keys first.
GROWTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a jump": lambda i: 14.0 * (i < 320),
    "beyond the largest float": lambda i: 200.0 * (i < 30),
    "one key at a time": lambda i: 40.0 * (i == 700) + 80.0 * (i == 500) + 200.0 * (i == 3),
    "in every key tile": lambda i: (KEYS - i) / 128 * 10,
    "slowly": lambda i: (KEYS - i) / 128 * 3,
    "never": lambda i: i / 128 * 10,
}


def growing(
    growth: str, every: int, dtype: torch.dtype, heads: tuple[int, int], device: str, lens: list[tuple[int, int]]
) -> Batch:
    """One row in `every` has that growth, the others none; e4m3 has less, because its sums have few bits."""
    b = batch(lens, heads=heads, dims=(128, 128), dtype=dtype, device=device)
    b.q[..., 0] = 0
    b.q[::every, :, 0] = 8  # times 128 ** -0.5 and log2(e): 1.02
    for k in b.k:
        scores = GROWTH[growth](torch.arange(len(k), device=device)) * (0.4 if dtype == E4M3 else 1.0)
        k[..., 0] = scores[:, None].to(dtype)
    return b


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, E4M3])
@pytest.mark.parametrize(
    ("every", "options"),
    [(1, {"causal": True}), (7, {}), (1, {"causal": True, "window_left": 300}), (5, {"logits_soft_cap": 60.0})],
)
def test_row_max_grows(every: int, options: dict[str, Any], dtype: torch.dtype, growth: str, device: str) -> None:
    b = growing(growth, every, dtype, (4, 1), device, [(50, KEYS), (3, 40)])
    want, want_lse = b.expected(**options)
    out_dtype = torch.bfloat16 if dtype == E4M3 else dtype
    for w in planned(b, BatchPrefillWithRaggedKVCacheWrapper, o_data_type=out_dtype, **options):
        out, lse = w.run(b.q, *b.ragged(), return_lse=True)
        if dtype == E4M3:  # scores up to 80 are off by 0.1: e4m3 is multiplied and summed with some 10 bits
            most, _ = replace(b, v=[v.float().abs() for v in b.v]).expected(**options)
            assert ((out.cpu().double() - want).abs() <= most / 6 + 1e-3).all()
            assert_close(lse, want_lse, tolerance=(4e-3, 4e-3))
        else:
            assert_close(out, want)
            assert_close(lse, want_lse, tolerance=(1e-4, 1e-4))


@pytest.mark.gpu
@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype, growth: str) -> None:
    """The same bits alone and in a batch, where other rows share a warpgroup because tiles have another height."""
    b = growing(growth, 6, dtype, (10, 2), "cuda", [(300, KEYS), (64, 64), (700, KEYS), (500, 600)])
    plan = {"causal": True, "disable_split_kv": True}
    if dtype == E4M3:
        plan["o_data_type"] = torch.bfloat16
    for w in planned(b, BatchPrefillWithRaggedKVCacheWrapper, **plan):
        whole = w.run(b.q, *b.ragged()).split(list(b.qo_lens))
        for requests in ([0], [1, 0]):
            part = b.only(requests)
            w.plan(*part.ragged_plan(), **(part.types() | plan))
            for got, request in zip(w.run(part.q, *part.ragged()).split(list(part.qo_lens)), requests):
                assert torch.equal(got, whole[request])
