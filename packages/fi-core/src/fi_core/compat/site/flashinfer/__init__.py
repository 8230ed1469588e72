"""FlashInfer's import name for fi, active in processes that asked for it; fi_core.compat.alias says how it works."""

from __future__ import annotations

from fi_core.compat import alias

__version__ = alias.VERSION
alias.forward(__name__)
