"""Fixtures that give a test a fresh process state, for the tests of resolving, building and storing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from core import toy
from core.console import Cli
from core.dumping import dumper
from fi_core.runtime.env import env
from fi_core.runtime.resolve import provider
from kernels.mock_driver import LIBRARY, build_driver

__all__ = ["dumper"]


OTHER = 65534  # the uid of another user, "nobody"


def forget() -> None:
    """Empties every memo of fi_core's build and resolve layers, and closes the build log."""
    log = logging.getLogger("fi_core.jit")
    for handler in log.handlers[:]:
        if isinstance(handler, logging.StreamHandler):  # those of diagnose: stderr and the file
            handler.close()
            log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
    for name, module in list(sys.modules.items()):
        if name.startswith(("fi_core.runtime.build", "fi_core.runtime.resolve", "fi_core.runtime.launch.kernel")):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """An empty FI_CACHE_DIR, no other FI_ variable, nothing remembered; call it to forget again."""
    for name in [*env.present(), "CXX", "CC", "MAX_JOBS"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    forget()
    yield forget
    forget()


@pytest.fixture
def tree(fresh: Callable[[], None], tmp_path: Path) -> Iterator[Path]:
    """The sources of the toy op, in a directory of the test."""
    yield toy.plant(tmp_path / "tree")
    toy.use(toy.KERNELS)


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Gives a path, with all below it, to another user: in truth if we are root, else in the answers of lstat and
    fstat.
    """
    given: set[tuple[int, int]] = set()

    def seen(ask: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def answer(*arguments: Any, **options: Any) -> os.stat_result:
            found = ask(*arguments, **options)
            fields = list(found)
            if (found.st_dev, found.st_ino) in given:
                fields[4:6] = OTHER, OTHER
            return os.stat_result(fields)

        return answer

    def to_another(path: Path) -> None:
        for place in (path, *(path.rglob("*") if not path.is_symlink() else ())):
            state = os.lstat(place)
            given.add((state.st_dev, state.st_ino))
            if os.geteuid() == 0:
                os.chown(place, OTHER, OTHER, follow_symlinks=False)

    if os.geteuid() != 0:
        for name in ("lstat", "fstat"):
            monkeypatch.setattr(os, name, seen(getattr(os, name)))
    return to_another


class Python:
    """Starts Python processes on a text, with this process's environment."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, text: str, *arguments: object, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        """A process with pipes; `before` are words before the interpreter."""
        line = [*before, sys.executable, "-c", text, *map(str, arguments)]
        pipe = subprocess.PIPE
        self.started.append(subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return self.started[-1]

    def result(self, process: subprocess.Popen[str]) -> str:
        """Its output, after it has exited with 0."""
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return out

    def run(self, text: str, *arguments: object, before: Sequence[str] = ()) -> str:
        return self.result(self.start(text, *arguments, before=before))


@pytest.fixture
def unprivileged() -> tuple[str, ...]:
    """Words before a command that take from root the right to pass over permission bits; nothing for others."""
    return ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()


@pytest.fixture
def python(fresh: Callable[[], None]) -> Iterator[Python]:
    python = Python()
    yield python
    for process in python.started:
        with process:  # closes its pipes and waits
            process.kill()


@pytest.fixture
def bare(fresh: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a GPU and without prebuilt packages."""
    from fi_core.jit import base
    from fi_core.runtime.build import driver
    from fi_core.runtime.resolve import provider

    monkeypatch.setattr(driver, "LIBRARY", "libno-driver-here.so")
    monkeypatch.setattr(provider.metadata, "entry_points", lambda **_: [])
    monkeypatch.setattr(provider, "PACKAGES", ())
    base.context.cache_clear()
    yield
    base.context.cache_clear()


@pytest.fixture(scope="session")
def mock_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 that computes nothing."""
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def gpus(mock_driver: Path, bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU of compute capability 9.0 and one of 8.9."""
    from fi_core.runtime.build import driver

    monkeypatch.setattr(driver, "LIBRARY", str(mock_driver / LIBRARY))
    monkeypatch.setenv("FI_MOCK_CAPABILITY", "90,89")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def no_other_packages(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides installed prebuilt packages from the tests."""
    monkeypatch.setattr(provider, "PACKAGES", ())
    points = metadata.entry_points

    def ours(**choice: str) -> list[Any]:
        return [p for p in points(**choice) if not p.module.startswith("fi_")]

    monkeypatch.setattr(metadata, "entry_points", ours)
