"""torch.ops.fi_core.*: the out-variant of every op with a fake, so that torch.compile and export see one node per
kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fi_core.runtime.spec.op import Op

NAMESPACE = "fi_core"


def _never() -> bool:
    return False


is_tracing: Callable[[], bool] = _never  # torch's own function from the first registration on: torch.compile knows that


@functools.cache
def register(op: Op, function: Callable[..., Any]) -> Any:
    """Defines `torch.ops.fi_core.<op>` once (define/impl costs 1.3 us a call, the custom_op decorator 8-11)."""
    import torch

    global is_tracing
    is_tracing = torch.compiler.is_dynamo_compiling

    def run(*arguments: Any) -> None:
        function(*arguments)

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{op.name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(op.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", _fake, lib=library)
    return library  # kept by the cache: the registration lives as long as this object


def _fake(*_: Any) -> None:
    """An out-variant returns nothing: shapes and dtypes are those of its arguments."""


def call(name: str, arguments: tuple[Any, ...]) -> None:
    """Calls the registered op, which torch.compile traces."""
    import torch

    getattr(torch.ops.fi_core, name)(*arguments)
