"""FlashInfer's public names with a decision for each: the reader of names.txt, which explains the format."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fi_core.compat.renamed import RENAMED

FILE = Path(__file__).with_name("names.txt")
TOP = "."  # the package itself
WHOLE = "*"  # the rest of a module
_REASONS = {
    "blackwell": "is not in fi: its kernels are for Blackwell (sm_100 and later)",
    "fabric": "is not in fi: it maps memory of NVLink multicast or of several hosts; here CUDA IPC maps it",
    "later": "is not in fi yet",
    "form": "is not in fi, which has another form of it",
    "inside": "is not in fi: it is a part of how FlashInfer is built",
}


# Words of a name that is not listed, from which it follows that its kernels are for Blackwell.
_BLACKWELL = re.compile(r"sm1[0-2][0-9xaf]|blackwell|cute_dsl|tcgen05|trtllm_gen(_|$)|tgv_")


class Name(NamedTuple):
    """One name of FlashInfer."""

    path: str  # without `flashinfer.`
    kind: str  # "here", "absent", "refuses", "false" or "undecided"
    why: str  # a key of _REASONS; "" for "here"
    advice: str
    parameters: str | None = None  # None: it is no function or class
    same: str = ""  # the other name of the same object
    note: str = ""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def exists(self) -> bool:
        return self.kind in ("here", "refuses", "false")

    @property
    def reason(self) -> str:
        return f"flashinfer.{self.path} {_REASONS[self.why]}; {self.advice}"


@functools.cache
def read() -> dict[str, Name]:
    """Every name by its path, members of classes and the rest of modules (`module.*`) too."""
    found: dict[str, Name] = {}
    kind = why = advice = module = ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        header = re.fullmatch(r"\[(\w+) ?(\w*)\] ?(.*)", line)
        if header:
            kind, why, advice = header.groups()
        elif not kind or not line:
            continue
        elif not line.startswith(" "):
            module = "" if line == TOP else f"{line}."
        else:
            declared, _, note = line.strip().partition(" -- ")
            name, opened, parameters = declared.partition("(")
            name, _, same = name.partition(" = ")
            given = parameters.removesuffix(")") if opened else None
            found[module + name] = Name(module + name, kind, why, advice, given, same, note)
    for path, entry in found.items():
        if entry.same:
            found[path] = entry._replace(parameters=found[entry.same].parameters)
    return found


def find(module: str, name: str) -> Name | None:
    """The decision for a name of a module, or the one for the rest of that module or of one around it."""
    path = name if module in ("", TOP) else f"{module}.{name}"
    known = read()
    if path in known:
        return known[path]
    if name.startswith("__"):
        return None
    # The module itself, if it is one whose names are listed, before what is around it.
    inner = next((entry for other, entry in known.items() if other.startswith(f"{path}.")), None)
    while path and f"{path}.{WHOLE}" not in known:
        path = path.rpartition(".")[0]
    around = known.get(f"{path}.{WHOLE}", inner)
    asked = f"{module}.{name}".removeprefix(TOP).removeprefix(".")
    if around is None and _BLACKWELL.search(name):
        return Name(asked, "absent", "blackwell", "use the functions of fi that docs/reference lists")
    return None if around is None or around.kind == "here" else around._replace(path=asked, kind="absent", same="")


def answering_modules() -> frozenset[str]:
    """The modules that hold a name which exists, and those around them."""
    known = read()
    held = {path.rpartition(".")[0] for path, entry in known.items() if entry.exists} - known.keys()  # no classes
    return frozenset(module.rsplit(".", up)[0] for module in held for up in range(module.count(".") + 1)) - {""}


@functools.cache
def packages() -> frozenset[str]:
    """The modules that have others below them."""
    modules = {path.rpartition(".")[0] for path in read()} - read().keys() | RENAMED.keys()
    return frozenset(module.rsplit(".", up)[0] for module in modules for up in range(1, module.count(".") + 1))


def text(version: str, sections: Mapping[tuple[str, str, str], Mapping[str, Mapping[str, str]]]) -> str:
    """The file with new contents: the lines of names by (kind, why, advice), module and name."""
    head = FILE.read_text(encoding="utf-8").split("\n\n[", 1)[0] if FILE.exists() else ""
    head = re.sub(r"\AFlashInfer [^\s:]+", f"FlashInfer {version}", head)
    parts = [head]
    for (kind, why, advice), modules in sections.items():
        lines = [f"[{f'{kind} {why}'.strip()}] {advice}".strip()]
        for module in sorted(modules):
            lines += [module, *(f"    {modules[module][name]}" for name in sorted(modules[module]))]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
