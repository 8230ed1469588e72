"""A sample of every family under compute-sanitizer: no access out of bounds, no race, no misplaced barrier."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from fi_core.runtime.build.sources import include_dir

SANITIZER = shutil.which("compute-sanitizer")
# The script makes one small call of each public function, in one process.
SAMPLE = """
import sys, torch, fi_core
from fi_bench.startup.calls import arguments as calls
for name, arguments in calls("cuda").items():
    if name.startswith("mla.") and "racecheck" in sys.argv:
        continue
    function = fi_core
    for word in name.split("."):
        function = getattr(function, word)
    function(*arguments())
    torch.cuda.synchronize()
print("sampled", len(calls("cuda")))
"""
# Every MLA kernel for both types of cache, with requests that are split and merged, and one without tokens.
MLA = """
import itertools, sys, torch, fi_core
lengths = [0, 200, 70] if "racecheck" in sys.argv else [0, 5000, 70, 1500]
tokens = len(lengths)
pages = [-(-n // 64) for n in lengths]
starts = [0, *itertools.accumulate(pages)]
tables = [torch.tensor(x, dtype=torch.int32) for x in (range(tokens + 1), starts, range(starts[-1]), lengths)]
for heads, kv, backend in itertools.product((16, 128), (torch.bfloat16, torch.float8_e4m3fn), ("fa2", "fa3")):
    q = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(starts[-1], 64, 576, device="cuda").to(kv)
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    wrapper = fi_core.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    wrapper.plan(*tables, heads, 512, 64, 64, False, 0.1, q.dtype, kv)
    scale = {} if kv is q.dtype else {"ckv_scale": 1.0, "kpe_scale": 1.0}
    out = wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], **scale)
    assert out.isfinite().all()
print("sampled MLA")
"""
# Racecheck of CUDA 13.0 reports stores of a row's states before a named barrier and the loads behind it, in 0 to 114
# places with unrelated changes to the code between. They are no races: docs/notes/mla-sanitizer.md.
NO_RACE = re.compile(r"\b(row_sum|row_max|alpha|states|tops)\b")
# A report names the last part of a path, or all of it.
ACCESS = re.compile(r"(?:Write|Read) access at .*? in (\S+?):(\d+)")


def line_of(file: str, number: str) -> str:
    """A line of the header that the path ends in, or that ends in the path; nothing where it is not one header."""
    headers = (path.relative_to(include_dir()).as_posix() for path in include_dir().rglob("*.cuh"))
    found = [header for header in headers if f"/{file}".endswith(f"/{header}") or header.endswith(f"/{file}")]
    return (include_dir() / found[0]).read_text().splitlines()[int(number) - 1] if len(found) == 1 else ""


def races(report: str) -> list[str]:
    """The hazards of a report of kernels with line numbers that are not the known ones, each with its lines."""
    found = []
    for hazard in re.split(r"(?=Race reported between)", report)[1:]:
        hazard = " ".join(hazard.partition("hazards]")[0].replace("=========", "").split())
        lines = [line_of(*place) for place in ACCESS.findall(hazard)]
        if len(lines) < 2 or not all(map(NO_RACE.search, lines)):
            found.append("\n".join([hazard, *map(str.strip, lines)]))
    return found


def test_only_the_known_hazards_are_passed_over() -> None:
    header = "fi/attention/mla/batch_mla_sm90.cuh"
    text = (include_dir() / header).read_text().splitlines()
    stored, other = (next(n for n, line in enumerate(text, 1) if words in line)
                     for words in ("shared.row_sum[group]", "shared.q_full.wait"))  # fmt: skip
    report = (
        "========= Error: Race reported between Write access at fi::K::store()+0x10 in {0}:{1}\n"
        "=========     and Read access at fi::K::store()+0x90 in /unit/{0}:{2} [114 hazards]\n"
    )
    assert races(report.format(header, stored, stored)) == []
    stripped = report.replace("/unit/", "")
    assert races(stripped.format(header.rpartition("/")[2], stored, stored)) == []
    (told,) = races(stripped.format("cluster_sm90.cuh", stored, stored))  # of two folders
    assert told.startswith("Race reported between Write access at fi::K::store()+0x10 in cluster_sm90.cuh:")
    assert len(races(report.format(header, stored, other) + report.format(header, stored, stored))) == 1
    assert len(races("Race reported between Write access at f()+0x10 and Read access at f()+0x20 [1 hazards]")) == 1


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, part of the CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("sample", [SAMPLE, MLA], ids=["functions", "mla"])
def test_sample_is_clean(sample: str, tool: str) -> None:
    assert SANITIZER
    lines = {"FI_JIT_LINEINFO": "1"} if (sample, tool) == (MLA, "racecheck") else {}
    done = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", sample, tool],
        env={**os.environ, **lines, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if lines and done.returncode == 9:
        assert not (found := races(done.stdout)), "\n\n".join(found)
    else:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "sampled" in done.stdout
