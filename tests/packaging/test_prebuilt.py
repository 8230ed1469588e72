"""The binary wheels at work where there is no compiler: with both, one or none of them, and when they do not fit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clean_site import HERE, ROOT, Site, open_folder, open_store

from fi_core import aot
from fi_core.runtime.files import packed
from fi_core.runtime.spec.target import Target

pytestmark = pytest.mark.slow

BOTH = ("fi_cubin", "fi_jit_cache")
OP = "get_seq_lens"  # small: one axis-free kernel, both on the CPU and on CUDA
HOST, DEVICE = "fi-jit-cache", "fi-cubin"
NOWHERE = "nowhere: FI_JIT=off forbids to compile it"


@pytest.mark.whole
def test_every_cpu_op_runs(site: Callable[..., Site]) -> None:
    """Whatever needs no code of a user passes on prebuilt modules alone; witness.py holds that no other was used.

    witness.py takes some tests of each file. Left out are a million draws of each sampling function.
    """
    done = site(*BOTH).run(
        *("-m", "pytest", "-q", ROOT / "tests" / "families", "-m", "not gpu and not jit", "-p", "no:cacheprovider"),
        *("-k", "not test_distribution and not test_drawn_tokens_are_allowed"),
        *("-p", "witness", "-o", f"pythonpath={ROOT}/tests {ROOT}/packages/fi-bench/src"),
        PYTHONPATH=str(HERE),
        FI_JIT="off",
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "witness" not in done.stdout


@pytest.mark.whole
@pytest.mark.parametrize("arch", [target.arch for target in aot.targets() if target.kind == "cuda"])
def test_every_kernel_binds_and_nothing_is_compiled(arch: str, site: Callable[..., Site], mock_driver: Path) -> None:
    """Every CPU module, and every launcher with each of its device binaries, on a GPU that is only played."""
    target = Target("cuda", arch)
    found = site(*BOTH).probe(
        LD_LIBRARY_PATH=str(mock_driver),
        FI_CUDA_ARCH_LIST=f"{target.capability / 10}{arch.lstrip('0123456789')}",
        FI_MOCK_CAPABILITY=str(target.capability),
    )
    assert Path(found["from"]).is_relative_to(site(*BOTH).folder)
    expected = {"cpu": {"host": HOST}, str(target): {"host": HOST, "cubin": DEVICE}}
    strange = {n: o for n, o in found["kernels"].items() if expected["cpu" if n.endswith("_cpu") else str(target)] != o}
    assert strange == {}
    assert {name.endswith("_cpu") for name in found["kernels"]} == {True, False}
    assert found["events"] == []
    assert found["log"] == []


@pytest.mark.parametrize(
    ("companions", "host", "device"),
    [
        ((), "", ""),
        (("fi_cubin",), "", DEVICE),
        (("fi_jit_cache",), HOST, ""),
        (BOTH, HOST, DEVICE),
    ],
    ids=["neither", "only fi-cubin", "only fi-jit-cache", "both"],
)
def test_with_some_of_the_wheels(
    companions: tuple[str, ...], host: str, device: str, site: Callable[..., Site], mock_driver: Path
) -> None:
    """What is there is used, what is missing is named; `fi-core why` tells the difference beforehand."""
    here, places = site(*companions), {"LD_LIBRARY_PATH": str(mock_driver), "FI_JIT": "off"}
    why = {target: here.why(OP, "--target", target, **places) for target in ("cpu", "sm_90a")}
    assert why["cpu"] == {"cpu": host or NOWHERE}
    assert why["sm_90a"] == {"cuda": host or NOWHERE, "cubin": device or NOWHERE}
    kernels = here.probe(OP, FI_CUDA_ARCH_LIST="9.0a", **places)["kernels"]
    for name, expected in (
        (f"{OP}_cpu", {"host": host}),
        (f"{OP}_cuda_sm_90a", {"host": host, "cubin": device}),
    ):
        if all(expected.values()):
            assert kernels[name] == expected
        else:
            assert re.match(f"MissingKernelError: kernel '{OP}_c\\w+' is not prebuilt", kernels[name])
            assert 'pip install "fi-core[prebuilt]"' in kernels[name]


@pytest.mark.parametrize(("companions", "package"), [((), HOST), (("fi_jit_cache",), DEVICE)])
def test_without_a_compiler_the_message_says_what_to_install(
    companions: tuple[str, ...], package: str, site: Callable[..., Site], mock_driver: Path
) -> None:
    """FI_JIT=on, no compiler, not prebuilt: the error names the package that would serve."""
    places = {"LD_LIBRARY_PATH": str(mock_driver), "FI_CUDA_ARCH_LIST": "9.0a"}
    with open_store() as store:
        kernels = site(*companions).probe(OP, FI_CACHE_DIR=str(store), **places)["kernels"]
    text = kernels[f"{OP}_cuda_sm_90a" if companions else f"{OP}_cpu"]
    assert text.startswith("CompileError") and f"pip install {package}" in text


def forge(here: Site, package: str, artifact: str, content: bytes) -> None:
    """Replaces a file and its digest in the index: what a broken build would ship."""
    data = here.packages / package / "data"
    index = json.loads((data / "index.json").read_text())
    (key,) = (key for key in index["artifacts"] if key.endswith(f"/{artifact}"))
    (data / index["artifacts"][key]["file"]).write_bytes(content)
    index["artifacts"][key].update(sha256=hashlib.sha256(content).hexdigest(), span=None)
    (data / "index.json").write_text(json.dumps(index))


def say(here: Site, **values: Any) -> None:
    """Changes the head of fi-jit-cache's index."""
    path = here.packages / "fi_jit_cache" / "data" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def module(here: Site) -> Path:
    (path,) = (here.packages / "fi_jit_cache" / "data").glob(f"*/{OP}_cpu.so")
    return path


def edit_header(here: Site) -> None:
    with open(here.packages / "fi_kernels" / "include" / "fi" / "host" / "tensor.h", "a") as header:
        header.write("// changed\n")


def flip_byte(here: Site) -> None:
    content = bytearray(module(here).read_bytes())
    content[len(content) // 2] ^= 1
    module(here).write_bytes(content)


UNFIT: dict[str, tuple[Callable[[Site], object], str]] = {
    "sources": (edit_header, "was built from other sources"),
    "digest": (flip_byte, "does not match its digest"),
    "file": (lambda here: module(here).unlink(), "No such file"),
    "format": (lambda here: forge(here, "fi_jit_cache", f"{OP}_cpu", b"not a module"), f"{OP}_cpu: "),
    "abi": (lambda here: say(here, abi="tvm-ffi-9"), "built for tvm-ffi-9"),
    "schema": (lambda here: say(here, schema=99), "schema 99"),
    "version": (lambda here: say(here, version="0.0.9"), "its version 0.0.9 is not that of fi-core"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_passed_over(case: str, site: Callable[..., Site]) -> None:
    """One reason in the log; then the next place serves: here the JIT, or an error where nothing may be compiled."""
    damage, reason = UNFIT[case]
    with open_folder("fi-unfit-") as folder:
        here = site("fi_jit_cache").copy(folder / "site")
        damage(here)
        refused = here.probe(f"{OP}_cpu", FI_JIT="off")
        with open_store() as store:
            served = here.probe(f"{OP}_cpu", PATH=os.environ["PATH"], FI_CACHE_DIR=str(store))
    assert refused["kernels"][f"{OP}_cpu"].startswith("MissingKernelError")
    assert served["kernels"] == {f"{OP}_cpu": {"host": "jit"}}
    for found in (refused, served):
        (line,) = (line for line in found["log"] if "skipped" in line)
        assert f"{HOST} skipped: " in line and reason in line


def test_an_image_that_the_driver_refuses_is_passed_over(site: Callable[..., Site], mock_driver: Path) -> None:
    with open_folder("fi-unfit-") as folder:
        here = site(*BOTH).copy(folder / "site")
        forge(here, "fi_cubin", f"{OP}_cuda_sm_90a", packed(b"not an image"))
        found = here.probe(f"{OP}_cuda_sm_90a", FI_JIT="off", LD_LIBRARY_PATH=str(mock_driver))
    assert found["kernels"][f"{OP}_cuda_sm_90a"].startswith("MissingKernelError")
    (line,) = (line for line in found["log"] if "skipped" in line)
    assert f"{DEVICE} skipped: " in line and "CUDA_ERROR_INVALID_IMAGE" in line


def test_other_targets(site: Callable[..., Site], mock_driver: Path) -> None:
    """A later minor of a major takes the image of the earlier one; an "a" image serves its own capability only."""
    places = {"LD_LIBRARY_PATH": str(mock_driver), "FI_JIT": "off"}
    kernels = site(*BOTH).probe(f"{OP}_cuda", FI_CUDA_ARCH_LIST="8.7", FI_MOCK_CAPABILITY="87", **places)["kernels"]
    assert kernels == {f"{OP}_cuda_sm_87": {"host": HOST, "cubin": DEVICE}}
    assert site(*BOTH).why(OP, "--target", "sm_103a", **places) == {"cuda": HOST, "cubin": NOWHERE}


# Those of fi_core.profiles that differ in their layers, and options of serving.
CONFIGURATIONS = {
    "llama-8b": (), "llama-1b": ("--kv-dtype", "float8_e5m2"), "gemma2-9b": ("--page-size", "1"),
    "gpt-oss-20b": (), "mixtral-8x7b": ("--tp", "8"), "qwen3-30b-a3b": ("--lora",),
    "qwen3-235b-a22b-fp8": ("--kv-dtype", "float8_e4m3fn"), "qwen3-next-80b-a3b": ("--spec-tokens", "4"),
    "deepseek-v3": (), "kimi-k2": ("--kv-dtype", "float8_e4m3fn", "--page-size", "64"),
    "llama-8b-nvfp4": ("--dtype", "float16"), "llama-8b-mxfp4": (),
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("model", CONFIGURATIONS)
def test_a_model_is_served_without_compilers(model: str, site: Callable[..., Site]) -> None:
    """Every file that `prebuild --model` lists comes from the wheels; a test above binds each of them."""
    here, options = site(*BOTH), ("--model", model, *CONFIGURATIONS[model], "--target", "sm_90a")
    done = here.run(here.python.with_name("fi-core"), "prebuild", *options, "--list", "--json", FI_JIT="off")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missing"] == 0 and {file["from"] for file in found["files"]} == {HOST, DEVICE}


def serve(folder: Path, device: str, *options: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code and lines of tools/served.py."""
    line = [sys.executable, ROOT / "tools/served.py", folder, f"--device={device}", *options]
    done = subprocess.run(line, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.whole
@pytest.mark.parametrize("arch", [target.arch for target in aot.targets() if target.kind == "cuda"])
def test_serving_calls_of_every_model_are_made_on_the_wheels_alone(
    arch: str, wheels: dict[str, Path], mock_driver: Path
) -> None:
    """No program on the path, an empty store, FI_JIT=off: every launch is computed, and every binary bound."""
    target = Target("cuda", arch)
    places = {"LD_LIBRARY_PATH": str(mock_driver), "FI_MOCK_CAPABILITY": str(target.capability)}
    code, lines = serve(wheels["fi_core"].parent, str(target), **places)
    assert code == 0, lines
    (line,) = lines
    found = re.fullmatch(rf"(\d+) calls on {target}, (\d+) kernels, \d+ s: 0 findings", line)
    assert found and int(found[1]) > 700 and int(found[2]) > 50


def test_a_call_that_the_wheels_do_not_serve_is_named(wheels: dict[str, Path], tmp_path: Path) -> None:
    """The calls of a function run on the CPU, compared with its reference; without its module none does."""
    code, (line,) = serve(wheels["fi_core"].parent, "cpu", "--functions", "rmsnorm")
    assert code == 0 and re.fullmatch(r"2 calls on cpu, 1 kernels, \d+ s: 0 findings", line)
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / wheel.name, "w") as part:
            for name in whole.namelist():
                if not name.endswith("/rmsnorm_cpu.so"):
                    part.writestr(name, whole.read(name))
    code, (*lines, last) = serve(tmp_path, "cpu", "--functions", "rmsnorm")
    assert code == 1 and len(lines) == 2 and last.endswith(": 2 findings")
    assert re.match(r"llama-8b \w+ kv .*: rmsnorm \{.*: MissingKernelError: kernel 'rmsnorm_cpu' is not", lines[0])


def test_installed_packages_do_not_stand_in_for_a_wheel(wheels: dict[str, Path], tmp_path: Path) -> None:
    for name in ("fi_core", "fi_kernels", "fi_bench"):
        shutil.copy(wheels[name], tmp_path)
    code, lines = serve(tmp_path, "cpu", "--functions", "rmsnorm")
    assert code == 1 and any(line.endswith("fi_jit_cache/data: is not of the wheels") for line in lines), lines
