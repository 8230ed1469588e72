"""What batch decode over block tables is asked for besides one table: pages by kv head, and keys spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.attention.mask import pack_drafts

if TYPE_CHECKING:
    import torch


def mask_of_rank(
    q_len: int, seq_lens: torch.Tensor, global_lens: torch.Tensor | None, cp_world: int, cp_rank: int
) -> torch.Tensor | None:
    """The mask of query tokens over the keys of one rank, where key i of rank r is token `i * cp_world + r` (context
    parallelism): uint16 `[batch_size, q_len, words]`, or None if all keys are seen.

    Raises:
        ValueError: cp_rank, or global_lens, which is required for several query tokens.
    """
    import torch

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
    import torch

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
