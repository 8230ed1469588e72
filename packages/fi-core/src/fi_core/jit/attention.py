"""Attention modules at FlashInfer's import path: those of one configuration, and those with a user's variant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fi_core.attention.custom_modules import (
    gen_customize_batch_attention_module,
    gen_customize_batch_decode_module,
    gen_customize_batch_pod_module,
    gen_customize_batch_prefill_module,
    gen_customize_pod_module,
    gen_customize_single_decode_module,
    gen_customize_single_prefill_module,
)
from fi_core.jit import base
from fi_core.jit.ops import gen_module, module_of_requests
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.target import Target
from fi_core.utils import PosEncodingMode

__all__ = [
    "gen_batch_attention_module",
    "gen_batch_decode_module",
    "gen_batch_mla_module",
    "gen_batch_pod_module",
    "gen_batch_prefill_module",
    "gen_customize_batch_attention_module",
    "gen_customize_batch_decode_module",
    "gen_customize_batch_pod_module",
    "gen_customize_batch_prefill_module",
    "gen_customize_pod_module",
    "gen_customize_single_decode_module",
    "gen_customize_single_prefill_module",
    "gen_pod_module",
    "gen_single_decode_module",
    "gen_single_prefill_module",
]
_LONG_PROMPT = 128  # query tokens: more than kernels for few rows take


def gen_single_decode_module(
    dtype_q: Any,
    dtype_kv: Any,
    dtype_o: Any,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    *,
    targets: Iterable[Target] | None = None,
) -> base.JitSpec:
    """Returns the kernels of `single_decode_with_kv_cache` for one configuration.

    Args:
        dtype_q, dtype_kv, dtype_o: torch dtypes.
        head_dim_qk, head_dim_vo: head dimensions.
        pos_encoding_mode: code of `PosEncodingMode`.
        use_sliding_window: without effect: kernels take any window.
        use_logits_soft_cap: whether scores are capped.
        targets: `base.default_targets()` if None.

    Raises:
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    fields = _fields(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    return module_of_requests("single_decode", {"single_attention": [fields | {"decode": True}]}, targets)


def gen_single_prefill_module(
    backend: str,
    dtype_q: Any,
    dtype_kv: Any,
    dtype_o: Any,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    *,
    targets: Iterable[Target] | None = None,
) -> base.JitSpec:
    """Returns the kernels of `single_prefill_with_kv_cache` for one configuration, for few and many query tokens.

    The arguments that are not listed are those of gen_single_decode_module.

    Args:
        backend: "auto", "fa2" or "fa3"; the module has the kernels of all.
        use_sliding_window, use_fp16_qk_reduction: without effect: kernels take any window and accumulate in fp32.

    Raises:
        ValueError: backend is another word.
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    _check_backend(backend)
    fields = _fields(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    wanted = [fields | {"qo_len": qo_len} for qo_len in (1, _LONG_PROMPT)]
    return module_of_requests("single_prefill", {"single_attention": wanted}, targets)


def gen_batch_decode_module(
    dtype_q: Any = None,
    dtype_kv: Any = None,
    dtype_o: Any = None,
    dtype_idx: Any = None,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    *,
    targets: Iterable[Target] | None = None,
    **axes: Any,
) -> base.JitSpec:
    """Returns the kernels of batch decode for one configuration; `gen_module("batch_decode")` without a dtype.

    The arguments that are not listed are those of gen_single_decode_module.

    Args:
        dtype_idx, use_sliding_window: without effect: kernels read int32 and take any window.
        axes: as for `gen_module`; without effect if dtype_q is given.

    Raises:
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    if dtype_q is None:
        return gen_module("batch_decode", targets=targets, **axes)
    fields = _fields(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    return module_of_requests("batch_decode_with_kv_cache", {"batch_decode": [fields]}, targets)


def gen_batch_prefill_module(
    backend: str | None = None,
    dtype_q: Any = None,
    dtype_kv: Any = None,
    dtype_o: Any = None,
    dtype_idx: Any = None,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    *,
    targets: Iterable[Target] | None = None,
    **axes: Any,
) -> base.JitSpec:
    """Returns the kernels of batch prefill for one configuration; `gen_module("batch_prefill")` without a backend.

    The arguments that are not listed are those of gen_single_decode_module.

    Args:
        backend: "auto", "fa2" or "fa3"; the module has the kernels of all.
        dtype_idx, use_sliding_window, use_fp16_qk_reduction: without effect: kernels read int32, take any window and
            accumulate in fp32.
        axes: as for `gen_module`; without effect if backend is given.

    Raises:
        ValueError: backend is another word.
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    if backend is None:
        return gen_module("batch_prefill", targets=targets, **axes)
    _check_backend(backend)
    fields = _fields(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    return module_of_requests("batch_prefill_with_kv_cache", {"batch_prefill": [fields]}, targets)


def gen_batch_attention_module(
    dtype_q: Any,
    dtype_kv: Any,
    dtype_o: Any,
    dtype_idx: Any,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int = 0,
    use_logits_soft_cap: bool = False,
    use_profiler: bool = False,
    *,
    targets: Iterable[Target] | None = None,
) -> base.JitSpec:
    """Returns the kernels of `BatchAttention` for one configuration: those of batch prefill and batch decode.

    The arguments that are not listed are those of gen_single_decode_module.

    Args:
        dtype_idx: without effect: kernels read int32.
        use_profiler: must be False.

    Raises:
        ValueError: use_profiler is True.
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    _check_profiler(use_profiler)
    fields = _fields(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    wanted = {"batch_prefill": [fields], "batch_decode": [fields]}
    return module_of_requests("batch_attention_with_kv_cache", wanted, targets)


def gen_pod_module(
    dtype_q: Any,
    dtype_kv: Any,
    dtype_o: Any,
    head_dim: int,
    pos_encoding_mode_p: int,
    use_sliding_window_p: bool,
    use_logits_soft_cap_p: bool,
    use_fp16_qk_reduction: bool,
    dtype_idx: Any,
    pos_encoding_mode_d: int,
    use_sliding_window_d: bool,
    use_logits_soft_cap_d: bool,
    *,
    targets: Iterable[Target] | None = None,
) -> base.JitSpec:
    """Returns the kernels of the POD wrappers for one configuration of prefill (`_p`) and one of decode (`_d`).

    The arguments that are not listed are those of gen_single_decode_module.

    Args:
        head_dim: head dimension of q, k and v.
        pos_encoding_mode_p, pos_encoding_mode_d: codes of `PosEncodingMode`.
        use_sliding_window_p, use_sliding_window_d, use_fp16_qk_reduction, dtype_idx: without effect, as for
            `gen_batch_prefill_module`.
        use_logits_soft_cap_p, use_logits_soft_cap_d: whether scores are capped.

    Raises:
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    given = (dtype_q, dtype_kv, dtype_o, head_dim, head_dim)
    prefill = _fields(*given, pos_encoding_mode_p, use_logits_soft_cap_p)
    decode = _fields(*given, pos_encoding_mode_d, use_logits_soft_cap_d)
    return module_of_requests("pod_with_kv_cache", {"batch_prefill": [prefill], "batch_decode": [decode]}, targets)


gen_batch_pod_module = gen_pod_module


def gen_batch_mla_module(
    backend: str | None = None,
    dtype_q: Any = None,
    dtype_kv: Any = None,
    dtype_o: Any = None,
    dtype_idx: Any = None,
    head_dim_ckv: int = 512,
    head_dim_kpe: int = 64,
    use_profiler: bool = False,
    *,
    targets: Iterable[Target] | None = None,
    **axes: Any,
) -> base.JitSpec:
    """Returns the kernels of `BatchMLAPagedAttentionWrapper` for one configuration, for few and many query rows.

    `gen_module("batch_mla")` without a backend.

    The arguments that are not listed are those of gen_single_decode_module.

    Args:
        backend: "auto", "fa2" or "fa3"; the module has the kernels of all.
        dtype_q, dtype_kv, dtype_o: torch dtypes; dtype_o is that of q.
        dtype_idx: without effect: kernels read int32.
        head_dim_ckv, head_dim_kpe: 512 and 64; head_dim_kpe may be 0.
        use_profiler: must be False.
        axes: as for `gen_module`; without effect if backend is given.

    Raises:
        ValueError: backend is another word, a head dim, dtype_o, or use_profiler is True.
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    if backend is None:
        return gen_module("batch_mla", targets=targets, **axes)
    _check_backend(backend)
    _check_profiler(use_profiler)
    if head_dim_ckv != 512 or head_dim_kpe not in (0, 64):
        raise ValueError(
            f"head_dim_ckv, head_dim_kpe: 512 and 64 (or 0) are required; got {head_dim_ckv}, {head_dim_kpe}"
        )
    if dtype_o is not None and dtype_o != dtype_q:
        raise ValueError(f"dtype_o: the dtype of q, {dtype_q}, is required; got {dtype_o}")
    fields = {"q": short_name(dtype_q), "kv": short_name(dtype_kv), "has_rope": head_dim_kpe > 0}
    wanted = [fields | {"rows": rows} for rows in ("narrow", "wide")]
    return module_of_requests("batch_mla_attention", {"batch_mla": wanted}, targets)


def _fields(
    q: Any, kv: Any, out: Any, head_dim_qk: int | None, head_dim_vo: int | None, encoding: int, soft_cap: bool
) -> dict[str, Any]:
    """The fields of a request to an attention op."""
    dtypes = {"q": short_name(q), "kv": short_name(kv), "out": short_name(out)}
    dims = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}
    return {**dtypes, **dims, "pos_encoding": PosEncodingMode(encoding).name, "soft_cap": soft_cap}


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "fa2", "fa3"):
        raise ValueError(f"backend: auto, fa2 or fa3 is required; got {backend!r}")


def _check_profiler(use_profiler: bool) -> None:
    if use_profiler:
        raise ValueError("use_profiler: False is required; `fi-bench profile` times the phases of kernels")
