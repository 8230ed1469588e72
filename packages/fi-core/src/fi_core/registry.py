"""The ops of all families, and how to load them."""

from __future__ import annotations

import difflib
import functools
import importlib

from fi_core.errors import UnsupportedError
from fi_core.launch.op import Launcher, launchers
from fi_core.spec.op import Op
from fi_core.spec.target import CPU, cuda_target

FAMILIES = (
    "activation",
    "attention",
    "cascade",
    "decode",
    "norm",
    "page",
    "prefill",
    "quantization",
    "rope",
    "sampling",
    "topk",
)


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


def supports(op: str, device: str = "cuda", capability: int = 90, **axes: object) -> tuple[bool, str]:
    """Whether some implementation takes these axes on a target, and if none does, why: (ok, reason).

    device: "cpu" or "cuda"; capability: major * 10 + minor of the CUDA device; axes as in `ops()[op].axes`, dtypes by
    their short names. Nothing is built. Raises ValueError for an unknown op or axis.
    """
    target = CPU if device == "cpu" else cuda_target(capability // 10, capability % 10)
    try:
        launcher(op).op.spec(target, axes)
    except UnsupportedError as error:
        return False, str(error)
    return True, ""


def ops() -> dict[str, Op]:
    """Every op by name."""
    return {name: launcher.op for name, launcher in load().items()}


def loaded_kernels() -> dict[str, str]:
    """Every kernel that calls of this process have bound, by name, and where its files came from.

    A place is the package that brought a prebuilt file,
    "store" (compiled by an earlier process) or "jit" (compiled by this one); "store + jit" where launcher and
    device binary differ. A kernel that was bound again keeps its first place.
    """
    found: dict[str, str] = {}
    for kernel in (kernel for launcher in launchers().values() for kernel in launcher.kernels.values()):
        places = dict.fromkeys(file.origin for file in kernel.origins.values())
        found.setdefault(kernel.spec.name, " + ".join(places))
    return found
