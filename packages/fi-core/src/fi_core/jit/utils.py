"""What generators of sources use, under FlashInfer's names: writing a generated file, and C++ names of dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fi_core.runtime import files
from fi_core.runtime.errors import missing_attribute
from fi_core.runtime.spec.dtype import DTYPES

_MAPS = ("dtype_map", "filename_safe_dtype_map")  # made when they are read, since they need torch
__all__ = [*_MAPS, "write_if_different"]
_UNSIGNED = {"uint32": ("fi::uint32_t", "u32"), "uint64": ("fi::uint64_t", "u64")}  # which no op takes


def write_if_different(path: Path, content: str) -> None:
    """Writes a text file, and the folders around it; a file that has this text keeps its modification time.

    Args:
        path: the file.
        content: its text.

    Raises:
        OSError: the file cannot be written.
    """
    files.make(Path(path).parent)
    files.write_if_new(Path(path), content)


def __getattr__(name: str) -> Any:
    """`dtype_map`: torch dtype -> C++ type, after #include "fi/types.h"; `filename_safe_dtype_map`: its short name."""
    if name not in _MAPS:
        raise missing_attribute(__name__, name, __all__)
    import torch

    words = {d.torch: (d.device, d.short) for d in DTYPES.values()} | _UNSIGNED
    column = 0 if name == "dtype_map" else 1
    return {getattr(torch, dtype): word[column] for dtype, word in words.items() if hasattr(torch, dtype)}
