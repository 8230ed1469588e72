"""FlashInfer's place of the gated delta rule on bf16 states, which SGLang imports; it runs that of `gdn_decode`."""

from __future__ import annotations

from fi_core.gdn_kernels.gdn_decode_bf16_state import gated_delta_rule, gated_delta_rule_mtp

__all__ = ["gated_delta_rule", "gated_delta_rule_mtp"]
