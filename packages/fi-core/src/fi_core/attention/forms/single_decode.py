"""Decode attention of a single request over contiguous keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import LAYOUTS, POS_ENCODINGS, code
from fi_core.attention.forms.single_trace import single_trace
from fi_core.attention.ops import decode as ops
from fi_core.attention.ops.request import Facts
from fi_core.attention.ops.single import attend, single_choice
from fi_core.attention.reference import attend_request
from fi_core.observe.log import fi_api
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.resolve.ahead import planned
from fi_core.runtime.returns import with_lse
from fi_core.utils import constants

if TYPE_CHECKING:
    import torch


def _reference(q, k, v, kv_layout="NHD", window_left=-1, logits_soft_cap=None, sm_scale=None):  # type: ignore[no-untyped-def]
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    scale = q.shape[1] ** -0.5 if sm_scale is None else sm_scale
    out, lse = attend_request(q[None], k, v, scale, True, window_left, logits_soft_cap)
    return out[0], lse[0]


_trace = single_trace(
    "decode",
    (),
    _reference,
    ({"window_left": 5, "sm_scale": 0.3}, {"logits_soft_cap": 4.0}, {"kv_len": 0}),
    "Attention of one query token, grouped heads; the reference also returns the LSE.",
)


@with_lse
@fi_api(trace=_trace)
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token: `softmax(q k^T * sm_scale) v` for each head (arXiv:1706.03762).

    Arithmetic is fp32. Keys outside the window are not read.

    Args:
        q: `[num_qo_heads, head_dim]`, fp16, bf16, fp32, e4m3 or e5m2. Query head h uses kv head `h // (num_qo_heads /
            num_kv_heads)`; any integer ratio.
        k, v: `[kv_len, num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, kv_len, head_dim]` ("HND"), of q's dtype, or
            e4m3 or e5m2 with a 16-bit q. v may have another head_dim. Head dims are multiples of 8 up to 512; any
            strides with a contiguous last dimension.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE"; "ROPE_LLAMA", which rotates key j by position j and q by kv_len - 1 (halves layout,
            all of head_dim, angles `position / rope_scale * rope_theta^(-2i / head_dim)`); "ALIBI", which adds `slope *
            j`.
        use_tensor_cores: without effect; the kernel is chosen by shape.
        q_scale, k_scale: factors of sm_scale.
        v_scale: factor of the output.
        window_left: the query attends to the last window_left + 1 keys; negative: to all.
        logits_soft_cap: c > 0 replaces scores by `c tanh(score / c)`.
        sm_scale: softmax_scale; default `1 / sqrt(head_dim)`.
        rope_scale, rope_theta: of "ROPE_LLAMA"; default 1 and 1e4.
        return_lse: also return lse.

    Returns:
        out `[num_qo_heads, head_dim]` in q's dtype, or (out, lse) with lse `[num_qo_heads]`, fp32, `log2(sum(2^(score *
        log2 e)))`. Without keys out = 0 and lse = -inf.

    Raises:
        ValueError: shape, stride or device.
        TypeError: dtype.
        KeyError: kv_layout or pos_encoding_mode.
    """
    if q.ndim != 2:
        raise ValueError(f"q must have shape [num_qo_heads, head_dim]; got {tuple(q.shape)}")
    import torch

    qk_factor = q_scale if k_scale is None else k_scale if q_scale is None else q_scale * k_scale
    layout = code(LAYOUTS, kv_layout, "kv_layout")
    code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")
    if _is_regular(q, k, v, layout) and not torch.compiler.is_compiling():
        soft_cap = logits_soft_cap is not None and logits_soft_cap > 0.0
        choice = single_choice(q, k, v, layout, q.dtype, pos_encoding_mode, "auto", decode=True, soft_cap=soft_cap)
        if choice.implementation == "batch_decode":
            scale = q.shape[1] ** -0.5 if sm_scale is None else sm_scale
            return _as_batch(
                q,
                k,
                v,
                layout,
                return_lse,
                pos_encoding=POS_ENCODINGS[pos_encoding_mode],
                window_left=window_left,
                soft_cap=logits_soft_cap or 0.0,
                sm_scale=scale if qk_factor is None else scale * qk_factor,
                out_scale=1.0 if v_scale is None else v_scale,
            )
    return attend(
        q, k, v, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
        logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, qk_factor=qk_factor, v_scale=v_scale, rope_scale=rope_scale,
        rope_theta=rope_theta, return_lse=return_lse,
    )  # fmt: skip


def _is_regular(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: int) -> bool:
    """Whether shapes fit each other. Other inputs go to the op, whose messages name q, k and v."""
    if k.ndim != 3 or k.shape != v.shape or v.dtype is not k.dtype or k.shape[2] != q.shape[1]:
        return False
    tokens, heads = k.shape[layout], k.shape[1 - layout]
    inner = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    devices = q.get_device() == k.get_device() == v.get_device()
    return bool(tokens and heads and q.shape[0] and q.shape[0] % heads == 0 and inner and devices)


@with_lse
@fi_api
def single_decode_with_kv_cache_with_jit_module(
    jit_module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token by a user's variant.

    The arguments that are not listed, and the result, are those of single_decode_with_kv_cache, with the dtypes of the
    module. Without a softmax lse is 0.

    Args:
        jit_module: the result of `gen_customize_single_decode_module(...).build_and_load()`.
        args: the variant's tensors, then its scalars, in the order of declaration; a tensor named maybe_... may be
            None.
        window_left: always applied, in addition to the variant's mask.

    Raises:
        TypeError: a missing or wrong argument, by name.
        ValueError: a missing or wrong argument, by name.
    """
    from fi_core.attention.custom import custom_attention

    return custom_attention(jit_module).attend(q, k, v, args, kv_layout, False, window_left, return_lse)


@functools.cache
def _sizes(device: torch.device, q_tiles: int, choice: Choice) -> ops.Sizes:
    return ops.buffer_sizes(device, 1, q_tiles, choice=choice)


def _as_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: int, return_lse: bool, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Runs batch_decode on one request, whose keys are the only page. options: other arguments of batch_decode."""
    import torch

    device, heads, dim = q.device, k.shape[1 - layout], q.shape[1]
    q_tiles = ops.num_q_tiles(q.shape[0], heads)
    choice = planned(
        ops.BATCH_DECODE,
        device,
        "auto",
        *Facts(q.dtype, k.dtype, q.dtype, dim, dim, q.shape[0] // heads, ops.KV_TILE),
        1,
        ahead=False,
    )
    buffers = ops.allocate(device, _sizes(device, q_tiles, choice), dim)
    whole, first = constants(0x7FFFFFFF, 1, device), constants(0, 1, device)
    # The length is limited by the only page, which is all of k.
    window_left = options["window_left"]
    ops.plan(buffers, None, None, whole, k.shape[layout], q_tiles, pages_per_request=1, window_left=window_left)
    out = q.new_empty((1, *q.shape))
    lse = q.new_empty((1, q.shape[0]), dtype=torch.float32) if return_lse else None
    ops.batch_decode(
        out, lse, buffers.partials, buffers.schedule, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), first, layout,
        buffers.num_ctas, buffers.num_ranges, split_kv=buffers.split_kv, backend=choice.implementation, **options,
    )  # fmt: skip
    return out.squeeze(0) if lse is None else (out.squeeze(0), lse.squeeze(0))
