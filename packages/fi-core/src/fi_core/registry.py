"""The ops of all families, and how to load them."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from fi_core.runtime.build import sources
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.launch.operator import Operator, operators
from fi_core.runtime.spec.op import Op
from fi_core.runtime.spec.target import CPU, cuda_target

if TYPE_CHECKING:
    from fi_core.observe.trace import Described

# The modules that declare or describe the ops of a family, where it is not the one of that name.
_MODULES = {
    "attention": (
        "attention.merge",
        "attention.ops.decode",
        "attention.ops.mla",
        "attention.ops.prefill",
        "attention.ops.single",
        "flash_mla",
    ),
    "linear_attention": ("gdn_decode", "gdn_prefill", "mamba"),
}


@functools.cache
def load(*families: str) -> dict[str, Operator]:
    """Imports families, by default every one, which declares their ops (no torch, no device); returns the operators of
    all that are imported, by name.

    A family is a folder of host entries in fi-kernels, so a new one needs no entry in a list.
    """
    for folder in families or sorted(path.name for path in (sources.root() / "csrc").iterdir() if path.is_dir()):
        for module in _MODULES.get(folder, (folder,)):
            importlib.import_module(f"fi_core.{module}")
    return operators()


def operator(name: str) -> Operator:
    """The operator of an op. Raises ValueError with the close names if there is none."""
    known = load()
    if name not in known:
        import difflib

        close = difflib.get_close_matches(name, known, 3, 0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"ops are {', '.join(sorted(known))}"
        raise ValueError(f"op: no op is named {name!r}; {hint}")
    return known[name]


def described(name: str) -> Described | None:
    """The description of a public function or wrapper that makes its inputs; None if there is none."""
    import fi_core
    from fi_core.observe.trace import every_described

    load()
    found = next((found for found in every_described() if found.name == name), None)
    if found is None and name in fi_core.__all__:
        importlib.import_module(vars(fi_core)["_HOME"].get(name, "fi_core"))  # without torch, which getattr would load
        found = next((found for found in every_described() if found.name == name), None)
    return found


def supports(op: str, device: str = "cuda", capability: int = 90, **fields: object) -> tuple[bool, str]:
    """Whether some implementation supports a request on a target, and if not, why. Nothing is built.

    Args:
        op: The name of an op, as in `ops()`.
        device: "cpu" or "cuda".
        capability: major * 10 + minor of the CUDA device.
        fields: Fields of the request, as in `ops()[op].fields`; dtypes by their short names. Others have their default.

    Returns:
        (True, ""), or (False, reason).

    Raises:
        ValueError: Unknown op or field.
    """
    target = CPU if device == "cpu" else cuda_target(capability // 10, capability % 10)
    try:
        choose(Request.of(operator(op).op, target, fields))
    except UnsupportedError as error:
        return False, str(error)
    return True, ""


def ops() -> dict[str, Op]:
    """Every op by name."""
    return {name: found.op for name, found in load().items()}


def loaded_kernels() -> dict[str, str]:
    """Every kernel that calls of this process have bound, by name, and the origin of its files.

    An origin is the package that brought a prebuilt file, "store" (compiled by an earlier process) or "jit" (compiled
    by this one); "store + jit" if launcher and device binary differ. A kernel that was bound again keeps its first
    origin.
    """
    found: dict[str, str] = {}
    for kernel in (kernel for known in operators().values() for kernel in known.kernels.values()):
        places = dict.fromkeys(file.origin for file in kernel.origins.values())
        found.setdefault(kernel.name, " + ".join(places))
    return found
