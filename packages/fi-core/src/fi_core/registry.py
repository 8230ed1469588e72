"""The ops of all families, and how to load them."""

from __future__ import annotations

import difflib
import functools
import importlib

from fi_core.launch.op import Launcher, launchers
from fi_core.spec.op import Op

FAMILIES = ("activation", "attention", "cascade", "decode", "norm", "page", "prefill", "quantization", "rope")


@functools.cache
def load() -> dict[str, Launcher]:
    """Imports every family, which declares its ops and launchers (no torch, no device); the launchers by op name."""
    for family in FAMILIES:
        importlib.import_module(f"fi_core.{family}")
    return launchers()


def launcher(name: str) -> Launcher:
    """The launcher of an op. Raises ValueError with the close names if there is none."""
    known = load()
    if name not in known:
        close = difflib.get_close_matches(name, known, 3, 0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"ops are {', '.join(sorted(known))}"
        raise ValueError(f"op: no op is named {name!r}; {hint}")
    return known[name]


def ops() -> dict[str, Op]:
    """Every op by name."""
    return {name: launcher.op for name, launcher in load().items()}
