"""fi_core.runtime.env and fi_core.runtime.errors: names, aliases, defaults, parsing, and the attributes of errors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fi_core.runtime import errors
from fi_core.runtime.env import Env, env

ROWS = {row.name: row for row in env.table()}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.present():
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("attribute", "name", "text", "value"),
    [
        ("workspace_base", "FI_WORKSPACE_BASE", "~/x", Path.home() / "x"),
        ("cache_dir", "FI_CACHE_DIR", "/cache", Path("/cache")),
        ("xdg_cache_home", "XDG_CACHE_HOME", "/xdg", Path("/xdg")),
        ("shared_cache_dir", "FI_SHARED_CACHE_DIR", "shared", Path.cwd() / "shared"),
        ("cubin_dir", "FI_CUBIN_DIR", "/cubins", Path("/cubins")),
        ("disable_version_check", "FI_DISABLE_VERSION_CHECK", "0", True),  # any non-empty value
        ("jit", "FI_JIT", "WARN", "warn"),
        ("cuda_compiler", "FI_CUDA_COMPILER", "nvcc", "nvcc"),
        ("cuda_arch_list", "FI_CUDA_ARCH_LIST", " 8.0  9.0a 12.0f", ("8.0", "9.0a", "12.0f")),
        ("jit_verbose", "FI_JIT_VERBOSE", "1", True),
        ("jit_debug", "FI_JIT_DEBUG", "0", False),
        ("jit_lineinfo", "FI_JIT_LINEINFO", "on", True),
        ("jit_prebuild_max_jobs", "FI_JIT_PREBUILD_MAX_JOBS", "3", 3),
        ("aot_store", "FI_AOT_STORE", "1", True),
        ("aot_ops", "FI_AOT_OPS", "rmsnorm, sample", ("rmsnorm", "sample")),
        ("aot_machine", "FI_AOT_MACHINE", "aarch64", "aarch64"),
        ("max_jobs", "MAX_JOBS", "7", 7),
        ("no_color", "NO_COLOR", "1", True),
        ("force_color", "FORCE_COLOR", "1", True),
        ("term", "TERM", "dumb", "dumb"),
        ("nvcc", "FI_NVCC", "/opt/nvcc", "/opt/nvcc"),
        ("nvcc_threads", "FI_NVCC_THREADS", "4", 4),
        ("nvcc_launcher", "FI_NVCC_LAUNCHER", "ccache", ("ccache",)),
        ("cxx_launcher", "FI_CXX_LAUNCHER", "nice -n 5", ("nice", "-n", "5")),
        ("delays", "FI_DELAYS", "Waits", "waits"),
        ("sanitize", "FI_SANITIZE", "undefined, address", ("address", "undefined")),
        ("extra_cflags", "FI_EXTRA_CFLAGS", "-DA='x y' -g", ("-DA=x y", "-g")),
        ("extra_cudaflags", "FI_EXTRA_CUDAFLAGS", "-G", ("-G",)),
        ("extra_ldflags", "FI_EXTRA_LDFLAGS", "-lm", ("-lm",)),
        ("cxx", "CXX", "ccache g++", ("ccache", "g++")),
        ("cc", "CC", "gcc-12", "gcc-12"),
        ("cuda_home", "CUDA_HOME", "/cuda", Path("/cuda")),
        ("check", "FI_CHECK", "1", True),
        ("batch_invariant", "FI_BATCH_INVARIANT", "1", True),
        ("allow_experimental_auto_backends", "FI_ALLOW_EXPERIMENTAL_AUTO_BACKENDS", "1", True),
        ("vllm_layers", "FI_VLLM_LAYERS", "1", True),
        ("autotune_cache_dir", "FI_AUTOTUNE_CACHE_DIR", "a", Path.cwd() / "a"),
        ("logging_level", "FI_LOGGING_LEVEL", "DEBUG", "debug"),
        ("loglevel", "FI_LOGLEVEL", "10", 10),
        ("logdest", "FI_LOGDEST", "log_%i.txt", "log_%i.txt"),
        ("dump_dir", "FI_DUMP_DIR", "d", Path.cwd() / "d"),
        ("dump_max_size_gb", "FI_DUMP_MAX_SIZE_GB", "0.5", 0.5),
        ("dump_max_count", "FI_DUMP_MAX_COUNT", "0", 0),
        ("dump_include", "FI_DUMP_INCLUDE", "rms*, *Wrapper.run,", ("rms*", "*Wrapper.run")),
        ("dump_exclude", "FI_DUMP_EXCLUDE", "a", ("a",)),
        ("trace_dump", "FI_TRACE_DUMP", "0", False),
        ("trace_dump_dir", "FI_TRACE_DUMP_DIR", "t", Path.cwd() / "t"),
        ("trace_apply_path", "FI_TRACE_APPLY_PATH", "s", Path.cwd() / "s"),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, attribute: str, name: str, text: str, value: Any) -> None:
    unset = getattr(env, attribute)
    monkeypatch.setenv(name, "")
    assert getattr(env, attribute) == unset, "an empty value counts as unset"
    monkeypatch.setenv(name, text)
    assert getattr(env, attribute) == value
    assert type(getattr(env, attribute)) is type(value)
    if name.startswith("FI_"):
        alias = name.replace("FI_", "FLASHINFER_", 1)
        monkeypatch.delenv(name)
        monkeypatch.setenv(alias, text)
        assert getattr(env, attribute) == value
        assert next(row.set_by for row in env.table() if row.name == name) == alias
        monkeypatch.setenv(name, text)
        monkeypatch.setenv(alias, "not looked at")
        assert getattr(env, attribute) == value, "FI_ wins"


def test_every_variable_is_tried_above() -> None:
    (mark,) = [m for m in test_values.pytestmark if m.name == "parametrize"]
    assert {case[1] for case in mark.args[1]} == ROWS.keys() - {"FI_DISABLE_JIT"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FI_JIT", "maybe"),
        ("FI_CUDA_COMPILER", "clang"),
        ("FI_CUDA_ARCH_LIST", "9.0;10.0"),
        ("FI_CUDA_ARCH_LIST", "sm_90"),
        ("FI_CUDA_ARCH_LIST", "  "),
        ("MAX_JOBS", "0"),
        ("MAX_JOBS", "many"),
        ("FI_NVCC_THREADS", "1.5"),
        ("FI_JIT_VERBOSE", "2"),
        ("FI_EXTRA_CFLAGS", "'open"),
        ("FI_SANITIZE", "address,thread"),
        ("FI_LOGLEVEL", "-1"),
        ("FI_LOGGING_LEVEL", "loud"),
        ("FI_DUMP_MAX_SIZE_GB", "nan"),
        ("FLASHINFER_CHECK", "yes?"),
    ],
)
def test_bad_values_name_variable_allowed_and_got(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    row = next(row for row in env.table() if name in (row.name, *row.aliases))
    with pytest.raises(ValueError, match=name) as caught:
        getattr(env, row.name.removeprefix("FI_").lower())
    assert str(caught.value) == f"{name}: allowed are {row.allowed}; got {text!r}"


def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where fi's own variables do not say otherwise."""
    monkeypatch.delenv("FI_CACHE_DIR", raising=False)
    monkeypatch.delenv("FI_WORKSPACE_BASE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir == tmp_path / "xdg" / "fi"
    monkeypatch.setenv("FI_WORKSPACE_BASE", str(tmp_path))
    assert env.cache_dir == tmp_path / ".cache" / "fi"


def test_cache_dir_follows_workspace_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir == tmp_path / ".cache" / "fi"
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "w"))
    assert env.cache_dir == tmp_path / "w" / ".cache" / "fi"


def test_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A uid without HOME and without a passwd entry still gets a place of its own."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert env.workspace_base == tmp_path / f"fi-{os.getuid()}"


def test_disable_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.jit == "on"
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "0")  # any value, as in FlashInfer
    assert env.jit == "off"
    monkeypatch.setenv("FI_JIT", "warn")
    assert env.jit == "warn"


def test_cuda_home_before_cuda_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_PATH", "/b")
    assert env.cuda_home == Path("/b")
    monkeypatch.setenv("CUDA_HOME", "/a")
    assert env.cuda_home == Path("/a")


def test_table_documents_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.present():
        monkeypatch.delenv(name)
    assert len(ROWS) == len(
        {name for name in vars(Env) if not name.startswith("_")} - {"table", "present", "with_places"}
    )
    for row in env.table():
        assert row.doc.endswith(".")
        assert row.allowed
        assert row.default
        assert row.when in ("import", "build", "call")
        assert row.set_by is None
    assert ROWS["FI_CUDA_ARCH_LIST"].aliases == ("FLASHINFER_CUDA_ARCH_LIST",)
    assert ROWS["MAX_JOBS"].aliases == ()
    assert ROWS["FI_NVCC_THREADS"].default == "1"
    assert ROWS["FI_CHECK"].default == "on the CPU only"


def test_present_reports_set_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"FI_JIT": "off", "FLASHINFER_UNKNOWN": "1", "CXX": "g++"}
    for name, text in {**values, "SOMETHING_ELSE": "1"}.items():
        monkeypatch.setenv(name, text)
    assert env.present() == values


def test_leaves_import_only_the_standard_library() -> None:
    modules = "{'torch', 'numpy', 'logging'} & set(sys.modules)"
    code = f"import sys, fi_core.runtime.env, fi_core.runtime.errors; print({modules})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class Spec:
    name = "rmsnorm_bf16_sm_90a"


def test_unsupported_error_prints_its_reasons() -> None:
    error = errors.UnsupportedError("rmsnorm: no implementation", {"cpu": "dtype int8", "sm90": ["a", "b"]})
    assert isinstance(error, ValueError)
    assert isinstance(error, errors.FiError)
    assert error.reasons == {"cpu": ("dtype int8",), "sm90": ("a", "b")}
    assert str(error) == "rmsnorm: no implementation\n  cpu: dtype int8\n  sm90: a; b"


def test_missing_kernel_error_names_the_package_to_install() -> None:
    spec = Spec()
    error = errors.MissingKernelError.of(spec)
    assert isinstance(error, RuntimeError)
    assert errors.MissingJITCacheError is errors.MissingKernelError
    assert error.spec is spec
    for part in (Spec.name, "fi-core[prebuilt]", "FI_JIT"):
        assert part in str(error)


def test_compile_error_is_first_line_hint_and_log() -> None:
    error = errors.CompileError("a.cu(3): error: x", hint="install y", log_path="jit.log")
    assert isinstance(error, RuntimeError)
    assert str(error).splitlines() == ["a.cu(3): error: x", "hint: install y", "full output: jit.log"]
    assert error.log_path == Path("jit.log")
    assert str(errors.CompileError("only this")) == "only this"


@pytest.mark.parametrize("make", [lambda: errors.CompileError("x", hint="y"), lambda: errors.MissingKernelError("x")])
def test_errors_travel_between_processes(make: Callable[[], Exception]) -> None:
    error = make()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


@pytest.mark.parametrize("name", ["BackendSupportedError", "GPUArchitectureError", "LibraryError"])
def test_contract_errors_are_plain(name: str) -> None:
    assert getattr(errors, name).__bases__ == (Exception,)
