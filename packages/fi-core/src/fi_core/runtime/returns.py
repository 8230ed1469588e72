"""Types, for checkers alone, of functions that return a tensor, or two tensors where a flag is set.

`@with_lse` stands above a function with the parameter return_lse, `@method_with_lse` above such a method, and
`@with_valid` above a function with return_valid. `setting_lse` is such a function with the flag set.
"""

from __future__ import annotations

import functools
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

else:
    F = TypeVar("F")

    def with_lse(function: F) -> F:
        return function

    method_with_lse = with_valid = with_lse

    def setting_lse(function: F) -> F:
        return functools.partial(function, return_lse=True)
