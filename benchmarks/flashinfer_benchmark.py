"""`fi-bench` of this checkout, under the name that FlashInfer's guides call: same flags, output and exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGES = [str(Path(__file__).resolve().parents[1] / "packages" / name / "src")
            for name in ("fi-bench", "fi-core", "fi-kernels")]  # fmt: skip

sys.path[:1] = PACKAGES  # instead of the folder of this script
os.environ["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])  # of workers

from fi_bench.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
