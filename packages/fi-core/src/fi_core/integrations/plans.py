"""Dense and packed batches of attention on fi's wrappers: planned once a forward pass, run in every layer."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import fi_core
from fi_core.runtime.invariance import is_on

if TYPE_CHECKING:
    import torch

_MOST = 16  # wrappers that are kept, with 8 MiB each
_WORKSPACE = 64 << 20  # bytes, shared by the wrappers of a device


class _Slot(NamedTuple):
    """What decides the wrapper of a batch: layers that agree in it share a plan."""

    kind: str  # "decode", "prefill" or "ragged"
    device: torch.device
    dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    causal: bool
    sm_scale: float
    window_left: int
    soft_cap: float


_wrappers: OrderedDict[_Slot, Any] = OrderedDict()
_planned: dict[_Slot, tuple[Any, ...]] = {}  # what the last plan was made for; holds its tensors, so that `is` tells


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def _wrapper(slot: _Slot) -> Any:
    if slot in _wrappers:
        _wrappers.move_to_end(slot)
        return _wrappers[slot]
    while len(_wrappers) >= _MOST:
        _planned.pop(_wrappers.popitem(last=False)[0], None)
    kinds = {
        "decode": fi_core.BatchDecodeWithPagedKVCacheWrapper,
        "prefill": fi_core.BatchPrefillWithPagedKVCacheWrapper,
        "ragged": fi_core.BatchPrefillWithRaggedKVCacheWrapper,
    }
    _wrappers[slot] = made = kinds[slot.kind](_workspace(slot.device), "HND")
    return made


def _is_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two tuples have equal numbers and the same tensors."""
    return len(a) == len(b) and all(x is y or (isinstance(x, int) and x == y) for x, y in zip(a, b))


def _is_planned(slot: _Slot, batch: tuple[Any, ...]) -> bool:
    return _is_same(_planned.get(slot, ()), batch)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, length, head_dim]` as rows of tokens."""
    return x.transpose(1, 2).flatten(0, 1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    sm_scale: float,
    window_left: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a dense batch, whose keys and values are read where they are, as pages.

    Args:
        query: `[batch, num_qo_heads, qo_len, head_dim]`.
        key, value: `[batch, num_kv_heads, kv_len, head_dim]`; the queries are the last tokens.
        mask: None; bool `[batch, kv_len]`, the keys that are no padding; or bool `[batch, 1, qo_len, kv_len]`, which
            replaces causal and window_left.
        causal, sm_scale, window_left, soft_cap, sinks: as of the wrappers.

    Returns:
        `[batch, qo_len, num_qo_heads, head_dim]`.
    """
    batch, _, qo_len, _ = query.shape
    kv_len = key.shape[2]
    padding = None
    if mask is not None and mask.ndim == 2:
        padding = _padding(mask, qo_len, causal, window_left)
        mask = padding.bits
    if mask is not None:
        causal, window_left = False, -1
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    slot = _Slot(
        "decode" if qo_len == 1 and mask is None else "prefill",
        query.device,
        query.dtype,
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        causal,
        sm_scale,
        window_left,
        soft_cap,
    )
    first = None if padding is None or mask is not None else padding.first
    if first is not None:
        key, value = _tokens(key), _tokens(value)
    wrapper, planned = _wrapper(slot), (batch, qo_len, kv_len, mask, first, is_on())
    if not _is_planned(slot, planned):
        tables = _dense_tables(batch, kv_len) if first is None else _token_tables(first, kv_len, slot.num_kv_heads)
        _plan(wrapper, slot, batch, qo_len, tables, kv_len if first is None else 1, mask)
        _planned[slot] = planned
    out = wrapper.run(_rows(query), (key, value), sinks=sinks)
    return out.unflatten(0, (batch, qo_len))  # type: ignore[no-any-return]


def _plan(
    wrapper: Any, slot: _Slot, batch: int, qo_len: int, tables: Any, page_size: int, mask: torch.Tensor | None
) -> None:
    import torch

    options = {
        "sm_scale": slot.sm_scale,
        "window_left": slot.window_left,
        "logits_soft_cap": slot.soft_cap,
        "q_data_type": slot.dtype,
    }
    if slot.kind == "decode":
        wrapper.plan(*tables, slot.num_qo_heads, slot.num_kv_heads, slot.head_dim_qk, page_size, **options)
        return
    rows = torch.arange(batch + 1, dtype=torch.int32) * qo_len
    bits = None if mask is None else mask[:, 0].reshape(-1)
    wrapper.plan(
        rows,
        *tables,
        slot.num_qo_heads,
        slot.num_kv_heads,
        slot.head_dim_qk,
        page_size,
        slot.head_dim_vo,
        custom_mask=bits,
        causal=slot.causal,
        **options,
    )


def _dense_tables(batch: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One page for each request, which holds all of its tokens."""
    import torch

    return (
        torch.arange(batch + 1, dtype=torch.int32),
        torch.arange(batch, dtype=torch.int32),
        torch.full((batch,), kv_len, dtype=torch.int32),
    )


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Pages of one token: token t of request b is page `b * num_kv_heads * kv_len + t`."""
    batch, heads, length, dim = x.shape
    x = x.contiguous()
    pages = (batch - 1) * heads * length + length
    return x.as_strided((pages, heads, 1, dim), (dim, length * dim, dim, 1), x.storage_offset())


def _token_tables(
    first: tuple[int, ...], kv_len: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of each request from its first on that is no padding."""
    import torch

    pages = [torch.arange(f, kv_len, dtype=torch.int32) + b * num_kv_heads * kv_len for b, f in enumerate(first)]
    lengths = torch.tensor([0, *(len(own) for own in pages)], dtype=torch.int32)
    return lengths.cumsum(0, dtype=torch.int32), torch.cat(pages), (lengths[1:] > 0).int()


class _Padding(NamedTuple):
    """A padding mask as the wrappers take it: neither field, where causality alone excludes the padding."""

    first: tuple[int, ...] | None  # the first key of each request; padding is on the left
    bits: torch.Tensor | None  # `[batch, 1, qo_len, kv_len]`, for other paddings


_paddings: list[tuple[tuple[Any, ...], _Padding]] = []  # the newest; layers of a kind share a mask


def _padding(mask: torch.Tensor, qo_len: int, causal: bool, window_left: int) -> _Padding:
    """Reads a padding mask on the host, once a forward pass and kind of layer."""
    asked = mask, qo_len, causal, window_left
    found = next((padding for known, padding in _paddings if _is_same(known, asked)), None)
    if found is None:
        found = _read_padding(mask, qo_len, causal, window_left)
        _paddings[:] = [(asked, found), *_paddings[:3]]
    return found


def _read_padding(mask: torch.Tensor, qo_len: int, causal: bool, window_left: int) -> _Padding:
    import torch

    host = mask.cpu()
    kv_len = host.shape[1]
    change = host.int().diff(dim=1)
    if bool((change >= 0).all()):
        first = (kv_len - host.sum(1)).tolist()
        return _Padding(tuple(first), None)
    if causal and qo_len == kv_len and bool((change <= 0).all()):
        return _Padding(None, None)  # rows of padding may have any result
    q = torch.arange(kv_len - qo_len, kv_len)[:, None]
    k = torch.arange(kv_len)
    seen = k <= q if causal else torch.ones(qo_len, kv_len, dtype=torch.bool)
    if window_left >= 0:
        seen = seen & (k >= q - window_left)
    return _Padding(None, (seen & host[:, None]).unsqueeze(1).to(mask.device))


def attend_ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    causal: bool,
    sm_scale: float,
    window_left: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of packed requests.

    Args:
        query: `[1, num_qo_heads, qo_tokens, head_dim]`.
        key, value: `[1, num_kv_heads, kv_tokens, head_dim]`.
        qo_indptr, kv_indptr: int32 `[requests + 1]` on the device.
        causal, sm_scale, window_left, soft_cap, sinks: as of the wrappers.

    Returns:
        `[1, qo_tokens, num_qo_heads, head_dim]`.
    """
    slot = _Slot(
        "ragged",
        query.device,
        query.dtype,
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        causal,
        sm_scale,
        window_left,
        soft_cap,
    )
    wrapper, planned = _wrapper(slot), (qo_indptr, kv_indptr, query.shape[2], key.shape[2], is_on())
    if not _is_planned(slot, planned):
        wrapper.plan(
            qo_indptr,
            kv_indptr,
            slot.num_qo_heads,
            slot.num_kv_heads,
            slot.head_dim_qk,
            slot.head_dim_vo,
            causal=causal,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=soft_cap,
            q_data_type=slot.dtype,
        )
        _planned[slot] = planned
    wrapper._sinks = sinks
    return wrapper.run(_rows(query), key[0], value[0]).unsqueeze(0)  # type: ignore[no-any-return]
