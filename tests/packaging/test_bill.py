"""The bill of materials of each wheel: CycloneDX, every requirement and every binary, no time and no path."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from test_metadata import VERSION, requirements

pytestmark = pytest.mark.slow


def bill_of(wheel: Path) -> dict[str, Any]:
    name = wheel.name.split("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.startswith(f"{name}-{VERSION}.dist-info/sboms/"))
        found: dict[str, Any] = json.loads(archive.read(path))
    return found


def test_each_wheel_has_one(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        bill = bill_of(wheel)
        assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
        itself = bill["metadata"]["component"]
        assert itself["purl"] == f"pkg:pypi/{name.replace('_', '-')}@{VERSION}"
        assert itself["licenses"] == [{"license": {"id": "Apache-2.0"}}]
        assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", bill["serialNumber"])
        refs = [component["bom-ref"] for component in bill["components"]]
        assert len(set(refs)) == len(refs)
        assert {c["type"] for c in bill["components"]} <= {"library", "application", "file"}
        assert "timestamp" not in json.dumps(bill), "a rebuild gives the same bytes"
        assert {ref for d in bill["dependencies"] for ref in d.get("dependsOn", ())} <= set(refs)


def test_requirements_are_components(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        scopes = {c["name"]: c.get("scope") for c in bill_of(wheel)["components"] if c["type"] == "library"}
        for requirement in map(Requirement, requirements(wheel)):
            is_optional = requirement.marker is not None and "extra" in str(requirement.marker)
            assert scopes[requirement.name] == ("optional" if is_optional else None), requirement
        assert scopes["hatchling"] == "excluded"


def test_binaries_are_components(wheels: dict[str, Path]) -> None:
    for name in ("fi_cubin", "fi_jit_cache"):
        files = {c["name"]: c for c in bill_of(wheels[name])["components"] if c["type"] == "file"}
        with zipfile.ZipFile(wheels[name]) as archive:
            shipped = {n: archive.read(n) for n in archive.namelist() if re.fullmatch(rf"{name}/data/[^/]+/[^/]+", n)}
            index = json.loads(archive.read(f"{name}/data/index.json"))["artifacts"]
        assert set(files) == set(shipped)
        inside = []
        for path, component in files.items():
            digest = hashlib.sha256(shipped[path]).hexdigest()
            assert component["hashes"] == [{"alg": "SHA-256", "content": digest}]
            inside += component.get("components", [component])
        assert len(inside) == len(index)
        if name == "fi_cubin":  # whose files are archives
            unpacked = {component["name"]: component["hashes"][0]["content"] for component in inside}
            assert unpacked == {id.rpartition("/")[2]: entry["unpacked_sha256"] for id, entry in index.items()}
        for component in inside:
            assert {p["name"] for p in component["properties"]} == {"fi:closure", "fi:flags", "fi:compiler"}


def test_folders_that_scanners_take_for_packages_are_named(wheels: dict[str, Path]) -> None:
    """fi-core holds metadata of the distributions that it stands in for; see SECURITY.md."""
    with zipfile.ZipFile(wheels["fi_core"]) as archive:
        inside = {match[1] for n in archive.namelist() if (match := re.match(r"fi_core/.*?/([^/]+\.dist-info)/", n))}
    named = bill_of(wheels["fi_core"])["metadata"]["component"]["properties"]
    assert {p["value"] for p in named if p["name"] == "fi:alias"} == inside
