"""Attention in fp64 with every option, the way the contract words it: one score at a time, nothing online."""

from __future__ import annotations

import math

import torch

from fi_core.utils import get_alibi_slopes


def rotate(x: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    """`[n, heads, d]` by the angles of its positions, halves layout."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half) / scale
    angle = (positions.double()[:, None] * frequency)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    causal: bool = False,
    custom_mask: torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    pos_encoding_mode: str = "NONE",
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out `[qo_len, heads, d]`, lse in base 2 `[qo_len, heads]`) on the CPU, for q `[qo_len, heads, d]`."""
    q, k, v = (x.detach().cpu().double() for x in (q, k, v))
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    qo_len, kv_len, heads, group = q.shape[0], k.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    q, k, v = (x if s is None else x * s.cpu().double()[:, None] for x, s in ((q, scale_q), (k, scale_k), (v, scale_v)))
    row, key = torch.arange(qo_len)[:, None], torch.arange(kv_len)[None]
    position = row + kv_len - qo_len
    if pos_encoding_mode == "ROPE_LLAMA":
        q = rotate(q, position[:, 0], rope_scale or 1.0, rope_theta or 1e4)
        k = rotate(k, key[0], rope_scale or 1.0, rope_theta or 1e4)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->ihj", q, k) * (q.shape[2] ** -0.5 if sm_scale is None else sm_scale) * k_scale
    if logits_soft_cap is not None and logits_soft_cap > 0:
        s = logits_soft_cap * torch.tanh(s / logits_soft_cap)
    if pos_encoding_mode == "ALIBI":
        s = s + get_alibi_slopes(heads).double()[None, :, None] * (key - row)[:, None]
    seen = torch.ones(qo_len, kv_len, dtype=torch.bool)
    if custom_mask is not None:
        seen = custom_mask.cpu()
    elif causal:
        seen = key + qo_len <= kv_len + row
    if window_left >= 0:
        seen = seen & (key + qo_len + window_left >= kv_len + row)
    s = s.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:  # one more key, whose value is zero
        s = torch.cat([s, sinks.cpu().double()[None, :, None].expand(qo_len, -1, -1)], -1)
        return torch.einsum("ihj,jhd->ihd", s.softmax(-1)[..., :kv_len], v) * v_scale, s.logsumexp(-1) / math.log(2)
    lse = s.logsumexp(-1) if kv_len else torch.full((qo_len, heads), -math.inf, dtype=torch.float64)
    weight = torch.where(seen.any(-1)[:, None, None], s.softmax(-1), 0.0) if kv_len else s
    return torch.einsum("ihj,jhd->ihd", weight, v) * v_scale, lse / math.log(2)
