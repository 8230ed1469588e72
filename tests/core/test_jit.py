"""fi_core.jit: specs of the operators, user modules, and which files are compiled or found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ninja
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fi_core
from core.package import pack
from fi_core import jit
from fi_core.jit import base, ops
from fi_core.runtime.errors import CompileError, MissingKernelError
from fi_core.runtime.resolve import store
from fi_core.runtime.spec.op import Entry
from fi_core.runtime.spec.target import CPU, Target

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_op"
HOPPER, AMPERE = Target("cuda", "90a"), Target("cuda", "80")
Fresh = Callable[[], None]


@pytest.fixture(autouse=True)
def empty(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty store, an empty registry, and only the architectures that a test lists."""
    monkeypatch.setattr("fi_core.runtime.build.driver.LIBRARY", "libno-driver-here.so")
    monkeypatch.setattr(base, "jit_spec_registry", base.JitSpecRegistry())
    base.context.cache_clear()
    yield
    base.context.cache_clear()


def run(text: str, **environment: str) -> str:
    """The output of a Python process."""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Names


def test_names_are_lazy(tmp_path: Path) -> None:
    heavy = '{"torch", "numpy", "tvm_ffi", "fi_core.jit.base"} & sys.modules.keys()'
    assert run(f"import sys, fi_core.jit; print({heavy})") == "set()\n"
    assert not (tmp_path / "cache").exists()
    for name in jit.__all__:
        assert getattr(jit, name) is not None
    assert jit.MissingJITCacheError is MissingKernelError
    assert jit.current_compilation_context is base.context()
    assert tmp_path / "cache" / "cached_ops" == fi_core.jit.env.FI_JIT_DIR


def test_every_family_and_op_has_a_module_function() -> None:
    listed = dir(jit)
    families = {op.family for op in fi_core.registry.ops().values()}
    assert {"norm", "activation", "rope", "page", "attention", "quantization"} <= families
    for word in (*families, "cascade", "rmsnorm", "get_seq_lens"):
        assert f"gen_{word}_module" in listed
        assert getattr(jit, f"gen_{word}_module")(targets=[CPU]).name == word
    for name in ("gen_nothing_module", "gen__module", "nothing"):
        assert not hasattr(jit, name)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fi_core.jit import env

    cache = tmp_path / "cache"
    assert (cache, cache) == (env.FI_CACHE_DIR, env.FI_WORKSPACE_DIR)
    assert (cache / "cached_ops", cache / "generated") == (env.FI_JIT_DIR, env.FI_GEN_SRC_DIR)
    assert (env.FI_INCLUDE_DIR / "fi" / "host" / "op.h").is_file()
    assert env.FI_CSRC_DIR.is_dir()
    assert env.FI_AOT_DIR.name == "data"
    assert env.FLASHINFER_CSRC_DIR == env.FI_CSRC_DIR
    monkeypatch.setenv("FI_CACHE_DIR", str(tmp_path / "other"))
    assert tmp_path / "other" / "cached_ops" == env.FI_JIT_DIR
    assert not cache.exists() and not (tmp_path / "other").exists()
    assert {f"FI_{word}" for word in ("JIT_DIR", "AOT_DIR", "CUBIN_DIR")} <= set(dir(env))
    for name in ("FI_NOTHING", "OTHER_JIT_DIR", "JIT_DIR"):
        with pytest.raises(AttributeError, match=name):
            getattr(env, name)
    assert env.has_flashinfer_cubin() and env.has_fi_jit_cache()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not env.has_flashinfer_cubin() and not env.has_fi_jit_cache()


# Specs of ops


def test_module_of_a_family() -> None:
    """CPU: one file per operator. CUDA: one launcher per operator and one device binary per axes."""
    on_cpu = jit.gen_norm_module(targets=[CPU])
    assert "rmsnorm_cpu.so" in {artifact.file for artifact in on_cpu.artifacts}
    assert {artifact.kind for artifact in on_cpu.artifacts} == {"cpu"}
    both = jit.gen_norm_module(targets=[HOPPER, AMPERE])
    files = [artifact.file for artifact in both.artifacts]
    assert len(files) == len(set(files))
    assert files.count("rmsnorm_cuda.so") == 1
    ends = {file.rsplit("_sm_", 1)[1] for file in files if file.endswith(".cubin")}
    assert ends == {"90a.cubin", "80.cubin"}
    assert [path.name for path in both.sources if path.suffix == ".cc"].count("rmsnorm.cc") == 1


def test_axes_narrow_a_module() -> None:
    bf16 = jit.gen_rmsnorm_module(targets=[HOPPER], dtype=torch.bfloat16, residual=False)
    assert bf16.name == "rmsnorm_dtype_bf16_residual_False"
    axes = [dict(spec.axes) for spec in bf16.specs]
    assert axes and all((a["dtype"], a["residual"]) == ("bf16", False) for a in axes)
    everything = jit.gen_rmsnorm_module(targets=[HOPPER])
    assert len(axes) < len(everything.specs)
    assert {spec.name for spec in bf16.specs} < {spec.name for spec in everything.specs}
    with pytest.raises(ValueError, match=r"rmsnorm\(dtype=i32\): no configuration is prebuilt on sm_90a"):
        jit.gen_rmsnorm_module(targets=[HOPPER], dtype="i32")
    with pytest.raises(ValueError, match="no configuration is prebuilt"):
        jit.gen_rmsnorm_module(targets=[HOPPER], head_dim=128)
    with pytest.raises(ValueError, match=r"word: must be a family or an operator, one of .*norm.*; got 'nothing'"):
        jit.gen_module("nothing")


def test_module_of_an_activation() -> None:
    for name in ("silu", "gelu", "gelu_tanh"):
        spec = jit.gen_act_and_mul_module(name, targets=[CPU])
        assert (spec.name, spec.host.file) == (f"{name}_and_mul", "act_and_mul_cpu.so")
    with pytest.raises(ValueError, match="act_func_name: must be one of silu, gelu, gelu_tanh; got 'relu'"):
        jit.gen_act_and_mul_module("relu")


def test_the_module_of_an_activation_is_where_flashinfer_has_it() -> None:
    from fi_core.activation import gen_act_and_mul_module  # type: ignore[attr-defined]

    assert gen_act_and_mul_module is jit.gen_act_and_mul_module


def test_default_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert base.default_targets() == (CPU,)
    base.context.cache_clear()
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0 8.0")
    assert base.default_targets() == (AMPERE, HOPPER)
    assert {spec.target for spec in jit.gen_get_seq_lens_module().specs} == {AMPERE, HOPPER}


def test_every_name_is_one_configuration() -> None:
    specs = list(ops.specs_of(fi_core.registry.ops().values(), [CPU, AMPERE, HOPPER]))
    assert len({spec.name for spec in specs}) == len(specs)
    files: dict[str, object] = {}
    for spec in specs:
        for artifact in ops.view(spec).artifacts:
            assert files.setdefault(artifact.file, artifact) == artifact


def test_build_load_and_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = jit.gen_get_seq_lens_module(targets=[CPU])
    assert (spec.is_compiled, spec.is_aot, spec.aot_path) == (False, False, None)
    assert spec.jit_library_path.parent.parent == tmp_path / "cache" / "cached_ops"
    with pytest.raises(FileNotFoundError, match=r"get_seq_lens: get_seq_lens_cpu.so is not built; call build\(\)"):
        spec.load()
    monkeypatch.setenv("FI_JIT", "off")
    with pytest.raises(jit.MissingJITCacheError, match="'get_seq_lens_cpu' is not prebuilt") as error:
        spec.build()
    assert error.value.spec == spec.host
    monkeypatch.delenv("FI_JIT")
    assert not (tmp_path / "cache" / "cached_ops").exists()

    module = spec.build_and_load()
    assert (spec.is_compiled, spec.is_aot, spec.get_library_path()) == (True, False, spec.jit_library_path)
    assert spec.jit_library_path.is_file()
    out = torch.full((2,), -1, dtype=torch.int32)
    lengths = [torch.tensor(values, dtype=torch.int32) for values in ([0, 2, 3], [5, 16])]
    module.get_seq_lens(out, *lengths, 16)
    assert out.tolist() == [16 + 5, 16]

    status = base.jit_spec_registry.get_spec_status("get_seq_lens")
    assert status is not None
    assert (status.status, status.library_path, status.needs_device_linking) == (
        "Compiled",
        spec.jit_library_path,
        False,
    )
    assert [path.name for path in status.sources] == ["get_seq_lens.cc"]
    spec.write_ninja()
    jit.clear_cache_dir()
    assert not spec.is_compiled
    assert base.jit_spec_registry.get_stats() == {"total": 1, "compiled": 0, "not_compiled": 1}
    assert [s.status for s in base.jit_spec_registry.get_all_statuses()] == ["Not Compiled"]
    assert base.jit_spec_registry.get_spec_status("other") is None
    assert spec.is_ninja_generated, "generated files are kept"


def test_a_prebuilt_module_is_used(tmp_path: Path, fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = jit.gen_get_seq_lens_module(targets=[CPU])
    spec.build()
    folder = pack(tmp_path / "prebuilt", {spec.host: spec.jit_library_path.read_bytes()})
    jit.clear_cache_dir()
    fresh()
    monkeypatch.setenv("FI_CUBIN_DIR", str(folder))
    monkeypatch.setenv("FI_JIT", "off")
    assert (spec.is_aot, spec.is_compiled) == (True, True)
    assert spec.aot_path == spec.get_library_path() == folder / "get_seq_lens_cpu.so"
    jit.build_jit_specs([spec])
    assert store.entries() == []
    assert callable(spec.build_and_load().get_seq_lens)
    monkeypatch.setenv("FI_JIT", "on")
    jit.build_jit_specs([spec], skip_prebuilt=False)
    assert len(store.entries()) == 1


def test_write_ninja(fresh: Fresh) -> None:
    """build.ninja compiles the same files, and a second write does not change it."""
    spec = jit.gen_get_seq_lens_module(targets=[HOPPER])
    assert not spec.is_ninja_generated
    spec.write_ninja()
    assert spec.is_ninja_generated
    before = {path: path.stat().st_mtime_ns for path in (spec.ninja_path, *spec.sources)}
    spec.write_ninja()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    subprocess.run([f"{ninja.BIN_DIR}/ninja", "-C", spec.build_dir], check=True, capture_output=True)
    made = {path.name for path in spec.build_dir.glob("*/*") if path.is_file() and path.suffix != ".cu"}
    assert made == {a.file for a in spec.artifacts}
    assert not spec.is_compiled


def test_compile_commands() -> None:
    spec = jit.gen_get_seq_lens_module(targets=[HOPPER])
    spec.write_ninja()
    host, device = spec.get_compile_commands()
    assert host["file"].endswith("csrc/page/get_seq_lens.cc") and "-DFI_CUDA=1" in host["command"]
    assert Path(device["file"]).is_file() and "sm_90a" in device["command"]
    assert all(Path(entry["directory"]).is_dir() for entry in (host, device))


def test_build_jit_specs(capfd: pytest.CaptureFixture[str]) -> None:
    specs = [jit.gen_get_seq_lens_module(targets=[CPU]), jit.gen_jit_spec("scale", [EXAMPLE / "scale.cc"])]
    jit.build_jit_specs(specs, verbose=True)
    assert [spec.is_compiled for spec in specs] == [True, True]
    said = capfd.readouterr().err
    assert "[1/2]" in said and "[2/2]" in said
    jit.build_jit_specs(specs, verbose=True)
    assert "[1/" not in capfd.readouterr().err
    with pytest.raises(TypeError, match="specs: every element must be a JitSpec; got str"):
        jit.build_jit_specs([specs[0], "norm"])


# User modules


def write(folder: Path, **files: str) -> dict[str, Path]:
    paths = {name: folder / name.replace("__", ".") for name in files}
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        paths[name].write_text(text)
    return paths


COUNT = """// Returns COUNT through tvm-ffi's plain convention.
#include <tvm/ffi/c_api.h>
#include "count.h"
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_count(void*, const TVMFFIAny*, int32_t, TVMFFIAny* r) {
  r->type_index = kTVMFFIInt;
  r->zero_padding = 0;
  r->v_int64 = count();
  return 0;
}
"""


def test_the_example_on_the_cpu() -> None:
    spec = jit.gen_jit_spec("scale", [EXAMPLE / "scale.cc"])
    assert (spec.host.kind, spec.is_compiled) == ("cpu", False)
    scale = spec.bind()
    assert spec.is_compiled
    x = torch.arange(100_000, dtype=torch.float32)
    out = torch.full_like(x, -1)
    scale(out, x, 0.5)
    assert torch.equal(out, x / 2)
    with pytest.raises(ValueError, match=r"scale: out must have shape \[n\] with n = 100000; got \[4\]"):
        scale(out[:4], x, 0.5)
    with pytest.raises(TypeError, match="x must be float32; got float64"):
        scale(out, x.double(), 0.5)


def test_a_declared_entry_takes_keywords_and_is_a_torch_operator() -> None:
    declared = "Tensor(a!) out, Tensor x, float a=0.5"
    spec = jit.gen_jit_spec("scale", [EXAMPLE / "scale.cc"])
    scale = spec.bind(arguments=declared)
    x = torch.arange(100, dtype=torch.float32)

    def half(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        scale(x=x, out=out)
        return out + 1

    assert torch.equal(half(x), x / 2 + 1)
    assert torch.equal(torch.compile(half, fullgraph=True, backend="aot_eager")(x), x / 2 + 1)
    with FakeTensorMode() as mode:
        assert type(half(mode.from_tensor(x))).__name__ == "FakeTensor"
    with pytest.raises(TypeError, match="jit_scale: x must be a dense tensor with data; got a list"):
        scale(x, [1.0])
    with pytest.raises(ValueError, match=r"scale: out must have shape \[n\] with n = 100; got \[4\]"):
        scale(torch.empty(4), x)
    assert jit.gen_jit_spec("scale", [EXAMPLE / "scale.cc"]).bind(arguments=declared) is scale
    with pytest.raises(ValueError, match=r"arguments: scale is declared as 'Tensor.*; got 'Tensor x'"):
        spec.bind(arguments="Tensor x")


def test_the_example_as_it_is_run() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "scale.py"], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.splitlines()[0] == "[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]"
    assert "out must have shape [n] with n = 8; got [4]" in done.stdout


def test_device_code_of_the_example(tmp_path: Path, mock_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launcher, one binary per target; the second target's GPU binds it."""
    sources = [EXAMPLE / "scale.cc", EXAMPLE / "scale.cu"]
    with pytest.raises(
        RuntimeError, match="device code needs a target from sm_80 on, found no GPU: set FI_CUDA_ARCH_LIST"
    ):
        jit.gen_jit_spec("scale", sources)
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "7.5")
    with pytest.raises(RuntimeError, match="found sm_75"):
        jit.gen_jit_spec("scale", sources)
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0 7.5 8.0")
    base.context.cache_clear()
    spec = jit.gen_jit_spec("scale", sources, entries=[Entry("scale", "", 256)])
    assert [a.file for a in spec.artifacts] == ["scale_cuda.so", "scale_sm_80.cubin", "scale_sm_90a.cubin"]
    spec.build()
    for file in ("scale_sm_80.cubin", "scale_sm_90a.cubin"):
        (path,) = (tmp_path / "cache" / "cached_ops").glob(f"*/{file}")
        assert path.read_bytes()[:4] == b"\x7fELF" and b".text.scale" in path.read_bytes()
    assert spec.load().bind is not None
    with pytest.raises(ValueError, match="device: must be the index of one of 0 visible GPUs; got 0"):
        spec.bind()

    text = f"""
import pathlib
from fi_core.jit import gen_jit_spec
from fi_core.runtime.spec.op import Entry
folder = pathlib.Path({str(EXAMPLE)!r})
spec = gen_jit_spec("scale", [folder / "scale.cc", folder / "scale.cu"], entries=[Entry("scale", "", 256)])
print([artifact.file for artifact in spec.artifacts], spec.is_compiled, callable(spec.bind()))
try:
    spec.bind(2)
except ValueError as error:
    print(error)
"""
    said = run(text, LD_LIBRARY_PATH=str(mock_driver), FI_CUDA_ARCH_LIST="9.0", FI_JIT="off").splitlines()
    assert said[0] == "['scale_cuda.so', 'scale_sm_90a.cubin'] True True"
    assert said[1] == "device: must be the index of one of 2 visible GPUs; got 2"


@pytest.mark.gpu
def test_device_code_of_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the driver of this machine
    sources = [EXAMPLE / "scale.cc", EXAMPLE / "scale.cu"]
    scale = jit.gen_jit_spec("scale", sources, entries=[Entry("scale", "", 256)]).bind()
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    out = torch.full_like(x, -1)
    scale(out[:999], x[:999], 3.0)
    assert torch.equal(out[:999], 3 * x[:999]) and out[999] == -1


def test_targets_and_flags_of_device_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """`-gencode` replaces the context's targets; other flags go to the compiler and into the key."""
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0 8.0")
    sources = [EXAMPLE / "scale.cc", EXAMPLE / "scale.cu"]
    flags = base.context().get_nvcc_flags_list([8])
    spec = jit.gen_jit_spec("scale", sources, extra_cuda_cflags=[*flags, "-DN=1"])
    assert [a.file for a in spec.artifacts] == ["scale_cuda.so", "scale_sm_80.cubin"]
    assert spec.extra_cuda_cflags == ["-use_fast_math", "-std=c++17", "-DN=1"]
    spec.build()
    other = jit.gen_jit_spec("scale", sources, extra_cuda_cflags=[*flags, "-DN=2"], use_fast_math=False)
    assert other.extra_cuda_cflags == ["-std=c++17", "-DN=2"]
    assert not other.is_compiled
    broken = jit.gen_jit_spec("scale", sources, extra_cuda_cflags=[*flags, "-DScaleParams=3"])
    with pytest.raises(CompileError, match=r"building scale_sm_80.* failed: .*error"):
        broken.build()


def test_flags_headers_and_adapter(tmp_path: Path, fresh: Fresh) -> None:
    """Flags, and headers included at any depth, decide a module's key."""
    files = write(
        tmp_path / "mine", count__cc=COUNT, count__h="#include <base.h>\ninline int count() { return BASE + N; }\n"
    )
    base = write(tmp_path / "base", base__h='#pragma once\n#include "more.h"\n', more__h="#define BASE 40\n")

    def make(n: int, **more: Any) -> Any:
        includes = [tmp_path / "base"]
        return jit.gen_jit_spec("count", [files["count__cc"]], [f"-DN={n}"], None, ["-lm"], includes, **more)

    spec = make(2)
    assert (spec.extra_cflags, spec.extra_ldflags) == (["-DN=2"], ["-lm"])
    assert spec.extra_include_dirs == [tmp_path / "mine", tmp_path / "base"]
    assert spec.build_and_load().count() == 42
    assert make(2).is_compiled
    assert not make(3).is_compiled
    assert make(3).build_and_load().count() == 43
    base["more__h"].write_text("#define BASE 50\n")
    assert not make(2).is_compiled, "an edited header is seen, in the same process too"
    assert make(2).build_and_load().count() == 52
    assert make(2, post_load_adapter=lambda module: module.count).load()() == 52
    base["more__h"].write_text("#define BASE 40\n")
    assert make(2).is_compiled, "the first one is still there"


def test_files_of_one_side_are_one_unit(tmp_path: Path) -> None:
    """Several C++ files are compiled together, in their order; an edit of each is seen."""
    one = "// One.\nconstexpr int HALF = 21;\n"
    two = (
        "// Two.\n#include <tvm/ffi/function.h>\nint64_t all() { return HALF * 2; }\n"
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(all, all);\n"
    )
    files = write(tmp_path / "mine", one__cc=one, two__cc=two)
    spec = jit.gen_jit_spec("both", list(files.values()), needs_device_linking=True)
    assert spec.try_load() is None
    assert spec.build_and_load().all() == 42
    assert spec.try_load() is not None
    [path] = spec.get_library_paths()
    assert path == spec.get_library_path() and path.is_file()
    assert spec.lock_path.name.startswith(".lock-")
    files["one__cc"].write_text(one.replace("21", "22"))
    assert jit.gen_jit_spec("both", list(files.values())).build_and_load().all() == 44


def test_a_compile_error_names_the_line(tmp_path: Path) -> None:
    files = write(tmp_path / "mine", wrong__cc="// Wrong.\nint wrong() { return nothing; }\n")
    spec = jit.gen_jit_spec("wrong", list(files.values()))
    with pytest.raises(CompileError, match=r"building wrong_cpu.* failed: .*wrong\.cc:2.*nothing"):
        spec.build_and_load()
    assert not spec.is_compiled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"sources": []},
            r"sources: at least one C\+\+ file \(.*\), and else .cu files, are required; got none",
        ),
        ({"sources": ["scale.cu"]}, "sources: a .cu file is .* without host code; got scale.cu alone. Put "),
        ({"sources": ["scale.cc", "scale.h"]}, "got scale.cc, scale.h"),
        ({"sources": ["nothing.cc"]}, "sources: .*nothing.cc is not a file"),
        ({"name": "a/b"}, "name: must have letters, digits and _.- only, because it names files; got 'a/b'"),
        ({"name": ""}, "name: must have letters"),
        ({"embedded_cubin_factory": dict}, "embedded_cubin_factory: must be None; give the source of the kernels"),
        (
            {"extra_cuda_cflags_by_source": {"other.cu": ["-DA"]}},
            "extra_cuda_cflags_by_source: the same flags for all .cu files are required; other.cu is no .cu file",
        ),
    ],
)
def test_gen_jit_spec_rejects(arguments: dict[str, Any], message: str) -> None:
    sources = [EXAMPLE / name for name in arguments.pop("sources", ["scale.cc"])]
    with pytest.raises(ValueError, match=message):
        jit.gen_jit_spec(arguments.pop("name", "scale"), sources, **arguments)
    assert base.jit_spec_registry.get_all_specs() == {}


def test_compile_commands_of_a_user_module(tmp_path: Path) -> None:
    spec = jit.gen_jit_spec("scale", [EXAMPLE / "scale.cc"], ["-DMINE=1"])
    (entry,) = spec.get_compile_commands()
    assert entry["file"] == str(EXAMPLE / "scale.cc")
    assert "-DMINE=1" in entry["command"] and f"-I{EXAMPLE}" in entry["command"]
    json.dumps(entry)
