"""The common half of the batch prefill wrappers: tables, masks and options of a plan, and the launch of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fi_core.attention import contract, mask
from fi_core.attention.contract import computed, flag, log_base, scales_of, score_fields
from fi_core.attention.ops import prefill as ops
from fi_core.attention.ops.request import LOAD_BYTES, alignment, by_variant
from fi_core.attention.schedule import PrefillPlan
from fi_core.attention.wrappers import arguments, planners
from fi_core.attention.wrappers.arguments import check_call, check_rows, lse_shape
from fi_core.attention.wrappers.base import BatchWrapper, of_plan, run_scales
from fi_core.observe.subject import explain
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch
from fi_core.runtime.resolve.ahead import planned
from fi_core.utils import check_shape_dtype_device

_SIZES = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "causal", "window_left")
TYPES = ("q_data_type", "kv_data_type", "o_data_type")  # of plan
_Values = tuple[Any, ...]


class BatchPrefillPlan(BatchWrapper):
    """The planning half of BatchPrefillWithPagedKVCacheWrapper and BatchPrefillWithRaggedKVCacheWrapper."""

    _plan: PrefillPlan
    _kind, _is_dense, _fixes_batch = "prefill", False, "qo_indptr_buf"
    _backends, _foreign = arguments.PREFILL_BACKENDS, arguments.PREFILL_FOREIGN
    _plan_run = ops.plan_run
    _compiled: Mapping[str, Any] = {}  # arguments of plan that the constructor fixes
    _is_paged: bool
    _causal, _qo_indptr_last, _kv_indptr_last = of_plan("causal"), of_plan("rows"), of_plan("kv_last")
    _qo_indptr_buf, _kv_indptr_buf = of_plan("qo_indptr"), of_plan("indptr")
    _head_dim_qk, _head_dim_vo = of_plan("head_dim_qk"), of_plan("head_dim_vo")
    _custom_mask_buf, _mask_indptr_buf = of_plan("mask"), of_plan("mask_indptr")
    _prefix_len_ptr, _max_item_len_ptr = of_plan("prefix_len"), of_plan("longest_item")
    _token_pos_in_items_ptr, _token_pos_in_items_len = of_plan("item_positions"), of_plan("items_len")
    _use_fp16_qk_reduction = False  # without effect
    _sinks: torch.Tensor | None = None  # of runs of ragged keys; engines assign it

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
        if variant_owns_mask and (backend != "fa2" or jit_args is None):
            raise ValueError('variant_owns_mask: requires backend "fa2" and jit_args')
        tables = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        buffers, jit = dict(zip(self._buffers, tables)), (jit_args, jit_kwargs)
        layout = self._set_up(float_workspace_buffer, kv_layout, backend, use_cuda_graph, jit, buffers)
        self._variant_owns_mask = variant_owns_mask
        self._allowed = "fa2" if self._variant is not None else self._backends[backend]
        masks = {"mask": custom_mask_buf, "mask_indptr": mask_indptr_buf}
        self._plan = PrefillPlan(kv_layout=layout, backend=self._allowed, **buffers, **masks)
        if use_cuda_graph and custom_mask_buf is not None and mask_indptr_buf is None:
            raise ValueError("mask_indptr_buf: a tensor is required with custom_mask_buf; got None")
        self._graph_masks = custom_mask_buf if use_cuda_graph else None
        self._max_total_num_rows: int | None = None
        self._most: tuple[int | None, int | None] = None, None  # upper bounds of qo_len and kv_len, if given to plan
        self._begin(float_workspace_buffer)

    def _place(self) -> None:
        memory = self._int_workspace_buffer.view(-1).view(torch.uint8)
        self._change(schedule=memory[: len(memory) // 4 * 4].view(torch.int32))
        partials = self._float_workspace_buffer
        self._partials = partials.view(-1).view(torch.uint8) if partials.is_contiguous() else None

    def _requests(self) -> torch.Tensor:
        """The requests in the schedule, `[batch_size, 4]`: first row, qo_len, first page or key, kv_len."""
        return ops.requests(self._plan.schedule, self._plan.batch_size)

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

    def _size(self, qo_indptr: torch.Tensor, given: dict[str, Any]) -> tuple[int, int]:
        """The sizes of both workspaces. given: arguments of `plan`."""
        given, batch_size, rows = {"page_size": 1, **given, **self._compiled}, qo_indptr.numel() - 1, int(qo_indptr[-1])
        if given["head_dim_vo"] is None:
            given["head_dim_vo"] = given["head_dim_qk"]
        options = tuple(map(given.get, (*_SIZES, *contract.SCORES, *TYPES)))
        plan, _ = self._shape(batch_size, options, (given["fixed_split_size"], given["disable_split_kv"]))
        custom = given["custom_mask"] is not None or given["packed_custom_mask"] is not None
        kept = "items" if given["prefix_len_ptr"] is not None else "custom" if custom else "plain"
        choice, tokens = self._choose(plan, kept=kept), ops.tile_tokens(plan.num_qo_heads, plan.num_kv_heads)
        tiles = (rows // tokens + batch_size) * plan.num_kv_heads if plan.splits_kv else 0
        partials = ops.partials_bytes(choice, tiles, plan.head_dim_vo)
        return partials, 4 * ops.schedule_words(batch_size, rows, tokens)

    def _check_batch(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, **lengths: Any) -> dict[str, Any]:
        """Checks the shapes of the tables, and the limits of a CUDA graph. Returns fields of the plan.

        lengths: tables with an element for each request, or None, by the names of arguments.
        """
        if not kv_indptr.numel() == qo_indptr.numel() > 0:
            raise ValueError(
                f"kv_indptr: length {qo_indptr.numel()} is required, that of qo_indptr (batch_size + 1); "
                f"got {kv_indptr.numel()}"
            )
        batch_size, rows = qo_indptr.numel() - 1, contract.last_value(qo_indptr, "qo_indptr")
        for name, table in lengths.items():
            if table is not None and table.numel() != batch_size:
                raise ValueError(f"{name}: length {batch_size} is required, the batch size; got {table.numel()}")
        if self._use_cuda_graph:
            if batch_size != self._fixed_batch_size:
                raise ValueError(
                    f"qo_indptr: the batch size is fixed at {self._fixed_batch_size} by use_cuda_graph; "
                    f"got {batch_size}"
                )
            most = self._max_total_num_rows
            if not self._was_planned:
                self._max_total_num_rows = rows
            elif rows is not None and most is not None and rows > most:
                raise ValueError(
                    f"qo_indptr: at most {most} rows, those of the first plan, are allowed with "
                    f"use_cuda_graph; got {rows}"
                )
        kv_last = contract.last_value(kv_indptr, "kv_indptr")
        return {"batch_size": batch_size, "rows": rows, "kv_last": kv_last}

    def _masks(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        indptrs: tuple[torch.Tensor, torch.Tensor],
        lengths: Callable[[torch.device], torch.Tensor],
        non_blocking: bool,
    ) -> dict[str, Any]:
        """The mask and its offsets as fields of the plan; a boolean mask is packed.

        indptrs: of queries and keys; lengths: the kv_len of each request, on a given device.
        """
        own = {"mask": self._plan.mask, "mask_indptr": self._plan.mask_indptr}
        if custom_mask is None and packed_custom_mask is None:
            return own if self._use_cuda_graph else {"mask": None, "mask_indptr": None}
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
        if self._graph_masks is None:
            return {"mask": packed, "mask_indptr": bounds.to(self.device, non_blocking=non_blocking)}
        own["mask_indptr"].copy_(bounds, non_blocking=non_blocking)
        return own

    def _shape(self, batch_size: int, options: tuple[Any, ...], splits: tuple[Any, Any]) -> Any:
        """A plan without tables, with the kernel and its tiles, and what else is kept for these options.

        options: those of _SIZES, the five of the scores and three dtypes. splits: fixed_split_size, disable_split_kv.
        """
        key, own = (batch_size, *options, *splits, self._plan.num_ctas, is_on()), self._plan
        found = self._shapes.find(key)
        if found is None:
            sizes, rest = dict(zip(_SIZES, options)), options[len(_SIZES) :]
            contract.check_shape(options[0], options[1], options[4], head_dim_qk=options[2], head_dim_vo=options[3])
            kept = {name: getattr(own, name) for name in ("kv_layout", "backend", "num_ctas", "schedule")}
            fields = {**kept, **sizes, **score_fields(*rest[:5]), **contract.type_fields(*rest[5:])}
            splits_kv = not (splits[1] or (splits[0] or 0) > 0 or is_on())
            plan = PrefillPlan(batch_size=batch_size, splits_kv=splits_kv, **fields)
            found = self._shapes.keep(key, plan)
        return found

    def _tiled(self, plan: PrefillPlan, kept: str = "") -> PrefillPlan:
        """The plan with the kernel and its work tiles, which follow from its options and the mask that it will have."""
        choice, heads = self._choose(plan, kept=kept), (plan.num_qo_heads, plan.num_kv_heads)
        memory = self._partials if plan.splits_kv else None
        max_partials = 0 if memory is None else ops.max_partials(choice, len(memory), plan.head_dim_vo)
        tiles = {"tile_tokens": ops.tile_tokens(*heads, ops.q_tile_rows(choice))}
        tiles |= {"short_tile_tokens": ops.short_tile_tokens(choice, *heads, plan.window_left >= 0)}
        partials = {"max_partials": max_partials, "partials": memory if max_partials else None}
        own = {"out_dtype": self._out_dtype(plan), "scale": plan.scale_of(plan.head_dim_qk)}
        return plan.replace(choice=choice, **tiles, **partials, **own)

    def _plan_batch(
        self,
        shape: Any,
        batch: dict[str, Any],
        tables: tuple[Any, Any, Any],
        masks: tuple[Any, Any, Any],
        items: tuple[Any, Any, int, Any],
        most: tuple[Any, Any],
        non_blocking: bool,
    ) -> None:
        """The end of `plan`: places masks and items, and completes the plan.

        shape: of `_shape`; batch: the tables on the device and the number of rows, as fields of the plan; tables:
        qo_indptr, indptr and lengths as given; masks: custom_mask, packed_custom_mask, and the kv_len of each request
        as a function of a device; items: prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len and
        max_item_len_ptr; most: max_token_per_sequence, max_sequence_kv.
        """
        custom, packed, lengths = masks
        plan, tiled = shape
        fields = {**batch, **self._masks(custom, packed, tables[:2], lengths, non_blocking)}
        fields["kv_tokens"] = (batch["kv_last"] or 0) * plan.page_size
        if items[2] or not (items[0] is items[1] is items[3] is None):
            fields |= arguments.items_fields(
                plan.batch_size, *items, lambda name, x: self._on_device(name, x, non_blocking)
            )
        self._most = most
        kept = "items" if fields.get("items") is not None else "plain" if fields["mask"] is None else "custom"
        if kept not in tiled:
            tiled[kept] = self._tiled(plan, kept)
        plan = tiled[kept].replace(**fields, backend=arguments.allowed_for(kept, self._allowed))
        self._end(plan, (plan.qo_indptr, plan.indptr, plan.last_page_len, tables[2]), non_blocking)

    def _end(self, plan: PrefillPlan, tables: tuple[Any, Any, Any, Any], non_blocking: bool) -> list[int]:
        """Completes a plan: computes its work tiles on the device, and makes the call of its kernel.

        plan: of `_tiled`. tables: qo_indptr, indptr, last_page_len and lengths or None, on any device; lengths take
        precedence over last_page_len.
        """
        qo_indptr, indptr, last_page_len, kv_lens = tables
        rows = plan.rows or 0
        words = ops.schedule_words(plan.batch_size, rows, plan.tile_tokens)
        if words > plan.schedule.numel():
            raise ValueError(f"int_workspace_buffer: {4 * words} bytes are required; got {4 * plan.schedule.numel()}")
        qo_indptr = self._on_device("planned_qo_indptr", qo_indptr, non_blocking)
        indptr = self._on_device("planned_kv_indptr", indptr, non_blocking)
        if kv_lens is not None:
            kv_lens, last_page_len = self._on_device("kv_lens", kv_lens, non_blocking), None
        ops.prefill_plan(
            plan.schedule, qo_indptr, indptr, last_page_len, kv_lens, plan.batch_size, plan.tile_tokens,
            page_size=plan.page_size, causal=plan.causal, window_left=plan.window_left,
            num_kv_heads=plan.num_kv_heads, short_tile_tokens=plan.short_tile_tokens, max_partials=plan.max_partials,
        )  # fmt: skip
        self.last_choice, self._plan = plan.choice, plan
        if self._cudnn is not None:
            most_q, most_kv = self._most
            requests = self._requests()
            lengths = requests[:, 1].contiguous(), requests[:, 3].contiguous()
            most = self._max_q_len if most_q is None else most_q, self._max_kv_len if most_kv is None else most_kv
            self._cudnn.plan(*lengths, most, indptr, plan.page_indices, plan.page_size, qo_indptr)
        self._set_call(plan, plan.choice)
        self._cached_module = planners.PLANNER
        sizes = [plan.batch_size, plan.tile_tokens, rows, plan.page_size]
        return self._end_plan([*sizes, int(plan.causal), plan.window_left])

    def _plan_lengths(self, fields: dict[str, Any], tables: tuple[Any, Any, Any], rows: int, split: Any) -> list[int]:
        """The plan of `planners.Planner`. qo_indptr has the number of rows.

        fields: of the plan; tables: qo_indptr, kv_indptr, lengths; split: fixed_split_size and disable_split_kv.
        """
        qo_indptr, indptr, kv_lens = tables
        batch = self._check_batch(qo_indptr, indptr)
        batch["kv_tokens"] = (batch["kv_last"] or 0) * fields["page_size"]
        plan = self._plan.replace(splits_kv=not (split[1] or split[0] > 0 or is_on()), **batch, **fields)
        return self._end(self._tiled(plan), (qo_indptr, indptr, None, kv_lens), True)

    def _check_call(self, plan: PrefillPlan, *values: Any) -> None:
        check_call(plan, self._use_cuda_graph, *values)

    def _ready(self) -> PrefillPlan:
        """The plan, whose call is made anew if an option has changed."""
        self._require_plan()
        if self._call is None:
            plan = self._plan
            choice, out_dtype = self._choose(plan), self._out_dtype(plan)
            plan = plan.replace(choice=choice, scale=plan.scale_of(plan.head_dim_qk), out_dtype=out_dtype)
            self._set_call(plan, choice)
        return self._plan

    def _choose(
        self, plan: PrefillPlan, scaled: bool = False, backend: str = "", alignment: int = LOAD_BYTES, kept: str = ""
    ) -> Choice:
        """The choice for runs of a plan. kept: the mask, if the plan does not have it yet."""
        dims, page_size = (plan.head_dim_qk, plan.head_dim_vo), plan.page_size if self._is_paged else 0
        more = {"soft_cap": self._variant is None and plan.soft_cap > 0.0, "scaled": scaled, "alignment": alignment}
        facts = self._facts(plan, self._out_dtype(plan), dims, page_size, kept or plan.kept, **more)
        backend = backend or arguments.allowed_for(kept or plan.kept, self._allowed)
        return planned(ops.BATCH_PREFILL, self.device, backend, *facts, ahead=self._variant is None)

    def _out_dtype(self, plan: PrefillPlan) -> Any:
        return plan.o_dtype or plan.q_dtype

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        args: tuple[Any, ...],
        scales: tuple[Any, Any, Any],
        results: tuple[Any, Any, Any],
        lse_form: tuple[str, str],
        enable_pdl: bool | None,
        sinks: torch.Tensor | None,
        kv_cache_sf: Any,
    ) -> Any:
        """Allocates the missing results and launches.

        scales: q_scale, k_scale and v_scale; results: out, lse and return_lse; lse_form: lse_base and lse_layout.
        """
        plan, call, (out, lse, return_lse), (lse_base, lse_layout) = self._plan, self._call, results, lse_form
        try:
            rows, heads, _ = q.shape
            return_lse, zero_padded_rows = flag("return_lse", return_lse), False
            if plan.rows != rows:
                check_rows(plan, self._use_cuda_graph, q)
            if out is None:
                zero_padded_rows, dtype, dim = plan.rows != rows, plan.out_dtype, plan.head_dim_vo
                out = q.new_empty(rows, heads, dim) if dtype is q.dtype else q.new_empty(rows, heads, dim, dtype=dtype)
            written, factor = lse, 1.0 if lse_base == "log2" else log_base(lse_base)
            if lse is not None or return_lse:
                wanted = lse_shape(lse_layout, rows, heads)
                if lse is not None:
                    check_shape_dtype_device(lse, wanted, torch.float32, q.device, "lse")
                if lse is None or lse_layout == "HN":
                    written = q.new_empty(rows, heads, dtype=torch.float32)
            sm_scale, out_scale, tensors = plan.scale, 1.0, ()
            if args or kv_cache_sf is not None or not (scales[0] is scales[1] is scales[2] is None):
                kv_scales = scales_of(kv_cache_sf, self._kv_layout, plan.page_indices is not None)
                by_head = args if self._variant is None else ()
                sm_scale, out_scale, tensors = run_scales(plan, scales, by_head, kv_scales)
            values = out, written, q, k, v, sm_scale, out_scale, sinks, zero_padded_rows, enable_pdl
            if self._variant is not None or self._cudnn is not None:
                ran = self._otherwise(plan, values, tensors, args, (*scales[:2], sinks))
            else:
                ran = ops.run_planned(call, *values, *tensors)
        except Exception as error:
            names = {"k": k, "v": v} if plan.page_indices is None else {"paged_kv_cache": k}
            others = {"out": out, "lse": lse, "sinks": sinks, "kv_cache_sf": kv_cache_sf, "args": args}
            others |= dict(zip(("q_scale", "k_scale", "v_scale"), scales))
            others |= {} if "k" in names or v is None else {"paged_kv_cache": (k, v)}
            check = functools.partial(self._check_call, plan, out, lse, q, k, v, kv_cache_sf)
            explain(error, check, others, q=q, **names)
            raise
        self.last_choice = ran or self.last_choice
        if written is None:
            return out
        if factor != 1.0:
            written.mul_(factor)
        if lse_layout == "HN":
            written = written.t().contiguous() if lse is None else lse.copy_(written.t())
        return (out, written) if return_lse else out

    def _otherwise(
        self, plan: PrefillPlan, values: _Values, tensors: _Values, args: _Values, scales: _Values
    ) -> Choice | None:
        """Runs cuDNN's kernels, or a user's variant, with the arguments of a planned call.

        args: the variant's tensors and scalars; scales: q_scale, k_scale and sinks of run, which it must implement.
        """
        out, lse, q, k, v, *rest, zero_padded_rows, _ = values
        k, v = (k, v) if v is not None else contract.unpack(k, self._kv_layout)
        check_call(plan, self._use_cuda_graph, out, None, q, k, v, tensors[-1] if tensors else None)
        if self._variant is not None:
            call = self._by_variant(plan, (q, k, v, out), args, scales, tensors)
            return call(*values, *tensors)  # type: ignore[no-any-return]
        if zero_padded_rows:
            out.zero_()
        return self._by_cudnn(plan, (out, lse, q, k, v, *rest), tensors, plan.causal)

    def _by_variant(self, plan: PrefillPlan, inputs: _Values, args: _Values, scales: _Values, tensors: _Values) -> Any:
        """The call of a user's variant.

        inputs: q, k, v and out; args: the variant's tensors and scalars; scales: q_scale, k_scale and sinks of run;
        tensors: as of `run_scales`.
        """
        assert self._variant is not None
        *_, bmm2, k_scales, v_scales = tensors or (None, None, None)
        known = arguments.variant_tensors(plan, k_scales, v_scales)
        encoding = self._variant.encoding(plan)
        # The kernel then applies no mask of its own.
        if self._variant_owns_mask or self._variant.declares("maybe_custom_mask"):
            causal = plan.causal and known["maybe_custom_mask"] is None and not self._variant_owns_mask
            plan = plan.replace(mask=None, causal=causal)
        plan = plan.replace(pos_encoding=encoding)
        q, k, v, out = inputs
        backend = self._variant.backend(q.device)
        self.last_choice = choice = self._choose(plan, bmm2 is not None, backend, alignment(q, k, v, out))
        variant = self._variant.launch(plan, q, args, known, *scales, implementation=choice.implementation)
        return by_variant(ops.batch_prefill, ops.BATCH_PREFILL, plan, variant)
