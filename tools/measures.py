"""Counts what the code keeps small: `python tools/measures.py` prints each count, `ROW...` also what those rows count.

tests/house/test_measures.py holds each to a bound.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from house.test_layers import arrows, import_circles
from house.tree import CORE, KERNELS, PACKAGES, ROOT, files_of, parse, relative

HOST, ATTENTION = KERNELS / "include/fi/host", KERNELS / "include/fi/attention"
LAUNCH = (
    *files_of(CORE / "runtime/launch", ".py"),
    *(path for path in files_of(KERNELS / "templates", ".jinja") if path.name.endswith(".h.jinja")),
    *(path for path in files_of(HOST, ".h") if path.stem not in ("contents", "driver", "error", "tensor", "tile")),
)
LIMIT, LONG, MANY = 60, 100, 12


def _way(step: str, form: str, modules: tuple[str, ...]) -> list[Path]:
    """The files from a wrapper to its kernel's parameters."""
    python = [CORE / f"attention/{name}.py" for name in (*modules, f"wrappers/{step}_plan", "wrappers/base")]
    host = [KERNELS / f"csrc/attention/{name}.cc" for name in (form, f"{step}_plan")]
    return [*python, *host, ATTENTION / "mask.h", *files_of(ATTENTION / step, ".h")]


def _nodes(*folders: Path) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for folder in folders for path in files_of(folder, ".py") for node in ast.walk(parse(path)))


def _calls(wanted: Callable[[ast.Call], bool]) -> list[str]:
    """The calls in the packages that are wanted."""
    found = ((path, node) for path, node in _nodes(*PACKAGES.values()) if isinstance(node, ast.Call) and wanted(node))
    return [f"{relative(path)}:{node.lineno} {ast.unparse(node.func)}" for path, node in found]


def lines() -> list[str]:
    """lines of the launch layer"""
    return [f"{relative(path)}:{n}" for path in LAUNCH for n, _ in enumerate(path.read_text().splitlines(), 1)]


def execs() -> list[str]:
    """calls of exec or eval"""
    return _calls(lambda call: getattr(call.func, "id", "") in ("exec", "eval"))


def memory() -> list[str]:
    """files that look into torch's objects"""
    pattern = re.compile(r"mincore|learn_keys|torch_keys|_dispatch_keys")
    files = [p for folder in PACKAGES.values() for p in files_of(folder, ".py", ".h", ".cc", ".cuh", ".jinja")]
    return [relative(path) for path in files if pattern.search(path.read_text())]


def reads() -> list[str]:
    """ops with an expression of facts"""
    return _calls(lambda call: getattr(call.func, "id", "") == "Op" and any(w.arg == "read" for w in call.keywords))


def circles() -> list[str]:
    """import circles"""
    return [" ".join(circle) for circle in import_circles()]


def _spellings(paths: list[Path], name: str = "window_left") -> list[str]:
    """Declarations of a name: parameters, attributes, schemas, members."""
    member = rf"  +(const )?[\w:]+[*&]? [^()=]*\b{name}\b[^()]*;"
    parameter = rf".*[(,] *(const )?\w+[&*]? {name}\b *[,)]"
    found = []
    for path in paths:
        if path.suffix != ".py":
            numbered = enumerate(path.read_text().splitlines(), 1)
            found += [f"{relative(path)}:{n}" for n, line in numbered if re.match(f"{member}|{parameter}", line)]
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.arg):
                declares = node.arg.strip("_") == name
            elif isinstance(node, ast.Attribute):
                declares = isinstance(node.ctx, ast.Store) and node.attr.strip("_") == name
            else:
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                declares = "`" not in text and bool(re.search(rf"\w\S* {name}(,|=|$)", text))
            found += [f"{relative(path)}:{getattr(node, 'lineno', 0)}"] if declares else []
    return found


def spellings_decode() -> list[str]:
    """declarations of window_left from batch decode to its kernel"""
    return _spellings(_way("decode", "batch_decode", ("wrappers/decode", "schedule", "ops/decode")))


def spellings_prefill() -> list[str]:
    """declarations of window_left from batch prefill to its kernel"""
    return _spellings(_way("prefill", "batch_prefill", ("wrappers/paged", "ops/prefill")))


def positional() -> list[str]:
    """calls with 12 positional values or more"""
    return _calls(lambda call: sum(not isinstance(value, ast.Starred) for value in call.args) >= MANY)


def functions(limit: int = LIMIT) -> list[str]:
    """functions of more than 60 lines without their docstring"""
    found = []
    for path, node in _nodes(*PACKAGES.values()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = (ast.get_docstring(node, clean=False) or "").splitlines()
            size = (node.end_lineno or 0) - node.lineno + 1 - len(docstring)
            found += [f"{relative(path)}:{node.lineno} {node.name} {size}"] if size > limit else []
    return found


def long_functions() -> list[str]:
    """functions of more than 100 lines without their docstring"""
    return functions(LONG)


def private() -> list[str]:
    """private attributes that tests read of what is not theirs"""
    return [
        f"{relative(path)}:{node.lineno} {ast.unparse(node)}"
        for path, node in _nodes(ROOT / "tests")
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def skips() -> list[str]:
    """statements in the packages that the formatter skips"""
    numbered = (
        (p, n, line)
        for folder in PACKAGES.values()
        for p in files_of(folder, ".py")
        for n, line in enumerate(p.read_text().splitlines(), 1)
    )
    return [f"{relative(path)}:{n}" for path, n, line in numbered if line.endswith("# fmt: skip")]


def attention() -> list[str]:
    """lines of Python of the attention room"""
    return [
        f"{relative(p)}:{n}"
        for p in files_of(CORE / "attention", ".py")
        for n in range(len(p.read_text().splitlines()))
    ]


ROWS: dict[str, Callable[[], list[str]]] = {
    row.__name__: row
    for row in (
        lines, attention, execs, memory, reads, circles, arrows, spellings_decode, spellings_prefill, positional,
        functions, long_functions, private, skips,
    )
}  # fmt: skip

if __name__ == "__main__":
    for name, row in ROWS.items():
        if not sys.argv[1:] or name.startswith(tuple(sys.argv[1:])):
            counted = row()
            print(f"{len(counted):6d}  {name:17s}  {row.__doc__}")
            print("".join(f"        {text}\n" for text in counted if sys.argv[1:]), end="")
