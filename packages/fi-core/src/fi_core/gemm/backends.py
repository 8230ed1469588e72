"""The backend names that FlashInfer's GEMMs accept. Here each of them selects the kernels of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fi_core.compat.backend import named_backends

F = TypeVar("F", bound=Callable[..., Any])
CAPABILITIES = (80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121)


def takes_backends(*names: str) -> Callable[[F], F]:
    """Decorates a GEMM with these names; without names it has no parameter `backend`."""
    return named_backends(dict.fromkeys(names), CAPABILITIES, unnamed=not names)


on_hopper = named_backends({}, (90,), unnamed=True)
