"""Batch decode over a paged KV cache: plan once per step, run once per layer."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from fi_core.attention import derived
from fi_core.attention.contract import flag, row_elements, scales_of, unpack
from fi_core.attention.ops import decode as ops
from fi_core.attention.ops.request import by_variant
from fi_core.attention.schedule import DecodePlan, split_kv_of
from fi_core.attention.wrappers import arguments, trace
from fi_core.attention.wrappers.base import older_form, run_scales
from fi_core.attention.wrappers.decode_plan import BatchDecodePlan, check_call
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.observe.subject import explain
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import method_setting_lse, method_with_lse
from fi_core.runtime.signature import takes

_Values = tuple[Any, ...]
_SHAPE = words("self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size")  # of plan
# Tensors that a variant for prefill and decode may declare, and decode does not have.
_NO_MASK: dict[str, Any] = dict.fromkeys(
    words(
        "maybe_custom_mask maybe_mask_indptr maybe_prefix_len_ptr maybe_token_pos_in_items_ptr maybe_max_item_len_ptr",
        "maybe_k_cache_sf maybe_v_cache_sf",
    )
)


@fi_api
class BatchDecodeWithPagedKVCacheWrapper(BatchDecodePlan):
    """Decode attention of a batch over a paged KV cache: `plan` once per step, `run` once per layer.

    After `plan` and after each `run`, `last_choice` is the `Choice` of the dispatcher: the implementation, its config
    and the reason against each other one. `resolved_backend` is its public name.

    Args:
        float_workspace_buffer: contiguous, on the device of the cache, aligned to 16 bytes. It holds the partials of
            split-KV that do not fit into the wrapper's own buffer of 8 MiB, which happens with fixed_split_size, large
            head dims or the kernels on CUDA cores. In all other cases wrappers that share it may run at the same time.
        kv_layout: as in BatchPrefillWithPagedKVCacheWrapper.
        use_cuda_graph: as in that class, with the three buffers. `plan` may be captured too, if its tables are on the
            device.
        use_tensor_cores: required for q_len_per_req > 1; otherwise a hint, because "auto" chooses by shape.
        paged_kv_indptr_buffer: int32 `[batch_size + 1]`, with use_cuda_graph.
        paged_kv_indices_buffer: int32 `[max_pages]`, with use_cuda_graph.
        paged_kv_last_page_len_buffer: int32 `[batch_size]`, with use_cuda_graph.
        backend: "auto"; "fa2" (CUDA cores, or with use_tensor_cores mma.sync), "fa2_tc" (mma.sync), "fa3" (Hopper);
            "trtllm-gen" and "xqa" mean "auto". "cudnn" as in that class; the unused tokens of a request's last page
            must be finite with q_len_per_req > 1 only.
        jit_args, jit_kwargs: a user's attention variant as arguments of `gen_customize_batch_decode_module`, for
            backend "auto" or "fa2"; it is compiled here. Its tensors and scalars then follow the cache in `run`.

    Raises:
        The errors of BatchPrefillWithPagedKVCacheWrapper.
    """

    @fi_api
    @arguments.deprecated_positional
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        """Plans the next `run` calls: splits the KV of each request into work tiles. It does not synchronise.

        The schedule is computed on the device. Arguments that are not listed, other errors, and what is said of tables
        and of `last_choice`, are those of `BatchPrefillWithPagedKVCacheWrapper.plan`, whose head_dim_qk and head_dim_vo
        are head_dim.

        Args:
            indptr: int32 `[batch_size + 1]`; request b has the pages `indices[indptr[b] : indptr[b + 1]]`.
            indices: int32 `[indptr[-1]]` or longer, page ids.
            last_page_len: int32 `[batch_size]`, tokens in the last page of each request. A request without pages has
                length 0.
            window_left: number of keys before its own that a query attends to; -1: all.
            window_right: number of keys after its own that a query attends to, among those of the last q_len_per_req
                tokens; -1: all.
            data_type: fills q_data_type and kv_data_type where they are None.
            block_tables: kept as `_block_tables`. With backend "cudnn" its width bounds the lengths; without it plan
                synchronises to read them.
            seq_lens: int32, uint32 or int64 `[batch_size]`; the lengths, in place of those that last_page_len gives.
            fixed_split_size: splits each request into chunks of this many pages, rounded up to 64 tokens; None or -1:
                no chunks. The result of a request then has the same bits alone and in any batch.
            disable_split_kv: requests are not split. The result of a request then has the same bits alone and in any
                batch.
            q_len_per_req: query tokens of each request, its last ones; each attends to the keys up to its own position.
            is_causal: False means window_right = -1; None and True change nothing.

        Raises:
            ValueError: lengths below q_len_per_req, if all tables are on the host.
            NotImplementedError: window_right with backend "cudnn".
        """
        self._forget_plan()
        batch_size = self._check_table(indptr, indices, last_page_len, seq_lens)
        self._check_q_len(q_len_per_req)
        options = (
            batch_size, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, window_right,
            logits_soft_cap, q_data_type, kv_data_type, o_data_type, data_type, sm_scale, rope_scale, rope_theta,
            fixed_split_size, disable_split_kv, q_len_per_req, is_causal, self._plan.most_ctas, is_on(),
        )  # fmt: skip
        shape = self._shapes.find(options) or self._new_shape(options)
        if q_len_per_req != 1:
            self._check_lengths(indptr, last_page_len, seq_lens, page_size, q_len_per_req)
        given = {"indptr": indptr, "last_page_len": last_page_len, "page_indices": indices}
        tables: dict[str, Any] = self._placed(given, non_blocking)
        lengths = tables["indptr"], tables["last_page_len"], seq_lens
        tables["block_tables"] = block_tables
        self._end(shape, lengths, tables, non_blocking)

    begin_forward = plan

    @takes(derived.decode_workspace_size, (*_SHAPE, *arguments.SIZE_OPTIONS), plan)
    def workspace_size(self, given: dict[str, Any]) -> tuple[int, int]:
        """The workspace that a plan needs; changes nothing.

        Args:
            indptr, indices, last_page_len: as in `plan`; the lengths of requests do not matter.
            others: as in `plan`. fixed_split_size makes the result grow with the number of page indices, or with
                use_cuda_graph with the buffer for them; disable_split_kv and q_len_per_req matter too.

        Returns:
            (bytes of the float workspace, bytes of the int workspace).
        """
        split_kv = split_kv_of(given["fixed_split_size"], given["page_size"], given["disable_split_kv"])
        own = {name: given[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")}
        sizes = {"batch_size": given["indptr"].numel() - 1, "q_len": given["q_len_per_req"], "split_kv": split_kv}
        plan = DecodePlan(page_indices=given["indices"], most_ctas=self._plan.most_ctas, **own, **sizes)
        return self._workspaces.bytes_for(plan)

    @method_with_lse
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

        Arguments that are not listed, and the errors, are those of `BatchPrefillWithPagedKVCacheWrapper.run`.
        `last_choice` tells which implementation ran.

        Args:
            q: `[batch_size * q_len_per_req, num_qo_heads, head_dim]`, of the planned dtype.
            lse: fp32 `[rows, num_qo_heads]`, written if given.
            return_lse: also return lse, `log2(sum(2^(score * log2 e)))`.
            q_len_per_req: deprecated; belongs to `plan`.

        Returns:
            out `[batch_size * q_len_per_req, num_qo_heads, head_dim]`, or (out, lse). A request of length 0 has out = 0
            and lse = -inf, or the lse of its sink.
        """
        plan, call = self._plan, self._call
        if call is None:
            plan, call = self._ready()
        if q_len_per_req is not None or window_left is not None:
            self._check_repeated(q_len_per_req, window_left)
        k: Any = paged_kv_cache
        v = k_scales = v_scales = None
        if getattr(k, "ndim", 0) != 5:  # else the op takes the halves
            k, v = unpack(k, self._kv_layout)
        try:
            if kv_cache_sf is not None:
                k_scales, v_scales = scales_of(kv_cache_sf, self._kv_layout)
            dim = plan.head_dim if v is None else row_elements(v)
            if dim != plan.head_dim_vo:
                plan, call = self._ready(dim)
            rows, heads, return_lse = plan.rows, plan.num_qo_heads, flag("return_lse", return_lse)
            if out is None:  # sizes apart, and no dtype where it is q's: 0.8 us instead of 1.5
                dtype = plan.o_dtype
                out = q.new_empty(rows, heads, dim) if dtype is q.dtype else q.new_empty(rows, heads, dim, dtype=dtype)
            if lse is None and return_lse:
                lse = q.new_empty(rows, heads, dtype=torch.float32)
            sm_scale, out_scale, tensors = plan.scale, 1.0, ()
            if args or not (q_scale is k_scale is v_scale is kv_cache_sf is None):
                by_head = args if self._variant is None else ()
                scales = q_scale, k_scale, v_scale
                sm_scale, out_scale, tensors = run_scales(plan, scales, by_head, (k_scales, v_scales))
            values = out, lse, q, k, v, sm_scale, out_scale, sinks, enable_pdl
            if self._variant is not None or self._cudnn is not None:
                ran = self._otherwise(plan, values, tensors, args, (q_scale, k_scale, sinks))
            else:
                ran = ops.run_planned(call, *values, *tensors)
        except Exception as error:
            check = functools.partial(check_call, plan, out, lse, q, k, v, kv_cache_sf)  # a lambda slows the rest down
            others = {"out": out, "lse": lse, "sinks": sinks, "kv_cache_sf": kv_cache_sf, "args": args}
            others |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
            explain(error, check, others | {"paged_kv_cache": paged_kv_cache}, q=q, paged_kv_cache=k)
            raise
        self.last_choice = ran or self.last_choice
        return (out, lse) if return_lse and lse is not None else out

    forward = fi_api(
        older_form(
            derived.decode_forward,
            run,
            plan,
            "q paged_kv_cache pos_encoding_mode q_scale k_scale v_scale window_left logits_soft_cap sm_scale",
            "rope_scale rope_theta * return_lse",
        )
    )
    run_return_lse = method_setting_lse(run)
    forward_return_lse = method_setting_lse(forward)

    def _ready(self, head_dim_vo: int = 0) -> tuple[DecodePlan, Any]:
        """The plan and its call, made anew: for values of this head dim, or because an option has changed."""
        self._require_plan()
        plan = self._plan if not head_dim_vo else self._plan.replace(head_dim_vo=head_dim_vo)
        exact = self._choose(plan, plan.head_dim_vo, exact=True)
        work = self._workspaces.work(plan, plan.page_indices.numel())
        made = self._workspaces.sized(plan.replace(exact=exact), work)
        if made.scheduled != plan.scheduled:
            self._schedule(made)
        self._set_call(made, exact)
        return made, self._call

    def _otherwise(
        self, plan: DecodePlan, values: _Values, tensors: _Values, args: _Values, scales: _Values
    ) -> Choice | None:
        """Runs cuDNN's kernels, or a user's variant, with the arguments of a planned call.

        args: the variant's tensors and scalars; scales: q_scale, k_scale and sinks of run, which it must implement.
        """
        out, lse, q, k, v, *rest, _ = values
        k, v = (k, v) if v is not None else unpack(k, self._kv_layout)
        check_call(plan, out, lse, q, k, v, tensors[-1] if tensors else None)
        if self._variant is None:
            return self._by_cudnn(plan, (out, lse, q, k, v, *rest), tensors, plan.q_len > 1, plan.head_dim_vo)
        variant = self._variant.launch(plan, q, args, _NO_MASK, *scales)
        plan = plan.replace(pos_encoding=self._variant.encoding(plan))
        call = by_variant(ops.batch_decode, ops.BATCH_DECODE, plan, variant)
        return call(*values, *tensors)  # type: ignore[no-any-return]

    def _check_repeated(self, q_len: Any, window: Any) -> None:
        """Raises unless q_len_per_req and window_left, which `run` accepts too, are those of the plan."""
        plan = self._plan
        if q_len is not None:
            warnings.warn("run: q_len_per_req belongs to plan", DeprecationWarning, stacklevel=3)
            if not isinstance(q_len, int) or q_len != plan.q_len:
                raise ValueError(f"q_len_per_req: {plan.q_len} was planned; got {q_len}")
        if window is not None and not (isinstance(window, int) and window == plan.window_left):
            raise ValueError(f"window_left: {plan.window_left} was planned; got {window}")


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
