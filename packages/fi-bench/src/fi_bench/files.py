"""Files that a user names: read whole, or appended to row by row; one that has no end or no room is a usage error."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fi_bench.errors import OutputError, UsageError


def text_of(path: Path) -> str:
    """The text of a file or pipe. OSError if it cannot be read, ValueError if it is a device or no UTF-8."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # a device may have no end
            raise ValueError(f"{path} is not a regular file")
        return file.read().decode()


def writable(path: Path, flag: str) -> Path:
    """The path, after it was opened for appending. Raises UsageError that names the flag."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{flag} {path}: not a regular file")
    try:
        with path.open("a", encoding="utf-8"):
            return path
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def append(path: Path, text: str) -> None:
    """Adds text that is on disk when this returns. Raises OutputError, and keeps the earlier text."""
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); earlier rows are kept") from None
