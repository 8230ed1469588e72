"""What the wheels say of themselves and hold: versions, pins, extras, entry points, types, licence; sdists too."""

from __future__ import annotations

import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

from fi_core import aot
from fi_core.runtime.build import compiler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
LIMIT = 20_000_000  # bytes of the five wheels together
SAMPLED, SAMPLED_HOST = 47, 17  # of so many binaries one is compiled again: a second each, and 4 of a host module
REQUIRES = {
    "fi_bench": {
        f"fi-core=={VERSION}", "jinja2", "rich", "rich-argparse", "nvidia-ml-py", "tomli; python_version < '3.11'",
    },
    "fi_core": {
        f"fi-kernels=={VERSION}", "apache-tvm-ffi<0.2,>=0.1.9", "jinja2", "torch>=2.10",
    },
    "fi_cubin": set(),
    "fi_jit_cache": set(),
    "fi_kernels": set(),
}  # fmt: skip
EXTRAS = {
    f"fi-jit-cache=={VERSION}; extra == 'prebuilt'",
    f"fi-cubin=={VERSION}; extra == 'prebuilt'",
    f"fi-bench=={VERSION}; extra == 'bench'",
    "cuda-toolkit[cccl,crt,nvcc,nvvm]==13.0.*; extra == 'nvcc'",
}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = f"{wheel.stem.split('-')[0]}-{VERSION}.dist-info/METADATA"  # fi-core has others inside, for its alias
        return Parser().parsestr(archive.read(name).decode())


def requirements(wheel: Path) -> set[str]:
    return set(metadata_of(wheel).get_all("Requires-Dist") or ())


def test_versions_and_pins(wheels: dict[str, Path]) -> None:
    assert {name: metadata_of(wheel)["Version"] for name, wheel in wheels.items()} == dict.fromkeys(wheels, VERSION)
    plain = {name: {r for r in requirements(wheel) if "extra ==" not in r} for name, wheel in wheels.items()}
    assert plain == REQUIRES
    assert {r for r in requirements(wheels["fi_core"]) if "extra ==" in r} == EXTRAS


def test_contents(wheels: dict[str, Path]) -> None:
    """Everything of the tree and nothing else: all sources, py.typed, the licence, no build leftovers."""
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        folder = ROOT / "packages" / name.replace("_", "-") / "src" / name
        files = {p.relative_to(folder.parent).as_posix() for p in folder.rglob("*") if p.is_file()}
        files = {f for f in files if "__pycache__" not in f}
        info = f"{name}-{VERSION}.dist-info/"
        assert files <= names, name
        assert {f"{name}/py.typed", f"{name}/VERSION", f"{info}licenses/LICENSE"} <= names
        assert name != "fi_core" or "fi_core/__init__.pyi" in names
        extra = {n for n in names - files if not n.startswith((info, f"{name}/data/"))}
        assert extra <= {"fi_core/COMMIT"}, name


def test_the_commit(wheels: dict[str, Path]) -> None:
    """A wheel of sources without changes tells their commit; others tell none. The index of binaries says the same."""
    told = json.loads(data_of(wheels["fi_cubin"])["index.json"])["commit"]
    with zipfile.ZipFile(wheels["fi_core"]) as archive:
        written = archive.read("fi_core/COMMIT").decode().strip() if "fi_core/COMMIT" in archive.namelist() else None
    assert written == told
    code = "import fi_core; print(fi_core.__git_commit__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "docs")
    assert done.stdout.strip() == (told or "unknown")


def test_installed_packages_are_those_of_the_wheels(wheels: dict[str, Path]) -> None:
    """The tests of this folder run against what was installed, not against the tree."""
    code = f"import {', '.join(wheels)}\nfor m in ({', '.join(wheels)}): print(m.__file__, m.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "docs")
    for line in done.stdout.splitlines():
        file, version = line.split()
        assert version == VERSION
        assert not Path(file).is_relative_to(ROOT / "packages")
    scripts = {point.name: point.value for point in metadata.entry_points(group="console_scripts")}
    assert scripts["fi-core"] == "fi_core.cli:main"
    assert scripts["fi-bench"] == "fi_bench.cli:main"
    (plugin,) = metadata.entry_points(group="vllm.general_plugins", name="fi")
    assert callable(plugin.load())
    providers = {point.name: point.load() for point in metadata.entry_points(group="fi.artifacts")}
    assert set(providers) == {"jit_cache", "cubin"}
    assert all(isinstance(folder, Path) and folder.name == "data" for folder in providers.values())


def build(package: str, folder: Path, *options: str, **environment: str) -> tuple[Path, Path]:
    """sdist and the wheel made from it, in a folder of its own."""
    command = [sys.executable, "-m", "build", *options, "--outdir", str(folder), str(ROOT / "packages" / package)]
    subprocess.run(command, env={**os.environ, "FI_AOT_STORE": "", **environment}, check=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist) as archive:
        assert [member.name for member in archive if not member.isfile()] == []
    return sdist, wheel


@pytest.mark.parametrize("package", ["fi-core", "fi-kernels", "fi-bench"])
def test_a_wheel_from_the_sdist_is_the_same(package: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    """The sdist holds what its build needs: the hook, VERSION and no link to outside."""
    _, built = build(package, tmp_path, "--no-isolation")
    assert built.read_bytes() == wheels[package.replace("-", "_")].read_bytes()


@pytest.mark.index
def test_jit_cache_is_reproducible(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Built again, from the sdist, in another folder, with nothing but what it asks pip for: the same bytes.

    The keys of its modules find them in the store; the test after the next compiles a sample.
    """
    _, built = build("fi-jit-cache", tmp_path, FI_AOT_STORE="1")
    assert built.name == wheels["fi_jit_cache"].name
    assert built.read_bytes() == wheels["fi_jit_cache"].read_bytes()


@pytest.mark.index
def test_cubin_is_reproducible(wheels: dict[str, Path], tmp_path: Path) -> None:
    """As above, for one architecture: its files are those of the whole wheel."""
    _, narrow = build("fi-cubin", tmp_path, FI_CUDA_ARCH_LIST="8.0", FI_AOT_STORE="1")
    assert narrow.name == wheels["fi_cubin"].name
    part, whole = data_of(narrow), data_of(wheels["fi_cubin"])
    index, full = json.loads(part.pop("index.json")), json.loads(whole.pop("index.json"))
    assert part == {name: content for name, content in whole.items() if name.startswith("sm_80/")}
    assert index.pop("artifacts").items() <= full.pop("artifacts").items()
    assert index == full


def test_binaries_are_what_the_compilers_make(wheels: dict[str, Path], tmp_path: Path) -> None:
    """A sample, compiled now in another folder: the wheels may hold what the store had."""
    device, host = data_of(wheels["fi_cubin"]), data_of(wheels["fi_jit_cache"])
    index = json.loads(device["index.json"])["artifacts"]
    shipped = {}
    for artifact in aot.artifacts(("cubin",)):
        entry = index[artifact.id]
        content = lzma.decompress(device[entry["file"]])
        shipped[f"{artifact.target}/{artifact.file}"] = content[slice(*entry["span"])]
    for artifact in [*aot.artifacts(("cubin",))[::SAMPLED], *aot.artifacts(("cpu", "cuda"))[::SAMPLED_HOST]]:
        compiler.compile_artifact(artifact, tmp_path)
        name = f"{artifact.target}/{artifact.file}"
        assert (tmp_path / artifact.file).read_bytes() == (shipped | host)[name], name


@pytest.mark.parametrize("package", ["fi-cubin", "fi-jit-cache"])
def test_an_editable_install_compiles_nothing(package: str, tmp_path: Path) -> None:
    """There the JIT serves live sources; a folder of data in the tree would be stale with the next edit."""
    folder = ROOT / "packages" / package
    code = "import sys, hatchling.build as b; print(b.build_editable(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=folder, check=True, capture_output=True)
    wheel = tmp_path / done.stdout.decode().split()[-1]
    assert wheel.name.endswith("-py3-none-any.whl")
    assert data_of(wheel) == {}
    assert list(folder.glob("src/*/data")) == []


def test_a_package_without_its_sources_says_so(tmp_path: Path) -> None:
    """A folder copied out of the repository cannot be built; nothing is shipped empty."""
    shutil.copytree(ROOT / "packages" / "fi-cubin", tmp_path / "fi-cubin")
    code = "import sys, hatchling.build as b; b.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path / "fi-cubin", capture_output=True, text=True)
    assert done.returncode == 1
    assert "build in the repository, or from an sdist" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []


def data_of(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel below data/."""
    with zipfile.ZipFile(wheel) as archive:
        return {n.split("/data/", 1)[1]: archive.read(n) for n in archive.namelist() if "/data/" in n}


def test_binary_wheels_hold_the_grid_of_every_op(wheels: dict[str, Path]) -> None:
    """Each artifact is listed in the index with its file and the compiler that made it."""
    for name, kinds, compiler_name in (
        ("fi_jit_cache", ("cpu", "cuda"), "c++"),
        ("fi_cubin", ("cubin",), "nvrtc"),
    ):
        files = data_of(wheels[name])
        index = json.loads(files.pop("index.json"))
        assert set(index["artifacts"]) == {artifact.id for artifact in aot.artifacts(kinds)}
        assert {entry["file"] for entry in index["artifacts"].values()} == set(files)
        assert {made_by["name"] for made_by in index["compilers"].values()} == {compiler_name}
        assert {entry["compiler"] for entry in index["artifacts"].values()} == set(index["compilers"])
        assert index["version"] == VERSION


def test_tags(wheels: dict[str, Path]) -> None:
    """fi-jit-cache names the glibc that it needs; every other wheel runs on any platform."""
    tags = {name: wheel.stem.split("-", 2)[2] for name, wheel in wheels.items()}
    jit_cache = tags.pop("fi_jit_cache")
    assert set(tags.values()) == {"py3-none-any"}
    found = re.fullmatch(rf"py3-none-manylinux_2_(\d+)_{platform.machine()}", jit_cache)
    assert found, jit_cache
    need = 0
    for name, content in data_of(wheels["fi_jit_cache"]).items():
        if name.endswith(".so"):
            need = max([need, *(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", content))])
    assert int(found[1]) == max(need, 17)


def test_no_path_of_the_build_machine(wheels: dict[str, Path]) -> None:
    """No file contains the path of the build folder, which differs from machine to machine."""
    places = {str(ROOT), str(Path(sys.prefix)), str(Path.home()), tempfile.gettempdir()} - {"/"}
    for wheel in (wheels["fi_jit_cache"], wheels["fi_cubin"]):
        for name, content in data_of(wheel).items():
            assert [place for place in places if f"{place}/".encode() in content] == [], name


def test_sizes(wheels: dict[str, Path]) -> None:
    sizes = {name: wheel.stat().st_size for name, wheel in wheels.items()}
    assert sum(sizes.values()) <= LIMIT, sizes
