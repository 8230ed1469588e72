"""The trace template of the MLA wrapper's `run`: reference, inputs, plan and work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Const, Planned, Scalar, Tensor, TraceTemplate, Var, Work
from fi_core.utils import canonicalize_torch_dtype, ceil_div

_SCALE = 192**-0.5  # of the widths before absorption, 128 + 64
_WORKSPACE = 64 << 20


def _reference(  # type: ignore[no-untyped-def]
    q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, kv_indices, kv_len_arr, sm_scale, causal=False,
    ckv_scale=None, kpe_scale=None,
):  # fmt: skip
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


def _make(
    draw: Draw,
    *,
    batch_size: int = 64,
    kv_len: int | Sequence[int] = 4096,
    qo_len: int | Sequence[int] = 1,
    num_heads: int = 16,
    page_size: int = 64,
    causal: bool = False,
    dtype: Any = "bfloat16",
    kv_dtype: Any = None,
) -> dict[str, Any]:
    kv_lens = [kv_len] * batch_size if isinstance(kv_len, int) else list(kv_len)
    qo_lens = [qo_len] * len(kv_lens) if isinstance(qo_len, int) else list(qo_len)
    counts = [ceil_div(n, page_size) for n in kv_lens]
    fp8 = canonicalize_torch_dtype(kv_dtype or dtype).itemsize == 1
    pages, tokens = sum(counts) + 1, sum(qo_lens)

    def cache(width: int) -> Any:
        rows = draw.pages((pages, page_size, width), kv_dtype or dtype)
        return rows if fp8 else draw.rows(rows)  # CUDA kernels require rows at multiples of 16 bytes

    scales = {"ckv_scale": 0.5, "kpe_scale": 1.5} if fp8 else {}
    return {
        "q_nope": draw.rows(draw.normal((tokens, num_heads, 512), dtype)),
        "q_pe": draw.rows(draw.normal((tokens, num_heads, 64), dtype)),
        "ckv_cache": cache(512),
        "kpe_cache": cache(64),
        "qo_indptr": draw.offsets(qo_lens), "kv_indptr": draw.offsets(counts),
        "kv_indices": draw.permutation(pages)[: pages - 1].int(), "kv_len_arr": draw.int32(kv_lens),
        "sm_scale": _SCALE, "causal": causal, **scales,
    }  # fmt: skip


def _plan(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    import torch

    planned = wrapper(torch.empty(_WORKSPACE, dtype=torch.uint8, device=x["q_nope"].device))
    planned.plan(
        x["qo_indptr"], x["kv_indptr"], x["kv_indices"], x["kv_len_arr"], x["q_nope"].shape[1], 512, 64,
        page_size=x["ckv_cache"].shape[1], causal=x["causal"], sm_scale=x["sm_scale"], q_data_type=x["q_nope"].dtype,
        kv_data_type=x["ckv_cache"].dtype,
    )  # fmt: skip
    return planned


def _work(x: Mapping[str, Any]) -> Work:
    """Each row of the cache and of the queries once; the output in their dtype."""
    heads, tokens = x["q_nope"].shape[1], x["qo_indptr"].diff().tolist()
    pairs = sum(n * kv_len for n, kv_len in zip(tokens, x["kv_len_arr"].tolist()))
    cache = int(x["kv_len_arr"].sum()) * 576 * x["ckv_cache"].element_size()
    return Work(2 * pairs * heads * 1088, cache + 2 * nbytes(x["q_nope"]) + nbytes(x["q_pe"]))


def _table(name: str, axis: str) -> Tensor:
    return Tensor([axis], param=name, dtype="int32")


PLANNED: Planned = {
    "qo_indptr": "_qo_indptr_buf",
    "kv_indptr": "_kv_indptr_buf",
    "kv_indices": "_kv_indices_buf",
    "kv_len_arr": "_kv_len_arr_buf",
    "sm_scale": "_sm_scale",
    "causal": "_causal",
}

TEMPLATE = TraceTemplate(
    "mla_paged",
    axes={
        "tokens": Var(), "num_pages": Var(), "num_kv_indices": Var(), "len_indptr": Var(), "batch_size": Var(),
        "num_heads": Const(abbrev="h"), "head_dim_ckv": Const(abbrev="ckv"), "head_dim_kpe": Const(abbrev="kpe"),
        "page_size": Const(abbrev="ps"),
    },
    inputs={
        "q_nope": Tensor(["tokens", "num_heads", "head_dim_ckv"]),
        "q_pe": Tensor(["tokens", "num_heads", "head_dim_kpe"]),
        "ckv_cache": Tensor(["num_pages", "page_size", "head_dim_ckv"]),
        "kpe_cache": Tensor(["num_pages", "page_size", "head_dim_kpe"]),
        "qo_indptr": _table("qo_indptr", "len_indptr"),
        "kv_indptr": _table("kv_indptr", "len_indptr"),
        "kv_indices": _table("kv_indices", "num_kv_indices"),
        "kv_len_arr": _table("kv_len_arr", "batch_size"),
        "sm_scale": Scalar("float32"),
        "causal": Scalar("bool", optional=True),
        "ckv_scale": Scalar("float32", optional=True),
        "kpe_scale": Scalar("float32", optional=True),
    },
    outputs={"output": Tensor(["tokens", "num_heads", "head_dim_ckv"], dtype_from="q_nope")},
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
    others=("return_lse", "return_lse_base_on_e", "ckv_scale_arr", "sinks", "kv_len", "page_table", "o_scale"),
    description="Attention of the tokens of each request over a paged latent cache, with absorbed weights (DeepSeek).",
)  # fmt: skip
