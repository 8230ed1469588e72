"""Names that packages load on first use: each exists, type checkers see the same ones, and a wrong one is corrected."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fi_core.runtime.lazy import Lazy

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("stubs", ROOT / "tools" / "stubs.py")
assert spec and spec.loader
stubs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stubs)


@pytest.fixture(params=stubs.PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_every_stub_is_up_to_date() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in stubs.stubs().items() if path.read_text() != text]
    assert stale == [], "run `python tools/stubs.py`"


def test_every_name_of_a_stub_exists(package: ModuleType) -> None:
    tree = ast.parse(stubs.stub(package))
    imported = [
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {*imported, *defined, *package.__all__} - {"Any", "Iterable", "Target"}
    assert [name for name in sorted(names) if not hasattr(package, name)] == []
    assert set(package.__all__) <= {*dir(package)}


def test_a_package_with_lazy_names_has_a_stub() -> None:
    """Type checkers take a module with `__getattr__` to have every name."""
    folder = ROOT / "packages" / "fi-core" / "src"
    lazy = [path for path in folder.rglob("__init__.py") if "\ndef __getattr__(" in path.read_text()]
    assert {".".join(path.parent.relative_to(folder).parts) for path in lazy} == set(stubs.PACKAGES)


@pytest.mark.parametrize(
    ("name", "wrong", "close"),
    [
        ("fi_core", "rmsnrom", "rmsnorm"),
        ("fi_core", "BatchDecodeWithPagedKvCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"),
        ("fi_core", "nrom", "norm"),
        ("fi_core.jit", "gen_jit_specs", "gen_jit_spec"),
        ("fi_core.attention", "BatchAttentionWithSinkWrapper", "BatchAttentionWithAttentionSinkWrapper"),
        ("fi_core.testing", "bench_gpu_tme", "bench_gpu_time"),
    ],
)
def test_an_unknown_name_is_corrected(name: str, wrong: str, close: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(importlib.import_module(name), wrong)
    assert str(error.value) == f"module '{name}' has no attribute '{wrong}'; did you mean '{close}'?"


def test_a_name_like_no_other_gets_no_suggestion(package: ModuleType) -> None:
    for wrong in ("zzzzzz", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"has no attribute '{wrong}'$"):
            getattr(package, wrong)


def test_a_traceback_suggests_once() -> None:
    places = ":".join(path for path in sys.path if path)
    command = [sys.executable, "-c", "import fi_core; fi_core.rmsnrom"]
    done = subprocess.run(command, env={"PYTHONPATH": places}, capture_output=True, text=True)
    assert done.stderr.strip().endswith(
        "AttributeError: module 'fi_core' has no attribute 'rmsnrom'; did you mean 'rmsnorm'?"
    )


def test_a_module_is_imported_by_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules of fi_core that name it have the module itself from then on, so later uses cost nothing."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    users, lazy = [ModuleType(f"fi_core.user_{i}") for i in range(2)], Lazy("colorsys")
    for user in users:
        monkeypatch.setattr(user, "colorsys", lazy, raising=False)
        monkeypatch.setitem(sys.modules, user.__name__, user)
    assert "colorsys" not in sys.modules
    assert lazy.rgb_to_hsv(0.0, 0.0, 1.0) == (2 / 3, 1.0, 1.0)
    assert [user.__dict__["colorsys"] for user in users] == [sys.modules["colorsys"]] * 2
