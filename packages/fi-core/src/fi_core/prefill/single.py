"""Prefill and append attention: the query tokens of a request against all its keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fi_core.attention import attend
from fi_core.attention.arguments import POS_ENCODINGS, code, no_nvfp4, unsupported
from fi_core.errors import UnsupportedError
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var
from fi_core.prefill import ops
from fi_core.prefill.once import attend_once
from fi_core.utils import MaskMode

if TYPE_CHECKING:
    import torch

_BACKENDS = frozenset({"auto", "fa2", "fa3"})
# Query tokens times heads of a kv head from which the Hopper kernel pays for its second launch. H200, 32/8 heads of
# 128, causal, us by it and by the other: 64 tokens 14.6, 13.6; 128: 14.5, 15.6; 256: 16.3, 22.1; 1024: 36, 89; but
# the host then takes 24 instead of 10.
_LEAST_ROWS = 1024


def _reference(  # type: ignore[no-untyped-def]
    q, k, v, custom_mask=None, causal=False, kv_layout="NHD", sm_scale=None, window_left=-1, logits_soft_cap=None
):
    import torch

    if kv_layout == "NHD":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    group, last = q.shape[1] // k.shape[0], k.shape[1] - q.shape[0]
    k, v = k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    s = torch.einsum("ihd,hjd->ihj", q.double(), k) * (q.shape[2] ** -0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap:
        s = logits_soft_cap * torch.tanh(s / logits_soft_cap)
    key, position = torch.arange(k.shape[1]), torch.arange(q.shape[0])[:, None] + last
    seen = custom_mask if custom_mask is not None else key <= position if causal else key >= 0
    if window_left >= 0:
        seen = seen & (key >= position - window_left)
    s = s.masked_fill(~seen.broadcast_to(s.shape[0], s.shape[2])[:, None].to(s.device), -torch.inf)
    return torch.einsum("ihj,hjd->ihd", s.softmax(-1).nan_to_num(0.0), v), s.logsumexp(-1) * 1.4426950408889634


def _template(layout: str, with_lse: bool) -> TraceTemplate:
    tokens = ["kv_len", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "kv_len"]
    lse = {"lse": Tensor(["qo_len", "num_qo_heads"], dtype="float32", description="Base 2.")} if with_lse else {}
    output = Tensor(["qo_len", "num_qo_heads", "head_dim_vo"], dtype_from="q", dtype_from_scalar="o_dtype")
    return TraceTemplate(
        "single_prefill",
        axes={
            "qo_len": Var(),
            "kv_len": Var(),
            "num_qo_heads": Const(abbrev="h"),
            "num_kv_heads": Const(abbrev="kv"),
            "head_dim_qk": Const(abbrev="d"),
            "head_dim_vo": Const(abbrev=""),
        },
        inputs={
            "q": Tensor(["qo_len", "num_qo_heads", "head_dim_qk"]),
            "k": Tensor([*tokens, "head_dim_qk"]),
            "v": Tensor([*tokens, "head_dim_vo"]),
            "custom_mask": Tensor(["qo_len", "kv_len"], dtype="bool", optional=True),
            "causal": Scalar("bool", optional=True),
            "kv_layout": Scalar("string", optional=True),
            "sm_scale": Scalar(optional=True),
            "window_left": Scalar("int32", optional=True),
            "logits_soft_cap": Scalar(optional=True),
        },
        outputs={"output": output, **lse},
        reference=_reference,
        tags=(f"kv_layout:{layout}",),
        description="Attention of the tokens of one request, grouped heads; the reference also returns the LSE.",
    )


_TEMPLATES = {(layout, lse): _template(layout, lse) for layout in ("NHD", "HND") for lse in (False, True)}


def _trace(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    return _TEMPLATES.get((arguments.get("kv_layout", "NHD"), bool(arguments.get("return_lse", False))))


_trace.templates = tuple(_TEMPLATES.values())  # type: ignore[attr-defined]


def _on_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o_dtype: Any,
    kv_layout: str,
    backend: str,
    causal: bool,
    encoding: int,
    plain: bool,
    scaled: bool,
) -> bool:
    """Whether the batch kernel for Hopper takes this request, and is worth the launch that lists its tiles.

    With backend "fa3" it is, or UnsupportedError is raised; but what is an error of every kernel is left to the op.
    """
    named = backend == "fa3"
    if backend == "fa2" or kv_layout not in ("NHD", "HND") or k.ndim != 3 or v.ndim != 3:
        return False
    tokens, heads = (k.shape[0], k.shape[1]) if kv_layout == "NHD" else (k.shape[1], k.shape[0])
    if heads < 1 or q.shape[1] % heads or v.shape[-1] < 8 or (causal and tokens < q.shape[0]):
        return False  # an error, which the op words
    group = q.shape[1] // heads
    if q.shape[2] != k.shape[2]:
        return False
    if not named and (q.shape[0] * group < _LEAST_ROWS or q.dtype.itemsize > 2 or encoding or not plain):
        return False
    impl = ops.choose(
        "fa3" if named else "auto", q.device, q.dtype, k.dtype, o_dtype or q.dtype, q.shape[2], v.shape[2], group,
        encoding, plain and v.dtype is k.dtype, 0, scaled,
    )  # fmt: skip
    fits = impl == "fa3" and ops.fits(impl, q, q, k, v)
    if named and not fits:
        strides = f"{q.stride()}, {k.stride()}, {v.stride()}"
        reason = f"requires addresses and strides in multiples of 16 bytes, got strides {strides}"
        raise UnsupportedError("single prefill by fa3 is not supported:", {"fa3": reason})
    return fits


@fi_api(trace=_trace)
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: object = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request: `softmax(mask(q k^T * sm_scale)) v` for each head.

    q: `[qo_len, num_qo_heads, head_dim_qk]`, fp16, bf16, fp32, e4m3 or e5m2. k: `[kv_len, num_kv_heads, head_dim_qk]`
    ("NHD") or `[num_kv_heads, kv_len, head_dim_qk]` ("HND"), v likewise with head_dim_vo; of q's dtype, or e4m3 or e5m2
    with a 16-bit q. Head dims are multiples of 8 up to 512. Head h reads kv head `h // (num_qo_heads / num_kv_heads)`,
    any whole ratio. Strides are free but for the last dimension.
    scale_q `[num_qo_heads]`, scale_k and scale_v `[num_kv_heads]`, fp32: factors of q, k and v by head, for fp8;
    default ones. sm_scale: default `1 / sqrt(head_dim_qk)`; k_scale multiplies it, v_scale multiplies the output.

    Row i stands at position `p = kv_len - qo_len + i`. causal: it sees keys j <= p, which requires kv_len >= qo_len.
    custom_mask, bool `[qo_len, kv_len]`, True = seen, takes the place of causal; so does packed_custom_mask, uint8, the
    same mask flattened with element e in bit e % 8 of byte e // 8, which wins if both are given. window_left = w >= 0
    hides keys j < p - w, whatever else is given. A key that a row does not see has no weight, but its v must be finite.

    pos_encoding_mode: "NONE"; "ROPE_LLAMA", which rotates key j by position j and row i by p (halves layout, all of the
    head, angles `position / rope_scale * rope_theta^(-2i / head_dim_qk)`, defaults 1 and 1e4); "ALIBI", which adds
    `slope * (j - i)`. logits_soft_cap c > 0: scores become `c tanh(score / c)`, before ALiBi is added.
    use_fp16_qk_reduction: accepted; sums are fp32 either way. backend: "fa2" keeps off the kernel for Hopper, which
    "auto" means where it takes the request and there are enough rows: no mask or encoding, 16 bits with usual head
    dims, or e4m3 (with head dims of 128), whose weights are then rounded to e4m3 as well; "fa3"
    names it. On a CPU all are the same.
    kv_cache_sf (NVFP4 keys and values) is not supported. On CUDA, products of 16-bit and fp8 inputs run on tensor cores
    where there are more than 16 rows a kv head: the weights, and rotated q and k, are then rounded to 16 bits.

    Returns out `[qo_len, num_qo_heads, head_dim_vo]` in o_dtype (default: q's dtype); with return_lse also lse
    `[qo_len, num_qo_heads]`, fp32: log2 of the sum of `2^(score * log2 e)`. A row that sees no key has out = 0 and
    lse = -inf.

    Raises ValueError (shape, stride, device, backend; causal with kv_len < qo_len), TypeError (dtype), KeyError
    (kv_layout, pos_encoding_mode), NotImplementedError (kv_cache_sf) or UnsupportedError (what "fa3" does not take).
    """
    import torch

    if backend not in _BACKENDS:
        raise ValueError(f"backend: allowed are {', '.join(sorted(_BACKENDS))}; got {backend!r}")
    if kv_cache_sf is not None:
        raise no_nvfp4("kv_cache_sf")
    if q.ndim != 3:
        raise ValueError(f"q must have shape [qo_len, num_qo_heads, head_dim_qk]; got {tuple(q.shape)}")
    by_head = (scale_q, scale_k, scale_v)
    plain, scaled = custom_mask is packed_custom_mask is None, any(x is not None for x in by_head)
    encoding = code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")
    if q.is_cuda and _on_hopper(q, k, v, o_dtype, kv_layout, backend, causal, encoding, plain, scaled):
        layout = int(kv_layout == "HND")
        out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=o_dtype or q.dtype)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        scale = (q.shape[2] ** -0.5 if sm_scale is None else sm_scale) * (1.0 if k_scale is None else k_scale)
        out_scale = 1.0 if v_scale is None else v_scale
        attend_once(
            out, lse, q, k, v, layout, 1, pages_per_request=k.shape[layout], causal=causal, window_left=window_left,
            logits_soft_cap=logits_soft_cap or 0.0, score_scale=(scale, None), out_scale=(out_scale, None),
            by_head=by_head,
        )  # fmt: skip
        return out if lse is None else (out, lse)
    return attend(
        q, k, v, q.shape[0], o_dtype, return_lse, kv_layout, pos_encoding_mode, window_left, logits_soft_cap,
        sm_scale, k_scale, v_scale, rope_scale, rope_theta, causal, custom_mask, packed_custom_mask, scale_q, scale_k,
        scale_v,
    )  # fmt: skip


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)
single_prefill_with_kv_cache_return_lse.__doc__ = "`single_prefill_with_kv_cache` with return_lse: (out, lse)."


@fi_api
def single_prefill_with_kv_cache_with_jit_module(
    jit_module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    mask_mode: int = MaskMode.NON_CAUSAL.value,
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a request's tokens by a user's variant: `gen_customize_single_prefill_module(...).build_and_load()`.

    mask_mode: a value of MaskMode. CAUSAL hides later keys; with NON_CAUSAL or CUSTOM the variant's mask is alone.
    args and the rest as in single_decode_with_kv_cache_with_jit_module, results as in single_prefill_with_kv_cache.

    Raises TypeError or ValueError, which name what is missing or does not fit; NotImplementedError (mask of items).
    """
    from fi_core.jit.attention import custom_attention

    if mask_mode == MaskMode.MULTIITEMSCORING.value:
        raise unsupported("mask_mode", mask_mode, "items (3) are an option of plan of the batch wrappers")
    MaskMode(mask_mode)  # ValueError
    causal = mask_mode == MaskMode.CAUSAL.value
    return custom_attention(jit_module).attend(q, k, v, args, kv_layout, causal, window_left, return_lse)
