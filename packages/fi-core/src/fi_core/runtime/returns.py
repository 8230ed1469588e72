"""Types, for checkers alone, of functions that return a tensor, or two tensors where a flag is set.

`@with_lse` stands above a function with the parameter return_lse, `@method_with_lse` above such a method, and
`@with_valid` above a function with return_valid. `setting_lse` is such a function with the flag set,
`method_setting_lse` such a method.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing import Concatenate, Literal, ParamSpec, Protocol, overload

    import torch

    P = ParamSpec("P")
    Pair = tuple[torch.Tensor, torch.Tensor]

    class WithLse(Protocol[P]):
        # A literal flag, then one that is known at run time, then none: only the last checks the other arguments.
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, *args: Any, return_lse: Literal[True], **options: Any
        ) -> Pair: ...
        @overload
        def __call__(self, *args: Any, return_lse: Literal[False], **options: Any) -> torch.Tensor: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, *args: Any, return_lse: bool, **options: Any
        ) -> torch.Tensor | Pair: ...
        @overload
        def __call__(self, *args: P.args, **options: P.kwargs) -> torch.Tensor: ...

    class MethodWithLse(Protocol[P]):
        def __get__(self, owner: Any, cls: Any = None) -> WithLse[P]: ...

    class WithValid(Protocol[P]):
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, *args: Any, return_valid: Literal[True], **options: Any
        ) -> Pair: ...
        @overload
        def __call__(self, *args: Any, return_valid: Literal[False], **options: Any) -> torch.Tensor: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, *args: Any, return_valid: bool, **options: Any
        ) -> torch.Tensor | Pair: ...
        @overload
        def __call__(self, *args: P.args, **options: P.kwargs) -> torch.Tensor: ...

    def with_lse(function: Callable[P, Any]) -> WithLse[P]: ...
    def method_with_lse(function: Callable[Concatenate[Any, P], Any]) -> MethodWithLse[P]: ...
    def with_valid(function: Callable[P, Any]) -> WithValid[P]: ...
    def setting_lse(function: WithLse[P]) -> Callable[P, Pair]: ...
    def method_setting_lse(method: Any) -> Callable[..., Any]: ...

else:
    F = TypeVar("F")

    def with_lse(function: F) -> F:
        return function

    method_with_lse = with_valid = with_lse

    def setting_lse(function: F) -> F:
        return functools.partial(function, return_lse=True)

    def method_setting_lse(method: F) -> F:
        """The method `<name>_return_lse` of a class. What follows the flag goes by keyword."""
        name, signature = method.__name__, inspect.signature(method)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            return getattr(self, name)(*args, return_lse=True, **options)

        taken = list(signature.parameters.values())
        at = next((i for i, p in enumerate(taken) if p.name == "return_lse"), len(taken))
        behind = (p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in taken[at + 1 :])
        call.__name__, call.__doc__ = f"{name}_return_lse", f"`{name}` with return_lse: (out, lse)."
        call.__qualname__, call.__module__ = f"{method.__qualname__}_return_lse", method.__module__
        call.__signature__ = signature.replace(parameters=[*taken[:at], *behind])
        return call
