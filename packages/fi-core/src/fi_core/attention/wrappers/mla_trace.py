"""The trace template of the MLA wrapper's `run`: reference, inputs, plan and work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fi_core.attention.reference import attend_pages, attend_request, gather_pages
from fi_core.attention.wrappers.inputs import lengths_of, normal, pages_of
from fi_core.attention.wrappers.trace import tables
from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Planned, Scalar, Tensor, TraceTemplate, Work, axes_of, options, sized, tensors, words
from fi_core.runtime.lazy import torch
from fi_core.utils import canonicalize_torch_dtype

_SCALE = 192**-0.5  # of the widths before absorption, 128 + 64
_WORKSPACE = 64 << 20


def _reference(q_nope, q_pe, ckv_cache, kpe_cache, kv_len_arr, ckv_scale=None, kpe_scale=None, **options):  # type: ignore[no-untyped-def]
    import torch

    ckv = ckv_cache.double() * (1.0 if ckv_scale is None else ckv_scale)
    kpe = kpe_cache.double() * (1.0 if kpe_scale is None else kpe_scale)
    q, k = torch.cat((q_nope, q_pe), -1), torch.cat((ckv, kpe), -1)
    return attend_pages(q, k.unsqueeze(2), ckv.unsqueeze(2), seq_lens=kv_len_arr, **options)[0]


@sized(batch_size=64, kv_len=4096, qo_len=1, num_heads=16, page_size=64, causal=False, dtype="bfloat16", kv_dtype=None)
def _make(draw: Draw, s: Any) -> dict[str, Any]:
    kv_lens = lengths_of(s.kv_len, s.batch_size)
    qo_lens = lengths_of(s.qo_len, len(kv_lens))
    table, dtype = pages_of(draw, kv_lens, s.page_size), canonicalize_torch_dtype(s.kv_dtype or s.dtype)
    fp8, pages = dtype.itemsize == 1, len(table["kv_indices"]) + 1
    found = {n: normal(draw, (sum(qo_lens), s.num_heads, w), s.dtype) for n, w in (("q_nope", 512), ("q_pe", 64))}
    for name, width in (("ckv_cache", 512), ("kpe_cache", 64)):
        rows = draw.pages((pages, s.page_size, width), dtype)
        found[name] = rows if fp8 else draw.rows(rows)  # CUDA kernels require rows at multiples of 16 bytes
    table |= {"qo_indptr": draw.offsets(qo_lens), "kv_len_arr": draw.int32(kv_lens)}
    scales = {"ckv_scale": 0.5, "kpe_scale": 1.5} if fp8 else {}
    return {**found, **table, "sm_scale": _SCALE, "causal": s.causal, **scales}


def _plan(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    planned = wrapper(torch.empty(_WORKSPACE, dtype=torch.uint8, device=x["q_nope"].device))
    tables = (x[name] for name in _TABLES)
    options = {"page_size": x["ckv_cache"].shape[1], "causal": x["causal"], "sm_scale": x["sm_scale"]}
    dtypes = {"q_data_type": x["q_nope"].dtype, "kv_data_type": x["ckv_cache"].dtype}
    planned.plan(*tables, x["q_nope"].shape[1], 512, 64, **options, **dtypes)
    return planned


def _work(x: Mapping[str, Any]) -> Work:
    """Each row of the cache and of the queries once; the output in their dtype."""
    heads, tokens = x["q_nope"].shape[1], x["qo_indptr"].diff().tolist()
    pairs = sum(n * kv_len for n, kv_len in zip(tokens, x["kv_len_arr"].tolist()))
    cache = int(x["kv_len_arr"].sum()) * 576 * x["ckv_cache"].element_size()
    return Work(2 * pairs * heads * 1088, cache + 2 * nbytes(x["q_nope"]) + nbytes(x["q_pe"]))


_TABLES = tables("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
PLANNED: Planned = {name: f"_{name}_buf" for name in _TABLES} | {"sm_scale": "_sm_scale", "causal": "_causal"}
_INPUTS: dict[str, Tensor | Scalar] = {
    **tensors(q_nope="tokens num_heads head_dim_ckv", q_pe="tokens num_heads head_dim_kpe"),
    **tensors(ckv_cache="num_pages page_size head_dim_ckv", kpe_cache="num_pages page_size head_dim_kpe"),
    **_TABLES,
    "sm_scale": Scalar(),
    **options(bool="causal", float32="ckv_scale kpe_scale"),
}
TEMPLATE = TraceTemplate(
    "mla_paged",
    axes=axes_of(_INPUTS, num_heads="h", head_dim_ckv="ckv", head_dim_kpe="kpe", page_size="ps"),
    inputs=_INPUTS,
    outputs=tensors({"dtype_from": "q_nope"}, output="tokens num_heads head_dim_ckv"),
    constraints=("len_indptr == batch_size + 1",),
    reference=(attend_request, gather_pages, attend_pages, _reference),
    op=("batch_mla", "mla_plan"),
    make=_make,
    plan=_plan,
    samples=(
        {"kv_len": (65, 0, 130), "page_size": 16},
        {"kv_len": (65, 3), "qo_len": (2, 3), "causal": True, "num_heads": 8, "dtype": "float16"},
        {"kv_len": (64, 1), "kv_dtype": "float8_e4m3fn"},
    ),
    work=_work,
    tolerance={"float16": (3e-3, 3e-3), "bfloat16": (2e-2, 2e-2)},
    others=words(
        "return_lse return_lse_base_on_e ckv_scale_arr sinks kv_len page_table o_scale query kv_cache",
        "bmm1_scale bmm2_scale",
    ),
    description="Attention of the tokens of each request over a paged latent cache, with absorbed weights (DeepSeek).",
)
