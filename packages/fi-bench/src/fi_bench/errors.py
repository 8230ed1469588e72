"""Exit codes of the command, and the exceptions that carry them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OK, FAILED, USAGE, REGRESSION, AMBIGUOUS, MISMATCH, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


class UsageError(Exception):
    """The command line is wrong; one line that names the mistake and the remedy."""


class OutputError(Exception):
    """A result file cannot be written; one line that names the file."""


class SkipError(Exception):
    """A backend cannot run this case here; the text is the reason, with the command that installs a missing library."""


class MismatchError(Exception):
    """A result differs from its reference without --allow_output_mismatch."""


class ContextLostError(Exception):
    """A kernel broke the CUDA context of this process: the remaining cases run in another one."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, or nothing."""
    folded = {k.lower(): k for k in known}
    near = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""
