"""POD attention of batches: prompts and decode requests of one step, at the same time on different SMs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import last_value, row_elements, score_options, unpack
from fi_core.attention.wrappers import mixed_trace
from fi_core.attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.attention.wrappers.side_by_side import divide, lengths_of, operations, side_by_side, workspaces
from fi_core.observe.checked import checked
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


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
        of_prefill, of_decode = workspaces(float_workspace_buffer)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(of_prefill, kv_layout, jit_args=jit_args)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            of_decode, kv_layout, use_tensor_cores=True, jit_args=jit_args
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    @fi_api
    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
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
        _check_tables(qo_indptr_p, kv_indptr_p, qo_indptr_d, kv_indptr_d)
        options = score_options(pos_encoding_mode, None, sm_scale, rope_scale, rope_theta)
        options |= {"window_left": window_left, "non_blocking": non_blocking}
        decode, prefill = self._decode, self._prefill

        def kv_lens(device: torch.device) -> torch.Tensor:
            pages, last = kv_indptr_p.to(device).diff().long(), last_page_len_p.to(device)
            return ((pages - 1) * page_size + last) * (pages > 0)

        self._indptrs, self._lengths = (qo_indptr_p, kv_indptr_p), kv_lens
        lengths = lengths_of(qo_indptr_p, kv_indptr_p, kv_indices_p.numel(), page_size)
        self._operations = functools.partial(operations, num_qo_heads, 2 * head_dim, lengths=lengths)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        of_decode = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "data_type": data_type, **options}
        decode.plan(kv_indptr_d, kv_indices_d, last_page_len_d, *shape, **of_decode)
        options |= {"q_data_type": decode._cached_q_data_type, "kv_data_type": decode._cached_kv_data_type}
        # Causal, as prompts are: tiles are sorted for it, and run may be given another mask.
        prefill.plan(qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *shape, causal=True, **options)
        plain = pos_encoding_mode == "NONE" and window_left < 0 and prefill._variant is None
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        of_prefill = {"qo_indptr_p": qo_indptr_p, "kv_indptr_p": kv_indptr_p, "kv_indices_p": kv_indices_p}
        tables = {"kv_indptr_d": kv_indptr_d, "kv_indices_d": kv_indices_d, "last_page_len_d": last_page_len_d}
        options = {"sm_scale": scale, "kv_layout": decode._kv_layout, "covered": plain}
        self._described = {**of_prefill, "last_page_len_p": last_page_len_p, **tables, **options}

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
        import torch

        prefill, decode = self._prefill, self._decode
        for half in (prefill, decode):
            if half._plan_info is None:
                raise half._no_plan()
        masks = prefill._masks(custom_mask_p, packed_custom_mask_p, self._indptrs, self._lengths, True)
        pair_p = unpack(paged_kv_cache_p, prefill._kv_layout, "paged_kv_cache_p")
        pair_d = _, v_d = unpack(paged_kv_cache_d, decode._kv_layout, "paged_kv_cache_d")
        ctas = divide(decode, v_d, self._operations(bool(causal_p)))
        prefill._change(causal=bool(causal_p), num_ctas=ctas, **masks)
        out_d = q_d.new_empty(*q_d.shape[:-1], row_elements(v_d), dtype=decode._cached_o_data_type)
        lse_d = torch.empty(q_d.shape[:-1], dtype=torch.float32, device=q_d.device) if return_lse else None
        options: dict[str, Any] = {
            "q_scale": q_scale,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "return_lse": return_lse,
            "enable_pdl": enable_pdl,
        }
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
