"""Records what serving engines import from FlashInfer, and how they call it, from their wheels or installed packages.

`python tools/engine_names.py vllm sglang` reads the installed packages; a wheel may stand after `=`, as in
`vllm=downloads/vllm-0.33.0.whl`. Nothing of an engine is run. The record is tests/engine_calls/<engine>.txt: under each
name, `import` and `call` lines. An import is `optional` if the engine goes on without it; a call has its number of
positional arguments and its keywords, `*` and `**` if it passes more.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import itertools
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tests" / "engine_calls"
LIBRARY = "flashinfer"
SKIPPED = re.compile(r"/(tests?|benchmarks?)/")  # not part of serving
LAZY = {"_lazy_import_wrapper"}  # vLLM: (module, name) -> the function, or a fallback where it is missing
ABSENT = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}


@dataclass
class Uses:
    """The lines of one name."""

    imports: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)


def sources(place: str) -> tuple[str, dict[str, str]]:
    """The version of an engine, and its Python files by path: from a wheel or the installed package."""
    name, _, where = place.partition("=")
    if where.endswith(".whl"):
        with zipfile.ZipFile(where) as wheel:
            files = {item: wheel.read(item).decode() for item in wheel.namelist() if item.endswith(".py")}
        return Path(where).name.split("-")[1], {path: text for path, text in files.items() if path.startswith(name)}
    spec = importlib.util.find_spec(name)
    if where or spec is None or spec.origin is None:
        raise SystemExit(f"{place}: an installed package or a wheel is required")
    root, version = Path(spec.origin).parents[1], importlib.metadata.version(name)
    paths = sorted((root / name).rglob("*.py"))
    return version, {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def guarded(parents: list[ast.AST]) -> bool:
    """Whether the code around a statement goes on if it fails, or never runs it."""
    for outer, inner in itertools.pairwise(parents):
        if isinstance(outer, ast.Try) and any(inner is statement for statement in outer.body):
            caught = {n.id for h in outer.handlers if h.type for n in ast.walk(h.type) if isinstance(n, ast.Name)}
            raises = any(isinstance(node, ast.Raise) for h in outer.handlers for node in ast.walk(h))
            if not raises and (caught & ABSENT or any(h.type is None for h in outer.handlers)):
                return True
        if isinstance(outer, ast.With) and "suppress" in ast.dump(outer.items[0]):
            return True
    return False


def walk(node: ast.AST, parents: list[ast.AST]) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Every node below, with its ancestors; what only type checkers read is left out."""
    here = [*parents, node]
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child, here
        yield from walk(child, here)


class File:
    """One file of an engine: what its names are bound to, and what it uses."""

    def __init__(self, path: str, text: str, engine: dict[str, dict[str, str]]) -> None:
        self.path, self.engine = path, engine
        self.nodes = list(walk(ast.parse(text), []))
        self.bound: dict[str, str] = {}  # name in this file -> dotted name below flashinfer
        self.held: dict[str, str] = {}  # expression -> the class that it is an instance of
        self.imports: list[tuple[str, int, bool]] = []
        for node, parents in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imported(node, guarded([*parents, node]))
        for node, _ in self.nodes:
            if isinstance(node, ast.Assign):
                self._assigned(node)

    def _imported(self, node: ast.Import | ast.ImportFrom, optional: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == LIBRARY:
                    self.bound[alias.asname or LIBRARY] = alias.name if alias.asname else LIBRARY
                    self.imports.append((alias.name, node.lineno, optional))
            return
        module = node.module or ""
        for alias in node.names:
            if module.split(".")[0] == LIBRARY and not node.level:
                self.bound[alias.asname or alias.name] = f"{module}.{alias.name}"
                self.imports.append((f"{module}.{alias.name}", node.lineno, optional))
            elif alias.name in self.engine.get(module, {}):  # re-exported by another file of the engine
                self.bound[alias.asname or alias.name] = self.engine[module][alias.name]

    def _assigned(self, node: ast.Assign) -> None:
        if not isinstance(node.value, ast.Call):
            return
        name, arguments = self.name_of(node.value.func), node.value.args
        called = ast.unparse(node.value.func).rpartition(".")[2]
        words = [a.value for a in arguments[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for target in map(ast.unparse, node.targets):
            if called in LAZY and len(words) == 2 and words[0].startswith(LIBRARY):
                self.bound[target] = ".".join(words)
                self.imports.append((".".join(words), node.lineno, True))
            elif name and name.rpartition(".")[2][:1].isupper():
                self.held[target] = name

    def name_of(self, node: ast.AST) -> str | None:
        """The dotted name below flashinfer that an expression stands for."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.name_of(node.value) or self.held.get(ast.unparse(node.value))
            return f"{owner}.{node.attr}" if owner else None
        return None

    def calls(self) -> Iterator[tuple[str, str]]:
        """(name, line of the record) of each call."""
        for node, _ in self.nodes:
            name = self.name_of(node.func) if isinstance(node, ast.Call) else None
            if name and isinstance(node, ast.Call):
                stars = [a for a in node.args if isinstance(a, ast.Starred)]
                words = [str(len(node.args) - len(stars)), *(["*"] if stars else [])]
                words += [f"{k.arg}=" if k.arg else "**" for k in node.keywords]
                yield name, f"{self.path}:{node.lineno} {' '.join(words)}"


def record(place: str) -> tuple[str, str]:
    """The name of an engine and the text of its record."""
    name, (version, files) = place.partition("=")[0], sources(place)
    texts = {path: text for path, text in files.items() if not SKIPPED.search(path)}
    engine: dict[str, dict[str, str]] = {}
    for path, text in texts.items():  # first the files that bind names of FlashInfer for others
        if LIBRARY in text:
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            engine[module] = File(path, text, {}).bound
    users = re.compile(r"\bflashinfer")
    uses: defaultdict[str, Uses] = defaultdict(Uses)
    for path, text in texts.items():
        if not users.search(text):
            continue
        file = File(path, text, engine)
        for imported, number, optional in file.imports:
            uses[imported].imports.add(f"{path}:{number}{' optional' if optional else ''}")
        for called, line in file.calls():
            uses[called].calls.add(line)
    lines = [f"{name} {version}: what it takes from FlashInfer; written by tools/engine_names.py"]
    for used in sorted(uses):
        lines.append(used)
        lines += [f"    import {line}" for line in sorted(uses[used].imports)]
        lines += [f"    call {line}" for line in sorted(uses[used].calls)]
    return name, "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("engines", nargs="+", metavar="ENGINE[=WHEEL]", help="vllm or sglang")
    for place in parser.parse_args().engines:
        name, text = record(place)
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"{name}.txt").write_text(text)
        print(f"{name}: {text.count(' import ')} imports, {text.count(' call ')} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
