"""The common half of the batch prefill wrappers: tables, masks and options of a plan, and the launch of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention import mask
from fi_core.attention.contract import (
    LAYOUTS,
    check_backend,
    check_nvfp4,
    check_workspace,
    code,
    computed,
    data_types,
    flag,
    kv_type,
    last_value,
    per_head,
    scale_product,
    scales_of,
)
from fi_core.attention.cudnn import planned as cudnn
from fi_core.attention.ops import prefill as ops
from fi_core.attention.ops.request import LOAD_BYTES, alignment
from fi_core.attention.wrappers import planners
from fi_core.attention.wrappers.base import BatchWrapper, check_results
from fi_core.attention.wrappers.prefill_arguments import BACKENDS, FOREIGN, fixed_batch_size, log_base, lse_shape
from fi_core.observe.log import fi_api
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.errors import blame
from fi_core.runtime.launch.operator import planned
from fi_core.utils import PosEncodingMode, check_shape_dtype_device, int32_index

if TYPE_CHECKING:
    import torch

    from fi_core.attention.custom import CustomAttention

_INT_WORKSPACE = 8 << 20  # bytes; enough for a million work tiles


class BatchPrefillPlan(BatchWrapper):
    """The planning half of BatchPrefillWithPagedKVCacheWrapper and BatchPrefillWithRaggedKVCacheWrapper."""

    _paged_kv_indices_buf: Any = None  # of pages
    _causal: bool
    _num_ctas = 0  # of run, where another kernel runs beside it; 0: as many as fit

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        graph_buffers: dict[str, Any] | None,
        custom_mask_buf: torch.Tensor | None,
        mask_indptr_buf: torch.Tensor | None,
        backend: str,
        jit_args: Sequence[Any] | None,
        jit_kwargs: Mapping[str, Any] | None,
        variant_owns_mask: bool,
    ) -> None:
        import torch

        check_workspace(float_workspace_buffer, "float_workspace_buffer", contiguous=False)
        self._layout = code(LAYOUTS, kv_layout, "kv_layout")
        if variant_owns_mask and (backend != "fa2" or jit_args is None):
            raise ValueError('variant_owns_mask: requires backend "fa2" and jit_args')
        check_backend(backend, BACKENDS, FOREIGN)
        self._variant: CustomAttention | None = None
        if jit_args is not None or (jit_kwargs is not None and len(jit_kwargs)):
            from fi_core.attention.custom_modules import customised

            self._variant = customised("prefill", backend, float_workspace_buffer.device, jit_args, jit_kwargs)
        self._variant_owns_mask = variant_owns_mask
        self._kv_layout, self._backend = kv_layout, backend
        self._allowed = "fa2" if self._variant is not None else BACKENDS[backend]
        self._use_cuda_graph = graph_buffers is not None
        self._fixed_batch_size = fixed_batch_size(graph_buffers) if graph_buffers else 0
        self._custom_mask_buf: Any = custom_mask_buf
        self._mask_indptr_buf: Any = mask_indptr_buf
        if self._use_cuda_graph and custom_mask_buf is not None and mask_indptr_buf is None:
            raise ValueError("mask_indptr_buf: a tensor is required with custom_mask_buf; got None")
        self._graph_masks = custom_mask_buf if self._use_cuda_graph else None
        self._max_total_num_rows: int | None = None
        self._copies = {}
        self._qo_indptr_last: int | None = None  # None: only the device knows
        self._kv_indptr_last: int | None = None
        self._batch_size = 0
        self._prefix_len_ptr: torch.Tensor | None = None
        self._items: torch.Tensor | None = None
        self._max_item_len_ptr: torch.Tensor | None = None
        self._sinks: torch.Tensor | None = None
        self.device = float_workspace_buffer.device
        self._cudnn = cudnn.PlannedBatch(self._use_cuda_graph) if backend == "cudnn" else None
        if self._cudnn is not None:
            cudnn.require(self.device)
        self._most: tuple[int | None, int | None] = None, None  # upper bounds of qo_len and kv_len, if given to plan
        own = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self.device)
        self.reset_workspace_buffer(float_workspace_buffer, own)

    @fi_api
    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replaces both workspaces. Call `plan` before the next run.

        Args:
            float_workspace_buffer: holds the partials of split-KV during a run, so wrappers that run at the same time
                must not share it. If it is small or not contiguous, no keys are split.
            int_workspace_buffer: contiguous, any dtype, aligned to 16 bytes, private to the wrapper: it holds the
                schedule from plan to the last run.

        Raises:
            ValueError: alignment or strides.
        """
        import torch

        self._set_workspaces(float_workspace_buffer, int_workspace_buffer)
        memory = int_workspace_buffer.view(-1).view(torch.uint8)
        self._schedule = memory[: len(memory) // 4 * 4].view(torch.int32)
        partials = float_workspace_buffer
        self._partials = partials.view(-1).view(torch.uint8) if partials.is_contiguous() else None

    def _requests(self) -> torch.Tensor:
        """The requests in the schedule, `[batch_size, 4]`: first row, qo_len, first page or key, kv_len."""
        return ops.requests(self._schedule, self._batch_size)

    @computed
    def _kv_lens_buffer(self) -> torch.Tensor:
        """Tokens of each request of the last plan, int32 on the device."""
        return self._requests()[:, 3]

    @computed
    def _max_q_len(self) -> int:
        """The longest qo_len of the last plan; synchronises."""
        return int(self._requests()[:, 1].max()) if self._batch_size else 0

    @computed
    def _max_kv_len(self) -> int:
        """The longest kv_len of the last plan; synchronises."""
        return int(self._requests()[:, 3].max()) if self._batch_size else 0

    def _size(self, qo_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int) -> tuple[int, int]:
        tokens = ops.q_tile_tokens(num_qo_heads, num_kv_heads)
        return 0, 4 * ops.schedule_words(qo_indptr.numel() - 1, int(qo_indptr[-1]), tokens)

    def _check_batch(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
        """Checks the shapes of the tables, and the limits of a CUDA graph."""
        try:
            fits = kv_indptr.numel() == qo_indptr.numel() > 0
        except AttributeError as error:
            blame(error, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        if not fits:
            raise ValueError(
                f"kv_indptr: length {qo_indptr.numel()} is required, that of qo_indptr (batch_size + 1); "
                f"got {kv_indptr.numel()}"
            )
        rows = last_value(qo_indptr, "qo_indptr")
        if self._use_cuda_graph:
            if qo_indptr.numel() - 1 != self._fixed_batch_size:
                raise ValueError(
                    f"qo_indptr: the batch size is fixed at {self._fixed_batch_size} by use_cuda_graph; "
                    f"got {qo_indptr.numel() - 1}"
                )
            most = self._max_total_num_rows
            if not self._was_planned:
                self._max_total_num_rows = rows
            elif rows is not None and most is not None and rows > most:
                raise ValueError(
                    f"qo_indptr: at most {most} rows, those of the first plan, are allowed with "
                    f"use_cuda_graph; got {rows}"
                )
        self._batch_size = qo_indptr.numel() - 1
        self._qo_indptr_last, self._kv_indptr_last = rows, last_value(kv_indptr, "kv_indptr")

    def _place(self, name: str, table: torch.Tensor, non_blocking: bool) -> None:
        """Sets the attribute `_<name>_buf`: to a device copy of the table, or by copying into the buffer of the
        graph.
        """
        attribute = f"_{name}_buf"
        if not self._use_cuda_graph:
            setattr(self, attribute, self._on_device(name, table, non_blocking))
            return
        buffer, table = getattr(self, attribute), int32_index(table)
        if table.dtype is not buffer.dtype:
            raise TypeError(f"{name}: {buffer.dtype}, as {name}_buf has it, or int64 is required; got {table.dtype}")
        if table.numel() > buffer.numel():
            raise ValueError(f"{name}: {name}_buf has room for {buffer.numel()}; got {table.numel()}")
        if table.data_ptr() != buffer.data_ptr():
            buffer[: table.numel()].copy_(table, non_blocking=non_blocking)

    def _place_mask(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        indptrs: tuple[torch.Tensor, torch.Tensor],
        lengths: Callable[[torch.device], torch.Tensor],
        non_blocking: bool,
    ) -> None:
        """Packs a boolean mask. indptrs: of queries and keys; lengths: the kv_len of each request, on a given
        device.
        """
        if custom_mask is None and packed_custom_mask is None:
            if not self._use_cuda_graph:
                self._custom_mask_buf = self._mask_indptr_buf = None
            return
        if self._use_cuda_graph and self._graph_masks is None:
            raise ValueError(
                "custom_mask: with use_cuda_graph the wrapper needs custom_mask_buf and mask_indptr_buf; got None"
            )
        on_host = all(indptr.device.type == "cpu" for indptr in indptrs)
        where = indptrs[0].device if on_host else self.device
        elements = mask.element_bounds(indptrs[0].to(where), lengths(where))
        if packed_custom_mask is not None:
            bounds = mask.byte_bounds(elements)
            mask.check_packed(packed_custom_mask, bounds)
            packed = packed_custom_mask.to(self.device, non_blocking=non_blocking)
            if self._graph_masks is not None:
                if len(packed) > len(self._graph_masks):
                    raise ValueError(
                        f"packed_custom_mask: custom_mask_buf has room for {len(self._graph_masks)}; got {len(packed)}"
                    )
                self._graph_masks[: len(packed)].copy_(packed, non_blocking=non_blocking)
        else:
            assert custom_mask is not None
            flat = custom_mask.to(self.device, non_blocking=non_blocking)
            packed, bounds = mask.pack(flat, elements, self._graph_masks)
        if self._graph_masks is not None:
            self._mask_indptr_buf.copy_(bounds, non_blocking=non_blocking)
        else:
            self._custom_mask_buf = packed
            self._mask_indptr_buf = bounds.to(self.device, non_blocking=non_blocking)

    def _place_items(self, prefix_len: Any, positions: Any, length: int, longest: Any, non_blocking: bool) -> None:
        """Places the tables of multi-item scoring: prefix lengths, and the position of each token within its item."""
        import torch

        self._prefix_len_ptr, self._token_pos_in_items_ptr = prefix_len, positions
        self._token_pos_in_items_len, self._max_item_len_ptr = length, longest
        self._items = None
        if prefix_len is None:
            return
        batch, given = self._batch_size, 0 if positions is None else positions.numel()
        if positions is None or not 0 < given <= batch * length:
            raise ValueError(
                f"token_pos_in_items_ptr: 1 to batch_size * token_pos_in_items_len = {batch} * {length} elements are "
                f"required with prefix_len_ptr; got {None if positions is None else given}"
            )
        if prefix_len.numel() not in (1, batch):
            raise ValueError(f"prefix_len_ptr: one element, or {batch}, is required; got {prefix_len.numel()}")
        if positions.dtype is not torch.uint16:
            raise ValueError(f"token_pos_in_items_ptr: dtype torch.uint16 is required; got {positions.dtype}")
        prefix_len = self._on_device("prefix_len", prefix_len.reshape(-1), non_blocking)
        self._prefix_len_ptr = prefix_len.expand(batch).contiguous()
        items = self._on_device("items", positions.reshape(-1), non_blocking)
        if given < batch * length:  # the rest is padding, which may be left out
            rest = torch.zeros(batch * length - given, dtype=torch.int16, device=items.device)
            items = torch.cat((items.view(torch.int16), rest))
        self._items = items.view(torch.uint16).view(batch, length)

    def _set_types(self, q: Any, kv: Any, o: Any) -> None:
        types = data_types(q, kv, o, None)
        self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type = types
        self._nvfp4 = kv_type(types[1]) == "e2m1"

    def _replan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor | None,
        kv_lens: torch.Tensor | None,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool,
        window_left: int,
        non_blocking: bool = True,
        disable_split_kv: bool = False,
    ) -> list[int]:
        """Computes the work tiles on the device and keeps the shape of the batch.

        kv_lens take precedence over last_page_len.
        """
        self._num_qo_heads, self._num_kv_heads, self._page_size = num_qo_heads, num_kv_heads, page_size
        self._head_dim_qk, self._head_dim_vo = head_dim_qk, head_dim_vo
        self._batch_size = batch = qo_indptr.numel() - 1
        self.last_choice = choice = self._choose()
        self._q_tile_tokens = ops.q_tile_tokens(num_qo_heads, num_kv_heads, ops.q_tile_rows(choice))
        partials = None if disable_split_kv else self._partials
        max_partials = 0 if partials is None else ops.max_partials(choice, len(partials), head_dim_vo)
        self._splits_kv = max_partials > 0
        words = ops.schedule_words(batch, rows := self._qo_indptr_last or 0, self._q_tile_tokens)
        if words > self._schedule.numel():
            raise ValueError(f"int_workspace_buffer: {4 * words} bytes are required; got {4 * self._schedule.numel()}")
        self._kv_tokens = (self._kv_indptr_last or 0) * page_size
        qo_indptr = self._on_device("planned_qo_indptr", qo_indptr, non_blocking)
        kv_indptr = self._on_device("planned_kv_indptr", kv_indptr, non_blocking)
        if kv_lens is not None:
            kv_lens, last_page_len = self._on_device("kv_lens", kv_lens, non_blocking), None
        ops.plan(
            self._schedule, batch, self._q_tile_tokens, qo_indptr, kv_indptr, last_page_len, kv_lens,
            page_size=page_size, causal=causal, window_left=window_left, num_kv_heads=num_kv_heads,
            short_tile_tokens=ops.short_tile_tokens(choice, num_qo_heads, num_kv_heads, window_left),
            max_partials=max_partials,
        )  # fmt: skip
        if self._cudnn is not None:
            most_q, most_kv = self._most
            requests = self._requests()
            self._cudnn.plan(
                requests[:, 1].contiguous(), requests[:, 3].contiguous(),
                (self._max_q_len if most_q is None else most_q, self._max_kv_len if most_kv is None else most_kv),
                kv_indptr, self._paged_kv_indices_buf, page_size, qo_indptr,
            )  # fmt: skip
        self._cached_module = planners.PLANNER
        return self._end_plan([batch, self._q_tile_tokens, rows, page_size, int(causal), window_left])

    def _replan_lengths(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_lens: torch.Tensor, rows: int, num_qo_heads: int,
        num_kv_heads: int, page_size: int, head_dim_qk: int, head_dim_vo: int, causal: bool, window_left: int,
        fixed_split_size: int, disable_split_kv: bool,
    ) -> list[int]:  # fmt: skip
        """The plan of `planners.Planner`; qo_indptr has the number of rows."""
        self._check_batch(qo_indptr, kv_indptr)
        return self._replan(
            qo_indptr, kv_indptr, None, kv_lens, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size,
            causal, window_left, disable_split_kv=disable_split_kv or fixed_split_size > 0,
        )  # fmt: skip

    def _choose(
        self, scaled: bool = False, backend: str = "", encoding: int | None = None, kept: str = "",
        alignment: int = LOAD_BYTES,
    ) -> Choice:  # fmt: skip
        """The choice for runs of the planned shape.

        The defaults are those of the plan, and aligned tensors. kept: the mask that the kernel applies.
        """
        if self._variant is not None:
            self._variant.check(
                self._cached_q_data_type, self._cached_kv_data_type, self._out_dtype(), self._head_dim_qk,
                self._head_dim_vo,
            )  # fmt: skip
        mask = "items" if self._items is not None else "plain" if self._custom_mask_buf is None else "custom"
        mode = self._pos_encoding_mode if encoding is None else PosEncodingMode(encoding).name
        return planned(
            ops.BATCH_PREFILL, self.device, backend or self._allowed, self._cached_q_data_type,
            kv_type(self._cached_kv_data_type), self._out_dtype(), self._head_dim_qk, self._head_dim_vo,
            self._num_qo_heads // self._num_kv_heads,
            0 if self._paged_kv_indices_buf is None else self._page_size, mode, kept or mask,
            self._variant is None and self._logits_soft_cap > 0.0, scaled, False, alignment,
            ahead=self._variant is None,
        )  # fmt: skip

    def _out_dtype(self) -> torch.dtype:
        return self._cached_o_data_type

    def _check_query(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache_sf: Any) -> None:
        if self._plan_info is None:
            raise self._no_plan()
        if q.dtype is not self._cached_q_data_type:
            raise ValueError(f"q: q_data_type {self._cached_q_data_type} was planned; got {q.dtype}")
        if k.dtype is not self._cached_kv_data_type or v.dtype is not k.dtype:
            raise ValueError(
                f"k and v (paged_kv_cache): kv_data_type {self._cached_kv_data_type} was planned; got {k.dtype} and "
                f"{v.dtype}"
            )
        if self._nvfp4 is (kv_cache_sf is None):
            check_nvfp4(kv_cache_sf, k, "k (paged_kv_cache)")
        rows, shape = self._qo_indptr_last, q.shape
        fits = rows is None or shape[0] == rows or (self._use_cuda_graph and shape[0] > rows)
        if len(shape) != 3 or not fits or shape[1] != self._num_qo_heads or shape[2] != self._head_dim_qk:
            first = "any" if rows is None else rows
            raise ValueError(
                f"q: shape ({first}, {self._num_qo_heads}, {self._head_dim_qk}) was planned (qo_indptr[-1] rows); "
                f"got {tuple(q.shape)}"
            )
        if v.shape[-1] << self._nvfp4 != self._head_dim_vo:
            raise ValueError(f"v: head_dim_vo {self._head_dim_vo} was planned; got shape {tuple(v.shape)}")

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: tuple[Any, ...],
        q_scale: Any,
        k_scale: Any,
        v_scale: Any,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
        lse_layout: str,
        enable_pdl: bool | None,
        sinks: torch.Tensor | None,
        kv_cache_sf: Any,
    ) -> Any:
        """Allocates the missing results and launches."""
        import torch

        k_scales = v_scales = None
        if kv_cache_sf is not None:
            k_scales, v_scales = scales_of(kv_cache_sf, self._kv_layout, self._paged_kv_indices_buf is not None)
        rows, heads, _ = q.shape
        shape, out_dtype = (rows, heads, self._head_dim_vo), self._out_dtype()
        zero_padded_rows = False
        return_lse = return_lse is True or (return_lse is not False and flag("return_lse", return_lse))
        given = out
        if out is not None:
            if self._cudnn is not None or getattr(out, "dtype", None) is not out_dtype:
                check_results(q, shape, out_dtype, out, None)
        else:
            zero_padded_rows = self._qo_indptr_last != rows
            if zero_padded_rows and self._cudnn is not None:
                out = q.new_zeros(shape, dtype=out_dtype)
            elif out_dtype is q.dtype and self._head_dim_vo == self._head_dim_qk:
                out = q.new_empty(*shape)
            else:
                out = q.new_empty(*shape, dtype=out_dtype)
        written, factor = lse, 1.0 if lse_base == "log2" else log_base(lse_base)
        if lse is not None or return_lse:
            wanted = lse_shape(lse_layout, rows, heads)
            if lse is not None:
                check_shape_dtype_device(lse, wanted, torch.float32, q.device, "lse")
            if lse is None or lse_layout == "HN":
                written = q.new_empty(rows, heads, dtype=torch.float32)
        scale = self._head_dim_qk**-0.5 if self._sm_scale is None else self._sm_scale
        bmm1 = bmm2 = None
        out_scale = 1.0
        if q_scale is not None or k_scale is not None:
            scale, bmm1 = scale_product(scale, q_scale, k_scale)
        if v_scale is not None:
            out_scale, bmm2 = scale_product(1.0, v_scale)
        by_head: tuple[Any, Any, Any] = (None, None, None)
        custom = self._custom_mask_buf if self._items is None else None
        encoding, causal, variant = self._encoding, self._causal, None
        if self._variant is not None:
            known = {
                "maybe_custom_mask": custom,
                "maybe_mask_indptr": None if custom is None else self._mask_indptr_buf,
                "maybe_prefix_len_ptr": self._prefix_len_ptr,
                "maybe_token_pos_in_items_ptr": None if self._items is None else self._items.view(-1),
                "maybe_max_item_len_ptr": self._max_item_len_ptr,
                "maybe_k_cache_sf": k_scales,
                "maybe_v_cache_sf": v_scales,
            }
            # The kernel then applies no mask of its own.
            if self._variant_owns_mask or self._variant.declares("maybe_custom_mask"):
                causal = causal and custom is None and not self._variant_owns_mask
                custom = None
            encoding = self._variant.encoding(self)
            mask = "items" if self._items is not None else "plain" if custom is None else "custom"
            self.last_choice = choice = self._choose(
                bmm2 is not None, self._variant.backend(q.device), encoding, mask, alignment(q, k, v, out)
            )
            variant = self._variant.launch(
                self, q, args, known, q_scale, k_scale, sinks, implementation=choice.implementation
            )
        elif args:
            qk, vo, by_head = per_head(args)
            scale, out_scale = scale * qk, out_scale * vo
        if self._cudnn is not None:
            self.last_choice = self._choose(scaled=bmm1 is not None or any(x is not None for x in by_head))
            self._cudnn.attend(
                out, written, q, k, v, self._layout, self._float_workspace_buffer, scale, self._causal,
                self._window_left, sinks,
            )  # fmt: skip
            if out_scale != 1.0 or bmm2 is not None:
                out.mul_(out_scale if bmm2 is None else bmm2 * out_scale)
        else:
            try:
                ran = ops.batch_prefill(  # by position, as declared: 22 names cost 0.9 us
                    out, written, self._schedule, q, k, v, self._layout, self._batch_size, self._q_tile_tokens,
                    self._paged_kv_indices_buf, self._partials if self._splits_kv else None, causal, encoding,
                    self._window_left, self._logits_soft_cap, scale, out_scale, self._rope_scale, self._rope_theta,
                    sinks, by_head[0], by_head[1], by_head[2], bmm1, bmm2, custom, self._mask_indptr_buf,
                    self._prefix_len_ptr, self._items, self._kv_tokens, zero_padded_rows, self._num_ctas, k_scales,
                    v_scales, enable_pdl, backend=self._allowed, variant=variant,
                )  # fmt: skip
            except Exception:
                check_results(q, shape, out_dtype, given, None)
                raise
            self.last_choice = ran or self.last_choice
        if written is None:
            return out
        if factor != 1.0:
            written.mul_(factor)
        if lse_layout == "HN":
            written = written.t().contiguous() if lse is None else lse.copy_(written.t())
        return (out, written) if return_lse else out
