"""Trace templates of the wrappers for mixed batches: BatchAttention, POD and BatchPOD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.reference import attend_request, gather_pages
from fi_core.attention.wrappers.inputs import (
    attention_work,
    cache_of,
    kept,
    lengths_of,
    pages_of,
    plain_calls,
    query_of,
    workspace_of,
)
from fi_core.observe.draw import Draw
from fi_core.observe.trace import Const, Planned, Scalar, Tensor, TraceTemplate, Var, Work
from fi_core.utils import canonicalize_torch_dtype

if TYPE_CHECKING:
    import torch

Lengths = int | Sequence[int]
_HEADS: dict[str, Var | Const] = {
    "num_qo_heads": Const(abbrev="h"), "num_kv_heads": Const(abbrev="kv"), "head_dim": Const(abbrev="d"),
    "page_size": Const(abbrev="ps"),
}  # fmt: skip
_SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float16"}
_TOLERANCE = {"float16": (2e-3, 2e-3)}
_OPS = ("batch_prefill", "prefill_plan", "batch_decode", "decode_plan")


def _mixed_reference(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_len_arr, sm_scale, causal=False, kv_layout="NHD"
):
    import torch

    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for request in range(len(kv_len_arr)):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        k, v = (
            gather_pages(cache, kv_indptr, kv_indices, kv_len_arr, kv_len_arr, request, kv_layout)
            for cache in (k_cache, v_cache)
        )
        out[rows], lse[rows] = attend_request(q[rows], k, v, sm_scale, causal)
    return out, lse


def _halves_reference(  # type: ignore[no-untyped-def]
    q_p, q_d, k_cache, v_cache, kv_indptr_d, kv_indices_d, last_page_len_d, sm_scale, k_p=None, v_p=None,
    k_cache_p=None, v_cache_p=None, qo_indptr_p=None, kv_indptr_p=None, kv_indices_p=None, last_page_len_p=None,
    causal_p=False,
):  # fmt: skip
    import torch

    out_p = torch.zeros(q_p.shape, dtype=torch.float64, device=q_p.device)
    if k_p is not None:
        out_p, _ = attend_request(q_p, k_p, v_p, sm_scale, causal_p)
    else:
        assert qo_indptr_p is not None and last_page_len_p is not None
        for request in range(len(last_page_len_p)):
            rows = slice(int(qo_indptr_p[request]), int(qo_indptr_p[request + 1]))
            k, v = (
                gather_pages(cache, kv_indptr_p, kv_indices_p, last_page_len_p, None, request, "NHD")
                for cache in (k_cache_p, v_cache_p)
            )
            out_p[rows], _ = attend_request(q_p[rows], k, v, sm_scale, causal_p)
    out_d = torch.zeros(q_d.shape, dtype=torch.float64, device=q_d.device)
    for request in range(len(q_d)):
        k, v = (
            gather_pages(cache, kv_indptr_d, kv_indices_d, last_page_len_d, None, request, "NHD")
            for cache in (k_cache, v_cache)
        )
        out_d[request : request + 1], _ = attend_request(q_d[request : request + 1], k, v, sm_scale)
    return out_p, out_d


def _make_mixed(
    draw: Draw, *, batch_size: int = 60, kv_len: Lengths = 3072, num_prompts: int = 3, qo_len: Lengths = 1024,
    num_qo_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128, page_size: int = 16, causal: bool = True,
    dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """batch_size decode requests of these kv_lens, then prompts of these qo_lens."""
    prompts = lengths_of(qo_len, num_prompts)
    kv_lens = [*lengths_of(kv_len, batch_size), *prompts]
    qo_lens = [1] * (len(kv_lens) - len(prompts)) + prompts
    table = pages_of(draw, kv_lens, page_size)
    return {
        "q": query_of(draw, sum(qo_lens), num_qo_heads, head_dim, dtype),
        "kv_cache": cache_of(draw, [table], page_size, num_kv_heads, (head_dim, head_dim), dtype, "NHD"),
        "qo_indptr": draw.offsets(qo_lens), "kv_indptr": table["kv_indptr"], "kv_indices": table["kv_indices"],
        "kv_len_arr": draw.int32(kv_lens), "sm_scale": head_dim**-0.5, "causal": causal, "kv_layout": "NHD",
    }  # fmt: skip


def _plan_mixed(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    _, page_size, kv_heads, dim = x["kv_cache"][0].shape
    planned = wrapper(device=x["q"].device)
    planned.plan(
        x["qo_indptr"], x["kv_indptr"], x["kv_indices"], x["kv_len_arr"], x["q"].shape[1], kv_heads, dim, dim,
        page_size, causal=x["causal"], sm_scale=x["sm_scale"], q_data_type=x["q"].dtype,
        kv_data_type=x["kv_cache"][0].dtype,
    )  # fmt: skip
    return planned


def _work_mixed(x: Mapping[str, Any]) -> Work:
    pairs = zip(x["qo_indptr"].diff().tolist(), x["kv_len_arr"].tolist())
    return attention_work([(x["q"], x["kv_cache"][0], list(pairs), x["causal"])], with_lse=True)


def _tables(suffix: str, prefill: bool) -> dict[str, Tensor]:
    axes = {"kv_indptr": "len_indptr", "kv_indices": "num_kv_indices", "last_page_len": "batch_size"}
    names = {**({"qo_indptr": "len_indptr"} if prefill else {}), **axes}
    return {f"{name}{suffix}": Tensor([axis + suffix], dtype="int32") for name, axis in names.items()}


def _caches(param: str, suffix: str = "") -> dict[str, Tensor]:
    shape = [f"num_pages{suffix}", "page_size", "num_kv_heads", "head_dim"]
    return {f"{name}{suffix}": Tensor(shape, param=param, tuple_idx=i) for i, name in enumerate(("k_cache", "v_cache"))}


_SCORES: dict[str, Tensor | Scalar] = {"sm_scale": Scalar(), "causal": Scalar("bool", optional=True)}
MIXED = TraceTemplate(
    "gqa_paged_mixed",
    axes={
        "total_q": Var(), "num_pages": Var(), "num_kv_indices": Var(), "len_indptr": Var(), "batch_size": Var(),
        **_HEADS,
    },
    inputs={
        "q": Tensor(["total_q", "num_qo_heads", "head_dim"]),
        **_caches("kv_cache"),
        "qo_indptr": Tensor(["len_indptr"], dtype="int32"),
        "kv_indptr": Tensor(["len_indptr"], dtype="int32"),
        "kv_indices": Tensor(["num_kv_indices"], dtype="int32"),
        "kv_len_arr": Tensor(["batch_size"], dtype="int32"),
        **_SCORES,
        "kv_layout": Scalar("string", optional=True),
    },
    outputs={
        "output": Tensor(["total_q", "num_qo_heads", "head_dim"], dtype_from="q"),
        "lse": Tensor(["total_q", "num_qo_heads"], dtype="float32"),
    },
    constraints=("len_indptr == batch_size + 1",),
    reference=(attend_request, gather_pages, _mixed_reference),
    op=_OPS,
    make=_make_mixed,
    plan=_plan_mixed,
    samples=(
        {**_SMALL, "kv_len": (37, 1, 16), "qo_len": (20, 3)},
        {**_SMALL, "kv_len": (9, 40), "qo_len": (70,), "causal": False, "page_size": 5},
    ),
    work=_work_mixed,
    tolerance=_TOLERANCE,
    description="Attention of decode requests and prompts in one batch over a paged KV cache.",
)  # fmt: skip


def _decode_of(draw: Draw, kv_lens: list[int], page_size: int) -> dict[str, torch.Tensor]:
    table = pages_of(draw, kv_lens, page_size)
    return {
        "kv_indptr_d": table["kv_indptr"],
        "kv_indices_d": table["kv_indices"],
        "last_page_len_d": table["kv_last_page_len"],
    }


def _make_pod(
    draw: Draw, *, batch_size: int = 60, kv_len: Lengths = 3072, qo_len: int = 2048, num_qo_heads: int = 32,
    num_kv_heads: int = 8, head_dim: int = 128, page_size: int = 16, causal: bool = True, dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """A prompt of qo_len, and batch_size decode requests of these kv_lens."""
    kv_lens = lengths_of(kv_len, batch_size)
    tables = _decode_of(draw, kv_lens, page_size)
    plain = {"kv_indices": tables["kv_indices_d"], "kv_indptr": tables["kv_indptr_d"],
             "kv_last_page_len": tables["last_page_len_d"]}  # fmt: skip
    keys = [draw.rows(draw.normal((qo_len, num_kv_heads, head_dim), canonicalize_torch_dtype(dtype))) for _ in range(2)]
    return {
        "q_p": query_of(draw, qo_len, num_qo_heads, head_dim, dtype), "k_p": keys[0], "v_p": keys[1],
        "q_d": query_of(draw, len(kv_lens), num_qo_heads, head_dim, dtype),
        "paged_kv_cache_d": cache_of(draw, [plain], page_size, num_kv_heads, (head_dim, head_dim), dtype, "NHD"),
        **tables, "sm_scale": head_dim**-0.5, "causal_p": causal,
    }  # fmt: skip


def _plan_pod(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    _, page_size, kv_heads, dim = x["paged_kv_cache_d"][0].shape
    planned, dtype = wrapper(workspace_of(x["q_d"])), x["q_d"].dtype
    planned.plan(
        x["kv_indptr_d"], x["kv_indices_d"], x["last_page_len_d"], x["q_d"].shape[1], kv_heads, dim, page_size,
        q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    return planned


def _decode_lengths(x: Mapping[str, Any]) -> list[tuple[int, int]]:
    page_size, pages = x["paged_kv_cache_d"][0].shape[1], x["kv_indptr_d"].diff().tolist()
    return [(1, (n - 1) * page_size + last if n else 0) for n, last in zip(pages, x["last_page_len_d"].tolist())]


def _work_pod(x: Mapping[str, Any]) -> Work:
    prompt = (x["q_p"], x["k_p"], [(len(x["q_p"]), len(x["k_p"]))], x["causal_p"])
    return attention_work([prompt, (x["q_d"], x["paged_kv_cache_d"][0], _decode_lengths(x), False)])


_DECODE_AXES: dict[str, Var | Const] = {
    "num_d": Var(), "num_pages": Var(), "len_indptr_d": Var(), "num_kv_indices_d": Var(), "batch_size_d": Var(),
}  # fmt: skip
_HALVES = {
    "output_p": Tensor(["num_p", "num_qo_heads", "head_dim"], dtype_from="q_p"),
    "output_d": Tensor(["num_d", "num_qo_heads", "head_dim"], dtype_from="q_d"),
}
POD = TraceTemplate(
    "gqa_pod",
    axes={"num_p": Var(), "num_kv_p": Var(), **_DECODE_AXES, **_HEADS},
    inputs={
        "q_p": Tensor(["num_p", "num_qo_heads", "head_dim"]),
        "k_p": Tensor(["num_kv_p", "num_kv_heads", "head_dim"]),
        "v_p": Tensor(["num_kv_p", "num_kv_heads", "head_dim"]),
        "q_d": Tensor(["num_d", "num_qo_heads", "head_dim"]),
        **_caches("paged_kv_cache_d"),
        **_tables("_d", False),
        "sm_scale": Scalar(),
        "causal_p": Scalar("bool", optional=True),
    },
    outputs=_HALVES,
    reference=(attend_request, gather_pages, _halves_reference),
    op=(*_OPS, "single_attention"),
    make=_make_pod,
    plan=_plan_pod,
    samples=({**_SMALL, "kv_len": (37, 1, 16), "qo_len": 20}, {**_SMALL, "kv_len": (9,), "qo_len": 5, "causal": False}),
    work=_work_pod,
    tolerance=_TOLERANCE,
    description="Attention of a prompt over its K and V, and of decode requests over a paged KV cache.",
)


def _make_batch_pod(
    draw: Draw, *, batch_size: int = 60, kv_len: Lengths = 3072, num_prompts: int = 3, qo_len: Lengths = 1024,
    num_qo_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128, page_size: int = 16, causal: bool = True,
    dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Prompts of these qo_lens, and batch_size decode requests of these kv_lens."""
    kv_lens, qo_lens = lengths_of(kv_len, batch_size), lengths_of(qo_len, num_prompts)
    dims = (head_dim, head_dim)
    decode, prompts = (pages_of(draw, lens, page_size) for lens in (kv_lens, qo_lens))
    return {
        "q_p": query_of(draw, sum(qo_lens), num_qo_heads, head_dim, dtype),
        "paged_kv_cache_p": cache_of(draw, [prompts], page_size, num_kv_heads, dims, dtype, "NHD"),
        "q_d": query_of(draw, len(kv_lens), num_qo_heads, head_dim, dtype),
        "paged_kv_cache_d": cache_of(draw, [decode], page_size, num_kv_heads, dims, dtype, "NHD"),
        "qo_indptr_p": draw.offsets(qo_lens),
        "kv_indptr_p": prompts["kv_indptr"], "kv_indices_p": prompts["kv_indices"],
        "last_page_len_p": prompts["kv_last_page_len"],
        "kv_indptr_d": decode["kv_indptr"], "kv_indices_d": decode["kv_indices"],
        "last_page_len_d": decode["kv_last_page_len"],
        "sm_scale": head_dim**-0.5, "causal_p": causal,
    }  # fmt: skip


def _plan_batch_pod(wrapper: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    import torch

    _, page_size, kv_heads, dim = x["paged_kv_cache_d"][0].shape
    planned, dtype = wrapper(workspace_of(x["q_d"])), x["q_d"].dtype
    planned.plan(
        x["qo_indptr_p"].cpu(), x["kv_indptr_p"].cpu(), x["kv_indices_p"], x["last_page_len_p"],
        torch.arange(len(x["q_d"]) + 1, dtype=torch.int32), x["kv_indptr_d"].cpu(), x["kv_indices_d"],
        x["last_page_len_d"], num_qo_heads=x["q_d"].shape[1], num_kv_heads=kv_heads, head_dim=dim, page_size=page_size,
        q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    return planned


def _work_batch_pod(x: Mapping[str, Any]) -> Work:
    prompts = [(n, n) for n in x["qo_indptr_p"].diff().tolist()]
    return attention_work([
        (x["q_p"], x["paged_kv_cache_p"][0], prompts, x["causal_p"]),
        (x["q_d"], x["paged_kv_cache_d"][0], _decode_lengths(x), False),
    ])  # fmt: skip


BATCH_POD = TraceTemplate(
    "gqa_paged_batch_pod",
    axes={
        "num_p": Var(), "num_pages_p": Var(), "len_indptr_p": Var(), "num_kv_indices_p": Var(), "batch_size_p": Var(),
        **_DECODE_AXES, **_HEADS,
    },
    inputs={
        "q_p": Tensor(["num_p", "num_qo_heads", "head_dim"]),
        **_caches("paged_kv_cache_p", "_p"),
        "q_d": Tensor(["num_d", "num_qo_heads", "head_dim"]),
        **_caches("paged_kv_cache_d"),
        **_tables("_p", True),
        **_tables("_d", False),
        "sm_scale": Scalar(),
        "causal_p": Scalar("bool", optional=True),
    },
    outputs=_HALVES,
    reference=(attend_request, gather_pages, _halves_reference),
    op=_OPS,
    make=_make_batch_pod,
    plan=_plan_batch_pod,
    samples=({**_SMALL, "kv_len": (37, 1, 16), "qo_len": (20, 3)},),
    work=_work_batch_pod,
    tolerance=_TOLERANCE,
    description="Attention of prompts, and of decode requests, over paged KV caches.",
)  # fmt: skip


_OTHERS = ("k_scale", "v_scale", "q_scale", "kv_cache_sf", "kv_cache_sf_p", "kv_cache_sf_d", "variant_args",
           "return_lse")  # fmt: skip
mixed = plain_calls(MIXED, *_OTHERS)
_OTHERS_POD = (
    "custom_mask_p", "packed_custom_mask_p", "kv_layout_p", "pos_encoding_mode_p", "sm_scale_p",
    "window_left_p", "return_lse_p", "return_lse_d", "custom_mask_d", "packed_custom_mask_d", "kv_layout_d",
    "pos_encoding_mode_d", "sm_scale_d", "window_left_d",
)  # fmt: skip
pod = plain_calls(POD, *_OTHERS, *_OTHERS_POD)
batch_pod = plain_calls(BATCH_POD, *_OTHERS, "custom_mask_p", "packed_custom_mask_p")
PLANNED_MIXED: Planned = kept(
    "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "sm_scale", "causal", "kv_layout", "covered"
)
_OF_DECODE = ("kv_indptr_d", "kv_indices_d", "last_page_len_d", "sm_scale", "kv_layout", "covered")
PLANNED_POD: Planned = kept(*_OF_DECODE)
PLANNED_BATCH_POD: Planned = kept(*_OF_DECODE, "qo_indptr_p", "kv_indptr_p", "kv_indices_p", "last_page_len_p")
