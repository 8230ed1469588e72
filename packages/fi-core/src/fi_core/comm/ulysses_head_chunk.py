"""Bands of heads in Ulysses context parallelism (arXiv:2309.14509): what is sent, and where what is received goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.runtime.tensors import check_apart

if TYPE_CHECKING:
    import torch


def _check_integers(**numbers: int) -> None:
    """Raises unless each is an integer of 1 or more, or of 0 or more if it is an offset."""
    for name, number in numbers.items():
        least = 0 if name == "head_offset" else 1
        if type(number) is not int or number < least:
            raise ValueError(f"{name} must be an integer of {least} or more; got {number!r}")


def _check_band(local_heads: int, head_offset: int, head_count: int) -> None:
    if head_offset + head_count > local_heads:
        raise ValueError(
            f"head_offset + head_count must be at most the {local_heads} heads of a rank; got {head_offset} + "
            f"{head_count}"
        )


def _check_out(out: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    if out.shape != shape or out.dtype != like.dtype or out.device != like.device or not out.is_contiguous():
        raise ValueError(
            f"out must be a contiguous tensor of {like.dtype} and shape {list(shape)} on {like.device}; got "
            f"{out.dtype}, {list(out.shape)} on {out.device}"
        )


@fi_api
def pack_ulysses_qkv_head_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    world_size: int,
    head_offset: int,
    head_count: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packs heads `[head_offset, head_offset + head_count)` of each rank's share for an all-to-all of q, k and v.

    Args:
        query: `[batch, local_seq, heads, head_dim]`, any strides; heads is a multiple of world_size.
        key: shape and dtype of query.
        value: likewise.
        world_size: the ranks; heads `[r heads / world_size, ...)` are those of rank r.
        head_offset: first head of the band within a rank's share.
        head_count: heads of the band.
        out: receives the result, contiguous; allocated if None.

    Returns:
        out: `[batch, local_seq, world_size * head_count, 3 * head_dim]`: q, k and v of a head one after another.

    Raises:
        ValueError: a shape, dtype or number does not fit.
    """
    _check_integers(world_size=world_size, head_offset=head_offset, head_count=head_count)
    if query.ndim != 4 or query.shape[2] % world_size:
        raise ValueError(
            f"query must have shape [batch, local_seq, heads, head_dim], heads a multiple of world_size, {world_size}; "
            f"got {list(query.shape)}"
        )
    for name, x in (("key", key), ("value", value)):
        if x.shape != query.shape or x.dtype != query.dtype or x.device != query.device:
            raise ValueError(
                f"{name} must be {query.dtype} of shape {list(query.shape)} on {query.device}, as query; got "
                f"{x.dtype}, {list(x.shape)} on {x.device}"
            )
    batch, length, heads, head_dim = query.shape
    _check_band(heads // world_size, head_offset, head_count)
    shape = (batch, length, world_size * head_count, 3 * head_dim)
    if out is None:
        out = query.new_empty(shape)
    _check_out(out, query, shape)
    check_apart({"out": out}, {"query": query, "key": key, "value": value})
    parts = out.view(batch, length, world_size, head_count, 3, head_dim)
    for i, x in enumerate((query, key, value)):
        parts[..., i, :] = x.unflatten(2, (world_size, -1))[:, :, :, head_offset : head_offset + head_count]
    return out


@fi_api
def merge_ulysses_output_head_chunk(
    received: torch.Tensor, *, world_size: int, local_heads: int, head_offset: int, out: torch.Tensor
) -> torch.Tensor:
    """Writes a received band of heads to its place in the output; the rest of out stays.

    Args:
        received: `[batch, local_seq, world_size * head_count, head_dim]`: the band of each rank in turn.
        world_size: the ranks.
        local_heads: heads of each rank.
        head_offset: first head of the band within a rank's share.
        out: `[batch, local_seq, world_size * local_heads, head_dim]`, dtype of received, contiguous.

    Returns:
        out.

    Raises:
        ValueError: a shape, dtype or number does not fit.
    """
    _check_integers(world_size=world_size, local_heads=local_heads, head_offset=head_offset)
    if received.ndim != 4 or received.shape[2] % world_size:
        raise ValueError(
            f"received must have shape [batch, local_seq, world_size * head_count, head_dim] for {world_size} ranks; "
            f"got {list(received.shape)}"
        )
    batch, length, heads, head_dim = received.shape
    count = heads // world_size
    _check_band(local_heads, head_offset, count)
    shape = (batch, length, world_size * local_heads, head_dim)
    _check_out(out, received, shape)
    check_apart({"out": out}, {"received": received})
    places = out.view(batch, length, world_size, local_heads, head_dim)
    places[:, :, :, head_offset : head_offset + count] = received.unflatten(2, (world_size, count))
    return out
