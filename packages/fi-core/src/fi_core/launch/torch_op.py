"""torch.ops.fi_core.*: every op's out-variant with a fake, so that torch.compile and export see one node a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fi_core.launch.op import Launcher

NAMESPACE = "fi_core"


def _never() -> bool:
    return False


is_tracing: Callable[[], bool] = _never  # torch's own function from the first registration on: torch.compile knows that


@functools.cache
def register(launcher: Launcher) -> Any:
    """Defines `torch.ops.fi_core.<op>` once (define/impl costs 1.3 us a call, the custom_op decorator 8-11)."""
    import torch

    global is_tracing
    is_tracing = torch.compiler.is_dynamo_compiling
    name = launcher.op.name
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{name}{launcher.op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, launcher, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=library)
    return library  # kept by the cache: the registration lives as long as this object


def _fake(*_: Any) -> None:
    """An out-variant returns nothing: shapes and dtypes are those of its arguments."""


def call(name: str, arguments: tuple[Any, ...]) -> None:
    """The registered op, as torch.compile traces it."""
    import torch

    getattr(torch.ops.fi_core, name)(*arguments)
