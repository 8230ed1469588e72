"""fi-bench: times the ops of fi-core and their peers, checks them, keeps the samples. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

__version__ = (Path(__file__).parent / "VERSION").read_text(encoding="utf-8").strip()
