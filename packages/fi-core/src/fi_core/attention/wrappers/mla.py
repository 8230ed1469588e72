"""Batch MLA over a paged latent cache: plan once per step, run once per layer."""

from __future__ import annotations

import functools
import math
from numbers import Real
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import check_backend, check_graph_buffer, check_workspace, dtype_of, flag, number
from fi_core.attention.ops import mla as ops
from fi_core.attention.wrappers import mla_trace, planners
from fi_core.attention.wrappers.base import PinnedMirror, check_results
from fi_core.attention.wrappers.plan_state import PlanOption, PlanState
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import blame
from fi_core.runtime.returns import method_with_lse
from fi_core.utils import int32_index

if TYPE_CHECKING:
    import torch

    from fi_core.runtime.dispatch import Choice

BACKENDS = ("auto", "fa2", "fa3")
FOREIGN = ("cutlass", "trtllm-gen", "cute-dsl", "cute-dsl-monolithic", "cute-dsl-modular", "xqa", "cutile")
_INT_WORKSPACE = 8 << 20  # bytes
_MAX_PLACED = 64  # batch sizes whose buffers are kept
_TABLES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


@fi_api
class BatchMLAPagedAttentionWrapper(PinnedMirror, PlanState):
    """Multi-head latent attention with absorbed weights over a paged cache (MLA, arXiv:2405.04434).

    A query has a latent part (512 wide) and a rotary part (64 wide). The cache holds one latent row `ckv` and one
    rotary key `kpe` per token, which all heads share; ckv serves as key and as value. `plan` once per step, `run` once
    per layer. `last_choice` is the `Choice` of the dispatcher of the last run.

    Args:
        float_workspace_buffer: contiguous, on the device of the cache, aligned to 16 bytes; partials of split-KV. With
            34 MiB all SMs of an H200 work, with less fewer.
        use_cuda_graph: fixes the batch size and lets `plan` copy its tables into the four buffers. A captured `run`
            then computes the batch that was planned last.
        qo_indptr: int32 `[batch_size + 1]`, with use_cuda_graph.
        kv_indptr: int32 `[batch_size + 1]`, with use_cuda_graph.
        kv_indices: int32 `[max_pages]`, with use_cuda_graph.
        kv_len_arr: int32 `[batch_size]`, with use_cuda_graph.
        backend: "auto"; "fa2" (mma.sync, sm_80 and later); "fa3" (Hopper).

    Raises:
        ValueError: backend or buffers.
        NotImplementedError: a backend of another library.
    """

    device: torch.device
    last_choice: Choice | None
    _call: Any = None  # of the kernel, with all that the plan fixes
    _causal, _sm_scale, _page_size, _kv_indices_buf = PlanOption(), PlanOption(), PlanOption(), PlanOption()

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        import torch

        check_workspace(float_workspace_buffer, "float_workspace_buffer")
        check_backend(backend, BACKENDS, FOREIGN)
        self._backend, self._use_cuda_graph = backend, use_cuda_graph
        self._float_workspace_buffer, self.device = float_workspace_buffer, float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self.device)
        self._pinned = None
        self._qo_indptr_buf: Any = qo_indptr
        self._kv_indptr_buf: Any = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf: Any = kv_len_arr
        self._fixed_batch_size = 0
        if use_cuda_graph:
            for name in _TABLES:
                check_graph_buffer(getattr(self, f"_{name}_buf"), name)
            self._fixed_batch_size = kv_len_arr.numel()  # type: ignore[union-attr]
            for name in ("qo_indptr", "kv_indptr"):
                found = getattr(self, f"_{name}_buf").numel()
                if found != self._fixed_batch_size + 1:
                    raise ValueError(
                        f"{name}: length {self._fixed_batch_size + 1} is required, one more than kv_len_arr; "
                        f"got {found}"
                    )
        self._placed: dict[tuple[int, int], Any] = {}
        self._use_profiler = False
        self.last_choice = None
        self._cached_module: Any = None
        self._reset_plan()
        planners.add(self)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """The backend of the last run: "fa2", "fa3" or "cpu"; before the first run, the argument."""
        return self.last_choice.backend if self.last_choice else self._backend

    @fi_api
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype | str,
        kv_data_type: torch.dtype | str,
        use_profiler: bool = False,
        *,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans the next `run` calls: splits the KV of each request into work tiles. It does not synchronise.

        Args:
            qo_indptr: `[batch_size + 1]`, offsets of query tokens: request b has `qo_indptr[b] : qo_indptr[b + 1]`.
            kv_indptr: `[batch_size + 1]`, offsets of pages in kv_indices.
            kv_indices: page ids.
            kv_len_arr: `[batch_size]`, tokens of each request in the cache, its query tokens included.
            num_heads: query heads.
            head_dim_ckv: 512.
            head_dim_kpe: 64, or 0 without a rotary part.
            page_size: tokens of a page.
            causal: query token i of a request attends to `kv_len - qo_len + i + 1` tokens instead of all.
            sm_scale: factor of the scores; of the widths before absorption, as 1 / sqrt(128 + 64).
            q_data_type: fp16 or bf16.
            kv_data_type: that of q, or float8_e4m3fn with bf16 queries.
            use_profiler: must be False.
            disable_split_kv: requests are not split. The result of a request then has the same bits alone and in any
                batch of as many query tokens each; few requests leave SMs idle.

            The tables are int32 tensors on the host or on the device (int64 ones are copied). On the host they are
            copied to the device.

        Raises:
            ValueError: a shape, width or dtype; with use_cuda_graph also tables that do not fit the buffers.
            TypeError: an argument that is no number.
            NotImplementedError: use_profiler.
        """
        import torch

        self._forget_plan()
        q_type = dtype_of(q_data_type, "q_data_type")
        kv_type = dtype_of(kv_data_type, "kv_data_type")
        if q_type not in (torch.float16, torch.bfloat16):
            raise ValueError(f"q_data_type: torch.float16 or torch.bfloat16 is required; got {q_type}")
        if kv_type not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(
                f"kv_data_type: torch.float16, torch.bfloat16 or torch.float8_e4m3fn is required; got {kv_type}"
            )
        if kv_type is torch.float8_e4m3fn and q_type is not torch.bfloat16:
            raise ValueError(f"q_data_type: torch.bfloat16 is required with a float8_e4m3fn cache; got {q_type}")
        if kv_type is not torch.float8_e4m3fn and kv_type is not q_type:
            raise ValueError(
                f"kv_data_type: that of the queries, {q_type}, or float8_e4m3fn is required; got {kv_type}"
            )
        if head_dim_ckv != ops.LATENT:
            raise ValueError(f"head_dim_ckv: {ops.LATENT} is required; got {head_dim_ckv!r}")
        if head_dim_kpe not in (0, ops.ROPE):
            raise ValueError(f"head_dim_kpe: {ops.ROPE}, or 0 without a rotary part, is required; got {head_dim_kpe!r}")
        if use_profiler:
            raise NotImplementedError("use_profiler: kernels have no profiler of their own; use Nsight Compute")
        for name, value in (("num_heads", num_heads), ("page_size", page_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: a positive integer is required; got {value!r}")
        scale = number(sm_scale, "sm_scale")
        self._set_tables(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._q_data_type, self._kv_data_type, self._is_fp8 = q_type, kv_type, kv_type is torch.float8_e4m3fn
        self._causal, self._sm_scale, self._page_size = bool(causal), scale, page_size
        self._split_kv = not flag("disable_split_kv", disable_split_kv)
        self._head_dim_ckv, self._head_dim_kpe = head_dim_ckv, head_dim_kpe
        self._cached_module = PLANNER
        self._replan(num_heads)

    def _forget_plan(self) -> None:
        super()._forget_plan()
        self._call = None

    def _set_tables(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any) -> None:
        """Copies the tables of a plan to the device: into the buffers of a CUDA graph, or where they are needed."""
        import torch

        given = dict(zip(_TABLES, (qo_indptr, kv_indptr, kv_indices, kv_len_arr)))
        try:
            batch_size = kv_len_arr.numel()
            for name, table in given.items():
                if table.ndim != 1 or table.dtype not in (torch.int32, torch.int64):
                    raise ValueError(
                        f"{name}: int32 with one dimension is required; got {table.dtype}, shape {tuple(table.shape)}"
                    )
            if self._use_cuda_graph and batch_size != self._fixed_batch_size:
                raise ValueError(
                    f"kv_len_arr: the buffers fix a batch of {self._fixed_batch_size} requests; got {batch_size}"
                )
            for name in ("qo_indptr", "kv_indptr"):
                if given[name].numel() != batch_size + 1:
                    raise ValueError(
                        f"{name}: length {batch_size + 1} is required, one more than kv_len_arr; "
                        f"got {given[name].numel()}"
                    )
            for name, table in given.items():
                if not self._use_cuda_graph:
                    if table.device != self.device or table.dtype is not torch.int32:
                        table = int32_index(table).to(self.device, non_blocking=True)
                    setattr(self, f"_{name}_buf", table.contiguous())
                    continue
                buffer = getattr(self, f"_{name}_buf")
                if table.numel() > buffer.numel():
                    raise ValueError(f"{name}: the buffer holds {buffer.numel()} entries; got {table.numel()}")
                if table.data_ptr() != buffer.data_ptr():
                    buffer[: table.numel()].copy_(int32_index(table), non_blocking=True)
        except (AttributeError, RuntimeError) as error:
            blame(error, **given)
        self._batch_size = batch_size

    def _replan(self, num_heads: int) -> list[int]:
        """Computes the schedules of the batch from the tables on the device."""
        self._num_heads = num_heads
        self._sizes, self._schedule, self._partials = self._buffers(num_heads, self._batch_size)
        size = self._sizes
        ops.mla_plan(
            self._schedule, self._kv_len_arr_buf, self._page_size, num_heads, size.max_ranges, size.narrow_ranges,
            size.wide_ranges, ops.NARROW_ROWS, ops.WIDE_ROWS * size.cluster, self._qo_indptr_buf, self._kv_indptr_buf,
            split_kv=self._split_kv,
        )  # fmt: skip
        return self._end_plan([self._batch_size, num_heads, *size])

    def _buffers(self, num_heads: int, batch_size: int) -> tuple[ops.Sizes, torch.Tensor, torch.Tensor]:
        found = self._placed.get((num_heads, batch_size))
        if found is None:
            if len(self._placed) == _MAX_PLACED:
                self._placed.clear()
            found = ops.place(self._int_workspace_buffer, self._float_workspace_buffer, num_heads, batch_size)
            self._placed[num_heads, batch_size] = found
        return found

    @method_with_lse
    @fi_api(trace=mla_trace.TEMPLATE, planned=mla_trace.PLANNED)
    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch: `softmax((q_nope ckv^T + q_pe kpe^T) * sm_scale) ckv` for each head.

        Args:
            q_nope: `[tokens, num_heads, 512]`, of the planned dtype.
            q_pe: `[tokens, num_heads, 64]`; width 0 if head_dim_kpe is 0.
            ckv_cache: `[num_pages, page_size, 512]`, of the planned dtype.
            kpe_cache: `[num_pages, page_size, 64]`; width 0 if head_dim_kpe is 0.
            out: like q_nope; written and returned if given. Rows outside all requests are not written.
            lse: fp32 `[tokens, num_heads]`, written if given.
            return_lse: also return lse, `log2(sum(2^(score * log2 e)))`.
            profiler_buffer, kv_len, page_table, o_scale: must be None; they belong to kernels of other libraries.
            return_lse_base_on_e: lse as a natural logarithm.
            ckv_scale: with a float8_e4m3fn cache the value of an element is `ckv * ckv_scale`.
            ckv_scale_arr: instead of ckv_scale, fp32 `[num_pages, page_size, 4]`, a scale of each 128 columns.
            kpe_scale: with a float8_e4m3fn cache and a rotary part, likewise.
            sinks: fp32 `[num_heads]`, a logit that joins the softmax and the lse of each head.

            Queries and caches may have any strides with a contiguous last dimension and rows at multiples of 16 bytes:
            ckv_cache and kpe_cache may be slices of one `[num_pages, page_size, 576]` tensor.

        Returns:
            out `[tokens, num_heads, 512]`, or (out, lse). A token that attends to nothing has out = 0 and lse = -inf.

        Raises:
            RuntimeError: no plan.
            UnsupportedError: the device lacks the kernels of the backend.
            ValueError: shape, dtype, device, stride or scale. Tables that lie: on the CPU; on CUDA with FI_CHECK=1 at
                import, which synchronises.
        """
        call = self._call or self._plan_call()
        if profiler_buffer is not None or kv_len is not None or page_table is not None or o_scale is not None:
            self._refuse_foreign(profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale)
        ckv = kpe = 1.0
        if self._is_fp8 or ckv_scale is not None or ckv_scale_arr is not None or kpe_scale is not None:
            ckv, kpe = self._scales(ckv_scale, ckv_scale_arr, kpe_scale)
        return_lse = return_lse is True or (return_lse is not False and flag("return_lse", return_lse))
        given = out, lse
        try:
            if out is None:
                out = q_nope.new_empty(*q_nope.shape)
            if lse is None and return_lse:
                import torch

                lse = q_nope.new_empty(*q_nope.shape[:2], dtype=torch.float32)
            ran = ops.run_planned(
                call, out, lse, q_nope, q_pe, ckv_cache, kpe_cache, ckv, kpe, ckv_scale_arr, return_lse_base_on_e,
                sinks=sinks,
            )  # fmt: skip
        except Exception as error:  # in the words of the plan, if the call differs from it
            try:
                self._check_call(None, None, None, q_nope, q_pe, ckv_cache, kpe_cache)
                check_results(q_nope, q_nope.shape, q_nope.dtype, *given)
            except (AttributeError, RuntimeError, IndexError) as found:
                if isinstance(error, (AttributeError, RuntimeError, IndexError)):
                    blame(found, q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
            raise
        self.last_choice = ran or self.last_choice
        return (out, lse) if return_lse and lse is not None else out

    def _plan_call(self) -> Any:
        """The call of the kernel with all that the plan fixes."""
        if self._plan_info is None:
            raise self._no_plan()
        max_ranges, narrow_ranges, wide_ranges, cluster = self._sizes
        plan = ops.MlaPlan(
            workspace=self._partials, schedule=self._schedule, page_indices=self._kv_indices_buf,
            batch_size=self._batch_size, max_ranges=max_ranges, narrow_ranges=narrow_ranges, wide_ranges=wide_ranges,
            cluster=cluster, sm_scale=self._sm_scale, causal=self._causal, num_heads=self._num_heads,
            page_size=self._page_size, backend=self._backend,
        )  # fmt: skip
        self._call = ops.plan_run(self.last_choice, self.device, self._check_call, plan)
        return self._call

    run_return_lse: functools.partialmethod[Any] = functools.partialmethod(run, return_lse=True)

    def _refuse_foreign(self, **given: Any) -> None:
        """Raises the error that names an argument of other libraries."""
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: must be None; it belongs to the kernels of another library")

    def _scales(self, ckv_scale: Any, ckv_scale_arr: Any, kpe_scale: Any) -> tuple[float, float]:
        """The scales of ckv and kpe, 1 where there are none. Raises ValueError."""
        if not self._is_fp8:
            for name, value in (("ckv_scale", ckv_scale), ("ckv_scale_arr", ckv_scale_arr), ("kpe_scale", kpe_scale)):
                if value is not None:
                    raise ValueError(f"{name}: must be None with a cache of {self._kv_data_type}; got {value!r}")
            return 1.0, 1.0
        if (ckv_scale is None) == (ckv_scale_arr is None):
            came = "neither" if ckv_scale is None else "both"
            raise ValueError(f"ckv_scale: exactly one of ckv_scale and ckv_scale_arr is required; got {came}")
        ckv = 1.0 if ckv_scale is None else _scale(ckv_scale, "ckv_scale")
        return ckv, _scale(kpe_scale, "kpe_scale") if self._head_dim_kpe else ckv

    def _check_call(
        self, plan: Any, out: Any, lse: Any, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, *rest: Any
    ) -> None:
        """Raises the error that names the input that differs from the plan."""
        for name, tensor, dtype in (
            ("q_nope", q_nope, self._q_data_type),
            ("q_pe", q_pe, self._q_data_type),
            ("ckv_cache", ckv_cache, self._kv_data_type),
            ("kpe_cache", kpe_cache, self._kv_data_type),
        ):
            if tensor.dtype is not dtype:
                raise ValueError(f"{name}: {dtype} was planned; got {tensor.dtype}")
        for name, tensor, last in (
            ("q_nope", q_nope, (self._num_heads, self._head_dim_ckv)),
            ("q_pe", q_pe, (self._num_heads, self._head_dim_kpe)),
            ("ckv_cache", ckv_cache, (self._page_size, self._head_dim_ckv)),
            ("kpe_cache", kpe_cache, (self._page_size, self._head_dim_kpe)),
        ):
            if tensor.ndim != 3 or tuple(tensor.shape[1:]) != last:
                raise ValueError(f"{name}: shape [.., {last[0]}, {last[1]}] was planned; got {tuple(tensor.shape)}")


def _scale(value: Any, name: str) -> float:
    if not isinstance(value, (float, Real)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}: a finite positive number is required with a float8_e4m3fn cache; got {value!r}")
    return float(value)


class _Plan:
    """`_cached_module.plan` of the MLA wrapper: engines call it, or its `default`, in the replay of a CUDA graph."""

    def __call__(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
    ) -> list[int]:
        """Plans for the wrapper that owns the int workspace; its page table must be in place.

        Args:
            float_workspace_buffer, pin_memory_int_workspace_buffer, head_dim_ckv: not needed.
            int_workspace_buffer: identifies the wrapper.
            qo_indptr, kv_indptr, kv_len_arr: as in `BatchMLAPagedAttentionWrapper.plan`, on the host or on the device.
            num_heads, causal: likewise.

        Returns:
            The plan info.
        """
        wrapper = planners.owner(int_workspace_buffer)
        if not wrapper._was_planned:
            raise RuntimeError("plan: call plan of the wrapper once before")
        wrapper._forget_plan()
        wrapper._set_tables(qo_indptr, kv_indptr, wrapper._kv_indices_buf, kv_len_arr)
        wrapper._causal = causal
        info: list[int] = wrapper._replan(num_heads)
        return info

    @property
    def default(self) -> _Plan:
        return self


class MlaPlanner:
    """`_cached_module` of an MLA wrapper."""

    plan = _Plan()


PLANNER = MlaPlanner()


def get_batch_mla_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> MlaPlanner:
    """The planner of MLA wrappers, for engines that plan by themselves. Arguments are ignored."""
    return PLANNER
