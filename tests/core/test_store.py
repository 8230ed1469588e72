"""The store: one build among many processes, no trust in leftovers, another place where one cannot be written."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fi_core.runtime.resolve import store

if TYPE_CHECKING:
    from core.conftest import Python

pytestmark = pytest.mark.usefixtures("fresh")
KEY = "demo-0123456789"


def build(directory: Path, content: bytes = b"machine code") -> None:
    (directory / "demo.so").write_bytes(content)


def refuse(directory: Path) -> None:
    raise AssertionError("built again")


def cache() -> Path:
    return store.roots()[0]


def second() -> Path:
    return store.roots()[1]


def names(root: Path, prefix: str) -> list[str]:
    return sorted(path.name for path in root.glob(f"{prefix}*"))


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    assert store.lookup(KEY) is None
    assert store.get_or_build(KEY, build) == (tmp_path / "cache/cached_ops" / KEY, True)
    directory, now = store.get_or_build(KEY, refuse)
    assert not now
    assert store.lookup(KEY) == directory
    assert (directory / "demo.so").read_bytes() == b"machine code"
    assert store.lookup("demo-other") is None
    assert names(cache(), ".tmp-") == []


def test_a_failed_build_leaves_nothing() -> None:
    def fail(directory: Path) -> None:
        build(directory)
        raise ValueError("the compiler refuses")

    with pytest.raises(ValueError, match="the compiler refuses"):
        store.get_or_build(KEY, fail)
    assert store.entries() == []
    assert names(cache(), ".tmp-") == []
    assert store.get_or_build(KEY, build)[1]


def flip(directory: Path) -> None:
    content = bytearray((directory / "demo.so").read_bytes())
    content[5] ^= 1
    (directory / "demo.so").write_bytes(content)


def truncate(directory: Path) -> None:
    os.truncate(directory / "demo.so", 4)


def lose(directory: Path) -> None:
    (directory / "demo.so").unlink()


def manifest(text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / store.MANIFEST).write_text(text)


DAMAGE = {
    "flipped bit": flip,
    "truncated": truncate,
    "lost file": lose,
    "lost manifest": lambda directory: (directory / store.MANIFEST).unlink(),
    "empty manifest": manifest(""),
    "garbage manifest": manifest('{"files": {"demo.so"'),
    "other json": manifest("[1, 2]"),
    "no files": manifest("{}"),
    "empty files": manifest('{"files": {}}'),
    "files of another shape": manifest('{"files": {"demo.so": 12}}'),
    "files as a list": manifest('{"files": ["demo.so"]}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_set_aside_and_built_again(damage: Callable[[Path], object]) -> None:
    directory, _ = store.get_or_build(KEY, build)
    inode = directory.stat().st_ino
    damage(directory)
    assert store.lookup(KEY) is None
    again, now = store.get_or_build(KEY, lambda d: build(d, b"new code"))
    assert now and again == directory
    assert (again / "demo.so").read_bytes() == b"new code"
    aside = names(cache(), ".bad-")
    assert len(aside) == 1, "a process may have the old file mapped: it is moved, not removed"
    assert (cache() / aside[0]).stat().st_ino == inode
    assert [entry.key for entry in store.entries()] == [KEY]


MANY = """
import sys, time
from pathlib import Path
from fi_core.runtime.resolve import store
def build(directory):
    with open(sys.argv[1], "a") as count:
        count.write("built\\n")
    time.sleep(0.4)
    (directory / "demo.so").write_bytes(b"machine code")
sys.stdin.readline()
directory, now = store.get_or_build("demo-many", build)
print(now, (directory / "demo.so").read_bytes() == b"machine code")
"""


def test_of_many_cold_processes_one_builds(python: Python, tmp_path: Path) -> None:
    processes = [python.start(MANY, tmp_path / "count") for _ in range(12)]
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = sorted(python.result(process).strip() for process in processes)
    assert answers == ["False True"] * 11 + ["True True"]
    assert (tmp_path / "count").read_text().splitlines() == ["built"]


KERNEL = """
import sys
from core import toy
from fi_core.runtime.resolve import built, store
toy.use(sys.argv[1])
found = built(toy.artifacts()[0])
print(found.origin, found.path)
"""
NAME = """
import sys
from core import toy
from fi_core.runtime.build import compiler
toy.use(sys.argv[1])
print(compiler.key(toy.artifacts()[0]))
"""
RMSNORM = """
from core import toy
from fi_core.runtime.build import sources
from fi_core.registry import operator
from fi_core.runtime.resolve import built
from fi_core.runtime.spec.target import Target
op = operator("rmsnorm").op
host, _ = sources.artifacts(toy.chosen(op, Target("cuda", "80"), next(op.grid())))
found = built(host)
print(found.origin, found.path)
"""


def test_of_cold_processes_one_compiles_a_kernel(
    python: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "counting"
    counter.write_text(f'#!/bin/sh\necho compiled >> {tmp_path / "count"}\nexec "$@"\n')
    counter.chmod(0o755)
    monkeypatch.setenv("FI_CXX_LAUNCHER", str(counter))
    answers = [python.result(p).split() for p in [python.start(RMSNORM) for _ in range(8)]]
    assert sorted(origin for origin, _ in answers) == ["jit"] + ["store"] * 7
    (path,) = {path for _, path in answers}
    assert Path(path).read_bytes()[:4] == b"\x7fELF"
    assert (tmp_path / "count").read_text().splitlines() == ["compiled"]


SLEEPER = """
import sys, time
from fi_core.runtime.resolve import store
def build(directory):
    (directory / "demo.so").write_bytes(b"half of the co")
    print("building", flush=True)
    time.sleep(600)
store.get_or_build("demo-0123456789", build)
"""


def wait_for_build(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert process.stdout.readline() == "building\n"


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_killed_builder_holds_up_nobody(python: Python) -> None:
    process = python.start(SLEEPER)
    wait_for_build(process)
    process.kill()
    process.wait()
    start = time.monotonic()
    directory, now = store.get_or_build(KEY, build)
    assert now and time.monotonic() - start < 5
    assert (directory / "demo.so").read_bytes() == b"machine code"
    (leftover,) = names(cache(), ".tmp-")
    assert cache() / leftover in store.prune()
    assert names(cache(), ".tmp-") == []


def test_prune_leaves_what_a_living_build_writes(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    """However old it is; without locks only its age tells."""
    process = python.start(SLEEPER)
    wait_for_build(process)
    (leftover,) = names(cache(), ".tmp-")
    long_ago = time.time() - 7200
    os.utime(cache() / leftover, (long_ago, long_ago))
    assert store.prune() == [] and store.clear() == 0
    assert (cache() / leftover / "demo.so").exists()
    process.kill()
    process.wait()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    os.utime(cache() / leftover)
    assert store.prune() == []
    os.utime(cache() / leftover, (long_ago, long_ago))
    assert store.prune() == [cache() / leftover]


def test_a_waiter_builds_for_itself_in_the_end(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.3)
    wait_for_build(python.start(SLEEPER))
    assert store.get_or_build(KEY, build) == (cache() / KEY, True)


def test_without_file_locks_it_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none: the lock saves work and decides nothing."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert store.get_or_build(KEY, build)[1]
    assert not store.get_or_build(KEY, refuse)[1]


def test_of_two_builders_without_a_lock_the_first_one_counts() -> None:
    def meanwhile(directory: Path) -> None:
        store.publish(cache(), KEY, build)
        build(directory, b"the same, built again")

    cache().mkdir(parents=True)
    assert store.publish(cache(), KEY, meanwhile) == cache() / KEY
    assert (cache() / KEY / "demo.so").read_bytes() == b"machine code"
    assert names(cache(), ".tmp-") == []


def test_a_full_root_is_passed_over() -> None:
    def full(directory: Path) -> None:
        if directory.is_relative_to(cache()):
            raise OSError(errno.ENOSPC, "No space left on device")
        build(directory)

    directory, now = store.get_or_build(KEY, full)
    assert now and directory == second() / KEY
    assert store.get_or_build(KEY, refuse) == (directory, False)


MOUNT = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
FULL = """
import os, subprocess, sys
from core import toy
from fi_core.runtime.build import compiler
from fi_core.runtime.env import env
from fi_core.ahead import prepare
from fi_core.runtime.resolve import built, store
toy.use(sys.argv[1])
env.cache_dir.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12k", "none", str(env.cache_dir)], check=True)
for artifact in toy.artifacts(1):
    print(built(artifact).path)
prepare([toy.spec(2)], progress=False)
print(store.lookup(compiler.key(toy.artifacts(2)[1])))
print(*os.listdir(env.cache_dir / store.ENTRIES))
"""


def can_mount() -> bool:
    probe = [*MOUNT, "mount", "-t", "tmpfs", "none", "/mnt"]  # in a namespace that ends with the command
    return bool(shutil.which("unshare")) and subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="nobody may mount a file system here; another test simulates a full one")
def test_on_a_full_disk_compilers_use_the_next_root(python: Python, tree: Path) -> None:
    """g++ and NVRTC, one by one and in parallel, against a file system of 12 KB."""
    *paths, left = python.run(FULL, tree, before=MOUNT).splitlines()
    assert len(paths) == 3
    place = Path(tempfile.gettempdir())  # not second(): in the namespace we may have another uid
    assert all(Path(path).is_relative_to(place) and Path(path).exists() for path in paths), paths
    assert [name for name in left.split() if not name.startswith(".lock-")] == []


def test_a_read_only_root_is_passed_over(
    python: Python, tree: Path, tmp_path: Path, unprivileged: tuple[str, ...]
) -> None:
    """Compiled into the next root, and found there; nothing is logged to the place either."""
    (tmp_path / "cache").mkdir(mode=0o555)
    origin, path = python.run(KERNEL, tree, before=unprivileged).split()
    assert origin == "jit" and Path(path).is_relative_to(second())
    assert python.run(KERNEL, tree, before=unprivileged).split() == ["store", path]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_lock_that_we_may_not_open_is_passed_over(python: Python, tree: Path, unprivileged: tuple[str, ...]) -> None:
    """Of another user: the next root serves, and the lock stays."""
    cache().mkdir(parents=True)
    lock = cache() / f".lock-{python.run(NAME, tree).strip()}"
    lock.touch(mode=0o000)
    origin, path = python.run(KERNEL, tree, before=unprivileged).split()
    assert origin == "jit" and Path(path).is_relative_to(second())
    assert python.run(KERNEL, tree, before=unprivileged).split() == ["store", path]
    assert lock.exists()


def test_a_sound_entry_of_a_read_only_root_is_used(python: Python, tree: Path, unprivileged: tuple[str, ...]) -> None:
    origin, path = python.run(KERNEL, tree).split()
    assert origin == "jit"
    for folder in (cache(), cache().parent):
        folder.chmod(0o555)
    assert python.run(KERNEL, tree, before=unprivileged).split() == ["store", path]


@pytest.mark.parametrize("variable", ["HOME", "FI_CACHE_DIR"])
def test_a_place_we_may_not_look_into_is_passed_over(
    python: Python,
    tree: Path,
    tmp_path: Path,
    unprivileged: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    monkeypatch.delenv("FI_CACHE_DIR")
    monkeypatch.setenv(variable, str(closed / "inside"))
    origin, path = python.run(KERNEL, tree, before=unprivileged).split()
    assert origin == "jit" and Path(path).is_relative_to(second())
    counts = KERNEL + "print(len(store.entries()), store.clear())"
    assert python.run(counts, tree, before=unprivileged).split()[2:] == ["1", "1"]


def test_no_place_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(store, "_shared", lambda: [tmp_path / "file"])
    with pytest.raises(RuntimeError, match=r"set FI_CACHE_DIR.*file"):
        store.get_or_build(KEY, build)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_our_folder_in_a_shared_directory_is_private(
    umask: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "file"))
    before = os.umask(umask)
    try:
        directory, now = store.get_or_build(KEY, build)
    finally:
        os.umask(before)
    assert now and directory == second() / KEY
    assert stat.S_IMODE(second().parent.stat().st_mode) == 0o700
    assert store.get_or_build(KEY, refuse) == (directory, False)


OTHER_USER = """
import os, sys
from pathlib import Path
from fi_core.runtime.resolve import store
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
def build(directory):
    (directory / "demo.so").write_bytes(b"machine code")
for key in sys.argv[1:]:
    directory, now = store.get_or_build(key, build)
    print(now, directory, directory.stat().st_uid)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_reads_our_store_and_writes_its_own(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users read a FI_CACHE_DIR that one user filled; they build missing entries elsewhere."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        monkeypatch.setenv("FI_CACHE_DIR", str(place / "cache"))
        (place / "home").mkdir(mode=0o700)
        monkeypatch.setenv("HOME", str(place / "home"))
        monkeypatch.setenv("TMPDIR", str(place / "tmp"))
        (place / "tmp").mkdir()
        (place / "tmp").chmod(0o1777)
        directory, _ = store.get_or_build(KEY, build)
        for path in (*directory.parents[:2], directory):
            path.chmod(0o755)
        for path in directory.iterdir():
            path.chmod(0o644)
        shared, own = python.run(OTHER_USER, KEY, "demo-own").splitlines()
        assert shared == f"False {place}/cache/cached_ops/{KEY} 0"
        assert own == f"True {place}/tmp/fi-cache-65534/cached_ops/demo-own 65534"
        monkeypatch.delenv("FI_CACHE_DIR")
        assert python.run(OTHER_USER, "demo-own") == own.replace("True", "False") + "\n"


def test_entries_prune_and_clear() -> None:
    keys = ["demo-a", "demo-b", "demo-c"]
    for age, key in enumerate(keys):
        directory, _ = store.get_or_build(key, lambda d: build(d, b"x" * 1000))
        then = time.time() - 86400 * age
        os.utime(directory, (then, then))
    entries = {entry.key: entry for entry in store.entries()}
    assert sorted(entries) == keys
    for key, entry in entries.items():
        assert entry.path == cache() / key
        assert entry.bytes == sum(p.stat().st_size for p in entry.path.iterdir()) > 1000
    assert entries["demo-a"].used > entries["demo-b"].used > entries["demo-c"].used
    assert store.prune() == []
    store.lookup("demo-c")  # is used now, so the least recently used one is b
    assert store.prune(max_age_days=0.5) == [cache() / "demo-b"]
    assert store.prune(max_bytes=2 * entries["demo-a"].bytes) == []
    assert store.prune(max_bytes=entries["demo-a"].bytes) == [cache() / "demo-a"]
    assert [entry.key for entry in store.entries()] == ["demo-c"]
    (cache() / ".bad-demo-d-1").mkdir()
    assert store.prune() == [cache() / ".bad-demo-d-1"]
    assert store.clear() == 1
    assert store.entries() == []
    assert store.lookup("demo-c") is None
    assert store.clear() == 0


def test_the_cache_directory_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store.get_or_build(KEY, build)
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert store.lookup(KEY) is None
    assert store.get_or_build(KEY, build) == (tmp_path / "elsewhere/cached_ops" / KEY, True)
    monkeypatch.delenv("FI_CACHE_DIR")
    monkeypatch.setenv("FI_WORKSPACE_BASE", str(tmp_path / "base"))
    assert store.get_or_build(KEY, build) == (tmp_path / "base/.cache/fi/cached_ops" / KEY, True)
