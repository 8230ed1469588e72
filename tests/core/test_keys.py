"""Keys are content hashes: changes that alter a key, changes that do not, and warm starts without a compile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from core import toy
from fi_core.registry import operator
from fi_core.runtime.build import compiler, sources, toolchain
from fi_core.runtime.resolve import built
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.target import CPU, Target

if TYPE_CHECKING:
    from core.conftest import Python

RMSNORM = operator("rmsnorm").op
Fresh = Callable[[], None]


def keys(n: int = 1, arch: str = "80") -> dict[str, str]:
    """The keys of the toy op by kind, as a process that has just started sees them."""
    cpu = sources.artifacts(toy.chosen(toy.SCALE, CPU, {"n": n}))
    return {artifact.kind: compiler.key(artifact) for artifact in (*cpu, *toy.artifacts(n, arch))}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert set(before) == set(after) == {"cpu", "cuda", "cubin"}
    return {kind for kind in before if before[kind] != after[kind]}


HOST, DEVICE, ALL = {"cpu", "cuda"}, {"cubin"}, {"cpu", "cuda", "cubin"}


@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        ("include/fi/toy/constant.h", ALL),  # two includes away
        ("include/fi/toy/scale.h", ALL),
        ("include/fi/toy/scale.cuh", DEVICE),
        ("csrc/toy/scale.cc", HOST),
        ("include/fi/toy/unrelated.h", set()),
        ("templates/unit.cu.jinja", DEVICE),
        ("templates/op.h.jinja", set()),  # this launcher includes no generated header
        ("templates/variant.cc.jinja", set()),
    ],
)
def test_an_edited_source(tree: Path, fresh: Fresh, file: str, kinds: set[str]) -> None:
    before = keys()
    (tree / file).write_text("// Edited.\n" + (tree / file).read_text())
    fresh()
    assert changed(before, keys()) == kinds


def test_an_include_added_later_is_followed(tree: Path, fresh: Fresh) -> None:
    header = tree / "include/fi/toy/constant.h"
    header.write_text(header.read_text() + '#include "fi/toy/unrelated.h"\n')
    fresh()
    before = keys()
    (tree / "include/fi/toy/unrelated.h").write_text("// Edited.\n#pragma once\n")
    fresh()
    assert changed(before, keys()) == ALL


def test_every_header_of_a_real_kernel(fresh: Fresh, tmp_path: Path) -> None:
    """Editing any header changes the keys of exactly the files that reach it; only its content counts."""
    root = tmp_path / "kernels"
    shutil.copytree(toy.KERNELS, root)
    spec = toy.chosen(RMSNORM, Target("cuda", "90a"), next(RMSNORM.grid()))
    here = {a.kind: compiler.key(a) for a in sources.artifacts(spec)}
    try:
        toy.use(root)
        fresh()
        artifacts = sources.artifacts(spec)
        reached = {a.kind: set(sources.headers(a)) for a in artifacts}
        before = {a.kind: compiler.key(a) for a in artifacts}
        assert before == here, "the path of the tree is not part of the identity"
        assert {"fi/norm/rmsnorm.h", "fi/types.h"} <= reached["cuda"] & reached["cubin"]
        for path in sorted((root / "include").rglob("*.*h")):
            text, name = path.read_text(), path.relative_to(root / "include").as_posix()
            path.write_text(text + "\n// Edited.\n")
            after = {a.kind: compiler.key(a) for a in artifacts}
            assert {kind for kind in after if after[kind] != before[kind]} == {k for k in after if name in reached[k]}
            path.write_text(text)
        assert {a.kind: compiler.key(a) for a in artifacts} == before
    finally:
        toy.use(toy.KERNELS)


@pytest.mark.parametrize(
    ("variable", "value", "kinds"),
    [
        ("FI_EXTRA_CFLAGS", "-DX", HOST),
        ("FI_EXTRA_LDFLAGS", "-lm", HOST),
        ("FI_EXTRA_CUDAFLAGS", "-DX", DEVICE),
        ("FI_JIT_LINEINFO", "1", DEVICE),
        ("FI_SANITIZE", "address,undefined", HOST),
        ("FI_JIT_DEBUG", "1", ALL),
        ("FI_JIT_VERBOSE", "1", ALL),  # implies debug flags
        ("FI_CUDA_COMPILER", "nvcc", DEVICE),
        ("FI_CACHE_DIR", "/elsewhere", set()),
        ("FI_CXX_LAUNCHER", "nice", set()),
        ("FI_NVCC_THREADS", "2", set()),
        ("MAX_JOBS", "3", set()),
    ],
)
def test_flags(
    tree: Path, fresh: Fresh, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kinds: set[str]
) -> None:
    before = keys()
    monkeypatch.setenv(variable, value)
    fresh()
    assert changed(before, keys()) == kinds


def test_axes_target_schema_and_abi(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys()
    assert changed(before, keys(n=2)) == DEVICE, "one host module serves every configuration"
    assert len({keys(arch=arch)["cubin"] for arch in ("80", "86", "90a", "90")}) == 4
    other = toy.artifacts()[0]._replace(target=Target("cpu", "riscv64"))
    assert compiler.key(other) != before["cuda"]
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "SCHEMA", compiler.SCHEMA + 1)
        assert changed(before, keys()) == ALL
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FFI_ABI", "tvm-ffi-9")
        assert changed(before, keys()) == ALL
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "tvm_ffi_version", lambda: "0.1.99")
        assert changed(before, keys()) == HOST, "host modules inline its headers"
    assert changed(before, keys()) == set()


def compiler_that_says(path: Path, version: str) -> None:
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}"\n')
    path.chmod(0o755)


def test_host_compiler(tree: Path, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program, or the same program in a new version; also where CXX starts with a compiler cache."""
    before = keys()
    cxx = tmp_path / "c++"
    for words in (str(cxx), f"env {cxx}"):
        compiler_that_says(cxx, "99.1")
        monkeypatch.setenv("CXX", words)
        fresh()
        first = keys()
        assert changed(before, first) == HOST
        compiler_that_says(cxx, "99.2")
        fresh()
        assert changed(first, keys()) == HOST
    monkeypatch.setenv("CXX", "/nowhere/c++")
    fresh()
    assert changed(before, keys()) == HOST, "without a compiler there is a key too: a store may be shared"


def test_device_compiler(tree: Path, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys()
    found = toolchain.nvrtc()
    assert found and found.builtins
    newer = tmp_path / found.builtins.name.replace("13.", "14.")
    newer.write_bytes(b"builtins of another version")
    monkeypatch.setattr(toolchain, "nvrtc", lambda: found._replace(builtins=newer))
    assert changed(before, keys()) == DEVICE
    monkeypatch.undo()
    compiler_that_says(tmp_path / "nvcc", "Build cuda_13.7.r13.7/compiler.1")
    monkeypatch.setenv("FI_NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setenv("FI_CUDA_COMPILER", "nvcc")
    toy.use(tree)
    fresh()
    nvcc = keys()
    assert changed(before, nvcc) == DEVICE
    compiler_that_says(tmp_path / "nvcc", "Build cuda_13.8.r13.8/compiler.2")
    fresh()
    assert changed(nvcc, keys()) == DEVICE


RENDER = """
import hashlib, json
from core import toy
from fi_core.runtime.build import compiler, sources
from fi_core.registry import operator
from fi_core.runtime.spec.target import CPU, Target
RMSNORM = operator("rmsnorm").op
out = {}
for target in (CPU, Target("cuda", "80"), Target("cuda", "90a")):
    for axes in RMSNORM.grid():
        for artifact in sources.artifacts(toy.chosen(RMSNORM, target, axes)):
            out[artifact.id] = hashlib.sha256(sources.text(artifact).encode()).hexdigest(), compiler.key(artifact)
print(json.dumps(out, sort_keys=True))
"""


def test_units_and_keys_are_the_same_in_every_process(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        answers.append(python.run(RENDER))
    assert answers[0] == answers[1]
    assert len(json.loads(answers[0])) == 2 + 2 * len(list(RMSNORM.grid()))


def test_the_unit_is_the_header_and_the_entries(tree: Path) -> None:
    _, image = toy.artifacts(3, "90a")
    assert sources.text(image).splitlines() == [
        "// scale by cuda",
        '#include "fi/toy/scale.cuh"',
        "",
        'extern "C" __global__ void __launch_bounds__(32)',
        "scale(const __grid_constant__ fi::ScaleParams params) {",
        "  fi::scale<3>(params);",
        "}",
    ]


def test_the_place_of_the_tree_is_not_in_the_files(tree: Path, fresh: Fresh, tmp_path: Path) -> None:
    def files() -> list[bytes]:
        return [built(artifact).path.read_bytes() for artifact in toy.artifacts()]

    first = files()
    elsewhere = tmp_path / "moved/to/another/place"
    shutil.copytree(tree, elsewhere)
    shutil.rmtree(tmp_path / "cache")
    toy.use(elsewhere)
    fresh()
    assert files() == first
    assert not any(os.fsencode(tmp_path) in content for content in first)


WARM = """
import json, sys
from core import toy
from fi_core.runtime.resolve import built
toy.use(sys.argv[1])
started = []
watched = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
sys.addaudithook(lambda event, args: started.append(args[1]) if event in watched else None)
found = [built(artifact) for artifact in toy.artifacts()]
mapped = open("/proc/self/maps").read()
print(json.dumps([[f.origin for f in found], [list(map(str, s)) for s in started], "nvrtc" in mapped]))
"""


def test_a_warm_start_compiles_nothing(python: Python, tree: Path) -> None:
    """It asks the C++ compiler for its version, which is part of the key, and loads no device compiler."""
    origins, _, loaded = json.loads(python.run(WARM, tree))
    assert (origins, loaded) == (["jit", "jit"], True)
    origins, started, loaded = json.loads(python.run(WARM, tree))
    assert origins == ["store", "store"]
    assert [words[1:] for words in started] == [["--version"]]
    assert not loaded


def test_artifact_files_and_ids() -> None:
    host = Artifact("scale_cuda", "cuda", Target("cpu", "x86_64"), "csrc/toy/scale.cc")
    image = Artifact("scale_n_1_cuda_sm_90a", "cubin", Target("cuda", "90a"), "text")
    assert (host.file, host.id) == ("scale_cuda.so", "cuda/x86_64/scale_cuda")
    assert (image.file, image.id) == ("scale_n_1_cuda_sm_90a.cubin", "cubin/sm_90a/scale_n_1_cuda_sm_90a")
