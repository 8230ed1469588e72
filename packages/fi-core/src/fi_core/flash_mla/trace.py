"""Trace templates of FlashMLA's functions over listed keys: references, inputs and work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, sized

_SCALE = 192**-0.5  # of the widths before absorption, 128 + 64


def _attend(q, rows, sm_scale, sink=None):  # type: ignore[no-untyped-def]
    """(out, largest score, lse) of one row of queries, q [heads, width], over rows [keys, width], in fp64."""
    import torch

    q, rows = q.double(), rows.double()
    score = q @ rows.T * sm_scale
    lse = score.logsumexp(1) if len(rows) else q.new_full((len(q),), torch.inf)
    top = score.amax(1) if len(rows) else q.new_full((len(q),), -torch.inf)
    out = score.softmax(1) @ rows[:, :512]
    if sink is not None:
        out = out * (1 / (1 + (sink.double() - lse).exp())).nan_to_num(0)[:, None]
    return out, top, lse


def _sparse_reference(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):  # type: ignore[no-untyped-def]
    out = q.double().new_zeros((*q.shape[:2], 512))
    top, lse = q.double().new_zeros((2, *q.shape[:2]))
    for t, listed in enumerate(indices[:, 0]):
        listed = listed if topk_length is None else listed[: int(topk_length[t])]
        rows = kv[listed[(listed >= 0) & (listed < len(kv))].long(), 0]
        out[t], top[t], lse[t] = _attend(q[t], rows, sm_scale, attn_sink)
    return out, top, lse


def _rows_of(cache):  # type: ignore[no-untyped-def]
    """The rows of a cache [pages, page_size, 1, width], [slots, 576 or 512], in fp64."""
    import torch

    pages, page_size, _, width = cache.shape
    if cache.element_size() > 1:
        return cache.flatten(0, 2).double()
    if width == 656:
        rows = cache.flatten(0, 2).contiguous().view(torch.uint8)
        codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
        scales = rows[:, 512:528].contiguous().view(torch.float32).double()
        rope = rows[:, 528:].contiguous().view(torch.bfloat16).double()
        return torch.cat([(codes * scales[..., None]).flatten(1), rope], 1)
    size = page_size * width  # the last axis is a size only
    flat = cache.view(torch.uint8).as_strided((pages, size), (cache.stride(0), 1), cache.storage_offset())
    rows = flat[:, : page_size * 576].reshape(-1, 576)
    codes = rows[:, :448].contiguous().view(torch.float8_e4m3fn).double().view(-1, 7, 64)
    scales = torch.exp2(flat[:, page_size * 576 :].reshape(-1, 8)[:, :7].double() - 127)
    return torch.cat([(codes * scales[..., None]).flatten(1), rows[:, 448:].contiguous().view(torch.bfloat16)], 1)


def _decode_reference(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    softmax_scale,
    indices,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    head_dim_v=512,
    is_fp8_kvcache=False,
):
    import torch

    parts = [(_rows_of(k_cache), indices, topk_length)]
    if extra_k_cache is not None:
        parts.append((_rows_of(extra_k_cache), extra_indices_in_kvcache, extra_topk_length))
    batch, s_q, heads, _ = q.shape
    out, lse = q.double().new_zeros((batch, s_q, heads, 512)), q.double().new_zeros((batch, heads, s_q))
    for b in range(batch):
        for s in range(s_q):
            rows = []
            for cache, listed, lengths in parts:
                slots = listed[b, s] if lengths is None else listed[b, s, : int(lengths[b])]
                rows.append(cache[slots[slots >= 0].long()])
            out[b, s], _, lse[b, :, s] = _attend(q[b, s], torch.cat(rows), softmax_scale, attn_sink)
    return out, lse


def _gathered(q, rows, indices, sm_scale, lengths):  # type: ignore[no-untyped-def]
    """(out, largest score, lse) without sinks: q [rows, heads, width] over rows [slots, width], indices [rows, K]."""
    import torch

    absent = (indices < 0) | (indices >= len(rows))
    if lengths is not None:
        absent |= torch.arange(indices.shape[1], device=q.device) >= lengths[:, None]
    keys = rows[indices.clamp(0, len(rows) - 1).long()].float()
    score = (q.float() @ keys.mT * sm_scale).masked_fill(absent[:, None], -torch.inf)
    out = score.softmax(-1).nan_to_num(0) @ keys[..., :512]
    lse = score.logsumexp(-1)
    return out, score.amax(-1), lse.masked_fill(lse == -torch.inf, torch.inf)


def _with_sink(out, lse, sink):  # type: ignore[no-untyped-def]
    return out if sink is None else out * (lse - sink).sigmoid().nan_to_num(0)[..., None]


def _sparse_eager(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):  # type: ignore[no-untyped-def]
    import torch

    parts = []  # 16 query tokens at once
    for i in range(0, len(q), 16):
        lengths = None if topk_length is None else topk_length[i : i + 16]
        parts.append(_gathered(q[i : i + 16], kv[:, 0], indices[i : i + 16, 0], sm_scale, lengths))
    out, top, lse = map(torch.cat, zip(*parts))
    return _with_sink(out, lse, attn_sink).to(q.dtype), top, lse


def _decode_eager(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    softmax_scale,
    indices,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    **_,
):
    import torch

    def part(cache, listed, lengths):  # type: ignore[no-untyped-def]
        lengths = None if lengths is None else lengths.repeat_interleave(q.shape[1])
        rows, lists = _rows_of(cache).float(), listed.flatten(0, 1)
        out, _, lse = _gathered(q.flatten(0, 1), rows, lists, softmax_scale, lengths)
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)

    out, lse = part(k_cache, indices, topk_length)
    if extra_k_cache is not None:
        other, more = part(extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        both = lse.logaddexp(more)
        weights = [(x - both).exp().nan_to_num(0)[..., None] for x in (lse, more)]
        out, lse = out * weights[0] + other * weights[1], both
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    out = _with_sink(out, lse, attn_sink).to(q.dtype)
    return out.view(*q.shape[:3], 512), lse.view(q.shape[0], q.shape[1], -1).transpose(1, 2)


@sized(num_rows=16, num_keys=4096, num_heads=64, width=576, top_k=512)
def _make_sparse(draw: Draw, s: Any) -> dict[str, Any]:
    """If nasty, lists have entries that are no row, one is empty, and others are cut."""
    low, high = (-9, s.num_keys + 9) if draw.nasty else (0, s.num_keys)
    indices = draw.integers(low, high, (s.num_rows, 1, s.top_k)).int()
    found = {
        "q": draw.rows(draw.normal((s.num_rows, s.num_heads, s.width), "bfloat16")),
        "kv": draw.normal((s.num_keys, 1, s.width), "bfloat16"),
        "indices": indices,
        "sm_scale": _SCALE,
        "attn_sink": draw.special(draw.normal((s.num_heads,), "float32"), float("inf"), float("-inf")),
        "topk_length": draw.integers(0 if draw.nasty else s.top_k, s.top_k + 1, (s.num_rows,)).int(),
    }
    if draw.nasty:
        indices[-1] = -1
    return found


def _bytes_of(draw: Draw, pages: int, page_size: int, form: str) -> Any:
    """A cache of random codes, scales and 16-bit columns, [pages, page_size, 1, 656 or 584]."""
    import torch

    slots = pages * page_size
    width, codes, groups = (656, 512, 4) if form == "rows" else (584, 448, 7)
    values = draw.normal((slots, codes), "float8_e4m3fn").view(torch.uint8)
    rope = draw.normal((slots, 64), "bfloat16").view(torch.uint8)
    if form == "rows":
        scales = draw.integers(1, 4, (slots, groups)).float() / 2
        return torch.cat([values, scales.view(torch.uint8), rope], 1).view(pages, page_size, 1, width)
    scales = draw.integers(126, 129, (slots, 8)).to(torch.uint8)
    rows = torch.cat([values, rope], 1).view(pages, -1)
    return torch.cat([rows, scales.view(pages, -1)], 1).view(pages, page_size, 1, width)


@sized(batch_size=8, qo_len=1, kv_len=4096, num_heads=64, page_size=64, top_k=2048, form="bf16", extra=0)
def _make_decode(draw: Draw, s: Any) -> dict[str, Any]:
    """form: of the cache: "bf16", "rows" of 656 bytes, or "packed" pages. extra: keys listed of a second cache."""
    pages, width = s.batch_size * -(-s.kv_len // s.page_size), 512 if s.form == "packed" else 576

    def cache(pages: int, page_size: int) -> Any:
        if s.form == "bf16":
            return draw.normal((pages, page_size, 1, width), "bfloat16")
        return _bytes_of(draw, pages, page_size, s.form)

    def listed(slots: int, k: int) -> Any:
        return draw.integers(-4 if draw.nasty else 0, slots, (s.batch_size, s.qo_len, k)).int().clamp(min=-1)

    found = {
        "q": draw.rows(draw.normal((s.batch_size, s.qo_len, s.num_heads, width), "bfloat16")),
        "k_cache": cache(pages, s.page_size),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "softmax_scale": _SCALE,
        "is_fp8_kvcache": s.form != "bf16",
        "indices": listed(pages * s.page_size, s.top_k),
        "attn_sink": draw.normal((s.num_heads,), "float32"),
        "topk_length": draw.integers(0 if draw.nasty else s.top_k, s.top_k + 1, (s.batch_size,)).int(),
    }
    if s.extra:
        found |= {"extra_k_cache": cache(pages, 2), "extra_indices_in_kvcache": listed(2 * pages, s.extra)}
    return found


def _work(x: Mapping[str, Any]) -> Work:
    """Each listed row once for its row of queries, the indices, q and out."""
    heads, width = x["q"].shape[-2:]
    pairs = read = 0
    for cache, listed in (("kv", "indices"), ("k_cache", "indices"), ("extra_k_cache", "extra_indices_in_kvcache")):
        if x.get(cache) is not None:
            count = int((x[listed] >= 0).sum())
            pairs += count
            read += count * x[cache].shape[-1] * x[cache].element_size() + nbytes(x[listed])
    rows, stats = x["q"].numel() // width, 2 if "kv" in x else 1  # stats: fp32 of a row and head
    return Work(2 * pairs * heads * (width + 512), read + nbytes(x["q"]) + rows * (1024 + 4 * stats))


_LISTS: dict[str, Tensor | Scalar] = {"attn_sink": Tensor(["num_heads"], optional=True)}
_TOLERANCE = {"out": (1e-2, 1e-2), "max_logits": (1e-3, 1e-3), "lse": (2e-3, 2e-3)}

SPARSE = TraceTemplate(
    "flash_mla_sparse_fwd",
    axes={
        "num_rows": Var(),
        "num_keys": Var(),
        "num_heads": Const(abbrev="h"),
        "width": Const(abbrev="d"),
        "one": Const(abbrev=""),
        "top_k": Const(abbrev="k"),
        "columns": Const(abbrev="", value=512),
    },
    inputs={
        "q": Tensor(["num_rows", "num_heads", "width"]),
        "kv": Tensor(["num_keys", "one", "width"]),
        "indices": Tensor(["num_rows", "one", "top_k"]),
        "sm_scale": Scalar(),
        "d_v": Scalar("int32", optional=True),
        **_LISTS,
        "topk_length": Tensor(["num_rows"], optional=True),
    },
    outputs={
        "out": Tensor(["num_rows", "num_heads", "columns"], dtype_from="q"),
        "max_logits": Tensor(["num_rows", "num_heads"], dtype="float32"),
        "lse": Tensor(["num_rows", "num_heads"], dtype="float32"),
    },
    reference=(_attend, _sparse_reference),
    op=("batch_mla", "mla_plan"),
    make=_make_sparse,
    samples=(
        {"num_rows": 5, "num_keys": 150, "num_heads": 3, "top_k": 70},
        {"num_rows": 3, "num_keys": 150, "num_heads": 20, "width": 512, "top_k": 130},
    ),
    work=_work,
    eager=_sparse_eager,
    tolerance=_TOLERANCE,
    description="Attention of each query to the latent rows that its list names.",
)

DECODE = TraceTemplate(
    "flash_mla_with_kvcache",
    axes={
        "batch_size": Var(),
        "qo_len": Var(),
        "num_heads": Const(abbrev="h"),
        "width": Const(abbrev="d"),
        "num_pages": Var(),
        "page_size": Const(abbrev="ps"),
        "one": Const(abbrev=""),
        "row": Const(abbrev="row"),
        "top_k": Const(abbrev="k"),
        "extra_pages": Var(),
        "extra_page_size": Const(abbrev=""),
        "extra_k": Const(abbrev=""),
        "columns": Const(abbrev="", value=512),
    },
    inputs={
        "q": Tensor(["batch_size", "qo_len", "num_heads", "width"]),
        "k_cache": Tensor(["num_pages", "page_size", "one", "row"]),
        "softmax_scale": Scalar(),
        "indices": Tensor(["batch_size", "qo_len", "top_k"]),
        **_LISTS,
        "extra_k_cache": Tensor(["extra_pages", "extra_page_size", "one", "row"], optional=True),
        "extra_indices_in_kvcache": Tensor(["batch_size", "qo_len", "extra_k"], optional=True),
        "topk_length": Tensor(["batch_size"], optional=True),
        "extra_topk_length": Tensor(["batch_size"], optional=True),
        "head_dim_v": Scalar("int32", optional=True),
        "is_fp8_kvcache": Scalar("bool", optional=True),
    },
    outputs={
        "out": Tensor(["batch_size", "qo_len", "num_heads", "columns"], dtype_from="q"),
        "lse": Tensor(["batch_size", "num_heads", "qo_len"], dtype="float32"),
    },
    reference=(_attend, _rows_of, _decode_reference),
    op=("batch_mla", "mla_plan", "merge_state"),
    make=_make_decode,
    samples=tuple(
        {"batch_size": 2, "kv_len": 70, "num_heads": 3, "page_size": 16, "top_k": 40, **more}
        for more in (
            {},
            {"form": "rows", "qo_len": 2},
            {"form": "packed"},
            {"form": "packed", "qo_len": 3, "extra": 20, "num_heads": 17},
        )
    ),
    work=_work,
    eager=_decode_eager,
    tolerance={"out": (1.5e-2, 1.5e-2), "lse": (2e-3, 2e-3)},
    others=("block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits", "causal"),
    description="Attention of the last tokens of requests to the tokens of a paged latent cache that a list names.",
)
