"""`fi-core verify` finds a changed byte, a forged index, other sources or flags, and files that nothing lists."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fi_core
from core.console import Cli
from fi_core import aot, verify
from fi_core.cli import main
from fi_core.registry import ops
from fi_core.runtime.build import compiler, sources
from fi_core.runtime.resolve import provider

OP = "get_seq_lens"
FILE = f"sm_90a/{OP}-0.xz"
IMAGE = f"{FILE}/{OP}_cuda_sm_90a"


def write_record(site: Path) -> None:
    """RECORD as an installer writes it."""
    info = site / f"fi_cubin-{fi_core.__version__}.dist-info"
    rows = [f"{info.name}/RECORD,,"]
    for path in sorted(p for folder in (site / "fi_cubin", info) for p in folder.rglob("*") if p.is_file()):
        if path.name != "RECORD":
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            rows.append(f"{path.relative_to(site).as_posix()},sha256={digest},{path.stat().st_size}")
    (info / "RECORD").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with fi-cubin, which ships one small op for one architecture, with a host module beside it."""
    site = tmp_path_factory.mktemp("built")
    info = site / f"fi_cubin-{fi_core.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: fi-cubin\nVersion: {fi_core.__version__}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "ops", lambda: {OP: ops()[OP]})
        patch.setenv("FI_CUDA_ARCH_LIST", "9.0a")
        patch.setenv("FI_AOT_STORE", "1")
        aot.build(site / "fi_cubin" / "data", ("cuda", "cubin"))
    (site / "fi_cubin" / "__init__.py").write_text('"""Holds device binaries."""\n')
    write_record(site)
    return site


@pytest.fixture
def site(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> Path:
    """A copy of it, which is installed; `fi-core verify` compares what is in it when it runs."""
    shutil.copytree(built, tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    data = tmp_path / "site" / "fi_cubin" / "data"
    monkeypatch.setattr(verify, "providers", lambda: (provider.load_provider("fi-cubin", data),))
    return tmp_path / "site"


def problems(cli: Cli, *options: str) -> list[tuple[str, str]]:
    """(problem, file) of fi-cubin; the exit code is 1 where there are some."""
    code = main(["verify", "--json", *options])
    data = json.loads(cli.capsys.readouterr().out)
    (found,) = (package["problems"] for package in data["packages"] if package["name"] == "fi-cubin")
    assert (code, data["ok"]) == ((1, False) if found else (0, True))
    return [(problem["problem"], problem["file"]) for problem in found]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(site: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = site / "fi_cubin" / "data" / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index, indent=1) + "\n")


def entry(index: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = index["artifacts"][f"cubin/sm_90a/{OP}_cuda_sm_90a"]
    return found


def test_a_sound_set_is_accepted(site: Path, cli: Cli) -> None:
    assert problems(cli) == problems(cli, "--deep") == problems(cli, "--deep", "--rebuild", "2") == []


def test_a_changed_byte(site: Path, cli: Cli) -> None:
    """Against RECORD and against the index; the text names file, problem, expected and found."""
    flip(site / "fi_cubin" / "data" / FILE)
    assert problems(cli) == [("record", f"fi_cubin/data/{FILE}"), ("digest", FILE)]
    line = next(line for line in cli("verify", code=1).splitlines() if " digest " in line)
    assert line.startswith(f"fi-cubin {FILE} digest expected ") and " found " in line


def test_an_index_forged_with_its_file(site: Path, cli: Cli) -> None:
    """The digests of the index fit the other file: RECORD does not, and a rebuild does not where RECORD does."""
    path = site / "fi_cubin" / "data" / FILE
    other = aot.packed(b"another binary")

    def forge(index: dict[str, Any]) -> None:
        unpacked = hashlib.sha256(b"another binary").hexdigest()
        digest = hashlib.sha256(other).hexdigest()
        entry(index).update(sha256=digest, size=len(other), span=[0, 14], unpacked_sha256=unpacked)

    path.write_bytes(other)
    edit(site, forge)
    assert problems(cli) == [("record", "fi_cubin/data/index.json"), ("record", f"fi_cubin/data/{FILE}")]
    write_record(site)
    assert problems(cli) == []
    assert problems(cli, "--deep") == [("compiler", IMAGE)] * 2, "it names neither a compiler nor a target"
    assert problems(cli, "--rebuild", "2") == [("digest", IMAGE)]


def test_other_sources_flags_and_compilers(site: Path, cli: Cli) -> None:
    edit(site, lambda index: entry(index).update(closure="0" * 64, flags=["-O0"], compiler="nvrtc 1"))
    write_record(site)
    assert problems(cli) == [("source", IMAGE), ("flags", IMAGE), ("compiler", IMAGE)]


def test_the_installed_sources_are_compared(site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "closure", lambda artifact: f"edited {artifact.kind}")
    assert {problem for problem, _ in problems(cli)} == {"source"}


def test_files_that_are_missing_or_listed_nowhere(site: Path, cli: Cli) -> None:
    (site / "fi_cubin" / "data" / FILE).unlink()
    (site / "fi_cubin" / "data" / "more.cubin").write_bytes(b"x")
    (site / "fi_cubin" / "helper.py").write_text("")
    assert sorted(problems(cli)) == [
        ("missing", f"fi_cubin/data/{FILE}"),
        ("missing", FILE),
        ("stray", "fi_cubin/data/more.cubin"),
        ("stray", "fi_cubin/helper.py"),
    ]


def test_other_versions(site: Path, cli: Cli) -> None:
    info = site / f"fi_cubin-{fi_core.__version__}.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: fi-cubin\nVersion: 9.0\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-manylinux_9_99_sparc\n")
    edit(site, lambda index: index.update(version="9.0"))
    write_record(site)
    files = ["METADATA", "WHEEL", "WHEEL", "index.json"]
    assert problems(cli) == [("version", file) for file in files]


@pytest.mark.parametrize(
    "value", [["no entry"], {"file": "../../../etc/passwd"}, {"file": "a\0b"}, {"op": OP, "axes": 5}]
)
def test_an_index_is_data(site: Path, cli: Cli, value: object) -> None:
    edit(site, lambda index: index["artifacts"].update({f"cubin/sm_90a/{OP}_cuda_sm_90a": value}))
    assert problems(cli)


def test_a_folder_is_compared_by_its_index(
    site: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FI_CUBIN_DIR has no RECORD, which the note says."""
    folder = provider.load_provider(provider.ENV_NAME, site / "fi_cubin" / "data")
    monkeypatch.setattr(verify, "providers", lambda: (folder,))
    (site / "fi_cubin" / "data" / "more").write_text("")
    (found,) = (p for p in cli.json("verify", code=1)["packages"] if p["name"] == "FI_CUBIN_DIR")
    assert [problem["problem"] for problem in found["problems"]] == ["stray"]
    assert "no RECORD" in found["note"] and found["files"] == 2


def test_a_rebuild_by_another_compiler_says_so(site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = compiler.identity
    edit(site, lambda index: entry(index).update(unpacked_sha256="0" * 64))
    write_record(site)
    assert problems(cli, "--rebuild", "2") == [("digest", IMAGE)]
    monkeypatch.setattr(compiler, "identity", lambda artifact: f"{identity(artifact)} patched")
    assert problems(cli, "--rebuild", "2") == [("compiler", IMAGE)]


def test_wrong_arguments(cli: Cli) -> None:
    for word in ("-1", "x"):
        cli("verify", "--rebuild", word, code=2)
        assert "expected a number >= 0" in cli.err
