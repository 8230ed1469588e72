"""Clean environments: the wheels installed by pip, no compiler, no right to write anywhere."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
NOBODY = 65534


@contextmanager
def open_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder that other users can read; pytest's own are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_store() -> Iterator[Path]:
    """A cache directory of the user as whom a probe runs: one that others may write to would be refused."""
    with open_folder("fi-store-") as folder:
        if os.getuid() == 0 and shutil.which("setpriv"):
            os.chown(folder, NOBODY, NOBODY)
        yield folder


@functools.cache
def drop_rights(python: Path) -> tuple[str, ...]:
    """Words before a command that take away root's power to write: another uid, that may read what root can."""
    program = shutil.which("setpriv")
    if os.getuid() or not program:
        return ()  # then the probe's report is what tells: it names every file that is opened for writing
    user = [program, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    reader = [*user, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    for words in (reader, user):
        if subprocess.run([*words, str(python), "-c", "import fi_core"], capture_output=True).returncode == 0:
            return tuple(words)
    return ()


class Site(NamedTuple):
    """A virtual environment with the third-party packages of this one (NVIDIA's left out) and some of the wheels."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def copy(self, folder: Path) -> Site:
        shutil.copytree(self.folder, folder, symlinks=True)
        return Site(folder)

    def run(self, *command: object, cwd: Path = ROOT / "docs", **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs Python here, as a user who can write nowhere, on a machine with no compiler on the path."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        home.chmod(0o555)
        places = {"PATH": str(self.python.parent), "HOME": str(home), "TMPDIR": str(home)}
        line = [*drop_rights(self.python), str(self.python), "-B", *map(str, command)]
        done = subprocess.run(line, env=places | environment, cwd=cwd, capture_output=True, text=True)
        assert list(home.iterdir()) == [], "something was written into the home directory"
        return done

    def probe(self, *ops: str, **environment: str) -> dict[str, Any]:
        """What probe.py found; its log lines are under "log"."""
        done = self.run(HERE / "probe.py", *ops, **environment)
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout), "log": done.stderr.splitlines()}

    def why(self, *arguments: str, **environment: str) -> dict[str, str]:
        """Where `fi-core why` says each kind of file comes from."""
        done = self.run(self.python.with_name("fi-core"), "why", *arguments, "--json", **environment)
        return {file["kind"]: file["from"] for file in json.loads(done.stdout)["files"]}


def make(folder: Path, wheels: list[Path]) -> Site:
    """A new environment at `folder` with these wheels."""
    new = Site(folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    places = [place for place in map(Path, sys.path) if (place / "pytest").is_dir() or (place / "torch").is_dir()]
    for path in (path for place in places for path in place.iterdir()):
        link = new.packages / path.name
        if not path.name.startswith(("fi_", "fi-", "nvidia", "__", "parent.pth")) and not link.exists():
            link.symlink_to(path)
    pip = [sys.executable, "-m", "pip", "--python", str(new.python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, *map(str, wheels)], check=True)
    return new
