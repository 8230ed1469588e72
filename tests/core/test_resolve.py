"""The origin of a file: a fitting prebuilt package, else the store, else a compiler; and the log of each."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core import package, toy
from fi_core import ahead
from fi_core.ahead import prepare
from fi_core.runtime.build import compiler
from fi_core.runtime.errors import MissingKernelError
from fi_core.runtime.resolve import built, find, prebuilt, provider, store
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.target import CPU

pytestmark = pytest.mark.usefixtures("tree", "no_other_packages")
Fresh = Callable[[], None]
Index = dict[str, Any]


@pytest.fixture
def said(tree: Path) -> Iterator[list[tuple[int, str]]]:
    """The records of the build logger: (level, text)."""
    lines: list[tuple[int, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    handler = Handler()
    logging.getLogger("fi_core.jit").addHandler(handler)
    yield lines
    logging.getLogger("fi_core.jit").removeHandler(handler)


def skipped(said: list[tuple[int, str]], level: int = logging.INFO) -> list[str]:
    return [text for at, text in said if at >= level and " skipped: " in text]


def pack(directory: Path, *artifacts: Artifact, mark: str = "", **head: object) -> Path:
    """A prebuilt package of these artifacts; `mark` tells its files from those of others."""
    return package.pack(directory, {a: f"{a.id} {mark}".encode() for a in artifacts}, **head)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Fresh) -> Callable[..., tuple[Path, Path]]:
    """Makes two packages: one named by FI_CUBIN_DIR, one installed (a .dist-info with an entry point)."""

    def install(*artifacts: Artifact, **head: object) -> tuple[Path, Path]:
        site = tmp_path / "site"
        info = site / "fi_spare-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fi-spare\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{provider.GROUP}]\nspare = spare_kernels:PLACE\n")
        spare = pack(site / "spare", *artifacts, mark="spare")
        (site / "spare_kernels.py").write_text(f"PLACE = {str(spare)!r}\n")
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "spare_kernels", raising=False)
        monkeypatch.setenv("FI_CUBIN_DIR", str(pack(tmp_path / "cubins", *artifacts, mark="cubins", **head)))
        fresh()
        return tmp_path / "cubins", spare

    return install


def image(n: int = 1, arch: str = "80") -> Artifact:
    return toy.artifacts(n, arch)[1]


def test_a_package_that_fits_is_used(packages: Callable[..., tuple[Path, Path]], said: list[tuple[int, str]]) -> None:
    host, device = toy.artifacts()
    cubins, spare = packages(host, device)
    for artifact in (host, device):
        assert [f[:2] for f in prebuilt(artifact)] == [
            (cubins / artifact.file, "FI_CUBIN_DIR"),
            (spare / artifact.file, "fi-spare"),
        ]
        assert next(find(artifact))[:2] == (cubins / artifact.file, "FI_CUBIN_DIR")
    assert store.entries() == []
    assert skipped(said) == []


def edit_index(directory: Path, change: Callable[[Index], object]) -> None:
    index = json.loads((directory / "index.json").read_text())
    change(index)
    (directory / "index.json").write_text(json.dumps(index))


def entry_change(**change: object) -> Callable[[Path], None]:
    return lambda d: edit_index(d, lambda index: index["artifacts"][image().id].update(change))


def head_change(**change: object) -> Callable[[Path], None]:
    return lambda d: edit_index(d, lambda index: index.update(change))


def replace_entry(value: object) -> Callable[[Path], None]:
    return lambda d: edit_index(d, lambda index: index["artifacts"].update({image().id: value}))


def drop_entry(directory: Path) -> None:
    edit_index(directory, lambda index: index["artifacts"].pop(image().id))


def flip(directory: Path) -> None:
    path = directory / image().file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def text(content: str) -> Callable[[Path], object]:
    return lambda d: (d / "index.json").write_text(content)


MISFITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "other sources": (entry_change(closure="0" * 64), "cubin/sm_80/scale_n_1_cuda_sm_80 was built from other sources"),
    "other flags": (entry_change(flags=["-O0"]), "cubin/sm_80/scale_n_1_cuda_sm_80 was built with other flags"),
    "wrong digest": (flip, "scale_n_1_cuda_sm_80.cubin: it does not match its digest"),
    "no file": (lambda d: (d / image().file).unlink(), "scale_n_1_cuda_sm_80.cubin: .*No such file"),
    "no such target": (drop_entry, "has no scale_n_1_cuda_sm_80"),
    "other version": (head_change(version="0.0.1"), "its version 0.0.1 is not that of fi-core.*pip install"),
    "other abi": (head_change(abi="tvm-ffi-9"), "built for tvm-ffi-9 schema 3, this is tvm-ffi-0.1 schema 3"),
    "other schema": (head_change(schema=99), "built for tvm-ffi-0.1 schema 99"),
    "entry without fields": (replace_entry({}), "its index says nothing usable of cubin/sm_80"),
    "entry of another shape": (replace_entry(["file"]), "its index says nothing usable of cubin/sm_80"),
    "artifacts of another shape": (head_change(artifacts=[]), "unreadable index: index.json lists no artifacts"),
    "index of another shape": (text("[]"), "unreadable index: index.json lists no artifacts"),
    "half an index": (text('{"version"'), "unreadable index: "),
    "no index": (lambda d: (d / "index.json").unlink(), "no index.json in "),
}


@pytest.mark.parametrize(("damage", "reason"), MISFITS.values(), ids=MISFITS)
def test_a_package_that_does_not_fit_is_passed_over(
    damage: Callable[[Path], object],
    reason: str,
    packages: Callable[..., tuple[Path, Path]],
    said: list[tuple[int, str]],
) -> None:
    """One line says why, and the next one serves."""
    cubins, spare = packages(image(1), image(2))
    damage(cubins)
    for _ in range(3):
        assert [f[:2] for f in prebuilt(image())] == [(spare / image().file, "fi-spare")]
    (line,) = skipped(said, logging.DEBUG)
    assert re.fullmatch(f"FI_CUBIN_DIR skipped: {reason}.*", line), line


def test_without_any_that_fits_it_is_compiled(
    packages: Callable[..., tuple[Path, Path]], said: list[tuple[int, str]]
) -> None:
    for directory in packages(image()):
        flip(directory)
    (found,) = find(image())
    assert found.origin == "jit" and found.path.read_bytes()[:4] == b"\x7fELF"
    assert [line.split(" skipped")[0] for line in skipped(said)] == ["FI_CUBIN_DIR", "fi-spare"]
    assert [f.origin for f in find(image())] == ["store"]


def test_an_edited_header_makes_a_package_stale(
    packages: Callable[..., tuple[Path, Path]], tree: Path, fresh: Fresh
) -> None:
    packages(image())
    header = tree / "include/fi/toy/constant.h"
    header.write_text(header.read_text().replace("= 2", "= 3"))
    fresh()
    assert list(prebuilt(image())) == []
    assert next(find(image())).origin == "jit"


def test_the_version_check_can_be_turned_off(
    packages: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins, _ = packages(image(), version="0.0.1")
    monkeypatch.setenv("FI_DISABLE_VERSION_CHECK", "1")
    assert next(prebuilt(image())).path == cubins / image().file


def test_a_broken_package_breaks_nothing(
    packages: Callable[..., tuple[Path, Path]], said: list[tuple[int, str]], tmp_path: Path
) -> None:
    cubins, _ = packages(image())
    (tmp_path / "site/spare_kernels.py").write_text("raise ImportError('half installed')\n")
    assert [f.path for f in prebuilt(image())] == [cubins / image().file]
    assert skipped(said) == ["spare skipped: ImportError: half installed"]


def test_a_binary_for_an_older_target_of_the_same_major(
    packages: Callable[..., tuple[Path, Path]], said: list[tuple[int, str]], fresh: Fresh
) -> None:
    cubins, spare = packages(image(arch="80"))
    want = image(arch="86")
    assert [f.path for f in prebuilt(want)] == [cubins / image().file, spare / image().file]
    assert list(prebuilt(image(arch="90a"))) == []
    assert skipped(said) == [], "nothing is wrong with a package that does not ship everything"
    assert skipped(said, logging.DEBUG) == [
        f"{name} skipped: has no scale_n_1_cuda_sm_90a" for name in ("FI_CUBIN_DIR", "fi-spare")
    ]
    pack(spare, image(arch="80"), want, mark="spare")
    fresh()
    assert [f.path for f in prebuilt(want)] == [spare / want.file, cubins / image().file, spare / image().file]


def test_packages_of_one_kind_are_not_blamed_for_another(
    packages: Callable[..., tuple[Path, Path]], said: list[tuple[int, str]]
) -> None:
    """fi-cubin has no host modules and fi-jit-cache no device binaries: that is not worth a line."""
    packages(image())
    host, _ = toy.artifacts()
    assert list(prebuilt(host)) == []
    assert skipped(said) == []


def test_turned_off_compiling_names_the_kernel_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, packages: Callable[..., tuple[Path, Path]]
) -> None:
    monkeypatch.setenv("FI_JIT", "off")
    with pytest.raises(MissingKernelError) as error:
        list(find(image()))
    for word in ("scale_n_1_cuda_sm_80", "FI_JIT=off", 'pip install "fi-core[prebuilt]"', "fi-core prebuild"):
        assert word in str(error.value)
    assert error.value.spec == image()
    with pytest.raises(MissingKernelError, match="scale_n_1_cuda"):
        prepare([toy.spec()])
    assert store.entries() == []
    monkeypatch.setenv("FI_JIT", "on")
    path = built(image()).path
    monkeypatch.setenv("FI_JIT", "off")
    assert built(image())[:2] == (path, "store")
    cubins, _ = packages(image(2))
    assert next(find(image(2))).path == cubins / image(2).file


@pytest.mark.parametrize(("mode", "warnings"), [("on", 0), ("warn", 1)])
def test_a_compile_can_be_warned_of(
    mode: str, warnings: int, monkeypatch: pytest.MonkeyPatch, said: list[tuple[int, str]]
) -> None:
    monkeypatch.setenv("FI_JIT", mode)
    assert built(image()).origin == "jit"
    assert built(image()).origin == "store"
    lines = [text for level, text in said if level >= logging.WARNING]
    assert lines == ["scale_n_1_cuda_sm_80 is not prebuilt: compiling it"] * warnings


def test_a_long_compile_announces_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Within a second, on stderr; a short one says nothing."""
    host, device = toy.artifacts()
    with monkeypatch.context() as quick:
        quick.setattr(compiler, "compile_artifact", lambda a, folder: (folder / a.file).write_bytes(b"machine code"))
        built(device)
    assert "compiling" not in capfd.readouterr().err
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\nsleep 1.2\nexec "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("FI_CXX_LAUNCHER", str(slow))
    built(host)
    said = capfd.readouterr().err
    assert "compiling scale_cuda ..." in said
    assert "compiling scale_n_1_cuda_sm_80" not in said, "the short one does not say it later either"


def test_prepare_builds_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], packages: Callable[..., tuple[Path, Path]]
) -> None:
    names = toy.counted(monkeypatch)
    packages(image(4))
    specs = [
        toy.spec(1),
        toy.spec(2, "90a"),
        toy.spec(3),
        toy.spec(4),
        toy.spec(1),
        toy.chosen(toy.SCALE, CPU, {"n": 1}),
    ]
    assert prepare(specs, progress=True) == 5  # three binaries, one launcher for all of them, one CPU module
    progress = capfd.readouterr().err.splitlines()
    assert sorted(re.sub(r"\[\d/", "[k/", line) for line in progress if line.startswith("[")) == sorted(
        [
            f"[k/5] scale_cpu [{CPU}]",
            f"[k/5] scale_cuda [{CPU}]",
            "[k/5] scale_n_1_cuda_sm_80 [sm_80]",
            "[k/5] scale_n_2_cuda_sm_90a [sm_90a]",
            "[k/5] scale_n_3_cuda_sm_80 [sm_80]",
        ]
    )
    assert {line[:5] for line in progress} >= {"[1/5]", "[5/5]"}
    for artifact in (*toy.artifacts(1), image(2, "90a"), image(3)):
        found = built(artifact)
        assert found.origin == "store" and found.path.read_bytes()[:4] == b"\x7fELF"
    assert store.lookup(compiler.key(image(4))) is None, "it is prebuilt"
    assert len(store.entries()) == 5
    assert not [p for p in store.roots()[0].iterdir() if p.name.startswith(".tmp")]
    assert len(names) == 5
    assert prepare(specs, progress=True) == 0
    assert len(names) == 5 and capfd.readouterr().err == ""
    assert prepare(specs[:1], progress=False, rebuild=True) == 2
    assert len(names) == 7 and capfd.readouterr().err == ""


def test_prepare_and_a_single_build_make_the_same_file(fresh: Fresh, tmp_path: Path) -> None:
    prepare([toy.spec()], progress=False)
    together = [built(artifact).path.read_bytes() for artifact in toy.artifacts()]
    store.clear()
    assert [built(artifact).path.read_bytes() for artifact in toy.artifacts()] == together


def test_prepare_mends_a_damaged_entry() -> None:
    prepare([toy.spec()], progress=False)
    found = built(image())
    found.path.write_bytes(b"damaged")
    assert prepare([toy.spec()], progress=False) == 1
    assert built(image()) == found and found.path.read_bytes()[:4] == b"\x7fELF"


def test_what_is_compiled_while_serving_is_counted_and_logged(said: list[tuple[int, str]]) -> None:
    """An engine's test compares the names before and after its requests."""
    before = ahead.compiled_files()
    first, second = toy.artifacts(1)[1], toy.artifacts(2)[1]
    built(first)
    assert ahead.compiled_files() == (*before, first.name)
    assert not [text for level, text in said if level >= logging.WARNING]
    ahead.serving()
    built(first)
    built(second)
    ahead.serving(False)
    assert ahead.compiled_files() == (*before, first.name, second.name)
    assert [text for level, text in said if level >= logging.WARNING] == [f"{second.name} was compiled while serving"]
