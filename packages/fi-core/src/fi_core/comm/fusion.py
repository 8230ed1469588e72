"""Codes of what is fused with an all-reduce, and the layout of the scales that it writes."""

from __future__ import annotations

from fi_core.utils import round_up


class AllReduceFusionPattern:
    """What follows the sum over the ranks; plain integers, as FlashInfer's.

    AR is the sum, Residual the addition of a residual, RMSNorm its norm; Out: also the norm itself is written.
    """

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7


class QuantizationSFLayout:
    """The layout of block scales; plain integers, as FlashInfer's."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Returns the number of scales of a matrix of scales in the 128x4 layout, with its padding."""
    return round_up(total_row, 128) * round_up(total_column, 4)
