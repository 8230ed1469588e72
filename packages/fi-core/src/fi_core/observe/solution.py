"""Records of a solution, an implementation of a traced definition: its sources, and how to build and call it.

Fields and JSON are those of FlashInfer-Bench's solutions (bench.flashinfer.ai/docs/flashinfer-trace/solution).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["BuildSpec", "Solution", "SourceFile", "SupportedBindings", "SupportedLanguages"]


class SupportedLanguages(str, Enum):
    """What a solution is written in."""

    PYTHON = "python"
    TRITON = "triton"
    CUTEDSL = "cutedsl"
    TILELANG = "tilelang"
    CPP = "cpp"
    CUDA = "cuda"
    CUTLASS = "cutlass"
    CUTILE = "cutile"


class SupportedBindings(str, Enum):
    """How Python calls a solution in C++ or CUDA."""

    TVM_FFI = "tvm-ffi"
    TORCH = "torch"


_PYTHON = (
    SupportedLanguages.PYTHON,
    SupportedLanguages.TRITON,
    SupportedLanguages.CUTEDSL,
    SupportedLanguages.TILELANG,
    SupportedLanguages.CUTILE,
)


def _word(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: a text of one character or more is required; got {value!r}")


@dataclass(frozen=True)
class SourceFile:
    """A file of a solution.

    Args:
        path: below the solution's folder, with forward slashes.
        content: the text.

    Raises:
        ValueError: path is empty, absolute, or leaves the folder.
    """

    path: str
    content: str

    def __post_init__(self) -> None:
        _word("path", self.path)
        if self.path.startswith("/") or ".." in self.path.split("/"):
            raise ValueError(f"path: a place below the folder of the solution is required; got {self.path!r}")


@dataclass(frozen=True)
class BuildSpec:
    """How a solution is built and called.

    Args:
        language: of `SupportedLanguages`, or its text.
        target_hardware: names of GPUs, such as "H200"; not looked at.
        entry_point: "file.py::function".
        dependencies: names of packages; not looked at.
        destination_passing_style: whether outputs are arguments behind the inputs; False: they are returned.
        binding: of C++ and CUDA.

    Raises:
        ValueError: language, binding or entry_point is another.
    """

    language: SupportedLanguages
    target_hardware: Sequence[str]
    entry_point: str
    dependencies: Sequence[str] = field(default_factory=tuple)
    destination_passing_style: bool = False
    binding: SupportedBindings | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "language", SupportedLanguages(self.language))
        for name in ("target_hardware", "dependencies"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.binding is not None:
            object.__setattr__(self, "binding", SupportedBindings(self.binding))
        file, colons, symbol = self.entry_point.partition("::")
        if not (file and colons and symbol):
            raise ValueError(f"entry_point: 'file.py::function' is required; got {self.entry_point!r}")

    @property
    def is_python_family(self) -> bool:
        """Whether it is loaded as a Python module and called by keyword; others are compiled and called by position."""
        return self.language in _PYTHON

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuildSpec:
        """The record of what `to_dict` gave."""
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "language": self.language.value,
            "target_hardware": list(self.target_hardware),
            "entry_point": self.entry_point,
            "dependencies": list(self.dependencies),
            "destination_passing_style": self.destination_passing_style,
            "binding": self.binding.value if self.binding else None,
        }


@dataclass(frozen=True)
class Solution:
    """An implementation of a definition, with its sources.

    Args:
        name: of the solution.
        definition: the name of the definition that it computes, as `fi_trace` gives it.
        author: of the solution.
        spec: how it is built and called.
        sources: its files; one of them is that of the entry point.
        description: in words.

    Raises:
        ValueError: a name is empty, a path stands twice, or the file of the entry point is missing.
    """

    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: Sequence[SourceFile]
    description: str | None = None

    def __post_init__(self) -> None:
        for name in ("name", "definition", "author"):
            _word(name, getattr(self, name))
        object.__setattr__(self, "sources", tuple(self.sources))
        paths = [source.path for source in self.sources]
        if len(set(paths)) < len(paths) or self.entry_file() not in paths:
            raise ValueError(f"sources: {self.entry_file()!r} and no path twice is required; got {paths}")

    def entry_file(self) -> str:
        """The path of the file of the entry point."""
        return self.spec.entry_point.partition("::")[0]

    def entry_symbol(self) -> str:
        """The function of the entry point."""
        return self.spec.entry_point.partition("::")[2]

    def entry_source(self) -> SourceFile | None:
        """The file of the entry point."""
        return next((source for source in self.sources if source.path == self.entry_file()), None)

    def hash(self) -> str:
        """The SHA-256 of all that the record holds, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Solution:
        """The record of what `to_dict` gave."""
        sources = tuple(SourceFile(**source) for source in data["sources"])
        return cls(**{**data, "spec": BuildSpec.from_dict(data["spec"]), "sources": sources})

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "name": self.name,
            "definition": self.definition,
            "author": self.author,
            "spec": self.spec.to_dict(),
            "sources": [{"path": source.path, "content": source.content} for source in self.sources],
            "description": self.description,
        }
