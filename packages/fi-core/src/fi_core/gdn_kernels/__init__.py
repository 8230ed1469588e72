"""FlashInfer's places of the gated delta rule, one of which SGLang imports; they run `gdn_decode` and `gdn_prefill`."""

from __future__ import annotations

from fi_core.gdn_kernels.delta_rule_dsl import chunk_gated_delta_rule_sm90, cp_delta_rule_dsl_sm90
from fi_core.gdn_kernels.gdn_decode_bf16_state import (
    gated_delta_rule,
    gated_delta_rule_bf16state_cooprow,
    gated_delta_rule_bf16state_cooprow_mtp,
    gated_delta_rule_mtp,
)
from fi_core.gdn_kernels.gdn_decode_bf16_wy_output_only import (
    gated_delta_rule_mtp as gated_delta_rule_mtp_wy_output_only,
)

__all__ = [
    "chunk_gated_delta_rule_sm90",
    "cp_delta_rule_dsl_sm90",
    "gated_delta_rule",
    "gated_delta_rule_bf16state_cooprow",
    "gated_delta_rule_bf16state_cooprow_mtp",
    "gated_delta_rule_mtp",
    "gated_delta_rule_mtp_wy_output_only",
]
