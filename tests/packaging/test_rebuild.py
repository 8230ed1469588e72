"""What `nox -s rebuild` calls different, and the provenance that lies beside the wheels."""

from __future__ import annotations

import hashlib
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pytest
from clean_site import ROOT

TOOLS = ROOT / "tools"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    import provenance
    import rebuild

    return rebuild, provenance


def wheel(folder: Path, cubin: bytes = b"code", *, preset: int = 6, level: int = 6, module: bytes = b"elf") -> Path:
    """A wheel with a packed device binary, a module, an index and a bill of materials."""
    folder.mkdir(exist_ok=True)
    shipped = lzma.compress(cubin * 1000, preset=preset)
    digest = hashlib.sha256(shipped).hexdigest()
    entry = {"sha256": digest, "size": len(shipped), "unpacked_sha256": hashlib.sha256(cubin * 1000).hexdigest()}
    index = {"compilers": {"nvrtc": preset}, "artifacts": {"one": entry}}
    parts = [{"type": "file", "hashes": [digest]}, {"type": "application", "version": preset}]
    files = {
        "fi_x/data/sm_80/one-0.xz": shipped,
        "fi_x/data/x86_64/one.so": module,
        "fi_x/data/index.json": json.dumps(index).encode(),
        "fi_x-1.dist-info/sboms/fi-x.cdx.json": json.dumps({"components": parts}).encode(),
        "fi_x-1.dist-info/RECORD": digest.encode(),
    }
    with zipfile.ZipFile(folder / "fi_x-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return folder


def test_equal_folders_have_no_difference(tools: Any, tmp_path: Path) -> None:
    rebuild, _ = tools
    assert rebuild.compare(wheel(tmp_path / "a"), wheel(tmp_path / "b")) == []


def test_a_difference_is_named(tools: Any, tmp_path: Path) -> None:
    """By entry, sizes and offset; a file of one folder alone too."""
    rebuild, _ = tools
    a, b = wheel(tmp_path / "a"), wheel(tmp_path / "b", module=b"eLf!")
    (line, *_) = rebuild.compare(a, b)
    assert line == "fi_x-1-py3-none-any.whl: fi_x/data/x86_64/one.so: 3 and 4 bytes, the first difference at 1"
    assert rebuild.compare(a, b, by_content=True)[0] == line
    (b / "fi_y-1-py3-none-any.whl").write_bytes(b"")
    assert "fi_y-1-py3-none-any.whl: only in the second folder" in rebuild.compare(a, b)
    with pytest.raises(FileNotFoundError, match="a folder with wheels is required"):
        rebuild.compare(a, tmp_path / "none")


def test_other_packing_of_the_same_content(tools: Any, tmp_path: Path) -> None:
    """Differs by bytes, and does not by content; other machine code does by both."""
    rebuild, _ = tools
    a, b = wheel(tmp_path / "a"), wheel(tmp_path / "b", preset=0, level=1)
    assert rebuild.compare(a, b) != []
    assert rebuild.compare(a, b, by_content=True) == []
    lines = rebuild.compare(a, wheel(tmp_path / "c", b"edoc"), by_content=True)
    assert [line.split(": ")[1] for line in lines] == ["fi_x/data/index.json", "fi_x/data/sm_80/one-0.xz"]


def test_provenance_names_every_file(tools: Any, tmp_path: Path) -> None:
    """An in-toto statement: digests of the files, the commit, and the packages that built them; no time."""
    _, provenance = tools
    folder = wheel(tmp_path / "dist")
    made = provenance.statement(folder, "nox -s wheels")
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://slsa.dev/provenance/v1"
    (path,) = folder.iterdir()
    assert made["subject"] == [{"name": path.name, "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}]
    definition = made["predicate"]["buildDefinition"]
    commit = definition["externalParameters"]["commit"]
    assert definition["resolvedDependencies"][0]["digest"] == {"gitCommit": commit} and len(commit) == 40
    assert {"pkg:pypi/hatchling", "pkg:pypi/apache-tvm-ffi"} <= {
        d["uri"].partition("@")[0] for d in definition["resolvedDependencies"]
    }
    assert made == provenance.statement(folder, "nox -s wheels")
    with pytest.raises(FileNotFoundError, match="a folder with wheels or sdists is required"):
        provenance.statement(tmp_path / "none", "")
