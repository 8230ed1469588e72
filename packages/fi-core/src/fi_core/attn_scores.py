"""FlashInfer's names for the logits of a sparse attention indexer over pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core import indexer
from fi_core.utils import check_shape_dtype_device

if TYPE_CHECKING:
    import torch

__all__ = [
    "compute_paged_mqa_logits_schedule",
    "fp8_paged_mqa_logits",
    "min_block_table_width",
    "padded_seq_len",
]

_PADDING = 256  # columns of which a row of logits has a multiple


def padded_seq_len(max_seq_len: int) -> int:
    """The columns of a buffer for logits of max_seq_len keys: the next multiple of 256."""
    return -(-max_seq_len // _PADDING) * _PADDING


def min_block_table_width(seq_len: int, block_size: int) -> int:
    """The pages of block_size tokens that a row of the block table must have for seq_len keys."""
    return -(-seq_len // block_size)


def compute_paged_mqa_logits_schedule(
    seq_lens: torch.Tensor,
    device: torch.device | None = None,
    *,
    next_n: int = 1,
    variant: str = "fp8",
    use_gpu_kernel: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a schedule of one entry: kernels distribute their work themselves.

    Args:
        seq_lens: int32 `[batch]`.
        device: of the result; None means that of seq_lens.
        next_n, variant, use_gpu_kernel: accepted; they have no effect.
        out: what to return instead.

    Returns:
        int32 `[2, 2]`, zeros.
    """
    import torch

    return torch.zeros(2, 2, dtype=torch.int32, device=device or seq_lens.device) if out is None else out


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    output_dtype: torch.dtype | None = None,
    epi_dtype: torch.dtype | None = None,
    acc_dtype: torch.dtype | None = None,
    schedule_meta: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the indexer's logits of the rows of requests: `fi_core.deep_gemm.fp8_paged_mqa_logits` with other names
    and another order of arguments.

    Args:
        q: `[batch, next_n, heads, dim]`, e4m3.
        kv_fused: uint8 `[pages, page_size, 1, dim + 4]`.
        weights: `[batch * next_n, heads]`, fp32.
        block_tables: int32 `[batch, width]`.
        seq_lens: int32 `[batch]`: row t of a request sees `seq_lens - next_n + t + 1` keys.
        max_seq_len: columns of the result.
        output_dtype, epi_dtype, acc_dtype: None or fp32; others are refused.
        schedule_meta: accepted; it has no effect.
        out: fp32 `[batch * next_n, padded_seq_len(max_seq_len)]`, of which the result is a view; allocated if None.

    Returns:
        fp32 `[batch * next_n, max_seq_len]`; columns after the keys of a row are not written.

    Raises:
        ValueError: a shape, device, layout or dtype of the result is wrong.
        TypeError: a dtype is wrong.
    """
    import torch

    for name, dtype in (("output_dtype", output_dtype), ("epi_dtype", epi_dtype), ("acc_dtype", acc_dtype)):
        if dtype not in (None, torch.float32):
            raise ValueError(f"{name} must be None or torch.float32; got {dtype}: cast the result")
    shape = (weights.shape[0], padded_seq_len(max_seq_len))
    if out is None:
        out = weights.new_empty(shape)
    else:
        check_shape_dtype_device(out, shape, torch.float32, q.device, "out")
    out = out[:, :max_seq_len]
    return indexer.fp8_paged_mqa_logits(q, kv_fused, weights, seq_lens, block_tables, None, max_seq_len, out=out)
