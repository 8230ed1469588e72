"""Writes what type checkers and editors see of names that are made at run time: the `__init__.pyi` of each package with
lazy names, and the functions whose parameters other functions declare (fi_core.runtime.signature.takes).

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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120  # of a line, as in pyproject.toml
_WRITTEN = "Written by tools/stubs.py; do not edit."
# Names in the annotations of derived functions, by the modules that define them, sorted.
_HOMES = {"Sequence": "collections.abc", "Any": "typing"}
_HOMES |= dict.fromkeys(("Cache", "Scale"), "fi_core.attention.contract")
_HOMES |= dict.fromkeys(("Both", "One"), "fi_core.attention.custom_modules")
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
    lines = [f'"""The names that {package.__name__} loads on first use. {_WRITTEN}"""', ""]
    imports, functions = list(_imports(package)), _functions(package)
    if functions:
        lines += ["from collections.abc import Iterable", "from typing import Any", ""]
        imports.append("from fi_core.runtime.spec.target import Target")
    names = [f'    "{name}",' for name in sorted(package.__all__)]
    variables = [f"{name}: str" for name in package.__all__ if name not in package._HOME]  # the version
    lines += [*sorted(imports), "", "__all__ = [", *names, "]"]
    lines += [line for block in (variables, functions) if block for line in ("", *block)]
    return "\n".join(lines) + "\n"


def _typed(name: str, function: Callable[..., Any]) -> str:
    """A function as a stub has it."""
    signature = inspect.signature(function)
    taken = []
    for p in signature.parameters.values():
        taken += ["*"] if p.kind is p.KEYWORD_ONLY and "*" not in taken else []
        kind = "Any" if p.name == "self" else p.annotation
        taken.append(f"{p.name}: {kind}{'' if p.default is p.empty else ' = ...'}")
    lines = ",\n    ".join(taken)
    return f"def {name}(\n    {lines},\n) -> {signature.return_annotation}: ...\n"


def derived() -> str:
    """The text of the stub of fi_core.attention.derived: the functions that `takes` makes, by the names there."""
    fi_core = importlib.import_module("fi_core")
    for name in fi_core.__all__:
        getattr(fi_core, name)  # imports the modules of all functions
    functions = importlib.import_module("fi_core.runtime.signature").derived
    text = "".join(_typed(name, functions[name]) for name in sorted(functions))
    used = {word: home for word, home in _HOMES.items() if re.search(rf"[ \[]{word}\b", text)}
    imports = [
        f"from {home} import {', '.join(w for w in used if used[w] == home)}" for home in dict.fromkeys(used.values())
    ]
    own = next(i for i, line in enumerate(imports) if "fi_core" in line)
    said = f'"""The functions that fi_core.runtime.signature.takes makes. {_WRITTEN}"""'
    return "\n".join((said, "", *imports[:own], "", "import torch", "", *imports[own:], "", text))


def stubs() -> dict[Path, str]:
    """Every stub file with the text it must have."""
    texts = {package: stub(package) for package in map(importlib.import_module, PACKAGES)}
    texts[importlib.import_module("fi_core.attention.derived")] = derived()
    return {Path(str(module.__file__)).with_suffix(".pyi"): text for module, text in texts.items()}


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
