"""Splits a docstring into text, parameters, returns and raises, and writes them as Markdown field lists.

Google sections (`Args:`, `Returns:`, `Raises:`) are read as such. In a docstring without them, a line that begins with
names of parameters and a colon is a parameter, and a paragraph that begins with Returns or Raises is that.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Collection
from dataclasses import dataclass, field

SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields):[ \t]*$", re.MULTILINE)
ENTRY = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \([^)]*\))?:\s*(.*)$")


@dataclass
class Parsed:
    """The parts of a docstring; all texts are Markdown."""

    text: str = ""
    parameters: list[tuple[str, str]] = field(default_factory=list)
    returns: str = ""
    raises: list[tuple[str, str]] = field(default_factory=list)

    def fields(self) -> list[str]:
        """Lines of a field list, which Sphinx shows as Parameters, Returns and Raises."""
        lines = []
        for names, text in self.parameters:
            lines += [f":param {name}: {_flat(text)}" for name in (n.strip().lstrip("*") for n in names.split(","))]
        if self.returns:
            lines.append(f":returns: {_flat(self.returns)}")
        lines += [f":raises {kind}: {_flat(text) or 'the message has the reason.'}" for kind, text in self.raises]
        return lines

    def markdown(self) -> str:
        fields = self.fields()
        return "\n".join(part for part in (self.text, "", *fields) if part or fields).strip()


def _flat(text: str) -> str:
    """One line, as a field needs it."""
    return " ".join(text.split())


def parse(doc: str, parameters: Collection[str]) -> Parsed:
    """`parameters`: the names in the signature; no other word becomes a parameter of an older docstring."""
    doc = inspect.cleandoc(doc)
    return _google(doc) if SECTION.search(doc) else _prose(doc, parameters)


def _entries(body: str) -> list[tuple[str, str]]:
    """`name: text` entries of a section; deeper lines continue the entry before them."""
    found: list[tuple[str, str]] = []
    for line in textwrap.dedent(body).strip("\n").splitlines():
        match = None if line[:1].isspace() else ENTRY.match(line)
        if match:
            found.append((match[1], match[2]))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}".strip())
        elif line.strip():
            found.append(("", line.strip()))
    return found


def _google(doc: str) -> Parsed:
    pieces = SECTION.split(doc)
    parsed, extra = Parsed(), [pieces[0].strip()]
    for title, body in zip(pieces[1::2], pieces[2::2]):
        # A section ends where the indentation does.
        inside, outside = re.match(r"((?:\n?(?:[ \t]+[^\n]*|[ \t]*)(?=\n|\Z))*)(.*)", body, re.DOTALL).groups()  # type: ignore[union-attr]
        if title in ("Returns", "Yields"):
            parsed.returns = textwrap.dedent(inside.strip("\n")).strip()
        elif title == "Raises":
            parsed.raises = [(kind or "ValueError", text) for kind, text in _entries(inside)]
        else:
            parsed.parameters = [(name, text) for name, text in _entries(inside) if name]
        extra.append(outside.strip())
    parsed.text = "\n\n".join(part for part in extra if part)
    return parsed


def _prose(doc: str, parameters: Collection[str]) -> Parsed:
    """An older docstring: parameters as `name: text` sentences; Returns and Raises begin sentences of their own."""
    parsed, texts = Parsed(), []
    known = "|".join(sorted(map(re.escape, parameters), key=len, reverse=True))
    begins = re.compile(rf"(?:^|(?<=[.;,] ))((?:{known})(?:, (?:{known}))*): ", re.MULTILINE) if known else None
    for paragraph in re.split(r"\n\s*\n", doc):
        end = re.search(r"(?:^|(?<=[.)] )|(?<=\n))(?:Returns|Raises) ", paragraph)
        text, last = (paragraph[: end.start()], _flat(paragraph[end.start() :])) if end else (paragraph, "")
        if begins and begins.match(text):
            pieces = begins.split(text)
            parsed.parameters += [(name, body.strip(" ,;\n")) for name, body in zip(pieces[1::2], pieces[2::2])]
        elif text.strip():
            texts.append(text.strip())
        returns, _, raises = last.partition("Raises ")
        parsed.returns = f"{parsed.returns} {returns.removeprefix('Returns ')}".strip()
        parsed.raises += _raised(raises)
    parsed.text = "\n\n".join(texts)
    return parsed


def _raised(text: str) -> list[tuple[str, str]]:
    """`ValueError (shape) or TypeError (dtype) naming the argument.` as one entry for each class."""
    kinds = list(re.finditer(r"\b([A-Z]\w*(?:Error|Exception))\b(?: \(([^)]*)\))?", text))
    tail = text[kinds[-1].end() :].strip(" .,:") if kinds else ""
    if len(kinds) == 1 and kinds[0][2]:
        return [(kinds[0][1], f"{kinds[0][2]} {tail}".strip())]
    return [(kind[1], kind[2] or tail) for kind in kinds]
