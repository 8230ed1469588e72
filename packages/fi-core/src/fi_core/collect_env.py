"""`python -m fi_core.collect_env` describes this machine for a bug report, as `fi-core collect-env` does."""

from __future__ import annotations

import sys

from fi_core.cli import main

if __name__ == "__main__":
    sys.exit(main(["collect-env", *sys.argv[1:]]))
