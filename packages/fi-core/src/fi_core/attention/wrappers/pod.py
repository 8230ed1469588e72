"""POD attention: one step's prompt and decode batch, at the same time on different SMs (arXiv:2410.18038)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import LAYOUTS, code, unpack, unsupported
from fi_core.attention.forms.single_prefill import single_prefill_with_kv_cache
from fi_core.attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.attention.wrappers.side_by_side import divide, operations, side_by_side
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@fi_api
class PODWithPagedKVCacheWrapper:
    """Prefill of one request over its K and V, and decode of a batch over a paged KV cache, in one call.

    The results are those of `single_prefill_with_kv_cache` and BatchDecodeWithPagedKVCacheWrapper. On CUDA, if both
    take long enough, the two kernels run at the same time, each on a part of the SMs.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer: as in BatchDecodeWithPagedKVCacheWrapper.
        jit_args: not supported.

    Raises:
        NotImplementedError: jit_args. Other errors are those of BatchDecodeWithPagedKVCacheWrapper.
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
        if jit_args is not None:
            raise unsupported("jit_args", jit_args, "pass variants to the prefill and decode wrappers")
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, True, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )  # fmt: skip
        self.reset_workspace_buffer = self._decode.reset_workspace_buffer

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

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
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, q_data_type=q_data_type,
            kv_data_type=kv_data_type, data_type=data_type, sm_scale=sm_scale, rope_scale=rope_scale,
            rope_theta=rope_theta, non_blocking=non_blocking,
        )  # fmt: skip

    begin_forward = plan

    @fi_api
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the request (`_p`) and of the planned batch (`_d`).

        Args:
            q_p, k_p, v_p, and all `_p` options: as q, k, v and options of `single_prefill_with_kv_cache`.
            q_d, paged_kv_cache_d: as in `BatchDecodeWithPagedKVCacheWrapper.run`.
            causal_d, kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d: without
                effect; the plan and the constructor have them.
            custom_mask_d, packed_custom_mask_d: must be None.
            q_scale, k_scale, v_scale: of decode.
            return_lse_p, return_lse_d: without effect.
            use_fp16_qk_reduction: without effect; sums are fp32.
            enable_pdl: as in `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns:
            (out_p, out_d), `[qo_len, num_qo_heads, head_dim]` and `[batch_size, num_qo_heads, head_dim]`.

        Raises:
            NotImplementedError: masks of decode. Other errors are those of the two functions.
        """
        for name, mask in (("custom_mask_d", custom_mask_d), ("packed_custom_mask_d", packed_custom_mask_d)):
            if mask is not None:
                raise unsupported(name, mask, "use BatchPrefillWithPagedKVCacheWrapper for decode rows with masks")
        if self._decode._plan_info is None:
            raise self._decode._no_plan()
        _, v_d = unpack(paged_kv_cache_d, self._decode._kv_layout)
        out_d = q_d.new_empty(*q_d.shape[:-1], v_d.shape[-1], dtype=self._decode._cached_o_data_type)
        for name, x in (("q_p", q_p), ("k_p", k_p), ("v_p", v_p)):
            if x.ndim != 3:
                raise ValueError(f"{name}: 3 dimensions are required; got shape {tuple(x.shape)}")
        kv_len, dims = k_p.shape[code(LAYOUTS, kv_layout_p, "kv_layout_p")], q_p.shape[2] + v_p.shape[2]
        ctas = divide(self._decode, v_d, operations(q_p.shape[1], dims, bool(causal_p), [(q_p.shape[0], kv_len)]))
        out_p = side_by_side(
            ctas,
            self._decode.device,
            lambda: single_prefill_with_kv_cache(
                q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p,
                kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p,
                window_left=window_left_p, rope_scale=rope_scale_p, rope_theta=rope_theta_p, num_ctas=ctas,
            ),
            lambda: self._decode.run(
                q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out_d,
                enable_pdl=enable_pdl,
            ),
        )  # fmt: skip
        return out_p, out_d

    forward = run
