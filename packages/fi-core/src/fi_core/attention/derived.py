"""Names of the functions that `runtime.signature.takes` makes; derived.pyi has their types, for checkers."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name.startswith("__"):
        raise AttributeError(name)
    return name
