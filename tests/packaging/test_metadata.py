"""What the wheels say of themselves and hold: versions, pins, extras, entry points, types, licence; sdists too."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
REQUIRES = {
    "fi_bench": {f"fi-core=={VERSION}", "rich", "rich-argparse", "nvidia-ml-py"},
    "fi_core": {
        f"fi-kernels=={VERSION}", "apache-tvm-ffi<0.2,>=0.1.9", "ninja", "jinja2", "filelock", "torch>=2.10",
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
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
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
        extra = {n for n in names - files if not n.startswith((info, f"{name}/data/"))}
        assert not extra, name


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
    providers = {point.name: point.load() for point in metadata.entry_points(group="fi.artifacts")}
    assert set(providers) == {"jit_cache", "cubin"}
    assert all(isinstance(folder, Path) and folder.name == "data" for folder in providers.values())


@pytest.mark.parametrize("package", ["fi-core", "fi-kernels", "fi-bench"])
def test_a_wheel_from_the_sdist_is_the_same(package: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    """The sdist holds what its build needs: the hook, VERSION and no link to outside."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT / "packages" / package)], capture_output=True, check=True)
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(sdist) as archive:
        assert [member.name for member in archive if not member.isfile()] == []
    with zipfile.ZipFile(wheel) as built, zipfile.ZipFile(wheels[package.replace("-", "_")]) as shipped:
        assert {n: built.read(n) for n in built.namelist()} == {n: shipped.read(n) for n in shipped.namelist()}
