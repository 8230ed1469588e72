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
from typing import NamedTuple, TypeVar

from fi_core.runtime.env import Env, env

T = TypeVar("T")

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


def _shared() -> list[Path]:
    """Directories in which everybody may write."""
    return [Path(p) for p in dict.fromkeys((tempfile.gettempdir(), "/dev/shm"))]


def roots() -> list[Path]:
    """Where entries may live, in order: the cache directory, then places that are writable when home is not."""
    return [p / ENTRIES for p in (env.cache_dir, *(place / f"fi-cache-{os.getuid()}" for place in _shared()))]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def problem(directory: Path) -> str | None:
    """The reason why the entry must not be used, or None."""
    try:
        files = json.loads((directory / MANIFEST).read_bytes())["files"]
        if not files:
            return "holds no file"
        for name, (size, digest) in files.items():
            content = (directory / name).read_bytes()
            if len(content) != size or _sha256(content) != digest:
                return f"{name} does not match its manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable: {error}"
    return None


def _chosen(root: Path) -> bool:
    """Whether the user named the place; sharing it with others is then the user's decision."""
    return bool(Env.cache_dir.set_by()) and root == env.cache_dir / ENTRIES


def _safe(root: Path) -> bool:
    """Whether only this user can have put entries there: below a shared directory each folder must belong to this
    user.
    """
    if _chosen(root):
        return True
    for place in _shared():
        for path in (root, *root.parents):
            if place not in path.parents:
                break
            try:
                found = path.lstat()  # of a link: its own owner, and a mode that is open to all
            except OSError:
                return False
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                return False
    return True


def _usable() -> list[Path]:
    """The roots that exist, are readable and are safe."""
    return [root for root in roots() if os.path.isdir(root) and _safe(root)]


def _places(key: str) -> list[Path]:
    """The directories of a key, sound or not."""
    return [root / key for root in _usable() if os.path.isdir(root / key)]


def peek(key: str) -> Path | None:
    """The directory of a sound entry, or None. Unlike `lookup` it changes nothing."""
    return next((directory for directory in _places(key) if problem(directory) is None), None)


def lookup(key: str) -> Path | None:
    """The directory of a sound entry, or None. A corrupt entry is set aside, because another process may have mapped
    it.
    """
    for directory in _places(key):
        if problem(directory) is None:
            with contextlib.suppress(OSError):  # a read-only store has no last use
                os.utime(directory)
            return directory
        with contextlib.suppress(OSError):
            directory.rename(directory.with_name(f".bad-{key}-{uuid.uuid4().hex}"))
    return None


@contextlib.contextmanager
def _lock(root: Path, key: str) -> Iterator[None]:
    """Waits for another builder of the same key; continues without the lock if that fails or takes too long."""
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
        for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
            content = path.read_bytes()
            files[path.relative_to(temporary).as_posix()] = (len(content), _sha256(content))
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


def in_first_root(use: Callable[[Path], T]) -> T:
    """`use(root)` for the first root where it can write; a root that is read-only, full or not ours is skipped.

    Exceptions of `use` other than OSError pass through. RuntimeError if no root is left.
    """
    last: OSError | None = None
    for root in roots():
        try:
            for path in reversed((root, *root.parents)):
                if not os.path.isdir(path):
                    path.mkdir(mode=0o777 if _chosen(root) else 0o700, exist_ok=True)
            if not _safe(root):
                raise OSError(errno.EPERM, "directory is not ours alone", str(root.parent))
            return use(root)
        except OSError as error:
            last = error
    raise RuntimeError(
        f"no directory for compiled kernels can be written (set FI_CACHE_DIR); last tried: {last}"
    ) from last


def destination() -> Path | None:
    """The root that would be written to, or None. It creates nothing."""
    for root in roots():
        place = next((path for path in (root, *root.parents) if os.path.isdir(path)), None)
        if place and os.access(place, os.W_OK | os.X_OK) and (place != root or _safe(root)):
            return root
    return None


def get_or_build(key: str, build: Callable[[Path], None]) -> tuple[Path, bool]:
    """The entry of a key, and whether it was built now by `build(directory)`. Raises as in_first_root."""

    def find_or_build(root: Path) -> tuple[Path, bool]:
        with _lock(root, key):
            found = lookup(key)
            return (found, False) if found else (publish(root, key, build), True)

    found = lookup(key)
    return (found, False) if found else in_first_root(find_or_build)


def entries() -> list[Entry]:
    """Every published entry of every root."""
    found = []
    for root in _usable():
        for path in sorted(p for p in root.glob("[!.]*") if p.is_dir()):
            sizes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            found.append(Entry(path.name, path, sizes, path.stat().st_mtime))
    return found


def prune(max_age_days: float | None = None, max_bytes: int | None = None) -> list[Path]:
    """Removes leftovers of killed builds, entries set aside, and entries beyond the limits, least used first."""
    removed = []
    now = time.time()
    for root in _usable():
        for path in list(root.glob(".*")):
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
    """Removes every entry of every root; returns their number."""
    count = len(entries())
    for root in _usable():
        shutil.rmtree(root, ignore_errors=True)
    return count


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
