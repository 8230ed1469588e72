"""Mixture of experts: the layouts in which expert weights are stored, and their codes. The kernels are not here yet."""

from __future__ import annotations

from fi_core.fused_moe.core import convert_to_block_layout, reorder_rows_for_gated_act_gemm
from fi_core.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    GatedActType,
    QuantFormat,
    RoutingMethodType,
    WeightLayout,
    is_gated_activation,
)

__all__ = [
    "ActivationType",
    "Fp8QuantizationType",
    "GatedActType",
    "QuantFormat",
    "RoutingMethodType",
    "WeightLayout",
    "convert_to_block_layout",
    "is_gated_activation",
    "reorder_rows_for_gated_act_gemm",
]
