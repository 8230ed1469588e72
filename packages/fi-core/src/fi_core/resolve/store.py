"""Content-addressed store: many readers, many racing writers, no trust in leftovers.

An entry is a directory `<root>/cached_ops/<key>/` with its files and a manifest of sizes and sha256. It appears by one
rename, so a reader sees all of it or nothing, and it is verified before it is used (dlopen of a truncated file is a
SIGBUS). The lock only saves duplicate work: correctness never depends on it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fi_core.env import env

SCHEMA = 1
ENTRIES = "cached_ops"
MANIFEST = "manifest.json"
LOCK_SECONDS = 600.0  # after that a waiter builds for itself
_STALE_SECONDS = 3600.0  # leftovers of killed builds older than this are removed by prune


class Entry(NamedTuple):
    """One published entry, as `ls` sees it."""

    key: str
    path: Path
    bytes: int
    used: float  # when the entry was last loaded, seconds since the epoch


def roots() -> list[Path]:
    """Where entries may live, in order: the cache directory, then places that are writable when home is not."""
    places = [env.cache_dir]
    places += [Path(p) / f"fi-cache-{os.getuid()}" for p in dict.fromkeys((tempfile.gettempdir(), "/dev/shm"))]
    return [p / ENTRIES for p in places]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def problem(directory: Path) -> str | None:
    """Why the entry must not be used, or None."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        for name, (size, digest) in manifest["files"].items():
            content = (directory / name).read_bytes()
            if len(content) != size or _sha256(content) != digest:
                return f"{name} does not match its manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable: {error}"
    return None


def _safe(root: Path) -> bool:
    """A root below a world-writable directory is used only if it is ours alone."""
    try:
        parts = root.parent.lstat()
    except OSError:
        return False
    shared = str(root).startswith((tempfile.gettempdir(), "/dev/shm")) and root.parent != env.cache_dir
    return not shared or (parts.st_uid == os.getuid() and not parts.st_mode & 0o022 and not root.parent.is_symlink())


def lookup(key: str) -> Path | None:
    """The directory of a sound entry, or None. A corrupt one is set aside: it may be mapped by another process."""
    for root in roots():
        directory = root / key
        if not directory.is_dir() or not _safe(root):
            continue
        if problem(directory) is None:
            with contextlib.suppress(OSError):  # a read-only store has no last use
                os.utime(directory)
            return directory
        with contextlib.suppress(OSError):
            directory.rename(root / f".bad-{key}-{uuid.uuid4().hex}")
    return None


@contextlib.contextmanager
def _lock(root: Path, key: str) -> Iterator[None]:
    """Waits for another builder of the same key; goes on without the lock where that is impossible or takes too long."""
    import filelock

    lock = filelock.FileLock(root / f".lock-{key}", timeout=LOCK_SECONDS, thread_local=False)
    try:
        lock.acquire()
    except (filelock.Timeout, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def publish(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Builds into a temporary directory of `root` and makes it the entry by one rename."""
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=root))
    try:
        build(temporary)
        files = {}
        for path in sorted(temporary.iterdir()):
            content = path.read_bytes()
            files[path.name] = (len(content), _sha256(content))
        with open(temporary / MANIFEST, "w") as manifest:
            json.dump({"schema": SCHEMA, "key": key, "files": files}, manifest)
            manifest.flush()
            os.fsync(manifest.fileno())
        temporary.chmod(0o755)
        try:
            temporary.rename(root / key)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    directory = root / key
    why = problem(directory)
    if why:
        raise OSError(errno.EIO, f"entry is unusable after publishing: {why}", str(directory))
    return directory


def get_or_build(key: str, build: Callable[[Path], None]) -> tuple[Path, bool]:
    """The entry of a key and whether it was built now.

    `build(directory)` fills a directory; what it raises passes through. A root that is read-only, full or not ours is
    passed over; RuntimeError if none is left.
    """
    found = lookup(key)
    if found:
        return found, False
    last: OSError | None = None
    for root in roots():
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _safe(root):
                raise OSError(errno.EPERM, "directory is not ours alone", str(root.parent))
            with _lock(root, key):
                found = lookup(key)
                if found:
                    return found, False
                return publish(root, key, build), True
        except OSError as error:
            last = error
    raise RuntimeError(f"no directory for compiled kernels can be written (set FI_CACHE_DIR); last tried: {last}") from last


def entries() -> list[Entry]:
    """Every published entry of every root."""
    found = []
    for root in roots():
        for path in sorted(root.glob("[!.]*")) if root.is_dir() else ():
            sizes = sum(p.stat().st_size for p in path.iterdir())
            found.append(Entry(path.name, path, sizes, path.stat().st_mtime))
    return found


def prune(max_age_days: float | None = None, max_bytes: int | None = None) -> list[Path]:
    """Removes leftovers of killed builds, entries set aside, and entries beyond the limits, least recently used first."""
    removed = []
    now = time.time()
    for root in roots():
        for path in list(root.glob(".*")) if root.is_dir() else ():
            if path.name.startswith(".bad-") or now - path.stat().st_mtime > _STALE_SECONDS:
                removed.append(path)
    kept = sorted(entries(), key=lambda e: e.used, reverse=True)
    total = 0
    for entry in kept:
        total += entry.bytes
        old = max_age_days is not None and now - entry.used > max_age_days * 86400
        if old or (max_bytes is not None and total > max_bytes):
            removed.append(entry.path)
    for path in removed:
        _remove(path)
    return removed


def clear() -> int:
    """Removes every entry of every root; returns how many there were."""
    count = len(entries())
    for root in roots():
        if root.is_dir():
            shutil.rmtree(root, ignore_errors=True)
    return count


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
