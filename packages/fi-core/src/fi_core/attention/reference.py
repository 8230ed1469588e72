"""Attention of one request in fp64, and its keys from pages: the helpers of every attention reference.

Trace files contain the text of these functions, so they name nothing outside themselves.
"""

from __future__ import annotations


def attend_request(  # type: ignore[no-untyped-def]
    q, k, v, sm_scale, causal=False, window_left=-1, logits_soft_cap=None, sinks=None, custom_mask=None
):
    """The last tokens of a request, q [qo_len, heads, d], against k and v [kv_len, heads, d]: output and base-2 lse."""
    import torch

    group, first = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    position = torch.arange(q.shape[0], device=q.device)[:, None] + first
    key = torch.arange(k.shape[0], device=q.device)
    seen = custom_mask if custom_mask is not None else key <= position if causal else key >= 0
    if window_left >= 0:
        seen = seen & (key >= position - window_left)
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=torch.float64)
    lse = q.new_empty(q.shape[:2], dtype=torch.float64)
    for head in range(q.shape[1]):  # one at a time: the scores of all heads would be large
        score = q[:, head].double() @ k[:, head // group].double().T * sm_scale
        if logits_soft_cap is not None and logits_soft_cap > 0:
            score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
        score = score.masked_fill(~seen, -torch.inf)
        lse[:, head] = score.logsumexp(-1)
        if sinks is not None:
            lse[:, head] = torch.logaddexp(lse[:, head], sinks[head].double())
        weight = (score - lse[:, head, None]).exp()
        weight = weight.masked_fill(lse[:, head, None] == -torch.inf, 0.0)  # a row that sees no key gives 0
        out[:, head] = weight @ v[:, head // group].double()
    return out, lse * 1.4426950408889634


def gather_pages(cache, kv_indptr, kv_indices, kv_last_page_len, seq_lens, request, kv_layout):  # type: ignore[no-untyped-def]
    """The tokens of one request, [kv_len, heads, d]."""
    pages = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
    page_size = cache.shape[1 if kv_layout == "NHD" else 2]
    if seq_lens is not None:
        length = int(seq_lens[request])
    else:
        length = max(len(pages) - 1, 0) * page_size + int(kv_last_page_len[request]) if len(pages) else 0
    cache = cache[pages[: (length + page_size - 1) // page_size]]
    return (cache if kv_layout == "NHD" else cache.transpose(1, 2)).flatten(0, 1)[:length]


def attend_pages(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    kv_indptr,
    kv_indices,
    sm_scale,
    kv_last_page_len=None,
    qo_indptr=None,
    seq_lens=None,
    q_scale=1.0,
    k_scale=1.0,
    v_scale=1.0,
    kv_layout="NHD",
    causal=False,
    prefix=None,
    seen=None,
    **options,
):
    """`attend_request` of each request of a batch over its pages, with these options: output and base-2 lse.

    Without qo_indptr all requests have the same number of rows, and several are causal. prefix: k and v of tokens
    before those of each request. seen: its custom_mask, a function of its rows of q and the numbers of its keys.
    """
    import torch

    if qo_indptr is None:
        q_len = len(q) // max(len(kv_indptr) - 1, 1)
        qo_indptr, causal = torch.arange(len(kv_indptr)) * q_len, q_len > 1
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for request in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        k, v = (
            gather_pages(cache, kv_indptr, kv_indices, kv_last_page_len, seq_lens, request, kv_layout)
            for cache in (k_cache, v_cache)
        )
        if prefix is not None:
            k, v = (torch.cat(parts) for parts in zip(prefix, (k, v)))
        if seen is not None:
            options["custom_mask"] = seen(rows, torch.arange(len(k), device=q.device))
        out[rows], lse[rows] = attend_request(q[rows], k, v, sm_scale * q_scale * k_scale, causal, **options)
    return out * v_scale, lse
