"""A test for a special device is also marked gpu, so that `nox -s tests` leaves it out and `nox -s gpu` runs it."""

from __future__ import annotations

import ast

from house.tree import ROOT, files_of, parse, relative


def _marks(node: ast.AST) -> set[str]:
    """Names x of every pytest.mark.x below a node."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "pytest.mark"]
    return {n.attr for n in found}


def test_device_markers_come_with_gpu() -> None:
    wrong = []
    for path in files_of(ROOT / "tests", ".py"):
        tree = parse(path)
        assigned = [node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
        module = {mark for node in assigned for mark in _marks(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = module | {m for decorator in node.decorator_list for m in _marks(decorator)}
                if marks & {"sm90", "multigpu"} and "gpu" not in marks:
                    wrong.append(f"{relative(path)}:{node.lineno}: {node.name} needs pytest.mark.gpu too")
    assert not wrong, "\n".join(wrong)
