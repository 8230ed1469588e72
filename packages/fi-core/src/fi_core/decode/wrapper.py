"""Batch decode over a paged KV cache: plan once a step, run once a layer."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from fi_core.attention.arguments import CHECK, POS_ENCODINGS, check_pages, no_nvfp4, per_head, scale_product, unpack
from fi_core.decode import ops
from fi_core.decode.plan import BatchDecodePlan
from fi_core.observe.log import fi_api
from fi_core.utils import check_shape_dtype_device

if TYPE_CHECKING:
    import torch

_ANY_ADDRESS = ("cpu", "fa2", "cudnn")  # implementations that take any alignment
_MOST_STRIDES = 64  # kept by a wrapper; a model has few
_NO_SCALES = (None, None, None)
# What a variant that is also meant for prefill may declare, and decode has not.
_NO_MASK: dict[str, Any] = dict.fromkeys(
    ("maybe_custom_mask", "maybe_mask_indptr", "maybe_prefix_len_ptr", "maybe_token_pos_in_items_ptr",
     "maybe_max_item_len_ptr", "maybe_k_cache_sf", "maybe_v_cache_sf")
)  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(BatchDecodePlan):
    """Decode attention of a batch whose keys and values lie in pages: `plan` once a step, then `run` once a layer.

    float_workspace_buffer: a contiguous tensor on the device of the cache, aligned to 16 bytes. Partial results go
    there only if they do not fit into the wrapper's own buffer of 8 MiB, which happens with fixed_split_size, wide
    heads or the kernels on CUDA cores; otherwise wrappers that share one may even run at the same time.
    kv_layout: "NHD" or "HND", the order of tokens and heads in a page.

    use_cuda_graph: the batch size is fixed, and `plan` copies its tables into the three buffers: indptr
    `[batch_size + 1]`, indices `[most pages]`, last_page_len `[batch_size]`, int32. A captured `run` then computes
    whatever was planned last: all that a kernel reads about the batch lies on the device, at fixed addresses. `plan`
    may be captured too, if what it is given lies on the device.

    use_tensor_cores: required for q_len_per_req > 1, else a hint, since "auto" chooses by shape. backend: "auto"; "fa2"
    (CUDA cores, or with use_tensor_cores mma.sync), "fa2_tc" (mma.sync), "fa3" (Hopper); "trtllm-gen" and "xqa" are
    taken as "auto". "cudnn": the kernels of cuDNN, for which nvidia-cudnn-frontend must be installed: 16-bit tensors of
    one type, no position encoding, no soft cap, pages of a power of 2; float_workspace_buffer is theirs, and with
    q_len_per_req > 1 what lies behind the tokens of a request in its last page must be finite.

    jit_args, jit_kwargs: an attention variant of the user, the arguments of gen_customize_batch_decode_module, for
    backend "auto" or "fa2"; it is compiled here. What it declares then follows the cache in `run`.

    Raises KeyError (kv_layout), ValueError (backend, buffers), NotImplementedError (backends of other libraries),
    LibraryError ("cudnn" without its frontend), and for jit_args what the generator raises, or CompileError.
    """

    @fi_api
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
        """Attention of the planned batch: out `[batch_size * q_len_per_req, num_qo_heads, head_dim]`.

        q: `[batch_size * q_len_per_req, num_qo_heads, head_dim]`. paged_kv_cache: `[pages, 2, page_size, num_kv_heads,
        head_dim]` ("NHD"), `[pages, 2, num_kv_heads, page_size, head_dim]` ("HND"), or a tuple (k_cache, v_cache)
        without the axis of 2; without the page axis, page_size is 1. Strides are free but for the last dimension; both
        of the planned types.

        q_scale, k_scale multiply the scores and v_scale the output; one-element fp32 tensors on the device work too.
        args: for fp8 tensors scale_q `[num_qo_heads]`, scale_k, scale_v `[num_kv_heads]`, fp32, or numbers; with
        jit_args the tensors and then the scalars that the variant declares. sinks `[num_qo_heads]`, fp32:
        `exp(sinks[h])` is added to the sum of the softmax. out, lse: written and returned if given.
        window_left: None or what was planned. skip_softmax_threshold_scale_factor: nothing is skipped, which any
        threshold allows.

        With return_lse also lse `[rows, num_qo_heads]`, fp32: log2 of the sum of `2^(score * log2 e)`. A request of
        length 0 gives out = 0 and lse = -inf (or that of its sink).

        Raises ValueError (shape, dtype, device, stride), KeyError (container of the cache), AssertionError
        (window_left), RuntimeError (no plan). With FI_CHECK=1 at import, also ValueError for page ids out of range,
        which waits for the device.
        """
        import torch

        buffers = self._division.buffers
        if buffers is None:
            raise RuntimeError("run: call plan first")
        if q_len_per_req is not None:
            warnings.warn("run: q_len_per_req belongs to plan", DeprecationWarning, stacklevel=2)
            if q_len_per_req != self._q_len_per_req:
                raise ValueError(f"q_len_per_req: {self._q_len_per_req} was planned; got {q_len_per_req}")
        assert window_left is None or window_left == self._window_left, (
            f"window_left: {self._window_left} was planned; got {window_left}"
        )
        k, v = unpack(paged_kv_cache, self._kv_layout)
        if (
            q.dtype is not self._cached_q_data_type
            or k.dtype is not self._cached_kv_data_type
            or v.dtype is not k.dtype
            or q.shape != self._q_shape
            or k.shape[1:3] != self._page_shape
            or kv_cache_sf is not None
        ):
            self._refuse(q, k, v, kv_cache_sf)
        if CHECK:
            indptr, *_ = self._division.tables
            check_pages(k.shape[0], self._paged_kv_indices_buf, "indices", indptr)
        impl, dim_vo = self._impl, v.shape[3]
        if dim_vo != self._head_dim:
            buffers, impl = self._division.of_head_dim(dim_vo), self._choose(dim_vo)
        elif self._pos_encoding_mode != self._chosen_for:  # forward changed it
            impl = self._choose(dim_vo)
        if impl not in _ANY_ADDRESS and not torch.compiler.is_compiling():  # which knows no addresses
            strides = q.stride(), k.stride(), v.stride()
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or strides not in self._fitting:
                impl = self._fit(impl, q, k, v, strides)
        shape, out_dtype = (*self._q_shape[:2], dim_vo), self._cached_o_data_type
        if out is not None:
            check_shape_dtype_device(out, shape, out_dtype, q.device, "out")
        elif out_dtype is q.dtype and shape == self._q_shape:
            out = torch.empty_like(q)  # half a microsecond less than the general form
        else:
            out = q.new_empty(shape, dtype=out_dtype)
        if lse is not None:
            check_shape_dtype_device(lse, shape[:2], torch.float32, q.device, "lse")
        elif return_lse:
            lse = q.new_empty(shape[:2], dtype=torch.float32)
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
            encoding, variant = self._variant.launch(self, q, args, _NO_MASK, q_scale, k_scale, sinks)
        elif args:
            scale_qk, scale_vo, scales = per_head(args)
            score_scale, out_scale = score_scale * scale_qk, out_scale * scale_vo
        if self._window_left != self._division.window_left:  # forward changed it
            self._division.again(self._window_left)
        if self._cudnn is not None:
            self._check_cudnn(bmm1 is None and scales == _NO_SCALES)
            self._cudnn.attend(
                out, lse, q, k, v, self._layout, self._float_workspace_buffer, score_scale, self._q_len_per_req > 1,
                self._window_left, sinks,
            )  # fmt: skip
            if out_scale != 1.0 or bmm2 is not None:
                out.mul_(out_scale if bmm2 is None else bmm2 * out_scale)
            return (out, lse) if return_lse and lse is not None else out
        ops.attend(
            buffers, out, lse, q, k, v, self._paged_kv_indices_buf, impl, self._layout,
            encoding, self._q_len_per_req, self._window_left,
            self._logits_soft_cap or 0.0, score_scale, out_scale, self._rope_scale or 1.0, self._rope_theta or 1e4,
            enable_pdl, sinks, *scales, bmm1, bmm2, variant=variant,
        )  # fmt: skip
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
        """The older form of `run`: its options replace those of the plan, also where they are left out."""
        self._set_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(self, *args: Any, **options: Any) -> Any:
        """`forward`, with the log-sum-exp."""
        return self.forward(*args, **options, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing; older callers end a plan with it."""

    def _fit(self, impl: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, strides: tuple[Any, ...]) -> str:
        """The implementation for these addresses and strides, which are remembered if they do."""
        if not ops.fits(impl, q, k, v):
            return "fa2"
        if len(self._fitting) < _MOST_STRIDES:
            self._fitting.add(strides)
        return impl

    def _refuse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache_sf: Any) -> None:
        """Says which of the inputs is not what was planned."""
        if kv_cache_sf is not None:
            raise no_nvfp4("kv_cache_sf")
        if q.dtype is not self._cached_q_data_type:
            raise ValueError(f"q: q_data_type {self._cached_q_data_type} was planned; got {q.dtype}")
        if k.dtype is not self._cached_kv_data_type or v.dtype is not k.dtype:
            raise ValueError(
                f"paged_kv_cache: kv_data_type {self._cached_kv_data_type} was planned; got {k.dtype} and {v.dtype}"
            )
        if q.shape != self._q_shape:
            raise ValueError(
                f"q: shape {self._q_shape} was planned (batch_size * q_len_per_req rows); got {tuple(q.shape)}"
            )
        raise ValueError(
            f"paged_kv_cache: page_size {self._page_size} and {self._num_kv_heads} kv heads were planned; "
            f"got shape {tuple(k.shape)} ({self._kv_layout})"
        )


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper with use_cuda_graph; the batch size is the length of last_page_len_buffer."""

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
