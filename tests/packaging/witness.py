"""pytest plugin: after the tests of the ops, every CPU op must have run, and every kernel must have been prebuilt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def problems() -> list[str]:
    import fi_core
    from fi_core.registry import load
    from fi_core.spec.target import CPU

    wrong = [] if Path(fi_core.__file__).is_relative_to(sys.prefix) else [f"fi_core is {fi_core.__file__}"]
    for name, launcher in load().items():
        kernels = list(launcher.kernels.values())
        on_cpu = any(not why for axes in launcher.op.grid() for why in launcher.op.explain(CPU, axes).values())
        if on_cpu and not kernels:
            wrong.append(f"{name} did not run")
        wrong += [
            f"{k.spec} is from {f.origin}" for k in kernels for f in k.origins.values() if f.origin != "fi-jit-cache"
        ]
    return wrong + [f"{path} was written" for path in written() - BEFORE]


def written() -> set[Path]:
    """What lies where compiled kernels go."""
    from fi_core.resolve import store

    return {path for root in store.roots() if root.is_dir() for path in root.iterdir()}


BEFORE = written()


def pytest_sessionfinish(session: pytest.Session) -> None:
    for line in problems():
        print(f"\nwitness: {line}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
