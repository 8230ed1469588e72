"""hatchling build hook of fi-cubin and fi-jit-cache: compiles the artifacts that their wheel ships.

`kinds` in [tool.hatch.build.targets.wheel.hooks.custom] says which. They are compiled from fi_core and fi_kernels of
the repository; an sdist gets copies of these. Nothing is compiled for an editable install, where the JIT serves live
sources, and nothing is written into the tree, which would poison the next editable install.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COPIES = "sources"  # of fi_core and fi_kernels, in an sdist
# The newest symbols that a system with the glibc of the tag is sure to have: those of GCC 11, of the age of glibc 2.34.
LIMITS: dict[str, tuple[int, ...]] = {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GOMP": (5, 0)}


def platform_tag(modules: Iterable[Path]) -> str:
    """The manylinux tag that the modules need, by the versions of the symbols they import."""
    machine = os.environ.get("FI_AOT_MACHINE") or platform.machine()
    objdump = "objdump" if machine == platform.machine() else f"{machine}-linux-gnu-objdump"
    need: dict[str, tuple[int, ...]] = {"GLIBC": (2, 17)}
    for module in modules:
        symbols = subprocess.run([objdump, "-T", str(module)], capture_output=True, text=True, check=True).stdout
        for library, version in re.findall(r"\(?\b(GLIBC|GLIBCXX|CXXABI|GOMP)_(\d[\d.]*)", symbols):
            need[library] = max(need.get(library, (0,)), tuple(map(int, version.split("."))))
    for library, limit in LIMITS.items():
        if need.get(library, (0,)) > limit:
            raise RuntimeError(f"modules need {library} {need[library]}, newer than {limit}: build with an older GCC")
    return f"manylinux_{need['GLIBC'][0]}_{need['GLIBC'][1]}_{machine}"


class PrebuiltHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="fi-hook-"))
        if version != "editable":
            try:
                include = self._sources if self.target_name == "sdist" else self._artifacts
                build_data["force_include"][str(self._scratch)] = include(build_data)
            except BaseException:
                self.finalize(version, build_data, "")
                raise

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _trees(self) -> list[Path]:
        """fi_core and fi_kernels: the copies in an sdist, else those of the repository."""
        root = Path(self.root)
        if (root / COPIES).is_dir():
            return [root / COPIES / "fi_core", root / COPIES / "fi_kernels"]
        trees = [root.parent / "fi-core/src/fi_core", root.parent / "fi-kernels/src/fi_kernels"]
        missing = [str(tree) for tree in trees if not tree.is_dir()]
        if missing:
            raise RuntimeError(f"no {' and no '.join(missing)}: build in the repository, or from an sdist")
        return trees

    def _sources(self, build_data: dict[str, Any]) -> str:
        for tree in self._trees():  # links become files
            shutil.copytree(tree, self._scratch / tree.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        return COPIES

    def _artifacts(self, build_data: dict[str, Any]) -> str:
        places = [str(tree.parent) for tree in self._trees()] + [path for path in sys.path if path]
        command = [sys.executable, "-m", "fi_core.aot", str(self._scratch), *self.config["kinds"]]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}, check=True)
        modules = sorted(self._scratch.rglob("*.so"))
        if modules:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(modules)}"
        return f"{self.metadata.name.replace('-', '_')}/data"
