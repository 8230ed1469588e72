"""Artifact: one file to find or build; Text: a source that is rendered from a template when it is compiled."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.spec.target import Target


class Text(NamedTuple):
    """A template of fi-kernels and its data. Rendering needs jinja2; naming the result does not.

    data: canonical JSON. includes: headers that the rendered text includes and the template does not list.
    """

    template: str
    data: str
    includes: tuple[str, ...] = ()


class Artifact(NamedTuple):
    """`source` is a path, below the fi-kernels root if it is relative, or a text to render.

    headers: generated ones by the name they are included by. flags, includes: of a user's module, compiler flags and
    folders in which its headers lie.
    """

    name: str
    kind: str  # "cpu" or "cuda" (host modules), "cubin" (device binary)
    target: Target
    source: str | Text
    flags: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    headers: tuple[tuple[str, Text], ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}.cubin" if self.kind == "cubin" else f"{self.name}.so"

    @property
    def id(self) -> str:
        """The key of prebuilt indexes."""
        return f"{self.kind}/{self.target}/{self.name}"
