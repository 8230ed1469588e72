"""The case of multi-head latent attention over a paged cache, with the weights absorbed (DeepSeek)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Planned, Work, dtype_of
from fi_bench.cases.common import block_table, nbytes, normal, page_table, requests
from fi_bench.peers import FLASH_MLA

if TYPE_CHECKING:
    import torch

_SCALE = 192**-0.5  # of the widths before absorption, 128 + 64
_FP8_SCALE = 0.5  # of an e4m3 cache
_SCORES_AT_ONCE = 1 << 26
_WORKSPACE = 128 << 20
_FLASH_MLA_PAGE = 64


def _make(p: Namespace, device: Any, generator: Any) -> Inputs:
    """q_nope [tokens, heads, ckv], q_pe [tokens, heads, kpe]; a cache [pages, page_size, ckv + kpe] and views of it."""
    import torch

    batch = requests(p)
    ckv, kpe = p.head_dim_ckv or 512, p.head_dim_kpe or 64
    page_size = p.page_size or _FLASH_MLA_PAGE
    q_dtype, kv_dtype = dtype_of(p.q_dtype), dtype_of(p.kv_dtype)
    tokens = sum(r.qo_len for r in batch)
    table = page_table([r.kv_len for r in batch], page_size, device, generator)
    cache = normal((table["num_pages"], page_size, ckv + kpe), kv_dtype, device, generator)
    qo_indptr = torch.tensor([0, *(r.qo_len for r in batch)]).cumsum(0, dtype=torch.int32)
    return Inputs(
        q_nope=normal((tokens, p.num_qo_heads, ckv), q_dtype, device, generator),
        q_pe=normal((tokens, p.num_qo_heads, kpe), q_dtype, device, generator),
        cache=cache,
        ckv=cache[..., :ckv],
        kpe=cache[..., ckv:],
        qo_indptr=qo_indptr.to(device),
        kv_indptr=table["kv_indptr"],
        kv_indices=table["kv_indices"],
        kv_len=torch.tensor([r.kv_len for r in batch], dtype=torch.int32, device=device),
        batch=batch,
        scale=_SCALE,
        scales={"ckv_scale": _FP8_SCALE, "kpe_scale": _FP8_SCALE} if cache.element_size() == 1 else {},
    )


def _each(x: Inputs, dtype: torch.dtype) -> Outputs:
    """Softmax attention of one request after another, lower right causal, in the given precision."""
    import torch

    queries = torch.cat([x.q_nope, x.q_pe], -1)
    ckv = x.ckv.shape[-1]
    outs, pages = [], x.kv_indptr.tolist()
    for i, rows in enumerate(queries.split([r.qo_len for r in x.batch])):
        kv_len = x.batch[i].kv_len
        keys = x.cache[x.kv_indices[pages[i] : pages[i + 1]]].flatten(0, 1)[:kv_len].to(dtype)
        keys = keys * _FP8_SCALE if x.scales else keys
        position = torch.arange(kv_len, device=keys.device)
        at_once = max(1, _SCORES_AT_ONCE // (rows.shape[1] * kv_len))
        last = kv_len - rows.shape[0]  # that the first row sees
        for part in rows.split(at_once):
            score = torch.einsum("qhd,kd->qhk", part.to(dtype), keys) * x.scale
            seen = position <= last + torch.arange(part.shape[0], device=keys.device).unsqueeze(1)
            weight = score.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1)
            outs.append(torch.einsum("qhk,kd->qhd", weight, keys[:, :ckv]))
            last += part.shape[0]
    return {"out": torch.cat(outs)}


def _reference(x: Inputs) -> Outputs:
    import torch

    return _each(x, torch.float64)


def _torch(x: Inputs) -> torch.Tensor:
    """In fp32: scores that are rounded to 16 bits would move the weights by a percent."""
    import torch

    return _each(x, torch.float32)["out"].to(x.q_nope.dtype)


def _plan(wrapper: Callable[..., Any], x: Inputs, backend: str) -> Any:
    import torch

    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=x.cache.device)
    planned = wrapper(workspace, backend="auto" if backend == "cpu" else backend)
    planned.plan(
        x.qo_indptr,
        x.kv_indptr,
        x.kv_indices,
        x.kv_len,
        x.q_nope.shape[1],
        x.ckv.shape[-1],
        x.kpe.shape[-1],
        x.cache.shape[1],
        causal=True,
        sm_scale=x.scale,
        q_data_type=x.q_nope.dtype,
        kv_data_type=x.cache.dtype,
    )
    return planned


def _plan_flash_mla(x: Inputs) -> Callable[[Inputs], torch.Tensor]:
    """It takes the two parts of q as one tensor and the pages as a rectangle."""
    import torch

    library = FLASH_MLA.load()
    q = torch.cat([x.q_nope, x.q_pe], -1).unflatten(0, (len(x.batch), -1))
    table = block_table(x.kv_indptr, x.kv_indices)
    metadata = library.get_mla_metadata()[0]
    width = x.ckv.shape[-1]

    def run(x: Inputs) -> torch.Tensor:
        out: torch.Tensor = library.flash_mla_with_kvcache(
            q, x.cache.unsqueeze(2), table, x.kv_len, width, metadata, softmax_scale=x.scale, causal=True
        )[0]
        return out.flatten(0, 1)

    return run


def _unsupported(backend: str, p: Namespace) -> str | None:
    if backend != "flashmla":
        return None
    if p.kv_dtype != p.q_dtype:
        return f"flashmla takes a dense cache of q's type, got --kv_dtype {p.kv_dtype}"
    if len({r.qo_len for r in requests(p)}) > 1:
        return "flashmla takes the same number of new tokens of every request"
    if (p.page_size or _FLASH_MLA_PAGE) != _FLASH_MLA_PAGE:
        return f"flashmla takes --page_size {_FLASH_MLA_PAGE}, got {p.page_size}"
    if (p.head_dim_ckv or 512, p.head_dim_kpe or 64) != (512, 64):
        return f"flashmla takes --head_dim_ckv 512 --head_dim_kpe 64, got {p.head_dim_ckv} and {p.head_dim_kpe}"
    return None


def _work(p: Namespace, x: Inputs) -> Work:
    """Pairs below the diagonal; each row of the cache and of q once, the output in q's type."""
    heads, width = x.q_nope.shape[1:]
    pairs = sum(r.qo_len * (2 * r.kv_len - r.qo_len + 1) // 2 for r in x.batch)
    cache = sum(r.kv_len for r in x.batch) * x.cache.shape[-1] * x.cache.element_size()
    flops = 2 * pairs * heads * (2 * width + x.q_pe.shape[-1])
    return Work(flops, cache + 2 * nbytes(x.q_nope) + nbytes(x.q_pe))


def _lengths(x: Inputs) -> dict[str, float]:
    return {"avg_actual_seq_len": sum(r.kv_len for r in x.batch) / len(x.batch)}


CASES = (
    Case(
        routine="BatchMLAPagedAttentionWrapper",
        function="mla.BatchMLAPagedAttentionWrapper",
        op="batch_mla",
        also=("mla_plan",),
        make=_make,
        plan=_plan,
        call=lambda planned, x: planned.run(x.q_nope, x.q_pe, x.ckv, x.kpe, **x.scales),
        outputs=lambda x, returned: {"out": returned},
        reference=_reference,
        work=_work,
        torch=_torch,
        peers={"flashmla": Planned(_plan_flash_mla, lambda run, x: run(x))},
        lengths=_lengths,
        unsupported=_unsupported,
    ),
)
