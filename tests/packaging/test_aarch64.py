"""The wheel of fi-jit-cache for aarch64: the modules of this machine's wheel, for the other one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from clean_site import ROOT

from fi_core import aot
from fi_core.runtime.build import compiler
from fi_core.runtime.resolve import store

pytestmark = pytest.mark.slow
OBJDUMP = "aarch64-linux-gnu-objdump"
INDEX = "fi_jit_cache/data/index.json"


@pytest.fixture(scope="module")
def foreign() -> Path:
    found = sorted((ROOT / "dist" / "aarch64").glob("fi_jit_cache-*.whl"))
    assert len(found) == 1, "apt-get install g++-aarch64-linux-gnu, then `nox -s wheels`"
    return found[0]


def test_it_has_what_this_machines_wheel_has(foreign: Path, wheels: dict[str, Path]) -> None:
    """Built from the same sources; only the machine differs."""
    assert re.search(r"-py3-none-manylinux_2_\d+_aarch64\.whl$", foreign.name)
    index = []
    for wheel in (wheels["fi_jit_cache"], foreign):
        with zipfile.ZipFile(wheel) as archive:
            index.append(json.loads(archive.read(INDEX)))
    own, other = ({name: e["closure"] for name, e in i["artifacts"].items()} for i in index)
    assert {re.sub("/[a-z0-9_]+/", "/aarch64/", name, count=1): closure for name, closure in own.items()} == other
    assert {key: index[0][key] for key in ("version", "schema", "abi")} == {
        key: index[1][key] for key in ("version", "schema", "abi")
    }


def test_its_compiler_has_no_complaint(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of the cross compiler lie beside the modules in the store, from which the wheel is made."""
    monkeypatch.setenv("FI_AOT_MACHINE", "aarch64")
    modules = aot.artifacts(("cpu", "cuda"))
    assert {module.target.arch for module in modules} == {"aarch64"}
    places = [store.peek(compiler.key(module)) for module in modules]
    assert None not in places, "run `nox -s wheels`"
    said = {log.name: log.read_text() for place in places if place for log in place.glob("*.log")}
    assert said == {}


def test_its_modules_are_of_aarch64(foreign: Path, tmp_path: Path) -> None:
    """Each is an ELF library for AArch64 that exports `bind`, and needs the libraries that a user has."""
    with zipfile.ZipFile(foreign) as archive:
        archive.extractall(tmp_path)
    modules = sorted(tmp_path.rglob("*.so"))
    assert modules
    known = {"libtvm_ffi.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libgomp.so.1", "libc.so.6"}
    for module in modules:
        assert module.read_bytes()[18:20] == b"\xb7\x00", "e_machine"
        said = subprocess.run([OBJDUMP, "-p", "-T", str(module)], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"NEEDED +(\S+)", said))
        assert "libtvm_ffi.so" in needed and needed <= known | {"ld-linux-aarch64.so.1"}, (module.name, needed)
        assert re.search(r"g +DF .* __tvm_ffi_bind$", said, re.MULTILINE), module.name


LOADER = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** paths) {
  for (int i = 1; i < count; ++i) {
    void* module = dlopen(paths[i], RTLD_LAZY | RTLD_LOCAL);
    if (!module || !dlsym(module, "__tvm_ffi_bind")) return fprintf(stderr, "%s: %s\n", paths[i], dlerror()), 1;
  }
  return puts("loaded") < 0;
}
"""


@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="qemu-user is not installed (Debian: qemu-user)")
def test_its_modules_load(foreign: Path, tmp_path: Path) -> None:
    """Under an emulator, with the libraries of Debian's cross compiler and a libtvm_ffi without symbols."""
    with zipfile.ZipFile(foreign) as archive:
        archive.extractall(tmp_path)
    compiler = "aarch64-linux-gnu-gcc"
    (tmp_path / "loader.c").write_text(LOADER)
    (tmp_path / "none.c").write_text("")
    subprocess.run([compiler, tmp_path / "loader.c", "-o", tmp_path / "loader", "-ldl"], check=True)
    library = tmp_path / "libtvm_ffi.so"
    name = f"-Wl,-soname,{library.name}"
    subprocess.run([compiler, "-shared", name, tmp_path / "none.c", "-o", library], check=True)
    line = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={tmp_path}", tmp_path / "loader"]
    done = subprocess.run([*line, *sorted(tmp_path.rglob("fi_jit_cache/**/*.so"))], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
