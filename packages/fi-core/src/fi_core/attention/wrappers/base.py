"""The common part of the batch wrappers: the state around a plan, copies of host tables, and older names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import check_workspace, computed, encoding, per_head, scale_product
from fi_core.attention.wrappers import planners
from fi_core.attention.wrappers.plan_state import PlannedWrapper, of_plan
from fi_core.observe.log import fi_api
from fi_core.runtime.machine import rehearsal
from fi_core.utils import PosEncodingMode, check_shape_dtype_device, int32_index

if TYPE_CHECKING:
    import torch

    from fi_core.runtime.dispatch import Choice

_MOST_KEPT = 64  # shapes of a wrapper, and sizes of a shape; an engine may plan batches of many


def check_results(
    q: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """Raises the ValueError that names a given result of a wrong form: out of this shape and dtype, lse without the
    last dimension and of fp32. Kernels check both, so that `run` asks only when one has refused a call.
    """
    import torch

    if out is not None:
        check_shape_dtype_device(out, shape, dtype, q.device, "out")
    if lse is not None:
        check_shape_dtype_device(lse, shape[:2], torch.float32, q.device, "lse")


def float32() -> torch.dtype:
    import torch

    return torch.float32


def run_scales(
    plan: Any, scales: tuple[Any, Any, Any], args: tuple[Any, ...], kv_scales: tuple[Any, Any]
) -> tuple[float, float, tuple[Any, ...]]:
    """(sm_scale, out_scale, tensors) of a run; tensors: the arguments of the op from scale_q on, or none of them.

    scales: q_scale, k_scale and v_scale; args: scale_q, scale_k and scale_v; kv_scales: those of NVFP4.
    """
    sm_scale, bmm1 = scale_product(plan.scale, *scales[:2])
    out_scale, bmm2 = scale_product(1.0, scales[2])
    by_head: tuple[Any, Any, Any] = (None, None, None)
    if args:
        scale_qk, scale_vo, by_head = per_head(args)
        sm_scale, out_scale = sm_scale * scale_qk, out_scale * scale_vo
    tensors = *by_head, bmm1, bmm2, *kv_scales
    return sm_scale, out_scale, () if all(x is None for x in tensors) else tensors


def keep(table: dict[Any, Any], key: Any, value: Any) -> Any:
    """Adds a value to a table, which is emptied when it is full, and returns the value."""
    if len(table) >= _MOST_KEPT:
        table.clear()
    table[key] = value
    return value


class Shapes:
    """What plans of the same arguments share, by these arguments: only their tables differ. It is of a wrapper's
    workspaces.
    """

    def __init__(self) -> None:
        self._found: dict[Any, tuple[tuple[type, ...], tuple[Any, dict[Any, Any]]]] = {}

    def find(self, key: tuple[Any, ...]) -> tuple[Any, dict[Any, Any]] | None:
        """A plan without tables, and what else is kept with it; None: it is not known, or an argument is refused."""
        try:
            types, found = self._found[key]
        except (KeyError, TypeError):  # not known, or not hashable
            return None
        # 0, 0.0 and False are equal, and an argument may require one of them.
        return found if types == tuple(map(type, key)) and not rehearsal() else None

    def keep(self, key: tuple[Any, ...], plan: Any) -> tuple[Any, dict[Any, Any]]:
        found = plan, dict[Any, Any]()
        # Tensors and arrays may change in place, or are not hashable.
        if not rehearsal() and not any(hasattr(x, "shape") for x in key):
            keep(self._found, key, (tuple(map(type, key)), found))
        return found


class PinnedMirror:
    """The part of a wrapper that gives engines a pinned mirror of its int workspace."""

    _int_workspace_buffer: torch.Tensor
    _pinned: torch.Tensor | None  # None: not read yet, or of another workspace

    @computed
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        """A pinned mirror of the int workspace, for engines. It is allocated when read: `plan` does not use it."""
        import torch

        if self._pinned is None:
            own = self._int_workspace_buffer
            self._pinned = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
        return self._pinned


class BatchWrapper(PinnedMirror, PlannedWrapper):
    """A wrapper that plans a batch and runs it; the subclasses document `plan` and `run`."""

    _pos_encoding_mode = of_plan("pos_encoding", lambda value: PosEncodingMode(value).name, encoding)
    _window_left, _sm_scale = of_plan("window_left"), of_plan("sm_scale")
    _logits_soft_cap = of_plan("soft_cap", write=lambda value: value or 0.0)
    _rope_scale = of_plan("rope_scale", write=lambda value: value or 1.0)
    _rope_theta = of_plan("rope_theta", write=lambda value: value or 1e4)
    _batch_size, _num_qo_heads = of_plan("batch_size"), of_plan("num_qo_heads")
    _num_kv_heads, _page_size = of_plan("num_kv_heads"), of_plan("page_size")
    _cached_q_data_type, _cached_kv_data_type = of_plan("q_dtype"), of_plan("kv_dtype")
    _cached_o_data_type = of_plan("o_dtype")
    _paged_kv_indptr_buf, _paged_kv_indices_buf = of_plan("indptr"), of_plan("page_indices")
    _paged_kv_last_page_len_buf, _block_tables = of_plan("last_page_len"), of_plan("block_tables")
    device: torch.device
    last_choice: Choice | None
    _with_lse = ("run", "forward")
    forward_return_lse: Callable[..., Any]
    _is_dense: bool  # whether the float workspace must be contiguous
    _backend: str
    _use_cuda_graph: bool
    _copies: dict[str, torch.Tensor]  # device copies of host tables, reused while shapes repeat

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """The backend of the last run: "fa2", "fa2_tc" (decode), "fa3", "cudnn" or "cpu".

        After a plan and before its first run, the backend that the plan chose; before the first plan, the argument.
        """
        return self.last_choice.backend if self.last_choice else self._backend

    @fi_api
    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replaces both workspaces. Call `plan` before the next run.

        Args:
            float_workspace_buffer: as in the constructor.
            int_workspace_buffer: contiguous, any dtype, aligned to 16 bytes, private to the wrapper: it holds the
                schedule from plan to the last run.

        Raises:
            ValueError: alignment or strides.
        """
        check_workspace(float_workspace_buffer, "float_workspace_buffer", contiguous=self._is_dense)
        check_workspace(int_workspace_buffer, "int_workspace_buffer")
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer
        self._pinned, self._shapes = None, Shapes()
        self._reset_plan()
        self._plan, self._call = self._plan.replace(scheduled=None), None
        self.last_choice = None
        self._cached_module: Any = None
        planners.add(self)
        self._place()

    def _place(self) -> None:
        """Lays out new workspaces."""
        raise NotImplementedError

    def _on_device(self, name: str, table: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """A table as kernels read it: on the device, int64 and uint32 converted to int32 (a small kernel each)."""
        table = int32_index(table)
        if table.device == self.device:
            return table
        kept = self._copies.get(name)
        if kept is not None and kept.shape == table.shape and kept.dtype == table.dtype:
            return kept.copy_(table, non_blocking=non_blocking)
        kept = self._copies[name] = table.to(self.device, non_blocking=non_blocking)
        return kept

    def end_forward(self) -> None:
        """Does nothing; older callers end a plan with it."""


class AroundWrapper:
    """A wrapper that plans and runs by a batch wrapper."""

    _inner: Any

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replaces both workspaces, as of the batch wrappers. Call `plan` before the next run."""
        self._inner.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Checks its argument only, as PlanState's."""
        self._inner.prewarm_paged_kv_stride_variant(variant)

    def end_forward(self) -> None:
        """Does nothing; older callers end a plan with it."""
