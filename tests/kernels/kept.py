"""Answers of slow tools, kept by what decides them: a gate asks again only about what has changed.

They lie beside the store of compiled kernels, below FI_CACHE_DIR, so that a fresh checkout finds those of the last run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable

from fi_core.runtime.env import env


def kept(question: str, *decided_by: str | bytes, ask: Callable[[], str]) -> str:
    """The answer to a question about `decided_by`: that of an earlier run, else what `ask` returns.

    What `ask` raises passes through, and nothing is kept. An answer appears by one rename, with a digest of itself; one
    that does not match its digest counts as absent, and a folder that cannot be written keeps nothing.
    """
    digest = hashlib.sha256(question.encode())
    for part in decided_by:
        content = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(content) + content)
    path = env.cache_dir / "gates" / f"{question}-{digest.hexdigest()[:32]}"
    with contextlib.suppress(OSError, ValueError):
        seal, _, answer = path.read_text().partition("\n")
        if seal == hashlib.sha256(answer.encode()).hexdigest():
            os.utime(path)
            return answer
    answer = ask()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
        with open(handle, "w") as file:
            file.write(hashlib.sha256(answer.encode()).hexdigest() + "\n" + answer)
        os.replace(name, path)
    return answer
