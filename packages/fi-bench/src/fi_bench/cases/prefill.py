"""The cases of batch prefill: keys in pages, and keys one request after another."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fi_bench.baselines import FLASH_ATTENTION_3, flash_attention3
from fi_bench.case import Case, Inputs, Outputs, Planned, Work, dtype_of
from fi_bench.cases import attention
from fi_bench.cases.common import nbytes, normal, page_table, requests
from fi_bench.described import description_of
from fi_bench.errors import SkipError
from fi_core.testing.attention import attention_flops_with_actual_seq_lens

if TYPE_CHECKING:
    import torch

_WORKSPACE = 128 << 20
_PAGE_SIZE = 16  # the default of --page_size


def _common(p: Namespace, device: Any, generator: Any) -> dict[str, Any]:
    import torch

    batch = requests(p)
    dim = p.head_dim_qk or 128
    q_dtype = dtype_of(p.q_dtype)
    qo_lens, kv_lens = [r.qo_len for r in batch], [r.kv_len for r in batch]
    bounds = {
        name: torch.tensor([0, *lens]).cumsum(0).to(torch.int32).to(device)
        for name, lens in (("qo_indptr", qo_lens), ("cu_kv", kv_lens))
    }
    return {
        "q": normal((sum(qo_lens), p.num_qo_heads, dim), q_dtype, device, generator),
        "qo_lens": qo_lens,
        "kv_lens": kv_lens,
        **bounds,
        "dims": (dim, p.head_dim_vo or dim),
        "kv_heads": p.num_kv_heads,
        "kv_layout": p.kv_layout,
        "causal": p.causal,
        "window_left": p.window_left,
        "soft_cap": p.logits_soft_cap or None,
        "out_dtype": dtype_of(p.out_dtype) if p.out_dtype else q_dtype,
    }


def _make_paged(p: Namespace, device: Any, generator: Any) -> Inputs:
    """Caches [pages, page_size, kv heads, dim], or with heads first."""
    import torch

    x = _common(p, device, generator)
    page_size = p.page_size or _PAGE_SIZE
    table = page_table(x["kv_lens"], page_size, device, generator)
    slots = (page_size, p.num_kv_heads) if p.kv_layout == "NHD" else (p.num_kv_heads, page_size)
    k, v = (normal((table["num_pages"], *slots, dim), dtype_of(p.kv_dtype), device, generator) for dim in x["dims"])
    kv_len = torch.tensor(x["kv_lens"], dtype=torch.int32, device=device)
    del table["num_pages"]
    return Inputs(x, k=k, v=v, kv_len=kv_len, page_size=page_size, **table)


def _make_ragged(p: Namespace, device: Any, generator: Any) -> Inputs:
    """k and v [tokens, kv heads, dim], or with heads first."""
    x = _common(p, device, generator)
    tokens = sum(x["kv_lens"])
    rows = (tokens, p.num_kv_heads) if p.kv_layout == "NHD" else (p.num_kv_heads, tokens)
    k, v = (normal((*rows, dim), dtype_of(p.kv_dtype), device, generator) for dim in x["dims"])
    return Inputs(x, k=k, v=v)


def _each(x: Inputs) -> Iterator[Inputs]:
    """The requests as inputs of single-request attention, tokens first."""
    starts, k, v = [0] * len(x.kv_lens), x.k, x.v
    if "kv_indptr" in x:
        starts = x.kv_indptr.tolist()
        if x.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
    elif x.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    tokens = x.cu_kv.tolist()
    for b, q in enumerate(x.q.split(x.qo_lens)):
        if "kv_indptr" in x:
            pages = x.kv_indices[starts[b] : starts[b + 1]].long()
            own = [cache[pages].flatten(0, 1)[: x.kv_lens[b]] for cache in (k, v)]
        else:
            own = [part[tokens[b] : tokens[b + 1]] for part in (k, v)]
        yield Inputs(
            q=q, k=own[0], v=own[1], kv_layout="NHD", causal=x.causal, window_left=x.window_left,
            logits_soft_cap=x.soft_cap, sm_scale=x.dims[0] ** -0.5,
        )  # fmt: skip


def _reference(x: Inputs) -> Outputs:
    """The reference of single-request attention, one request after another."""
    import torch

    template = description_of("prefill.single_prefill_with_kv_cache", {"kv_layout": "NHD"})
    return {"out": torch.cat([template.expected(request)["output"] for request in _each(x)])}


def _torch(x: Inputs) -> torch.Tensor:
    """One scaled_dot_product_attention after another."""
    import torch

    attend = attention.sdpa()
    return torch.cat([attend(request) for request in _each(x)]).to(x.out_dtype)


def _planned(wrapper: Callable[..., Any], x: Inputs, backend: str, *tables: Any) -> Any:
    """Plans with page tables on the host, as engines have them."""
    import torch

    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=x.q.device)
    planned = wrapper(workspace, x.kv_layout, backend={"cpu": "auto"}.get(backend, backend))
    planned.plan(
        x.qo_indptr.cpu(), *tables, head_dim_vo=x.dims[1], causal=x.causal, window_left=x.window_left,
        logits_soft_cap=x.soft_cap, q_data_type=x.q.dtype, kv_data_type=x.k.dtype, o_data_type=x.out_dtype,
    )  # fmt: skip
    return planned


def _plan_paged(wrapper: Callable[..., Any], x: Inputs, backend: str) -> Any:
    tables = (x.kv_indptr.cpu(), x.kv_indices, x.kv_last_page_len.cpu())
    return _planned(wrapper, x, backend, *tables, x.q.shape[1], x.kv_heads, x.dims[0], x.page_size)


def _plan_ragged(wrapper: Callable[..., Any], x: Inputs, backend: str) -> Any:
    return _planned(wrapper, x, backend, x.cu_kv.cpu(), x.q.shape[1], x.kv_heads, x.dims[0])


def _plan_flash_attention3(x: Inputs) -> Callable[[Inputs], torch.Tensor]:
    """Its varlen form; over a block table where keys are paged, which vLLM's build has."""
    import torch

    function = flash_attention3()
    options: dict[str, Any] = {
        "softcap": x.soft_cap or 0.0, "causal": x.causal, "softmax_scale": x.dims[0] ** -0.5, "max_q": max(x.qo_lens),
        "max_k": max(x.kv_lens), "cu_q": x.qo_indptr, "cu_k": x.cu_kv,
    }  # fmt: skip
    if x.window_left >= 0:
        options["window_size"] = [x.window_left, 0 if x.causal else -1]
    if "kv_indptr" in x:
        if "block_table" not in inspect.signature(FLASH_ATTENTION_3.load().flash_attn_varlen_func).parameters:
            raise SkipError("this build of flash_attention3 takes no block table")
        pages = x.kv_indptr.diff().tolist()
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=x.q.device)
        for row, own in zip(table, x.kv_indices.split(pages), strict=True):
            row[: len(own)] = own
        options |= {"cu_k": None, "seqused_k": x.kv_len, "block_table": table}

    def run(x: Inputs) -> torch.Tensor:
        out: torch.Tensor = function(x.q, x.k, x.v, **options)
        return out

    return run


def _unsupported(backend: str, p: Namespace) -> str | None:
    if p.s_qo > p.s_kv and not p.case:
        return f"--s_qo must be at most --s_kv ({p.s_kv}), got {p.s_qo}"
    if p.num_qo_heads % p.num_kv_heads:
        return f"--num_qo_heads must be a multiple of --num_kv_heads ({p.num_kv_heads}), got {p.num_qo_heads}"
    if backend == "flash_attention3" and p.kv_layout != "NHD":
        return "flash_attention3 takes --kv_layout NHD"
    if backend == "torch" and (p.logits_soft_cap or p.q_dtype.startswith("fp8")):
        return "torch's scaled_dot_product_attention has no soft cap and no fp8 query"
    return None


def _work(p: Namespace, x: Inputs) -> Work:
    """Pairs as the usual formula counts them; each token of the requests once."""
    (dim_qk, dim_vo), heads = x.dims, x.q.shape[1]
    flops = attention_flops_with_actual_seq_lens(x.qo_lens, x.kv_lens, dim_qk, dim_vo, heads, x.causal)
    keys = sum(x.kv_lens) * x.kv_heads * (dim_qk + dim_vo) * x.k.dtype.itemsize
    return Work(flops, nbytes(x.q) + keys + x.q.shape[0] * heads * dim_vo * x.out_dtype.itemsize)


def _lengths(x: Inputs) -> dict[str, float]:
    return {
        "avg_actual_q_len": sum(x.qo_lens) / len(x.qo_lens),
        "avg_actual_kv_len": sum(x.kv_lens) / len(x.kv_lens),
    }


def _case(routine: str, make: Any, plan: Any, call: Callable[[Any, Inputs], Any]) -> Case:
    return Case(
        routine=routine,
        function=f"prefill.{routine}",
        op="batch_prefill",
        also=("prefill_plan",),
        make=make,
        plan=plan,
        call=call,
        outputs=lambda x, returned: {"out": returned},
        reference=_reference,
        work=_work,
        torch=_torch,
        rivals={"flash_attention3": Planned(_plan_flash_attention3, lambda run, x: run(x))},
        lengths=_lengths,
        unsupported=_unsupported,
    )


CASES = (
    _case(
        "BatchPrefillWithPagedKVCacheWrapper", _make_paged, _plan_paged, lambda planned, x: planned.run(x.q, (x.k, x.v))
    ),
    _case(
        "BatchPrefillWithRaggedKVCacheWrapper",
        _make_ragged,
        _plan_ragged,
        lambda planned, x: planned.run(x.q, x.k, x.v),
    ),
)
