"""Every row of the table of layouts: the numbers of the honoured layout, or the words of the refusal."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fi_core
from families import (
    layouts_of_caches,
    moe_reference,
    test_mla,
    test_moe_interleaved,
    test_moe_trtllm,
)
from families.harness import rand
from families.paged import paged
from families.test_gemm_block_scaled import mxfp8, packed, scales, swizzled, wide
from fi_core import SfLayout, fused_moe
from fi_core.fused_moe import RoutingMethodType, WeightLayout
from fi_core.mla import trtllm_batch_decode_with_kv_cache_mla
from fi_core.runtime.errors import FiError

spec = importlib.util.spec_from_file_location("layouts", Path(__file__).parents[2] / "docs" / "layouts.py")
assert spec and spec.loader
layouts: Any = importlib.util.module_from_spec(spec)
sys.modules["layouts"] = layouts
spec.loader.exec_module(layouts)

Case = Callable[[str, str], tuple[torch.Tensor, torch.Tensor]]  # (layout, backend) -> (result, reference)
CASES: dict[str, Case] = dict(layouts_of_caches.CASES)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
M, N, K = 20, 256, 128
moe: Any = fused_moe


def case(name: str) -> Callable[[Case], Case]:
    def register(found: Case) -> Case:
        CASES[name] = found
        return found

    return register


def tiled_by_8(codes: torch.Tensor) -> torch.Tensor:
    """Of 8 columns or fewer: (r, s) is at r // 8 * 8 C + s // 4 * 32 + r % 8 * 4 + s % 4 with C columns."""
    rows, columns = -(-codes.shape[0] // 8) * 8, -(-codes.shape[1] // 4) * 4
    padded = torch.zeros(rows, columns, dtype=torch.uint8)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    return padded.view(rows // 8, 8, columns // 4, 4).transpose(1, 2).reshape(rows, columns)


def named(backend: str) -> dict[str, str]:
    return {"backend": backend} if backend else {}


def dense(function: Any, batch: tuple[int, ...], dtype: torch.dtype) -> Case:
    def run(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        a = rand(*batch, M, K, dtype=torch.float32, device="cpu").to(dtype)
        b = rand(*batch, N, K, dtype=torch.float32, device="cpu", seed=1).to(dtype)
        given = b.mT if "view" in layout else b.view(torch.uint8).mT.contiguous().view(dtype) if dtype is E4M3 else (
            b.mT.contiguous())  # fmt: skip
        more = (torch.ones(1), torch.ones(1), torch.float32) if dtype is E4M3 else ()
        options: dict[str, Any] = {} if more else {"out_dtype": torch.float32}
        return function(a, given, *more, **options, **named(backend)), a.double() @ b.double().mT

    return run


CASES["mm_bf16"] = dense(fi_core.mm_bf16, (), BF16)
CASES["bmm_bf16"] = dense(fi_core.bmm_bf16, (3,), BF16)
CASES["bmm_fp8"] = dense(fi_core.bmm_fp8, (3,), E4M3)


@case("cute_dsl_fused_moe_bf16")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    given, weights = test_moe_interleaved.given("cpu")
    want = test_moe_interleaved.reference(given, weights, test_moe_interleaved.swiglu(1.0, 0.0, 1e30))
    return fi_core.cute_dsl_fused_moe_bf16(**given), want


@case("mm_fp8")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (rand(rows, K, dtype=torch.float32, device="cpu", seed=rows).to(E4M3) for rows in (M, N))
    given = fi_core.prepare_low_latency_gemm_weights(b) if "prepare" in layout else b
    return fi_core.mm_fp8(a, given, out_dtype=torch.float32, **named(backend)), a.double() @ b.double().T


def shuffled(x: torch.Tensor) -> torch.Tensor:
    return fi_core.shuffle_matrix_a(x.view(torch.uint8), 128).view(x.dtype)


@case("mm_fp4")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    trtllm, m = backend == "trtllm", 128 if "tiles have too" in layout else M
    n = 200 if "no multiple" in layout or "no tiles" in layout else N
    (a, sa), (b, sb) = ((packed(rows, K, "cpu", rows), scales(rows, K // 16, "cpu", 0x30, 0x40)) for rows in (m, n))
    want = wide(a, sa, 16) @ wide(b, sb, 16).T
    left, right = swizzled(sa), swizzled(sb).t()
    if trtllm and n % 128 == 0:
        b, right = shuffled(b), fi_core.shuffle_matrix_sf_a(sb, 128).view(n, -1).t()
    if "8x4" in layout:
        left = tiled_by_8(sa)
    elif "no tiles" in layout:
        left, right = sa, sb.t()
    elif "not transposed" in layout:
        right = swizzled(sb)
    options: dict[str, Any] = {"use_8x4_sf_layout": "8x4" in layout, "out_dtype": torch.float32}
    return fi_core.mm_fp4(a, b.t(), left, right, **options, **named(backend)), want


@case("mm_mxfp8")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    m, n = 128 if "and tiles" in layout else M, 200 if "no tiles" in layout else N
    (a, sa, left), (b, sb, right) = mxfp8(m, K, "cpu"), mxfp8(n, K, "cpu", 1)
    of_a, of_b = swizzled(sa).view(-1), swizzled(sb).view(-1)
    if backend == "trtllm":
        b, of_b = shuffled(b), fi_core.shuffle_matrix_sf_a(sb, 128, 32).view(-1)
    if "8x4" in layout:
        of_a = tiled_by_8(sa).view(-1)
    elif "no tiles" in layout:
        of_a, of_b = sa, sb.t()
    elif "a matrix" in layout:
        of_a = sa
    elif "flat rows" in layout:
        of_a = sa.view(-1)
    options: dict[str, Any] = {"use_8x4_sf_layout": "8x4" in layout, "out_dtype": torch.float32}
    return fi_core.mm_mxfp8(a, b.t(), of_a, of_b, **options, **named(backend)), left @ right.T


@case("bmm_mxfp8")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    m = 72 if "fits both" in layout else M
    (a, sa, left), (b, sb, right) = mxfp8(2 * m, K, "cpu"), mxfp8(2 * 128, K, "cpu", 1)
    of_a, of_b = swizzled(sa).view(-1), swizzled(sb).view(-1)
    if "tiles of each" in layout:
        of_a, of_b = (torch.stack([swizzled(own) for own in x.view(2, -1, K // 32)]) for x in (sa, sb))
    elif "rows of a shape" in layout:
        of_a = sa.view(2, m, -1)
    got = fi_core.bmm_mxfp8(a.view(2, m, K), b.view(2, 128, K).mT, of_a, of_b, torch.float32, **named(backend))
    return got, left.view(2, m, K) @ right.view(2, 128, K).mT


def grouped(function: Any, block: int) -> Case:
    def run(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        m, n = (128, 128) if "too" in layout else (M, 40)
        if block == 32:
            (a, sa, left), (b, sb, right) = mxfp8(m, K, "cpu"), mxfp8(2 * n, K, "cpu", 1)
        else:
            (a, sa), (b, sb) = ((packed(r, K, "cpu", r), scales(r, K // 16, "cpu", 0x30, 0x40)) for r in (m, 2 * n))
            left, right = wide(a, sa, 16), wide(b, sb, 16)
        of_b = sb.view(2, n, -1)
        options: dict[str, Any] = {"sf_layout": SfLayout.layout_linear} if "with sf_layout" in layout else {}
        given = (sa, of_b) if "rows" in layout.partition(",")[0] else (
            swizzled(sa), torch.stack([swizzled(own.contiguous()) for own in of_b]))  # fmt: skip
        ends = torch.tensor([0, 7, m], dtype=torch.int32)
        got = function(a, b.view(2, n, -1), *given, ends, out_dtype=torch.float32, **options, **named(backend))
        right = right.view(2, n, K)
        return got, torch.cat((left[:7] @ right[0].T, left[7:] @ right[1].T))

    return run


CASES["grouped_mm_fp4"] = grouped(fi_core.grouped_mm_fp4, 16)
CASES["grouped_mm_mxfp8"] = grouped(fi_core.grouped_mm_mxfp8, 32)


@case("mm_bf16_fp4")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    n = 40 if "no tiles" in layout else N
    a, b, codes = rand(M, K, dtype=BF16, device="cpu"), packed(n, K, "cpu"), scales(n, K // 16, "cpu", 0x30, 0x40)
    given = codes if "no tiles" in layout else swizzled(codes)
    return fi_core.mm_bf16_fp4(a, b, given, out_dtype=torch.float32, **named(backend)), a.double() @ wide(
        b, codes, 16
    ).T


def groupwise(groups: int) -> Case:
    def run(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        a = rand(M, 256, dtype=torch.float32, device="cpu").to(E4M3)
        b = rand(*(groups,) * (groups > 0), 384, 256, dtype=torch.float32, device="cpu", seed=1).to(E4M3)
        sa, sb = rand(M, 2, dtype=torch.float32, device="cpu").abs(), torch.rand(*b.shape[:-2], 3, 2) + 0.5
        left = a.double() * sa.double().repeat_interleave(128, 1)
        right = b.double() * sb.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
        mode = None if "no scale" in layout else "K" if '"K"' in layout else "MN"
        given = (sa, sb) if mode == "K" else (sa.mT.contiguous(), sb.mT.contiguous())
        options: dict[str, Any] = {"scale_major_mode": mode, "out_dtype": torch.float32, **named(backend)}
        if not groups:
            return fi_core.gemm.gemm_fp8_nt_groupwise(a, b, *given, **options), left @ right.T
        ends = torch.tensor([0, 8, M], dtype=torch.int32)
        got = fi_core.gemm.group_gemm_fp8_nt_groupwise(a, b, *given, ends, **options)
        return got, torch.cat((left[:8] @ right[0].T, left[8:] @ right[1].T))

    return run


CASES["gemm.gemm_fp8_nt_groupwise"] = groupwise(0)
CASES["gemm.group_gemm_fp8_nt_groupwise"] = groupwise(2)


@case("SegmentGEMMWrapper")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = rand(M, K, dtype=BF16, device="cpu"), rand(2, K, K, dtype=BF16, device="cpu", seed=1)
    columns = "not" not in layout
    wrapper = fi_core.SegmentGEMMWrapper(torch.empty(1 << 20, dtype=torch.int8))
    got = wrapper.run(x, w if columns else w.mT.contiguous(), 2, columns, seg_indptr=torch.tensor([0, 9, M]))
    return got, torch.cat((x[:9].double() @ w[0].double().T, x[9:].double() @ w[1].double().T))


def quantizer(function: Any, block: int, argument: str) -> Case:
    """Bytes of scales are those of the linear layout, at the places of the layout."""

    def run(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = rand(40 if "shuffle" not in layout else N, K, dtype=BF16, device="cpu")
        one = () if block == 32 else (torch.tensor([8.0]),)
        call = functools.partial(function, x, *one, backend=backend)
        q, linear = call(**{argument: SfLayout.layout_linear})
        linear = linear.view(torch.uint8).view(len(x), -1)
        if "do_shuffle" in layout:
            got = call(do_shuffle=True)
            want = shuffled(q), fi_core.shuffle_matrix_sf_a(linear, 128)
        else:
            kind = SfLayout[layout.partition(": ")[2]]
            got = call(**{argument: kind})
            places = {
                SfLayout.layout_linear: lambda x: x,
                SfLayout.layout_8x4: tiled_by_8,
                SfLayout.layout_128x4: swizzled,
            }
            want = q, places[kind](linear)
        return tuple(torch.cat([x.view(torch.uint8).flatten() for x in pair]) for pair in (got, want))  # type: ignore[return-value]

    return run


CASES["nvfp4_quantize"] = quantizer(fi_core.nvfp4_quantize, 16, "sfLayout")
CASES["mxfp4_quantize"] = quantizer(fi_core.mxfp4_quantize, 32, "sfLayout")
CASES["mxfp8_quantize"] = quantizer(fi_core.mxfp8_quantize, 32, "sf_swizzle_layout")


@case("fp4_quantize")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, one = rand(40, K, dtype=BF16, device="cpu"), torch.tensor([8.0])
    call = functools.partial(fi_core.fp4_quantize, backend=backend)
    q, linear = call(x, one, is_sf_swizzled_layout=False)
    linear = linear.view(torch.uint8)
    if "view" in layout:
        got, want = tuple(y.t() for y in call(x.t(), one)), (q, swizzled(linear))
    elif "neither" in layout:
        got, want = call(x, one, is_sf_swizzled_layout=False), (q, linear)
    else:
        tiles = "8x4" in layout
        got, want = call(x, one, is_sf_8x4_layout=tiles), (q, tiled_by_8(linear) if tiles else swizzled(linear))
    return tuple(torch.cat([x.view(torch.uint8).flatten() for x in pair]) for pair in (got, want))  # type: ignore[return-value]


def experts_of(function: str) -> Case:
    def run(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        t = test_moe_trtllm
        logits, _, x, w1, w2 = t.inputs("cpu")
        fp8, method = "fp8" in function, RoutingMethodType.Renormalize
        (q1, s1, d1), (q2, s2, d2) = ((moe_reference.block_quantized(w) if fp8 else (w, w, w)) for w in (w1, w2))
        is_shuffled, kind = "rows shuffled" in layout, WeightLayout.MajorK
        if is_shuffled:
            q1, q2 = (t.shuffled(q1, False, 64), t.shuffled(q2, False, 64)) if fp8 else (
                t.shuffled(q1, True), t.shuffled(q2, False))  # fmt: skip
        if "BlockMajorK" in layout:
            kind, block = WeightLayout.BlockMajorK, 128 if fp8 else 64
            q1, q2 = (t.each(lambda w: fused_moe.convert_to_block_layout(w, block), q) for q in (q1, q2))
        if "MajorMn" in layout:
            kind = WeightLayout.MajorMn
        ids, weights = moe_reference.route(logits, method, t.K)
        options: dict[str, Any] = {"use_shuffled_weight": is_shuffled, "weight_layout": kind}
        if fp8:
            sx = x.float().view(t.TOKENS, -1, 128).abs().amax(-1) / 448
            x = (x.float().view(t.TOKENS, -1, 128) / sx[..., None]).view(x.shape).to(E4M3)
            dx = (x.double().view(t.TOKENS, -1, 128) * sx[..., None].double()).view(x.shape)
            sx = sx if "tokens" in layout else sx.t().contiguous()
            got = moe.trtllm_fp8_block_scale_moe(
                logits, None, x, sx, q1, s1, q2, s2, *t.sizes(), None, method, **options
            )
        else:
            dx, got = x, moe.trtllm_bf16_moe(logits, None, x, q1, q2, *t.sizes(), None, method, **options)
        return got, moe_reference.experts(dx, ids, weights, d1, d2)

    return run


CASES["fused_moe.trtllm_bf16_moe"] = experts_of("bf16")
CASES["fused_moe.trtllm_fp8_block_scale_moe"] = experts_of("fp8")


@case("append_paged_kv_cache")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    form = {"a tuple": "tuple", "one tensor": "fused", "one strided tensor": "strided"}
    if "kv_indices" in layout:
        return layouts_of_caches.append_pages(layout, backend)
    kind, kv_layout = layout.removeprefix("cache: ").split(", ")
    b = paged((5, 17), kv_layout=kv_layout, form=form[kind])
    rows = [torch.cat(x) + 1 for x in (b.k, b.v)]
    request = torch.tensor([0] * 5 + [1] * 17, dtype=torch.int32)
    position = torch.tensor([*range(5), *range(17)], dtype=torch.int32)
    fi_core.append_paged_kv_cache(
        *rows, request, position, b.cache, b.indices, b.indptr, b.last_page_len, kv_layout=kv_layout
    )
    pages = b.indices.long()[b.indptr.long()[request.long()] + position.long() // 16]
    pools = b.cache if isinstance(b.cache, tuple) else b.cache.unbind(1)
    own = [(p if kv_layout == "NHD" else p.transpose(1, 2))[pages, position.long() % 16] for p in pools]
    return torch.stack(own), torch.stack(rows)


@case("BatchDecodeWithPagedKVCacheWrapper")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    if "kv_indices" in layout or "kv_cache_sf" in layout:
        own = layouts_of_caches.decode_scaled if "kv_cache_sf" in layout else layouts_of_caches.decode_pages
        return own(layout, backend)
    kv_layout = "HND" if "HND" in layout else "NHD"
    b = paged((5, 17), kv_layout=kv_layout, form="fused" if "one tensor" in layout else "tuple")
    room = torch.empty(8 << 20, dtype=torch.uint8)
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(
        room, "DHN" if "another" in layout else kv_layout, **named(backend)
    )
    wrapper.plan(*b.plan_arguments(), **b.dtypes)
    group = b.q.shape[1] // b.k[0].shape[1]
    want = []
    for q, k, v in zip(b.q.double(), b.k, b.v):
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
        want.append(torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", q, k) / 8).softmax(-1), v))
    return wrapper.run(b.q, b.cache), torch.stack(want)


@case("mla.trtllm_batch_decode_with_kv_cache_mla")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    b = test_mla.batch((65, 3), 1, page_size=32)
    cache = b.cache.unsqueeze(1) if "1, page" in layout else b.cache
    table = test_mla.block_tables(b)
    if "wider" in layout:
        table = torch.cat((table, torch.full((2, 4), -1, dtype=table.dtype)), 1)
    table = table.long() if "int64" in layout else torch.stack((table, table), 1) if "2, pages" in layout else table
    out = trtllm_batch_decode_with_kv_cache_mla(
        b.q.view(2, 1, 16, 576), cache, test_mla.workspace("cpu"), 128, 512, 64, table, b.kv_len,
        65, bmm1_scale=test_mla.SCALE, **named(backend),
    )  # fmt: skip
    return out[:, 0], b.expected()[0]


@case("sampling_from_probs")
def _(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tensor([2, 0, 0, 1], dtype=torch.int64 if "int64" in layout else torch.int32)
    probs = layouts_of_caches.rows_of(layout, torch.eye(3)[[1, 2, 0]])
    return fi_core.sampling_from_probs(probs, rows), torch.tensor([0, 1, 1, 2])


def top_k(layout: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack((torch.arange(8.0), -torch.arange(8.0)))
    lengths, start = torch.tensor([4, 4], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    if layout == "row_starts":
        got = fi_core.top_k_ragged_transform(x, torch.tensor([10, 20], dtype=torch.int32), lengths, 2, row_starts=start)
        return got, torch.tensor([[12, 13], [20, 21]])
    table = torch.arange(16, dtype=torch.int32).view(2, 8) + 50
    options: dict[str, Any] = {}
    if "row_to_batch" in layout:
        options["row_to_batch"] = torch.tensor([1, 0], dtype=torch.int32)
        want = torch.tensor([[60, 61], [50, 51]])
    else:
        options["row_starts"] = start
        want = torch.tensor([[50 + 2, 50 + 3], [58, 59]])
        if "alone" not in layout:
            options["page_table_row_starts"] = torch.zeros(2, dtype=torch.int32)
    return fi_core.top_k_page_table_transform(x, table, lengths, 2, page_size=1 + ("alone" in layout), **options), want


CASES["top_k_page_table_transform"] = CASES["top_k_ragged_transform"] = top_k


@pytest.mark.parametrize(
    ("row", "backend"),
    [
        pytest.param(row, backend, id=f"{row.function}-{row.layout}-{backend}")
        for rows in layouts.TABLE.values()
        for row in rows
        for backend in layouts.backends(row)
    ],
)
def test_layout(row: Any, backend: str) -> None:
    if row.refusal:
        with pytest.raises((ValueError, KeyError, TypeError, FiError, NotImplementedError)) as found:
            CASES[row.function](row.layout, backend)
        assert row.refusal in str(found.value)
        return
    got, want = CASES[row.function](row.layout, backend)
    assert got.shape == want.shape
    if not want.is_floating_point():
        assert torch.equal(got.long(), want.long())
        return
    limit = 6e-2 if "moe.trtllm_fp8" in row.function else 1e-2
    assert float((got.double() - want).norm()) <= limit * float(want.double().norm())


def test_every_backend_name_is_in_the_table() -> None:
    """Of each function that has some."""
    for rows in layouts.TABLE.values():
        for function in {row.function for row in rows}:
            query = getattr(fi_core, function, None)
            known = getattr(getattr(query, "is_backend_supported", None), "__self__", None)
            named_in_rows = {name for row in rows if row.function == function for name in layouts.backends(row)}
            assert known is None or set(known.backends) <= named_in_rows
