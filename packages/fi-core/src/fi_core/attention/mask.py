"""Custom masks of a batch: the offset of each request's mask, and packing to bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.quantization import packbits_segments

if TYPE_CHECKING:
    import torch


def element_bounds(qo_indptr: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
    """Offsets of the flattened `[qo_len, kv_len]` masks of the requests: int64 `[batch_size + 1]`."""
    import torch

    return torch.nn.functional.pad((qo_indptr.diff().long() * kv_len).cumsum(0), (1, 0))


def byte_bounds(elements: torch.Tensor) -> torch.Tensor:
    """Offsets in bytes of the packed mask, where each request begins at a new byte: int32."""
    import torch

    return torch.nn.functional.pad(((elements.diff() + 7) >> 3).cumsum(0, dtype=torch.int32), (1, 0))


def check_packed(packed: torch.Tensor, bounds: torch.Tensor) -> None:
    """Raises ValueError unless a packed mask is flat bytes, as many as its bounds require if those are on the host."""
    import torch

    if packed.ndim != 1 or packed.dtype is not torch.uint8:
        raise ValueError(
            f"packed_custom_mask: flat uint8 is required; got {packed.dtype} of shape {tuple(packed.shape)}"
        )
    if bounds.device.type == "cpu" and len(packed) != int(bounds[-1]):
        raise ValueError(
            f"packed_custom_mask: {int(bounds[-1])} bytes are required, the sum of ceil(qo_len * kv_len / 8); "
            f"got {len(packed)}"
        )


def pack(mask: torch.Tensor, elements: torch.Tensor, buffer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed mask, byte bounds) of a boolean mask in any shape, on its device; into `buffer` if given.

    It does not synchronise. If the bounds are on the device, the packed mask has room for any.
    """
    import torch

    if mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"custom_mask: a boolean tensor is required; got {mask.dtype} of shape {tuple(mask.shape)}")
    bounds = byte_bounds(elements)
    if elements.device.type == "cpu":
        if elements[-1] != mask.numel():
            raise ValueError(
                f"custom_mask: {int(elements[-1])} elements are required, the sum of qo_len * kv_len; "
                f"got {mask.numel()}"
            )
        size = int(bounds[-1])
    else:
        size = mask.numel() // 8 + len(elements) - 1
        if buffer is not None:
            size = min(size, buffer.numel())
    if buffer is None:
        packed = mask.new_empty(size, dtype=torch.uint8)
    elif size > buffer.numel():
        raise ValueError(f"custom_mask_buf: {size} bytes are required; got {buffer.numel()}")
    else:
        packed = buffer[:size]
    elements, bounds = (x.to(mask.device, non_blocking=True) for x in (elements, bounds))
    # An empty segment at the end covers the bytes of the packed mask beyond its contents.
    ends = torch.cat((bounds, bounds.new_full((1,), size).maximum(bounds[-1:])))
    packbits_segments(packed, mask.reshape(-1).contiguous(), torch.cat((elements, elements[-1:])), ends)
    return packed, bounds


def pack_drafts(seen: torch.Tensor) -> torch.Tensor:
    """The draft_mask of batch decode, uint8 `[requests * q_len, ceil(q_len / 32) * 4]`, from bool `[requests, q_len,
    q_len]`: whether a row attends to each of the last q_len keys.
    """
    import torch

    q_len = seen.shape[-1]
    bits = torch.nn.functional.pad(seen, (0, -q_len % 32)).view(-1, (q_len + 31) // 32 * 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=seen.device)).sum(-1, dtype=torch.uint8)
