"""hatchling build hook of the five packages: a bill of materials in each wheel, and binaries in those of `kinds`.

`commit` adds the file COMMIT, which tells an installed package the commit of its sources. FI_GIT_COMMIT names that of a
tree without a repository, such as an unpacked archive; sources with changes get no such file.

`kinds` in [tool.hatch.build.targets.wheel.hooks.custom] names the artifacts that a wheel ships. They are compiled from
fi_core and fi_kernels of the repository; an sdist gets copies of these. Nothing is compiled for an editable install,
where the JIT serves live sources, and nothing is written into the tree, which would poison the next editable install.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement

COPIES = "sources"  # of fi_core and fi_kernels, in an sdist
ORIGIN = "origin.json"  # beside them: the commit and the git tree that they are of
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


def origin(repository: Path) -> dict[str, str | None]:
    """The commit and the git tree of a repository; None where it has changes. Without one the commit is FI_GIT_COMMIT.

    Raises:
        ValueError: FI_GIT_COMMIT is no commit.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=repository, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) == repository.resolve():
            if git("status", "--porcelain"):
                return {"commit": None, "tree": None}
            return {"commit": git("rev-parse", "HEAD"), "tree": git("rev-parse", "HEAD^{tree}")}
    except (OSError, subprocess.CalledProcessError):
        pass
    told = os.environ.get("FI_GIT_COMMIT")
    if told and not re.fullmatch("[0-9a-f]{40}", told):
        raise ValueError(f"FI_GIT_COMMIT: a commit of 40 hex digits is required; got {told!r}")
    return {"commit": told or None, "tree": None}


def _component(requirement: str, **more: Any) -> dict[str, Any]:
    """A requirement as a component; its version is known only where it is pinned."""
    wanted = Requirement(requirement)
    pins = [s.version for s in wanted.specifier if s.operator == "==" and "*" not in s.version]
    version = {"version": pins[0]} if pins else {}
    purl = f"pkg:pypi/{wanted.name}" + (f"@{pins[0]}" if pins else "")
    said = {"name": "fi:requirement", "value": str(wanted)}
    return {
        "type": "library",
        "bom-ref": purl,
        "name": wanted.name,
        **version,
        "purl": purl,
        "properties": [said],
        **more,
    }


def _binaries(index: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """The shipped files, those within archives as their components, and the compilers that made them."""
    found: list[dict[str, Any]] = []
    for name, made_by in sorted(index["compilers"].items()):
        digests = [{"name": f"sha256:{file}", "value": digest} for file, digest in sorted(made_by["files"].items())]
        found.append({
            "type": "application", "bom-ref": f"tool:{name}", "name": made_by["name"], "version": made_by["version"],
            "scope": "excluded", "properties": digests,
        })  # fmt: skip
    files: dict[str, dict[str, Any]] = {}
    for name, entry in sorted(index["artifacts"].items(), key=lambda item: (str(item[1]["file"]), item[1]["span"])):
        properties = {
            "fi:closure": entry["closure"],
            "fi:flags": " ".join(entry["flags"]),
            "fi:compiler": entry["compiler"],
        }
        said = {"properties": [{"name": name, "value": value} for name, value in properties.items()]}
        file, binary = str(entry["file"]), name.rpartition("/")[2]
        whole = files.setdefault(file, {
            "type": "file", "bom-ref": f"file:{file}", "name": f"{folder}/{file}",
            "hashes": [{"alg": "SHA-256", "content": entry["sha256"]}],
        })  # fmt: skip
        if entry["span"] is None:
            whole.update(said)
            continue
        whole.setdefault("components", []).append({
            "type": "file", "bom-ref": f"file:{file}/{binary}", "name": binary,
            "hashes": [{"alg": "SHA-256", "content": entry["unpacked_sha256"]}], **said,
        })  # fmt: skip
    found += files.values()
    return found


def bill(name: str, version: str, description: str, requirements: Iterable[str], extras: Iterable[str],
         tools: Iterable[str], aliases: Iterable[str], binaries: list[dict[str, Any]]) -> dict[str, Any]:  # fmt: skip
    """The CycloneDX 1.6 document of a wheel. It holds no time and no path, so that a rebuild gives the same bytes.

    Args:
        requirements, extras, tools: what it needs, what its extras need, and what built it.
        aliases: metadata folders inside that name another distribution.
        binaries: the components of its binaries.
    """
    purl = f"pkg:pypi/{name}@{version}"
    needed = [_component(text) for text in sorted(requirements)]
    known = {component["bom-ref"] for component in needed}
    optional = {c["bom-ref"]: c for c in (_component(text, scope="optional") for text in sorted(extras))}
    built_by = {c["bom-ref"]: c for c in (_component(text, scope="excluded") for text in sorted(tools))}
    others = {ref: component for ref, component in {**built_by, **optional}.items() if ref not in known}
    itself: dict[str, Any] = {
        "type": "library", "bom-ref": purl, "name": name, "version": version, "description": description,
        "licenses": [{"license": {"id": "Apache-2.0"}}], "purl": purl,
    }  # fmt: skip
    named = [{"name": "fi:alias", "value": alias} for alias in sorted(aliases)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, purl)}",
        "version": 1,
        "metadata": {"component": itself | ({"properties": named} if named else {})},
        "components": [*needed, *others.values(), *binaries],
        "dependencies": [{"ref": purl, "dependsOn": sorted(known)}, *({"ref": ref} for ref in sorted(known))],
    }


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="fi-hook-"))
        if version == "editable":
            return
        try:
            if self.config.get("commit"):
                self._commit(build_data)
            elif self.target_name == "sdist":
                build_data["force_include"][str(self._scratch)] = self._sources()
            elif self.config.get("kinds"):
                build_data["force_include"][str(self._scratch)] = self._artifacts(build_data)
            if self.target_name == "wheel":
                build_data["sbom_files"].append(str(self._bill()))
        except BaseException:
            self.finalize(version, build_data, "")
            raise

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        shutil.rmtree(self._bills, ignore_errors=True)

    @property
    def _bills(self) -> Path:
        return self._scratch.with_name(f"{self._scratch.name}-bill")

    @property
    def _module(self) -> str:
        return str(self.metadata.name).replace("-", "_")

    def _commit(self, build_data: dict[str, Any]) -> None:
        """Adds COMMIT, at the top of an sdist, unless the sources are of no commit."""
        copied = Path(self.root) / "COMMIT"
        commit = copied.read_text().strip() if copied.is_file() else self._origin()["commit"]
        if commit:
            written = self._scratch / "COMMIT"
            written.write_text(f"{commit}\n")
            place = "COMMIT" if self.target_name == "sdist" else f"{self._module}/COMMIT"
            build_data["force_include"][str(written)] = place

    def _bill(self) -> Path:
        """Writes the bill of materials of the wheel."""
        core = self.metadata.core
        index = self._scratch / "index.json"
        binaries = _binaries(json.loads(index.read_text()), f"{self._module}/data") if index.is_file() else []
        tools = [*self.metadata.build.requires, *self.config.get("dependencies", ())]
        extras = [text for texts in core.optional_dependencies.values() for text in texts]
        aliases = [path.name for path in (Path(self.root) / "src").rglob("*.dist-info")]
        said = bill(
            self.metadata.name, self.metadata.version, core.description, core.dependencies, extras, tools, aliases,
            binaries,
        )  # fmt: skip
        self._bills.mkdir()
        path = self._bills / f"{self.metadata.name}.cdx.json"
        path.write_text(json.dumps(said, indent=1) + "\n")
        return path

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

    def _sources(self) -> str:
        for tree in self._trees():  # links become files
            shutil.copytree(tree, self._scratch / tree.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        (self._scratch / ORIGIN).write_text(json.dumps(self._origin()) + "\n")
        return COPIES

    def _origin(self) -> dict[str, str | None]:
        """The origin of the sources: as the sdist says, else of the repository."""
        copied = Path(self.root) / COPIES / ORIGIN
        found: dict[str, str | None] = json.loads(copied.read_text()) if copied.is_file() else {}
        return found or origin(Path(self.root).resolve().parent.parent)

    def _artifacts(self, build_data: dict[str, Any]) -> str:
        places = [str(tree.parent) for tree in self._trees()] + [path for path in sys.path if path]
        command = [sys.executable, "-m", "fi_core.aot", str(self._scratch), *self.config["kinds"]]
        command += ["--origin", json.dumps(self._origin())]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}, check=True)
        modules = sorted(self._scratch.rglob("*.so"))
        if modules:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(modules)}"
        return f"{self._module}/data"
