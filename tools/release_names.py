"""Writes FlashInfer's public names into fi_core/compat/names.txt from a wheel: parameters anew, decisions as they are.

`python tools/release_names.py flashinfer_python-0.7.2.post1-py3-none-any.whl`; nothing of the wheel is run. Public is
what the package or a subpackage exports, what is decorated as an API, what an engine takes (tests/engine_calls), of a
module that fi has too every function and class, and what the list has already. A name without a decision goes to the
section `[undecided]`, which a test refuses.
"""

from __future__ import annotations

import argparse
import ast
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "packages" / "fi-core" / "src"))

from fi_core.compat import names as record  # noqa: E402

LIBRARY = "flashinfer"
KERNELS = ("cute_dsl", "cutile", "diffusion_ops", "experimental", "moe_ep", "triton", "prims_ts")  # exports: of engines


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: a function, a class, a value, or a module (without a node)."""

    module: str
    name: str
    node: ast.AST | None


class Release:
    """The modules of a wheel, read as text."""

    def __init__(self, wheel: Path) -> None:
        self.sources: dict[str, str] = {}
        self.packages: set[str] = set()
        with zipfile.ZipFile(wheel) as files:
            for item in files.namelist():
                if item.startswith(f"{LIBRARY}/") and item.endswith(".py") and "/data/" not in item:
                    module = item.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                    self.sources[module] = files.read(item).decode()
                    self.packages |= {module} if item.endswith("/__init__.py") else set()
        self.version = wheel.name.split("-")[1]
        self.bound = cache(self._bound)

    def _bound(self, module: str) -> dict[str, tuple[str, str] | ast.AST]:
        """What the names of a module are bound to: a node of it, or (module, name) that they are imported from."""
        found: dict[str, tuple[str, str] | ast.AST] = {}
        for node in statements(ast.parse(self.sources[module]).body):
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                for alias in node.names if source.split(".")[0] == LIBRARY else ():
                    if alias.name != "*":
                        found[alias.asname or alias.name] = (source, alias.name)
                    elif source in self.sources:
                        for n in self.bound(source):
                            if not n.startswith("_"):
                                found.setdefault(n, (source, n))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, node)
                        if target.id == "__all__" and node.value is not None:  # what a `__getattr__` gives
                            words = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                            found = {word: node for word in words if isinstance(word, str)} | found
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (module in self.packages)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def find(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Definition | None:
        """The definition that a name of a module leads to."""
        found = self.bound(module).get(name) if module in self.sources and (module, name) not in seen else None
        if isinstance(found, tuple):
            return self.find(*found, seen | {(module, name)})
        if found is not None:
            return Definition(module, name, found)
        inner = f"{module}.{name}"
        return Definition(inner, "", None) if inner in self.sources else None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def engine_names() -> set[str]:
    """The names, with `flashinfer.`, that the records of engines hold."""
    lines = [
        line for path in (ROOT / "tests" / "engine_calls").glob("*.txt") for line in path.read_text().splitlines()[1:]
    ]
    return {line for line in lines if line.startswith(f"{LIBRARY}.")}


def ours(module: str) -> bool:
    """Whether fi has a module of FlashInfer, whose name is given with `flashinfer.`."""
    place = ROOT.joinpath("packages", "fi-core", "src", "fi_core", *module.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


def public(release: Release) -> dict[Definition, set[str]]:
    """Every public definition with the names that it has, `flashinfer.norm.rmsnorm` and `flashinfer.rmsnorm`."""
    paths, chosen = defaultdict[Definition, set[str]](set), set[Definition]()
    wanted = engine_names() | {f"{LIBRARY}.{path}" for path in record.read()}
    for module, source in release.sources.items():
        inner = module.split(".")[1:]
        kernels = bool(inner) and inner[0] in KERNELS
        private = any(part.startswith("_") for part in inner)
        decorates = "flashinfer_api" in source and inner[:1] != ["experimental"]
        if not (any(n.startswith(f"{module}.") for n in wanted)):
            if private or ((len(inner) > 2 or kernels) and not decorates):
                continue
        package, known = module in release.packages, len(inner) == 1 and ours(module)
        bound, listed = release.bound(module), api_all(release, module)
        shim = not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in bound.values())
        for name, origin in bound.items():
            asked, imported = f"{module}.{name}" in wanted, isinstance(origin, tuple)
            if not asked and (name.startswith("_") or (imported and not package and not shim)):
                continue
            found = release.find(module, name)
            if found is None or found.node is None:
                continue
            node = found.node
            if asked or package or isinstance(node, (ast.FunctionDef, ast.ClassDef)) or name in listed:
                paths[found].add(f"{module}.{name}")
            exports = package and len(inner) < 2 and not kernels
            decorated = decorates and any(
                "flashinfer_api" in ast.unparse(d) for d in getattr(node, "decorator_list", ())
            )
            own = not imported and known and isinstance(node, (ast.FunctionDef, ast.ClassDef))
            if asked or exports or decorated or own:
                chosen.add(found)
    return {definition: paths[definition] for definition in chosen if paths[definition]}


def api_all(release: Release, module: str) -> set[str]:
    node = release.bound(module).get("__all__")
    return {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)} if isinstance(node, ast.AST) else set()


def arguments(node: ast.FunctionDef, method: bool = False) -> str:
    """`a, b=1, *, c=None` of a definition: a default that is no literal stands as text."""
    given = node.args
    plain = [*given.posonlyargs, *given.args][1 if method and not static(node) else 0 :]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    words = [parameter(a, d) for a, d in zip(plain, defaults[-len(plain) :] if plain else [])]
    words += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    words += [parameter(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults)]
    words += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return ", ".join(words)


def static(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)


def parameter(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return argument.arg
    try:
        ast.literal_eval(default)
        return f"{argument.arg}={ast.unparse(default)}"
    except ValueError:
        return f"{argument.arg}={ast.unparse(default)!r}"


def fields(node: ast.ClassDef) -> str | None:
    """The parameters of a data class or named tuple; None if it is neither."""
    how = [ast.unparse(d) for d in node.decorator_list] + [ast.unparse(b) for b in node.bases]
    if not any("dataclass" in word or "NamedTuple" in word for word in how):
        return None
    words: list[str] = []
    for n in node.body:
        if not isinstance(n, ast.AnnAssign) or "ClassVar" in ast.unparse(n.annotation):
            continue
        options = {k.arg: k.value for k in n.value.keywords} if isinstance(n.value, ast.Call) else {}
        if "KW_ONLY" in ast.unparse(n.annotation) or ("kw_only" in options and "*" not in words):
            words.append("*")
        if "KW_ONLY" not in ast.unparse(n.annotation) and ast.unparse(options.get("init", n.annotation)) != "False":
            words.append(parameter(ast.arg(ast.unparse(n.target)), options.get("default", n.value)))
    return ", ".join(words if words[-1:] != ["*"] else words[:-1])


def members(release: Release, definition: Definition, node: ast.ClassDef) -> dict[str, str | None]:
    """The public members of a class by name, with their parameters; "" is the constructor."""
    found: dict[str, str | None] = {}
    for base in reversed(node.bases):
        parent = release.find(definition.module, ast.unparse(base))
        if parent and isinstance(parent.node, ast.ClassDef):
            found |= members(release, parent, parent.node)
    if (data := fields(node)) is not None:
        found[""] = data
    enum = any("Enum" in ast.unparse(base) or "Flag" in ast.unparse(base) for base in node.bases)
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            value = any(word in ast.unparse(d) for d in item.decorator_list for word in ("property", "setter"))
            name = "" if item.name == "__init__" else item.name
            if not name.startswith("_"):
                found[name] = None if value else arguments(item, method=True)
        elif isinstance(item, ast.Assign):
            for target in item.targets:
                other = found.get(ast.unparse(item.value))
                if isinstance(target, ast.Name) and not target.id.startswith("_") and (enum or other is not None):
                    found[target.id] = other
    return found


def described(release: Release, definition: Definition) -> dict[str, str | None]:
    """The lines of a definition: "" for itself and the members of a class, with their parameters."""
    node = definition.node
    if isinstance(node, ast.FunctionDef):
        return {"": arguments(node)}
    if isinstance(node, ast.ClassDef):
        return {"": None} | members(release, definition, node)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):  # another name of a function
        other = release.find(definition.module, node.value.id)
        if other is not None and other.node is not node and isinstance(other.node, (ast.FunctionDef, ast.ClassDef)):
            return described(release, other)
    return {"": None}


def by_home(path: str) -> tuple[bool, int, str]:
    """The order of the names of one object, the first of which it is called by: a generator of a module is jit's."""
    return not path.startswith("jit.gen_"), path.count("."), path


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("wheel", type=Path)
    release = Release(parser.parse_args().wheel)
    known = record.read()
    sections = defaultdict[tuple[str, str, str], dict[str, dict[str, str]]](lambda: defaultdict(dict))
    for definition, paths in public(release).items():
        first, *others = sorted((path.removeprefix(f"{LIBRARY}.") for path in paths), key=by_home)
        for path in (first, *others):
            module, _, name = path.rpartition(".")
            old = known.get(path)
            if path != first and old is None and not ours(f"{LIBRARY}.{module}"):
                continue  # a second name in a module that fi lacks
            section = sections[(old.kind, old.why, old.advice) if old else ("undecided", "", "")][module or "."]
            if path != first:
                section[name] = f"{name} = {first}"
                continue
            for member, given in described(release, definition).items():
                dotted = f"{name}.{member}" if member else name
                before = known.get(f"{path}.{member}" if member else path)
                note = before.note if before else ""
                section[dotted] = dotted + (f"({given})" if given is not None else "") + (f" -- {note}" if note else "")
    for path, entry in known.items():
        if entry.name == record.WHOLE:
            sections[(entry.kind, entry.why, entry.advice)][path.removesuffix(".*")]["*"] = "*"
    record.FILE.write_text(record.text(release.version, dict(sorted(sections.items()))))
    new = sections.get(("undecided", "", ""), {})
    print(f"{len(record.read())} names before; without a decision: {sorted(n for m in new.values() for n in m)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
