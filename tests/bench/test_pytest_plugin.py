"""The fixture `fi_bench` in a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_fixture_measures_and_fails_a_wrong_result(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(
        "LINE = '--routine silu_and_mul --batch_size 2,4 --hidden_size 64 --num_iters 3 --refcheck --backends '\n"
        "def test_good(fi_bench):\n"
        "    rows = fi_bench(LINE + 'torch')\n"
        "    assert [r['params']['batch_size'] for r in rows] == [2, 4]\n"
        "    assert all(r['stats']['median'] > 0 and r['refcheck']['status'] == 'ok' for r in rows)\n"
        "def test_skip_is_no_success(fi_bench):\n"
        "    fi_bench(LINE + 'deepgemm')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "fi_bench.pytest_plugin", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,  # the plugin is named: where fi-bench is installed, its entry point would load it a second time
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "silu_and_mul deepgemm: skipped deepgemm has no silu_and_mul" in done.stdout
