"""BatchDecodeWithPagedKVCacheWrapper against fp64, every implementation: lengths, heads, pages, layouts, types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import fi_core
from families import cudnn_frontend
from families.engine import engine
from families.harness import TOLERANCE, assert_close, assert_guards, guarded, rand
from families.paged import FORMS, Paged, paged
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper as Wrapper
from fi_core.runtime.errors import UnsupportedError

HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LSE = (1e-4, 1e-4)
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 129, 300)
GROUPS = [(1, 1), (4, 2), (4, 1), (5, 1), (14, 2), (8, 1), (16, 1), (34, 2)]


def workspace(device: str, megabytes: int = 16) -> torch.Tensor:
    """A workspace of NaN: its content must not matter."""
    return torch.full((megabytes << 18,), float("nan"), device=device)


def backends(device: str) -> list[str]:
    return ["auto", *(("fa2", "fa2_tc", "fa3") if device == "cuda" else ())]


def wrappers(p: Paged, more: Sequence[str] = (), **options: Any) -> Iterator[Wrapper]:
    """Plans and runs the batch by each backend that supports it, and each of `more`; `auto` supports every batch."""
    options = p.dtypes | options
    if p.q_len > 1:
        options["q_len_per_req"] = p.q_len
    for backend in (*backends(p.q.device.type), *more):
        wrapper = Wrapper(workspace(str(p.q.device)), p.kv_layout, use_tensor_cores=p.q_len > 1, backend=backend)
        try:
            wrapper.plan(*p.plan_arguments(), **options)
        except UnsupportedError:
            if backend == "auto":
                raise
            continue
        yield wrapper


def _check_cudnn(w: Wrapper, q: torch.Tensor, cache: Any, want: torch.Tensor, want_lse: torch.Tensor) -> None:
    """test_shapes by cuDNN, where it supports the shapes; test_cudnn.py has the shapes that it must support."""
    try:
        out, lse = w.run(q, cache, return_lse=True)
    except UnsupportedError:
        return
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=(1e-3, 1e-3))


def check(p: Paged, *, tolerance: tuple[float, float] | None = None, **options: Any) -> None:
    want, want_lse = p.expected(**options)
    for wrapper in wrappers(p, cudnn_frontend.backends(p.q.device.type), **options):
        if wrapper.resolved_backend == "cudnn":
            _check_cudnn(wrapper, p.q, cudnn_frontend.finite(p.cache), want, want_lse)
            continue
        out, lse = wrapper.run(p.q, p.cache, return_lse=True)
        assert out.dtype == p.q.dtype and lse.dtype == torch.float32
        assert_close(out, want, tolerance=tolerance or TOLERANCE[out.dtype])
        assert_close(lse, want_lse, tolerance=LSE)
        assert torch.equal(wrapper.run(p.q, p.cache), out)


@pytest.mark.parametrize("page_size", [1, 5, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("heads", GROUPS)
def test_groups_and_pages(heads: tuple[int, int], page_size: int, device: str) -> None:
    check(paged(LENGTHS, heads=heads, page_size=page_size, device=device))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256, 72, 512])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_head_dims(dim: int, dtype: torch.dtype, device: str) -> None:
    check(paged([0, 1, 77, 200], dim=dim, dtype=dtype, heads=(6, 2), device=device))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_layouts_and_forms(form: str, kv_layout: str, page_size: int, device: str) -> None:
    check(paged([40, 0, 129, 3], form=form, kv_layout=kv_layout, page_size=page_size, dim=128, device=device))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["tuple", "fused"])
def test_pages_of_one_token_need_no_page_axis(form: str, kv_layout: str, device: str) -> None:
    p = paged([9, 30], page_size=1, kv_layout=kv_layout, form=form, device=device)
    axis = -3 if kv_layout == "NHD" else -2
    short = p.cache.squeeze(axis) if isinstance(p.cache, torch.Tensor) else tuple(x.squeeze(axis) for x in p.cache)
    (wrapper,) = list(wrappers(p))[:1]
    assert torch.equal(wrapper.run(p.q, short), wrapper.run(p.q, p.cache))  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[4096], [4095, 1, 0, 4097], [1] * 70, [0, 0, 0], [0], [1000, 3] * 9], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_ragged_batches(lengths: Sequence[int], page_size: int, device: str) -> None:
    check(paged(lengths, page_size=page_size, heads=(4, 1), dtype=torch.bfloat16, device=device))


@pytest.mark.gpu
def test_long_and_many() -> None:
    check(paged([32769, 131072, 0, 1], heads=(8, 2), dim=128, dtype=torch.bfloat16, device="cuda"))
    check(paged([17] * 4096, heads=(2, 1), device="cuda"))


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_fp8_cache(dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, device: str) -> None:
    p = paged([0, 150, 64, 7], dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, dim=128, device=device)
    check(p)
    want, _ = p.expected(k_scale=0.7, v_scale=1.3)
    for wrapper in wrappers(p):
        assert_close(wrapper.run(p.q, p.cache, k_scale=0.7, v_scale=1.3), want)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_query(dtype: torch.dtype, device: str) -> None:
    """Output of another type, and scales per head by position."""
    p = paged([70, 130], dtype=dtype, heads=(4, 2), device=device)
    check(p)
    scales = [rand(n, dtype=torch.float32, device=device, seed=n).abs() + 0.5 for n in (4, 2, 2)]
    want, _ = p.expected(scale_q=scales[0], scale_k=scales[1], scale_v=scales[2])
    for wrapper in wrappers(p, o_data_type=torch.bfloat16):
        out = wrapper.run(p.q, p.cache, *scales)
        assert out.dtype == torch.bfloat16
        assert_close(out, want)
        assert_close(wrapper.run(p.q, p.cache, 0.5, 2.0, 3.0), p.expected(v_scale=3.0)[0])


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.bfloat16, *FP8])
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fp8_options(dim: int, dtype: torch.dtype, o_dtype: torch.dtype, device: str) -> None:
    """Window, soft cap and sinks, with scales that lie on the device, for every type of output."""
    p = paged([70, 1, 130], dtype=dtype, heads=(4, 2), dim=dim, device=device)
    sinks = rand(4, dtype=torch.float32, device=device, scale=3.0)
    scales = {name: torch.tensor([x], device=device) for name, x in (("k_scale", 0.7), ("v_scale", 1.3))}
    plan: dict[str, Any] = {"window_left": 40, "logits_soft_cap": 5.0}
    want, _ = p.expected(sinks=sinks, k_scale=0.7, v_scale=1.3, **plan)
    for wrapper in wrappers(p, o_data_type=o_dtype, **plan):
        out = wrapper.run(p.q, p.cache, sinks=sinks, **scales)
        assert out.dtype == o_dtype
        assert_close(out, want)


def test_values_may_be_narrower_than_keys(device: str) -> None:
    p = paged([70, 0, 300], dim=128, device=device)
    assert isinstance(p.cache, tuple)
    want, want_lse = p.expected()
    for wrapper in wrappers(p):
        if engine(wrapper).backend not in ("auto", "fa2"):
            continue  # kernels that are compiled for one head dim
        out, lse = wrapper.run(p.q, (p.cache[0], p.cache[1][..., :64]), return_lse=True)
        assert_close(out, want[..., :64])
        assert_close(lse, want_lse, tolerance=LSE)


@pytest.mark.parametrize("q_len", [2, 5, 9])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
def test_several_query_tokens_are_causal(heads: tuple[int, int], q_len: int, device: str) -> None:
    lengths = [n for n in (q_len, 16, 64, 65, 333) if n >= q_len]
    check(paged(lengths, heads=heads, q_len=q_len, device=device))
    check(paged(lengths, heads=heads, q_len=q_len, device=device), window_left=20)


def test_outputs_are_written_completely_and_nothing_else(device: str) -> None:
    p = paged([0, 100, 300], heads=(6, 2), device=device)
    want, want_lse = p.expected()
    for wrapper in wrappers(p):
        out, lse = guarded((3, 6, 64), p.q.dtype, device), guarded((3, 6), torch.float32, device)
        given = wrapper.run(p.q, p.cache, out=out, lse=lse, return_lse=True)
        assert given[0] is out and given[1] is lse
        assert wrapper.run(p.q, p.cache, out=out) is out
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
        assert_guards(out)
        assert_guards(lse)
        wide = guarded((3, 6, 64), p.q.dtype, device, row_padding=8)
        wrapper.run(p.q, p.cache, out=wide)
        assert torch.equal(wide, out)


def test_a_request_without_pages_is_empty_whatever_its_last_page_says(device: str) -> None:
    p = paged([0, 20], device=device)
    p.last_page_len[0] = 16
    for wrapper in wrappers(p):
        out, lse = wrapper.run(p.q, p.cache, return_lse=True)
        assert not out[0].any() and (lse[0] == -torch.inf).all()


def test_seq_lens_replace_last_page_len(device: str) -> None:
    p = paged([50, 200, 17], device=device)
    for dtype in (torch.int32, torch.int64):
        shorter = torch.tensor([33, 200, 1], dtype=dtype)
        cut = Paged(**{**vars(p), "k": [k[:n] for k, n in zip(p.k, shorter.tolist())],
                       "v": [v[:n] for v, n in zip(p.v, shorter.tolist())]})  # fmt: skip
        want, _ = cut.expected()
        for where in ("cpu", device):
            for wrapper in wrappers(p, seq_lens=shorter.to(where)):
                assert_close(wrapper.run(p.q, p.cache), want)
                assert engine(wrapper).max_kv_len == 200


def test_more_indices_than_are_used(device: str) -> None:
    p = paged([40, 9], device=device)
    more = torch.cat([p.indices, torch.full((50,), 1 << 30, dtype=torch.int32, device=device)])
    want, _ = p.expected()
    for wrapper in wrappers(Paged(**{**vars(p), "indices": more})):
        assert_close(wrapper.run(p.q, p.cache), want)


@pytest.mark.parametrize("tables", ["cpu", "device"])
def test_tables_on_the_host_or_on_the_device(tables: str, device: str) -> None:
    p = paged([40, 0, 100], device=device)
    place = "cpu" if tables == "cpu" else device
    moved = {name: getattr(p, name).to(place) for name in ("indptr", "indices", "last_page_len")}
    want, _ = p.expected()
    for wrapper in wrappers(Paged(**{**vars(p), **moved})):
        assert_close(wrapper.run(p.q, p.cache), want)
        if place == device:
            assert engine(wrapper).paged_kv_indices_buf is moved["indices"]


def test_bad_heads_spoil_themselves_only(device: str) -> None:
    p = paged([100, 30], heads=(4, 2), device=device)
    p.q[0, 1, 7] = float("nan")
    want, _ = p.expected()
    for wrapper in wrappers(p):
        assert_close(wrapper.run(p.q, p.cache), want)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """A cache of 5 GiB with used pages at both ends."""
    pages = 5 * (1 << 30) // (2 * 16 * 8 * 128 * 2)
    pool = torch.full((pages, 2, 16, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    small = paged([300, 64], heads=(8, 8), dim=128, dtype=torch.bfloat16, form="fused", device="cuda")
    assert isinstance(small.cache, torch.Tensor)
    where = torch.cat([torch.arange(10), torch.arange(pages - len(small.cache) + 10, pages)])[
        small.indices.cpu().long()
    ]
    pool[where.cuda()] = small.cache[small.indices.long()]
    far = Paged(**{**vars(small), "cache": pool, "indices": where.int().cuda()})
    check(far)


def test_single_decode_agrees(device: str) -> None:
    p = paged([333], heads=(8, 2), dtype=torch.float32, device=device)
    one = fi_core.single_decode_with_kv_cache(p.q[0], p.k[0], p.v[0])
    for wrapper in wrappers(p):
        assert_close(wrapper.run(p.q, p.cache)[0], one.double())
