"""Sessions of every wrapper, and a call of every function: dumped in one process, replayed in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from families.wrapper_session import WRAPPERS
from fi_core.observe.api import class_of

# The memory that ranks share, in which collectives work, has no dump; replay says so.
FUNCTIONS = """
import torch, fi_core
from fi_bench.startup.calls import arguments
torch.manual_seed(1)
calls = {name: make for name, make in arguments("cpu").items() if not name.startswith("comm.")}
for name, make in calls.items():
    function = fi_core
    for word in name.split("."):
        function = getattr(function, word)
    function(*make())
print(len(calls))
"""


def run(tmp_path: Path, *command: str, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("FI_", "FLASHINFER_"))}
    kept = {key: os.environ[key] for key in ("FI_CACHE_DIR", "FI_WORKSPACE_BASE") if key in os.environ}
    done = subprocess.run(
        [sys.executable, *command],
        env={**clean, **kept, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1) and done.stdout, done.stderr  # 1: replay found a difference
    return done.stdout


@pytest.mark.parametrize("what", ["wrappers", pytest.param("compiled", marks=pytest.mark.jit), "functions"])
def test_a_session_is_replayed(tmp_path: Path, what: str) -> None:
    main = f"from families.wrapper_session import main; main({what == 'compiled'})"
    code = FUNCTIONS if what == "functions" else main
    logged = {"FI_LOGLEVEL": "10", "FI_LOGDEST": "api.log", "FI_DUMP_DIR": "dumps"}
    count = int(run(tmp_path, "-c", code, **logged))
    assert "failed: " not in (tmp_path / "api.log").read_text(), "a call was not logged or dumped"
    dumps = [json.loads(line) for line in (tmp_path / "dumps" / "session.jsonl").read_text().splitlines()]
    qualnames = {record["qualname"] for record in dumps}
    if what != "functions":
        made = {f"{cls.__name__}.__init__" for cls in WRAPPERS}
        ranges = {"BatchPrefillWithCausalBidirectionalRangesWrapper.__init__"}
        assert (ranges if what == "compiled" else made - ranges) <= qualnames
    replayed = json.loads(run(tmp_path, "-m", "fi_core", "replay", "--json", "--dir", "dumps", "--device", "cpu"))
    wrong = [call for call in replayed["calls"] if call["verdict"] != "passed"]
    assert wrong == []
    assert replayed["summary"]["passed"] * 2 == len(dumps), "each call has two records"
    assert len(dumps) // 2 >= count


def test_every_wrapper_is_marked() -> None:
    for cls in WRAPPERS:
        assert class_of(cls.__new__(cls)) is cls
