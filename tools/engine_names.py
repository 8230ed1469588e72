"""Records what serving engines import from FlashInfer, and how they call it, from their wheels or installed packages.

`python tools/engine_names.py vllm sglang` reads the installed packages; a wheel may stand after `=`, as in
`vllm=downloads/vllm-0.33.0.whl`. Nothing of an engine is run. The record is tests/engine_calls/<engine>.txt: under each
name, `import`, `ask` and `call` lines. An import is `optional` if the engine goes on without it, `lazy` inside a
function; `ask` is a look-up by `hasattr` or `getattr`; a call has its number of positional arguments and its keywords,
`*` and `**` if it passes more. Names follow assignments such as `comm = _comm`, keywords the dict that a call unpacks.
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
    asks: set[str] = field(default_factory=set)
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


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def texts(node: ast.AST) -> list[str]:
    """The strings of a tuple or list that holds nothing else."""
    items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
    found = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return found if len(found) == len(items) else []


class File:
    """One file of an engine: what its names are bound to, and what it uses."""

    def __init__(self, path: str, text: str, engine: dict[str, dict[str, str]]) -> None:
        self.path, self.engine = path, engine
        self.nodes = list(walk(ast.parse(text), []))
        self.bound: dict[str, str] = {}  # name in this file -> dotted name below flashinfer
        self.held: dict[str, str] = {}  # expression -> the class that it is an instance of
        self.imports: list[tuple[str, str]] = []
        for node, parents in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                how = " optional" if guarded([*parents, node]) else ""
                how += " lazy" if any(isinstance(outer, FUNCTIONS) for outer in parents) else ""
                self._imported(node, f"{path}:{node.lineno}{how}")
        for node, _ in self.nodes:
            if isinstance(node, ast.Assign):
                self._assigned(node)

    def _imported(self, node: ast.Import | ast.ImportFrom, where: str) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == LIBRARY:
                    self.bound[alias.asname or LIBRARY] = alias.name if alias.asname else LIBRARY
                    self.imports.append((alias.name, where))
            return
        module = node.module or ""
        for alias in node.names:
            if module.split(".")[0] == LIBRARY and not node.level:
                self.bound[alias.asname or alias.name] = f"{module}.{alias.name}"
                self.imports.append((f"{module}.{alias.name}", where))
            elif alias.name in self.engine.get(module, {}):  # re-exported by another file of the engine
                self.bound[alias.asname or alias.name] = self.engine[module][alias.name]

    def _assigned(self, node: ast.Assign) -> None:
        if not isinstance(node.value, ast.Call):
            same = self.name_of(node.value)
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            self.bound |= dict.fromkeys(names, same) if same else {}
            return
        name, arguments = self.name_of(node.value.func), node.value.args
        called = ast.unparse(node.value.func).rpartition(".")[2]
        words = [a.value for a in arguments[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for target in map(ast.unparse, node.targets):
            if called in LAZY and len(words) == 2 and words[0].startswith(LIBRARY):
                self.bound[target] = ".".join(words)
                self.imports.append((".".join(words), f"{self.path}:{node.lineno} optional lazy"))
            elif name and name.rpartition(".")[2][:1].isupper():
                self.held[target] = name

    def name_of(self, node: ast.AST) -> str | None:
        """The dotted name below flashinfer that an expression stands for."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.name_of(node.value)
            # Of an object only its methods are names of the library: `wrapper._buffer.copy_` is a tensor's.
            held = None if owner else self.held.get(ast.unparse(node.value))
            if held and node.attr.startswith("_"):
                return None
            return f"{owner or held}.{node.attr}" if owner or held else None
        return None

    def calls(self) -> Iterator[tuple[str, str]]:
        """(name, line of the record) of each call."""
        for node, parents in self.nodes:
            name = self.name_of(node.func) if isinstance(node, ast.Call) else None
            if name and isinstance(node, ast.Call) and not elsewhere(node, parents):
                stars = [a for a in node.args if isinstance(a, ast.Starred)]
                words = [str(len(node.args) - len(stars)), *(["*"] if stars else [])]
                words += [f"{k.arg}=" for k in node.keywords if k.arg]
                unpacked = [k.value for k in node.keywords if not k.arg]
                words += [f"{key}=" for value in unpacked for key in keys(value, parents) if f"{key}=" not in words]
                words += ["**"] if unpacked else []
                yield name, f"{self.path}:{node.lineno} {' '.join(words)}"

    def asks(self) -> Iterator[tuple[str, str]]:
        """(name, line of the record) of each look-up that goes on where the name is missing."""
        functions = [node for node, _ in self.nodes if isinstance(node, ast.FunctionDef)]
        outside = [node for node, parents in self.nodes if not any(isinstance(p, FUNCTIONS) for p in parents)]
        for inside in [*([node for node, _ in walk(function, [])] for function in functions), outside]:
            local, listed = dict(self.bound), dict[str, list[str]]()
            for node in inside:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                    module = node.value.args[0]
                    if isinstance(module, ast.Constant) and str(module.value).split(".")[0] == LIBRARY:
                        local |= {ast.unparse(target): str(module.value) for target in node.targets}
                elif isinstance(node, ast.comprehension):
                    listed[ast.unparse(node.target)] = texts(node.iter)
                elif isinstance(node, ast.List):  # of (module, name), which a loop looks up
                    pairs = [pair for item in node.elts if len(pair := texts(item)) == 2]
                    yield from [(".".join(p), f"{self.path}:{node.lineno}") for p in pairs if p[0].startswith(LIBRARY)]
            for node in inside:
                if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("hasattr", "getattr"):
                    continue
                if ast.unparse(node.func) == "getattr" and len(node.args) < 3:
                    continue
                owner, asked = local.get(ast.unparse(node.args[0])) or self.name_of(node.args[0]), node.args[1]
                names = listed.get(ast.unparse(asked), [])
                names = [asked.value] if isinstance(asked, ast.Constant) and isinstance(asked.value, str) else names
                yield from [(f"{owner}.{name}", f"{self.path}:{node.lineno}") for name in names if owner]


def elsewhere(call: ast.Call, parents: list[ast.AST]) -> bool:
    """Whether the last import of the called name before the call, in the same function, is of another library."""
    around = [node for node in parents if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))][-1:]
    last, other = 0, False
    for node in [found for function in around for found, _ in walk(function, []) if isinstance(call.func, ast.Name)]:
        if isinstance(node, ast.ImportFrom) and last < node.lineno < call.lineno:
            if ast.unparse(call.func) in {alias.asname or alias.name for alias in node.names}:
                last, other = node.lineno, (node.module or "").split(".")[0] != LIBRARY
    return other


def keys(value: ast.AST, parents: list[ast.AST]) -> Iterator[str]:
    """The keys of a dict that a call unpacks, as far as the function around the call writes them down in every case."""
    around = [node for node in parents if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))][-1:]
    for node, outer in [found for function in around for found in walk(function, [])]:
        if not isinstance(node, ast.Assign) or any(isinstance(parent, ast.If) for parent in outer):
            continue
        for target in node.targets:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == ast.unparse(value):
                written: list[ast.expr | None] = [target.slice]
            elif ast.unparse(target) == ast.unparse(value) and isinstance(node.value, ast.Dict):
                written = node.value.keys
            elif ast.unparse(target) == ast.unparse(value) and isinstance(node.value, ast.Call):
                is_dict = ast.unparse(node.value.func) == "dict"
                yield from [k.arg for k in node.value.keywords if k.arg and is_dict]
                continue
            else:
                continue
            yield from [k.value for k in written if isinstance(k, ast.Constant) and isinstance(k.value, str)]


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
        for imported, line in file.imports:
            uses[imported].imports.add(line)
        for asked, line in file.asks():
            uses[asked].asks.add(line)
        for called, line in file.calls():
            uses[called].calls.add(line)
    lines = [f"{name} {version}: what it takes from FlashInfer; written by tools/engine_names.py"]
    for used in sorted(uses):
        lines.append(used)
        lines += [f"    import {line}" for line in sorted(uses[used].imports)]
        lines += [f"    ask {line}" for line in sorted(uses[used].asks)]
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
