"""Appending to paged caches, and the index tables, against the templates' references, byte for byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_guards, guarded, impls, rand, using
from fi_core import page
from fi_core.utils import _unpack_paged_kv_cache

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)
I32 = torch.int32


def ints(values: list[int], device: str, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def fill(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Fills x and the allocation around it with random bytes."""
    flat = whole(x)
    flat.copy_(torch.randint(0, 256, flat.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
    return x


def whole(x: torch.Tensor) -> torch.Tensor:
    """All bytes of the allocation of x."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def twin(x: torch.Tensor) -> torch.Tensor:
    """A view like x of a copy of its allocation."""
    storage = whole(x).clone().untyped_storage()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.shape, x.stride())


def table(device: str, page_size: int = 4) -> dict[str, torch.Tensor]:
    """Three requests of up to three shuffled pages, the second empty; shuffled rows, row 2 is padding."""
    lengths = [2 * page_size + 1, 0, page_size]
    pages = [-(-n // page_size) for n in lengths]
    last = [n - (p - 1) * page_size if p else 0 for n, p in zip(lengths, pages)]
    rows = [(0, 0), (0, 2 * page_size), (-1, 12345), (2, page_size - 1), (0, page_size), (2, 0)]
    return {
        "batch_indices": ints([b for b, _ in rows], device),
        "positions": ints([t for _, t in rows], device),
        "kv_indices": ints([5, 0, 3, 2, -7], device),  # the last page is beyond kv_indptr[-1]
        "kv_indptr": ints([0, *itertools.accumulate(pages)], device),
        "kv_last_page_len": ints(last, device),
    }


def expect(k: torch.Tensor, v: torch.Tensor, cache: Any, t: dict[str, torch.Tensor], layout: str) -> None:
    """Appends by the reference of the trace template."""
    template = page.trace.append(paged_kv_cache=torch.empty(1, 1, 1, 1, 1), kv_layout=layout)
    assert template is not None and isinstance(template.reference, tuple)
    k_cache, v_cache = (c.view(torch.uint8) for c in _unpack_paged_kv_cache(cache, layout))  # fp8 has no index_put
    template.reference[-1](k.view(torch.uint8), v.view(torch.uint8), k_cache, v_cache, **t)


def shape_of(layout: str, pages: int, page_size: int, heads: int, dim: int) -> tuple[int, ...]:
    return (pages, page_size, heads, dim) if layout == "NHD" else (pages, heads, page_size, dim)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_copies_any_dtype(dtype: torch.dtype, layout: str, device: str) -> None:
    t = table(device)
    for impl, (heads, dim, v_dim) in itertools.product(
        impls("append_paged_kv_cache", device), [(1, 64, 64), (8, 128, 128), (3, 7, 24), (2, 192, 128), (40, 256, 1)]
    ):
        k = fill(torch.empty(6, heads, dim, dtype=dtype, device=device), 1)
        v = fill(torch.empty(6, heads, v_dim, dtype=dtype, device=device), 2)
        caches = [fill(torch.empty(shape_of(layout, 6, 4, heads, d), dtype=dtype, device=device)) for d in (dim, v_dim)]
        want = tuple(twin(c) for c in caches)
        expect(k, v, want, t, layout)
        with using("append_paged_kv_cache", impl):
            assert fi_core.append_paged_kv_cache(k, v, **t, paged_kv_cache=tuple(caches), kv_layout=layout) is None
        for got, wanted in zip(caches, want):
            assert torch.equal(whole(got), whole(wanted))


def fused(layout: str, device: str) -> Any:
    return torch.empty(6, 2, *shape_of(layout, 6, 4, 2, 32)[1:], dtype=torch.float16, device=device)


def gapped(layout: str, device: str) -> Any:
    """K and V with different strides, neither contiguous; V at an odd address."""
    k = torch.empty(shape_of(layout, 8, 6, 5, 40), dtype=torch.float16, device=device)
    v = torch.empty(shape_of(layout, 7, 5, 3, 35), dtype=torch.float16, device=device)
    page_axis, head_axis = (1, 2) if layout == "NHD" else (2, 1)
    k = k[1:7].narrow(page_axis, 1, 4).narrow(head_axis, 2, 2)[..., :32]
    return k, v[:6].narrow(page_axis, 0, 4).narrow(head_axis, 1, 2)[..., 3:]


def other_order(layout: str, device: str) -> Any:
    """This layout's shape in the other layout's memory order."""
    other = "HND" if layout == "NHD" else "NHD"
    return tuple(
        torch.empty(shape_of(other, 6, 4, 2, 32), dtype=torch.float16, device=device).transpose(1, 2) for _ in "kv"
    )


@pytest.mark.parametrize("make", [fused, gapped, other_order])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_writes_views_in_place(layout: str, make: Any, device: str) -> None:
    """Bytes around the elements of a view do not change; rows may be slices of a fused projection."""
    t = table(device)
    for offset in (0, 1):  # 1: misaligned addresses
        qkv = fill(torch.empty(6, 6 * 32 + 2 * offset, dtype=torch.float16, device=device), 1)[:, offset : offset + 192]
        k, v = (part.unflatten(1, (2, 32)) for part in (qkv[:, 64:128], qkv[:, 128:]))
        cache = make(layout, device)
        parts = cache if isinstance(cache, tuple) else (cache,)
        for part in parts:
            fill(part)
        want = tuple(twin(part) for part in parts)
        expect(k, v, want if isinstance(cache, tuple) else want[0], t, layout)
        fi_core.append_paged_kv_cache(k, v, **t, paged_kv_cache=cache, kv_layout=layout)
        for got, wanted in zip(parts, want):
            assert torch.equal(whole(got), whole(wanted))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_to_pages_of_one_token(layout: str, device: str) -> None:
    """Page size 1: caches without a page axis, fused and as a tuple."""
    t = table(device, page_size=1)
    k, v = (
        rand(6, 3, 16, dtype=torch.bfloat16, device=device),
        rand(6, 3, 16, dtype=torch.bfloat16, device=device, seed=1),
    )
    both = fill(torch.empty(6, 2, 3, 16, dtype=torch.bfloat16, device=device))
    want = twin(both)
    t["batch_indices"][5] = -1  # with page size 1 it would write the slot of row 3 again
    for row in (0, 1, 3, 4):
        b, position = int(t["batch_indices"][row]), int(t["positions"][row])
        target = int(t["kv_indices"][int(t["kv_indptr"][b]) + position])
        want[target, 0], want[target, 1] = k[row], v[row]
    parts = tuple(twin(both)[:, i] for i in (0, 1))
    fi_core.append_paged_kv_cache(k, v, **t, paged_kv_cache=both, kv_layout=layout)
    fi_core.append_paged_kv_cache(k, v, **t, paged_kv_cache=parts, kv_layout=layout)
    assert torch.equal(both.view(I32), want.view(I32))
    assert all(torch.equal(part.view(I32), want[:, i].view(I32)) for i, part in enumerate(parts))


@pytest.mark.parametrize(
    ("dtype", "dims"), [(torch.bfloat16, (512, 64)), (torch.float8_e4m3fn, (512, 64)), (torch.float32, (5, 3))]
)
def test_append_mla(dtype: torch.dtype, dims: tuple[int, int], device: str) -> None:
    t = table(device)
    for impl in impls("append_paged_kv_cache", device):
        rows = [fill(torch.empty(6, d + 16, dtype=dtype, device=device), d)[:, :d] for d in dims]
        caches = [fill(torch.empty(6, 5, d, dtype=dtype, device=device))[:, :4] for d in dims]
        want = [twin(c) for c in caches]
        page.trace.append_mla_reference(*(x.view(torch.uint8) for x in (*rows, *want)), **t)
        with using("append_paged_kv_cache", impl):
            table_first, table_rest = list(t.values())[:2], list(t.values())[2:]
            assert fi_core.append_paged_mla_kv_cache(*rows, *table_first, *caches, *table_rest) is None
        for got, wanted in zip(caches, want):
            assert torch.equal(whole(got), whole(wanted))


def test_append_beyond_32_bits(device: str) -> None:
    """Page and row offsets exceed 2^32 bytes; the memory between is never accessed."""
    far = 2**31 + 64
    cache = torch.empty(2 * far + 64, dtype=torch.uint8, device=device).as_strided((3, 4, 1, 16), (far, 16, 16, 1))
    rows = torch.empty(2 * far + 64, dtype=torch.uint8, device=device).as_strided((3, 1, 16), (far, 16, 1))
    for i in range(3):
        rows[i], cache[i] = i + 1, 0
    for layout, view in (("NHD", cache), ("HND", cache.transpose(1, 2))):
        fi_core.append_paged_kv_cache(
            rows, rows, ints([0, 0, 0], device), ints([1, 5, 9], device), (view, view), ints([2, 0, 1], device),
            ints([0, 3], device), ints([2], device), layout,
        )  # fmt: skip
    assert [[int(cache[i, j, 0, 3]) for j in range(4)] for i in range(3)] == [[0, 2, 0, 0], [0, 3, 0, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("rows", [1, 1000, 70001])
def test_append_many_rows(rows: int, device: str) -> None:
    """Sizes that launch different grids."""
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randperm(rows + 5, generator=generator)[:rows].to(I32).to(device)
    pages = torch.randperm(-(-(rows + 5) // 16), generator=generator).to(I32).to(device)
    k = torch.arange(rows, device=device, dtype=I32).view(rows, 1, 1).expand(rows, 2, 4).contiguous()
    cache = torch.full((pages.numel(), 16, 2, 4), -1, dtype=I32, device=device)
    want = cache.clone()
    at = slots.long()
    want[pages[at // 16].long(), at % 16] = k
    fi_core.append_paged_kv_cache(
        k,
        k,
        torch.zeros_like(slots),
        slots,
        (cache, cache),
        pages,
        ints([0, pages.numel()], device),
        ints([16], device),
    )
    assert torch.equal(cache, want)


def test_append_no_rows_and_only_padding(device: str) -> None:
    cache = fill(torch.empty(2, 2, 4, 1, 8, dtype=torch.float16, device=device))
    want = twin(cache)
    empty = torch.empty(0, 1, 8, dtype=torch.float16, device=device)
    none, zero = ints([], device), ints([0], device)
    fi_core.append_paged_kv_cache(empty, empty, none, none, cache, none, zero, none)
    row = torch.ones(1, 1, 8, dtype=torch.float16, device=device)
    fi_core.append_paged_kv_cache(row, row, ints([-1], device), ints([-9], device), cache, none, zero, none)
    assert torch.equal(whole(cache), whole(want))


def test_append_takes_int64_tables(device: str) -> None:
    t = table(device)
    k = rand(6, 2, 8, dtype=torch.float16, device=device)
    one, other = (torch.zeros(6, 2, 4, 2, 8, dtype=torch.float16, device=device) for _ in range(2))
    fi_core.append_paged_kv_cache(k, k, **t, paged_kv_cache=one)
    fi_core.append_paged_kv_cache(k, k, **{name: x.long() for name, x in t.items()}, paged_kv_cache=other)
    assert one.any() and torch.equal(one, other)


def test_append_compiles_to_one_node(device: str) -> None:
    t = table(device)
    k = rand(6, 2, 8, dtype=torch.float16, device=device)
    one, other = (torch.zeros(6, 2, 4, 2, 8, dtype=torch.float16, device=device) for _ in range(2))
    compiled = torch.compile(fi_core.append_paged_kv_cache, fullgraph=True, backend="aot_eager")
    compiled(k, k, **t, paged_kv_cache=one)
    fi_core.append_paged_kv_cache(k, k, **t, paged_kv_cache=other)
    assert one.any() and torch.equal(one, other)


def good(device: str = "cpu") -> dict[str, Any]:
    k = torch.ones(6, 2, 8, dtype=torch.float16, device=device)
    return {
        "append_key": k,
        "append_value": k,
        "paged_kv_cache": torch.zeros(6, 2, 4, 2, 8, dtype=torch.float16),
        **table(device),
    }


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_layout": "NDH"}, KeyError, "kv_layout: allowed are NHD, HND; got 'NDH'"),
        (
            {"kv_layout": "HND"},
            ValueError,
            r"paged_kv_cache must have shape .*, num_heads, page_size, .* got .6, 2, 4, 2, 8",
        ),
        ({"paged_kv_cache": [torch.zeros(6, 4, 2, 8)] * 2}, KeyError, "tuple .* got list"),
        ({"paged_kv_cache": torch.zeros(6, 2, 8)}, ValueError, "must have 4 or 5 dimensions"),
        (
            {"paged_kv_cache": torch.zeros(6, 2, 4, 2, 8)},
            TypeError,
            "paged_kv_cache must have the dtype of append_key",
        ),
        (
            {"paged_kv_cache": torch.zeros(6, 2, 4, 2, 9).half()},
            ValueError,
            "paged_kv_cache must have shape .*head_dim = 8",
        ),
        ({"paged_kv_cache": torch.zeros(6, 2, 0, 2, 8).half()}, ValueError, "paged_kv_cache must have page_size > 0"),
        ({"paged_kv_cache": torch.zeros(6, 2, 4, 8, 2).half().mT}, ValueError, "paged_kv_cache must be contiguous in"),
        ({"append_key": torch.ones(6, 16).half()}, ValueError, "append_key must have shape .*; got .6, 16."),
        ({"append_value": torch.ones(5, 2, 8).half()}, ValueError, "append_value must have shape .* nnz = 6"),
        ({"append_value": torch.ones(6, 2, 8)}, TypeError, "append_value must have the dtype of append_key"),
        ({"append_key": torch.ones(6, 8, 2).half().mT}, ValueError, "append_key must be contiguous in its last"),
        ({"batch_indices": torch.zeros(6)}, TypeError, "batch_indices must be int32; got float32"),
        ({"batch_indices": torch.zeros(5, dtype=I32)}, ValueError, "batch_indices must have shape .* nnz = 6; got .5."),
        ({"positions": torch.zeros(12, dtype=I32)[::2]}, ValueError, "positions must be contiguous"),
        ({"positions": torch.zeros(6, dtype=torch.int16)}, TypeError, "positions must be int32; got int16"),
        (
            {"kv_indptr": torch.zeros(3, dtype=I32)},
            ValueError,
            r"kv_indptr must have shape \[batch_size \+ 1\]",
        ),
        ({"kv_indices": torch.zeros(3, 2, dtype=I32)}, ValueError, "kv_indices must have shape"),
        ({"kv_last_page_len": torch.zeros(3)}, TypeError, "kv_last_page_len must be int32; got float32"),
    ],
)
def test_append_rejects(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fi_core.append_paged_kv_cache(**(good() | change))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"append_ckv": torch.ones(6, 2, 8)}, ValueError, "append_ckv must have shape .nnz, head_dim_ckv.; got"),
        ({"kpe_cache": torch.zeros(6, 4, 9)}, ValueError, "kpe_cache must have shape .* head_dim_kpe = 4"),
        ({"kpe_cache": torch.zeros(6, 5, 4)}, ValueError, "kpe_cache must have shape .* page_size = 4"),
        ({"ckv_cache": torch.zeros(6, 4, 8).half()}, TypeError, "ckv_cache must have the dtype of append_ckv, float32"),
    ],
)
def test_append_mla_rejects(change: dict[str, Any], error: type[Exception], words: str) -> None:
    """The errors name the arguments of this function."""
    given = {"append_ckv": torch.ones(6, 8), "append_kpe": torch.ones(6, 4), "ckv_cache": torch.zeros(6, 4, 8)}
    with pytest.raises(error, match=words):
        fi_core.append_paged_mla_kv_cache(**(given | {"kpe_cache": torch.zeros(6, 4, 4)} | table("cpu") | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_indices": [5, 0, 6, 2]}, "kv_indices, .* must name pages of the cache, 0 to 5; got 6 at 2"),
        (
            {"kv_indices": [5, -1, 3, 2]},
            "kv_indices, .* must name pages of the cache, 0 to 5; got -1 at 1",
        ),
        ({"kv_indices": [5, 0, 3]}, "kv_indptr must end at 3 or less; got 4"),
        ({"kv_indptr": [0, 3, 2, 4]}, "kv_indptr must not decrease.* got 2 at 2"),
        ({"kv_indptr": [-1, 3, 3, 4]}, "kv_indptr must not decrease and must start at 0 or more; got -1 at 0"),
        (
            {"batch_indices": [0, 0, -1, 3, 0, 2]},
            "batch_indices must be below 3, .* got 3 at 3",
        ),
        (
            {"batch_indices": [0, 1, -1, 2, 0, 2]},
            "positions must be in the 0 pages .* of request 1; got 8 at 1",
        ),
        ({"positions": [0, 12, 0, 3, 4, 0]}, "positions must be in the 3 pages .* of request 0; got 12 at 1"),
        ({"positions": [0, 8, 0, 3, -4, 0]}, "positions must be in the 3 pages .* of request 0; got -4 at 4"),
    ],
)
@pytest.mark.usefixtures("checked")
def test_append_checks_contents(change: dict[str, list[int]], words: str, device: str) -> None:
    """Tables that would write out of range are rejected, before anything is written."""
    t = table(device)
    k = torch.ones(6, 2, 8, device=device)
    cache = torch.zeros(6, 2, 4, 2, 8, device=device)
    wrong = t | {name: ints(values, device) for name, values in change.items()}
    with pytest.raises(ValueError, match=words):
        fi_core.append_paged_kv_cache(k, k, **wrong, paged_kv_cache=cache)
    with pytest.raises(ValueError, match=words):
        fi_core.append_paged_mla_kv_cache(
            k[:, 0], k[:, 0], **wrong, ckv_cache=cache[:, 0, :, 0], kpe_cache=cache[:, 1, :, 0]
        )
    assert not cache.any()
    fi_core.append_paged_kv_cache(k, k, **t, paged_kv_cache=cache)
    assert cache.sum() == 2 * 5 * 16


# Tables


@pytest.mark.parametrize(
    ("indptr", "seq_lens", "nnz"),
    [
        ([0, 1, 3, 6, 10], [5, 5, 5, 5], 10),
        ([0, 1, 3, 6, 10], [5, 5, 5, 5], 16),
        ([0, 0, 2, 2, 2, 3, 3], [9, 2, 0, 7, 100, 4], 4),
        ([2, 4], [3], 6),
        ([0], [], 3),
        ([0, 4], [1 << 30], 4),
        ([0, 3], [3], 0),
        ([0, 3], [3], 2),
    ],
)
def test_batch_indices_positions(indptr: list[int], seq_lens: list[int], nnz: int, device: str) -> None:
    want_batch, want_positions = page.trace.positions_reference(ints(indptr, "cpu"), ints(seq_lens, "cpu"), nnz)
    for impl, dtype in itertools.product(impls("get_batch_indices_positions", device), (I32, torch.int64)):
        with using("get_batch_indices_positions", impl):
            given = ints(indptr, device, dtype), ints(seq_lens, device, dtype)
            batch, positions = fi_core.get_batch_indices_positions(*given, nnz)
            assert batch.dtype == positions.dtype == I32
            assert batch.tolist() == want_batch.tolist()
            assert positions.tolist() == want_positions.tolist()
            buffers = guarded((nnz,), I32, device), guarded((nnz,), I32, device)
            returned = fi_core.get_batch_indices_positions(*given, nnz, *buffers)
            assert returned[0] is buffers[0] and returned[1] is buffers[1]
            assert buffers[0].tolist() == want_batch.tolist()
            untouched = torch.where(want_batch < 0, 0x55, want_positions)
            assert buffers[1].tolist() == untouched.tolist()
            for buffer in buffers:
                assert_guards(buffer)


def test_batch_indices_positions_of_many(device: str) -> None:
    """Random requests, a third of them empty, long enough for several CPU threads and CTAs."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 300, (999,), generator=generator) * (torch.randint(0, 3, (999,), generator=generator) > 0)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    seq_lens = counts + torch.randint(0, 50, (999,), generator=generator)
    nnz = int(indptr[-1]) + 77
    want = page.trace.positions_reference(indptr, seq_lens, nnz)
    got = fi_core.get_batch_indices_positions(indptr.to(device), seq_lens.to(device), nnz)
    assert all(torch.equal(g.cpu().long(), w) for g, w in zip(got, want))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"nnz": -1}, ValueError, r"nnz: must be 0 to 2\^31 - 1; got -1"),
        (
            {"append_indptr": torch.zeros(5, dtype=I32)},
            ValueError,
            r"append_indptr must have shape \[batch_size \+ 1\].* got",
        ),
        ({"seq_lens": torch.zeros(2)}, TypeError, "seq_lens must be int32; got float32"),
        ({"batch_indices": torch.zeros(5, dtype=I32)}, ValueError, "batch_indices: shape must be"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, ValueError, "positions: dtype must be torch.int32"),
    ],
)
def test_batch_indices_positions_rejects(change: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"append_indptr": torch.zeros(3, dtype=I32), "seq_lens": torch.zeros(2, dtype=I32), "nnz": 4}
    with pytest.raises(error, match=words):
        fi_core.get_batch_indices_positions(**(given | change))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.uint32])
def test_seq_lens_of_other_integers(dtype: torch.dtype, device: str) -> None:
    indptr, last = ints([0, 3, 3, 4], device, torch.int64), ints([2, 0, 1], device, dtype)
    for offsets in (indptr, indptr.to(dtype)):
        got = fi_core.get_seq_lens(offsets, last, 16)
        assert got.dtype == dtype and got.tolist() == [34, 0, 1]


@pytest.mark.parametrize("dtype", [I32, torch.int64])
def test_seq_lens(dtype: torch.dtype, device: str) -> None:
    for impl in impls("get_seq_lens", device):
        with using("get_seq_lens", impl):
            indptr, last = ints([0, 3, 3, 4, 9], device, dtype), ints([16, 0, 1, 7], device, dtype)
            for page_size, want in ((16, [48, 0, 1, 71]), (1, [18, 0, 1, 11])):
                got = fi_core.get_seq_lens(indptr, last, page_size)
                assert got.dtype == dtype and got.device == last.device
                assert got.tolist() == want
            assert fi_core.get_seq_lens(indptr[:1], last[:0], 16).tolist() == []


@pytest.mark.parametrize(
    ("indptr", "last", "page_size", "error", "words"),
    [
        (ints([0, 1, 2], "cpu"), ints([1], "cpu"), 4, ValueError, "kv_indptr must have shape"),
        (torch.zeros(2), ints([1], "cpu"), 4, TypeError, "kv_indptr must have the dtype of kv_last"),
        (torch.zeros(2), torch.zeros(1), 4, TypeError, "kv_last_page_len must be int32 or int64; got float32"),
        (ints([0, 1], "cpu"), ints([1], "cpu"), 0, ValueError, "page_size must be in 1..2.31 - 1; got 0"),
    ],
)
def test_seq_lens_rejects(indptr: Any, last: Any, page_size: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fi_core.get_seq_lens(indptr, last, page_size)


def test_append_is_traced_by_layout() -> None:
    """Fused and split caches give the same definition; its name contains the constants of the model."""
    one = good()
    k, v = one["paged_kv_cache"].unbind(1)
    names = set()
    for cache in (one["paged_kv_cache"], (k, v)):
        definition = fi_core.append_paged_kv_cache.fi_trace(**(one | {"paged_kv_cache": cache}))
        names.add(definition["name"])
        assert definition["inputs"]["k_cache"] == {
            "shape": ["num_pages", "page_size", "num_kv_heads", "head_dim"],
            "dtype": "float16",
        }
    assert names == {"append_paged_kv_cache_kv2_d8_ps4"}
    swapped = fi_core.append_paged_kv_cache.fi_trace(
        **(one | {"paged_kv_cache": (k.transpose(1, 2), v.transpose(1, 2))}), kv_layout="HND"
    )
    assert swapped["name"] in names and "kv_layout:HND" in swapped["tags"]
    with pytest.raises(ValueError, match="no trace template covers"):
        fi_core.append_paged_kv_cache.fi_trace(**(one | {"paged_kv_cache": one["paged_kv_cache"][:, :, 0]}))
