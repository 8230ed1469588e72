"""Cases of the batch attention wrappers: flags, peers and eager torch; the rest is fi_core's description."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Planned
from fi_bench.cases import attention
from fi_bench.cases.common import block_table, requests
from fi_bench.described import described, public_backend, sizes_of
from fi_bench.errors import SkipError
from fi_bench.peers import FLASH_ATTENTION_3, flash_attention3

if TYPE_CHECKING:
    import torch


def _sizes(p: Namespace) -> dict[str, Any]:
    batch = requests(p)
    return {
        **sizes_of(p, "num_qo_heads", "num_kv_heads", "window_left", "kv_layout", "kv_dtype", dtype="q_dtype"),
        **(sizes_of(p, o_dtype="out_dtype") if p.out_dtype else {}),
        "kv_len": [r.kv_len for r in batch],
        "head_dim": p.head_dim_qk or 128,
        "head_dim_vo": p.head_dim_vo,
        "logits_soft_cap": p.logits_soft_cap or None,
    }


def _paged(p: Namespace) -> dict[str, Any]:
    return {"page_size": p.page_size or 16}


def _prefill(p: Namespace) -> dict[str, Any]:
    return {"qo_len": [r.qo_len for r in requests(p)], "causal": p.causal}


def _add(p: Namespace, x: Inputs) -> dict[str, Any]:
    """The lengths as lists; cu_q, cu_k and seqused_k for libraries with a varlen form."""
    import torch

    lengths: dict[str, list[int]] = {
        "qo_lens": [r.qo_len for r in requests(p)],
        "kv_lens": [r.kv_len for r in requests(p)],
    }

    def offsets(name: str) -> torch.Tensor:
        return torch.tensor([0, *lengths[name]], device=x.q.device).cumsum(0, dtype=torch.int32)

    used = torch.tensor(lengths["kv_lens"], dtype=torch.int32, device=x.q.device)
    causal = x.get("causal", p.s_qo > 1)
    return {**lengths, "cu_q": offsets("qo_lens"), "cu_k": offsets("kv_lens"), "seqused_k": used, "causal": causal}


def _each(x: Inputs) -> Iterator[Inputs]:
    """The requests as inputs of single-request attention, tokens first."""
    keys = x.paged_kv_cache if "paged_kv_cache" in x else (x.k, x.v)
    k, v = (part.transpose(-3, -2) if x.kv_layout == "HND" else part for part in keys)
    starts, tokens = x.kv_indptr.tolist(), x.cu_k.tolist()
    for b, q in enumerate(x.q.split(x.qo_lens)):
        if "paged_kv_cache" in x:
            pages = x.kv_indices[starts[b] : starts[b + 1]].long()
            own = [cache[pages].flatten(0, 1)[: x.kv_lens[b]] for cache in (k, v)]
        else:
            own = [part[tokens[b] : tokens[b + 1]] for part in (k, v)]
        yield Inputs(
            q=q,
            k=own[0],
            v=own[1],
            kv_layout="NHD",
            causal=x.causal,
            window_left=x.window_left,
            logits_soft_cap=x.get("logits_soft_cap"),
            sm_scale=x.sm_scale,
        )


def _torch(dtype: str | None = None) -> Callable[[Inputs], torch.Tensor]:
    """One scaled_dot_product_attention after another, in q's dtype or in this one."""

    def run(x: Inputs) -> torch.Tensor:
        import torch

        attend, found = attention.sdpa(), []
        for request in _each(x):
            if dtype:
                request.update({name: request[name].to(getattr(torch, dtype)) for name in "qkv"})
            found.append(attend(request))
        return torch.cat(found).to(x.o_data_type)

    return run


def _plan_flash_attention3(x: Inputs) -> Callable[[Inputs], torch.Tensor]:
    """Its varlen form; over a block table where keys are paged, which vLLM's build has."""
    function = flash_attention3()
    options: dict[str, Any] = {
        "softcap": x.get("logits_soft_cap") or 0.0,
        "causal": x.causal,
        "softmax_scale": x.sm_scale,
        "max_q": max(x.qo_lens),
        "max_k": max(x.kv_lens),
        "cu_q": x.cu_q,
        "cu_k": x.cu_k,
    }
    if x.window_left >= 0:
        options["window_size"] = [x.window_left, 0 if x.causal else -1]
    if "paged_kv_cache" in x:
        if "block_table" not in inspect.signature(FLASH_ATTENTION_3.load().flash_attn_varlen_func).parameters:
            raise SkipError("this build of flash_attention3 takes no block table")
        table = block_table(x.kv_indptr, x.kv_indices)
        options |= {"cu_k": None, "seqused_k": x.seqused_k, "block_table": table}

    def run(x: Inputs) -> torch.Tensor:
        keys = x.paged_kv_cache if "paged_kv_cache" in x else (x.k, x.v)
        out: torch.Tensor = function(x.q, *keys, **options)
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


def _unsupported_decode(backend: str, p: Namespace) -> str | None:
    if any(r.qo_len != p.s_qo for r in requests(p)):
        return "decode takes the same number of new tokens of every request: leave --s_qo to 1"
    return _unsupported(backend, p)


def _lengths(x: Inputs) -> dict[str, float]:
    means = {"q": sum(x.qo_lens) / len(x.qo_lens), "kv": sum(x.kv_lens) / len(x.kv_lens)}
    return {f"avg_actual_{name}_len": mean for name, mean in means.items()}


def _details(x: Inputs) -> dict[str, object]:
    """The lines of FlashInfer's benchmark. kv_cache is the pair of k and v; block_tables the page table as a rectangle,
    which the wrappers take as indices.
    """
    import torch

    lengths = {f"actual_seq_lens_{name}.flatten()": torch.tensor(x[f"{name}_lens"]) for name in ("qo", "kv")}
    found: dict[str, object] = {name.replace("_qo", "_q"): value for name, value in lengths.items()}
    if "paged_kv_cache" in x:
        pages = int(x.kv_indptr.diff().max())
        found |= {
            "num_pages_per_seq": pages,
            "total_num_pages": x.kv_indices.numel(),
            "kv_cache.shape": tuple(part.shape for part in x.paged_kv_cache),
            "kv_cache.stride()": tuple(part.stride() for part in x.paged_kv_cache),
            "block_tables.shape": torch.Size((len(x.kv_lens), pages)),
        }
    return {**found, "scale": x.sm_scale}


def _decode_backend(name: str, x: Inputs) -> dict[str, Any]:
    """FlashInfer's benchmark calls decode on tensor cores "fa2_tc", and decode without them "fa2"."""
    public = {"fa2_tc": "fa2", "cpu": "auto"}.get(name, name)
    return {"backend": public, "use_tensor_cores": name != "fa2" or x.q_len_per_req > 1}


def _case(function: str, *sizes: Callable[[Namespace], dict[str, Any]], **more: Any) -> Case:
    fields: dict[str, Any] = {
        "op": "batch_prefill",
        "also": ("prefill_plan",),
        "lengths": _lengths,
        "details": _details,
        "labels": ("cudnn", "trtllm-gen"),
        "unsupported": _unsupported,
        "peers": {"flash_attention3": Planned(_plan_flash_attention3, lambda run, x: run(x))},
        "torch": _torch(),
        "backend": public_backend,
    }
    return described(
        function,
        lambda p: {name: value for part in sizes for name, value in part(p).items()},
        None,
        add=_add,
        **(fields | more),
    )


CASES = (
    _case(
        "decode.BatchDecodeWithPagedKVCacheWrapper",
        _sizes,
        _paged,
        lambda p: {"q_len_per_req": p.s_qo},
        backend=_decode_backend,
        op="batch_decode",
        also=("decode_plan",),
        torch=_torch("float32"),  # scores that are rounded to 16 bits change the softmax by a percent
        lengths=lambda x: {"avg_actual_seq_len": _lengths(x)["avg_actual_kv_len"]},
        unsupported=_unsupported_decode,
    ),
    _case("prefill.BatchPrefillWithPagedKVCacheWrapper", _sizes, _paged, _prefill),
    _case("prefill.BatchPrefillWithRaggedKVCacheWrapper", _sizes, _prefill, labels=("cudnn", "cutlass")),
)
