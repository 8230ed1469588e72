"""Page ids outside of the cache on a GPU: kernels read and write nothing outside, and other requests are unharmed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families import test_mla as mla
from families.harness import assert_close
from families.paged import paged
from families.prefill_batch import batch, planned, workspace
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper

pytestmark = pytest.mark.gpu
LIES = (-1, (1 << 31) - 1, -(1 << 31), 10**6, 10**8)


def lie(indices: torch.Tensor, indptr: torch.Tensor, request: int) -> None:
    """Makes every second page id of the request one that does not exist."""
    first, end = indptr[request : request + 2].tolist()
    for i in range(first, end, 2):
        indices[i] = LIES[i // 2 % len(LIES)]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn), (torch.float8_e4m3fn, None)],
)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_prefill(page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    b = batch([(70, 200), (37, 300), (65, 65)], heads=(8, 2), dims=(128, 128), dtype=dtype, kv_dtype=kv_dtype,
              page_size=page_size, device="cuda")  # fmt: skip
    want, _ = b.expected(causal=True)
    lie(b.pool.indices, b.pool.indptr, 1)
    for w in planned(b, causal=True, o_data_type=torch.bfloat16):
        out = w.run(b.q, b.cache)
        for rows in (slice(0, 70), slice(107, 172)):
            error = (out[rows].cpu().double() - want[rows]).norm() / want[rows].norm()
            assert error < (0.05 if dtype.itemsize == 1 else 0.01)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("lengths", [(200, 300, 65), (3000,) * 40])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tensor_cores", [True, False])
def test_decode(tensor_cores: bool, page_size: int, lengths: tuple[int, ...], kv_dtype: torch.dtype) -> None:
    """Small batches run the cluster kernel, large ones the persistent kernels."""
    b = paged(lengths, heads=(8, 2), dim=128, page_size=page_size, dtype=torch.bfloat16, kv_dtype=kv_dtype,
              device="cuda")  # fmt: skip
    others = [0, 2]
    want, _ = b.only(others).expected()
    lie(b.indices, b.indptr, 1)
    w = BatchDecodeWithPagedKVCacheWrapper(workspace("cuda", 64 << 20), use_tensor_cores=tensor_cores)
    w.plan(*b.plan_arguments(), **b.dtypes)
    assert_close(w.run(b.q, b.cache)[others], want)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 64])
def test_mla(page_size: int, heads: int) -> None:
    b = mla.batch([200, 300, 65], heads=heads, page_size=page_size, device="cuda")
    want, _ = b.expected()
    lie(b.kv_indices, b.kv_indptr, 1)
    w = fi_core.mla.BatchMLAPagedAttentionWrapper(mla.workspace("cuda"))
    w.plan(*b.plan_arguments())
    assert_close(w.run(*b.run_arguments())[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("page_size", [1, 16])
def test_append(page_size: int) -> None:
    lengths, d = (40, 50, 30), "cuda"
    b = paged(lengths, dim=128, page_size=page_size, dtype=torch.bfloat16, device=d)
    rows: Any = torch.randn(2, sum(lengths), 2, 128, device=d).to(torch.bfloat16)
    batches = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(torch.int32).to(d)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(torch.int32).to(d)
    guard = [x.clone() for x in b.cache]
    lie(b.indices, b.indptr, 1)
    fi_core.append_paged_kv_cache(*rows, batches, positions, b.cache, b.indices, b.indptr, b.last_page_len)
    for request, at in ((0, slice(0, 40)), (2, slice(90, 120))):
        first, end = b.indptr[request : request + 2].tolist()
        pages = b.indices[first:end].long()
        for pool, new in zip(b.cache, rows):
            assert torch.equal(pool[pages].flatten(0, 1)[: lengths[request]], new[at])
    named = set(b.indices.tolist())
    for page in set(range(len(b.cache[0]))) - named:
        for pool, old in zip(b.cache, guard):
            assert torch.equal(pool[page].view(torch.int16), old[page].view(torch.int16)), "no other page is written"
