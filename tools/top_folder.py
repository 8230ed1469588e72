"""The build backend of the top folder, which is no package: it says what to install, where setuptools would build an
empty one.
"""

from __future__ import annotations

from typing import Any, NoReturn

COMMAND = "pip install --no-build-isolation -e packages/fi-core -e packages/fi-kernels -e packages/fi-bench"


def build_wheel(*place: Any, **options: Any) -> NoReturn:
    """Raises SystemExit: there is no wheel of the top folder."""
    raise SystemExit(f"The top folder is no package. Install those in packages/:\n    {COMMAND}")


build_editable = build_sdist = build_wheel
