"""Writes the reference pages that are derived from the packages: one function per page, each returning MyST text."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def environment() -> str:
    """The table of fi_core.env."""
    from fi_core.env import env

    rows = [
        ("<br>".join(f"`{name}`" for name in (row.name, *row.aliases)), row.allowed, row.default, row.when, row.doc)
        for row in env.table()
    ]
    lines = [
        "# Environment variables",
        "",
        "`FI_X` wins over its alias `FLASHINFER_X`; an empty value counts as unset; unknown variables are ignored.",
        "Read: at import, when something is built, or at each call.",
        "",
        *table(("variable", "allowed", "default", "read", "meaning"), rows),
    ]
    return "\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser of each command, those of groups in place of the group."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for command in dict.fromkeys(command for group in groups for command in group.choices.values()):
        yield from _commands(command)


def command_line() -> str:
    """The help of each command of fi-core."""
    from fi_core.cli.arguments import parser

    os.environ["COLUMNS"] = "100"  # of the help texts
    lines = [
        "# Command line",
        "",
        "`fi-core COMMAND`, or `python -m fi_core COMMAND`. Exit codes: 0 all is well, 1 it failed or something is",
        "amiss, 2 it was called wrongly.",
    ]
    for command in _commands(parser()):
        lines += ["", f"## {command.prog}", "", "```text", command.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def ops() -> str:
    """The ops of the registry: their axes, and which implementation runs where."""
    from fi_core import registry
    from fi_core.prebuilt import specs
    from fi_core.spec.target import CPU, PREBUILT_ARCHS, Target

    targets = (CPU, *(Target("cuda", arch) for arch in PREBUILT_ARCHS))
    known = sorted(registry.ops().values(), key=lambda op: (op.family, op.name))

    def where(op: Any, target: Target) -> str:
        found = [spec.impl for spec in specs(op, target)]
        return "<br>".join(f"{name} ({found.count(name)})" for name in dict.fromkeys(found)) or "-"

    matrix = [(f"`{op.name}`", op.family, *(where(op, target) for target in targets)) for op in known]
    lines = [
        "# Ops",
        "",
        "An op is one kernel with its launcher; several functions may share it, as all forms of rmsnorm do.",
        "",
        "## Support matrix",
        "",
        "The implementations that run on each target, and how many specialisations of each are built ahead. A GPU",
        "whose architecture has no column takes the binary of an older one of its generation, or compiles its own.",
        "",
        *table(("op", "family", "CPU", *(str(target) for target in targets[1:])), matrix),
        "",
        "## Axes",
        "",
        "What is fixed per model and chosen at compile time. All else is an argument of the call.",
    ]
    for op in known:
        axes = [(f"`{name}`", ", ".join(map(str, values))) for name, values in op.axes.items()]
        rows = [(impl.name, " and ".join(str(c) for c in impl.constraints)) for impl in op.impls]
        lines += ["", f"### {op.name}", "", f"`{op.name}{op.schema}`", "", f"Source: `{op.source}`.", ""]
        lines += [*(table(("axis", "values"), axes) if axes else ["No axes."]), ""]
        lines += table(("implementation", "takes"), rows)
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> list[str]:
    """A function or class as a directive with its docstring, which is Markdown."""
    inner = getattr(value, "func", value)  # of a functools.partial
    kind = "py:exception" if inspect.isclass(value) and issubclass(value, BaseException) else None
    kind = kind or ("py:class" if inspect.isclass(value) else "py:function" if callable(value) else "py:data")
    try:
        signature = str(inspect.signature(value)).replace("'", "") if kind in ("py:function", "py:class") else ""
    except ValueError:
        signature = ""
    lines = ["", f"````{{{kind}}} {name}{signature}", inspect.getdoc(inner) or "", "````"]
    return lines + (_methods(name, value) if kind == "py:class" else [])


def _methods(owner: str, value: type) -> list[str]:
    """The public methods and properties of a class, aliases left out."""
    lines: list[str] = []
    for name, member in inspect.getmembers(value, lambda m: inspect.isfunction(m) or isinstance(m, property)):
        own = any(name in vars(base) and base.__module__.startswith("fi_core.") for base in value.__mro__)
        if name.startswith("_") or not own or getattr(member, "__name__", name) != name:
            continue
        kind, signature = "py:property", ""
        if inspect.isfunction(member):
            kind, signature = "py:method", str(inspect.signature(member)).replace("'", "").replace("(self, ", "(")
        lines += ["", f"````{{{kind}}} {owner}.{name}{signature}", inspect.getdoc(member) or "", "````"]
    return lines


def _members(title: str, text: str, module: str, names: Iterable[str], prefix: str) -> str:
    home = importlib.import_module(module)
    lines = [f"# {title}", "", text]
    for name in names:
        lines += _entry(f"{prefix}.{name}", getattr(home, name))
    return "\n".join(lines) + "\n"


def functions() -> str:
    """Every function of the API, by family."""
    import fi_core

    lines = ["# Functions", "", "By family. What is listed as `fi_core.<name>` is also `fi_core.<family>.<name>`."]
    for family, names in sorted(fi_core._MODULES.items()):
        module = importlib.import_module(f"fi_core.{family}")
        lines += ["", f"## {family}", "", inspect.getdoc(module) or ""]
        for name in dict.fromkeys((*names, *(n for n in getattr(module, "__all__", ()) if n not in names))):
            place = "fi_core" if name in names else f"fi_core.{family}"
            lines += _entry(f"{place}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


def errors() -> str:
    import fi_core.errors as module

    found = [n for n, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
    return _members("Errors", inspect.getdoc(module) or "", module.__name__, found, "fi_core.errors")


def jit() -> str:
    import fi_core.jit as module

    return _members(
        "Building kernels", inspect.getdoc(module) or "", "fi_core.jit", sorted(module.__all__), "fi_core.jit"
    )


def testing() -> str:
    import fi_core.testing as module

    text = inspect.getdoc(module) or ""
    return _members("Timing and checking", text, "fi_core.testing", sorted(module.__all__), "fi_core.testing")


PAGES: dict[str, Callable[[], str]] = {
    "functions.md": functions,
    "ops.md": ops,
    "command-line.md": command_line,
    "environment.md": environment,
    "errors.md": errors,
    "jit.md": jit,
    "testing.md": testing,
}


def write_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page())
