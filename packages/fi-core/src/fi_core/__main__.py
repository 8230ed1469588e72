"""`python -m fi_core` is `fi-core`."""

from __future__ import annotations

import sys

from fi_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
