"""Arguments and configs go by the names that an op declares: nothing is counted out by position."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from fi_core.registry import ops
from house.tree import CORE, KERNELS, PACKAGES, files_of, parse, relative

SUFFIXES = (".py", ".h", ".cuh", ".cc", ".cu")
# An element of a config, or of the end of a call, by its number. Templates are left out: they generate the names.
BY_NUMBER = re.compile(r"\bconfig\[|\b(?:rest|args|arguments)\[-")
MOST_POSITIONAL = 5  # but for the ops of attention, whose required arguments go by position


def test_no_config_or_argument_goes_by_its_number() -> None:
    wrong = [
        f"{relative(path)}:{number}: {line.strip()}"
        for package in PACKAGES.values()
        for path in files_of(package, *SUFFIXES)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BY_NUMBER.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def operators(path: Path) -> set[str]:
    """The names of a module that `operator(OP)` is bound to."""
    return {
        target.id
        for node in parse(path).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if isinstance(node.value.func, ast.Name) and node.value.func.id == "operator"
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_calls_of_an_op_name_their_arguments() -> None:
    """A few first arguments go by position; the others by name, and none that has its default is written out."""
    sources = [path for package in PACKAGES.values() for path in files_of(package, ".py")]
    names = set().union(*map(operators, sources))
    assert len(names) >= 15
    public = {name for name in names if not name.startswith("_")}
    calls = [(path, call) for path in sources for call in calls_of(path, public | operators(path))]
    calls += [(path, call) for path in sources for call in planned_calls(path)]
    assert len(calls) >= 25
    wrong = [
        f"{relative(path)}:{call.lineno}: {ast.unparse(call)[:100]}"
        for path, call in calls
        if (len(call.args) > MOST_POSITIONAL and not path.is_relative_to(CORE / "attention"))
        or any(isinstance(a, ast.Starred) or (isinstance(a, ast.Constant) and a.value is None) for a in call.args)
    ]
    assert not wrong, "\n".join(wrong)


def planned_calls(path: Path) -> list[ast.Call]:
    """The calls `p.add(OP, ...)` of a module, as calls of the op."""
    return [
        ast.copy_location(ast.Call(call.args[0], call.args[1:], call.keywords), call)
        for call in calls_of(path, {"add"})
        if call.args and isinstance(call.args[0], ast.Name) and call.args[0].id.isupper()
    ]


def calls_of(path: Path, names: set[str]) -> list[ast.Call]:
    """The calls of these names in a module."""
    return [
        node
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in names
    ]


def test_host_entries_take_the_generated_arguments() -> None:
    """`void op(const Kernel&, const OpArgs&)`, beside `OpRequest request_of(const OpArgs&)` if requests have fields."""
    wrong = []
    for path in files_of(KERNELS / "csrc", ".cc"):
        text, stem = path.read_text(), "".join(word.capitalize() for word in path.stem.split("_"))
        entries = re.findall(r"^FI_OP\(([^)]*)\)", text, re.MULTILINE)
        taken = re.findall(rf"\(const Kernel& ?\w*,\s*const {stem}Args& \w+", text)
        made = re.findall(rf"^{stem}Request request_of\(const {stem}Args& \w+\) {{", text, re.MULTILINE)
        asked = f"fi::{path.stem}, fi::request_of" if made else f"fi::{path.stem}"
        if entries != [asked] or not taken or bool(made) != bool(ops()[path.stem].fields):
            wrong.append(f"{relative(path)}: FI_OP({'; '.join(entries)})")
    assert not wrong, "\n".join(wrong)
