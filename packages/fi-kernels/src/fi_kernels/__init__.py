"""Where the kernel sources lie: `ROOT` holds include/ (headers) and csrc/ (host entries)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent
__version__ = (ROOT / "VERSION").read_text().strip()
