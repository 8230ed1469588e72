"""The files of the repository and the imports of its Python modules, for the tests that hold the house rules."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {path.name: path for path in sorted((ROOT / "packages").glob("*/src/fi_*"))}
CORE, KERNELS = PACKAGES["fi_core"], PACKAGES["fi_kernels"]
PYTHONPATH = os.pathsep.join(str(path.parent) for path in PACKAGES.values())


class Import(NamedTuple):
    """One imported module: where, and whether it runs when the importing module is imported."""

    file: Path
    line: int
    module: str
    at_import: bool

    def __str__(self) -> str:
        return f"{relative(self.file)}:{self.line} imports {self.module}"


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def files() -> tuple[Path, ...]:
    """Every file that is or would be tracked; links are left out, their targets are in."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return tuple(p for p in (ROOT / name for name in sorted(set(names)) if name) if p.is_file() and not p.is_symlink())


def files_of(folder: Path, *suffixes: str) -> list[Path]:
    return [path for path in files() if path.is_relative_to(folder) and path.suffix in suffixes]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    """The dotted name of a file under packages/*/src."""
    parts = path.relative_to(next(p.parent for p in PACKAGES.values() if path.is_relative_to(p))).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file: in functions, under TYPE_CHECKING and by `import_module("constant")` too."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(path, child.lineno, alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{relative(path)}:{child.lineno}: relative import"
                for alias in child.names:
                    yield Import(path, child.lineno, f"{child.module}.{alias.name}", at_import)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from visit(child, False)
            else:
                if isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
                    names = (str(name.value) for name in child.args[:1] if isinstance(name, ast.Constant))
                    yield from (Import(path, child.lineno, name, at_import) for name in names)
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, at_import and not function)

    yield from visit(parse(path), True)


@functools.cache
def modules() -> dict[str, Path]:
    """The files of all packages by the name of the module."""
    return {module_name(path): path for folder in PACKAGES.values() for path in files_of(folder, ".py")}


def imported(path: Path) -> set[str]:
    """The modules of the packages that a file imports; of a name within a module, that module."""
    found = set()
    for item in imports(path):
        name = item.module
        while name and name not in modules():
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", module_name(path)}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of two or more nodes that reach each other."""
    reach = {name: set(graph[name]) for name in graph}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    groups = {frozenset(b for b in graph if b in reach[a] and a in reach[b]) for a in graph}
    return sorted(sorted(group) for group in groups if group)
