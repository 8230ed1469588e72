"""The case of sparse multi-head latent attention: each query token attends to cache slots of its own."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Planned, Work
from fi_bench.cases.common import nbytes, normal, page_table, requests
from fi_bench.peers import FLASH_MLA

if TYPE_CHECKING:
    import torch

_LATENT, _ROPE, _GROUP = 512, 64, 128
_SCALE = 192**-0.5  # of the widths before absorption, 128 + 64
_WORKSPACE = 128 << 20
_PAGE = 64
_TOKENS_AT_ONCE = 16
_FLASH_MLA_HEADS = (64, 128)  # of its build in vLLM 0.24, which refuses 16, 32 and 96


def _rows(slots: int, fp8: bool, device: Any, generator: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(cache [slots, 576] in bf16, or bytes [slots, 656]; None, or the scales in the bytes)."""
    import torch

    if not fp8:
        return normal((slots, _LATENT + _ROPE), torch.bfloat16, device, generator), None
    codes = normal((slots, _LATENT), torch.float8_e4m3fn, device, generator)
    scales = torch.rand(slots, _LATENT // _GROUP, device=device, generator=generator) + 0.5
    ropes = normal((slots, _ROPE), torch.bfloat16, device, generator)
    return torch.cat([x.view(torch.uint8) for x in (codes, scales, ropes)], -1), scales


def _make(p: Namespace, device: Any, generator: Any) -> Inputs:
    """q [tokens, 1, heads, 576]; cache [pages, page_size, width]; indices [tokens, 1, top_k], -1 for none."""
    import torch

    batch, page_size = requests(p), p.page_size or _PAGE
    table = page_table([r.kv_len for r in batch], page_size, device, generator)
    cache, scales = _rows(table["num_pages"] * page_size, p.kv_dtype == "fp8_e4m3", device, generator)
    pages, top_k = table["kv_indptr"].tolist(), p.sparse_mla_top_k
    indices = torch.full((sum(r.qo_len for r in batch), top_k), -1, dtype=torch.int32, device=device)
    rows = iter(indices)
    for i, request in enumerate(batch):
        own = table["kv_indices"][pages[i] : pages[i + 1], None] * page_size
        slots = (own + torch.arange(page_size, device=device)).flatten()[: request.kv_len].int()
        for _ in range(request.qo_len):
            chosen = slots[torch.randperm(request.kv_len, device=device, generator=generator)[:top_k]]
            next(rows)[: chosen.numel()] = chosen
    q = normal((indices.shape[0], 1, p.num_qo_heads, _LATENT + _ROPE), torch.bfloat16, device, generator)
    return Inputs(q=q, cache=cache.view(-1, page_size, cache.shape[-1]), scales=scales, indices=indices.unsqueeze(1))


def _attend(x: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Softmax attention of some query tokens after others, in the given precision."""
    import torch

    cache = x.cache.flatten(0, 1)
    outs = []
    for q, indices in zip(x.q.flatten(0, 1).split(_TOKENS_AT_ONCE), x.indices.flatten(0, 1).split(_TOKENS_AT_ONCE)):
        rows = cache[indices.long().clamp(min=0)]  # [tokens, top_k, width]
        if x.scales is None:
            keys = rows.to(dtype)
        else:
            scales = x.scales[indices.long().clamp(min=0)].to(dtype).repeat_interleave(_GROUP, -1)
            latent = rows[..., :_LATENT].view(torch.float8_e4m3fn).to(dtype) * scales
            keys = torch.cat([latent, rows[..., -2 * _ROPE :].view(torch.bfloat16).to(dtype)], -1)
        score = torch.einsum("thd,tkd->thk", q.to(dtype), keys) * _SCALE
        weight = score.masked_fill((indices < 0).unsqueeze(1), float("-inf")).softmax(-1)
        outs.append(torch.einsum("thk,tkd->thd", weight, keys[..., :_LATENT]))
    return torch.cat(outs).unsqueeze(1)


def _reference(x: Inputs) -> Outputs:
    import torch

    return {"out": _attend(x, torch.float64)}


def _torch(x: Inputs) -> torch.Tensor:
    import torch

    return _attend(x, torch.float32).to(x.q.dtype)


def _plan(decode: Callable[..., Any], x: Inputs, backend: str) -> Callable[..., Any]:
    import torch

    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=x.q.device)
    return functools.partial(
        decode,
        workspace_buffer=workspace,
        qk_nope_head_dim=128,
        kv_lora_rank=_LATENT,
        qk_rope_head_dim=_ROPE,
        seq_lens=None,
        max_seq_len=x.cache.shape[0] * x.cache.shape[1],
        sparse_mla_top_k=x.indices.shape[-1],
        bmm1_scale=_SCALE,
        backend="auto" if backend == "cpu" else backend,
    )


def _plan_flash_mla(x: Inputs) -> Callable[[Inputs], torch.Tensor]:
    library = FLASH_MLA.load()
    metadata = library.get_mla_metadata()[0]

    def run(x: Inputs) -> torch.Tensor:
        out: torch.Tensor = library.flash_mla_with_kvcache(
            x.q,
            x.cache.unsqueeze(2),
            None,
            None,
            _LATENT,
            metadata,
            softmax_scale=_SCALE,
            is_fp8_kvcache=True,
            indices=x.indices,
        )[0]
        return out

    return run


def _unsupported(backend: str, p: Namespace) -> str | None:
    if backend != "flashmla":
        return None
    if p.kv_dtype != "fp8_e4m3":
        return f"flashmla takes rows of 656 bytes: --kv_dtype fp8_e4m3, got {p.kv_dtype}"
    if p.num_qo_heads not in _FLASH_MLA_HEADS:
        return f"flashmla takes --num_qo_heads 64 or 128, got {p.num_qo_heads}"
    if (p.page_size or _PAGE) != _PAGE:
        return f"flashmla takes --page_size {_PAGE}, got {p.page_size}"
    return None


def _work(p: Namespace, x: Inputs) -> Work:
    """Each listed row once for its query token, the indices, q, and the output in q's type."""
    tokens, _, heads, width = x.q.shape
    pairs = int((x.indices >= 0).sum())
    read = pairs * x.cache.shape[-1] * x.cache.element_size() + nbytes(x.indices) + nbytes(x.q)
    return Work(2 * pairs * heads * (width + _LATENT), read + tokens * heads * _LATENT * x.q.element_size())


CASES = (
    Case(
        routine="trtllm_batch_decode_with_kv_cache_mla",
        function="mla.trtllm_batch_decode_with_kv_cache_mla",
        op="batch_mla",
        also=("mla_plan",),
        make=_make,
        plan=_plan,
        call=lambda planned, x: planned(query=x.q, kv_cache=x.cache, block_tables=x.indices),
        outputs=lambda x, returned: {"out": returned},
        reference=_reference,
        work=_work,
        torch=_torch,
        peers={"flashmla": Planned(_plan_flash_mla, lambda run, x: run(x))},
        unsupported=_unsupported,
    ),
)
