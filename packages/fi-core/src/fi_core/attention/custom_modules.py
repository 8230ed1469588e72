"""FlashInfer's generators of attention modules with a user's variant, and the variants of wrappers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fi_core.attention import derived
from fi_core.attention.custom import ROPE, CustomAttention, VariantModule, variant_module
from fi_core.observe.describe import words
from fi_core.runtime.lazy import torch
from fi_core.runtime.signature import takes
from fi_core.utils import canonicalize_torch_dtype

One: TypeAlias = VariantModule[CustomAttention]
Both: TypeAlias = VariantModule[tuple[CustomAttention, CustomAttention]]
_DTYPES, _DIMS = ("dtype_q", "dtype_kv", "dtype_o"), ("head_dim_qk", "head_dim_vo")
_DECLARED = words(
    "additional_tensor_names additional_tensor_dtypes additional_scalar_names additional_scalar_dtypes variant_name",
    "variant_decl",
)


def _both(prefill: One, decode: One, name: str) -> Both:
    artifacts = dict.fromkeys((*prefill.artifacts, *decode.artifacts))
    return VariantModule(name, tuple(artifacts), (prefill.made, decode.made))


def _check_backend(backend: str, known: tuple[str, ...] = ("auto", "fa2")) -> None:
    if backend not in known:
        raise NotImplementedError(
            f'backend: variants of this function run with {", ".join(known)}; got {backend!r}, pass backend="fa2" and '
            "a struct on AttentionVariantBase"
        )


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
    """Batch prefill with the attention variant that a struct in CUDA C++ declares. It does not compile yet.

    `jit_args` of the batch prefill wrappers are the arguments without backend. `build_and_load()` compiles for
    FI_CUDA_ARCH_LIST or the visible GPUs, else for the CPU.

    Args:
        backend: "auto" takes the wgmma kernel of Hopper where it supports a request, else mma.sync; "fa2" always
            mma.sync; "fa3" always wgmma.
        uri: a name for files and messages.
        dtype_q, dtype_kv, dtype_o: dtypes of q, of k and v, and of the output.
        idtype: dtype of page tables, int32.
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
        use_fp16_qk_reduction: without effect; sums are fp32.
        fp8_enabled: not supported.
        paged_kv_stride_mode, module_surface: without effect; one module supports all strides and both wrappers.

    Raises:
        ValueError: names, types or head dims, also those that "fa3" does not support; idtype.
        NotImplementedError: fp8_enabled; a struct that is written for another backend.
    """
    _check_backend(backend, ("auto", "fa2", "fa3"))
    _check_index(idtype)
    lists = additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes
    declared = (*lists, variant_name, variant_decl)
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    module = functools.partial(variant_module, "batch_prefill", uri, dtypes, dims, declared, pos_encoding_mode)
    return module(fp8_enabled=fp8_enabled, backend=backend)


def _without(names: str) -> list[str]:
    """The parameters of gen_customize_batch_prefill_module without these."""
    return [
        name for name in inspect.signature(gen_customize_batch_prefill_module).parameters if name not in words(names)
    ]


def _variant(op: str, given: Mapping[str, Any], **options: Any) -> One:
    """The module of a generator with these arguments."""
    dtypes, dims, declared = (tuple(given[name] for name in names) for names in (_DTYPES, _DIMS, _DECLARED))
    return variant_module(op, given["uri"], dtypes, dims, declared, given["pos_encoding_mode"], **options)


_SINGLE = _without("backend idtype use_fp16_qk_reduction fp8_enabled paged_kv_stride_mode module_surface")


@takes(derived.single_decode_module, _SINGLE, gen_customize_batch_prefill_module)
def gen_customize_single_decode_module(given: dict[str, Any]) -> One:
    """Decode of one request with a variant, for `single_decode_with_kv_cache_with_jit_module`.

    The arguments are those of gen_customize_batch_prefill_module.

    Raises:
        NotImplementedError: a struct that is written for backend fa3.
    """
    return _variant("single_attention", given, few=True)


_PREFILL = _without("idtype paged_kv_stride_mode module_surface")


@takes(derived.single_prefill_module, _PREFILL, gen_customize_batch_prefill_module)
def gen_customize_single_prefill_module(given: dict[str, Any]) -> One:
    """Prefill of one request with a variant, for `single_prefill_with_kv_cache_with_jit_module`.

    The arguments that are not listed are those of gen_customize_batch_prefill_module.

    Args:
        backend: "auto" or "fa2".

    Raises:
        NotImplementedError: another backend, fp8_enabled.
    """
    _check_backend(given["backend"])
    return _variant("single_attention", given, fp8_enabled=given["fp8_enabled"])


_DECODE = _without("backend use_fp16_qk_reduction fp8_enabled paged_kv_stride_mode module_surface")


@takes(derived.batch_decode_module, _DECODE, gen_customize_batch_prefill_module)
def gen_customize_batch_decode_module(given: dict[str, Any]) -> One:
    """Batch decode with a variant: `jit_args` and `jit_kwargs` of BatchDecodeWithPagedKVCacheWrapper are its arguments.

    They are those of gen_customize_batch_prefill_module.
    """
    _check_index(given["idtype"])
    return _variant("batch_decode", given)


_MIXED = [*(name for name in _DECODE if name != "use_sliding_window"), "use_profiler"]


@takes(derived.batch_attention_module, _MIXED, gen_customize_batch_prefill_module)
def gen_customize_batch_attention_module(given: dict[str, Any], use_profiler: bool = False) -> Both:
    """A mixed batch with a variant: `jit_args` of BatchAttention and BatchPODWithPagedKVCacheWrapper are its arguments.

    The arguments that are not listed are those of gen_customize_batch_prefill_module.

    Args:
        use_logits_soft_cap: without effect.
        use_profiler: must be False.

    Raises:
        NotImplementedError: use_profiler.
    """
    if use_profiler:
        raise NotImplementedError("use_profiler: not supported, profile with fi-bench or Nsight; pass False")
    prefill, decode = gen_customize_batch_prefill_module("auto", **given), gen_customize_batch_decode_module(**given)
    return _both(prefill, decode, f"batch_attention_{given['uri']}")


_OF_POD = words(
    "uri dtype_q dtype_kv dtype_o dtype_idx=idtype head_dim=head_dim_qk additional_tensor_names",
    "additional_tensor_dtypes additional_scalar_names additional_scalar_dtypes variant_name_p=variant_name",
    "variant_name_d=variant_name variant_decl pos_encoding_mode_p=pos_encoding_mode",
    "use_sliding_window_p=use_sliding_window use_logits_soft_cap_p=use_logits_soft_cap",
    "pos_encoding_mode_d=pos_encoding_mode use_sliding_window_d=use_sliding_window",
    "use_logits_soft_cap_d=use_logits_soft_cap use_fp16_qk_reduction",
)


@takes(derived.pod_module, _OF_POD, gen_customize_batch_prefill_module)
def gen_customize_pod_module(given: dict[str, Any]) -> Both:
    """POD attention with variants: `jit_args` of PODWithPagedKVCacheWrapper are its arguments.

    The arguments that are not listed are those of gen_customize_batch_prefill_module.

    Args:
        dtype_idx: dtype of page tables, int32.
        head_dim: of q, k and v.
        variant_name_p, variant_name_d: the structs of prefill and of decode in variant_decl; they have the same
            arguments.
        pos_encoding_mode_p, pos_encoding_mode_d: of prefill and of decode.
        use_sliding_window_p, use_logits_soft_cap_p, use_sliding_window_d, use_logits_soft_cap_d, use_fp16_qk_reduction:
            without effect.
    """
    of_decode = {name[:-2]: given.pop(name) for name in [*given] if name.endswith("_d")}
    del given["use_fp16_qk_reduction"]
    uri, given["head_dim_vo"] = given.pop("uri"), given["head_dim_qk"]
    prefill = gen_customize_batch_prefill_module("auto", f"{uri}_p", **given)
    decode = gen_customize_batch_decode_module(**{"uri": f"{uri}_d", **given, **of_decode})
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
