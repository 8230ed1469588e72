"""`fi-core verify` on the installed wheels: a sound set passes soon, and each kind of change is found."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from typing import Any

import pytest
from clean_site import Site, open_folder

pytestmark = pytest.mark.slow

BOTH = ("fi_cubin", "fi_jit_cache")
SECONDS = 15  # of one core


def verify(here: Site, *options: str) -> dict[str, Any]:
    done = here.run(here.python.with_name("fi-core"), "verify", "--json", *options)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1), done.stderr
    return found


def test_the_installed_wheels_are_sound(site: Callable[..., Site]) -> None:
    here = site(*BOTH)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = verify(here, "--deep")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert [problem for package in found["packages"] for problem in package["problems"]] == []
    counts = {package["name"]: package["files"] for package in found["packages"]}
    assert set(counts) == {"fi-core", "fi-kernels", "fi-cubin", "fi-jit-cache", "store"}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= SECONDS


def test_changes_of_installed_wheels(site: Callable[..., Site]) -> None:
    """A flipped byte, an index forged with its file, other sources, and a file that nothing lists."""
    with open_folder("fi-verify-") as folder:
        here = site(*BOTH).copy(folder / "site")
        data = here.packages / "fi_cubin" / "data"
        index = json.loads((data / "index.json").read_text())
        first, second, *_ = index["artifacts"].values()
        content = bytearray((data / first["file"]).read_bytes())
        content[len(content) // 2] ^= 1
        (data / first["file"]).write_bytes(content)
        (data / second["file"]).write_bytes((data / first["file"]).read_bytes())
        second.update(sha256=first["sha256"], size=first["size"], unpacked_sha256=first["unpacked_sha256"])
        (data / "index.json").write_text(json.dumps(index))
        (here.packages / "fi_core" / "more.py").write_text("")
        with open(here.packages / "fi_kernels" / "include" / "fi" / "host" / "tensor.h", "a") as header:
            header.write("// changed\n")
        found = {(p["package"], p["problem"], p["file"]) for each in verify(here)["packages"] for p in each["problems"]}
    assert {
        ("fi-cubin", "digest", first["file"]),
        ("fi-cubin", "record", f"fi_cubin/data/{first['file']}"),
        ("fi-cubin", "record", f"fi_cubin/data/{second['file']}"),
        ("fi-cubin", "record", "fi_cubin/data/index.json"),
        ("fi-core", "stray", "fi_core/more.py"),
        ("fi-kernels", "record", "fi_kernels/include/fi/host/tensor.h"),
    } <= found
    assert {package for package, problem, _ in found if problem == "source"} == {"fi-jit-cache"}
