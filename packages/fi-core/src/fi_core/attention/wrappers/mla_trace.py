"""The trace template of the MLA wrapper's `run`: reference, inputs, plan and work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fi_core.attention.wrappers.inputs import lengths_of
from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Planned, Scalar, Tensor, TraceTemplate, Work, axes_of, options, sized, tensors, words
from fi_core.runtime.lazy import torch
from fi_core.utils import canonicalize_torch_dtype, ceil_div

_SCALE = 192**-0.5  # of the widths before absorption, 128 + 64
_WORKSPACE = 64 << 20


def _reference(  # type: ignore[no-untyped-def]
    q_nope,
    q_pe,
    ckv_cache,
    kpe_cache,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_len_arr,
    sm_scale,
    causal=False,
    ckv_scale=None,
    kpe_scale=None,
):
    import torch

    out = torch.zeros(q_nope.shape, dtype=torch.float64, device=q_nope.device)
    for request in range(len(kv_len_arr)):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        pages = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
        kv_len = int(kv_len_arr[request])
        ckv, kpe = (x[pages].flatten(0, 1)[:kv_len].double() for x in (ckv_cache, kpe_cache))
        ckv, kpe = (x if s is None else x * s for x, s in ((ckv, ckv_scale), (kpe, kpe_scale)))
        score = torch.einsum("qhd,kd->qhk", q_nope[rows].double(), ckv)
        score = (score + torch.einsum("qhd,kd->qhk", q_pe[rows].double(), kpe)) * sm_scale
        if causal:
            last = torch.arange(score.shape[0], device=score.device) + kv_len - score.shape[0]
            score = score.masked_fill(torch.arange(kv_len, device=score.device) > last[:, None, None], -torch.inf)
        weight = torch.where((score > -torch.inf).any(-1, keepdim=True), score.softmax(-1), 0.0)
        out[rows] = torch.einsum("qhk,kd->qhd", weight, ckv)
    return out


@sized(batch_size=64, kv_len=4096, qo_len=1, num_heads=16, page_size=64, causal=False, dtype="bfloat16", kv_dtype=None)
def _make(draw: Draw, s: Any) -> dict[str, Any]:
    kv_lens = lengths_of(s.kv_len, s.batch_size)
    qo_lens = lengths_of(s.qo_len, len(kv_lens))
    counts = [ceil_div(n, s.page_size) for n in kv_lens]
    fp8 = canonicalize_torch_dtype(s.kv_dtype or s.dtype).itemsize == 1
    pages, tokens = sum(counts) + 1, sum(qo_lens)

    def cache(width: int) -> Any:
        rows = draw.pages((pages, s.page_size, width), s.kv_dtype or s.dtype)
        return rows if fp8 else draw.rows(rows)  # CUDA kernels require rows at multiples of 16 bytes

    q = {n: draw.rows(draw.normal((tokens, s.num_heads, w), s.dtype)) for n, w in (("q_nope", 512), ("q_pe", 64))}
    tables = {"ckv_cache": cache(512), "kpe_cache": cache(64), "qo_indptr": draw.offsets(qo_lens)}
    tables |= {"kv_indptr": draw.offsets(counts), "kv_indices": draw.permutation(pages)[: pages - 1].int()}
    scales = {"ckv_scale": 0.5, "kpe_scale": 1.5} if fp8 else {}
    return {**q, **tables, "kv_len_arr": draw.int32(kv_lens), "sm_scale": _SCALE, "causal": s.causal, **scales}


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


_TABLES = {"qo_indptr": "len_indptr", "kv_indptr": "len_indptr"}
_TABLES |= {"kv_indices": "num_kv_indices", "kv_len_arr": "batch_size"}
PLANNED: Planned = {name: f"_{name}_buf" for name in _TABLES} | {"sm_scale": "_sm_scale", "causal": "_causal"}
_INPUTS: dict[str, Tensor | Scalar] = {
    **tensors(q_nope="tokens num_heads head_dim_ckv", q_pe="tokens num_heads head_dim_kpe"),
    **tensors(ckv_cache="num_pages page_size head_dim_ckv", kpe_cache="num_pages page_size head_dim_kpe"),
    **{name: Tensor([axis], param=name, dtype="int32") for name, axis in _TABLES.items()},
    "sm_scale": Scalar(),
    **options(bool="causal", float32="ckv_scale kpe_scale"),
}
TEMPLATE = TraceTemplate(
    "mla_paged",
    axes=axes_of(_INPUTS, num_heads="h", head_dim_ckv="ckv", head_dim_kpe="kpe", page_size="ps"),
    inputs=_INPUTS,
    outputs=tensors({"dtype_from": "q_nope"}, output="tokens num_heads head_dim_ckv"),
    constraints=("len_indptr == batch_size + 1",),
    reference=_reference,
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
