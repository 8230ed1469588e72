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
            f"{k.name} is from {f.origin}" for k in kernels for f in k.origins.values() if f.origin != "fi-jit-cache"
        ]
    return wrong + [f"{path} was written" for path in written() - BEFORE]


FIRST = 3  # so many tests of each file: 164 cases, 35 s; one of each test would be 620, 80 s
# Those that alone reach an op.
ALSO = {"test_block_quant", "test_first_product_with_its_activation", "test_one_rank_keeps_its_rows"}


def written() -> set[Path]:
    """What lies where compiled kernels go."""
    from fi_core.runtime.resolve import store

    return {path for root in store.roots() if root.is_dir() for path in root.iterdir()}


BEFORE = written()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the first case of some tests; `nox -s tests` runs all of them on modules of the same bytes."""
    kept: dict[str, set[str]] = {}
    chosen, left_out = [], []
    for item in items:
        file, _, test = item.nodeid.partition("[")[0].partition("::")
        tests = kept.setdefault(file, set())
        if test not in tests and (len(tests) < FIRST or test in ALSO):
            tests.add(test)
            chosen.append(item)
        else:
            left_out.append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    for line in problems():
        print(f"\nwitness: {line}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
