"""FlashMLA's names: every form of cache against fp64, lists with holes, sinks, lengths, a second cache; refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from families.harness import assert_close
from fi_core.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from fi_core.mla import trtllm_batch_decode_with_kv_cache_mla
from fi_core.page import append_sparse_mla_kv_cache

SCALE = 192**-0.5
LSE = (2e-3, 2e-3)
OUT = (2**-8, 28 * 2**-9)  # the output, and the weights of the largest value of `keys`, 28, round to bf16
BYTES = {"rows": (576, 656), "packed": (512, 584)}


def keys(slots: int, width: int, device: str) -> torch.Tensor:
    """Rows of which quantization loses nothing: small integers times the powers of two of their groups."""
    values = torch.randint(-7, 8, (slots, width), generator=torch.Generator().manual_seed(slots)).float()
    group = 64 if width == 512 else 128
    values[:, ::group] = 7.0  # 448 / 64: scales are powers of two
    values *= torch.exp2(torch.arange(width) // group % 3)
    return values.bfloat16().to(device)


def cache_of(form: str, rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """The rows as a cache of pages [pages, page_size, 1, width]."""
    if form == "bf16":
        return rows.view(-1, page_size, 1, rows.shape[1])
    token = BYTES[form][1]
    page = -(-page_size * token // 576) * 576 if form == "packed" else page_size * token
    storage = torch.full((len(rows) // page_size * page,), 0xFF, dtype=torch.uint8, device=rows.device)
    cache = storage.as_strided((len(rows) // page_size, page_size, 1, token), (page, token, token, 1))
    append_sparse_mla_kv_cache(rows, cache, torch.arange(len(rows), device=rows.device))
    return cache


def expected(q: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """(out, largest score, lse) of one row of queries."""
    if not len(rows):
        empty = torch.full((len(q),), math.inf, dtype=torch.float64, device=q.device)
        return q.new_zeros(len(q), 512, dtype=torch.float64), -empty, empty
    x = q.double() @ rows.double().T * SCALE
    out = x.softmax(1) @ rows[:, :512].double()
    if sink is not None:
        out /= 1 + (sink.double() - x.logsumexp(1)).exp()[:, None]
    return out, x.amax(1), x.logsumexp(1)


def check_decode(
    found: tuple[torch.Tensor, torch.Tensor], q: torch.Tensor, chosen: list[torch.Tensor], sink: Any = None
) -> None:
    """chosen: the rows of keys of each row of queries."""
    batch, s_q = q.shape[:2]
    out, lse = found
    assert out.dtype is torch.bfloat16 and out.shape == (*q.shape[:3], 512) and lse.shape == (batch, q.shape[2], s_q)
    for i, rows in enumerate(chosen):
        o, _, state = expected(q[i // s_q, i % s_q], rows, sink)
        assert_close(out[i // s_q, i % s_q], o, tolerance=OUT)
        assert_close(lse[i // s_q, :, i % s_q], state, tolerance=LSE)


@pytest.mark.parametrize("heads", [1, 16, 20])
@pytest.mark.parametrize("form", ["bf16", "rows", "packed"])
def test_listed_slots_of_every_form(form: str, heads: int, device: str) -> None:
    """Three rows of queries, holes and repeats in lists, lengths, a sink; what no list names is NaN."""
    width, page_size, top_k = BYTES.get(form, (576, 0))[0], 12, 40
    rows = keys(120, width, device)
    cache = cache_of(form, rows, page_size)
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(2, 3, heads, width, generator=generator).bfloat16().to(device) / 8
    indices = torch.randint(-9, 60, (2, 3, top_k), generator=generator).clamp(min=-1).int().to(device)
    indices[0, 1], indices[1, 2, 1] = -1, indices[1, 2, 0]
    lengths = torch.tensor([top_k, 7], dtype=torch.int32, device=device)
    indices[1, :, 7:] = 119  # behind the length
    if form == "bf16":
        cache.view(-1, width)[60:] = math.nan
    sink = torch.linspace(-2, 2, heads, device=device)
    found = flash_mla_with_kvcache(
        q,
        cache,
        None,
        None,
        512,
        get_mla_metadata()[0],
        softmax_scale=SCALE,
        is_fp8_kvcache=form != "bf16",
        indices=indices,
        attn_sink=sink,
        topk_length=lengths,
    )
    lists = [x[: int(lengths[b])] for b in range(2) for x in indices[b]]
    check_decode(found, q, [rows[x[x >= 0].long()] for x in lists], sink)


@pytest.mark.parametrize("form", ["bf16", "rows", "packed"])
def test_a_second_cache_joins_the_softmax(form: str, device: str) -> None:
    """It has pages of another size; a list of either cache may be empty, and lengths cut both."""
    width = BYTES.get(form, (576, 0))[0]
    first, second = keys(96, width, device), keys(40, width, device)
    q = torch.randn(3, 2, 8, width, generator=torch.Generator().manual_seed(1)).bfloat16().to(device) / 8
    a = torch.arange(3 * 2 * 30, dtype=torch.int32, device=device).view(3, 2, 30) % 96
    b = torch.arange(3 * 2 * 20, dtype=torch.int32, device=device).view(3, 2, 20) % 40
    a[0], b[1] = -1, -1
    a[2, 0], b[2, 0] = -1, -1
    sink = torch.linspace(-2, 2, 8, device=device)
    sink[3] = math.inf
    lengths = torch.tensor([20, 20, 3], dtype=torch.int32, device=device)
    found = flash_mla_with_kvcache(
        q,
        cache_of(form, first, 16),
        None,
        None,
        512,
        None,
        softmax_scale=SCALE,
        is_fp8_kvcache=form != "bf16",
        indices=a,
        attn_sink=sink,
        extra_k_cache=cache_of(form, second, 2),
        extra_indices_in_kvcache=b,
        extra_topk_length=lengths,
    )
    chosen = []
    for r in range(6):
        one, two = a[r // 2, r % 2], b[r // 2, r % 2, : int(lengths[r // 2])]
        chosen.append(torch.cat([first[one[one >= 0].long()], second[two[two >= 0].long()]]))
    check_decode(found, q, chosen, sink)
    assert (found[0][:, :, 3] == 0).all(), "a sink of infinity takes the whole softmax"


def test_dense_requests_are_causal_at_the_end(device: str) -> None:
    rows = keys(8 * 16, 576, device)
    cache = cache_of("bf16", rows, 16)
    q = torch.randn(3, 2, 16, 576, generator=torch.Generator().manual_seed(1)).bfloat16().to(device) / 8
    table = torch.tensor([[3, 1], [0, 6], [5, 2]], dtype=torch.int32, device=device)
    lengths = [20, 32, 2]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    for causal in (False, True):
        found = flash_mla_with_kvcache(
            q, cache, table, seq_lens, 512, FlashMLASchedMeta(), softmax_scale=SCALE, causal=causal
        )
        own = [rows.view(8, 16, 576)[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate(lengths)]
        check_decode(found, q, [own[b][: n - 1 + t if causal else n] for b, n in enumerate(lengths) for t in range(2)])


@pytest.mark.parametrize(("width", "heads", "count"), [(576, 9, 50), (512, 9, 50), (576, 40, 600)])
def test_prompts_ignore_what_is_no_row(width: int, heads: int, count: int, device: str) -> None:
    """Negative indices, and those behind the last row; a list of none; any stride of q and kv."""
    rows, generator = keys(count, width, device), torch.Generator().manual_seed(1)
    q = torch.randn(4, heads, width + 8, generator=generator).bfloat16().to(device)[..., :width] / 8
    indices = torch.randint(-20, count + 20, (4, 1, count * 2 // 3), generator=generator).int().to(device)
    indices[2] = count
    kv = torch.full((count, 1, width + 64), math.nan, dtype=torch.bfloat16, device=device)
    kv[:, 0, :width] = rows
    out, top, lse = flash_mla_sparse_fwd(q, kv[..., :width], indices, SCALE)
    for t in range(4):
        own = indices[t, 0][(indices[t, 0] >= 0) & (indices[t, 0] < count)].long()
        for found, value, tolerance in zip((out[t], top[t], lse[t]), expected(q[t], rows[own]), (OUT, LSE, LSE)):
            assert_close(found, value, tolerance=tolerance)


def test_a_sink_that_is_no_number_shows(device: str) -> None:
    q, kv = (
        torch.ones(n, k, 576, dtype=torch.bfloat16, device=device)
        for n, k in (
            (
                1,
                3,
            ),
            (8, 1),
        )
    )
    sink = torch.tensor([math.nan, math.inf, -math.inf], device=device)
    indices = torch.arange(8, dtype=torch.int32, device=device).view(1, 1, 8)
    out, top, lse = flash_mla_sparse_fwd(q, kv, indices, SCALE, attn_sink=sink)
    assert out[0, 0].isnan().all() and (out[0, 1] == 0).all() and (out[0, 2] == 1).all()
    assert_close(lse - top, torch.full_like(lse, math.log(8)), tolerance=LSE)


def test_both_names_have_the_same_bits(device: str) -> None:
    """The names of FlashMLA and of TensorRT-LLM run one kernel; a row does not depend on the others of its batch."""
    cache = cache_of("rows", keys(64, 576, device), 16)
    q = torch.randn(4, 1, 16, 576, generator=torch.Generator().manual_seed(1)).bfloat16().to(device) / 8
    indices = torch.randint(0, 64, (4, 1, 24), generator=torch.Generator().manual_seed(2)).int().to(device)
    options: dict[str, Any] = {"softmax_scale": SCALE, "is_fp8_kvcache": True}
    out, lse = flash_mla_with_kvcache(q, cache, None, None, 512, None, indices=indices, **options)
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    other, base2 = trtllm_batch_decode_with_kv_cache_mla(
        q, cache.squeeze(2), workspace, 128, 512, 64, indices, None, 64, 24, bmm1_scale=SCALE, return_lse=True
    )
    assert torch.equal(out, other)
    assert_close(lse[..., 0], base2 * math.log(2), tolerance=(1e-5, 1e-5))
    alone = flash_mla_with_kvcache(q[2:3], cache, None, None, 512, None, indices=indices[2:3], **options)
    if device == "cpu":
        assert torch.equal(alone[0], out[2:3]) and torch.equal(alone[1], lse[2:3])


@pytest.mark.parametrize("form", ["bf16", "rows", "packed"])
def test_pages_may_be_apart(form: str, device: str) -> None:
    """As where the pages of all layers alternate; what lies between is NaN, and -1 is still no token."""
    width, token = BYTES.get(form, (576, 576))
    cache = cache_of(form, keys(64, width, device), 16)
    if form == "packed":
        size = cache.stride(0)
        pool = torch.full((4, 2 * size), 255, dtype=torch.uint8, device=device)
        pool[:, :size] = cache.as_strided((4, size), (size, 1))
        apart = pool.as_strided(cache.shape, (2 * size, token, token, 1))
    else:
        pool = torch.full((4, 3, *cache.shape[1:]), math.nan if form == "bf16" else 255, dtype=cache.dtype)
        apart = pool.to(device)[:, 1].copy_(cache)
    q = torch.randn(2, 1, 5, width, generator=torch.Generator().manual_seed(1)).bfloat16().to(device) / 8
    indices = torch.tensor([[[63, -1, 0, 16, 17]], [[-1, -1, 40, 15, 3]]], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"softmax_scale": SCALE, "is_fp8_kvcache": form != "bf16", "indices": indices}
    one, two = (flash_mla_with_kvcache(q, x, None, None, 512, None, **options) for x in (cache, apart))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and not one[0].isnan().any()


def test_pages_of_one_and_of_256_tokens_and_no_rows() -> None:
    q = torch.randn(1, 1, 4, 576).bfloat16() / 8
    rows = keys(512, 576, "cpu")
    indices = torch.arange(100, 300, dtype=torch.int32).view(1, 1, -1)
    one, many = (
        flash_mla_with_kvcache(
            q, cache_of("rows", rows, size), None, None, 512, None, None, SCALE, is_fp8_kvcache=True, indices=indices
        )
        for size in (1, 256)
    )
    assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1])
    none = flash_mla_sparse_fwd(q[0, :0], rows.unsqueeze(1), indices[0, :0].view(0, 1, 200), SCALE)
    assert [tuple(x.shape) for x in none] == [(0, 4, 512), (0, 4), (0, 4)]


Q, KV = torch.zeros(2, 4, 576, dtype=torch.bfloat16), torch.zeros(8, 1, 576, dtype=torch.bfloat16)
LIST = torch.zeros(2, 1, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q.half()}, "q: torch.bfloat16"),
        ({"q": Q[..., :500]}, "of width 576 or 512"),
        ({"kv": KV[:, 0]}, r"kv: torch.bfloat16 \[N, 1, 576\]"),
        ({"kv": KV[:0]}, "N of 1 or more"),
        ({"indices": LIST.long()}, "indices: torch.int32"),
        ({"indices": LIST[..., :0]}, "K of 1 or more"),
        ({"indices": LIST.to("meta")}, "indices: a contiguous tensor on cpu is required; got strides .* on meta"),
        ({"d_v": 256}, "d_v: 512 is required"),
        ({"attn_sink": torch.zeros(3)}, "attn_sink: shape must be"),
        ({"topk_length": torch.zeros(3, dtype=torch.int32)}, "topk_length: shape must be"),
    ],
)
def test_prompts_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "kv": KV, "indices": LIST, "sm_scale": SCALE}
    with pytest.raises((ValueError, TypeError), match=message):
        flash_mla_sparse_fwd(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "causal: False is required with indices"),
        ({"extra_k_cache": KV.view(2, 4, 1, 576)}, "extra_k_cache: it and extra_indices_in_kvcache"),
        ({"extra_topk_length": torch.ones(2, dtype=torch.int32)}, "extra_topk_length: None is required"),
        ({"is_fp8_kvcache": True}, r"k_cache: bytes \[..., 656 or 584\]"),
        ({"k_cache": torch.zeros(2, 4, 1, 656, dtype=torch.uint8)}, "is_fp8_kvcache=False"),
        ({"k_cache": KV.view(2, 4, 576)}, r"k_cache: \[pages, page_size, 1, width\]"),
        ({"indices": None}, "block_table: a tensor is required without indices"),
        ({"indices": None, "topk_length": torch.ones(2, dtype=torch.int32)}, "topk_length: None is required"),
        ({"head_dim_v": 128}, "head_dim_v: 512 is required"),
    ],
)
def test_requests_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": Q.unsqueeze(1),
        "k_cache": KV.view(2, 4, 1, 576),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "indices": LIST,
    }
    with pytest.raises(ValueError, match=message):
        flash_mla_with_kvcache(**arguments | change)


def test_appending_refuses_what_the_form_has_not() -> None:
    cache = torch.zeros(2, 4, 1, 584, dtype=torch.uint8)
    rows, slots = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="scale_format: one of auto, ue8m0 is required of tokens of 584 bytes"):
        append_sparse_mla_kv_cache(rows, cache, slots, "arbitrary_fp32")
    with pytest.raises(ValueError, match=r"kv_cache: bytes \[pages, page_size, 1, 656 or 584\]"):
        append_sparse_mla_kv_cache(rows, cache.float(), slots)
    with pytest.raises(ValueError, match="slot_mapping must name slots of the cache, below 8"):
        append_sparse_mla_kv_cache(rows, cache, slots + 8)
    with pytest.raises(ValueError, match="kv_cache"):
        append_sparse_mla_kv_cache(torch.zeros(1, 576, dtype=torch.bfloat16), cache, slots)
