"""Attention with a user's variant: FlashInfer's customised modules, and how they are run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fi_core.attention.ops.decode import BATCH_DECODE
from fi_core.attention.ops.prefill import BATCH_PREFILL, Q_TILE
from fi_core.attention.ops.single import SINGLE_ATTENTION, attend
from fi_core.attention.variant import CustomOp, Variant, VariantCall, alibi_slopes
from fi_core.jit import core
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.target import Target
from fi_core.utils import PosEncodingMode, canonicalize_torch_dtype

if TYPE_CHECKING:
    import torch

ROPE = PosEncodingMode.ROPE_LLAMA.value
_OPS = {op.name: op for op in (SINGLE_ATTENTION, BATCH_DECODE, BATCH_PREFILL)}
_FP32_ROWS = "f32"
_WIDE = 256  # head dims above take another kernel on CUDA cores


@dataclass(frozen=True)
class CustomAttention:
    """An attention op with a variant, for the types and head dims that it was declared with."""

    custom: CustomOp
    dtypes: tuple[Any, Any, Any]  # q, kv, output
    head_dims: tuple[int, int]
    rope: bool
    calls: dict[Any, Callable[..., None]]

    @property
    def variant(self) -> Variant:
        return self.custom.variant

    def on(self, device: torch.device) -> Callable[..., None]:
        """The op on a device, compiled at the first call for it. Raises CompileError."""
        call = self.calls.get(device)
        if call is None:
            call = self.calls[device] = self.custom.bind(device)
        return call

    def declares(self, tensor: str) -> bool:
        return any(name == tensor for name, _ in self.variant.tensors)

    def launch(
        self, wrapper: Any, q: torch.Tensor, given: Sequence[Any], known: Mapping[str, Any], *scales: Any
    ) -> tuple[int, VariantCall]:
        """For the run of a planned wrapper: the position encoding, and the op with the variant's arguments.

        given: positional arguments after the cache. known: tensors that are never given, except maybe_alibi_slopes.
        scales: q_scale, k_scale and sinks of run, which a variant must implement itself (NotImplementedError).
        """
        for name, scale in zip(("q_scale", "k_scale", "sinks"), scales):
            if scale is not None:
                raise NotImplementedError(f"{name}: declare it as an argument of the variant, whose logits are its own")
        if self.declares("maybe_alibi_slopes"):
            known = {**known, "maybe_alibi_slopes": alibi_slopes(q.shape[1], q.device)}
        scale = wrapper._sm_scale
        derived = {
            "logits_soft_cap": wrapper._logits_soft_cap or 0.0,
            "sm_scale": q.shape[2] ** -0.5 if scale is None else scale,
            "rope_rcp_scale": 1.0 / (wrapper._rope_scale or 1.0),
            "rope_rcp_theta": 1.0 / (wrapper._rope_theta or 1e4),
            "scale_q_scalar": 1.0,
            "scale_k_scalar": 1.0,
            "scale_v_scalar": 1.0,
            "token_pos_in_items_len": getattr(wrapper, "_token_pos_in_items_len", 0),
        }
        encoding = PosEncodingMode[wrapper._pos_encoding_mode].value
        extras = self.variant.arguments(given, known, derived, q.device)
        return ROPE if self.rope else encoding, VariantCall(self.on(q.device), extras)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        given: Sequence[Any],
        kv_layout: str,
        causal: bool,
        window_left: int,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One request; q `[heads, d]` or `[qo_len, heads, d]`."""
        if self.custom.op.name != "single_attention":
            raise ValueError(f"jit_module: one for a single request is required; got one for {self.custom.op.name}")
        for name, x, ranks in (("q", q, (2, 3)), ("k", k, (3,)), ("v", v, (3,))):
            if x.ndim not in ranks:
                raise ValueError(
                    f"{name}: {' or '.join(map(str, ranks))} dimensions are required; got {tuple(x.shape)}"
                )
        self.check(q.dtype, k.dtype, self.dtypes[2], q.shape[-1], v.shape[-1])
        extras = self.variant.arguments(given, {}, {}, q.device)
        few = bool(dict(self.custom.axes)["few"])
        return attend(
            q, k, v, kv_layout=kv_layout, pos_encoding_mode="ROPE_LLAMA" if self.rope else "NONE",
            window_left=window_left, out_dtype=self.dtypes[2], return_lse=return_lse, splits=few, causal=causal,
            variant=VariantCall(self.on(q.device), extras),
        )  # fmt: skip

    def check(self, q: Any, kv: Any, out: Any, head_dim_qk: int, head_dim_vo: int) -> None:
        """Raises ValueError if a call or a plan differs from the declaration of the module."""
        for name, got, wanted in (
            ("dtype_q", q, self.dtypes[0]),
            ("dtype_kv", kv, self.dtypes[1]),
            ("dtype_o", out, self.dtypes[2]),
            ("head_dim_qk", head_dim_qk, self.head_dims[0]),
            ("head_dim_vo", head_dim_vo, self.head_dims[1]),
        ):
            if got != wanted:
                raise ValueError(f"{name}: {self.custom.uri} was made for {wanted}; got {got}")


@dataclass(frozen=True)
class VariantModule(core.JitSpec):
    """The files of one attention op with a variant. Loaded, it is a CustomAttention, which compiles for other devices
    later.
    """

    made: CustomAttention

    def load(self) -> CustomAttention:
        self._load_modules()
        return self.made

    @classmethod
    def of(cls, made: CustomAttention, targets: Sequence[Target]) -> VariantModule:
        artifacts = tuple(dict.fromkeys(a for target in targets for a in made.custom.artifacts(target)))
        spec = cls(made.custom.name, artifacts, made)
        core.jit_spec_registry.register(spec)
        return spec


def _made(
    op: str,
    uri: str,
    dtypes: Sequence[Any],
    head_dims: tuple[int, int],
    declared: tuple[Any, ...],
    pos_encoding_mode: int,
    few: bool = False,
    fp8_enabled: bool = False,
) -> VariantModule:
    """The module of an op; `declared` are the four lists, variant_name and variant_decl. It does not compile."""
    if not re.fullmatch(r"[\w.-]{1,120}", uri):
        raise ValueError(f"uri: 1 to 120 letters, digits and _.- are required, as it names files; got {uri!r}")
    if fp8_enabled:
        raise NotImplementedError("fp8_enabled: fp8 products are not supported in variants; pass 16-bit q, or fp8 keys")
    types = tuple(canonicalize_torch_dtype(dtype) for dtype in dtypes)
    q, kv = short_name(types[0]), short_name(types[1])
    fp32, wide = q == _FP32_ROWS, max(head_dims) > _WIDE
    if op == "single_attention":
        few = fp32 or (few and not wide)
        axes: dict[str, object] = {"few": few, "q": q, "kv": kv}
        implementation = "cuda_core" if few else "mma_sm80"
        entry = (
            "single_attention_cuda_core_wide"
            if few and wide
            else "single_attention_cuda_core"
            if few
            else "single_attention_mma"
        )
    elif op == "batch_decode":
        axes = {"q": q, "kv": kv, "head_dim": 0}
        implementation, entry = "cuda_core", "batch_decode_cuda_core_wide" if wide else "batch_decode_cuda_core"
    else:
        axes = {"q": q, "kv": kv, "head_dim": 0, "soft_cap": False}
        implementation, entry = "mma_sm80", "batch_prefill_mma"
    found = _OPS[op]
    wrong = [f"{name}: one of {', '.join(map(str, found.axes[name]))} is required; got {axes[name]}"
             for name in ("q", "kv") if axes[name] not in found.axes[name]]  # fmt: skip
    if wrong:
        raise ValueError(f"dtype_{wrong[0]}")
    facts: dict[str, object] = {"q": q, "kv": kv, "head_dim_qk": head_dims[0], "head_dim_vo": head_dims[1]}
    if op == "single_attention":
        facts["qo_len"] = 1 if few else Q_TILE
    custom = CustomOp(
        found, uri, Variant.of(*declared), tuple(axes.items()), tuple(facts.items()), implementation, entry
    )
    made = CustomAttention(custom, types, head_dims, pos_encoding_mode == ROPE, {})  # type: ignore[arg-type]
    return VariantModule.of(made, core.default_targets())


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "fa2"):
        raise NotImplementedError(
            f"backend: variants run on the kernels for sm_80 and later; got {backend!r}, pass "
            'backend="fa2" and a struct on AttentionVariantBase'
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
) -> VariantModule:
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

    Returns:
        A VariantModule.

    Raises:
        ValueError: names, types or head dims.
        NotImplementedError: a struct that is written for backend fa3.
    """
    declared = (
        additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes,
        variant_name, variant_decl,
    )  # fmt: skip
    dtypes = (dtype_q, dtype_kv, dtype_o)
    return _made("single_attention", uri, dtypes, (head_dim_qk, head_dim_vo), declared, pos_encoding_mode, few=True)


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
) -> VariantModule:
    """Prefill of one request with a variant, for `single_prefill_with_kv_cache_with_jit_module`.

    The arguments that are not listed are those of gen_customize_single_decode_module.

    Args:
        backend: "auto" or "fa2".
        use_fp16_qk_reduction: without effect; sums are fp32.
        fp8_enabled: not supported.

    Returns:
        A VariantModule.

    Raises:
        NotImplementedError: another backend, fp8_enabled.
    """
    _check_backend(backend)
    declared = (
        additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes,
        variant_name, variant_decl,
    )  # fmt: skip
    dtypes = (dtype_q, dtype_kv, dtype_o)
    return _made(
        "single_attention", uri, dtypes, (head_dim_qk, head_dim_vo), declared, pos_encoding_mode,
        fp8_enabled=fp8_enabled,
    )  # fmt: skip


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
) -> VariantModule:
    """Batch decode with a variant: `jit_args` and `jit_kwargs` of BatchDecodeWithPagedKVCacheWrapper are its arguments.

    The arguments that are not listed are those of gen_customize_single_decode_module.

    Args:
        idtype: dtype of page tables, int32.

    Returns:
        A VariantModule.

    Raises:
        ValueError: idtype.
    """
    _check_index(idtype)
    declared = (
        additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes,
        variant_name, variant_decl,
    )  # fmt: skip
    return _made(
        "batch_decode", uri, (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo), declared, pos_encoding_mode
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
) -> VariantModule:
    """Batch prefill with a variant: `jit_args` of the batch prefill wrappers are its arguments without backend.

    The arguments that are not listed are those of gen_customize_single_prefill_module and
    gen_customize_batch_decode_module.

    Args:
        paged_kv_stride_mode, module_surface: without effect; one module supports all strides and both wrappers.

    Returns:
        A VariantModule.
    """
    _check_backend(backend)
    _check_index(idtype)
    declared = (
        additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes,
        variant_name, variant_decl,
    )  # fmt: skip
    return _made(
        "batch_prefill", uri, (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo), declared, pos_encoding_mode,
        fp8_enabled=fp8_enabled,
    )  # fmt: skip


def _no_variant(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} takes no variant: use the batch prefill and the batch decode wrapper with jit_args side by side"
    )


def gen_customize_batch_attention_module(*args: Any, **options: Any) -> VariantModule:
    """Not supported (NotImplementedError): prefill and decode wrappers take variants, BatchAttention does not."""
    raise _no_variant("BatchAttention")


def gen_customize_pod_module(*args: Any, **options: Any) -> VariantModule:
    """Not supported (NotImplementedError): prefill and decode wrappers take variants, POD attention does not."""
    raise _no_variant("POD attention")


def gen_customize_batch_pod_module(*args: Any, **options: Any) -> VariantModule:
    """Not supported (NotImplementedError): prefill and decode wrappers take variants, POD attention does not."""
    raise _no_variant("POD attention")


def custom_attention(jit_module: Any) -> CustomAttention:
    """The `jit_module` argument of a function, checked. Raises TypeError."""
    if not isinstance(jit_module, CustomAttention):
        raise TypeError(
            "jit_module: what build_and_load() of a gen_customize_..._module gives is required; got "
            f"{type(jit_module).__name__}"
        )
    return jit_module


def _check_index(idtype: Any) -> None:
    import torch

    if canonicalize_torch_dtype(idtype) is not torch.int32:
        raise ValueError(f"idtype: torch.int32 is required, the type of page tables; got {idtype}")


def get_customize_batch_prefill_module(backend: str, *args: Any, **options: Any) -> CustomAttention:
    """`gen_customize_batch_prefill_module` with these arguments, built and loaded."""
    made: CustomAttention = gen_customize_batch_prefill_module(backend, *args, **options).build_and_load()
    return made


def customised(
    kind: str,
    backend: str,
    device: torch.device,
    jit_args: Sequence[Any] | None,
    jit_kwargs: Mapping[str, Any] | None,
) -> CustomAttention:
    """The variant that a wrapper runs instead of the built-in attention, compiled for its device.

    kind: "decode" or "prefill". Raises TypeError (number of jit_args, names in jit_kwargs), ValueError (no jit_args)
    and the errors of the generators and compilers.
    """
    if jit_args is None:
        raise ValueError(f"jit_kwargs: jit_args are required beside them; got {', '.join(jit_kwargs or ())} alone")
    _check_backend(backend)
    names = (
        "uri, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk, head_dim_vo, additional_tensor_names, "
        "additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes, variant_name, variant_decl"
    )
    least = names.count(",") + 1
    if not isinstance(jit_args, (tuple, list)):
        raise TypeError(f"jit_args: a tuple is required, of {names}; got {type(jit_args).__name__}")
    if len(jit_args) < least:
        raise TypeError(f"jit_args: {least} are required, {names}; got {len(jit_args)}")
    generate: Callable[..., VariantModule] = gen_customize_batch_decode_module
    if kind == "prefill":
        generate = functools.partial(gen_customize_batch_prefill_module, backend)
    try:
        made = generate(*jit_args, **(jit_kwargs or {})).made
    except TypeError as error:
        raise TypeError(f"jit_args, jit_kwargs: {error}") from None
    made.on(device)
    return made
