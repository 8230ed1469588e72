"""Nothing that another user could have put into a directory is loaded, run or written through."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core import toy
from core.console import Cli
from core.package import pack
from fi_core.ahead import prepare
from fi_core.jit import ops
from fi_core.observe import log
from fi_core.runtime import files, resolve, trust
from fi_core.runtime.build import diagnose
from fi_core.runtime.env import env
from fi_core.runtime.launch import kernel
from fi_core.runtime.resolve import built, prebuilt, store

pytestmark = pytest.mark.usefixtures("tree")
KEY = "demo-0123456789"
Give = Callable[[Path], None]


def build(directory: Path, content: bytes = b"machine code") -> None:
    (directory / "demo.so").write_bytes(content)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that is open to all and sticky, as /tmp."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.fixture
def own(tmp_path: Path) -> Path:
    place = tmp_path / "own"
    place.mkdir(mode=0o700)
    return place


def evil(fi: Path) -> Path:
    """An entry below a folder that takes the part of ~/.cache/fi."""
    root = fi / store.ENTRIES
    root.mkdir(parents=True)
    store.publish(root, KEY, lambda d: build(d, b"evil code"))
    return fi


# What another user did before us. Each returns the variable that leads us there, and its value.
def home_open_to_all(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    evil(shared / ".cache/fi")
    give(shared / ".cache")
    return "HOME", shared


def workspace_open_to_all(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    return "FI_WORKSPACE_BASE", home_open_to_all(shared, own, give)[1]


def cache_open_to_all(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    give(evil(shared / "cache"))
    return "FI_CACHE_DIR", shared / "cache"


def home_in_a_folder_of_others(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    evil(own / "home/.cache/fi")
    own.chmod(0o777)  # not sticky: they may move our folder away and back
    return "HOME", own / "home"


def our_link_into_a_shared_folder(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    evil(shared / "fi")
    give(shared / "fi")
    (own / ".cache").symlink_to(shared)
    return "HOME", own


def our_link_to_a_folder_of_theirs(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    evil(own / "theirs/fi")
    give(own / "theirs")
    (own / ".cache").symlink_to("theirs")
    return "HOME", own


def their_link_to_our_folder(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    evil(own / "fi")  # of ours, but not where we look for kernels
    (shared / ".cache").symlink_to(own)
    give(shared / ".cache")
    return "HOME", shared


def root_with_an_open_mode(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    evil(own / ".cache/fi")
    (own / ".cache/fi" / store.ENTRIES).chmod(0o777)
    return "HOME", own


def cache_of_a_group(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    evil(own / "cache")
    own.chmod(0o770)
    return "FI_CACHE_DIR", own / "cache"


def entry_of_theirs(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    give(evil(own / ".cache/fi") / store.ENTRIES / KEY)
    return "HOME", own


def file_that_they_may_write(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    (evil(own / ".cache/fi") / store.ENTRIES / KEY / "demo.so").chmod(0o666)
    return "HOME", own


def manifest_of_theirs(shared: Path, own: Path, give: Give) -> tuple[str, Path]:
    give(evil(own / ".cache/fi") / store.ENTRIES / KEY / store.MANIFEST)
    return "HOME", own


PLACES = [
    home_open_to_all, workspace_open_to_all, cache_open_to_all, home_in_a_folder_of_others,
    our_link_into_a_shared_folder, our_link_to_a_folder_of_theirs, their_link_to_our_folder, root_with_an_open_mode,
    cache_of_a_group,
]  # fmt: skip
ENTRIES = [entry_of_theirs, file_that_they_may_write, manifest_of_theirs]
Plant = Callable[[Path, Path, Give], tuple[str, Path]]


def go(plant: Plant, shared: Path, own: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plants, and leads this process there; returns the place."""
    monkeypatch.setattr(trust, "_private_group", lambda group: False)
    name, place = plant(shared, own, give)
    monkeypatch.delenv("FI_CACHE_DIR")
    monkeypatch.setenv(name, str(place))
    assert (store.roots()[0] / KEY / "demo.so").read_bytes() == b"evil code", "the plant is where we look"
    return store.roots()[0]


@pytest.mark.parametrize("plant", PLACES)
def test_a_place_that_others_may_write_is_refused_once_and_aloud(
    plant: Plant,
    shared: Path,
    own: Path,
    give: Give,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    root = go(plant, shared, own, give, monkeypatch)
    assert store.peek(KEY) is None and store.lookup(KEY) is None
    directory, now = store.get_or_build(KEY, build)
    assert now and directory == store.roots()[1] / KEY
    assert store.lookup(KEY) == directory and (directory / "demo.so").read_bytes() == b"machine code"
    assert [entry.path for entry in store.entries()] == [directory]
    store.prune(max_bytes=0)
    assert (root / KEY / "demo.so").read_bytes() == b"evil code", "nothing is removed there either"
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "no kernels are kept" in line]
    assert "WARNING" in line and str(root) in line and "set FI_CACHE_DIR to a directory of yours" in line
    assert ("belongs to another user" in line) != ("other users may write" in line and "chmod go-w" in line)


@pytest.mark.parametrize("plant", ENTRIES)
def test_an_entry_that_others_may_have_written_is_built_again(
    plant: Plant, shared: Path, own: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = go(plant, shared, own, give, monkeypatch)
    assert store.peek(KEY) is None
    directory, now = store.get_or_build(KEY, build)
    assert now and directory == root / KEY
    assert (directory / "demo.so").read_bytes() == b"machine code"


def test_a_fallback_that_another_user_made_is_refused(
    shared: Path, own: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "file").write_text("not a directory")
    monkeypatch.setenv("FI_CACHE_DIR", str(own / "file"))
    monkeypatch.setattr(store, "_shared", lambda: [shared, own])
    give(evil(shared / f"fi-cache-{os.getuid()}"))
    assert store.lookup(KEY) is None
    assert store.get_or_build(KEY, build) == (own / f"fi-cache-{os.getuid()}" / store.ENTRIES / KEY, True)


def test_places_of_ours_are_taken(shared: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home in a shared directory, a link of ours, and a folder that is open to our own group."""
    monkeypatch.delenv("FI_CACHE_DIR")
    monkeypatch.setenv("HOME", str(shared))
    assert store.get_or_build(KEY, build)[0] == shared / ".cache/fi/cached_ops" / KEY
    (own / "data").mkdir()
    (own / ".cache").symlink_to("data")
    monkeypatch.setenv("HOME", str(own))
    assert store.get_or_build(KEY, build)[0].resolve() == own / "data/fi/cached_ops" / KEY
    monkeypatch.setattr(trust, "_private_group", lambda group: True)
    (own / "data").chmod(0o770)
    assert trust.problem(own / "data") is None
    (own / "data").chmod(0o772)
    assert "other users may write" in str(trust.problem(own / "data"))
    (own / "round").symlink_to("round")
    assert "symbolic links" in str(trust.problem(own / "round"))


# The declared store of another user


def test_a_declared_store_is_read_and_never_changed(own: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = own / "theirs"
    evil(theirs)
    give(theirs)
    entry = theirs / store.ENTRIES / KEY
    os.utime(entry, (1, 1))
    assert store.lookup(KEY) is None, "nobody has declared it"
    monkeypatch.setenv("FI_SHARED_CACHE_DIR", str(theirs))
    assert store.peek(KEY) == store.lookup(KEY) == entry
    assert entry.stat().st_mtime == 1 and store.clear() == 0 and store.lookup(KEY) == entry
    assert store.get_or_build("demo-other", build)[0].parent == store.roots()[0]
    (entry / "demo.so").chmod(0o666)
    assert store.lookup(KEY) is None and entry.exists()
    (entry / "demo.so").chmod(0o600)
    theirs.chmod(0o777)
    assert store.lookup(KEY) is None, "others than its owner may write there"


def test_a_declared_store_in_a_shared_folder_is_refused(
    shared: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever came first could have made it."""
    give(evil(shared / "team"))
    monkeypatch.setenv("FI_SHARED_CACHE_DIR", str(shared / "team"))
    assert store.lookup(KEY) is None
    monkeypatch.delenv("FI_SHARED_CACHE_DIR")
    pack(shared / "cubins", {toy.artifacts()[1]: b"evil"})
    give(shared / "cubins")
    monkeypatch.setenv("FI_CUBIN_DIR", str(shared / "cubins"))
    assert [found for found in prebuilt(toy.artifacts()[1]) if found.origin == "FI_CUBIN_DIR"] == []


# What is written


def planted(precious: Path, place: Path, how: str) -> None:
    if how == "link":
        place.symlink_to(precious)
    elif how == "second name":
        os.link(precious, place)
    else:
        os.mkfifo(place)


@pytest.fixture(params=["link", "second name", "pipe"])
def plant_at(request: pytest.FixtureRequest, own: Path) -> Iterator[Callable[[Path], None]]:
    """Plants something in the place of a file; in the end a file of ours is as it was."""
    precious = own / "precious"
    precious.write_text("mine")

    def plant(place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        planted(precious, place, request.param)

    yield plant
    assert precious.read_text() == "mine"


def test_the_build_log_writes_through_nothing_planted(plant_at: Callable[[Path], None]) -> None:
    plant_at(env.cache_dir / diagnose.LOG_FILE)
    assert diagnose.log_to_file() is None
    assert built(toy.artifacts()[1]).path.exists(), "nor does it stop a build"


def test_the_api_log_writes_through_nothing_planted(
    plant_at: Callable[[Path], None], shared: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plant_at(shared / "api.log")
    handlers, propagate, level = log.logger.handlers[:], log.logger.propagate, log.logger.level
    try:
        log.configure(str(shared / "api.log"))
        log.logger.info("a call")
    finally:
        log.logger.handlers[:], log.logger.propagate = handlers, propagate
        log.logger.setLevel(level)
    said = capfd.readouterr().err
    assert said.startswith("FI_LOGDEST: [Errno ") and said.endswith("the log goes to stderr\na call\n")


def test_generated_sources_and_exports_write_through_nothing_planted(
    plant_at: Callable[[Path], None], own: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ops.view(toy.spec())
    plant_at(spec.ninja_path)
    with pytest.raises(OSError, match=r"build\.ninja"):
        spec.write_ninja()
    plant_at(own / "compile_commands.json")
    monkeypatch.setattr("fi_core.cli.modules.ops", dict)
    cli("export-compile-commands", own / "compile_commands.json", code=1)
    assert "fi-core: [Errno" in cli.err


def test_files_of_ours_are_private_whatever_the_umask(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        for artifact in toy.artifacts():
            built(artifact)
        prepare([toy.spec(2)], progress=False)
        ops.view(toy.spec()).write_ninja()
        log_file = log.files.log_handler(env.cache_dir / "api.log")
        log_file.close()
    finally:
        os.umask(before)
    found = [env.cache_dir, *env.cache_dir.rglob("*")]
    assert {"fi_jit.log", "api.log", "manifest.json", "build.ninja"} <= {path.name for path in found}
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_devices_and_open_files_can_be_logged_to(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("/dev/null", "/dev/stdout"):
        with files.opened(Path(name), "a") as file:
            file.write("a call\n")
    assert capfd.readouterr().out == "a call\n"


# What is loaded is what was hashed


def mapped(inode: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split()[4] == str(inode) for line in lines)


def test_a_module_swapped_after_its_hash_is_not_loaded(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = built(toy.artifacts()[0])
    honest, other = found.path.stat().st_ino, own / "other.so"
    shutil.copy(found.path, other)
    inode, sha256 = other.stat().st_ino, hashlib.sha256

    def swap(content: bytes = b"") -> object:
        if other.exists():
            other.replace(found.path)
        return sha256(content)

    monkeypatch.setattr(hashlib, "sha256", swap)
    kernel.load_module(found)
    assert not other.exists() and mapped(honest) and not mapped(inode)


def test_a_file_swapped_before_its_use_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one that differs; a device binary is read once, and so is hashed what goes to the driver."""
    image = toy.artifacts()[1]
    found = built(image)
    honest = found.path.read_bytes()
    found.path.write_bytes(b"evil")
    with pytest.raises(OSError, match="does not match its digest"):
        found.opened()
    with pytest.raises(OSError, match="does not match its digest"):
        kernel.load_module(found._replace(path=found.path))

    def use(found: resolve.Found) -> bytes:
        with found.opened() as file:
            return file.read()

    monkeypatch.setattr(resolve, "find", lambda _: iter([found]))
    content, origin = resolve.first_usable(image, use)
    assert content == honest and origin.origin in ("jit", "store")


def test_two_modules_are_two_although_descriptors_are_used_again() -> None:
    """glibc takes a library of a known name for the one that it has loaded."""
    inodes = []
    for artifact in (toy.artifacts()[0], toy.artifacts(1, "80")[0]._replace(flags=("-DOTHER",))):
        found = built(artifact)
        kernel.load_module(found)
        inodes.append(found.path.stat().st_ino)
        os.close(kernel._open_files[-1])
    assert len(set(inodes)) == 2 and all(map(mapped, inodes))


# Indexes of prebuilt packages


ODD = [
    None, 7, "text", [], ["file", "closure", "sha256"], {}, {"file": 7}, {"file": None}, {"file": ["a"]}, {"sha256": 7},
    {"sha256": None}, {"closure": 7}, {"file": "a\0b"}, {"file": ""}, {"file": "."}, {"file": "x" * 5000},
    {"file": "../outside.cubin"}, {"file": "folder/../../outside.cubin"}, {"file": "/etc/passwd"},
]  # fmt: skip


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:40])
def test_an_odd_index_is_a_miss(value: object, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = toy.artifacts()[1]
    folder = pack(own / "cubins", {image: b"content"})
    (own / "outside.cubin").write_bytes(b"content")
    index = json.loads((folder / "index.json").read_text())
    entry = index["artifacts"][image.id]
    index["artifacts"][image.id] = {**entry, **value} if isinstance(value, dict) and value else value
    (folder / "index.json").write_text(json.dumps(index))
    monkeypatch.setenv("FI_CUBIN_DIR", str(folder))
    assert [found for found in prebuilt(image) if found.origin == "FI_CUBIN_DIR"] == []


@pytest.mark.parametrize("text", ["[" * 100000, '{"version": {}, "artifacts": {}}', "\ufeff{}", '"text"', "NaN"])
def test_an_odd_index_file_is_a_miss(text: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pack(own / "cubins", {})
    (folder / "index.json").write_text(text)
    monkeypatch.setenv("FI_CUBIN_DIR", str(folder))
    assert [found for found in prebuilt(toy.artifacts()[1]) if found.origin == "FI_CUBIN_DIR"] == []


def test_pipes_in_a_package_hold_nobody_up(
    own: Path, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]
) -> None:
    image = toy.artifacts()[1]
    folder = pack(own / "cubins", {image: b"content"})
    monkeypatch.setenv("FI_CUBIN_DIR", str(folder))
    for name in (image.file, "index.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        fresh()
        assert [found for found in prebuilt(image) if found.origin == "FI_CUBIN_DIR"] == []
