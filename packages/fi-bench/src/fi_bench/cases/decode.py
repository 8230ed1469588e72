"""The case of batch decode over a paged cache."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.baselines import FLASH_ATTENTION_3, flash_attention3
from fi_bench.case import Case, Inputs, Outputs, Planned, Work, dtype_of
from fi_bench.cases.common import nbytes, normal, page_table, requests
from fi_bench.errors import SkipError
from fi_core.testing.attention import attention_flops_with_actual_seq_lens

if TYPE_CHECKING:
    import torch

_WORKSPACE = 128 << 20
_PAGE_SIZE = 16  # the default of --page_size


def _make(p: Namespace, device: Any, generator: Any) -> Inputs:
    """q [requests * s_qo, heads, dim]; caches [pages, page_size, kv heads, dim], or with heads first."""
    import torch

    kv_lens = [r.kv_len for r in requests(p)]
    dim = p.head_dim_qk or 128
    page_size = p.page_size or _PAGE_SIZE
    q_dtype, kv_dtype = dtype_of(p.q_dtype), dtype_of(p.kv_dtype)
    table = page_table(kv_lens, page_size, device, generator)
    slots = (page_size, p.num_kv_heads) if p.kv_layout == "NHD" else (p.num_kv_heads, page_size)
    pool = (table["num_pages"], *slots)
    return Inputs(
        q=normal((len(kv_lens) * p.s_qo, p.num_qo_heads, dim), q_dtype, device, generator),
        k_cache=normal((*pool, dim), kv_dtype, device, generator),
        v_cache=normal((*pool, p.head_dim_vo or dim), kv_dtype, device, generator),
        kv_indptr=table["kv_indptr"],
        kv_indices=table["kv_indices"],
        kv_last_page_len=table["kv_last_page_len"],
        kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        kv_lens=kv_lens,
        q_len=p.s_qo,
        page_size=page_size,
        kv_layout=p.kv_layout,
        window_left=p.window_left,
        soft_cap=p.logits_soft_cap or None,
        out_dtype=dtype_of(p.out_dtype) if p.out_dtype else q_dtype,
    )


def _rows(x: Inputs, dtype: torch.dtype) -> Outputs:
    """Softmax attention of one request after another in the given precision; LSE in base 2."""
    import torch

    outs, starts = [], x.kv_indptr.tolist()
    group = x.q.shape[1] // (x.k_cache.shape[2] if x.kv_layout == "NHD" else x.k_cache.shape[1])
    for b, q in enumerate(x.q.split(x.q_len)):
        pages, kv_len = x.kv_indices[starts[b] : starts[b + 1]].long(), x.kv_lens[b]
        k, v = (cache[pages] for cache in (x.k_cache, x.v_cache))
        if x.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        k, v = (part.flatten(0, 1)[:kv_len].to(dtype).repeat_interleave(group, 1) for part in (k, v))
        score = torch.einsum("ihd,jhd->ihj", q.to(dtype), k) * q.shape[2] ** -0.5
        if x.soft_cap:
            score = x.soft_cap * torch.tanh(score / x.soft_cap)
        key = torch.arange(kv_len, device=q.device)
        own = (torch.arange(x.q_len, device=q.device) + kv_len - x.q_len).unsqueeze(1)
        seen = key <= own
        if x.window_left >= 0:
            seen &= key >= own - x.window_left
        weight = score.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1).nan_to_num(0.0)
        outs.append(torch.einsum("ihj,jhd->ihd", weight, v))
    return {"out": torch.cat(outs)}


def _reference(x: Inputs) -> Outputs:
    import torch

    return _rows(x, torch.float64)


def _torch(x: Inputs) -> torch.Tensor:
    """In fp32: scores rounded to 16 bits change the softmax by a percent."""
    import torch

    return _rows(x, torch.float32)["out"].to(x.out_dtype)


def _plan(wrapper: Callable[..., Any], x: Inputs, backend: str) -> Any:
    """Plans with page tables on the host, as engines have them."""
    import torch

    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=x.q.device)
    own = {"fa2": "fa2", "fa2_tc": "fa2", "cpu": "auto"}.get(backend, backend)
    planned = wrapper(workspace, x.kv_layout, use_tensor_cores=backend != "fa2" or x.q_len > 1, backend=own)
    kv_heads = x.k_cache.shape[2] if x.kv_layout == "NHD" else x.k_cache.shape[1]
    several = {"q_len_per_req": x.q_len} if x.q_len > 1 else {}  # unknown to older versions of FlashInfer
    planned.plan(
        x.kv_indptr.cpu(), x.kv_indices, x.kv_last_page_len.cpu(), x.q.shape[1], kv_heads, x.q.shape[2], x.page_size,
        window_left=x.window_left, logits_soft_cap=x.soft_cap, q_data_type=x.q.dtype, kv_data_type=x.k_cache.dtype,
        o_data_type=x.out_dtype, **several,
    )  # fmt: skip
    return planned


def _run(planned: Any, x: Inputs) -> Any:
    return planned.run(x.q, (x.k_cache, x.v_cache))


def _plan_flash_attention3(x: Inputs) -> Callable[[Inputs], torch.Tensor]:
    """Its varlen form over a block table, which vLLM's build has."""
    import torch

    if "block_table" not in inspect.signature(FLASH_ATTENTION_3.load().flash_attn_varlen_func).parameters:
        raise SkipError("this build of flash_attention3 takes no block table")
    function = flash_attention3()
    pages = x.kv_indptr.diff().tolist()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=x.q.device)
    for row, own in zip(table, x.kv_indices.split(pages), strict=True):
        row[: len(own)] = own
    cu_q = torch.arange(len(pages) + 1, dtype=torch.int32, device=x.q.device) * x.q_len
    options: dict[str, Any] = {"softcap": x.soft_cap or 0.0, "causal": True, "softmax_scale": x.q.shape[2] ** -0.5}
    if x.window_left >= 0:
        options["window_size"] = [x.window_left, 0]

    def run(x: Inputs) -> torch.Tensor:
        out: torch.Tensor = function(
            x.q, x.k_cache, x.v_cache, cu_q=cu_q, cu_k=None, max_q=x.q_len, max_k=max(x.kv_lens), seqused_k=x.kv_len,
            block_table=table, **options,
        )  # fmt: skip
        return out

    return run


def _unsupported(backend: str, p: Namespace) -> str | None:
    if any(r.qo_len != p.s_qo for r in requests(p)):
        return "decode takes the same number of new tokens of every request: leave --s_qo to 1"
    if p.s_qo > p.s_kv and not p.case:
        return f"--s_qo must be at most --s_kv ({p.s_kv}), got {p.s_qo}"
    if p.num_qo_heads % p.num_kv_heads:
        return f"--num_qo_heads must be a multiple of --num_kv_heads ({p.num_kv_heads}), got {p.num_qo_heads}"
    if backend == "flash_attention3" and p.kv_layout != "NHD":
        return "flash_attention3 takes --kv_layout NHD"
    return None


def _work(p: Namespace, x: Inputs) -> Work:
    """Each cached token once, q and the output once; pairs as the usual formula counts them."""
    dim_qk, dim_vo, heads = x.q.shape[2], x.v_cache.shape[3], x.q.shape[1]
    flops = attention_flops_with_actual_seq_lens(
        [x.q_len] * len(x.kv_lens), x.kv_lens, dim_qk, dim_vo, heads, x.q_len > 1
    )
    token = nbytes(x.k_cache, x.v_cache) // (x.k_cache.shape[0] * x.page_size)
    out_bytes = x.q.shape[0] * heads * dim_vo * x.out_dtype.itemsize
    return Work(flops, sum(x.kv_lens) * token + nbytes(x.q) + out_bytes)


CASES = (
    Case(
        routine="BatchDecodeWithPagedKVCacheWrapper",
        function="decode.BatchDecodeWithPagedKVCacheWrapper",
        op="batch_decode",
        also=("decode_plan",),
        make=_make,
        plan=_plan,
        call=_run,
        outputs=lambda x, returned: {"out": returned},
        reference=_reference,
        work=_work,
        torch=_torch,
        rivals={"flash_attention3": Planned(_plan_flash_attention3, lambda run, x: run(x))},
        lengths=lambda x: {"avg_actual_seq_len": sum(x.kv_lens) / len(x.kv_lens)},
        unsupported=_unsupported,
    ),
)
