"""Whether a wrapper has a plan: one that fails leaves none, so that no run mixes two batches."""

from __future__ import annotations

from typing import Any

from fi_core.attention.contract import check_shape


class PlanState:
    """The part of a planned wrapper that tells whether `run` may be called."""

    _plan_info: list[int] | None = None  # None: no plan, or the last one failed
    _plan_began = False  # since the workspaces were set
    _was_planned = False  # a plan has succeeded since then, so a CUDA graph may have been captured

    def _reset_plan(self) -> None:
        """For new workspaces, which hold no schedule."""
        self._plan_info, self._plan_began, self._was_planned = None, False, False

    def _forget_plan(self) -> None:
        """Every plan begins with it, so that one that fails leaves nothing to run."""
        self._plan_info, self._plan_began = None, True

    def _begin_plan(self, num_qo_heads: int, num_kv_heads: int, page_size: int, **head_dims: int) -> None:
        """Forgets the last plan, then checks the shape of the new one."""
        self._forget_plan()
        check_shape(num_qo_heads, num_kv_heads, page_size, **head_dims)

    def _end_plan(self, info: list[int]) -> list[int]:
        """Declares the plan complete."""
        self._plan_info, self._was_planned = info, True
        return info

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

    def _no_plan(self, function: str = "run") -> RuntimeError:
        return RuntimeError(
            f"{function}: " + ("the last plan failed: call plan again" if self._plan_began else "call plan first")
        )


class PlanOption:
    """An attribute that a plan fixes and that engines assign: the run that follows plans its call anew."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None:  # of the class, as the reference lists its members
            return self
        try:
            return vars(wrapper)[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__} has no {self.name} before plan") from None

    def __set__(self, wrapper: Any, value: Any) -> None:
        vars(wrapper)[self.name] = value
        wrapper._call = None
