"""Communication between GPUs: which rank does what, and how ranks agree. The kernels are not here yet."""

from __future__ import annotations

from fi_core.comm.fusion import AllReduceFusionPattern, QuantizationSFLayout, compute_fp4_swizzled_layout_sf_size
from fi_core.comm.mapping import Mapping
from fi_core.comm.mnnvl import CommBackend, MnnvlConfig, TorchDistBackend

__all__ = [
    "AllReduceFusionPattern",
    "CommBackend",
    "Mapping",
    "MnnvlConfig",
    "QuantizationSFLayout",
    "TorchDistBackend",
    "compute_fp4_swizzled_layout_sf_size",
]
