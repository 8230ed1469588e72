"""pytest plugin: a sample of the tests of the ops, after which every CPU op ran, on prebuilt kernels alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def problems() -> list[str]:
    import fi_core
    from fi_core import aot
    from fi_core.registry import load
    from fi_core.runtime.spec.target import CPU

    wrong = [] if Path(fi_core.__file__).is_relative_to(sys.prefix) else [f"fi_core is {fi_core.__file__}"]
    for name, operator in load().items():
        kernels = list(operator.kernels.values())
        if not kernels and any(aot.specs(operator.op, CPU)):
            wrong.append(f"{name} did not run")
        wrong += [
            f"{k.spec} is from {f.origin}" for k in kernels for f in k.origins.values() if f.origin != "fi-jit-cache"
        ]
    return wrong + [f"{path} was written" for path in written() - BEFORE]


def written() -> set[Path]:
    """What lies where compiled kernels go."""
    from fi_core.runtime.resolve import store

    return {path for root in store.roots() if root.is_dir() for path in root.iterdir()}


BEFORE = written()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the first case of each test; `nox -s tests` runs all of them on modules of the same bytes."""
    seen: set[str] = set()
    chosen, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left_out if test in seen else chosen).append(item)
        seen.add(test)
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    for line in problems():
        print(f"\nwitness: {line}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
