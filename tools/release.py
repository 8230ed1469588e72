"""The checks of `nox -s release` that no tool has: the state of the tree, bills of materials, and what to upload.

`python tools/release.py check` before the build, `... bills dist` and `... uploads dist` after it. Nothing is tagged,
signed or uploaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ("FI_CUDA_ARCH_LIST", "FI_AOT_OPS")  # of what the binary packages hold


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def problems(version: str, changelog: str, changes: str, tags: list[str], pending: list[str]) -> Iterator[str]:
    """What keeps a tree from being released.

    Args:
        version: of the packages.
        changelog: the text of CHANGELOG.md.
        changes: the output of `git status --porcelain`.
        tags: those of HEAD; a tree without one is checked before it is tagged.
        pending: the files of changes/ that no section holds yet.
    """
    if changes:
        yield f"the tree has changes that are not committed: {changes.splitlines()[0]}"
    first = next(iter(re.findall(r"^## (.*)", changelog, re.MULTILINE)), "none")
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", first):
        yield f"CHANGELOG.md: '## {version} - YYYY-MM-DD' is required as its first section; got {first!r}"
    if pending:
        new = "write a new version into VERSION, this one has its section, and " * first.startswith(f"{version} -")
        yield f"changes/: {new}run `nox -s changelog`, which moves {', '.join(pending)} into a section"
    if tags and f"v{version}" not in tags:
        yield f"HEAD has the tag {', '.join(tags)}; VERSION says v{version}"


def check() -> int:
    version = (ROOT / "VERSION").read_text().strip()
    tags = [tag for tag in git("tag", "--points-at", "HEAD").splitlines() if tag.startswith("v")]
    pending = sorted(path.name for path in (ROOT / "changes").glob("*.*.md"))
    found = list(problems(version, (ROOT / "CHANGELOG.md").read_text(), git("status", "--porcelain"), tags, pending))
    for line in found:
        print(f"release: {line}")
    return bool(found)


def bills(folder: Path) -> int:
    """Validates the bill of materials of each wheel by the strict schema of CycloneDX."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    failed = 0
    for wheel in sorted(folder.rglob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if re.search(r"\.dist-info/sboms/[^/]+\.cdx\.json$", n))
            text = archive.read(name).decode()
        error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
        failed += error is not None
        print(f"{wheel.name}: {len(json.loads(text)['components'])} components, {error or 'valid'}")
    return bool(failed)


def uploads(folder: Path) -> int:
    """Prints what a person does with the files."""
    version = (ROOT / "VERSION").read_text().strip()
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    if limits:
        print(f"A trial with {' and '.join(limits)}: every step has passed, and nothing is to be uploaded.")
        return 0
    files = sorted(path for pattern in ("*.whl", "*.tar.gz") for path in folder.rglob(pattern))
    print(f"Release {version} of {git('rev-parse', 'HEAD')} is ready. A person now")
    print(f"  tags the commit:            git tag -s v{version}, and pushes the tag")
    print("  uploads, with attestations of a trusted publisher:")
    for path in files:
        print(f"    {path.relative_to(folder)}  {path.stat().st_size / 1e6:.2f} MB")
    print(f"  publishes beside them:      {folder / 'provenance.intoto.json'}")
    print("  compares what is published: nox -s rebuild -- --against FOLDER, in the tagged commit")
    return 0


def main() -> int:
    step, *rest = sys.argv[1:] or [""]
    if step == "check" and not rest:
        return check()
    if step in ("bills", "uploads") and len(rest) == 1:
        return (bills if step == "bills" else uploads)(Path(rest[0]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
