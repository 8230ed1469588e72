"""`import fi_core` is fast and quiet: no torch, no file, no output."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from house.tree import PYTHONPATH

PROBE = """
import sys, time
start = time.perf_counter()
import fi_core
seconds = time.perf_counter() - start
heavy = sorted({"torch", "numpy", "tvm_ffi", "fi_bench"} & sys.modules.keys())
print(f"{seconds} {','.join(heavy)}")
"""


def run(code: str, home: Path) -> str:
    """Runs code in a new process whose home, temporary and working directory is `home`."""
    keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    places = {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=keep | places, cwd=home, capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


def test_import_is_fast_and_leaves_nothing(tmp_path: Path) -> None:
    run(PROBE, tmp_path)  # writes the byte code caches
    samples = [run(PROBE, tmp_path).strip().split(" ") for _ in range(9)]
    assert [heavy for _, *heavy in samples] == [[]] * len(samples), "modules that import fi_core pulled in"
    median = statistics.median(float(seconds) for seconds, *_ in samples)
    assert median < 0.050, f"import fi_core takes {median * 1e3:.0f} ms; `python -X importtime` says where"
    assert list(tmp_path.iterdir()) == []


def test_families_import_without_torch(tmp_path: Path) -> None:
    """Declaring every op needs no torch either: the command line answers without it."""
    code = "import sys; from fi_core.registry import ops; print(len(ops()), 'torch' in sys.modules)"
    count, torch = run(code, tmp_path).split()
    assert int(count) > 0
    assert torch == "False"
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_the_gil_is_refused() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False; import fi_core"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: fi_core: Python with the GIL is required" in done.stderr and "PYTHON_GIL=1" in done.stderr
