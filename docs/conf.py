"""Sphinx configuration; the pages under reference/_generated are written here, from the packages themselves."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(path) for path in sorted((HERE.parent / "packages").glob("*/src")))]

import generate  # noqa: E402

project = "fi"
author = "the fi contributors"
release = version = (HERE.parent / "VERSION").read_text().strip()

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = False
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"fi {version}"
html_show_sourcelink = False

generate.write_all(HERE / "reference" / "_generated")
