"""`fi-core doctor`: the finding for each kind of missing or broken software, its repair command, and the exit code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import fi_core
from core.console import Cli, artifacts
from core.package import pack
from fi_core.cli import doctor, machine
from fi_core.jit import base, ops
from fi_core.registry import ops as all_ops
from fi_core.runtime.build import driver, sources, toolchain
from fi_core.runtime.resolve import provider, store
from fi_core.runtime.spec.target import CPU

pytestmark = pytest.mark.usefixtures("bare")
Fresh = Callable[[], None]


def levels(cli: Cli, code: int = 0) -> dict[str, tuple[str, str, str]]:
    """Level, text and remedy by what they are about."""
    found = cli.json("doctor", code=code)
    assert found["ok"] is (code == 0)
    return {f["what"]: (f["level"], f["text"], f["fix"]) for f in found["findings"]}


def test_doctor_on_a_sound_machine(cli: Cli) -> None:
    found = levels(cli)
    assert {what: level for what, (level, *_) in found.items() if level not in ("ok", "note")} == {}
    assert {"fi-core", "torch", "apache-tvm-ffi", "GPU", "cache", "host modules"} <= set(found)
    assert re.match(r"0 of \d+ are there; /.* compiles the others on first use", found["host modules"][1])
    assert cli("doctor").endswith("\nAll is well.\n")
    assert not store.roots()[0].parent.exists(), "it only looks"


def test_doctor_without_a_compiler(cli: Cli, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler is missing only if something needs it."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(toolchain, "nvrtc", lambda: None)
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    level, text, fix = levels(cli, code=1)["host modules"]
    assert level == "FAIL" and "there is no C++ compiler for the others" in text
    assert fix == "apt-get install g++ (or: pip install fi-jit-cache)"
    assert "\n      fix: apt-get install g++" in cli("doctor", code=1)
    assert levels(cli, code=1)["CUDA compiler"][1] == "there is none, and none is needed without a GPU"

    every = dict.fromkeys(
        (a for s in ops.specs_of(all_ops().values(), [CPU]) for a in sources.artifacts(s)), b"content"
    )
    folder = pack(tmp_path / "prebuilt", every)
    monkeypatch.setenv("FI_CUBIN_DIR", str(folder))
    fresh()
    assert levels(cli)["host modules"][:2] == ("ok", f"{len(every)} of {len(every)} are there")

    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0")
    base.context.cache_clear()
    level, text, fix = levels(cli, code=1)["device binaries"]
    assert level == "FAIL" and "there is no CUDA compiler for the others" in text
    assert "pip install nvidia-cuda-nvrtc" in fix and "pip install fi-cubin" in fix


@pytest.mark.parametrize("program", ["/bin/false", "/bin/true", "g++ --no-such-option"])
def test_doctor_tries_the_compiler(program: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name is not yet a compiler, and trying it leaves no file."""
    monkeypatch.setenv("CXX", program)
    monkeypatch.chdir(tmp_path)
    level, text, fix = levels(cli, code=1)["host modules"]
    assert level == "FAIL" and "does not compile the others: " in text
    assert text.split(": ")[-1] and fix.startswith("apt-get install g++")
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


def test_doctor_with_compiling_forbidden(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_JIT", "off")
    level, text, fix = levels(cli)["host modules"]
    assert (level, fix) == ("warn", "FI_JIT=on fi-core prebuild")
    assert "FI_JIT=off forbids to compile the others" in text
    monkeypatch.setenv("CXX", "no-such-compiler")
    doctor.toolchain.cxx.cache_clear()
    level, text, fix = levels(cli)["host modules"]
    assert (level, fix) == ("warn", "apt-get install g++ (or: pip install fi-jit-cache)"), "prebuild could not compile"
    assert "there is no C++ compiler" in text


def test_doctor_on_settings(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_CUDA_ARCHLIST", "9.0")
    monkeypatch.setenv("FI_PROVIDER", "efa")  # of libfabric: not ours to judge
    assert levels(cli)["setting"] == (
        "warn",
        "FI_CUDA_ARCHLIST is not read; is FI_CUDA_ARCH_LIST meant?",
        "unset FI_CUDA_ARCHLIST",
    )
    monkeypatch.delenv("FI_CUDA_ARCHLIST")
    monkeypatch.setenv("MAX_JOBS", "many")
    assert levels(cli, code=1) == {
        "setting": ("FAIL", "MAX_JOBS: allowed are an integer >= 1; got 'many'", "unset MAX_JOBS")
    }


@pytest.mark.parametrize(
    ("torch", "level", "text"),
    [
        (None, "FAIL", "missing; torch>=2.10 is needed"),
        (machine.Torch("2.9.1", None), "FAIL", "2.9.1 does not fit; torch>=2.10 is needed"),
        (machine.Torch("2.10.0+cpu", None), "ok", "2.10.0+cpu"),
    ],
)
def test_doctor_on_torch(
    torch: machine.Torch | None, level: str, text: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: torch)
    fix = "pip install 'torch>=2.10'" if level == "FAIL" else ""
    assert levels(cli, code=level == "FAIL")["torch"] == (level, text, fix)


@pytest.mark.parametrize(
    ("version", "fits"), [("0.1.8", False), ("0.1.9", True), ("0.1.15.post2", True), ("0.2.0", False)]
)
def test_doctor_on_tvm_ffi(version: str, fits: bool, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = machine.version
    monkeypatch.setattr(machine, "version", lambda name: version if name == "apache-tvm-ffi" else versions(name))
    level, _, fix = levels(cli, code=not fits)["apache-tvm-ffi"]
    assert (level, fix) == (("ok", "") if fits else ("FAIL", "pip install 'apache-tvm-ffi>=0.1.9,<0.2'"))


@pytest.mark.parametrize(
    ("package", "fix"),
    [
        ("fi-kernels", f"pip install fi-kernels=={fi_core.__version__}"),
        ("apache-tvm-ffi", "pip install 'apache-tvm-ffi>=0.1.9,<0.2'"),
        ("jinja2", "pip install jinja2"),
    ],
)
def test_doctor_finds_a_missing_package(package: str, fix: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is named; checks that need it are skipped."""
    module = {"fi-kernels": "fi_kernels", "apache-tvm-ffi": "tvm_ffi"}.get(package, package)
    find, version = doctor.importlib.util.find_spec, machine.version
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda n, *rest: None if n == module else find(n, *rest))
    monkeypatch.setattr(machine, "version", lambda n: None if n == package else version(n))
    toolchain.tvm_ffi_root.cache_clear()
    found = levels(cli, code=1)
    assert (found[package][0], found[package][2]) == ("FAIL", fix)
    assert ("host modules" in found) == (package == "jinja2")


def test_doctor_requires_the_declared_versions() -> None:
    text = (Path(__file__).parents[2] / "packages" / "fi-core" / "pyproject.toml").read_text()
    (declared,) = re.findall(r"^dependencies = \[(.*)\]", text, re.MULTILINE)
    least, below = doctor.TVM_FFI
    assert f'"apache-tvm-ffi>={least},<{below}"' in declared
    assert f'"torch>={doctor.TORCH[0]}"' in declared


def test_doctor_on_gpus(cli: Cli, gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: machine.Torch("2.13.0", "13.0"))
    found = levels(cli)
    assert found["GPU 0"] == ("ok", "Mock GPU, compute capability 9.0", "")
    assert found["GPU 1"] == ("ok", "Mock GPU, compute capability 8.9", "")
    assert found["device binaries"][0] == "ok"
    monkeypatch.setattr(machine, "torch_build", lambda: machine.Torch("2.13.0+cpu", None))
    assert "2.13.0+cpu is built without CUDA" in cli("doctor", code=1)
    monkeypatch.setenv("FI_MOCK_STATUS", "803")
    driver.driver.cache_clear()
    base.context.cache_clear()
    level, text, _ = levels(cli, code=1)["NVIDIA driver"]
    assert level == "FAIL" and "cuInit failed with 803" in text


def test_doctor_on_packages(cli: Cli, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host,) = artifacts(CPU)
    folder = pack(tmp_path / "prebuilt", {host: b"host"}, version="0.0.1")
    monkeypatch.setattr(provider, "PACKAGES", ("fi_jit_cache",))
    assert levels(cli)["fi-jit-cache"] == ("note", provider.EMPTY, "")

    class Point:
        name, dist = "fi-cubin", None

        def load(self) -> Path:
            return folder

    monkeypatch.setattr(provider.metadata, "entry_points", lambda **_: [Point()])
    fresh()
    level, text, fix = levels(cli, code=1)["fi-cubin"]
    assert level == "FAIL" and f"its version 0.0.1 is not that of fi-core, {fi_core.__version__}" in text
    assert fix == f"pip install fi-cubin=={fi_core.__version__}"
    monkeypatch.setenv("FI_CUBIN_DIR", str(tmp_path / "nowhere"))
    fresh()
    assert levels(cli, code=1)["FI_CUBIN_DIR"][1] == f"not used: no index.json in {tmp_path / 'nowhere'}"


def test_doctor_on_the_cache(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next place is a warning, no place at all is a failure, unless nothing may be compiled anyway."""
    cache = tmp_path / "cache" / "cached_ops"
    monkeypatch.setattr(store.os, "access", lambda path, mode: not tmp_path.samefile(path))
    text = cli("doctor")
    assert f"warn  cache: {cache} cannot be written; kernels go to {tmp_path / 'tmp'}" in text
    assert "fix: export FI_CACHE_DIR=DIRECTORY" in text
    with monkeypatch.context() as refused:
        refused.setattr(store, "refusal", lambda root: "open to all" if root == cache else None)
        text = cli("doctor")
    assert f"warn  cache: {cache} is not used (open to all); kernels go to {tmp_path / 'tmp'}" in text
    monkeypatch.setattr(store.os, "access", lambda path, mode: False)
    level, text, fix = levels(cli, code=1)["cache"]
    assert (level, fix) == ("FAIL", "export FI_CACHE_DIR=DIRECTORY")
    assert text == f"no directory for compiled kernels can be written, {cache} neither"
    monkeypatch.setenv("FI_JIT", "off")
    assert levels(cli)["cache"][0] == "note"
