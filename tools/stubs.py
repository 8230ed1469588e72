"""Writes the `__init__.pyi` of each package with lazy names: what type checkers and editors see of it.

`python tools/stubs.py` writes the files; with --check it writes nothing and exits with 1 if one is out of date.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120  # of a line, as in pyproject.toml
PACKAGES = ("fi_core", "fi_core.attention", "fi_core.jit", "fi_core.testing")


def _submodules(package: ModuleType) -> list[str]:
    """The modules that are attributes without an import of their own: all of the top package, else those it names."""
    if "." in package.__name__:
        return sorted(getattr(package, "_SUBMODULES", ()))
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))


def _imports(package: ModuleType) -> Iterator[str]:
    """Import statements as ruff sorts and formats them. A name in `__all__` needs no `as`, a module does."""
    yield from (f"from {package.__name__} import {name} as {name}" for name in _submodules(package))
    homes = sorted(package._HOME.items(), key=lambda item: (item[1], item[0]))
    for home, pairs in itertools.groupby(homes, key=lambda item: item[1]):
        names = [name for name, _ in pairs]
        line = f"from {home} import {', '.join(names)}"
        yield line if len(line) <= WIDTH else f"from {home} import (\n    " + ",\n    ".join(names) + ",\n)"


def _functions(package: ModuleType) -> list[str]:
    """fi_core.jit makes `gen_<word>_module` for every family and op: `gen_module` without its first parameter."""
    if package.__name__ != "fi_core.jit":
        return []
    words = [word for word in sorted(package.ops.words()) if f"gen_{word}_module" not in package._HOME]
    parameters = str(inspect.signature(functools.partial(package.ops.gen_module, ""))).replace("'", "")
    lines = (f"def gen_{word}_module{parameters}: ..." for word in words)
    return [line if len(line) <= WIDTH else re.sub(r"\((.*)\) ->", r"(\n    \1\n) ->", line) for line in lines]


def stub(package: ModuleType) -> str:
    """The text of a package's `__init__.pyi`."""
    lines = [f'"""The names that {package.__name__} loads on first use. Written by tools/stubs.py; do not edit."""', ""]
    imports, functions = list(_imports(package)), _functions(package)
    if functions:
        lines += ["from collections.abc import Iterable", "from typing import Any", ""]
        imports.append("from fi_core.runtime.spec.target import Target")
    names = [f'    "{name}",' for name in sorted(package.__all__)]
    variables = [f"{name}: str" for name in package.__all__ if name not in package._HOME]  # the version
    lines += [*sorted(imports), "", "__all__ = [", *names, "]"]
    lines += [line for block in (variables, functions) if block for line in ("", *block)]
    return "\n".join(lines) + "\n"


def stubs() -> dict[Path, str]:
    """Every stub file with the text it must have."""
    packages = [importlib.import_module(name) for name in PACKAGES]
    return {Path(str(package.__file__)).with_suffix(".pyi"): stub(package) for package in packages}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    given = parser.parse_args()
    sys.path[:0] = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
    stale = {path: text for path, text in stubs().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'out of date' if given.check else 'wrote'}: {path.relative_to(ROOT)}")
        if not given.check:
            path.write_text(text)
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
