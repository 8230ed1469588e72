"""The wheels under test: those that `nox -s wheels` built into dist/ and installed."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fi_bench", "fi_core", "fi_cubin", "fi_jit_cache", "fi_kernels")


@pytest.fixture(scope="session")
def wheels() -> dict[str, Path]:
    """The one wheel of each package."""
    found = {name: sorted((ROOT / "dist").glob(f"{name}-*.whl")) for name in PACKAGES}
    assert {name: len(paths) for name, paths in found.items()} == dict.fromkeys(PACKAGES, 1), "run `nox -s wheels`"
    return {name: paths[0] for name, paths in found.items()}
