"""Builders, readers and cleaners of one store at once; places without room, without rights or without programs."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from core import toy
from core.test_store import KEY, SLEEPER, build, names, refuse, wait_for_build
from fi_core.ahead import prepare
from fi_core.runtime import resolve
from fi_core.runtime.build import compiler
from fi_core.runtime.launch import kernel
from fi_core.runtime.resolve import built, store
from fi_core.runtime.spec.artifact import Artifact

if TYPE_CHECKING:
    from core.conftest import Python

pytestmark = pytest.mark.usefixtures("tree")


def root() -> Path:
    return store.roots()[0]


# Cleaning while others build and read


@pytest.mark.parametrize("clean", [store.clear, lambda: store.prune(max_bytes=0)], ids=["clear", "prune"])
def test_cleaning_does_not_break_builds(clean: Callable[[], object]) -> None:
    """Neither while a compiler writes, nor between the rename and the answer."""
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            for number in range(30):
                directory, now = store.get_or_build(f"demo-{number}", lambda d: (time.sleep(0.03), build(d))[1])
                assert now and directory.parent == root()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not done.is_set():
        clean()
    worker.join()
    assert errors == []
    assert (names(root(), ".tmp-") == [] and not clean()) or store.entries() == []


CLEANER = """
import sys, time
from fi_core.runtime.resolve import store
print("building", flush=True)
while True:
    store.clear()
    time.sleep(0.001)
"""


def test_cleaning_does_not_break_readers(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose entry goes away between its look and its use builds it again."""

    def quick(artifact: Artifact, directory: Path) -> None:
        (directory / artifact.file).write_bytes(b"device binary")

    def use(found: resolve.Found) -> bytes:
        with found.opened() as file:
            return file.read()

    monkeypatch.setattr(compiler, "compile_artifact", quick)
    image = toy.artifacts()[1]
    wait_for_build(python.start(CLEANER))
    end, origins = time.monotonic() + 3, set()
    while time.monotonic() < end:
        content, found = resolve.first_usable(image, use)
        assert content == b"device binary"
        assert found.path.is_relative_to(root())
        origins.add(found.origin)
    assert origins == {"jit", "store"}, "some were read and some were cleaned away"


def test_a_stopped_builder_holds_up_nobody_for_long(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SILENT_SECONDS", 1.0)
    process = python.start(SLEEPER)
    wait_for_build(process)
    process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    assert store.get_or_build(KEY, build) == (root() / KEY, True)
    assert time.monotonic() - start < 10
    assert store.get_or_build(KEY, refuse) == (root() / KEY, False)
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("pauses", [False, True], ids=["", "while the machine sleeps"])
def test_a_builder_at_work_is_waited_for(pauses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows life although it takes longer than a silent one may; while this process is stopped nobody does."""
    if pauses:
        clock = itertools.count()
        monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    monkeypatch.setattr(store, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(store, "_BEAT_SECONDS", 0.1)
    started = threading.Event()

    def slow(directory: Path) -> None:
        started.set()
        time.sleep(2)
        build(directory)

    worker = threading.Thread(target=store.get_or_build, args=(KEY, slow))
    worker.start()
    started.wait()
    assert store.get_or_build(KEY, refuse) == (root() / KEY, False)
    worker.join()


# Places


def test_a_relative_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FI_CACHE_DIR", "relative")
    for artifact in toy.artifacts():
        found = built(artifact)
        assert found.origin == "jit" and found.path.is_relative_to(tmp_path / "relative")
    assert prepare([toy.spec(2)], progress=False) == 1
    monkeypatch.chdir("/")
    assert store.entries() == [], "it is relative to the folder of the moment"


def test_a_warm_store_needs_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = toy.artifacts()
    path = built(host).path
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(FileNotFoundError):
        tempfile.gettempdir()
    found = built(host)
    assert (found.path, found.origin) == (path, "store")
    kernel.load_module(found)
    monkeypatch.delenv("FI_CACHE_DIR")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    assert store.lookup(KEY) is None, "nor does a user without a home"


SPY = """#!/bin/sh
echo "$TMPDIR" >> {record}
exec "$@"
"""


def test_compilers_write_only_where_they_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full TMPDIR does not matter, and a killed compiler leaves its files in a folder that prune removes."""
    spy, record = tmp_path / "spy", tmp_path / "record"
    spy.write_text(SPY.format(record=record))
    spy.chmod(0o755)
    monkeypatch.setenv("FI_CXX_LAUNCHER", str(spy))
    host = built(toy.artifacts()[0])
    store.clear()
    prepare([toy.spec()], progress=False)
    places = record.read_text().splitlines()
    assert len(places) == 2 and all(Path(place).parent == root() for place in places)
    assert not any(Path(place).exists() for place in places)
    assert [path.name for path in host.path.parent.iterdir() if path.name.startswith("cc")] == []


def test_a_place_from_which_nothing_may_be_loaded_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    statvfs = os.statvfs
    store.get_or_build(KEY, build)

    def noexec(path: Path) -> object:
        found = list(statvfs(path))
        found[8] |= os.ST_NOEXEC * Path(path).is_relative_to(root().parent)
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", noexec)
    assert store.lookup(KEY) is None
    assert store.get_or_build(KEY, build)[0] == store.roots()[1] / KEY
    assert store.destination() == store.roots()[1]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "noexec" in line]
    assert str(root()) in line and "set FI_CACHE_DIR" in line


UMASK = """
import os, sys
from fi_core.runtime.resolve import store
os.umask(0o077)
print(store.lookup(sys.argv[1]))
"""


@pytest.mark.parametrize("variable", ["FI_CACHE_DIR", "FI_SHARED_CACHE_DIR"])
def test_an_entry_that_we_may_not_read_is_left_alone(
    variable: str, python: Python, tmp_path: Path, unprivileged: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sound for whoever may read it."""
    directory, _ = store.get_or_build(KEY, build)
    monkeypatch.delenv("FI_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, str(directory.parents[1]))
    for path, mode in ((directory / "demo.so", 0o600), (directory, 0o700)):
        path.chmod(0)
        assert python.run(UMASK, KEY, before=unprivileged) == "None\n"
        path.chmod(mode)
    assert python.run(UMASK, KEY, before=unprivileged) == f"{directory}\n"
    assert names(directory.parent, ".bad-") == []


def test_every_reason_is_named_when_no_place_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "open/cache"))
    monkeypatch.setattr(store, "_shared", lambda: [tmp_path / "file"])
    with pytest.raises(RuntimeError, match=r"set FI_CACHE_DIR.*other users may write into it.*Not a directory"):
        store.get_or_build(KEY, build)


def test_a_killed_compiler_leaves_nothing_outside(python: Python, tmp_path: Path) -> None:
    process = python.start(SLEEPER)
    wait_for_build(process)
    process.kill()
    process.wait()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert store.clear() == 0 and names(root(), ".tmp-") == []


def test_no_process_starts_and_no_file_changes_on_a_warm_look(monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = toy.artifacts()
    built(host)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = {path: path.stat().st_mtime_ns for path in root().rglob("*") if path.is_file()}
    assert built(host).origin == "store"
    assert {path: path.stat().st_mtime_ns for path in root().rglob("*") if path.is_file()} == before
