"""`python -m fi_bench` is the command `fi-bench`."""

from __future__ import annotations

import sys

from fi_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
