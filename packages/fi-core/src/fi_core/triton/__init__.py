"""FlashInfer's functions in Triton, by the same names; they run on the kernels of this library."""

from __future__ import annotations
