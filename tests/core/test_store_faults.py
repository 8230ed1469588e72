"""FI_JIT=off and a store: entries of any compiler serve, and what is damaged or refused is named in the error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from core import package, toy
from fi_core.runtime.build import compiler, toolchain
from fi_core.runtime.errors import MissingKernelError
from fi_core.runtime.resolve import Found, built, first_usable, provider, store
from fi_core.runtime.spec.artifact import Artifact

pytestmark = pytest.mark.usefixtures("tree", "no_other_packages")


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> tuple[Artifact, Path]:
    """A device binary in the store, and its entry; nothing may be compiled any more."""
    image = toy.artifacts()[1]
    monkeypatch.setattr(compiler, "compile_artifact", lambda a, folder: (folder / a.file).write_bytes(b"machine code"))
    entry = built(image).path.parent
    monkeypatch.setenv("FI_JIT", "off")
    return image, entry


def test_an_entry_of_another_compiler_serves(
    filled: tuple[Artifact, Path], monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]
) -> None:
    """Of a patched NVRTC or none at all; with a compiler and FI_JIT=on the entry is not its own."""
    image, entry = filled
    for identity in ("none", "libnvrtc-builtins.so.13.9:1:2"):
        monkeypatch.setattr(compiler, "identity", lambda artifact, identity=identity: identity)
        assert compiler.key(image) != entry.name
        assert built(image)[:2] == (entry / image.file, "store")
    monkeypatch.setenv("FI_JIT", "on")
    assert built(image).origin == "jit"


def test_a_machine_without_a_compiler_takes_it_with_jit_on(
    filled: tuple[Artifact, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, entry = filled
    monkeypatch.setenv("FI_JIT", "on")
    for name in ("nvrtc", "nvcc"):
        monkeypatch.setattr(toolchain, name, lambda: None)
    assert built(image)[:2] == (entry / image.file, "store")


@pytest.mark.parametrize("what", ["sources", "flags", "abi"])
def test_an_entry_of_other_inputs_does_not(
    what: str, filled: tuple[Artifact, Path], tree: Path, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]
) -> None:
    image, _ = filled
    monkeypatch.setattr(compiler, "identity", lambda artifact: "another")
    if what == "sources":
        header = tree / "include/fi/toy/constant.h"
        header.write_text(header.read_text() + "// Edited.\n")
        fresh()
    elif what == "flags":
        monkeypatch.setenv("FI_EXTRA_CUDAFLAGS", "-DX")
    else:
        monkeypatch.setattr(compiler, "FFI_ABI", "tvm-ffi-9")
    with pytest.raises(MissingKernelError, match=f"store: has no {image.name}-"):
        built(image)


def cut(entry: Path) -> None:
    file = next(entry.glob("*.cubin"))
    file.write_bytes(file.read_bytes()[:5])


def clear(entry: Path) -> None:
    file = next(entry.glob("*.cubin"))
    file.write_bytes(bytes(file.stat().st_size))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut, r"is damaged: \S+\.cubin does not match its manifest"),
    "zeros": (clear, r"is damaged: \S+\.cubin does not match its manifest"),
    "broken manifest": (lambda entry: (entry / "manifest.json").write_text('{"files"'), "is damaged: "),
    "empty manifest": (
        lambda entry: (entry / "manifest.json").write_text('{"files": {}}'),
        "is damaged: holds no file",
    ),
    "open to others": (lambda entry: entry.parent.chmod(0o777), "is refused: .*other users may write into it"),
    "file open to others": (lambda entry: next(entry.glob("*.cubin")).chmod(0o666), "is damaged: .*another user can"),
}


@pytest.mark.parametrize(("damage", "cause"), FAULTS.values(), ids=FAULTS)
def test_the_cause_is_in_the_error(damage: Callable[[Path], object], cause: str, filled: tuple[Artifact, Path]) -> None:
    """And the entry stays where it is, since nobody can build it again."""
    image, entry = filled
    damage(entry)
    with pytest.raises(MissingKernelError, match=cause) as error:
        built(image)
    assert str(entry.parent) in str(error.value)
    assert entry.is_dir()


@pytest.mark.parametrize("when", [30_000_000, 2_100_000_000], ids=["1971", "2036"])
@pytest.mark.parametrize("jit", ["off", "on"])
def test_an_entry_by_a_wrong_clock_serves(
    when: int, jit: str, filled: tuple[Artifact, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, entry = filled
    monkeypatch.setenv("FI_JIT", jit)
    for path in (entry.parent, entry, *entry.iterdir()):
        os.utime(path, (when, when))
    assert built(image)[:2] == (entry / image.file, "store")
    assert store.entries()[0].path == entry


def test_the_store_of_another_user(filled: tuple[Artifact, Path], give: Callable[[Path], None]) -> None:
    image, entry = filled
    give(entry.parent)
    with pytest.raises(MissingKernelError, match=r"is refused: .*it belongs to another user \(uid 65534\)"):
        built(image)


def test_a_shared_store_that_is_none(
    filled: tuple[Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, entry = filled
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FI_SHARED_CACHE_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(MissingKernelError, match="elsewhere: FI_SHARED_CACHE_DIR holds no cached_ops"):
        built(image)
    monkeypatch.setenv("FI_SHARED_CACHE_DIR", str(entry.parents[1]))
    monkeypatch.setattr(compiler, "identity", lambda artifact: "another")
    assert built(image)[:2] == (entry / image.file, "store")


def test_the_reason_of_each_package_is_in_the_error(
    filled: tuple[Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]
) -> None:
    image, entry = filled
    cut(entry)
    folder = package.pack(tmp_path / "cubins", {image: b"code"})
    (folder / image.file).write_bytes(b"edoc")
    monkeypatch.setenv(provider.ENV_NAME, str(folder))
    fresh()
    with pytest.raises(MissingKernelError) as error:
        built(image)
    lines = str(error.value).splitlines()[1:]
    assert [line.split(": ")[0].strip() for line in lines] == ["FI_CUBIN_DIR", "store"]
    assert "it does not match its digest" in lines[0] and "is damaged" in lines[1]


def test_a_package_whose_file_does_not_load_is_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]
) -> None:
    """A sound file that the driver refuses, and nothing else: not that no package is installed."""
    image = toy.artifacts()[1]
    monkeypatch.setenv(provider.ENV_NAME, str(package.pack(tmp_path / "cubins", {image: b"code"})))
    monkeypatch.setenv("FI_JIT", "off")
    fresh()

    def refuse(found: Found) -> None:
        raise RuntimeError("libcuda.so.1 not found")

    with pytest.raises(MissingKernelError, match=f"FI_CUBIN_DIR: {image.id}: libcuda.so.1 not found") as error:
        first_usable(image, refuse)
    assert "is installed" not in str(error.value)


def test_with_a_compiler_a_damaged_entry_is_built_again(
    filled: tuple[Artifact, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, entry = filled
    cut(entry)
    monkeypatch.setenv("FI_JIT", "on")
    assert built(image)[:2] == (entry / image.file, "jit")
    assert store.problem(entry) is None
