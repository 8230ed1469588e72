"""Where a file comes from: prebuilt packages that fit, else the store, else a compiler; and what is said of it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fi_core
from core import toy
from fi_core.build import compiler, ninja, sources, toolchain
from fi_core.errors import CompileError, MissingKernelError
from fi_core.resolve import Found, built, find, prebuilt, prepare, provider, store
from fi_core.spec.op import Artifact
from fi_core.spec.target import CPU

pytestmark = pytest.mark.usefixtures("tree")
Fresh = Callable[[], None]
Index = dict[str, Any]


@pytest.fixture(autouse=True)
def no_other_packages(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prebuilt packages that may be installed here are not what is tested."""
    monkeypatch.setattr(provider, "PACKAGES", ())
    points = metadata.entry_points

    def ours(**choice: str) -> list[Any]:
        return [p for p in points(**choice) if not p.module.startswith("fi_")]

    monkeypatch.setattr(metadata, "entry_points", ours)


@pytest.fixture
def said(tree: Path) -> Iterator[list[tuple[int, str]]]:
    """What the build logger says: (level, text)."""
    lines: list[tuple[int, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    handler = Handler()
    logging.getLogger("fi_core.jit").addHandler(handler)
    yield lines
    logging.getLogger("fi_core.jit").removeHandler(handler)


def skipped(said: list[tuple[int, str]]) -> list[str]:
    return [text for level, text in said if level >= logging.INFO and " skipped: " in text]


def pack(directory: Path, *artifacts: Artifact, mark: str = "", **head: object) -> Path:
    """A prebuilt package of these artifacts; `mark` tells its files from those of others."""
    directory.mkdir(parents=True, exist_ok=True)
    index: Index = {"version": fi_core.__version__, "schema": compiler.SCHEMA, "abi": compiler.FFI_ABI, "artifacts": {}}
    for artifact in artifacts:
        content = f"{artifact.id} {mark}".encode()
        (directory / artifact.file).write_bytes(content)
        index["artifacts"][artifact.id] = {
            "file": artifact.file,
            "closure": sources.closure(artifact),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    (directory / "index.json").write_text(json.dumps(index | head))
    return directory


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
        assert list(prebuilt(artifact)) == [
            Found(cubins / artifact.file, "FI_CUBIN_DIR"),
            Found(spare / artifact.file, "fi-spare"),
        ]
        assert next(find(artifact)) == Found(cubins / artifact.file, "FI_CUBIN_DIR")
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
    "wrong digest": (flip, "scale_n_1_cuda_sm_80.cubin does not match its digest"),
    "no file": (lambda d: (d / image().file).unlink(), "scale_n_1_cuda_sm_80.cubin: .*No such file"),
    "no such target": (drop_entry, "has no cubin/sm_80/scale_n_1_cuda_sm_80"),
    "other version": (head_change(version="0.0.1"), "its version 0.0.1 is not that of fi-core.*pip install"),
    "other abi": (head_change(abi="tvm-ffi-9"), "built for tvm-ffi-9 schema 1, this is tvm-ffi-0.1 schema 1"),
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
        assert list(prebuilt(image())) == [Found(spare / image().file, "fi-spare")]
    (line,) = skipped(said)
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
    assert skipped(said) == [
        f"{name} skipped: has no cubin/sm_90a/scale_n_1_cuda_sm_90a" for name in ("FI_CUBIN_DIR", "fi-spare")
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
    with pytest.raises(MissingKernelError, match="scale_cuda"):
        prepare([toy.spec()])
    assert store.entries() == []
    monkeypatch.setenv("FI_JIT", "on")
    path = built(image()).path
    monkeypatch.setenv("FI_JIT", "off")
    assert built(image()) == Found(path, "store")
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


def test_prepare_builds_all_through_one_ninja(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], packages: Callable[..., tuple[Path, Path]]
) -> None:
    runs: list[tuple[Any, ...]] = []
    run = ninja.run

    def counted(*arguments: Any) -> None:
        runs.append(arguments)
        run(*arguments)

    monkeypatch.setattr(ninja, "run", counted)
    packages(image(4))
    specs = [toy.spec(1), toy.spec(2, "90a"), toy.spec(3), toy.spec(4), toy.spec(1), toy.SCALE.spec(CPU, {"n": 1})]
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
    assert len(runs) == 1
    assert prepare(specs, progress=True) == 0
    assert len(runs) == 1 and capfd.readouterr().err == ""
    assert prepare(specs[:1], progress=False, rebuild=True) == 2
    assert len(runs) == 2 and capfd.readouterr().err == ""


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


@pytest.mark.parametrize(
    ("variables", "jobs"),
    [({"MAX_JOBS": "3"}, "-j3"), ({"MAX_JOBS": "3", "FI_JIT_PREBUILD_MAX_JOBS": "2"}, "-j2"), ({}, r"-j\d+")],
)
def test_jobs(variables: dict[str, str], jobs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines: list[list[str]] = []
    popen = subprocess.Popen

    def listed(line: list[str], **options: Any) -> Any:
        lines.append(list(line))
        return popen(line, **options)

    monkeypatch.setattr(subprocess, "Popen", listed)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    prepare([toy.spec()], progress=False)
    (line,) = [line for line in lines if line[0].endswith("ninja")]
    assert re.fullmatch(jobs, line[-1])


def break_source(tree: Path, name: str, line: str) -> None:
    with open(tree / name, "a") as file:
        file.write(f"{line}\n")


def build_one(artifact: Artifact) -> None:
    built(artifact)


def build_batch(artifact: Artifact) -> None:
    prepare([toy.spec()], progress=False)


@pytest.mark.parametrize("build", [build_one, build_batch])
@pytest.mark.parametrize(
    ("file", "line", "first", "hint"),
    [
        (
            "csrc/toy/scale.cc",
            "int broken( { return 1; }",
            r"building scale_cuda.*: .*scale\.cc:4:.* error: ",
            None,
        ),
        (
            "include/fi/toy/scale.cuh",
            "int broken( {",
            r"building scale_n_1_cuda_sm_80.*: .*scale\.cuh.*error: ",
            None,
        ),
        ("include/fi/toy/constant.h", "int broken = undeclared;", r"building scale_.*: .*constant\.h.*error: ", None),
        ("csrc/toy/scale.cc", '#include "absent.h"', r"building .*absent\.h: No such file", "reinstall fi-kernels"),
        ("include/fi/toy/scale.cuh", '#include "absent.h"', r"building .*absent\.h", "reinstall fi-kernels"),
    ],
)
def test_a_compile_error(
    build: Callable[[Artifact], None], file: str, line: str, first: str, hint: str | None, tree: Path, tmp_path: Path
) -> None:
    """The first line that matters, what to do, and where the rest is."""
    break_source(tree, file, line)
    host, device = toy.artifacts()
    with pytest.raises(CompileError) as error:
        build(device if file.endswith(".cuh") else host)
    assert re.match(first, error.value.first_line), error.value.first_line
    assert str(error.value).splitlines()[0] == error.value.first_line
    assert (hint is None and error.value.hint is None) or (hint and hint in str(error.value.hint))
    assert error.value.log_path == tmp_path / "cache/fi_jit.log"
    log = error.value.log_path.read_text()
    assert "FAILED" in log and line.split('"')[-2 if '"' in line else 0] in log
    assert [entry.key for entry in store.entries() if "cuda_sm" in entry.key and build is build_one] == []


def test_an_architecture_the_compiler_does_not_know() -> None:
    with pytest.raises(CompileError) as error:
        built(image(arch="990"))
    assert "older than the GPU" in str(error.value.hint)


def test_no_host_compiler(monkeypatch: pytest.MonkeyPatch, fresh: Fresh) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    fresh()
    for attempt in (lambda: built(toy.artifacts()[0]), lambda: prepare([toy.spec()], progress=False)):
        with pytest.raises(CompileError, match=r"no C\+\+ compiler found \(looked for '/nowhere/g\+\+'\)") as error:
            attempt()
        assert "fi-jit-cache" in str(error.value.hint)


def test_no_device_compiler(monkeypatch: pytest.MonkeyPatch, fresh: Fresh) -> None:
    monkeypatch.setattr(toolchain, "nvrtc", lambda: None)
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    with pytest.raises(CompileError, match="NVRTC was not found") as error:
        built(image())
    assert "fi-cubin" in str(error.value.hint) and "nvidia-cuda-nvrtc" in str(error.value.hint)
    monkeypatch.setenv("FI_CUDA_COMPILER", "nvcc")
    with pytest.raises(CompileError, match="no CUDA compiler found") as error:
        built(image())
    assert "fi-cubin" in str(error.value.hint)


def test_nvcc_alone_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh: Fresh) -> None:
    """Without NVRTC, nvcc compiles, with its words before and its host compiler."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "release 13.0" && exit\n'
        f'echo "$0 $@" >> {tmp_path}/lines\nwhile [ "$1" != -o ]; do shift; done\nprintf cubin > "$2"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("FI_NVCC", str(nvcc))
    monkeypatch.setenv("FI_NVCC_LAUNCHER", "env A=1")
    monkeypatch.setenv("CC", "g++-12")
    fresh()
    monkeypatch.setattr(toolchain, "nvrtc", lambda: None)
    assert built(image()).path.read_bytes() == b"cubin"
    line = (tmp_path / "lines").read_text()
    assert "-cubin -O3 -ccbin=g++-12 -arch=sm_80 -std=c++17" in line


def test_a_missing_launcher_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_CXX_LAUNCHER", "/nowhere/ccache")
    with pytest.raises(CompileError, match=r"building scale_cuda failed: .*/nowhere/ccache") as error:
        built(toy.artifacts()[0])
    assert "install /nowhere/ccache" in str(error.value.hint)


def test_what_a_compiler_says_is_kept(tree: Path) -> None:
    """A warning is no error; it lies beside the file."""
    host, device = toy.artifacts()
    assert [p.suffix for p in built(host).path.parent.iterdir() if p.suffix == ".log"] == []
    break_source(tree, "include/fi/toy/constant.h", "#warning mind the gap")
    host, device = toy.artifacts()
    for artifact in (host, device):
        log = built(artifact).path.with_suffix(".log")
        assert "mind the gap" in log.read_text()


def test_an_error_where_no_log_can_be_written(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "file"))
    break_source(tree, "csrc/toy/scale.cc", "broken")
    with pytest.raises(CompileError) as error:
        built(toy.artifacts()[0])
    assert error.value.log_path is None
    assert "full output" not in str(error.value)
