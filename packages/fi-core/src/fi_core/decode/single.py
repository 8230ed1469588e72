"""Decode attention of a single request over contiguous keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fi_core.attention import attend
from fi_core.attention.arguments import LAYOUTS, POS_ENCODINGS
from fi_core.decode import ops
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var
from fi_core.utils import constants

if TYPE_CHECKING:
    import torch


def _reference(q, k, v, kv_layout="NHD", window_left=-1, logits_soft_cap=None, sm_scale=None):  # type: ignore[no-untyped-def]
    import torch

    if kv_layout == "NHD":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    group = q.shape[0] // k.shape[0]
    k, v = k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    s = torch.einsum("hd,hjd->hj", q.double(), k) * (q.shape[1] ** -0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap:
        s = logits_soft_cap * torch.tanh(s / logits_soft_cap)
    if window_left >= 0:
        s[:, : max(0, k.shape[1] - 1 - window_left)] = -torch.inf
    return torch.einsum("hj,hjd->hd", s.softmax(-1), v), s.logsumexp(-1) * 1.4426950408889634


def _template(layout: str, with_lse: bool) -> TraceTemplate:
    tokens = ["kv_len", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "kv_len"]
    lse = {"lse": Tensor(["num_qo_heads"], dtype="float32", description="Base 2.")} if with_lse else {}
    return TraceTemplate(
        "single_decode",
        axes={
            "kv_len": Var(),
            "num_qo_heads": Const(abbrev="h"),
            "num_kv_heads": Const(abbrev="kv"),
            "head_dim_qk": Const(abbrev="d"),
            "head_dim_vo": Const(abbrev=""),
        },
        inputs={
            "q": Tensor(["num_qo_heads", "head_dim_qk"]),
            "k": Tensor([*tokens, "head_dim_qk"]),
            "v": Tensor([*tokens, "head_dim_vo"]),
            "kv_layout": Scalar("string", optional=True),
            "window_left": Scalar("int32", optional=True),
            "logits_soft_cap": Scalar(optional=True),
            "sm_scale": Scalar(optional=True),
        },
        outputs={"output": Tensor(["num_qo_heads", "head_dim_vo"], dtype_from="q"), **lse},
        reference=_reference,
        tags=(f"kv_layout:{layout}",),
        description="Attention of one query token, grouped heads; the reference also returns the LSE.",
    )


_TEMPLATES = {(layout, lse): _template(layout, lse) for layout in ("NHD", "HND") for lse in (False, True)}


def _trace(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    return _TEMPLATES.get((arguments.get("kv_layout", "NHD"), bool(arguments.get("return_lse", False))))


_trace.templates = tuple(_TEMPLATES.values())  # type: ignore[attr-defined]


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
    """Attention of one query token: `softmax(q k^T * sm_scale) v` for each head.

    q: `[num_qo_heads, head_dim]`, fp16, bf16, fp32, e4m3 or e5m2. k, v: `[kv_len, num_kv_heads, head_dim]` ("NHD") or
    `[num_kv_heads, kv_len, head_dim]` ("HND"), of q's dtype, or e4m3 or e5m2 with a 16-bit q. v may have another
    head_dim. Head dims are multiples of 8 up to 512. Head h reads kv head `h // (num_qo_heads / num_kv_heads)`, any
    whole ratio. Strides are free but for the last dimension.

    pos_encoding_mode: "NONE"; "ROPE_LLAMA", which rotates key j by position j and q by kv_len - 1 (halves layout, all
    of head_dim, angles `position / rope_scale * rope_theta^(-2i / head_dim)`, defaults 1 and 1e4); "ALIBI", which adds
    `slope * j`. use_tensor_cores: accepted; the kernel is chosen by shape. window_left: only the last window_left + 1
    keys are seen; negative: all. logits_soft_cap c > 0: scores become `c tanh(score / c)`. sm_scale: default
    `1 / sqrt(head_dim)`; q_scale and k_scale multiply it. v_scale multiplies the output.

    Returns out `[num_qo_heads, head_dim]` in q's dtype; with return_lse also lse `[num_qo_heads]`, fp32: log2 of the
    sum of `2^(score * log2 e)`. With no key, out = 0 and lse = -inf. Arithmetic is fp32; keys outside the window are
    not read.

    Raises ValueError (shape, stride, device), TypeError (dtype) or KeyError (kv_layout, pos_encoding_mode).
    """
    if q.ndim != 2:
        raise ValueError(f"q must have shape [num_qo_heads, head_dim]; got {tuple(q.shape)}")
    qk_factor = q_scale if k_scale is None else k_scale if q_scale is None else q_scale * k_scale
    layout = LAYOUTS.get(kv_layout, -1)
    usual = q.is_cuda and layout >= 0 and pos_encoding_mode in _ENCODINGS and k.ndim == 3
    impl = _batch_impl(q, k, v, layout) if usual else None
    if impl is not None:
        scale = q.shape[1] ** -0.5 if sm_scale is None else sm_scale
        return _as_batch(
            impl, q, k, v, layout, POS_ENCODINGS[pos_encoding_mode], window_left, logits_soft_cap or 0.0,
            scale if qk_factor is None else scale * qk_factor, 1.0 if v_scale is None else v_scale, return_lse,
        )  # fmt: skip
    return attend(
        q, k, v, 1, None, return_lse, kv_layout, pos_encoding_mode, window_left, logits_soft_cap, sm_scale,
        qk_factor, v_scale, rope_scale, rope_theta,
    )  # fmt: skip


_ENCODINGS = ("NONE", "ALIBI")  # which the kernels on tensor cores have


def _batch_impl(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: int) -> str | None:
    """The kernel of batch decode that takes the call, if one on tensor cores does: two times as fast (H200, 32/8 heads,
    from 8 thousand keys on). What is irregular is left to the op of single requests, whose messages name q, k and v.
    """
    import torch

    tokens, heads, dim = k.shape[layout], k.shape[1 - layout], q.shape[1]
    if not (tokens and heads and k.shape == v.shape and k.shape[2] == dim and q.shape[0] and q.shape[0] % heads == 0):
        return None
    halves, fp8 = (torch.float16, torch.bfloat16), (torch.float8_e4m3fn, torch.float8_e5m2)
    same = q.dtype is k.dtype and q.dtype in (*halves, *fp8)
    if not (same or (q.dtype in halves and k.dtype in fp8)) or v.dtype is not k.dtype or torch.compiler.is_compiling():
        return None
    if not q.get_device() == k.get_device() == v.get_device():
        return None
    low = q.data_ptr() | k.data_ptr() | v.data_ptr()
    for x in (q, k, v):
        *outer, inner = x.stride()
        if inner != 1:
            return None
        for step in outer:
            low |= step * x.itemsize
    if low % 16:
        return None
    impl = ops.choose("auto", q.device, q.dtype, k.dtype, dim, dim, 0)
    return impl if impl in ("fa3", "fa2_tc") else None


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
    """Attention of one query token by a user's variant: `gen_customize_single_decode_module(...).build_and_load()`.

    args: the variant's tensors, then its scalars, in the order of declaration; a tensor named maybe_... may be None.
    Other arguments and the result are those of single_decode_with_kv_cache, with the types that the module was made
    for. window_left always counts, whatever the variant masks. Without a softmax lse is 0.

    Raises TypeError or ValueError, which name what is missing or does not fit.
    """
    from fi_core.jit.attention import custom_attention

    return custom_attention(jit_module).attend(q, k, v, args, kv_layout, False, window_left, return_lse)


@functools.cache
def _needs(device: torch.device, units: int, impl: str, kv: torch.dtype) -> ops.Sizes:
    return ops.sizes(device, 1, units, impl=impl, kv=kv)


def _as_batch(
    impl: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: int,
    encoding: int,
    window_left: int,
    soft_cap: float,
    score_scale: float,
    out_scale: float,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A batch of one request, whose keys are the only page."""
    import torch

    device = q.device
    units = ops.units_of(q.shape[0], k.shape[1 - layout])
    buffers = ops.allocate(device, _needs(device, units, impl, k.dtype), q.shape[1])
    whole, first = constants(0x7FFFFFFF, 1, device), constants(0, 1, device)
    # The length is limited by the only page, which is all of k.
    ops.plan(buffers, None, None, whole, k.shape[layout], units, pages_per_request=1, window_left=window_left)
    out = q.new_empty((1, *q.shape))
    lse = q.new_empty((1, q.shape[0]), dtype=torch.float32) if return_lse else None
    ops.attend(
        buffers, out, lse, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), first, impl, layout, encoding,
        1, window_left, soft_cap, score_scale, out_scale,
    )  # fmt: skip
    return out.squeeze(0) if lse is None else (out.squeeze(0), lse.squeeze(0))
