"""Writes the reference pages that are derived from the packages: one function per page, each returning MyST text."""

from __future__ import annotations

from pathlib import Path


def environment() -> str:
    """The table of fi_core.env."""
    from fi_core.env import env

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    lines = [
        "# Environment variables",
        "",
        "`FI_X` wins over its alias `FLASHINFER_X`; an empty value counts as unset; unknown variables are ignored.",
        "Read: at import, when something is built, or at each call.",
        "",
        "| variable | allowed | default | read | meaning |",
        "|---|---|---|---|---|",
    ]
    for row in env.table():
        names = "<br>".join(f"`{name}`" for name in (row.name, *row.aliases))
        lines.append(f"| {names} | {cell(row.allowed)} | {cell(row.default)} | {row.when} | {cell(row.doc)} |")
    return "\n".join(lines) + "\n"


PAGES = {"environment.md": environment}


def write_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page())
