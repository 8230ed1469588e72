"""Attention of a single request over contiguous keys: of one query token, and of several."""

from __future__ import annotations

import functools
from typing import Any

from fi_core.attention import contract
from fi_core.attention.contract import LAYOUTS, POS_ENCODINGS, code
from fi_core.attention.forms.tables_prefill import attend_once
from fi_core.attention.forms.trace import single_trace
from fi_core.attention.mask import byte_bounds, check_packed, pack
from fi_core.attention.ops import decode as ops
from fi_core.attention.ops.request import facts_of
from fi_core.attention.ops.single import attend, single_choice
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Scalar, Tensor
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.errors import unsupported
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch
from fi_core.runtime.resolve.ahead import planned
from fi_core.runtime.returns import setting_lse, with_lse
from fi_core.utils import MaskMode, constants

_BACKENDS = frozenset({"auto", "fa2", "fa3"})


_decode_trace = single_trace(
    "decode",
    (),
    ({"window_left": 5, "sm_scale": 0.3}, {"logits_soft_cap": 4.0}, {"kv_len": 0}),
    "Attention of one query token, grouped heads; the reference also returns the LSE.",
)


@with_lse
@fi_api(trace=_decode_trace)
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

    Arithmetic is fp32. Keys outside the window are not read. Arguments that are not listed, and errors, are those of
    single_prefill_with_kv_cache, for a row at position p = kv_len - 1.

    Args:
        q: `[num_qo_heads, head_dim]`, of a dtype of that function.
        pos_encoding_mode: as in that function, but "ALIBI" adds `slope * j`.
        use_tensor_cores: without effect; the kernel is chosen by shape.
        q_scale: factor of sm_scale.

    Returns:
        out `[num_qo_heads, head_dim]` in q's dtype, or (out, lse) with lse `[num_qo_heads]`, fp32, `log2(sum(2^(score *
        log2 e)))`. Without keys out = 0 and lse = -inf.
    """
    if q.ndim != 2:
        raise ValueError(f"q must have shape [num_qo_heads, head_dim]; got {tuple(q.shape)}")
    qk_factor = q_scale if k_scale is None else k_scale if q_scale is None else q_scale * k_scale
    layout = code(LAYOUTS, kv_layout, "kv_layout")
    code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")
    if _decode_is_regular(q, k, v, layout) and not torch.compiler.is_compiling():
        soft_cap = logits_soft_cap is not None and logits_soft_cap > 0.0
        choice = single_choice(q, k, v, layout, q.dtype, pos_encoding_mode, "auto", decode=True, soft_cap=soft_cap)
        if choice.implementation == "batch_decode":
            scale = q.shape[1] ** -0.5 if sm_scale is None else sm_scale
            options: dict[str, Any] = {"pos_encoding": POS_ENCODINGS[pos_encoding_mode], "window_left": window_left}
            options |= {"sm_scale": scale if qk_factor is None else scale * qk_factor}
            options |= {"soft_cap": logits_soft_cap or 0.0, "out_scale": 1.0 if v_scale is None else v_scale}
            return _decode_as_batch(q, k, v, layout, return_lse, **options)
    return attend(
        q, k, v, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
        logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, qk_factor=qk_factor, v_scale=v_scale, rope_scale=rope_scale,
        rope_theta=rope_theta, return_lse=return_lse,
    )  # fmt: skip


def _decode_is_regular(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: int) -> bool:
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


def _decode_as_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: int, return_lse: bool, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Runs batch_decode on one request, whose keys are the only page. options: other arguments of batch_decode."""
    device, heads, dim = q.device, k.shape[1 - layout], q.shape[1]
    q_tiles = ops.num_q_tiles(q.shape[0], heads)
    facts = facts_of(q, k, v, q.dtype, heads, ops.KV_TILE)
    choice = planned(ops.BATCH_DECODE, device, "auto", *facts, 1, ahead=False)
    buffers = ops.allocate(device, _sizes(device, q_tiles, choice), dim)
    whole, first = constants(0x7FFFFFFF, 1, device), constants(0, 1, device)
    # The length is limited by the only page, which is all of k.
    ops.decode_plan(
        buffers.schedule, indptr=None, last_page_len=None, kv_len=whole, page_size=k.shape[layout], q_tiles=q_tiles,
        num_ctas=buffers.num_ctas, num_ranges=buffers.num_ranges, split_kv=buffers.split_kv, pages_per_request=1,
        window_left=options["window_left"],
    )  # fmt: skip
    out = q.new_empty((1, *q.shape))
    lse = q.new_empty((1, q.shape[0]), dtype=torch.float32) if return_lse else None
    ops.batch_decode(
        out, lse, buffers.partials, buffers.schedule, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), first, layout,
        buffers.num_ctas, buffers.num_ranges, split_kv=buffers.split_kv, backend=choice.implementation, **options,
    )  # fmt: skip
    return out.squeeze(0) if lse is None else (out.squeeze(0), lse.squeeze(0))


_prefill_trace = single_trace(
    "prefill",
    ("qo_len",),
    ({"causal": True}, {"causal": True, "window_left": 5, "sm_scale": 0.3}, {"logits_soft_cap": 4.0}),
    "Attention of the tokens of one request, grouped heads; the reference also returns the LSE.",
    custom_mask=Tensor(["qo_len", "kv_len"], dtype="bool", optional=True),
    causal=Scalar("bool", optional=True),
)


@with_lse
@fi_api(trace=_prefill_trace)
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
    *,
    num_ctas: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request: `softmax(mask(q k^T * sm_scale)) v` for each head (arXiv:1706.03762).

    Row i is at position `p = kv_len - qo_len + i`. On CUDA, products of 16-bit and fp8 inputs run on tensor cores if
    there are more than 16 rows per kv head; softmax weights and rotated q and k are then rounded to 16 bits. Inside of
    `batch_invariant()` it is batch prefill, on CUDA not in fp32.

    Args:
        q: `[qo_len, num_qo_heads, head_dim_qk]`, fp16, bf16, fp32, e4m3 or e5m2. Query head h uses kv head `h //
            (num_qo_heads / num_kv_heads)`; any integer ratio.
        k: `[kv_len, num_kv_heads, head_dim_qk]` ("NHD") or `[num_kv_heads, kv_len, head_dim_qk]` ("HND"), of q's dtype,
            or e4m3 or e5m2 with a 16-bit q.
        v: likewise with head_dim_vo. Head dims are multiples of 8 up to 512; any strides with a contiguous last
            dimension. A masked key has no weight, but its v must be finite.
        scale_q, scale_k, scale_v: fp32 `[num_qo_heads]`, `[num_kv_heads]`, `[num_kv_heads]`, factors of q, k and v per
            head, for fp8; default 1.
        o_dtype: dtype of the output; default q's.
        custom_mask: bool `[qo_len, kv_len]`, or as many elements in another shape; True: the row attends to the key. It
            replaces causal.
        packed_custom_mask: uint8, the same mask flattened, element e in bit e % 8 of byte e // 8. It takes precedence
            over custom_mask.
        causal: a row attends to keys j <= p; requires kv_len >= qo_len.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE"; "ROPE_LLAMA", which rotates key j by position j and row i by p (halves layout, all of
            the head, angles `position / rope_scale * rope_theta^(-2i / head_dim_qk)`); "ALIBI", which adds `slope * (j
            - i)`.
        use_fp16_qk_reduction: without effect; sums are fp32.
        sm_scale: softmax_scale; default `1 / sqrt(head_dim_qk)`.
        window_left: w >= 0 masks keys j < p - w, in addition to any other mask.
        logits_soft_cap: c > 0 replaces scores by `c tanh(score / c)`, before ALiBi is added.
        rope_scale, rope_theta: of "ROPE_LLAMA"; default 1 and 1e4.
        backend: "auto", "fa2" or "fa3"; all are the same on a CPU. "fa3" is the Hopper kernel, for the dtypes and head
            dims that BatchPrefillWithPagedKVCacheWrapper lists, without custom mask or position encoding. "auto" runs
            it for enough rows that it supports; "fa2" never does.
        return_lse: also return lse.
        kv_cache_sf: for NVFP4 k and v (uint8, two elements a byte, head_dim / 2 bytes a row) a tuple of their scales,
            with head_dim / 16 instead: e4m3, or their bytes as uint8. k_scale and v_scale are the global factors.
        k_scale: factor of sm_scale.
        v_scale: factor of the output.
        num_ctas: the most thread blocks of the Hopper kernel, so that another kernel can run beside it; 0: as many as
            fit (not an argument of FlashInfer).

    Returns:
        out `[qo_len, num_qo_heads, head_dim_vo]`, or (out, lse) with lse `[qo_len, num_qo_heads]`, fp32,
        `log2(sum(2^(score * log2 e)))`. A row that attends to no key has out = 0 and lse = -inf.

    Raises:
        ValueError: shape, stride, device or backend; causal with kv_len < qo_len.
        TypeError: dtype.
        KeyError: kv_layout or pos_encoding_mode.
        UnsupportedError: the named backend does not support the request.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend: allowed are {', '.join(sorted(_BACKENDS))}; got {backend!r}")
    contract.check_nvfp4(kv_cache_sf, k, "k")
    if q.ndim != 3:
        raise ValueError(f"q must have shape [qo_len, num_qo_heads, head_dim_qk]; got {tuple(q.shape)}")
    code(LAYOUTS, kv_layout, "kv_layout")
    code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")
    options: dict[str, Any] = {"causal": causal, "window_left": window_left}
    options |= {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v}
    soft_cap, plain = logits_soft_cap or 0.0, custom_mask is packed_custom_mask is None
    if custom_mask is not None and k.ndim == 3 and custom_mask.ndim != 2:
        shape = (q.shape[0], k.shape[LAYOUTS[kv_layout]])
        custom_mask = custom_mask.reshape(shape) if custom_mask.numel() == shape[0] * shape[1] else custom_mask
    of_batch = (kv_layout, o_dtype, return_lse, (sm_scale, k_scale, v_scale))
    batch = functools.partial(_prefill_as_batch, (q, k, v), *of_batch, soft_cap=soft_cap, **options)
    if kv_cache_sf is not None or is_on():  # the kernels of single requests follow the number of query tokens
        more = _options_of_batch((q, k, v), kv_cache_sf, kv_layout, causal, (custom_mask, packed_custom_mask))
        more |= {"rope_scale": rope_scale or 1.0, "rope_theta": rope_theta or 1e4, "num_ctas": num_ctas}
        return batch(backend=backend, pos_encoding=POS_ENCODINGS[pos_encoding_mode], **more)
    if _prefill_is_regular(q, k, v, kv_layout, causal):
        form = (LAYOUTS[kv_layout], o_dtype or q.dtype, pos_encoding_mode, backend)
        facts: dict[str, Any] = {"mask": "plain" if plain else "custom", "soft_cap": soft_cap > 0.0}
        facts |= {"scaled": not (scale_q is scale_k is scale_v is None)}
        choice = single_choice(q, k, v, *form, decode=False, **facts)
        if choice.implementation == "batch_prefill":
            return batch(backend="fa3", num_ctas=num_ctas)
    return attend(
        q, k, v, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale, qk_factor=k_scale,
        v_scale=v_scale, rope_scale=rope_scale, rope_theta=rope_theta, out_dtype=o_dtype, return_lse=return_lse,
        custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, logits_soft_cap=soft_cap, **options,
    )  # fmt: skip


def _prefill_as_batch(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kv_layout: str,
    out_dtype: torch.dtype | None,
    return_lse: bool,
    scales: tuple[float | None, float | None, float | None],
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Runs batch prefill on one request. scales: sm_scale, k_scale and v_scale; options: of `attend_once`."""
    (q, k, v), layout, (sm_scale, k_scale, v_scale) = tensors, LAYOUTS[kv_layout], scales
    out, lse = contract.results(q, (*q.shape[:2], contract.row_elements(v)), None, None, return_lse, out_dtype)
    options |= contract.op_scales((q.shape[2] ** -0.5 if sm_scale is None else sm_scale, k_scale), (1.0, v_scale))
    attend_once(out, lse, q, k, v, layout, 1, pages_per_request=k.shape[layout], **options)
    return out if lse is None else (out, lse)


def _options_of_batch(
    tensors: tuple[torch.Tensor, ...], kv_cache_sf: Any, kv_layout: str, causal: bool, masks: tuple[Any, Any]
) -> dict[str, Any]:
    """The scales of NVFP4 keys and the packed mask as options of `attend_once`. Raises ValueError."""
    (q, k, v), (custom_mask, packed) = tensors, masks
    found: dict[str, Any] = {}
    if kv_cache_sf is not None:
        found["k_scales"], found["v_scales"] = contract.scales_of(kv_cache_sf, kv_layout, paged=False)
    if k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"k and v must have 3 dimensions; got shapes {tuple(k.shape)} and {tuple(v.shape)}")
    tokens = k.shape[LAYOUTS[kv_layout]]
    if custom_mask is packed is None:
        if causal and tokens < q.shape[0]:
            raise ValueError(f"causal: kv_len of at least qo_len = {q.shape[0]} is required; got {tokens}")
        return found
    bounds = torch.tensor([0, q.shape[0] * tokens])
    offsets = byte_bounds(bounds)
    if packed is not None:
        check_packed(packed, offsets)
    else:
        packed, offsets = pack(custom_mask, bounds, None)
    return {**found, "mask": packed, "mask_indptr": offsets.to(q.device)}


def _prefill_is_regular(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, causal: bool) -> bool:
    """Whether shapes fit each other, and nothing is traced. Errors of every kernel are left to the op to word."""
    if torch.compiler.is_compiling():
        return False
    if k.ndim != 3 or v.ndim != 3 or q.shape[2] != k.shape[2] or v.shape[-1] < 8 or v.dtype is not k.dtype:
        return False
    tokens, heads = (k.shape[0], k.shape[1]) if kv_layout == "NHD" else (k.shape[1], k.shape[0])
    return heads > 0 and q.shape[1] % heads == 0 and not (causal and tokens < q.shape[0])


single_prefill_with_kv_cache_return_lse = setting_lse(single_prefill_with_kv_cache)
single_prefill_with_kv_cache_return_lse.__doc__ = "`single_prefill_with_kv_cache` with return_lse: (out, lse)."


@with_lse
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
    """Attention of one request by a user's variant.

    The arguments that are not listed are those of single_decode_with_kv_cache_with_jit_module; the result is that of
    single_prefill_with_kv_cache.

    Args:
        jit_module: the result of `gen_customize_single_prefill_module(...).build_and_load()`.
        mask_mode: a value of MaskMode. CAUSAL masks later keys; with NON_CAUSAL or CUSTOM only the variant's mask
            applies.

    Raises:
        TypeError: a missing or wrong argument, by name.
        ValueError: a missing or wrong argument, by name.
        NotImplementedError: multi-item scoring.
    """
    from fi_core.attention.custom import custom_attention

    if mask_mode == MaskMode.MULTIITEMSCORING.value:
        raise unsupported("mask_mode", mask_mode, "items (3) are an option of plan of the batch wrappers")
    if mask_mode not in (mode.value for mode in MaskMode):
        raise ValueError(f"mask_mode: a value of MaskMode is required, 0 to 2; got {mask_mode}")
    causal = mask_mode == MaskMode.CAUSAL.value
    return custom_attention(jit_module).attend(q, k, v, args, kv_layout, causal, window_left, return_lse)
