"""The error of a failed compile: the first line that matters, a hint, and the path of the log."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from core import toy
from core.test_resolve import Fresh, image
from fi_core.ahead import prepare
from fi_core.runtime.build import toolchain
from fi_core.runtime.errors import CompileError
from fi_core.runtime.resolve import built, store
from fi_core.runtime.spec.artifact import Artifact

pytestmark = pytest.mark.usefixtures("tree", "no_other_packages")


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
        ("csrc/toy/scale.cc", "#include <flashinfer/norm.cuh>", r"building .*norm\.cuh: No such", "headers are fi/"),
        ("include/fi/toy/scale.cuh", "#include <flashinfer/utils.cuh>", r"building .*utils\.cuh", "headers are fi/"),
        ("csrc/toy/scale.cc", '#include "absent.h"', r"building .*absent\.h: No such file", "reinstall fi-kernels"),
        ("include/fi/toy/scale.cuh", '#include "absent.h"', r"building .*absent\.h", "reinstall fi-kernels"),
    ],
)
def test_a_compile_error(
    build: Callable[[Artifact], None], file: str, line: str, first: str, hint: str | None, tree: Path, tmp_path: Path
) -> None:
    """The first line that matters, a hint, and the path of the log."""
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


def test_compiler_warnings_are_kept(tree: Path) -> None:
    """A warning is not an error; its log is stored beside the file."""
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
