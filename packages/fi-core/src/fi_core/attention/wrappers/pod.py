"""POD attention: one step's prompt and decode batch, at the same time on different SMs (arXiv:2410.18038)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import LAYOUTS, POS_ENCODINGS, code, row_elements, score_options, unpack
from fi_core.attention.custom import derived_scalars
from fi_core.attention.forms.single_prefill import single_prefill_with_kv_cache
from fi_core.attention.forms.tables_prefill import attend_once
from fi_core.attention.ops.prefill import BATCH_PREFILL
from fi_core.attention.ops.request import Facts, alignment
from fi_core.attention.variant import VariantCall
from fi_core.attention.wrappers import mixed_trace
from fi_core.attention.wrappers.base import AroundWrapper
from fi_core.attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.attention.wrappers.side_by_side import divide, operations, side_by_side
from fi_core.observe.checked import checked
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse
from fi_core.runtime.resolve.ahead import planned

if TYPE_CHECKING:
    import torch

    from fi_core.attention.custom import CustomAttention

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _attend(
    variant: CustomAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: Sequence[Any],
    kv_layout: str,
    sm_scale: float | None,
    **options: Any,
) -> torch.Tensor:
    """Prefill of one request by a variant. given: its tensors and scalars; options: of `attend_once`."""
    layout, encoding = code(LAYOUTS, kv_layout, "kv_layout_p"), POS_ENCODINGS["ROPE_LLAMA" if variant.rope else "NONE"]
    variant.check(q.dtype, k.dtype, variant.dtypes[2], q.shape[-1], v.shape[-1])
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=variant.dtypes[2])
    choice = planned(
        BATCH_PREFILL, q.device, variant.backend(q.device),
        *Facts(
            q.dtype, k.dtype, out.dtype, q.shape[2], v.shape[2], q.shape[1] // max(1, k.shape[1 - layout]), 0,
            "ROPE_LLAMA" if variant.rope else "NONE", alignment=alignment(q, k, v, out),
        ), ahead=False,
    )  # fmt: skip
    extras = variant.extras(q, given, {}, derived_scalars(q.shape[2] ** -0.5 if sm_scale is None else sm_scale))
    attend_once(
        out, None, q, k, v, layout, 1, pages_per_request=k.shape[layout], pos_encoding=encoding, backend="fa2",
        variant=VariantCall(variant.on(q.device, choice.implementation), extras), **options,
    )  # fmt: skip
    return out


def _check_dimensions(**tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        if x.ndim != 3:
            raise ValueError(f"{name}: 3 dimensions are required; got shape {tuple(x.shape)}")


def _attend_request(
    variant: CustomAttention | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    """Prefill of one request. given: tensors and scalars of a variant; options: of single_prefill_with_kv_cache."""
    if variant is None:
        return single_prefill_with_kv_cache(q, k, v, **options)
    own = {f"{name}_p": options[name] for name in ("kv_cache_sf", "custom_mask", "packed_custom_mask")}
    refuse("pass it to the variant as one of its tensors", **own)
    used = {name: options[name] for name in ("causal", "window_left", "num_ctas")}
    return _attend(variant, q, k, v, given, options["kv_layout"], options["sm_scale"], **used)


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
        self._inner = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            True,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
            jit_args=of_decode,
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        enabled: bool = self._inner.is_cuda_graph_enabled
        return enabled

    @fi_api
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the decode half of the next `run` calls: `BatchDecodeWithPagedKVCacheWrapper.plan`."""
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options = score_options(pos_encoding_mode, None, sm_scale, rope_scale, rope_theta)
        options |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "data_type": data_type}
        options |= {"window_left": window_left, "non_blocking": non_blocking}
        self._inner.plan(indptr, indices, last_page_len, *shape, **options)
        self._described = {
            "kv_indptr_d": indptr,
            "kv_indices_d": indices,
            "last_page_len_d": last_page_len,
            "sm_scale": head_dim**-0.5 if sm_scale is None else sm_scale,
            "kv_layout": self._inner._kv_layout,
            "covered": pos_encoding_mode == "NONE" and window_left < 0 and self._variant is None,
        }

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
            causal_d, kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d: without
                effect; the plan and the constructor have them.
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
            Other errors are those of the two functions.
        """
        masks = {"custom_mask_d": custom_mask_d, "packed_custom_mask_d": packed_custom_mask_d}
        refuse("use BatchPrefillWithPagedKVCacheWrapper for decode rows with masks", **masks)
        if self._inner._plan_info is None:
            raise self._inner._no_plan()
        _, v_d = unpack(paged_kv_cache_d, self._inner._kv_layout, "paged_kv_cache_d")
        out_d = q_d.new_empty(*q_d.shape[:-1], row_elements(v_d), dtype=self._inner._cached_o_data_type)
        _check_dimensions(q_p=q_p, k_p=k_p, v_p=v_p)
        kv_len, dims = k_p.shape[code(LAYOUTS, kv_layout_p, "kv_layout_p")], q_p.shape[2] + row_elements(v_p)
        ctas = divide(self._inner, v_d, operations(q_p.shape[1], dims, bool(causal_p), [(q_p.shape[0], kv_len)]))
        extra = (*args, *variant_args)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        scoring = {"pos_encoding_mode": pos_encoding_mode_p, "sm_scale": sm_scale_p, "window_left": window_left_p}
        scoring |= {"rope_scale": rope_scale_p, "rope_theta": rope_theta_p, "kv_layout": kv_layout_p}
        prefill_masks: Any = {
            "custom_mask": custom_mask_p,
            "packed_custom_mask": packed_custom_mask_p,
            "causal": causal_p,
        }
        options: dict[str, Any] = {**scoring, **prefill_masks, "num_ctas": ctas, "kv_cache_sf": kv_cache_sf_p}
        options |= {} if kv_cache_sf_p is None else scales
        more = {"q_scale": q_scale, **scales, "enable_pdl": enable_pdl, "kv_cache_sf": kv_cache_sf_d}
        decode = functools.partial(self._inner.run, q_d, paged_kv_cache_d, *extra, out=out_d, **more)
        prefill = functools.partial(_attend_request, self._variant, q_p, k_p, v_p, extra, options)
        out_p = side_by_side(ctas, self._inner.device, prefill, decode)
        return out_p, out_d

    forward = run
