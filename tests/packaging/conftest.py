"""The wheels under test, which `nox -s wheels` built into dist/, and environments to install them in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clean_site import ROOT, Site, make, open_folder

from kernels.mock_driver import build_driver

PACKAGES = ("fi_bench", "fi_core", "fi_cubin", "fi_jit_cache", "fi_kernels")


@pytest.fixture(scope="session")
def wheels() -> dict[str, Path]:
    """The one wheel of each package."""
    found = {name: sorted((ROOT / "dist").glob(f"{name}-*.whl")) for name in PACKAGES}
    assert {name: len(paths) for name, paths in found.items()} == dict.fromkeys(PACKAGES, 1), "run `nox -s wheels`"
    return {name: paths[0] for name, paths in found.items()}


@pytest.fixture(scope="session")
def site(wheels: dict[str, Path]) -> Iterator[Callable[..., Site]]:
    """site("fi_cubin"): an environment with fi-core, fi-kernels and these companions, each made once."""
    with open_folder("fi-site-") as base:

        @functools.cache
        def get(*companions: str) -> Site:
            return make(
                base / "-".join(("site", *companions)), [wheels[n] for n in ("fi_core", "fi_kernels", *companions)]
            )

        yield get


@pytest.fixture(scope="session")
def mock_driver() -> Iterator[Path]:
    """A folder with a libcuda.so.1 that keeps the rules of the driver and computes nothing."""
    with open_folder("fi-driver-") as folder:
        yield build_driver(folder)
