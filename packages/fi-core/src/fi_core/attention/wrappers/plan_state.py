"""Whether a wrapper has a plan: one that fails leaves none, so that no run mixes two batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fi_core.attention.contract import check_shape


class ReturnsLse:
    """The part of a wrapper that names its `run` with return_lse: `run_return_lse`."""

    _with_lse: tuple[str, ...] = ("run",)  # the methods that have such a form
    run_return_lse: Callable[..., Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in cls._with_lse:
            if name in vars(cls):
                setattr(cls, f"{name}_return_lse", _returning_lse(vars(cls)[name], name))


def _returning_lse(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self, name)(*args, return_lse=True, **options)

    signature: Any = inspect.signature(method)
    taken = list(signature.parameters.values())
    at = next((i for i, p in enumerate(taken) if p.name == "return_lse"), len(taken))
    behind = (p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in taken[at + 1 :])
    parameters = [*taken[:at], *behind]
    form: Any = call
    form.__name__, form.__doc__ = f"{name}_return_lse", f"`{name}` with return_lse: (out, lse)."
    form.__qualname__, form.__module__ = f"{method.__qualname__}_return_lse", method.__module__
    form.__signature__ = signature.replace(parameters=parameters)
    return call


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


class of_plan:
    """A field of a wrapper's plan as an attribute, which engines read and assign. Assigning makes another plan."""

    def __init__(self, field: str, read: Callable[[Any], Any] | None = None, write: Any = None) -> None:
        self.field, self.read, self.write = field, read, write

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None:
            return self
        value = getattr(wrapper._plan, self.field)
        return self.read(value) if self.read else value

    def __set__(self, wrapper: Any, value: Any) -> None:
        wrapper._change(**{self.field: self.write(value) if self.write else value})


class PlannedWrapper(ReturnsLse, PlanState):
    """A wrapper whose `plan` makes a `schedule.Plan`.

    All that a run needs of `plan` is in `_plan`, which no code changes: `_change` puts another one in its place.
    """

    _plan: Any
    _call: Any = None  # the planned call of the kernel; None: no plan, or the plan has changed since it was made

    def _change(self, **fields: Any) -> Any:
        """Replaces the plan by one with these fields, whose call the next run makes, unless they are those it has."""
        plan = self._plan
        for name, value in fields.items():
            had = getattr(plan, name)
            if had is not value and not ({type(had), type(value)} <= {int, float} and had == value):
                self._plan, self._call = plan.replace(**fields), None
                break
        return self._plan

    def _forget_plan(self) -> None:
        super()._forget_plan()
        self._call = None
