"""The autotuner at FlashInfer's import path; it is defined in fi_core.compat.autotuner."""

from __future__ import annotations

from fi_core.compat.autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicTensorSpec,
    TunableRunner,
    TuningConfig,
    _classify_metadata_mismatches,
    _collect_metadata,
    autotune,
    config_key,
)
from fi_core.compat.autotuner_store import (
    MeasurementPolicy,
    autotune_v2,
    autotune_v2_reload,
    get_autotune_process_group,
    set_autotune_process_group,
)

__all__ = [
    "AutoTuner",
    "ConstraintSpec",
    "DynamicTensorSpec",
    "MeasurementPolicy",
    "TunableRunner",
    "TuningConfig",
    "_classify_metadata_mismatches",
    "_collect_metadata",
    "autotune",
    "autotune_v2",
    "autotune_v2_reload",
    "config_key",
    "get_autotune_process_group",
    "set_autotune_process_group",
]
