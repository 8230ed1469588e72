"""Batch prefill over a paged KV cache: plan once per step, run once per layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from inspect import signature
from typing import Any

from fi_core.attention import derived
from fi_core.attention.contract import Cache, check_length, lengths_of, unpack
from fi_core.attention.wrappers import trace
from fi_core.attention.wrappers.base import older_form
from fi_core.attention.wrappers.prefill_plan import BatchPrefillPlan
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import method_setting_lse, method_with_lse
from fi_core.runtime.signature import takes

# Of the constructor, which wrappers like this one take too.
TABLES = words(
    "self float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf",
    "paged_kv_last_page_len_buf",
)


@fi_api
class BatchPrefillWithPagedKVCacheWrapper(BatchPrefillPlan):
    """Prefill and append attention of a batch over a paged KV cache: `plan` once per step, `run` once per layer.

    The result of a request does not depend on its batch, unless keys are split (see `plan`). After `plan` and after
    each `run`, `last_choice` is the `Choice` of the dispatcher: the implementation, its config and the reason against
    each other one. `resolved_backend` is its public name.

    Args:
        float_workspace_buffer: on the device of the cache, aligned to 16 bytes. It holds the partials of a run whose
            plan splits KV, so wrappers that share it must not run at the same time. 128 MiB is always enough; with less
            memory `plan` chooses fewer splits, or none.
        kv_layout: "NHD" or "HND", the order of tokens and heads in a page.
        use_cuda_graph: fixes the batch size and lets `plan` copy its tables into the buffers. A captured `run` then
            computes the batch that was planned last: kernels read the tables on the device, at fixed addresses.
        qo_indptr_buf, paged_kv_indptr_buf: int32 `[batch_size + 1]`, with use_cuda_graph.
        paged_kv_indices_buf: int32 `[max_pages]`, with use_cuda_graph.
        paged_kv_last_page_len_buf: int32 `[batch_size]`, with use_cuda_graph.
        custom_mask_buf: uint8, required for masks with use_cuda_graph; every run then applies the mask that was planned
            last.
        mask_indptr_buf: int32 `[batch_size + 1]`, required with custom_mask_buf.
        backend: "auto"; "fa2" (mma.sync, every option); "fa3" (Hopper: head dims 64, 128, 256, or 192 with values of
            128; q, k and v of one 16-bit or fp8 dtype, or fp8 k and v with a 16-bit q; output of q's dtype, with fp8 k
            and v also of 16 bits; with an fp8 q softmax weights are rounded to e4m3; no custom mask, no position
            encoding); "trtllm-gen" and "cutlass" mean "auto". "cudnn" runs cuDNN's kernels and requires
            nvidia-cudnn-frontend: 16-bit tensors of one dtype, no mask except causal and window_left, no position
            encoding, no soft cap, page sizes that are powers of 2. cuDNN uses float_workspace_buffer, and the unused
            tokens of a request's last page must be finite.
        jit_args, jit_kwargs: a user's attention variant as arguments of `gen_customize_batch_prefill_module` without
            backend, for backend "auto", "fa2" or "fa3"; it is compiled here. Its tensors and scalars then follow the
            cache in `run`. A planned mask is applied in addition to the variant's, unless the variant declares
            maybe_custom_mask.
        variant_owns_mask: only the variant's mask is applied.

    Raises:
        KeyError: kv_layout.
        ValueError: backend or buffers.
        NotImplementedError: a backend of another library.
        LibraryError: "cudnn" without its frontend.
        CompileError: the variant does not compile; the errors of the generator are raised as well.
    """

    _is_paged = True
    _buffers: Mapping[str, str] = {
        "qo_indptr": "qo_indptr_buf",
        "indptr": "paged_kv_indptr_buf",
        "page_indices": "paged_kv_indices_buf",
        "last_page_len": "paged_kv_last_page_len_buf",
    }

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
        """Plans the next `run` calls: computes the work tiles of the batch on the device. It does not synchronise.

        Row i of a request is at position p = kv_len - qo_len + i. Each table may be on the host or on the device. A
        host table is copied in the order of the current stream, so a pinned tensor must keep its values until then. An
        int64 table is converted here, which costs a small kernel or host copy each. `last_choice` is then the choice
        for runs with aligned tensors.

        Args:
            qo_indptr: int32 `[batch_size + 1]`; request b has rows `q[qo_indptr[b] : qo_indptr[b + 1]]`.
            paged_kv_indptr: int32 `[batch_size + 1]`; request b has pages `paged_kv_indices[paged_kv_indptr[b] :
                paged_kv_indptr[b + 1]]`.
            paged_kv_indices: int32 `[paged_kv_indptr[-1]]` or longer, page ids.
            paged_kv_last_page_len: int32 `[batch_size]`, tokens in the last page of each request. A request without
                pages has length 0.
            num_qo_heads, num_kv_heads: query head h uses kv head `h // (num_qo_heads / num_kv_heads)`; any integer
                ratio.
            head_dim_qk, head_dim_vo: multiples of 8 up to 512; head_dim_vo defaults to head_dim_qk.
            page_size: tokens of a page.
            custom_mask: bool, the `[qo_len, kv_len]` masks of all requests, flattened and concatenated, in any shape;
                True: the row attends to the key. It replaces causal, and may be on any device.
            packed_custom_mask: uint8, the same masks as bits (little endian), each request starting at a new byte, as
                `segment_packbits` makes them. It takes precedence over custom_mask.
            causal: a row attends to keys j <= p.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" (keys and queries are rotated by their positions) or "ALIBI".
            use_fp16_qk_reduction: without effect; sums are fp32.
            sm_scale: softmax_scale; default `1 / sqrt(head_dim_qk)`.
            window_left: w >= 0 also masks keys j < p - w; -1: no window.
            logits_soft_cap: c > 0 replaces scores by `c tanh(score / c)`.
            rope_scale, rope_theta: of "ROPE_LLAMA"; default 1 and 1e4.
            q_data_type, kv_data_type, o_data_type: dtypes; the last two default to q_data_type. A kv_data_type of uint8
                is NVFP4.
            non_blocking: copy host tables without blocking.
            prefix_len_ptr: uint32 `[batch_size]`, or one element for all; multi-item scoring, which replaces all masks:
                several items follow one prefix of this length, and a row attends to the prefix and to its own item.
            token_pos_in_items_ptr: uint16 `[batch_size * token_pos_in_items_len]`, the position within its item of each
                token after the prefix; 0 at the delimiter before an item. Zeros at the end may be left out.
            token_pos_in_items_len: elements of each request in token_pos_in_items_ptr.
            max_item_len_ptr, seq_lens_q, uniform_q_len: hints without effect.
            seq_lens: int32 or uint32 `[batch_size]`; the lengths, in place of those that the last pages give.
            block_tables: kept as `_block_tables`.
            max_token_per_sequence, max_sequence_kv: upper bounds of qo_len and kv_len, for backend "cudnn"; without
                them plan synchronises. With use_cuda_graph those of the first plan hold.
            fixed_split_size: a positive number has the effect of disable_split_kv, so that no chunk depends on the
                batch.
            disable_split_kv: no keys are split, so that the result of a request has the same bits in any batch.
                Otherwise, on Hopper with 16-bit caches, the keys of the last work tiles may be split, depending on the
                number of SMs that would idle.

        Raises:
            ValueError: shapes, sizes, or a value that a CUDA graph fixes.
            TypeError: dtypes.
            KeyError: pos_encoding_mode.
            UnsupportedError: the backend does not support the request.
        """
        self._forget_plan()
        tables = qo_indptr, paged_kv_indptr
        batch = self._check_batch(*tables, paged_kv_last_page_len=paged_kv_last_page_len, seq_lens=seq_lens)
        if self._is_paged:
            check_length(batch["kv_last"], paged_kv_indices, "paged_kv_indices")
        dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        options = (
            num_qo_heads, num_kv_heads, head_dim_qk, dim_vo, page_size, causal, window_left, pos_encoding_mode,
            logits_soft_cap, sm_scale, rope_scale, rope_theta, q_data_type, kv_data_type, o_data_type,
        )  # fmt: skip
        shape = self._shape(batch["batch_size"], options, (fixed_split_size, disable_split_kv))
        given = *tables, paged_kv_indices, paged_kv_last_page_len
        batch |= self._placed(dict(zip(self._buffers, given)), non_blocking)
        batch["block_tables"] = block_tables
        lens = functools.partial(lengths_of, paged_kv_indptr, paged_kv_last_page_len, seq_lens, page_size)
        masks, most = (custom_mask, packed_custom_mask, lens), (max_token_per_sequence, max_sequence_kv)
        items = (prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        self._plan_batch(shape, batch, (*tables, seq_lens), masks, items, most, non_blocking)

    begin_forward = plan

    @takes(derived.paged_workspace_size, [name for name in signature(plan).parameters if name != "non_blocking"], plan)
    def workspace_size(self, given: dict[str, Any]) -> tuple[int, int]:
        """The workspace that a plan needs; changes nothing. The arguments are those of `plan`.

        Returns:
            (bytes of the float workspace, bytes of the int workspace). With the first every number of splits fits that
            `plan` may choose; with less it chooses fewer. It is 0 for kernels that do not split KV.
        """
        return self._size(given["qo_indptr"], given)

    @method_with_lse
    @fi_api(trace=trace.paged_prefill, planned=trace.PLANNED_PAGED)
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
        """Attention of the planned batch: `softmax(mask(q k^T * sm_scale)) v` for each request and head
        (arXiv:2501.01005).

        `last_choice` tells which implementation ran.

        Args:
            q: `[qo_indptr[-1], num_qo_heads, head_dim_qk]`, of the planned dtype.
            paged_kv_cache: `[pages, 2, page_size, num_kv_heads, head_dim]` ("NHD"), `[pages, 2, num_kv_heads,
                page_size, head_dim]` ("HND"), or a tuple (k_cache, v_cache) without the axis of 2; without the page
                axis, page_size is 1. The planned dtype; any strides with a contiguous last dimension.
            args: for fp8 tensors scale_q `[num_qo_heads]`, scale_k and scale_v `[num_kv_heads]`, fp32 or numbers; with
                jit_args the tensors and then the scalars of the variant.
            q_scale, k_scale: factors of the scores, numbers or one-element fp32 tensors on the device.
            v_scale: factor of the output, likewise.
            out: written and returned if given.
            lse: fp32, written if given.
            return_lse: also return lse, the logarithm of `sum(exp(score))`.
            lse_base: "log2" or "ln".
            lse_layout: "NH" (`[rows, num_qo_heads]`) or "HN".
            enable_pdl: programmatic dependent launch; None: where the device supports it.
            window_left: None, or the planned value.
            sinks: fp32 `[num_qo_heads]`; `exp(sinks[h])` is added to row_sum.
            kv_cache_sf: for NVFP4 caches (uint8, two elements a byte, head_dim / 2 bytes a row) the scales, in the form
                of the cache with head_dim / 16 instead: e4m3, or their bytes as uint8. q then has 16 bits, and k_scale
                and v_scale are the global factors.
            skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress: without effect; nothing is skipped
                or rounded, which any setting permits.

        Returns:
            out `[qo_indptr[-1], num_qo_heads, head_dim_vo]` in o_data_type, or (out, lse). A row that attends to no key
            has out = 0 and lse = -inf, or the lse of its sink.

        Raises:
            RuntimeError: no plan.
            ValueError: shape, dtype, device, stride, lse_base or lse_layout. Wrong contents of tables: on the CPU, and
                on CUDA with FI_CHECK=1 at import, which synchronises.
            KeyError: the container of the cache.
        """
        plan = self._plan if self._call is not None else self._ready()
        if window_left is not None and not (isinstance(window_left, int) and window_left == plan.window_left):
            raise ValueError(f"window_left: {plan.window_left} was planned; got {window_left}")
        k: Any = paged_kv_cache
        v = None
        if getattr(k, "ndim", 0) != 5:  # else the op takes the halves
            k, v = unpack(k, self._kv_layout)
        scales, results, form = (q_scale, k_scale, v_scale), (out, lse, return_lse), (lse_base, lse_layout)
        return self._attend(q, k, v, args, scales, results, form, enable_pdl, sinks, kv_cache_sf)

    forward = fi_api(
        older_form(
            derived.paged_forward,
            run,
            plan,
            "q paged_kv_cache causal pos_encoding_mode use_fp16_qk_reduction k_scale v_scale window_left",
            "logits_soft_cap sm_scale rope_scale rope_theta * return_lse",
        )
    )
    run_return_lse = method_setting_lse(run)
    forward_return_lse = method_setting_lse(forward)
