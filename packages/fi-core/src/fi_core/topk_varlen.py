"""Selects the k largest logits of each row of requests whose lengths differ, as sparse decode attention needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.compat.backend import named_backends
from fi_core.observe.log import fi_api
from fi_core.topk import top_k_ragged_transform
from fi_core.utils import check_shape_dtype_device

if TYPE_CHECKING:
    from typing import Any

    import torch

__all__ = ["release_gvr2_resources", "top_k_varlen"]


@fi_api
@named_backends(dict.fromkeys(("auto", "radix_cutlass")), (80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121))
def top_k_varlen(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pre_idx: torch.Tensor | None = None,
    compress_ratio: int = 1,
    next_n: int = 1,
    return_values: bool = False,
    out_indices: torch.Tensor | None = None,
    out_values: torch.Tensor | None = None,
    backend: str = "auto",
    load_balance: bool = True,
    workspace: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Selects the top_k largest of the columns that each row may see.

    Row t of request i sees its first `max(0, (seq_lens[i] - next_n + t + 1) // compress_ratio)` columns, at most the
    width. Indices come in their own order; rows with fewer columns end in -1, and -inf among the values.

    Args:
        logits: `[requests * next_n, width]`, fp32, bf16 or fp16.
        seq_lens: `[requests]`, int32.
        top_k: 0 or more.
        pre_idx, load_balance, workspace: accepted; they speed other kernels up.
        compress_ratio: tokens of a column.
        next_n: rows of a request.
        return_values: whether values are returned too.
        out_indices: int32 `[rows, top_k]`; allocated if None.
        out_values: `[rows, top_k]`, dtype of logits; allocated if None.
        backend: "auto" or "radix_cutlass"; both select the kernels of this library.

    Returns:
        (indices int32 `[rows, top_k]`, values `[rows, top_k]` or None).

    Raises:
        ValueError: A shape, device or number does not fit; the text names the argument.
        TypeError: seq_lens are no integers.
        BackendSupportedError: The backend needs a GPU of another kind.
    """
    import torch

    if next_n < 1 or compress_ratio < 1:
        raise ValueError(f"next_n and compress_ratio must be 1 or more; got {next_n} and {compress_ratio}")
    if seq_lens.dtype.is_floating_point:
        raise TypeError(f"seq_lens must be int32; got {seq_lens.dtype}")
    if logits.ndim != 2 or tuple(seq_lens.shape) != (logits.shape[0] // next_n,) or logits.shape[0] % next_n:
        raise ValueError(
            f"logits must have shape [{next_n} * requests, width] for seq_lens [requests]; got {list(logits.shape)} "
            f"and {list(seq_lens.shape)}"
        )
    if not logits.shape[1]:
        raise ValueError(f"logits must have one column or more; got {list(logits.shape)}")
    for name, x, dtype in (("out_indices", out_indices, torch.int32), ("out_values", out_values, logits.dtype)):
        if x is not None:
            check_shape_dtype_device(x, (logits.shape[0], top_k), dtype, logits.device, name)
    step = torch.arange(1 - next_n, 1, device=logits.device)
    columns = (seq_lens[:, None] + step).div(compress_ratio, rounding_mode="floor").clamp(0, logits.shape[1])
    lengths = columns.int().flatten()
    found = top_k_ragged_transform(logits, torch.zeros_like(lengths), lengths, top_k)
    if out_indices is not None:
        found = out_indices.copy_(found)
    if not return_values:
        return found, None
    values = logits.gather(1, found.long().clamp(min=0)).masked_fill(found < 0, -torch.inf)
    return found, values if out_values is None else out_values.copy_(values)


def release_gvr2_resources(device: torch.device | str | int | None = None) -> int:
    """Frees what the calls of `top_k_varlen` keep on a device: nothing, no call keeps memory.

    Args:
        device: a CUDA device; None: the current one.

    Returns:
        0, the bytes that were freed.

    Raises:
        ValueError: device is no CUDA device.
    """
    import torch

    if device is not None and not isinstance(device, int):
        try:
            kind = torch.device(device).type
        except (RuntimeError, TypeError):
            kind = ""
        if kind != "cuda":
            raise ValueError(f"device must be a CUDA device, its index or None; got {device!r}")
    return 0
