"""DeepGEMM's names for grouped fp8 products with a scale for every 128 values of k, and for logits of an indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.gemm.backends import takes_backends
from fi_core.gemm.groupwise import batch_deepgemm_fp8_nt_groupwise, group_deepgemm_fp8_nt_groupwise
from fi_core.indexer import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata

if TYPE_CHECKING:
    import torch

    Scaled = tuple[torch.Tensor, torch.Tensor]  # values and scales

__all__ = [
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
]


@takes_backends()
def m_grouped_fp8_gemm_nt_contiguous(
    a_fp8: Scaled,
    b_fp8: Scaled,
    d: torch.Tensor,
    m_indices: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
) -> None:
    """Writes `group_deepgemm_fp8_nt_groupwise(*a_fp8, *b_fp8, m_indices)` to d.

    Args:
        a_fp8: `[m, k]` e4m3, and `[m, k / 128]` fp32.
        b_fp8: `[groups, n, k]` e4m3, and `[groups, ceil(n / 128), k / 128]` fp32.
        d: `[m, n]`, bf16.
        m_indices: `[m]`, int32, the group of each row.
        recipe: the scale granularity; None means (1, 128, 128).
        compiled_dims: accepted; kernels are compiled for no size.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    (a, a_scale), (b, b_scale) = a_fp8, b_fp8
    group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, m_indices, recipe or (1, 128, 128), d)


@takes_backends()
def m_grouped_fp8_gemm_nt_masked(
    a_fp8: Scaled,
    b_fp8: Scaled,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
) -> None:
    """Writes `batch_deepgemm_fp8_nt_groupwise(*a_fp8, *b_fp8, masked_m, expected_m)` to d.

    Args:
        a_fp8: `[groups, m, k]` e4m3, and `[groups, m, k / 128]` fp32.
        b_fp8: `[groups, n, k]` e4m3, and `[groups, ceil(n / 128), k / 128]` fp32.
        d: `[groups, m, n]`, bf16.
        masked_m: `[groups]`, int32, rows that exist.
        expected_m: the likely number of rows of a group.
        recipe: the scale granularity; None means (1, 128, 128).
        compiled_dims: accepted; kernels are compiled for no size.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    (a, a_scale), (b, b_scale) = a_fp8, b_fp8
    batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, masked_m, expected_m, recipe or (1, 128, 128), d)
