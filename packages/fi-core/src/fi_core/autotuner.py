"""The autotuner at FlashInfer's import path; it is defined in fi_core.compat.autotuner."""

from __future__ import annotations

from fi_core.compat.autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicTensorSpec,
    TunableRunner,
    TuningConfig,
    autotune,
    config_key,
)

__all__ = [
    "AutoTuner",
    "ConstraintSpec",
    "DynamicTensorSpec",
    "TunableRunner",
    "TuningConfig",
    "autotune",
    "config_key",
]
