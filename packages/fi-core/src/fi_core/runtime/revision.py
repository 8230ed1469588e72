"""The commit that this package is of, read from files: git is not called."""

from __future__ import annotations

import functools
from pathlib import Path

UNKNOWN = "unknown"
_CHECKOUT = ("packages", "fi-core", "src")  # between the top of a checkout and this package


@functools.cache
def commit() -> str:
    """The commit of this package, 40 hex digits; "unknown" where neither the package nor a checkout tells."""
    return commit_of(Path(__file__).parents[1])


def commit_of(package: Path) -> str:
    """The commit in the file COMMIT, which wheels hold; else the one that the checkout around the package has checked
    out, with or without changes; else "unknown".
    """
    written = package / "COMMIT"
    try:
        if written.is_file():
            return written.read_text(encoding="ascii").strip()
        if package.parts[-4:-1] == _CHECKOUT:
            return _head(package.parents[3] / ".git") or UNKNOWN
    except (OSError, ValueError):
        pass
    return UNKNOWN


def _head(git: Path) -> str | None:
    """The commit that HEAD names. `git` is the folder of a repository, or the file in a worktree that leads to it."""
    if git.is_file():
        git = git.parent / git.read_text().partition("gitdir: ")[2].strip()
    found = (git / "HEAD").read_text().strip()
    if not found.startswith("ref: "):
        return found
    name = found.removeprefix("ref: ")
    of_worktree = git / "commondir"  # a worktree shares the branches of its repository
    shared = git / of_worktree.read_text().strip() if of_worktree.is_file() else git
    if (shared / name).is_file():
        return (shared / name).read_text().strip()
    packed = shared / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
