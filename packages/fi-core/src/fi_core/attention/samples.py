"""Calls of the attention wrappers from the sizes that a user knows: `fi-core why` rehearses them, tests run them.

The caches of a large batch are one page, expanded; its contents do not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.wrappers.cascade import MultiLevelCascadeAttentionWrapper
from fi_core.attention.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.attention.wrappers.ragged import BatchPrefillWithRaggedKVCacheWrapper
from fi_core.utils import canonicalize_torch_dtype, ceil_div

if TYPE_CHECKING:
    import torch

_FLOAT_WORKSPACE = 128 << 20


def _workspace(device: str) -> torch.Tensor:
    import torch

    return torch.empty(_FLOAT_WORKSPACE, dtype=torch.uint8, device=device)


def _pages(batch_size: int, kv_len: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr, indices and last_page_len of requests of one length."""
    import torch

    each = ceil_div(kv_len, page_size)
    indptr = torch.arange(batch_size + 1, dtype=torch.int32) * each
    last = torch.full((batch_size,), kv_len - (each - 1) * page_size if each else 0, dtype=torch.int32)
    return indptr, torch.zeros(batch_size * each, dtype=torch.int32), last


def _cache(
    indices: torch.Tensor, page_size: int, heads: int, dim: int, dtype: torch.dtype, kv_layout: str, device: str
) -> torch.Tensor:
    import torch

    inner = (page_size, heads) if kv_layout == "NHD" else (heads, page_size)
    pages = max(len(indices), 2)
    page = torch.empty((*inner, dim), dtype=dtype, device=device)
    return page.as_strided((pages, *page.shape), (0, *page.stride()))


def _types(dtype: str, kv_dtype: str | None) -> tuple[torch.dtype, torch.dtype]:
    return canonicalize_torch_dtype(dtype), canonicalize_torch_dtype(kv_dtype or dtype)


def _options(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def batch_decode(
    batch_size: int = 64,
    kv_len: int = 4096,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    kv_layout: str = "NHD",
    q_len_per_req: int = 1,
    use_tensor_cores: bool = True,
    backend: str = "auto",
    window_left: int | None = None,
    logits_soft_cap: float | None = None,
    pos_encoding_mode: str | None = None,
    disable_split_kv: bool | None = None,
    device: str = "cpu",
) -> Any:
    """Plans and runs BatchDecodeWithPagedKVCacheWrapper; returns the wrapper."""
    import torch

    q_type, kv_type = _types(dtype, kv_dtype)
    tables = _pages(batch_size, kv_len, page_size)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(device), kv_layout, use_tensor_cores=use_tensor_cores, backend=backend
    )
    wrapper.plan(
        *tables, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type=q_type, kv_data_type=kv_type,
        q_len_per_req=q_len_per_req,
        **_options(
            window_left=window_left, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode,
            disable_split_kv=disable_split_kv,
        ),
    )  # fmt: skip
    cache = _cache(tables[1], page_size, num_kv_heads, head_dim, kv_type, kv_layout, device)
    wrapper.run(
        torch.empty((batch_size * q_len_per_req, num_qo_heads, head_dim), dtype=q_type, device=device), (cache, cache)
    )
    return wrapper


def batch_prefill_paged(
    batch_size: int = 4,
    qo_len: int = 1024,
    kv_len: int | None = None,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    causal: bool = True,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    kv_layout: str = "NHD",
    backend: str = "auto",
    window_left: int | None = None,
    logits_soft_cap: float | None = None,
    pos_encoding_mode: str | None = None,
    disable_split_kv: bool | None = None,
    device: str = "cpu",
) -> Any:
    """Plans and runs BatchPrefillWithPagedKVCacheWrapper; kv_len defaults to qo_len. Returns the wrapper."""
    import torch

    q_type, kv_type = _types(dtype, kv_dtype)
    indptr, indices, last = _pages(batch_size, qo_len if kv_len is None else kv_len, page_size)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(device), kv_layout, backend=backend)
    wrapper.plan(
        torch.arange(batch_size + 1, dtype=torch.int32) * qo_len, indptr, indices, last, num_qo_heads, num_kv_heads,
        head_dim, page_size, causal=causal, q_data_type=q_type, kv_data_type=kv_type,
        **_options(
            window_left=window_left, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode,
            disable_split_kv=disable_split_kv,
        ),
    )  # fmt: skip
    cache = _cache(indices, page_size, num_kv_heads, head_dim, kv_type, kv_layout, device)
    wrapper.run(torch.empty((batch_size * qo_len, num_qo_heads, head_dim), dtype=q_type, device=device), (cache, cache))
    return wrapper


def batch_prefill_ragged(
    batch_size: int = 4,
    qo_len: int = 1024,
    kv_len: int | None = None,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim_qk: int = 128,
    head_dim_vo: int | None = None,
    causal: bool = True,
    dtype: str = "bfloat16",
    kv_layout: str = "NHD",
    backend: str = "auto",
    window_left: int | None = None,
    logits_soft_cap: float | None = None,
    pos_encoding_mode: str | None = None,
    disable_split_kv: bool | None = None,
    device: str = "cpu",
) -> Any:
    """Plans and runs BatchPrefillWithRaggedKVCacheWrapper; kv_len defaults to qo_len. Returns the wrapper."""
    import torch

    q_type, kv_type = _types(dtype, None)
    keys = qo_len if kv_len is None else kv_len
    steps = torch.arange(batch_size + 1, dtype=torch.int32)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(device), kv_layout, backend=backend)
    wrapper.plan(
        steps * qo_len, steps * keys, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal=causal,
        q_data_type=q_type, kv_data_type=kv_type,
        **_options(
            window_left=window_left, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode,
            disable_split_kv=disable_split_kv,
        ),
    )  # fmt: skip
    rows = (batch_size * keys, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, batch_size * keys)
    k = torch.empty((*rows, head_dim_qk), dtype=kv_type, device=device)
    v = torch.empty((*rows, head_dim_vo or head_dim_qk), dtype=kv_type, device=device)
    wrapper.run(torch.empty((batch_size * qo_len, num_qo_heads, head_dim_qk), dtype=q_type, device=device), k, v)
    return wrapper


def cascade(
    batch_size: int = 16,
    shared_kv_len: int = 8192,
    kv_len: int = 512,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: str = "bfloat16",
    kv_layout: str = "NHD",
    device: str = "cpu",
) -> Any:
    """Plans and runs MultiLevelCascadeAttentionWrapper with one shared prefix; returns the wrapper."""
    import torch

    q_type, _ = _types(dtype, None)
    shared, own = _pages(1, shared_kv_len, page_size), _pages(batch_size, kv_len, page_size)
    rows = torch.arange(batch_size + 1, dtype=torch.int32)
    wrapper = MultiLevelCascadeAttentionWrapper(2, _workspace(device), kv_layout)
    wrapper.plan(
        [rows[[0, -1]], rows], [shared[0], own[0]], [shared[1], own[1]], [shared[2], own[2]], num_qo_heads,
        num_kv_heads, head_dim, page_size, q_data_type=q_type,
    )  # fmt: skip
    cache = _cache(shared[1], page_size, num_kv_heads, head_dim, q_type, kv_layout, device)
    wrapper.run(torch.empty((batch_size, num_qo_heads, head_dim), dtype=q_type, device=device), (cache, cache))
    return wrapper


WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": batch_decode,
    "BatchPrefillWithPagedKVCacheWrapper": batch_prefill_paged,
    "BatchPrefillWithRaggedKVCacheWrapper": batch_prefill_ragged,
    "MultiLevelCascadeAttentionWrapper": cascade,
}
