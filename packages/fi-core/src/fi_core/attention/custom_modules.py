"""FlashInfer's generators of attention modules with a user's variant, and the variants of wrappers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fi_core.attention.custom import ROPE, CustomAttention, VariantModule, variant_module
from fi_core.runtime.lazy import torch
from fi_core.utils import canonicalize_torch_dtype

One: TypeAlias = VariantModule[CustomAttention]
Both: TypeAlias = VariantModule[tuple[CustomAttention, CustomAttention]]


def _both(prefill: One, decode: One, name: str) -> Both:
    artifacts = dict.fromkeys((*prefill.artifacts, *decode.artifacts))
    return VariantModule(name, tuple(artifacts), (prefill.made, decode.made))


def _check_backend(backend: str, known: tuple[str, ...] = ("auto", "fa2")) -> None:
    if backend not in known:
        raise NotImplementedError(
            f'backend: variants of this function run with {", ".join(known)}; got {backend!r}, pass backend="fa2" and '
            "a struct on AttentionVariantBase"
        )


def gen_customize_single_decode_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
) -> One:
    """Decode of one request with the attention variant that a struct in CUDA C++ declares. It does not compile yet.

    `build_and_load()` compiles for FI_CUDA_ARCH_LIST or the visible GPUs, else for the CPU, and returns the argument of
    `single_decode_with_kv_cache_with_jit_module`.

    Args:
        uri: a name for files and messages.
        dtype_q, dtype_kv, dtype_o: dtypes of q, of k and v, and of the output.
        head_dim_qk, head_dim_vo: multiples of 8 up to 512.
        additional_tensor_names, additional_tensor_dtypes: tensors that the variant reads by name from `params`, and the
            C types of their elements, such as "float" or "uint8_t".
        additional_scalar_names, additional_scalar_dtypes: scalars that it reads likewise: "double", "int64_t", "float",
            ...
        variant_name: name of the struct.
        variant_decl: text of the struct, derived from AttentionVariantBase, as docs/guides/custom-attention.md
            describes.
        pos_encoding_mode: 1 (ROPE_LLAMA) rotates q and k first; other values leave the encoding to the variant.
        use_sliding_window, use_logits_soft_cap: without effect; the window of a call always applies.

    Raises:
        ValueError: names, types or head dims.
        NotImplementedError: a struct that is written for backend fa3.
    """
    lists = additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes
    declared = (*lists, variant_name, variant_decl)
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    return variant_module("single_attention", uri, dtypes, dims, declared, pos_encoding_mode, few=True)


def gen_customize_single_prefill_module(
    backend: str,
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
) -> One:
    """Prefill of one request with a variant, for `single_prefill_with_kv_cache_with_jit_module`.

    The arguments that are not listed are those of gen_customize_single_decode_module.

    Args:
        backend: "auto" or "fa2".
        use_fp16_qk_reduction: without effect; sums are fp32.
        fp8_enabled: not supported.

    Raises:
        NotImplementedError: another backend, fp8_enabled.
    """
    _check_backend(backend)
    lists = additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes
    declared = (*lists, variant_name, variant_decl)
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    return variant_module("single_attention", uri, dtypes, dims, declared, pos_encoding_mode, fp8_enabled=fp8_enabled)


def gen_customize_batch_decode_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    idtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
) -> One:
    """Batch decode with a variant: `jit_args` and `jit_kwargs` of BatchDecodeWithPagedKVCacheWrapper are its arguments.

    The arguments that are not listed are those of gen_customize_single_decode_module.

    Args:
        idtype: dtype of page tables, int32.

    Raises:
        ValueError: idtype.
    """
    _check_index(idtype)
    lists = additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes
    declared = (*lists, variant_name, variant_decl)
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    return variant_module("batch_decode", uri, dtypes, dims, declared, pos_encoding_mode)


def gen_customize_batch_prefill_module(
    backend: str,
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    idtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
    paged_kv_stride_mode: str = "runtime",
    module_surface: str = "full",
) -> One:
    """Batch prefill with a variant: `jit_args` of the batch prefill wrappers are its arguments without backend.

    The arguments that are not listed are those of gen_customize_single_prefill_module and
    gen_customize_batch_decode_module.

    Args:
        backend: "auto" takes the wgmma kernel of Hopper where it supports a request, else mma.sync; "fa2" always
            mma.sync; "fa3" always wgmma.
        paged_kv_stride_mode, module_surface: without effect; one module supports all strides and both wrappers.

    Raises:
        ValueError: types or head dims that "fa3" does not support.
    """
    _check_backend(backend, ("auto", "fa2", "fa3"))
    _check_index(idtype)
    lists = additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes
    declared = (*lists, variant_name, variant_decl)
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    module = functools.partial(variant_module, "batch_prefill", uri, dtypes, dims, declared, pos_encoding_mode)
    return module(fp8_enabled=fp8_enabled, backend=backend)


def gen_customize_batch_attention_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    idtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    pos_encoding_mode: int = 0,
    use_logits_soft_cap: bool = False,
    use_profiler: bool = False,
) -> Both:
    """A mixed batch with a variant: `jit_args` of BatchAttention and BatchPODWithPagedKVCacheWrapper are its arguments.

    The arguments that are not listed are those of gen_customize_batch_decode_module.

    Args:
        use_logits_soft_cap: without effect.
        use_profiler: must be False.

    Raises:
        NotImplementedError: use_profiler.
    """
    if use_profiler:
        raise NotImplementedError("use_profiler: not supported, profile with fi-bench or Nsight; pass False")
    types = (dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk, head_dim_vo)
    lists = additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes
    given = (uri, *types, *lists, variant_name, variant_decl, pos_encoding_mode)
    prefill, decode = gen_customize_batch_prefill_module("auto", *given), gen_customize_batch_decode_module(*given)
    return _both(prefill, decode, f"batch_attention_{uri}")


def gen_customize_pod_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name_p: str,
    variant_name_d: str,
    variant_decl: str,
    pos_encoding_mode_p: int = 0,
    use_sliding_window_p: bool = False,
    use_logits_soft_cap_p: bool = False,
    pos_encoding_mode_d: int = 0,
    use_sliding_window_d: bool = False,
    use_logits_soft_cap_d: bool = False,
    use_fp16_qk_reduction: bool = False,
) -> Both:
    """POD attention with variants: `jit_args` of PODWithPagedKVCacheWrapper are its arguments.

    The arguments that are not listed are those of gen_customize_batch_decode_module.

    Args:
        dtype_idx: dtype of page tables, int32.
        head_dim: of q, k and v.
        variant_name_p, variant_name_d: the structs of prefill and of decode in variant_decl; they have the same
            arguments.
        pos_encoding_mode_p, pos_encoding_mode_d: of prefill and of decode.
        use_sliding_window_p, use_logits_soft_cap_p, use_sliding_window_d, use_logits_soft_cap_d, use_fp16_qk_reduction:
            without effect.
    """
    lists = additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes
    given = (dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim, head_dim, *lists)
    of_prefill = (f"{uri}_p", *given, variant_name_p, variant_decl, pos_encoding_mode_p)
    prefill = gen_customize_batch_prefill_module("auto", *of_prefill)
    decode = gen_customize_batch_decode_module(f"{uri}_d", *given, variant_name_d, variant_decl, pos_encoding_mode_d)
    return _both(prefill, decode, f"pod_{uri}")


gen_customize_batch_pod_module = gen_customize_pod_module


def pod_variants(jit_args: Sequence[Any]) -> tuple[CustomAttention, tuple[Any, ...]]:
    """Of the arguments of gen_customize_pod_module: prefill, and the jit_args of decode. Raises its errors."""
    if not isinstance(jit_args, (tuple, list)):
        raise TypeError(f"jit_args: a tuple is required; got {type(jit_args).__name__}")
    try:
        prefill, decode = gen_customize_pod_module(*jit_args).made
    except TypeError as error:
        raise TypeError(f"jit_args: {error}") from None
    uri, q, kv, o, idx, dim, *lists = jit_args[:10]
    given = (f"{uri}_d", q, kv, o, idx, dim, dim, *lists, jit_args[11], jit_args[12])
    return prefill, (*given, ROPE) if decode.rope else given


def _check_index(idtype: Any) -> None:
    if canonicalize_torch_dtype(idtype) is not torch.int32:
        raise ValueError(f"idtype: torch.int32 is required, the type of page tables; got {idtype}")


def get_customize_batch_prefill_module(backend: str, *args: Any, **options: Any) -> CustomAttention:
    """`gen_customize_batch_prefill_module` with these arguments, built and loaded."""
    made: CustomAttention = gen_customize_batch_prefill_module(backend, *args, **options).build_and_load()
    return made


def customised(
    kind: str, backend: str, device: torch.device, jit_args: Sequence[Any] | None, jit_kwargs: Mapping[str, Any] | None
) -> CustomAttention:
    """The variant that a wrapper runs instead of the built-in attention, compiled for its device.

    kind: "decode" or "prefill". Raises TypeError (number of jit_args, names in jit_kwargs), ValueError (no jit_args)
    and the errors of the generators and compilers.
    """
    if jit_args is None:
        raise ValueError(f"jit_kwargs: jit_args are required beside them; got {', '.join(jit_kwargs or ())} alone")
    _check_backend(backend, ("auto", "fa2", "fa3") if kind == "prefill" else ("auto", "fa2"))
    parameters = inspect.signature(gen_customize_batch_decode_module).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    least, names = len(required), ", ".join(required)
    if not isinstance(jit_args, (tuple, list)):
        raise TypeError(f"jit_args: a tuple is required, of {names}; got {type(jit_args).__name__}")
    if len(jit_args) < least:
        raise TypeError(f"jit_args: {least} are required, {names}; got {len(jit_args)}")
    generate: Callable[..., One] = gen_customize_batch_decode_module
    if kind == "prefill":
        generate = functools.partial(gen_customize_batch_prefill_module, backend)
    try:
        made = generate(*jit_args, **(jit_kwargs or {})).made
    except TypeError as error:
        raise TypeError(f"jit_args, jit_kwargs: {error}") from None
    made.on(device)
    return made
