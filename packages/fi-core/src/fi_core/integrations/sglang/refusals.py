"""What an option of SGLang names fi for and fi cannot honour."""

from __future__ import annotations

from typing import Any


def refuse(option: str, name: str, required: str, got: Any) -> None:
    raise NotImplementedError(f"{name}: {required} is required by {option} fi; got {got}")
