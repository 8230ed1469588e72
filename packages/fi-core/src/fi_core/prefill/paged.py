"""Batch prefill over a paged KV cache: plan once a step, run once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.arguments import CHECK, check_bounds, check_length, check_pages, no_nvfp4, unpack
from fi_core.observe.log import fi_api
from fi_core.prefill.plan import BatchPrefillPlan

if TYPE_CHECKING:
    import torch

    Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class BatchPrefillWithPagedKVCacheWrapper(BatchPrefillPlan):
    """Prefill and append attention of a batch whose keys and values lie in pages: `plan` once a step, `run` a layer.

    float_workspace_buffer: a tensor on the device of the cache, aligned to 16 bytes, where partial results lie
    during a run whose plan splits keys; wrappers may share one unless they run at the same time. 128 MiB are always
    enough; a smaller one means fewer splits, or none. kv_layout: "NHD" or "HND", the order of tokens and heads in a
    page.

    use_cuda_graph: the batch size is fixed, and `plan` copies its tables into the buffers: qo_indptr_buf and
    paged_kv_indptr_buf `[batch_size + 1]`, paged_kv_indices_buf `[most pages]`, paged_kv_last_page_len_buf
    `[batch_size]`, int32. A captured `run` then computes whatever was planned last: all that a kernel reads about the
    batch lies on the device, at fixed addresses. custom_mask_buf (uint8) and mask_indptr_buf (int32 `[batch_size + 1]`)
    are needed for masks, and with them every run takes the mask that was planned last.

    backend: "auto"; "fa2" (mma.sync, every option), "fa3" (Hopper: 16-bit q, k, v and output of one type, head dims 64,
    128, 256, or 192 with values of 128; with head dims of 128 also fp8 k and v, and e4m3 ones with an e4m3 q, where the
    output has 16 bits and weights are rounded to e4m3 as well; no custom mask, no position encoding); "trtllm-gen" and
    "cutlass" are taken as "auto". A result does not depend on the batch that a request is in. "cudnn": the kernels of
    cuDNN, for which nvidia-cudnn-frontend must be installed: 16-bit tensors of one type, no mask but causal and
    window_left, no position encoding, no soft cap, pages of a power of 2; float_workspace_buffer is theirs, and what
    lies behind the tokens of a request in its last page must be finite.

    jit_args, jit_kwargs: an attention variant of the user, the arguments of gen_customize_batch_prefill_module less
    backend, for "auto" or "fa2"; it is compiled here. What it declares then follows the cache in `run`. A planned mask
    counts beside the variant's, unless it declares maybe_custom_mask; with variant_owns_mask the variant's is alone.

    Raises KeyError (kv_layout), ValueError (backend, buffers), NotImplementedError (backends of other libraries),
    LibraryError ("cudnn" without its frontend), and for jit_args what the generator raises, or CompileError.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Sequence[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buf
        self._paged_kv_indices_buf: Any = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buf
        self._block_tables: torch.Tensor | None = None
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        super().__init__(
            float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None, custom_mask_buf, mask_indptr_buf,
            backend, jit_args, jit_kwargs, variant_owns_mask,
        )  # fmt: skip
        if use_cuda_graph:
            self._fixed_batch_size = batch = len(qo_indptr_buf) - 1  # type: ignore[arg-type]
            for name, length in (("paged_kv_indptr_buf", batch + 1), ("paged_kv_last_page_len_buf", batch)):
                if len(buffers[name]) != length:  # type: ignore[arg-type]
                    raise ValueError(
                        f"{name}: length {length} is required, since qo_indptr_buf has {batch + 1}; "
                        f"got {len(buffers[name])}"  # type: ignore[arg-type]
                    )

    def workspace_size(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        *args: Any,
        **options: Any,
    ) -> tuple[int, int]:
        """Bytes of the float and of the int workspace that plan needs with these arguments; changes nothing.

        The float one is 0: what it has room for is used to split keys where blocks would idle, but none is needed.
        """
        return self._size(qo_indptr, num_qo_heads, num_kv_heads)

    @fi_api
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Says what the next runs are about. Nothing waits for the device, where the work is also listed.

        qo_indptr: `[batch_size + 1]`, request b has rows `q[qo_indptr[b] : qo_indptr[b + 1]]`. paged_kv_indptr
        `[batch_size + 1]`, paged_kv_indices `[paged_kv_indptr[-1]]` or longer, paged_kv_last_page_len `[batch_size]`:
        its pages are `paged_kv_indices[paged_kv_indptr[b] : paged_kv_indptr[b + 1]]`, the last of which holds
        paged_kv_last_page_len[b] tokens; without pages its length is 0. int32, each on the host or on the device.
        What lies on the host is copied in the order of the current stream, so pinned tensors must keep their values
        until then. seq_lens: `[batch_size]`, lengths instead of those that the last pages give.

        Row i of a request stands at position p = kv_len - qo_len + i. causal: it sees keys j <= p. custom_mask, which
        takes the place of causal: bool, the `[qo_len, kv_len]` masks of all requests flattened one after another, True
        = seen, on any device; packed_custom_mask, which wins over it: the same as bits (uint8, little endian), each
        request from a byte of its own on, as `segment_packbits` makes it. window_left w >= 0 hides keys j < p - w in
        addition. prefix_len_ptr (uint32 `[batch_size]`) and token_pos_in_items_ptr (uint16 `[batch_size *
        token_pos_in_items_len]`), which take the place of all masks: several items behind one prefix, of which a row
        sees the prefix and its own; the second says how far into its item each token behind the prefix is, 0 at the
        delimiter before it.

        Head h reads kv head `h // (num_qo_heads / num_kv_heads)`, any whole ratio. Head dims: multiples of 8 up to 512;
        head_dim_vo defaults to head_dim_qk. pos_encoding_mode: "NONE", "ROPE_LLAMA" (keys rotated by their position,
        rows by theirs), "ALIBI". logits_soft_cap c > 0: scores become `c tanh(score / c)`. sm_scale: default
        `1 / sqrt(head_dim_qk)`. kv_data_type and o_data_type default to q_data_type.

        disable_split_kv: the keys of no request are split, so that results are the same bits in whatever batch a
        request is. Else, on Hopper with 16-bit caches, those of the last tiles may be, by how many multiprocessors
        would be idle. A positive fixed_split_size means the same as disable_split_kv: no chunk
        depends on the batch.

        Without effect: use_fp16_qk_reduction (sums are fp32), max_item_len_ptr, seq_lens_q, uniform_q_len (hints).
        block_tables is kept as `_block_tables`.
        max_token_per_sequence and max_sequence_kv: rows and keys that no request exceeds, for backend "cudnn" alone,
        which without them waits for the device; with use_cuda_graph those of the first plan hold.

        Raises ValueError (shapes, sizes, what a CUDA graph fixes), TypeError (dtypes), KeyError (pos_encoding_mode),
        UnsupportedError (what the backend does not take).
        """
        self._check_batch(qo_indptr, paged_kv_indptr)
        if len(paged_kv_last_page_len) != len(qo_indptr) - 1:
            raise ValueError(
                f"paged_kv_last_page_len: length {len(qo_indptr) - 1} is required, the batch size; "
                f"got {len(paged_kv_last_page_len)}"
            )
        check_length(self._kv_indptr_last, paged_kv_indices, "paged_kv_indices")
        if seq_lens is not None and len(seq_lens) != len(qo_indptr) - 1:
            raise ValueError(f"seq_lens: length {len(qo_indptr) - 1} is required, the batch size; got {len(seq_lens)}")
        self._set_options(
            causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta,
        )  # fmt: skip
        self._set_types(q_data_type, kv_data_type, o_data_type)
        self._place("qo_indptr", qo_indptr, non_blocking)
        self._place("paged_kv_indptr", paged_kv_indptr, non_blocking)
        self._place("paged_kv_indices", paged_kv_indices, non_blocking)
        self._place("paged_kv_last_page_len", paged_kv_last_page_len, non_blocking)
        self._block_tables = block_tables

        def lengths(device: torch.device) -> torch.Tensor:
            pages, last = paged_kv_indptr.to(device).diff().long(), paged_kv_last_page_len.to(device)
            return ((pages - 1) * page_size + last) * (pages > 0)

        self._place_mask(custom_mask, packed_custom_mask, (qo_indptr, paged_kv_indptr), lengths, non_blocking)
        self._place_items(
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, non_blocking
        )
        self._most = max_token_per_sequence, max_sequence_kv
        self._replan(
            self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf, seq_lens, num_qo_heads,
            num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, page_size, causal, window_left, non_blocking,
            disable_split_kv or (fixed_split_size or 0) > 0,
        )  # fmt: skip

    begin_forward = plan

    @fi_api
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of the planned batch: out `[qo_indptr[-1], num_qo_heads, head_dim_vo]` in o_data_type.

        q: `[qo_indptr[-1], num_qo_heads, head_dim_qk]`. paged_kv_cache: `[pages, 2, page_size, num_kv_heads, head_dim]`
        ("NHD"), `[pages, 2, num_kv_heads, page_size, head_dim]` ("HND"), or a tuple (k_cache, v_cache) without the axis
        of 2; without the page axis, page_size is 1. Strides are free but for the last dimension; both of the planned
        types.

        q_scale, k_scale multiply the scores and v_scale the output; one-element fp32 tensors on the device work too.
        args: for fp8 tensors scale_q `[num_qo_heads]`, scale_k, scale_v `[num_kv_heads]`, fp32, or numbers; with
        jit_args the tensors and then the scalars that the variant declares. sinks `[num_qo_heads]`, fp32:
        `exp(sinks[h])` is added to the sum of the softmax. out, lse: written and returned if given.
        window_left: None or what was planned. The last three: nothing is skipped or rounded, which any setting allows.

        With return_lse also lse, fp32, the logarithm of the sum of `exp(score)`: lse_base "log2" or "ln", lse_layout
        "NH" (`[rows, num_qo_heads]`) or "HN". A row that sees no key gives out = 0, lse = -inf (or that of its sink).

        Raises ValueError (shape, dtype, device, stride, lse_base, lse_layout), KeyError (container of the cache),
        AssertionError (window_left), RuntimeError (no plan), NotImplementedError (kv_cache_sf). With FI_CHECK=1 at
        import, also ValueError for page ids and offsets out of range, which waits for the device.
        """
        assert window_left is None or window_left == self._window_left, (
            f"window_left: {self._window_left} was planned; got {window_left}"
        )
        if kv_cache_sf is not None:
            raise no_nvfp4("kv_cache_sf")
        k, v = unpack(paged_kv_cache, self._kv_layout)
        self._check_query(q, k, v)
        page_size, kv_heads = (k.shape[1], k.shape[2]) if self._layout == 0 else (k.shape[2], k.shape[1])
        if page_size != self._page_size or kv_heads != self._num_kv_heads:
            raise ValueError(
                f"paged_kv_cache: page_size {self._page_size} and {self._num_kv_heads} kv heads were planned; "
                f"got shape {tuple(k.shape)} ({self._kv_layout})"
            )
        if CHECK:
            check_pages(k.shape[0], self._paged_kv_indices_buf, "paged_kv_indices", self._paged_kv_indptr_buf)
            check_bounds(self._qo_indptr_buf, "qo_indptr", q.shape[0])
        return self._attend(
            q, k, v, args, q_scale, k_scale, v_scale, out, lse, return_lse, lse_base, lse_layout, enable_pdl, sinks
        )

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Cache, *args: Any, **options: Any) -> Any:
        """`run` with return_lse: (out, lse)."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **options)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        self._set_options(
            causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta,
        )  # fmt: skip
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(self, *args: Any, **options: Any) -> Any:
        """`forward`, with the log-sum-exp."""
        return self.forward(*args, **options, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing; older callers end a plan with it."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing but check: kernels take K and V of different strides as they are.

        Raises ValueError (variant), RuntimeError (no plan).
        """
        if variant != "independent":
            raise ValueError(f'variant: "independent" is required; got {variant!r}')
        if self._plan_info is None:
            raise RuntimeError("prewarm_paged_kv_stride_variant: call plan first")
