"""A sample of every family under compute-sanitizer: no access out of bounds, no race, no misplaced barrier."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

SANITIZER = shutil.which("compute-sanitizer")
# The script makes one small call of each public function, in one process.
SAMPLE = """
import torch, fi_core
from fi_bench.startup.calls import arguments as calls
for name, arguments in calls("cuda").items():
    function = fi_core
    for word in name.split("."):
        function = getattr(function, word)
    function(*arguments())
    torch.cuda.synchronize()
print("sampled", len(calls("cuda")))
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, part of the CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sample_is_clean(tool: str) -> None:
    assert SANITIZER
    done = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SAMPLE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "sampled" in done.stdout
