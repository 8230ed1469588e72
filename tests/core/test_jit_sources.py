"""A generator of sources in FlashInfer's style: a rendered configuration, copied sources, one spec; and its helpers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import ninja
import pytest
import torch

from fi_core.jit import cpp_ext, gen_jit_spec
from fi_core.jit import env as jit_env
from fi_core.jit.utils import dtype_map, filename_safe_dtype_map, write_if_different
from fi_core.runtime.build import toolchain

CONFIG = "using DTypeIn = {{ dtype_in }};\nconstexpr int PARAM = {{ param }};\n"
LAUNCHER = """// Multiplies by PARAM.
#include "fi/host/function.h"
#include "fi/types.h"
#include "some_config.inc"

namespace {
void some(const fi::Kernel&, fi::Tensor out, fi::Tensor x) {
  fi::Dim n{"n"};
  x.is({fi::kI32}).shape(n).inner_contiguous();
  out.like(x).shape(n);
  for (int64_t i = 0; i < n; ++i) out.data<DTypeIn>()[i] = PARAM * x.data<DTypeIn>()[i];
}
}  // namespace

FI_FUNCTION(some, "out", "x")
"""


@pytest.fixture(autouse=True)
def empty(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fi_core.runtime.build.driver.LIBRARY", "libno-driver-here.so")


def gen_some_module(csrc: Path, dtype_in: torch.dtype, param: int, **options: Any) -> Any:
    uri = f"some_{filename_safe_dtype_map[dtype_in]}_{param}"
    gen_directory = jit_env.FLASHINFER_GEN_SRC_DIR / uri
    with open(csrc / "some_customize_config.jinja") as file:
        template = jinja2.Template(file.read())
    write_if_different(gen_directory / "some_config.inc", template.render(dtype_in=dtype_map[dtype_in], param=param))
    sources = []
    for name in ["some.cc"]:
        shutil.copy(csrc / name, gen_directory / name)
        sources.append(gen_directory / name)
    return gen_jit_spec(uri, sources, extra_cuda_cflags=["-DUNUSED"], **options)


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "some_customize_config.jinja").write_text(CONFIG)
    (folder / "some.cc").write_text(LAUNCHER)
    return folder


def test_a_generator_as_flashinfer_writes_it(csrc: Path) -> None:
    x = torch.arange(5, dtype=torch.int32)
    for param in (3, 4):
        out = torch.empty_like(x)
        gen_some_module(csrc, torch.int32, param).bind()(out, x)
        assert torch.equal(out, param * x)


def test_a_generated_file_decides_the_key(csrc: Path) -> None:
    spec = gen_some_module(csrc, torch.int32, 3)
    spec.build()
    config = spec.sources[0].parent / "some_config.inc"
    before = config.stat().st_mtime_ns
    assert gen_some_module(csrc, torch.int32, 3).is_compiled and config.stat().st_mtime_ns == before
    write_if_different(config, config.read_text().replace("3", "5"))
    assert not gen_jit_spec(spec.name, spec.sources).is_compiled


def test_flags_of_the_linker_are_in_the_key_and_reach_the_linker(csrc: Path) -> None:
    plain = gen_some_module(csrc, torch.int32, 3)
    plain.build()
    spec = gen_some_module(csrc, torch.int32, 3, extra_ldflags=["-Wl,-soname,libsome.so"])
    assert (spec.extra_ldflags, plain.extra_ldflags, spec.is_compiled) == (["-Wl,-soname,libsome.so"], [], False)
    spec.build()
    assert b"libsome.so" in spec.get_library_path().read_bytes()
    assert b"libsome.so" not in plain.get_library_path().read_bytes()


def test_dtypes() -> None:
    assert dtype_map[torch.bfloat16] == "__nv_bfloat16" and dtype_map[torch.uint32] == "fi::uint32_t"
    assert filename_safe_dtype_map[torch.float8_e4m3fn] == "e4m3"
    code = "import sys, fi_core.jit.utils; print('torch' in sys.modules, hasattr(fi_core.jit.utils, 'nothing'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "False False\n", done.stderr


def test_the_cuda_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpp_ext.get_cuda_version() >= (12, 0)
    assert cpp_ext.is_cuda_version_at_least("12.0") and not cpp_ext.is_cuda_version_at_least("99.0")
    monkeypatch.setattr(toolchain, "cuda_home", lambda: Path("/opt/cuda"))
    assert cpp_ext.get_cuda_path() == "/opt/cuda"
    monkeypatch.setattr(toolchain, "nvrtc", lambda: None)
    monkeypatch.setattr(toolchain, "nvcc_identity", lambda: "cuda_12.8.r12.8/compiler.1_0")
    assert cpp_ext.get_cuda_version() == (12, 8)
    monkeypatch.setattr(toolchain, "nvcc_identity", lambda: "none")
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    for ask in (cpp_ext.get_cuda_version, cpp_ext.get_cuda_path):
        with pytest.raises(RuntimeError, match="no CUDA compiler found: install a CUDA toolkit and set CUDA_HOME"):
            ask()


def test_ninja_runs_the_written_file(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{ninja.BIN_DIR}{os.pathsep}{os.environ['PATH']}")
    spec = gen_some_module(csrc, torch.int32, 3)
    spec.write_ninja()
    cpp_ext.run_ninja(spec.build_dir, spec.ninja_path)
    assert len(list(spec.build_dir.glob("*/*.so"))) == 1
    (spec.build_dir / "some.cc").write_text("broken\n")
    with pytest.raises(RuntimeError, match=r"ninja failed on .*build.ninja(?s:.*)broken"):
        cpp_ext.run_ninja(spec.build_dir, spec.ninja_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"ninja is not installed: pip install ninja, or call JitSpec.build\(\)"):
        cpp_ext.run_ninja(spec.build_dir, spec.ninja_path)


DISPATCH = """// Rounds each sum of a block.
#include "fi/cpu/dispatch.h"
#include "fi/host/function.h"

namespace {
template <class DTypeIn, class DTypeOut, int BLOCK_SIZE>
void LaunchKernel(const DTypeIn* x, DTypeOut* out, int64_t n) {
  for (int64_t i = 0; i < n / BLOCK_SIZE; ++i) {
    out[i] = 0;
    for (int k = 0; k < BLOCK_SIZE; ++k) out[i] += static_cast<DTypeOut>(x[i * BLOCK_SIZE + k]);
  }
}

void sums(const fi::Kernel&, fi::Tensor out, fi::Tensor x, int64_t block_size) {
  x.is({fi::kF32, fi::kI32, fi::kBool});
  out.is({fi::kF32, fi::kI32});
  const fi::DType input_dtype = x.dtype(), output_dtype = out.dtype();
  DISPATCH_DTYPE(input_dtype, DTypeIn, {
    DISPATCH_DTYPE(output_dtype, DTypeOut, {
      DISPATCH_BLOCK_SIZE(block_size, BLOCK_SIZE, {
        if constexpr (std::is_arithmetic_v<DTypeIn> && std::is_arithmetic_v<DTypeOut>)
          LaunchKernel<DTypeIn, DTypeOut, BLOCK_SIZE>(x.data<DTypeIn>(), out.data<DTypeOut>(), x.numel());
      });
    });
  });
}
}  // namespace

FI_FUNCTION(sums, "out", "x", "block_size")
"""


def test_dispatch_macros_nest(tmp_path: Path) -> None:
    (tmp_path / "sums.cc").write_text(DISPATCH)
    sums = gen_jit_spec("sums", [tmp_path / "sums.cc"]).bind()
    for dtype_in, dtype_out in ((torch.float32, torch.int32), (torch.int32, torch.float32)):
        for block in (32, 1024):
            x = torch.arange(4096).remainder(7).to(dtype_in)
            out = torch.empty(4096 // block, dtype=dtype_out)
            sums(out, x, block)
            assert torch.equal(out, x.view(-1, block).sum(1).to(dtype_out))
    with pytest.raises(ValueError, match="block_size: 32, 64, 128, 256, 512 or 1024 is required; got 96"):
        sums(out, x, 96)
    with pytest.raises(TypeError, match=r"input_dtype: float32, .* or uint8 is required; got bool"):
        sums(out, x.bool(), 32)
