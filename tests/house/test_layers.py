"""Imports run one way: families -> launch -> resolve -> build -> spec; env and errors import nothing of fi."""

from __future__ import annotations

from house.tree import CORE, PACKAGES, files_of, imports, module_name

# What each layer may import of fi_core, besides itself.
LEAVES = {"env", "errors"}
HELPERS = LEAVES | {"utils", "backend"}
ALLOWED: dict[str, set[str]] = {
    "env": set(),
    "errors": set(),
    "utils": LEAVES | {"backend"},
    "backend": LEAVES,
    "observe": HELPERS,
    "testing": HELPERS,
    "spec": LEAVES,
    "build": LEAVES | {"spec"},
    "resolve": LEAVES | {"spec", "build"},
    "launch": {"errors", "spec", "build", "resolve"},  # not env: the launch path never reads the environment
}
SOURCES = files_of(CORE, ".py")


def layer(module: str) -> str:
    """The first name below fi_core; "" for fi_core itself."""
    return [*module.split("."), ""][1]


def test_layers_import_downwards() -> None:
    assert {layer(module_name(path)) for path in SOURCES} >= set(ALLOWED), "a layer of the table has no module"
    wrong = []
    for path in SOURCES:
        here = layer(module_name(path))
        if here not in ALLOWED:
            continue  # families, the registry and the CLI stand on top and may import all of them
        for item in imports(path):
            there = layer(item.module)
            if item.module.startswith("fi_core.") and there not in ALLOWED[here] | {here}:
                wrong.append(f"{item}: {here} may import {', '.join(sorted(ALLOWED[here])) or 'nothing of fi_core'}")
    assert not wrong, "\n".join(wrong)


def test_packages_import_as_declared() -> None:
    """fi-core stands on fi-kernels alone; the data packages stand on nothing; fi-bench stands on fi-core."""
    allowed = {
        "fi_core": {"fi_kernels"},
        "fi_kernels": set(),
        "fi_jit_cache": set(),
        "fi_cubin": set(),
        "fi_bench": {"fi_core"},
    }
    assert set(allowed) == set(PACKAGES)
    wrong = [
        str(item)
        for name, folder in PACKAGES.items()
        for path in files_of(folder, ".py")
        for item in imports(path)
        if (package := item.module.split(".")[0]) in PACKAGES and package not in allowed[name] | {name}
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_is_not_imported_at_import() -> None:
    """`import fi_core` and its families never import torch; functions do when they are called."""
    exempt = {CORE / "launch" / "torch_op.py"}
    wrong = [
        str(item)
        for path in SOURCES
        if path not in exempt and not path.is_relative_to(CORE / "testing")
        for item in imports(path)
        if item.at_import and item.module.split(".")[0] in ("torch", "numpy", "tvm_ffi")
    ]
    assert not wrong, "\n".join(wrong)
