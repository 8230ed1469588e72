"""The end of `autotune()`: what layers reach with other sizes than those of their calls is compiled and loaded."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fi_core.runtime.errors import CompileError, MissingKernelError
from fi_core.runtime.launch.operator import operators
from fi_core.runtime.machine import target_of
from fi_core.runtime.resolve import wait_for_begun
from fi_core.runtime.resolve.ahead import begun

if TYPE_CHECKING:
    import torch


def load_begun(device: torch.device | None = None) -> None:
    """Waits for the compilers of what the calls of this process have begun, and loads it.

    device: a CUDA device; None: the current one, if torch sees one.
    """
    import torch

    wait_for_begun()
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    while device is not None and begun:
        spec = begun.pop()
        if spec.target == target_of(device):
            with contextlib.suppress(CompileError, MissingKernelError):  # which are of the call that needs it
                operators()[spec.op.name].kernel(spec, device)
