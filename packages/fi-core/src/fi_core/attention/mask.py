"""Masks of a batch: packing to bits, the offset of each request's mask, block tables of ranks and of heads."""

from __future__ import annotations

from fi_core.quantization import packbits_segments
from fi_core.runtime.lazy import torch


def element_bounds(qo_indptr: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
    """Offsets of the flattened `[qo_len, kv_len]` masks of the requests: int64 `[batch_size + 1]`."""
    return torch.nn.functional.pad((qo_indptr.diff().long() * kv_len).cumsum(0), (1, 0))


def byte_bounds(elements: torch.Tensor) -> torch.Tensor:
    """Offsets in bytes of the packed mask, where each request begins at a new byte: int32."""
    return torch.nn.functional.pad(((elements.diff() + 7) >> 3).cumsum(0, dtype=torch.int32), (1, 0))


def check_packed(packed: torch.Tensor, bounds: torch.Tensor) -> None:
    """Raises ValueError unless a packed mask is flat bytes, as many as its bounds require if those are on the host."""
    if packed.ndim != 1 or packed.dtype is not torch.uint8:
        got = f"{packed.dtype} of shape {tuple(packed.shape)}"
        raise ValueError(f"packed_custom_mask: flat uint8 is required; got {got}")
    if bounds.device.type == "cpu" and len(packed) != int(bounds[-1]):
        required = f"{int(bounds[-1])} bytes are required, the sum of ceil(qo_len * kv_len / 8)"
        raise ValueError(f"packed_custom_mask: {required}; got {len(packed)}")


def pack(mask: torch.Tensor, elements: torch.Tensor, buffer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed mask, byte bounds) of a boolean mask in any shape, on its device; into `buffer` if given.

    It does not synchronise. If the bounds are on the device, the packed mask has room for any.
    """
    if mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"custom_mask: a boolean tensor is required; got {mask.dtype} of shape {tuple(mask.shape)}")
    bounds = byte_bounds(elements)
    if elements.device.type == "cpu":
        if elements[-1] != mask.numel():
            required = f"{int(elements[-1])} elements are required, the sum of qo_len * kv_len"
            raise ValueError(f"custom_mask: {required}; got {mask.numel()}")
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
    q_len = seen.shape[-1]
    bits = torch.nn.functional.pad(seen, (0, -q_len % 32)).view(-1, (q_len + 31) // 32 * 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=seen.device)).sum(-1, dtype=torch.uint8)


def mask_of_rank(
    q_len: int, seq_lens: torch.Tensor, global_lens: torch.Tensor | None, cp_world: int, cp_rank: int
) -> torch.Tensor | None:
    """The mask of query tokens over the keys of one rank, where key i of rank r is token `i * cp_world + r` (context
    parallelism): uint16 `[batch_size, q_len, words]`, or None if all keys are seen.

    Raises:
        ValueError: cp_rank, or global_lens, which is required for several query tokens.
    """
    if not 0 <= cp_rank < cp_world:
        raise ValueError(f"cp_rank: 0 to cp_world - 1 = {cp_world - 1} is required; got {cp_rank}")
    if q_len == 1 or (cp_world == 1 and global_lens is None):
        return None  # the token is behind all keys of the rank
    if global_lens is None or global_lens.numel() != seq_lens.numel():
        got = None if global_lens is None else tuple(global_lens.shape)
        raise ValueError(
            f"causal_seqlens_kv_global: {seq_lens.numel()} lengths over all ranks are required for q_len_per_req > 1; "
            f"got {got}"
        )
    token = torch.arange(q_len, device=seq_lens.device)
    position = global_lens.view(-1, 1).long() - q_len + token  # [batch_size, q_len]
    visible = torch.div(position - cp_rank, cp_world, rounding_mode="floor") + 1
    key = seq_lens.view(-1, 1).long() - q_len + token
    packed = pack_drafts(key[:, None, :] < visible[:, :, None])
    return packed.view(torch.uint16).view(len(position), q_len, -1)


def pages_of_heads(
    cache: tuple[torch.Tensor, torch.Tensor], layout: int, block_tables: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Caches of one kv head, block table and lengths for requests `b * num_kv_heads + h`, from a table for each kv head
    `[num_kv_heads, batch_size, max_pages]`. seq_lens: `[batch_size]`, or `[num_kv_heads, batch_size]`.

    The pages of the heads are views of the same memory, one head apart.

    Raises:
        ValueError: shapes, or strides that permit no such view.
    """
    heads = cache[0].shape[2 - layout]
    if block_tables.ndim != 3 or block_tables.shape[0] != heads:
        raise ValueError(
            f"block_tables: [num_kv_heads = {heads}, batch_size, max_pages] is required with "
            f"enable_block_sparse_attention; got shape {tuple(block_tables.shape)}"
        )
    batch_size, step = block_tables.shape[1], 0
    views: list[torch.Tensor] = []
    for name, x in zip(("k", "v"), cache):
        pages, head, token = x.shape[0], x.stride(2 - layout), x.stride(1 + layout)
        distance = x.stride(0) // head if head else 0
        if not head or x.stride(0) % head or (views and distance != step):
            raise ValueError(
                f"kv_cache: pages of K and V a whole number of heads apart are required with "
                f"enable_block_sparse_attention; got {name} with strides {x.stride()}"
            )
        step = distance
        size, dim = x.shape[1 + layout], x.shape[3]
        shape = ((pages - 1) * step + heads if pages else 0, 1, size, dim)
        view = x.as_strided(shape, (head, head, token, 1))
        views.append(view if layout else view.transpose(1, 2))
    head_of = torch.arange(heads, dtype=torch.int32, device=block_tables.device)
    tables = (block_tables.transpose(0, 1) * step + head_of[:, None]).flatten(0, 1).contiguous()
    if seq_lens.numel() not in (batch_size, batch_size * heads):
        raise ValueError(
            f"seq_lens: {batch_size}, or [{heads}, {batch_size}], lengths are required; got {tuple(seq_lens.shape)}"
        )
    by_request = seq_lens.reshape(-1, batch_size).expand(heads, batch_size).t()
    return (views[0], views[1]), tables, by_request.flatten().contiguous()
