"""Tells engines that look for FlashInfer's prebuilt kernels that nothing has to be compiled by nvcc."""

from __future__ import annotations

from fi_core.compat.alias import VERSION as __version__

__all__ = ["__version__"]
