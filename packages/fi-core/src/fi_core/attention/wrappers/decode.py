"""Batch decode over a paged KV cache: plan once per step, run once per layer."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import (
    POS_ENCODINGS,
    check_nvfp4,
    flag,
    per_head,
    row_elements,
    scale_product,
    scales_of,
    unpack,
)
from fi_core.attention.ops import decode as ops
from fi_core.attention.wrappers import trace
from fi_core.attention.wrappers.base import check_results
from fi_core.attention.wrappers.decode_plan import BatchDecodePlan
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import blame

if TYPE_CHECKING:
    import torch

_NO_SCALES = (None, None, None)
# Tensors that a variant for prefill and decode may declare, and decode does not have.
_NO_MASK: dict[str, Any] = dict.fromkeys(
    ("maybe_custom_mask", "maybe_mask_indptr", "maybe_prefix_len_ptr", "maybe_token_pos_in_items_ptr",
     "maybe_max_item_len_ptr", "maybe_k_cache_sf", "maybe_v_cache_sf")
)  # fmt: skip


@fi_api
class BatchDecodeWithPagedKVCacheWrapper(BatchDecodePlan):
    """Decode attention of a batch over a paged KV cache: `plan` once per step, `run` once per layer.

    After `plan` and after each `run`, `last_choice` is the `Choice` of the dispatcher: the implementation, its config
    and the reason against each other one. `resolved_backend` is its public name.

    Args:
        float_workspace_buffer: contiguous, on the device of the cache, aligned to 16 bytes. It holds the partials of
            split-KV that do not fit into the wrapper's own buffer of 8 MiB, which happens with fixed_split_size, large
            head dims or the kernels on CUDA cores. In all other cases wrappers that share it may run at the same time.
        kv_layout: "NHD" or "HND", the order of tokens and heads in a page.
        use_cuda_graph: fixes the batch size and lets `plan` copy its tables into the three buffers. A captured `run`
            then computes the batch that was planned last: kernels read the tables on the device, at fixed addresses.
            `plan` may be captured too, if its tables are on the device.
        use_tensor_cores: required for q_len_per_req > 1; otherwise a hint, because "auto" chooses by shape.
        paged_kv_indptr_buffer: int32 `[batch_size + 1]`, with use_cuda_graph.
        paged_kv_indices_buffer: int32 `[max_pages]`, with use_cuda_graph.
        paged_kv_last_page_len_buffer: int32 `[batch_size]`, with use_cuda_graph.
        backend: "auto"; "fa2" (CUDA cores, or with use_tensor_cores mma.sync), "fa2_tc" (mma.sync), "fa3" (Hopper);
            "trtllm-gen" and "xqa" mean "auto". "cudnn" runs cuDNN's kernels and requires nvidia-cudnn-frontend: 16-bit
            tensors of one dtype, no position encoding, no soft cap, page sizes that are powers of 2. cuDNN uses
            float_workspace_buffer, and with q_len_per_req > 1 the unused tokens of a request's last page must be
            finite.
        jit_args, jit_kwargs: a user's attention variant as arguments of `gen_customize_batch_decode_module`, for
            backend "auto" or "fa2"; it is compiled here. Its tensors and scalars then follow the cache in `run`.

    Raises:
        KeyError: kv_layout.
        ValueError: backend or buffers.
        NotImplementedError: a backend of another library.
        LibraryError: "cudnn" without its frontend.
        CompileError: the variant does not compile; the errors of the generator are raised as well.
    """

    @fi_api(trace=trace.paged_decode, planned=trace.PLANNED_DECODE)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch: `softmax(q k^T * sm_scale) v` for each request and head (arXiv:2501.01005).

        `last_choice` tells which implementation ran.

        Args:
            q: `[batch_size * q_len_per_req, num_qo_heads, head_dim]`, of the planned dtype.
            paged_kv_cache: `[pages, 2, page_size, num_kv_heads, head_dim]` ("NHD"), `[pages, 2, num_kv_heads,
                page_size, head_dim]` ("HND"), or a tuple (k_cache, v_cache) without the axis of 2; without the page
                axis, page_size is 1. The planned dtype; any strides with a contiguous last dimension.
            args: for fp8 tensors scale_q `[num_qo_heads]`, scale_k and scale_v `[num_kv_heads]`, fp32 or numbers; with
                jit_args the tensors and then the scalars of the variant.
            q_scale, k_scale: factors of the scores, numbers or one-element fp32 tensors on the device.
            v_scale: factor of the output, likewise.
            out: written and returned if given.
            lse: fp32 `[rows, num_qo_heads]`, written if given.
            return_lse: also return lse, `log2(sum(2^(score * log2 e)))`.
            enable_pdl: programmatic dependent launch; None: where the device supports it.
            window_left: None, or the planned value.
            sinks: fp32 `[num_qo_heads]`; `exp(sinks[h])` is added to row_sum.
            q_len_per_req: deprecated; belongs to `plan`.
            skip_softmax_threshold_scale_factor: without effect; no softmax is skipped, which any threshold permits.
            kv_cache_sf: for NVFP4 caches (uint8, two elements a byte, head_dim / 2 bytes a row) the scales, in the form
                of the cache with head_dim / 16 instead: e4m3, or their bytes as uint8. q then has 16 bits, and k_scale
                and v_scale are the global factors.

        Returns:
            out `[batch_size * q_len_per_req, num_qo_heads, head_dim]`, or (out, lse). A request of length 0 has out = 0
            and lse = -inf, or the lse of its sink.

        Raises:
            RuntimeError: no plan.
            ValueError: shape, dtype, device or stride. Tables that lie: on the
                CPU; on CUDA with FI_CHECK=1 at import, which synchronises.
            KeyError: the container of the cache.
        """
        import torch

        buffers = self._schedule.buffers
        if buffers is None or self._plan_info is None:
            raise self._no_plan()
        if q_len_per_req is not None:
            warnings.warn("run: q_len_per_req belongs to plan", DeprecationWarning, stacklevel=2)
            if not isinstance(q_len_per_req, int) or q_len_per_req != self._q_len_per_req:
                raise ValueError(f"q_len_per_req: {self._q_len_per_req} was planned; got {q_len_per_req}")
        if window_left is not None and not (isinstance(window_left, int) and window_left == self._window_left):
            raise ValueError(f"window_left: {self._window_left} was planned; got {window_left}")
        k, v = unpack(paged_kv_cache, self._kv_layout)
        try:
            _, second, third, _ = k.shape
            differs = (
                q.dtype is not self._cached_q_data_type
                or k.dtype is not self._cached_kv_data_type
                or v.dtype is not k.dtype
                or q.shape != self._q_shape
                or (second, third) != self._page_shape
                or (kv_cache_sf is None) is (k.dtype is torch.uint8)
            )
        except (AttributeError, RuntimeError) as error:
            blame(error, q=q, paged_kv_cache=k)
        if differs:
            self._refuse(q, k, v, kv_cache_sf)
        k_scales = v_scales = None
        if kv_cache_sf is not None:
            k_scales, v_scales = scales_of(kv_cache_sf, self._kv_layout)
        dim_vo = v.shape[3] if k_scales is None else row_elements(v)
        shape, out_dtype = self._q_shape, self._cached_o_data_type
        if dim_vo != self._head_dim:
            buffers, shape = self._schedule.buffers_for(dim_vo), (*shape[:2], dim_vo)
        return_lse = return_lse is True or (return_lse is not False and flag("return_lse", return_lse))
        given = out, lse
        if self._cudnn is not None or (out is not None and getattr(out, "dtype", None) is not out_dtype):
            check_results(q, shape, out_dtype, out, lse)
        if out is None:
            out = q.new_empty(*shape) if out_dtype is q.dtype else q.new_empty(*shape, dtype=out_dtype)
        if lse is None and return_lse:
            lse = q.new_empty(*shape[:2], dtype=torch.float32)
        score_scale, out_scale = self._sm_scale, 1.0
        if score_scale is None:
            score_scale = self._head_dim**-0.5
        bmm1 = bmm2 = None
        if q_scale is not None or k_scale is not None:
            score_scale, bmm1 = scale_product(score_scale, q_scale, k_scale)
        if v_scale is not None:
            out_scale, bmm2 = scale_product(1.0, v_scale)
        scales: tuple[Any, Any, Any] = _NO_SCALES
        encoding, variant = POS_ENCODINGS[self._pos_encoding_mode], None
        if self._variant is not None:
            encoding = self._variant.encoding(self)
            variant = self._variant.launch(self, q, args, _NO_MASK, q_scale, k_scale, sinks)
        elif args:
            scale_qk, scale_vo, scales = per_head(args)
            score_scale, out_scale = score_scale * scale_qk, out_scale * scale_vo
        if self._window_left != self._schedule.window_left:  # forward changed it
            self._schedule.replan(self._window_left)
        if self._cudnn is not None:
            self.last_choice = self._choose(dim_vo, scaled=bmm1 is not None or scales != _NO_SCALES)
            self._cudnn.attend(
                out, lse, q, k, v, self._layout, self._float_workspace_buffer, score_scale, self._q_len_per_req > 1,
                self._window_left, sinks,
            )  # fmt: skip
            if out_scale != 1.0 or bmm2 is not None:
                out.mul_(out_scale if bmm2 is None else bmm2 * out_scale)
            return (out, lse) if return_lse and lse is not None else out
        try:
            ran = ops.batch_decode(  # by position, as declared: 18 names cost 0.8 us
                out, lse, buffers.workspace, buffers.schedule, q, k, v, self._paged_kv_indices_buf, self._layout,
                buffers.num_ctas, buffers.num_ranges, buffers.split_kv, self._q_len_per_req, encoding,
                self._window_left, self._logits_soft_cap or 0.0, score_scale, out_scale, self._rope_scale or 1.0,
                self._rope_theta or 1e4, sinks, scales[0], scales[1], scales[2], bmm1, bmm2, self._drafts, k_scales,
                v_scales, enable_pdl=enable_pdl, heads_per_tile=self._schedule.heads_per_tile, backend=self._allowed,
                variant=variant,
            )  # fmt: skip
        except Exception:
            check_results(q, shape, out_dtype, *given)
            raise
        self.last_choice = ran or self.last_choice
        return (out, lse) if return_lse and lse is not None else out

    def run_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        **options: Any,
    ) -> Any:
        """`run` with return_lse: (out, lse)."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **options)

    @fi_api
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """The older form of `run`. Its options replace those of the plan; an omitted option has its default."""
        self._set_scores(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def _refuse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache_sf: Any) -> None:
        """Raises the error that names the input that differs from the plan."""
        if q.dtype is not self._cached_q_data_type:
            raise ValueError(f"q: q_data_type {self._cached_q_data_type} was planned; got {q.dtype}")
        if k.dtype is not self._cached_kv_data_type or v.dtype is not k.dtype:
            raise ValueError(
                f"paged_kv_cache: kv_data_type {self._cached_kv_data_type} was planned; got {k.dtype} and {v.dtype}"
            )
        check_nvfp4(kv_cache_sf, k, "paged_kv_cache")
        if q.shape != self._q_shape:
            raise ValueError(
                f"q: shape {self._q_shape} was planned (batch_size * q_len_per_req rows); got {tuple(q.shape)}"
            )
        raise ValueError(
            f"paged_kv_cache: page_size {self._page_size} and {self._num_kv_heads} kv heads were planned; "
            f"got shape {tuple(k.shape)} ({self._kv_layout})"
        )


@fi_api
class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph; the batch size is the length of last_page_len_buffer."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )
