"""FlashInfer's file of versions: that of its API, and the commit of fi."""

from __future__ import annotations

from fi_core import __git_version__
from fi_core.compat.alias import VERSION as __version__

__all__ = ["__git_version__", "__version__"]
