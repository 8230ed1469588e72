"""Host modules compiled ahead: `PROVIDER` is the folder whose index.json fi-core reads; a source tree has none."""

from __future__ import annotations

from pathlib import Path

PROVIDER = Path(__file__).resolve().parent / "data"
__version__ = PROVIDER.with_name("VERSION").read_text().strip()
