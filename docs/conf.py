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
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
nitpicky = False
exclude_patterns = ["_build"]

python_maximum_signature_line_length = 60  # longer ones take a line for each parameter
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["fi.css"]
html_title = f"fi {version}"
html_show_sourcelink = False

generate.write_all(HERE / "reference" / "_generated")
