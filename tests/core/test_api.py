"""The public API as callers rely on it: names, order and defaults of parameters, as public_api.txt has them."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fi_core

SNAPSHOT = Path(__file__).with_name("public_api.txt")
FAMILIES = ("cascade", "decode", "page", "prefill", "sampling", "topk")


def parameters(function: Any) -> str:
    """`a, b=1, *, c=None`: names, kinds and defaults; self and types are left out."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for name, p in signature.parameters.items() if name != "self"]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def described() -> Iterator[str]:
    """A line for each function, and for each public method of each class, that the families export."""
    for family in FAMILIES:
        module = importlib.import_module(f"fi_core.{family}")
        for name in sorted({*fi_core._MODULES.get(family, ()), *getattr(module, "__all__", ())}):
            value = getattr(module, name)
            if not inspect.isclass(value):
                yield from [f"{family}.{name}{parameters(value)}"] if callable(value) else []
            elif not issubclass(value, enum.Enum):
                public = (method for method in dir(value) if not method.startswith("_"))
                for method in ("__init__", *public):
                    if callable(getattr(value, method)):
                        yield f"{family}.{name}.{method}{parameters(getattr(value, method))}"


def test_signatures() -> None:
    """A change here breaks callers; an addition is written down by `python tests/core/test_api.py`."""
    known = SNAPSHOT.read_text().splitlines()[1:]
    found = list(described())
    gone, new = sorted(set(known) - set(found)), sorted(set(found) - set(known))
    assert not gone and not new, "\n".join([*(f"- {line}" for line in gone), *(f"+ {line}" for line in new)])


if __name__ == "__main__":
    first = "Signatures of what attention, page and sampling export; written by test_api.py, which compares.\n"
    SNAPSHOT.write_text(first + "".join(f"{line}\n" for line in described()))
