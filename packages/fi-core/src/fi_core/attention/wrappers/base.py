"""The common part of the batch wrappers: the state around a plan, copies of host tables, and older names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import POS_ENCODINGS, check_workspace, code, computed, number
from fi_core.attention.wrappers import planners
from fi_core.attention.wrappers.plan_state import PlanState
from fi_core.utils import check_shape_dtype_device, int32_index

if TYPE_CHECKING:
    import torch

    from fi_core.runtime.dispatch import Choice


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


class BatchWrapper(PinnedMirror, PlanState):
    """A wrapper that plans a batch and runs it; the subclasses document `plan` and `run`."""

    device: torch.device
    last_choice: Choice | None
    forward: Any
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

    def _set_workspaces(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Checks and keeps both workspaces, and forgets the plan."""
        check_workspace(float_workspace_buffer, "float_workspace_buffer", contiguous=False)
        check_workspace(int_workspace_buffer, "int_workspace_buffer")
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer
        self._pinned = None
        self._reset_plan()
        self.last_choice = None
        self._cached_module: Any = None
        planners.add(self)

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

    def _set_scores(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        """Sets the options of the scores, which run reads and engines set."""
        self._encoding = code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")
        self._pos_encoding_mode, self._window_left = pos_encoding_mode, window_left
        self._logits_soft_cap = 0.0 if logits_soft_cap is None else number(logits_soft_cap, "logits_soft_cap")
        self._sm_scale = None if sm_scale is None else number(sm_scale, "sm_scale")
        self._rope_scale = 1.0 if rope_scale is None else number(rope_scale, "rope_scale")
        self._rope_theta = 1e4 if rope_theta is None else number(rope_theta, "rope_theta")

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Checks its argument only: one kernel accepts K and V of different strides.

        Raises:
            ValueError: variant.
            RuntimeError: no plan.
        """
        if variant != "independent":
            raise ValueError(f'variant: "independent" is required; got {variant!r}')
        if self._plan_info is None:
            raise self._no_plan("prewarm_paged_kv_stride_variant")

    def forward_return_lse(self, *args: Any, **options: Any) -> Any:
        """`forward`, with the log-sum-exp."""
        return self.forward(*args, **options, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing; older callers end a plan with it."""
