"""Content-addressed store: many readers, many racing writers, no trust in leftovers or in other users.

An entry is a directory `<root>/cached_ops/<key>/` with its files and a manifest of sizes and sha256, and of the inputs
that it was built from, so that an entry of another compiler is found where none can compile. It appears and
disappears by one rename, so a reader sees all of it or nothing, and it is verified before it is used (dlopen of a
truncated file is a SIGBUS). The lock only saves duplicate work: correctness never depends on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from fi_core.runtime import files, trust
from fi_core.runtime.build import diagnose
from fi_core.runtime.env import env, temporary

T = TypeVar("T")

SCHEMA = 1
ENTRIES = "cached_ops"
MANIFEST = "manifest.json"
KEY_DIGITS = 24  # of the hash at the end of a key
LOCK_SECONDS = 600.0  # after that a waiter builds for itself
SILENT_SECONDS = 3.0  # it does so earlier if the builder has shown no life for so long: it is stopped
_BEAT_SECONDS = 0.5
_POLL_SECONDS = 0.02
_STALE_SECONDS = 3600.0  # leftovers of which no lock tells whether they are in use are removed after this


class Entry(NamedTuple):
    """One published entry, as `ls` sees it."""

    key: str
    path: Path
    bytes: int
    used: float  # when the entry was last loaded, seconds since the epoch


class Place(NamedTuple):
    """Where an entry is. `owner` is another user, whose store this user has named."""

    path: Path
    owner: int | None = None


def _shared() -> list[Path]:
    """Directories in which everybody may write."""
    return list(dict.fromkeys((temporary(), Path("/dev/shm"))))


def roots() -> list[Path]:
    """Where entries may be written, in order: the cache directory, then places that are writable when home is not."""
    return [p / ENTRIES for p in (env.cache_dir, *(place / f"fi-cache-{os.getuid()}" for place in _shared()))]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest(file: Path) -> str:
    """The sha256 of a file of an entry by its manifest."""
    return str(json.loads(files.content(file.with_name(MANIFEST)))["files"][file.name][1])


def _verify(place: Place) -> None:
    """Raises OSError or ValueError with the reason why the entry must not be used."""
    trust.resolve(place.path, place.owner)
    listed = json.loads(files.private(place.path / MANIFEST, place.owner))["files"]
    if not listed:
        raise ValueError("holds no file")
    for name, (size, digest) in listed.items():
        content = files.private(place.path / name, place.owner)
        if len(content) != size or _sha256(content) != digest:
            raise ValueError(f"{name} does not match its manifest")


_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what `_verify` meets in a damaged entry


def problem(directory: Path) -> str | None:
    """The reason why the entry must not be used, or None."""
    try:
        _verify(Place(directory))
    except _DAMAGE as error:
        return str(error)
    return None


def refusal(root: Path, owner: int | None = None) -> str | None:
    """The reason why nothing is read from or written to a root, or None."""
    why = trust.problem(root, owner)
    place = next((path for path in (root, *root.parents) if os.path.isdir(path)), root)
    with contextlib.suppress(OSError):
        if why is None and os.statvfs(place).f_flag & os.ST_NOEXEC:
            return f"{place}: no program may be loaded from this file system (it is mounted noexec)"
    return why


def _refused(root: Path, owner: int | None = None) -> bool:
    """Whether a root is refused; the reason is logged once."""
    why = refusal(root, owner)
    if why:
        diagnose.once(
            logging.WARNING, f"no kernels are kept in {root}: {why}. Or set FI_CACHE_DIR to a directory of yours alone"
        )
    return why is not None


def _usable() -> list[Path]:
    """The roots that exist and that only this user writes."""
    return [root for root in roots() if os.path.isdir(root) and not _refused(root)]


def _folders() -> Iterator[Place]:
    """Where entries are read: the usable roots, and the store of another user that this user has named."""
    yield from map(Place, _usable())
    named = env.shared_cache_dir
    if named and os.path.isdir(named / ENTRIES):
        owner = trust.owner_of(named)
        if not _refused(named / ENTRIES, owner):
            yield Place(named / ENTRIES, owner)


def _places(key: str) -> Iterator[Place]:
    """Where a key has an entry, sound or not."""
    return (Place(at / key, owner) for at, owner in _folders() if os.path.isdir(at / key))


def _places_of(name: str) -> Iterator[Place]:
    """Where an artifact of this name has entries, of any inputs and compiler, sound or not."""
    for at, owner in _folders():
        yield from (Place(path, owner) for path in sorted(at.glob(f"{name}-{'[0-9a-f]' * KEY_DIGITS}")))


def peek(key: str) -> Path | None:
    """The directory of a sound entry, or None. Unlike `lookup` it changes nothing."""
    for place in _places(key):
        with contextlib.suppress(*_DAMAGE):
            _verify(place)
            return place.path
    return None


def peek_inputs(name: str, inputs: str) -> Path | None:
    """The directory of a sound entry of these inputs, by any compiler, or None. It changes nothing."""
    for path, owner in _places_of(name):
        with contextlib.suppress(*_DAMAGE):
            if json.loads(files.private(path / MANIFEST, owner)).get("inputs") == inputs:
                _verify(Place(path, owner))
                return path
    return None


def complaints(name: str) -> Iterator[str]:
    """Why an artifact of this name is not read from where it could be: places that are refused, damaged entries."""
    named = env.shared_cache_dir
    shared = [(named / ENTRIES, trust.owner_of(named))] if named and os.path.isdir(named / ENTRIES) else []
    if named and not shared:
        yield f"{named}: FI_SHARED_CACHE_DIR holds no {ENTRIES}"
    for root, owner in [*((root, None) for root in roots() if os.path.isdir(root)), *shared]:
        why = refusal(root, owner)
        if why:
            yield f"{root} is refused: {why}"
    for place in _places_of(name):
        try:
            _verify(place)
        except _DAMAGE as error:
            yield f"{place.path} is damaged: {error}"


def lookup(key: str) -> Path | None:
    """The directory of a sound entry, or None. A damaged entry is set aside, because another process may have mapped
    it; one that this process may not read is not damaged, and the store of another user is not changed.
    """
    for path, owner in _places(key):
        try:
            _verify(Place(path, owner))
        except _DAMAGE as error:
            if owner is None and getattr(error, "errno", None) != errno.EACCES:
                with contextlib.suppress(OSError):
                    path.rename(_aside(path))
            continue
        if owner is None:
            touch(path)
        return path
    return None


def touch(directory: Path) -> None:
    """Notes that an entry is used now, where it may be written."""
    with contextlib.suppress(OSError):  # a read-only store has no last use
        os.utime(directory)


def _aside(directory: Path) -> Path:
    """A name under which no reader looks and which `prune` removes."""
    return directory.with_name(f".bad-{directory.name}-{uuid.uuid4().hex}")


def _acquired(descriptor: int, limit: float) -> bool:
    """Takes the lock of a file; False if there are no locks here, or if its holder is slow or shows no life."""
    start, beat, silent = time.monotonic(), -1, 0.0
    while time.monotonic() - start <= limit and silent <= SILENT_SECONDS:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        except OSError:
            return False
        # Polls count, not the clock: what stopped this process may have stopped the holder too.
        before, beat = beat, os.fstat(descriptor).st_mtime_ns
        silent = silent + _POLL_SECONDS if beat == before else 0.0
    return False


@contextlib.contextmanager
def _lock(root: Path, key: str, limit: float) -> Iterator[None]:
    """Waits for another holder of the key; continues without the lock if that fails. A holder touches the file."""
    descriptor = os.open(root / f".lock-{key}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT_SECONDS):
            os.utime(descriptor)

    beater = threading.Thread(target=beat, daemon=True)
    try:
        if _acquired(descriptor, limit):
            beater.start()
        yield
    finally:
        done.set()
        if beater.is_alive():
            beater.join()
        _unlock(descriptor)


@contextlib.contextmanager
def scratch(root: Path) -> Iterator[Path]:
    """A temporary directory of a root. Its lock, which ends with the process, tells `prune` that it is in use."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=".tmp-", dir=root))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():  # else prune found it before it was locked
            break
        os.close(descriptor)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    """Gives the lock back although a forked process may still have the file open."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def publish(root: Path, key: str, build: Callable[[Path], None], inputs: str = "") -> Path:
    """Builds into a temporary directory of `root` and makes it the entry by one rename. inputs: as `peek_inputs`."""
    directory = root / key
    with scratch(root) as temporary:
        build(temporary)
        listed = {}
        for path in sorted(temporary.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
            if path.is_file():
                content = path.read_bytes()
                listed[path.relative_to(temporary).as_posix()] = (len(content), _sha256(content))
        with files.opened(temporary / MANIFEST, "w") as manifest:
            json.dump({"schema": SCHEMA, "key": key, "inputs": inputs, "files": listed}, manifest)
            manifest.flush()
            os.fsync(manifest.fileno())
        why = problem(temporary)
        while why is None:
            try:
                temporary.rename(directory)
                return directory
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if problem(directory) is None:
                return directory
            with contextlib.suppress(FileNotFoundError):
                directory.rename(_aside(directory))
    raise OSError(errno.EIO, f"entry is unusable after its build: {why}", str(directory))


def in_first_root(use: Callable[[Path], T]) -> T:
    """`use(root)` for the first root where it can write; one that is refused, read-only or full is passed over.

    Exceptions of `use` other than OSError pass through. RuntimeError with each reason if no root is left.
    """
    reasons = []
    for root in roots():
        try:
            if not _refused(root):
                files.make(root)
                return use(root)
            reasons.append(refusal(root))
        except OSError as error:
            reasons.append(f"{root}: {error.strerror or error}")
            diagnose.once(logging.INFO, f"no kernel is kept in {reasons[-1]}")
    tried = "; ".join(filter(None, reasons))
    raise RuntimeError(f"no directory for compiled kernels can be used (set FI_CACHE_DIR): {tried}")


def destination() -> Path | None:
    """The root that would be written to, or None. It creates nothing."""
    for root in roots():
        place = next((path for path in (root, *root.parents) if os.path.isdir(path)), None)
        if place and os.access(place, os.W_OK | os.X_OK) and not refusal(root):
            return root
    return None


def get_or_build(key: str, build: Callable[[Path], None], inputs: str = "") -> tuple[Path, bool]:
    """The entry of a key, and whether it was built now by `build(directory)`. Raises as in_first_root."""

    def find_or_build(root: Path) -> tuple[Path, bool]:
        with _lock(root, key, LOCK_SECONDS):
            found = lookup(key)
            return (found, False) if found else (publish(root, key, build, inputs), True)

    found = lookup(key)
    return (found, False) if found else in_first_root(find_or_build)


def entries() -> list[Entry]:
    """Every published entry of every root."""
    found = []
    for root in _usable():
        for path in sorted(p for p in root.glob("[!.]*") if p.is_dir()):
            with contextlib.suppress(FileNotFoundError):  # another process removes it
                sizes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
                found.append(Entry(path.name, path, sizes, path.stat().st_mtime))
    return found


def prune(max_age_days: float | None = None, max_bytes: int | None = None) -> list[Path]:
    """Removes leftovers of killed builds, entries set aside, and entries beyond the limits, least used first."""
    removed = []
    now = time.time()
    for root in _usable():
        for path in list(root.glob(".*")):
            left = _left(path)
            if left:
                _remove(left)
                removed.append(path)
    total = 0
    for entry in sorted(entries(), key=lambda e: e.used, reverse=True):
        total += entry.bytes
        old = max_age_days is not None and now - entry.used > max_age_days * 86400
        if old or (max_bytes is not None and total > max_bytes):
            with contextlib.suppress(OSError), _lock(entry.path.parent, entry.key, SILENT_SECONDS):
                _remove(entry.path.rename(_aside(entry.path)))
                removed.append(entry.path)
    return removed


def clear() -> int:
    """Removes every entry of every root, and what `prune` removes; returns the number of entries."""
    return sum(not path.name.startswith(".") for path in prune(max_bytes=0))


def _left(path: Path) -> Path | None:
    """Renames a file or directory beside the entries that nobody uses; None if somebody may use it."""
    if path.name.startswith(".bad-"):
        return path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        is_left = time.time() - os.fstat(descriptor).st_mtime > _STALE_SECONDS
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_left = is_left or path.name.startswith(".tmp-")
        except BlockingIOError:
            return None
        except OSError:
            pass  # no locks here: only its age tells
        return path.rename(_aside(path)) if is_left else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
