"""Products of segments of rows with matrices that indices pick, as LoRA adapters need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.gemm import trace
from fi_core.gemm.dense import output
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api
from fi_core.utils import int32_index

if TYPE_CHECKING:
    from typing import Any

    import torch

_BACKENDS = ("auto", "sm90", "sm80")


@fi_api
class SegmentGEMMWrapper:
    """Multiplies each segment of rows by a matrix of its own.

    Args:
        float_workspace_buffer: accepted and kept; the kernels need no workspace.
        backend: "auto", "sm90" or "sm80"; all of them select the kernels of this library.

    Raises:
        ValueError: There is no backend of this name.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        if backend not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")
        self._workspaces: tuple[Any, ...] = (float_workspace_buffer,)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Keeps other workspaces, which the kernels do not need."""
        self._workspaces = (float_workspace_buffer, int_workspace_buffer)

    @fi_api(trace=trace.SEGMENT, planned={})
    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: torch.Tensor | None = None,
        seg_lens: torch.Tensor | None = None,
        seg_indptr: torch.Tensor | None = None,
        weight_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes `x[seg_indptr[i] : seg_indptr[i + 1]] @ weights[weight_indices[i]]` for each segment i.

        Args:
            x: `[cum_m, d_in]`, bf16, fp16, e4m3 or e5m2; rows may be strided.
            weights: `[num_weights, d_out, d_in]` if weight_column_major, else `[num_weights, d_in, d_out]`.
            batch_size: the number of segments.
            weight_column_major: the order of weights.
            out: `[cum_m, d_out]`; allocated in the dtype of x (bf16 for fp8) if None.
            seg_lens: `[batch_size]`, rows of each segment, which may be 0; required if seg_indptr is None.
            seg_indptr: `[batch_size + 1]`, int32 or int64, offsets into x. Rows of no segment are not written.
            weight_indices: `[batch_size]`, int32 or int64; None: segment i meets weights[i].

        Returns:
            out.

        Raises:
            ValueError: Neither seg_lens nor seg_indptr is given, or a shape, stride or device does not fit.
            TypeError: A dtype does not fit.
        """
        offsets = _offsets(seg_lens, batch_size) if seg_indptr is None else seg_indptr
        if offsets.shape != (batch_size + 1,):
            raise ValueError(f"seg_indptr must have shape [{batch_size + 1}]; got {list(offsets.shape)}")
        if weight_indices is not None and weight_indices.shape != (batch_size,):
            raise ValueError(f"weight_indices must have shape [{batch_size}]; got {list(weight_indices.shape)}")
        if x.ndim != 2 or weights.ndim != 3:
            raise ValueError(
                f"x and weights must have shapes [cum_m, d_in] and [num_weights, ..]; got {list(x.shape)} and "
                f"{list(weights.shape)}"
            )
        b = weights if weight_column_major else weights.mT
        out = output(x, (x.shape[0], b.shape[1]), out, x.dtype if out is None and x.dtype.itemsize > 1 else None)
        indices = None if weight_indices is None else int32_index(weight_indices)
        gemm(out, x, b, m_indptr=int32_index(offsets), b_indices=indices)
        return out

    forward = run


def _offsets(seg_lens: torch.Tensor | None, batch_size: int) -> torch.Tensor:
    """The offsets of segments of these lengths."""
    if seg_lens is None:
        raise ValueError("seg_indptr must be given if seg_lens is None")
    if seg_lens.shape != (batch_size,):
        raise ValueError(f"seg_lens must have shape [{batch_size}]; got {list(seg_lens.shape)}")
    offsets = seg_lens.new_zeros(batch_size + 1)
    offsets[1:] = seg_lens.cumsum(0)
    return offsets
