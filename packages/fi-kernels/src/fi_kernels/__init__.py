"""Where the kernel sources lie: `ROOT` holds include/ (headers), csrc/ (host entries), templates/ (Jinja units)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent
__version__ = (ROOT / "VERSION").read_text().strip()
