"""Cases of the table of layouts: caches with scales, pages, latent caches, rows of sampling, experts of few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fi_core
from families import moe_reference, nvfp4_cache, test_flash_mla, test_mla
from families import test_moe_trtllm as trtllm
from families.attention_reference import attention
from families.harness import rand
from families.paged import paged
from fi_core import SfLayout, fused_moe
from fi_core.flash_mla import flash_mla_with_kvcache
from fi_core.fused_moe import RoutingMethodType, reorder_rows_for_gated_act_gemm
from fi_core.mla import BatchMLAPagedAttentionWrapper

Pair = tuple[torch.Tensor, torch.Tensor]  # (result, reference)
BF16 = torch.bfloat16
moe: Any = fused_moe


def fp4_experts(layout: str, backend: str) -> Pair:
    t = trtllm
    logits, _, x, w1, w2 = t.inputs("cpu")
    if "flat" in layout:
        x, w1, w2 = x[:, :64].contiguous(), w1[:, :128, :64].contiguous(), w2[:, :64, :64].contiguous()
    mx, g = "MXFP4" in layout, 1.0 if "MXFP4" in layout else 700.0
    block = 32 if mx else 16
    (q1, s1, d1), (q2, s2, d2) = (
        moe_reference.mxfp4_quantized(w) if mx else moe_reference.nvfp4_quantized(w, g) for w in (w1, w2)
    )
    sx, qx, dx, gx, options = None, x, x.double(), 1.0, {}
    if "hidden_states_scale" in layout:
        if "/ 32" in layout:
            qx, sx, dx = moe_reference.mxfp8_quantized(x)
        else:
            gx = 300.0
            qx, sx, dx = moe_reference.nvfp4_quantized(x, gx)
        if "128x4" in layout:
            sx = fi_core.block_scale_interleave(sx.view(torch.uint8).contiguous())
        kind = layout.partition("hidden_states_scale_layout: ")[2]
        options = {"hidden_states_scale_layout": SfLayout[kind]} if kind.startswith("layout") else {}
    s1 = torch.stack([fi_core.shuffle_matrix_sf_a(reorder_rows_for_gated_act_gemm(s), 128, block) for s in s1])
    if "flat" not in layout:
        s2 = torch.stack([fi_core.shuffle_matrix_sf_a(s, 128, block) for s in s2])
    s1, s2 = (s.flatten() if "flat" in layout else s for s in (s1, s2))
    q1, q2 = t.shuffled(q1, True), q2 if "flat" in layout else t.shuffled(q2, False)
    if "k / b" in layout:
        q1, q2 = (w.view(*w.shape[:2], 2, -1).transpose(1, 2).contiguous() for w in (q1, q2))
    one, method = torch.ones(t.E), RoutingMethodType.Renormalize
    (out,) = moe.trtllm_fp4_block_scale_moe(
        logits, None, qx, sx, q1, s1, None, None, None, None, q2, s2, None, one / (g * gx), one / (g * gx), one / g,
        *t.sizes(), None, method, **options,
    )  # fmt: skip
    return out, moe_reference.experts(dx, *moe_reference.route(logits, method, t.K), d1, d2)


def tensor_experts(layout: str, backend: str) -> Pair:
    t = trtllm
    logits, _, x, w1, w2 = t.inputs("cpu")
    (q1, s1, d1), (q2, s2, d2) = (moe_reference.tensor_quantized(w) for w in (w1, w2))
    qx, sx, dx = (part[0] for part in moe_reference.tensor_quantized(x[None]))
    q1, q2 = t.shuffled(q1, True), t.shuffled(q2, False)
    if "BlockMajorK" in layout:
        q1, q2 = (t.each(lambda w: fused_moe.convert_to_block_layout(w, 128), q) for q in (q1, q2))
    gate, method = s1 * sx, RoutingMethodType.Renormalize
    out = moe.trtllm_fp8_per_tensor_scale_moe(
        logits, None, qx, q1, gate / 0.05, gate, q2, s2 * 0.05, *t.sizes(), None, False, method
    )
    return out, moe_reference.experts(dx, *moe_reference.route(logits, method, t.K), d1, d2)


def scaled_cache(layout: str) -> tuple[nvfp4_cache.Nvfp4, str, Any, Any]:
    """The batch, its kv_layout, the cache and its scales in the form of the layout."""
    kv_layout = "HND" if "HND" in layout else "NHD"
    b = nvfp4_cache.batch([5, 40], layout=kv_layout)
    both = [torch.stack(parts, 1) if "one tensor" in layout else parts for parts in (b.cache, b.scales)]
    return b, kv_layout, *both


def parts_of(x: Any) -> Any:
    return x if isinstance(x, tuple) else x.unbind(1)


def append_pages(layout: str, backend: str) -> Pair:
    """Rows of bf16 in pages that a table of another dtype or length names."""
    b = paged((5, 17))
    rows = [torch.cat(x) + 1 for x in (b.k, b.v)]
    request, position = fi_core.get_batch_indices_positions(
        torch.tensor([0, 5, 22], dtype=torch.int32), b.seq_lens(), 22
    )
    indices, indptr = tables(layout, b)
    fi_core.append_paged_kv_cache(*rows, request, position, b.cache, indices, indptr, b.last_page_len)
    own = b.indices.long()[b.indptr.long()[request.long()] + position.long() // 16]
    return torch.stack([x[own, position.long() % 16] for x in parts_of(b.cache)]), torch.stack(rows)


def tables(layout: str, b: Any) -> Pair:
    """The pages of requests and their offsets, as a layout has them."""
    if "int64" in layout:
        return b.indices.long(), b.indptr.long()
    more = torch.full((5,), 10**6, dtype=torch.int32)
    return torch.cat((b.indices, more)) if "longer" in layout else b.indices + 1000 * ("outside" in layout), b.indptr


def decode_pages(layout: str, backend: str) -> Pair:
    b = paged((5, 17))
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8 << 20, dtype=torch.uint8), backend=backend)
    indices, indptr = tables(layout, b)
    wrapper.plan(indptr, indices, b.last_page_len, *b.heads, b.q.shape[2], 16, **b.dtypes)
    rows = [attention(b.q[i : i + 1], k, v)[0] for i, (k, v) in enumerate(zip(b.k, b.v))]
    return wrapper.run(b.q, b.cache), torch.cat(rows)


def decode_scaled(layout: str, backend: str) -> Pair:
    b, kv_layout, cache, scales = scaled_cache(layout)
    room = torch.empty(8 << 20, dtype=torch.uint8)
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(room, kv_layout, backend=backend)
    wrapper.plan(b.indptr, b.indices, b.last_page_len, 8, 2, 128, 16, q_data_type=BF16, kv_data_type=torch.uint8)
    factors = {"k_scale": nvfp4_cache.K_SCALE, "v_scale": nvfp4_cache.V_SCALE}
    return wrapper.run(b.q, cache, kv_cache_sf=scales, **factors), b.expected()[0]


def append_scaled(layout: str, backend: str) -> Pair:
    """The bytes that quantising the rows gives, where their pages are."""
    b, kv_layout, cache, scales = scaled_cache(layout)
    rows = [torch.cat(x).to(BF16) for x in (b.k, b.v)]
    owner, position = fi_core.get_batch_indices_positions(b.offsets(b.lengths), b.seq_lens(), 45)
    slots = b.block_tables()[owner.long(), position.long() // 16].long() * 16 + position.long() % 16
    one = torch.ones(1)
    if "slot_mapping" in layout:
        kept = 40 if "shorter" in layout else 45
        given = torch.cat((slots, torch.tensor([3]))) if "longer" in layout else slots[:kept]
        fi_core.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*rows, given, cache, scales, one, one, kv_layout)
        rows, slots = [x[:kept] for x in rows], slots[:kept]
    else:
        fi_core.nvfp4_quantize_append_paged_kv_cache(
            *rows, owner, position, cache, scales, b.indices, b.indptr, b.last_page_len, one, one, kv_layout
        )
    got, want = [], []
    for values, sf, x in zip(parts_of(cache), parts_of(scales), rows):
        for pool, part in zip((values, sf), nvfp4_cache.quantized(x)):
            own = pool if kv_layout == "NHD" else pool.transpose(1, 2)
            got.append(own[slots // 16, slots % 16].flatten())
            want.append(part.flatten())
    return torch.cat(got), torch.cat(want)


def dequantize_scaled(layout: str, backend: str) -> Pair:
    b, kv_layout, cache, scales = scaled_cache(layout)
    table = b.block_tables()
    out = [torch.zeros(2, 40, 2, 128, dtype=BF16) for _ in range(2)]
    fi_core.nvfp4_kv_dequantize_paged(
        cache, scales, table.long() if "int64" in layout else table, b.seq_lens(), 2.0, 3.0, *out, kv_layout
    )
    want = torch.zeros(2, 2, 40, 2, 128, dtype=torch.float64)
    for part, (factor, rows) in enumerate(((2.0, b.k), (3.0, b.v))):
        for request, x in enumerate(rows):
            want[part, request, : len(x)] = factor * x
    return torch.stack(out), want


def append_latent(layout: str, backend: str) -> Pair:
    pool, rows = torch.zeros(4, 16, 576, dtype=BF16), rand(20, 576, dtype=BF16, device="cpu")
    ckv, kpe = (x if "views" in layout else x.clone() for x in (pool[..., :512], pool[..., 512:]))
    request, position = torch.zeros(20, dtype=torch.int32), torch.arange(20, dtype=torch.int32)
    ends, pages, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [3, 1], [4]))
    fi_core.append_paged_mla_kv_cache(
        rows[:, :512].contiguous(), rows[:, 512:].contiguous(), request, position, ckv, kpe, pages, ends, last
    )
    pages = pages.long()[position.long() // 16]
    return torch.cat([x[pages, position.long() % 16] for x in (ckv, kpe)], -1), rows


def latent_wrapper(layout: str, backend: str) -> Pair:
    b = test_mla.batch((65, 3), 1, page_size=32)
    ckv, kpe = b.cache[..., :512], b.cache[..., 512:]
    if "of their own" in layout:
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    table = test_mla.block_tables(b)
    counts = [3, 1]
    indices = torch.cat([row[:n] for row, n in zip(table, counts)]).int()
    if "longer" in layout:
        indices = torch.cat((indices, torch.full((7,), 10**6, dtype=torch.int32)))
    ends = torch.tensor([0, 3, 4], dtype=torch.int32)
    wrapper = BatchMLAPagedAttentionWrapper(test_mla.workspace("cpu"))
    wrapper.plan(
        torch.arange(3, dtype=torch.int32), ends, indices, b.kv_len.int(), 16, 512, 64, 32, False, test_mla.SCALE,
        b.q.dtype, b.cache.dtype,
    )  # fmt: skip
    q = b.q.view(2, 16, 576)
    out = wrapper.run(q[..., :512].contiguous(), q[..., 512:].contiguous(), ckv, kpe)
    return out, b.expected()[0]


def listed_slots(layout: str, backend: str) -> Pair:
    form = "packed" if "packed" in layout else "rows" if "656" in layout else "bf16"
    rows = test_flash_mla.keys(64, 512 if form == "packed" else 576, "cpu")
    cache = test_flash_mla.cache_of(form, rows, 16)
    if "apart" in layout:
        wide = cache.new_zeros(4, 16 * cache.shape[-1] + (3 * 656 if "multiple" in layout else 576))
        steps = wide.stride(0), cache.shape[-1], cache.shape[-1], 1
        wide[:, : 16 * cache.shape[-1]] = cache.as_strided((4, 16 * cache.shape[-1]), (cache.stride(0), 1))
        cache = wide.as_strided(cache.shape, steps)
    q = rand(1, 1, 4, rows.shape[1], dtype=BF16, device="cpu") / 8
    slots = torch.arange(5, 60, dtype=torch.int64 if "int64" in layout else torch.int32)
    out, _ = flash_mla_with_kvcache(
        q, cache, None, None, 512, None, softmax_scale=test_flash_mla.SCALE, is_fp8_kvcache=form != "bf16",
        indices=slots.view(1, 1, -1),
    )  # fmt: skip
    return out[0, 0], test_flash_mla.expected(q[0, 0], rows[5:60])[0]


def rows_of(layout: str, x: torch.Tensor) -> torch.Tensor:
    """The rows as a layout has them."""
    if "wider" in layout:
        wide = torch.zeros(len(x), x.shape[1] + 3)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]
    return x.t().contiguous().t() if "transposed" in layout else x


def renormalized(function: Any, keep: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Callable[[str, str], Pair]:
    def run(layout: str, backend: str) -> Pair:
        probs = rand(3, 40, dtype=torch.float32, device="cpu").softmax(-1)
        given = torch.full((4 if "another" in layout else 3,), value) if "tensor" in layout else value
        kept = keep(probs.double())
        return function(rows_of(layout, probs), given), kept / kept.sum(-1, keepdim=True)

    return run


def _top_5(p: torch.Tensor) -> torch.Tensor:
    return p.where(p >= p.topk(5).values[:, -1:], 0)


def _top_half(p: torch.Tensor) -> torch.Tensor:
    above = (p[:, None, :] > p[..., None]).double() @ p[..., None]
    return p.where(above[..., 0] < 0.5, 0)


CASES: dict[str, Callable[[str, str], Pair]] = {
    "fused_moe.trtllm_fp4_block_scale_moe": fp4_experts,
    "fused_moe.trtllm_fp8_per_tensor_scale_moe": tensor_experts,
    "nvfp4_quantize_append_paged_kv_cache": append_scaled,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": append_scaled,
    "nvfp4_kv_dequantize_paged": dequantize_scaled,
    "append_paged_mla_kv_cache": append_latent,
    "mla.BatchMLAPagedAttentionWrapper": latent_wrapper,
    "flash_mla.flash_mla_with_kvcache": listed_slots,
    "top_k_renorm_probs": renormalized(fi_core.top_k_renorm_probs, _top_5, 5),
    "top_p_renorm_probs": renormalized(fi_core.top_p_renorm_probs, _top_half, 0.5),
}
