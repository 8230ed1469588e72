"""POD attention: the prompts and the decode batch of a step, at the same time on different SMs (arXiv:2410.18038)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fi_core.attention import contract, derived
from fi_core.attention.contract import LAYOUTS, POS_ENCODINGS, Cache, code, last_value, row_elements, unpack
from fi_core.attention.custom import CustomAttention, VariantCall, derived_scalars
from fi_core.attention.forms.single import single_prefill_with_kv_cache
from fi_core.attention.forms.tables_prefill import attend_once
from fi_core.attention.ops.prefill import BATCH_PREFILL
from fi_core.attention.ops.request import alignment, facts_of
from fi_core.attention.wrappers import mixed_trace
from fi_core.attention.wrappers.base import AroundWrapper
from fi_core.attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.attention.wrappers.side_by_side import divide, halves, lengths_of, operations, side_by_side
from fi_core.observe.checked import checked
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse
from fi_core.runtime.lazy import torch
from fi_core.runtime.resolve.ahead import planned
from fi_core.runtime.signature import takes

_OF_PLAN = words(
    "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode window_left",
    "q_data_type kv_data_type data_type sm_scale rope_scale rope_theta non_blocking",
)
_TABLES = words("qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len")
_OF_BATCH_POD = words(
    "self qo_indptr_p=qo_indptr kv_indptr_p=paged_kv_indptr kv_indices_p=paged_kv_indices",
    "last_page_len_p=paged_kv_last_page_len qo_indptr_d kv_indptr_d kv_indices_d last_page_len_d num_qo_heads",
    "num_kv_heads head_dim=head_dim_qk page_size pos_encoding_mode window_left q_data_type kv_data_type data_type",
    "sm_scale rope_scale rope_theta non_blocking",
)


_REPEATED = words("kv_layout pos_encoding_mode sm_scale window_left rope_scale rope_theta")  # by run, with its defaults
_DEFAULTS = ("NHD", "NONE", None, -1, None, None)


def _check_repeated(decode: BatchDecodeWithPagedKVCacheWrapper, given: tuple[Any, ...]) -> None:
    """Raises ValueError for an option of decode that is neither the default nor the planned one."""
    for name, value, default in zip(_REPEATED, given, _DEFAULTS) if given != _DEFAULTS else ():
        wanted = decode._plan.scale if name == "sm_scale" else getattr(decode, f"_{name}")
        if value not in (default, wanted):
            raise ValueError(f"{name}_d: {wanted!r} was planned; got {value!r}")


def _attend_request(
    variant: CustomAttention | None, q: Any, k: Any, v: Any, given: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Prefill of one request. given: tensors and scalars of a variant; options: of single_prefill_with_kv_cache."""
    if variant is None:
        return single_prefill_with_kv_cache(q, k, v, **options)
    own = {f"{name}_p": options[name] for name in ("kv_cache_sf", "custom_mask", "packed_custom_mask")}
    refuse("pass it to the variant as one of its tensors", **own)
    layout, sm_scale = code(LAYOUTS, options["kv_layout"], "kv_layout_p"), options["sm_scale"]
    encoding = "ROPE_LLAMA" if variant.rope else "NONE"
    variant.check(q.dtype, k.dtype, variant.dtypes[2], q.shape[-1], v.shape[-1])
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=variant.dtypes[2])
    more = {"pos_encoding": encoding, "alignment": alignment(q, k, v, out)}
    facts = facts_of(q, k, v, out.dtype, max(1, k.shape[1 - layout]), 0, **more)
    choice = planned(BATCH_PREFILL, q.device, variant.backend(q.device), *facts, ahead=False)
    extras = variant.extras(q, given, {}, derived_scalars(q.shape[2] ** -0.5 if sm_scale is None else sm_scale))
    attend_once(
        out, None, q, k, v, layout, 1, pages_per_request=k.shape[layout], pos_encoding=POS_ENCODINGS[encoding],
        backend="fa2", variant=VariantCall(variant.on(q.device, choice.implementation), extras),
        **{name: options[name] for name in ("causal", "window_left", "num_ctas")},
    )  # fmt: skip
    return out


@fi_api
class PODWithPagedKVCacheWrapper(AroundWrapper):
    """Prefill of one request over its K and V, and decode of a batch over a paged KV cache, in one call.

    The results are those of `single_prefill_with_kv_cache` and BatchDecodeWithPagedKVCacheWrapper. On CUDA, if both
    take long enough, the two kernels run at the same time, each on a part of the SMs.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer: as in BatchDecodeWithPagedKVCacheWrapper.
        jit_args: arguments of gen_customize_pod_module, for variants instead of the built-in attention.

    Raises:
        The errors of BatchDecodeWithPagedKVCacheWrapper and of gen_customize_pod_module.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: Sequence[Any] | None = None,
    ) -> None:
        self._variant: CustomAttention | None = None
        of_decode: Sequence[Any] | None = None
        if jit_args is not None:
            from fi_core.attention.custom_modules import pod_variants

            self._variant, of_decode = pod_variants(jit_args)
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        of_graph = (use_cuda_graph, True, *buffers)
        self._inner = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, *of_graph, jit_args=of_decode
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        enabled: bool = self._inner.is_cuda_graph_enabled
        return enabled

    @fi_api
    @takes(derived.pod_plan, _OF_PLAN, BatchDecodeWithPagedKVCacheWrapper.plan)
    def plan(self, given: dict[str, Any]) -> None:
        """Plans the decode half of the next `run` calls: `BatchDecodeWithPagedKVCacheWrapper.plan`."""
        self._inner.plan(**given)

    begin_forward = plan

    @fi_api(trace=mixed_trace.pod, planned=mixed_trace.PLANNED_POD)
    @checked
    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
        variant_args: Sequence[Any] = (),
        kv_cache_sf_p: Any = None,
        kv_cache_sf_d: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the request (`_p`) and of the planned batch (`_d`).

        Args:
            q_p, k_p, v_p, and all `_p` options: as q, k, v and options of `single_prefill_with_kv_cache`.
            q_d, paged_kv_cache_d: as in `BatchDecodeWithPagedKVCacheWrapper.run`.
            kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d: the default, or the
                values of the constructor and the plan, which hold.
            causal_d: without effect; a request has one query token.
            custom_mask_d, packed_custom_mask_d: must be None.
            q_scale, k_scale, v_scale: of decode; k_scale and v_scale also of the request if kv_cache_sf_p is given.
            return_lse_p, return_lse_d: without effect.
            use_fp16_qk_reduction: without effect; sums are fp32.
            enable_pdl: as in `BatchDecodeWithPagedKVCacheWrapper.run`.
            args, variant_args: with jit_args, the variants' tensors and scalars in order of declaration; one of both.
            kv_cache_sf_p, kv_cache_sf_d: the scales of NVFP4 keys, as kv_cache_sf of both functions.

        Returns:
            (out_p, out_d), `[qo_len, num_qo_heads, head_dim]` and `[batch_size, num_qo_heads, head_dim]`.

        Raises:
            NotImplementedError: masks of decode; masks and kv_cache_sf_p with a variant.
            ValueError: an option of decode that differs from the plan.
            Other errors are those of the two functions.
        """
        masks = {"custom_mask_d": custom_mask_d, "packed_custom_mask_d": packed_custom_mask_d}
        refuse("use BatchPrefillWithPagedKVCacheWrapper for decode rows with masks", **masks)
        self._inner._require_plan()
        of_decode = (kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d)
        _check_repeated(self._inner, of_decode)
        _, v_d = unpack(paged_kv_cache_d, self._inner._kv_layout)
        out_d = q_d.new_empty(*q_d.shape[:-1], row_elements(v_d), dtype=self._inner._cached_o_data_type)
        for name, x in (("q_p", q_p), ("k_p", k_p), ("v_p", v_p)):
            if x.ndim != 3:
                raise ValueError(f"{name}: 3 dimensions are required; got shape {tuple(x.shape)}")
        kv_len, dims = k_p.shape[code(LAYOUTS, kv_layout_p, "kv_layout_p")], q_p.shape[2] + row_elements(v_p)
        ctas = divide(self._inner, v_d, operations(q_p.shape[1], dims, bool(causal_p), [(q_p.shape[0], kv_len)]))
        extra, scales = (*args, *variant_args), {"k_scale": k_scale, "v_scale": v_scale}
        scoring = {"pos_encoding_mode": pos_encoding_mode_p, "sm_scale": sm_scale_p, "window_left": window_left_p}
        scoring |= {"rope_scale": rope_scale_p, "rope_theta": rope_theta_p, "kv_layout": kv_layout_p}
        of_prefill = {"custom_mask": custom_mask_p, "packed_custom_mask": packed_custom_mask_p, "causal": causal_p}
        options: dict[str, Any] = {**scoring, **of_prefill, "num_ctas": ctas, "kv_cache_sf": kv_cache_sf_p}
        options |= {} if kv_cache_sf_p is None else scales
        more = {"q_scale": q_scale, **scales, "enable_pdl": enable_pdl, "kv_cache_sf": kv_cache_sf_d}
        decode = functools.partial(self._inner.run, q_d, paged_kv_cache_d, *extra, out=out_d, **more)
        prefill = functools.partial(_attend_request, self._variant, q_p, k_p, v_p, extra, options)
        out_p = side_by_side(ctas, self._inner.device, prefill, decode)
        return out_p, out_d

    forward = run


@fi_api
class BatchPODWithPagedKVCacheWrapper:
    """Prefill of a batch and decode of another one over paged KV caches, in one call (arXiv:2410.18038).

    The results are those of BatchPrefillWithPagedKVCacheWrapper and BatchDecodeWithPagedKVCacheWrapper. On CUDA, if
    both take long enough, the two kernels run at the same time, each on a part of the SMs.

    Args:
        float_workspace_buffer, kv_layout: as in these wrappers; the two halves use different parts of the workspace.
        jit_args: arguments of gen_customize_batch_attention_module, for a variant instead of the built-in attention
            (not an argument of FlashInfer's class).
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", jit_args: Sequence[Any] | None = None
    ) -> None:
        self._prefill, self._decode = halves(float_workspace_buffer, kv_layout, jit_args)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    @fi_api
    @takes(
        derived.batch_pod_plan,
        _OF_BATCH_POD,
        BatchPrefillWithPagedKVCacheWrapper.plan,
        BatchDecodeWithPagedKVCacheWrapper.plan,
    )
    def plan(
        self,
        given: dict[str, Any],
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
    ) -> None:
        """Plans the next `run` calls. It does not synchronise.

        Args:
            qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p: tables of the prompts, as in
                `BatchPrefillWithPagedKVCacheWrapper.plan`.
            qo_indptr_d: int32 `[decode batch_size + 1]`, 0, 1, 2, ...: one row a request.
            kv_indptr_d, kv_indices_d, last_page_len_d: tables of the decode batch, as in
                `BatchDecodeWithPagedKVCacheWrapper.plan`.
            num_qo_heads, num_kv_heads, head_dim, page_size, and other options: of both.
        """
        self._prefill._forget_plan()
        self._decode._forget_plan()
        tables = {name: given.pop(name) for name in _TABLES}
        (qo_indptr, kv_indptr, kv_indices, last_page_len), page_size = tables.values(), given["page_size"]
        _check_tables(qo_indptr, kv_indptr, qo_indptr_d, kv_indptr_d)
        self._indptrs, heads, head_dim = (qo_indptr, kv_indptr), given["num_qo_heads"], given.pop("head_dim_qk")
        self._lengths = functools.partial(contract.lengths_of, kv_indptr, last_page_len, None, page_size)
        lengths = lengths_of(qo_indptr, kv_indptr, kv_indices.numel(), page_size)
        self._operations = functools.partial(operations, heads, 2 * head_dim, lengths=lengths)
        decode = self._decode
        decode.plan(kv_indptr_d, kv_indices_d, last_page_len_d, head_dim=head_dim, **given)
        del given["data_type"]
        given |= {"q_data_type": decode._cached_q_data_type, "kv_data_type": decode._cached_kv_data_type}
        # Causal, as prompts are: tiles are sorted for it, and run may be given another mask.
        self._prefill.plan(**tables, head_dim_qk=head_dim, causal=True, **given)

    begin_forward = plan

    @fi_api(trace=mixed_trace.batch_pod, planned=mixed_trace.PLANNED_BATCH_POD)
    @checked
    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: Cache,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *,
        variant_args: Sequence[Any] = (),
        kv_cache_sf_p: Any = None,
        kv_cache_sf_d: Any = None,
    ) -> Any:
        """Attention of the planned prompts (`_p`) and of the planned decode batch (`_d`).

        Args:
            q_p, paged_kv_cache_p, q_d, paged_kv_cache_d: as in the `run` of the two wrappers.
            custom_mask_p, packed_custom_mask_p: masks of the prompts, as in `BatchPrefillWithPagedKVCacheWrapper.plan`;
                one of them replaces causal_p. The number of elements is checked if the tables were on the host.
            causal_p: causal mask of the prompts.
            q_scale, k_scale, v_scale, enable_pdl: of both, as in these functions.
            return_lse: also return the lse of both.
            use_fp16_qk_reduction: without effect; sums are fp32.
            variant_args: with jit_args, the variant's tensors and scalars in order of declaration.
            kv_cache_sf_p, kv_cache_sf_d: the scales of NVFP4 caches, as kv_cache_sf of both.

        Returns:
            (out_p, out_d), or ((out_p, lse_p), (out_d, lse_d)).

        Raises:
            The errors of the two functions.
        """
        prefill, decode = self._prefill, self._decode
        for half in (prefill, decode):
            half._require_plan()
        masks = prefill._masks(custom_mask_p, packed_custom_mask_p, self._indptrs, self._lengths, True)
        pair_p = unpack(paged_kv_cache_p, prefill._kv_layout)
        pair_d = _, v_d = unpack(paged_kv_cache_d, decode._kv_layout)
        ctas = divide(decode, v_d, self._operations(bool(causal_p)))
        prefill._change(causal=bool(causal_p), num_ctas=ctas, **masks)
        out_d = q_d.new_empty(*q_d.shape[:-1], row_elements(v_d), dtype=decode._cached_o_data_type)
        lse_d = torch.empty(q_d.shape[:-1], dtype=torch.float32, device=q_d.device) if return_lse else None
        options: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        options |= {"return_lse": return_lse, "enable_pdl": enable_pdl}
        found = side_by_side(
            ctas,
            decode.device,
            lambda: prefill.run(q_p, pair_p, *variant_args, kv_cache_sf=kv_cache_sf_p, **options),
            lambda: decode.run(q_d, pair_d, *variant_args, out=out_d, lse=lse_d, kv_cache_sf=kv_cache_sf_d, **options),
        )
        return (found, (out_d, lse_d)) if return_lse else (found, out_d)

    forward = run


def _check_tables(
    qo_indptr_p: torch.Tensor, kv_indptr_p: torch.Tensor, qo_indptr_d: torch.Tensor, kv_indptr_d: torch.Tensor
) -> None:
    """Raises ValueError unless these are tables, and each decode request has one row."""
    for name, table in (("qo_indptr_p", qo_indptr_p), ("kv_indptr_p", kv_indptr_p), ("qo_indptr_d", qo_indptr_d)):
        last_value(table, name)  # raises unless it is a table
    if qo_indptr_d.numel() != kv_indptr_d.numel():
        raise ValueError(
            f"qo_indptr_d: length {kv_indptr_d.numel()} is required, that of kv_indptr_d; got {qo_indptr_d.numel()}"
        )
    if qo_indptr_d.is_cpu and qo_indptr_d.numel() and not (qo_indptr_d.diff() == 1).all():
        raise ValueError("qo_indptr_d: one row of each decode request is required; pass longer ones as prompts")
