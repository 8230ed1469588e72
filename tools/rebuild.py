"""Builds the packages from two clones in places that differ, or compares one build with published files by content.

`python tools/rebuild.py` clones HEAD twice and builds wheel and sdist of every package in each clone, without the store
of compiled kernels. The second clone lies under a long path, with another umask, time zone, hash seed and number of
jobs. Every file must have the same bytes. `--against FOLDER` builds once and compares with the wheels of a folder by
content: unpacked binaries, modules, sources and METADATA, since another zlib or liblzma packs the same content to other
bytes. Names of packages limit both to these; FI_CUDA_ARCH_LIST and FI_AOT_OPS limit what the binary packages hold.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fi-kernels", "fi-core", "fi-jit-cache", "fi-cubin", "fi-bench")
HERE = {"TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
ELSEWHERE = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7", "MAX_JOBS": "1"}


def build(
    commit: str, clone: Path, out: Path, packages: tuple[str, ...], umask: int, environment: Mapping[str, str]
) -> None:
    """Clones a commit and builds wheel and sdist of each package, as `python -m build` does, without the store."""
    os.umask(umask)
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", "--no-checkout", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=clone, check=True)
    for name in packages:
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", str(out)]
        variables = {**os.environ, "FI_AOT_STORE": "", **environment}
        subprocess.run([*command, str(clone / "packages" / name)], env=variables, check=True, stdout=sys.stderr)


def entries(path: Path) -> dict[str, bytes]:
    """The files of a wheel or an sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(path) as archive:
        members = ((member.name, archive.extractfile(member)) for member in archive if member.isfile())
        return {name: file.read() for name, file in members if file}


def contents(path: Path) -> dict[str, bytes]:
    """The entries without what packing decides: device binaries unpacked, no RECORD, and in the index and the bill of
    materials no digest or size of a packed file and no digest of a compiler.
    """
    found = {}
    for name, content in entries(path).items():
        if name.endswith("/RECORD"):
            continue
        if name.endswith(".xz"):
            content = lzma.decompress(content)
        elif name.endswith("/data/index.json"):
            index = json.loads(content)
            for entry in index["artifacts"].values():
                del entry["sha256"], entry["size"]
            del index["compilers"]
            content = json.dumps(index).encode()
        elif name.endswith(".cdx.json"):
            bill = json.loads(content)
            parts = [part for part in bill["components"] if part["type"] != "application"]
            content = json.dumps([{**part, "hashes": None} for part in parts]).encode()
        found[name] = content
    return found


def differences(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> Iterator[str]:
    """A line for each entry that differs: its name, and the sizes and the offset of the first other byte."""
    for name in sorted({*one, *other}):
        a, b = one.get(name), other.get(name)
        if a is None or b is None:
            yield f"{name}: only in the {'second' if a is None else 'first'}"
        elif a != b:
            offset = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            yield f"{name}: {len(a)} and {len(b)} bytes, the first difference at {offset}"


def compare(first: Path, second: Path, *, by_content: bool = False) -> list[str]:
    """What differs between two folders of wheels and sdists, by bytes or by content; sdists by bytes alone."""
    patterns = ("*.whl",) if by_content else ("*.whl", "*.tar.gz")
    names = [{path.name: path for p in patterns for path in folder.glob(p)} for folder in (first, second)]
    if not names[0] or not names[1]:
        raise FileNotFoundError(f"{second if names[0] else first}: a folder with wheels is required; it holds none")
    found = []
    for name in sorted({*names[0], *names[1]}):
        a, b = names[0].get(name), names[1].get(name)
        if a is None or b is None:
            found.append(f"{name}: only in the {'second' if a is None else 'first'} folder")
        elif a.read_bytes() != b.read_bytes():
            read = contents if by_content else entries
            lines = list(differences(read(a), read(b)))
            found += [f"{name}: {line}" for line in lines]
            if not by_content:
                found += [] if lines else [f"{name}: the entries are equal, the archive is not"]
                found += _report(a, b)
    return found


def _report(a: Path, b: Path) -> list[str]:
    """diffoscope's report, where it is installed."""
    program = shutil.which("diffoscope")
    return (
        subprocess.run([program, str(a), str(b)], capture_output=True, text=True).stdout.splitlines() if program else []
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"default: {', '.join(PACKAGES)}")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="compare with its wheels by content")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the files of the first clone here")
    given = parser.parse_args()
    unknown = [name for name in given.packages if name not in PACKAGES]
    if unknown:
        parser.error(f"packages are {', '.join(PACKAGES)}; got {', '.join(unknown)}")
    packages = tuple(given.packages) or PACKAGES
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        print("note: HEAD is built; changes that are not committed are left out", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fi-rebuild-") as scratch:
        base = Path(scratch)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        commit = head.stdout.strip()  # of both clones, also if HEAD moves meanwhile
        build(commit, base / "one", base / "first", packages, 0o022, HERE)
        if given.against:
            wanted = re.compile("|".join(f"{name.replace('-', '_')}-" for name in packages))
            chosen = base / "second"
            chosen.mkdir()
            for wheel in given.against.glob("*.whl"):
                if wanted.match(wheel.name):
                    shutil.copy(wheel, chosen)
            found = compare(base / "first", chosen, by_content=True)
        else:
            long = base / "a folder" / ("long" * 30)
            build(commit, long / "clone", base / "second", packages, 0o077, ELSEWHERE)
            found = compare(base / "first", base / "second")
        count = len(list((base / "first").iterdir()))
        if given.out:
            shutil.copytree(base / "first", given.out, dirs_exist_ok=True)
    for line in found:
        print(line)
    print(f"{count} files of {len(packages)} packages, {len(found)} differences")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
