"""The commit of a build: of wheels, checkouts and sdists, read without git."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import fi_core
from fi_core.runtime import revision

ROOT = Path(__file__).resolve().parents[2]
OTHER = "0123456789abcdef0123456789abcdef01234567"


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *named, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def package_in(top: Path) -> Path:
    return top / "packages/fi-core/src/fi_core"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with what a build of fi-core takes, and little else."""
    top = tmp_path / "tree"
    package_in(top).mkdir(parents=True)
    for name in (".gitignore", "VERSION", "tools/build_hook.py", "tools/lockstep.py", "packages/fi-core/pyproject.toml",
                 "packages/fi-core/README.md", "packages/fi-core/LICENSE"):  # fmt: skip
        (top / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, top / name)
    for link, target in (("build_hook.py", "../../tools"), ("lockstep.py", "../../tools")):
        (top / "packages/fi-core" / link).symlink_to(f"{target}/{link}")
    (package_in(top) / "VERSION").symlink_to("../../../../VERSION")
    (package_in(top) / "__init__.py").write_text("")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "all")
    return top


def test_a_checkout_tells_its_commit(tree: Path, tmp_path: Path) -> None:
    """On a branch, with packed branches, in a worktree, and with no branch."""
    commit = git(tree, "rev-parse", "HEAD")
    assert revision.commit_of(package_in(tree)) == commit
    git(tree, "pack-refs", "--all")
    assert revision.commit_of(package_in(tree)) == commit
    git(tree, "worktree", "add", "-q", "-b", "feature/x", str(tmp_path / "beside"))
    git(tmp_path / "beside", "commit", "-q", "--allow-empty", "-m", "more")
    beside = git(tmp_path / "beside", "rev-parse", "HEAD")
    assert revision.commit_of(package_in(tmp_path / "beside")) == beside != commit
    git(tree, "checkout", "-q", "--detach", beside)
    assert revision.commit_of(package_in(tree)) == beside


def test_no_repository_and_that_of_something_else(tree: Path, tmp_path: Path) -> None:
    inside = tree / "venv/lib/python3.12/site-packages/fi_core"
    assert revision.commit_of(inside) == "unknown"
    shutil.rmtree(tree / ".git")
    assert revision.commit_of(package_in(tree)) == "unknown"
    (package_in(tree) / "COMMIT").write_text(f"{OTHER}\n")
    assert revision.commit_of(package_in(tree)) == OTHER


def test_this_tree() -> None:
    told = fi_core.__git_commit__
    assert told == fi_core.__git_version__
    assert told == (git(ROOT, "rev-parse", "HEAD") if (ROOT / ".git").exists() else "unknown")


def built(root: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of fi-core in this folder."""
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    wheel, sdist = (next(kind(str(root)).build(directory=str(out))) for kind in (WheelBuilder, SdistBuilder))
    return Path(wheel), Path(sdist)


def told(wheel: Path, sdist: Path) -> tuple[str | None, str | None]:
    """What COMMIT says in both."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name == "fi_core/COMMIT"]
        of_wheel = archive.read(*names).decode().strip() if names else None
    with tarfile.open(sdist) as archive:
        files = [archive.extractfile(name) for name in archive.getnames() if name.count("/") == 1 and "COMMIT" in name]
        return of_wheel, files[0].read().decode().strip() if files and files[0] else None


def test_builds_hold_the_commit(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clean tree; not of one with changes; by FI_GIT_COMMIT without a repository."""
    root, commit = tree / "packages/fi-core", git(tree, "rev-parse", "HEAD")
    monkeypatch.setenv("FI_GIT_COMMIT", OTHER)
    first, again = built(root, tmp_path / "one"), built(root, tmp_path / "two")
    assert told(*first) == (commit, commit)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    (package_in(tree) / "more.py").write_text("")
    assert told(*built(root, tmp_path / "three")) == (None, None)
    shutil.rmtree(tree / ".git")
    assert told(*built(root, tmp_path / "four")) == (OTHER, OTHER)
    monkeypatch.setenv("FI_GIT_COMMIT", "main")
    with pytest.raises(ValueError, match="FI_GIT_COMMIT: a commit of 40 hex digits is required; got 'main'"):
        built(root, tmp_path / "five")


def test_a_wheel_of_an_sdist_is_the_same(tree: Path, tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    wheel, sdist = built(tree / "packages/fi-core", tmp_path / "one")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("fi_core-*/")
    (again,) = WheelBuilder(str(unpacked)).build(directory=str(tmp_path / "two"))
    assert Path(again).read_bytes() == wheel.read_bytes()
