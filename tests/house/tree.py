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
    """Every import statement of a file, those inside functions and under TYPE_CHECKING included."""

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
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, at_import and not function)

    yield from visit(parse(path), True)
