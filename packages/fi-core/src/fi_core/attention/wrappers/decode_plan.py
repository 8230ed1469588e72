"""The plan of the batch decode wrapper: its workspaces, page tables and the shape of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fi_core.attention import contract
from fi_core.attention.contract import computed, score_fields
from fi_core.attention.mask import pack_drafts
from fi_core.attention.ops import decode as ops
from fi_core.attention.schedule import DecodePlan, DecodeWorkspaces, split_kv_of
from fi_core.attention.wrappers import arguments, planners
from fi_core.attention.wrappers.base import BatchWrapper, check_results, check_types, keep, of_plan
from fi_core.runtime.dispatch import Choice
from fi_core.runtime.errors import unsupported
from fi_core.runtime.invariance import check_plan
from fi_core.runtime.lazy import torch
from fi_core.runtime.resolve.ahead import planned
from fi_core.utils import _get_range_buf, constants, int32_index

_JIT_ARGS = 16  # of gen_customize_batch_decode_module


def check_call(plan: DecodePlan, out: Any, lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> None:
    """Raises the error that names the argument of a run that differs from its plan. rest: those of batch_decode."""
    if v is None:
        k, v = contract.unpack(k, "NHD")
    *_, scales = rest
    check_types(plan, q, k, v, scales, "paged_kv_cache")
    if q.shape != plan.q_shape:
        rows = "batch_size * q_len_per_req rows"
        raise ValueError(f"q: shape {plan.q_shape} was planned ({rows}); got {tuple(q.shape)}")
    heads, page_size = plan.num_kv_heads, plan.page_size
    if tuple(k.shape[1:3]) != ((heads, page_size) if plan.kv_layout else (page_size, heads)):
        raise ValueError(
            f"paged_kv_cache: page_size {page_size} and {heads} kv heads were planned; "
            f"got shape {tuple(k.shape)} ({'HND' if plan.kv_layout else 'NHD'})"
        )
    check_results(q, (*plan.q_shape[:2], contract.row_elements(v)), plan.o_dtype, out, lse)
    check_plan(plan.split_kv == ops.BALANCED)


class BatchDecodePlan(BatchWrapper):
    """The planning half of BatchDecodeWithPagedKVCacheWrapper, which documents the arguments."""

    _plan: DecodePlan
    _kind, _is_dense, _fixes_batch = "decode", True, "paged_kv_last_page_len_buffer"
    _backends, _foreign = arguments.DECODE_BACKENDS, arguments.DECODE_FOREIGN
    _buffers: Mapping[str, str] = {
        "indptr": "paged_kv_indptr_buffer",
        "page_indices": "paged_kv_indices_buffer",
        "last_page_len": "paged_kv_last_page_len_buffer",
    }
    _plan_run, _check_call = ops.plan_run, staticmethod(check_call)
    _head_dim, _q_len_per_req, _window_right = of_plan("head_dim"), of_plan("q_len"), of_plan("window_right")

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Sequence[Any] | None = None,
        jit_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # With tensor cores, engines also pass the arguments of prefill, which have no effect here.
        given = jit_args[:_JIT_ARGS] if jit_args is not None and use_tensor_cores else jit_args
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        tables = dict(zip(self._buffers, buffers))
        layout = self._set_up(float_workspace_buffer, kv_layout, backend, use_cuda_graph, (given, jit_kwargs), tables)
        self._use_tensor_cores = use_tensor_cores or backend in ("trtllm-gen", "cudnn")
        # "fa2" without tensor cores means the CUDA cores, which also run a user's variant.
        self._allowed = self._backends[backend]
        if self._variant is not None or (backend == "fa2" and not self._use_tensor_cores):
            self._allowed = "fa2_cuda_core"
        self._plan = DecodePlan(kv_layout=layout, backend=self._allowed, **tables)
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._begin(float_workspace_buffer)

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def _place(self) -> None:
        capacity = self._paged_kv_indices_buf.numel() if self._use_cuda_graph else None
        self._workspaces = DecodeWorkspaces(self._int_workspace_buffer, self._float_workspace_buffer, capacity)

    @computed
    def _qo_indptr_buf(self) -> torch.Tensor:
        """[0, 1, ..., batch_size] * q_len_per_req."""
        rows = _get_range_buf((self._fixed_batch_size or self._batch_size) + 1, self.device)
        return rows if self._q_len_per_req == 1 else rows * self._q_len_per_req

    @computed
    def _max_kv_len(self) -> int:
        """Length of the longest request of the last plan; synchronises."""
        return max(contract.lengths_of(*self._plan.lengths, self._page_size).tolist(), default=0)

    @property
    def _is_causal(self) -> bool:
        return self._plan.q_len > 1

    def _new_shape(self, options: tuple[Any, ...]) -> tuple[DecodePlan, dict[int, DecodePlan]]:
        """A plan without tables for the batch size and the options of `plan`, and what else is kept with it."""
        (
            batch_size, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding, window_left, window_right,
            soft_cap, q_dtype, kv_dtype, o_dtype, dtype, *scales, fixed_split_size, disable_split_kv, q_len, is_causal,
            most_ctas, _,
        ) = options  # fmt: skip
        contract.check_shape(num_qo_heads, num_kv_heads, page_size, head_dim=head_dim)
        if type(window_right) is not int or window_right < -1:
            raise ValueError(f"window_right: -1 or more is required; got {window_right!r}")
        fields = {name: getattr(self._plan, name) for name in ("kv_layout", "backend")}
        fields |= {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "q_len": q_len}
        fields |= {"batch_size": batch_size, "page_size": page_size, "most_ctas": most_ctas, "window_left": window_left}
        fields |= {"window_right": window_right if is_causal is None or is_causal else -1}
        fields |= contract.type_fields(q_dtype, kv_dtype, o_dtype, dtype)
        fields |= score_fields(pos_encoding, soft_cap, *scales)
        plan = DecodePlan(split_kv=split_kv_of(fixed_split_size, page_size, disable_split_kv), **fields)
        return self._shapes.keep(options, self._shaped(plan))

    def _keys_behind(self, batch_size: int, q_len: int, window_right: int) -> torch.Tensor | None:
        """The draft mask of queries that attend to keys behind their own; kept, so that CUDA graphs find it again."""
        if q_len == 1 or window_right == 0:
            return None
        if self._cudnn is not None:
            raise unsupported("window_right", window_right, 'leave backend "cudnn" out')
        key = batch_size, q_len, window_right
        if key not in self._masks:
            token = torch.arange(q_len, device=self.device)
            seen = token - token[:, None] <= (q_len if window_right < 0 else window_right)
            self._masks[key] = pack_drafts(seen.expand(batch_size, q_len, q_len))
        return self._masks[key]

    def _check_table(self, indptr: Any, indices: Any, last_page_len: Any, seq_lens: Any) -> int:
        """Checks the tables of a plan, and returns the batch size."""
        batch_size: int = last_page_len.numel()
        if (bounds := indptr.numel()) != batch_size + 1:
            raise ValueError(f"indptr: length {batch_size + 1} is required, last_page_len's + 1; got {bounds}")
        contract.check_length(contract.last_value(indptr, "indptr"), indices, "indices")
        if seq_lens is not None and seq_lens.numel() != batch_size:
            raise ValueError(f"seq_lens: length {batch_size} is required, the batch size; got {seq_lens.numel()}")
        if not self._use_cuda_graph:
            return batch_size
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"indptr: the batch size is fixed at {self._fixed_batch_size} by use_cuda_graph; got {batch_size}"
            )
        room, count = self._paged_kv_indices_buf.numel(), indices.numel()
        if count > room:
            raise ValueError(f"indices: paged_kv_indices_buffer has room for {room}; got {count}")
        return batch_size

    def _check_q_len(self, q_len: int) -> None:
        if q_len != 1 and (q_len < 1 or not self._use_tensor_cores):
            raise ValueError(f"q_len_per_req: at least 1, and 1 without use_tensor_cores, is required; got {q_len}")
        if self._use_cuda_graph and self._was_planned and q_len != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req: fixed at {self._q_len_per_req} by the first plan with use_cuda_graph; got {q_len}"
            )

    def _check_lengths(self, indptr: Any, last_page_len: Any, seq_lens: Any, page_size: int, q_len: int) -> None:
        """Raises ValueError for a request of fewer tokens than its queries, if all tables are on the host."""
        tables = (seq_lens,) if seq_lens is not None else (indptr, last_page_len)
        if any(table.device.type != "cpu" for table in tables):
            return
        for b, tokens in enumerate(contract.lengths_of(indptr, last_page_len, seq_lens, page_size).tolist()):
            if tokens < q_len:
                raise ValueError(f"q_len_per_req: all requests must have {q_len} tokens; request {b} has {tokens}")

    def _shaped(self, plan: DecodePlan) -> DecodePlan:
        """A plan without tables, with what follows from its options: the kernel and its tiles."""
        choice, heads = self._choose(plan), (plan.num_qo_heads, plan.num_kv_heads)
        per_tile = ops.heads_per_tile(choice, plan.batch_size, *heads, plan.q_len, plan.split_kv)
        tiles = {"heads_per_tile": per_tile, "q_tiles": ops.num_q_tiles(*heads, plan.q_len, per_tile)}
        mask = self._keys_behind(plan.batch_size, plan.q_len, plan.window_right)
        rows = plan.batch_size * plan.q_len
        plan = plan.replace(choice=choice, mask=mask, rows=rows, head_dim_vo=plan.head_dim, **tiles)
        return plan.replace(exact=self._choose(plan, exact=True))

    def _end(
        self,
        shape: tuple[DecodePlan, dict[int, DecodePlan]],
        lengths: tuple[Any, Any, Any],
        tables: dict[str, Any],
        non_blocking: bool = True,
    ) -> list[int]:
        """Completes a plan: computes its schedule on the device, and makes the call of its kernel.

        shape: a plan of `_shaped`, and those of this shape with their buffers. lengths: indptr, last_page_len and
        lengths or None, on any device; the lengths take precedence over last_page_len. tables: fields of the plan.
        """
        plan, sized = shape
        indptr, last_page_len, kv_lens = lengths
        if kv_lens is not None:
            kv_lens, last_page_len = self._on_device("kv_lens", kv_lens, non_blocking), None
        lengths = self._on_device("planned_indptr", indptr, non_blocking), last_page_len, kv_lens
        work = self._workspaces.work(plan, tables["page_indices"].numel())
        found = sized.get(work) or keep(sized, work, self._workspaces.sized(plan, work))
        plan = found.replace(lengths=lengths, **tables)
        self._schedule(plan)
        self.last_choice = plan.choice
        if self._cudnn is not None:
            self._plan_cudnn(plan)
        self._set_call(plan, plan.exact)
        self._cached_module = planners.PLANNER if self._use_tensor_cores else planners.DECODE_PLANNER
        numbers = [plan.batch_size, plan.q_tiles, plan.num_ctas, plan.split_kv, plan.q_len, plan.window_left]
        return self._end_plan(numbers)

    def _schedule(self, plan: DecodePlan) -> None:
        """Computes the schedule of a plan on the device."""
        indptr, last_page_len, kv_len = plan.lengths
        ops.decode_plan(
            plan.schedule, indptr, last_page_len, kv_len, page_size=plan.page_size, q_tiles=plan.q_tiles,
            num_ctas=plan.num_ctas, num_ranges=plan.num_ranges, split_kv=plan.split_kv, q_len=plan.q_len,
            window_left=plan.window_left,
        )  # fmt: skip

    def _plan_lengths(self, fields: dict[str, Any], tables: tuple[Any, Any, Any], rows: int, split: Any) -> list[int]:
        """The plan of both planners. All requests have the same number of rows.

        fields: of the plan; tables: qo_indptr, kv_indptr, and lengths or None: those by last_page_len; rows: of q;
        split: fixed_split_size and disable_split_kv.
        """
        _, indptr, kv_lens = tables
        batch_size = indptr.numel() - 1
        q_len = rows // batch_size if batch_size > 0 else 1
        dims = {"head_dim": fields.pop("head_dim_qk"), "q_len": q_len}
        del fields["head_dim_vo"], fields["causal"]
        split_kv = split_kv_of(split[0], fields["page_size"], split[1])
        plan = self._plan.replace(batch_size=batch_size, split_kv=split_kv, **dims, **fields)
        lengths = indptr, plan.last_page_len, kv_lens
        return self._end((self._shaped(plan), {}), lengths, {"page_indices": plan.page_indices})

    def _plan_cudnn(self, plan: DecodePlan) -> None:
        assert self._cudnn is not None
        indptr, last_page_len, kv_lens = plan.lengths
        if kv_lens is None:
            kv_lens = contract.kv_lens(indptr, last_page_len, plan.page_size)
        table = plan.block_tables
        most = self._max_kv_len if table is None else table.shape[1] * plan.page_size
        lens = constants(plan.q_len, plan.batch_size, self.device), int32_index(kv_lens)
        self._cudnn.plan(*lens, (plan.q_len, most), indptr, plan.page_indices, plan.page_size, None)

    def _choose(self, plan: DecodePlan, head_dim_vo: int = 0, scaled: bool = False, exact: bool = False) -> Choice:
        """The choice for runs of the planned shape with aligned tensors. exact: with the mask and tiles of the plan."""
        dims = (plan.head_dim, head_dim_vo or plan.head_dim)
        mask = "plain" if not exact or plan.mask is None else "custom"
        facts = self._facts(plan, plan.o_dtype, dims, plan.page_size, mask, soft_cap=plan.soft_cap > 0.0, scaled=scaled)
        heads = plan.heads_per_tile if exact else 1
        return planned(ops.BATCH_DECODE, self.device, self._allowed, *facts, heads, ahead=self._variant is None)
