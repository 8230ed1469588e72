"""The contract of attention calls in all families: layouts, data types, scales, paged caches and their checks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from fi_core.runtime.env import env
from fi_core.utils import (
    PosEncodingMode,
    TensorLayout,
    _unpack_paged_kv_cache,
    canonicalize_torch_dtype,
    is_graph_capturing,
)

if TYPE_CHECKING:
    import torch

CHECK = env.check  # read once: calls pay nothing for it
LAYOUTS = {name: layout.value for name, layout in TensorLayout.__members__.items()}
POS_ENCODINGS = {name: mode.value for name, mode in PosEncodingMode.__members__.items()}


def code(codes: dict[str, int], name: str, argument: str) -> int:
    found = codes.get(name)
    if found is None:
        raise KeyError(f"{argument}: allowed are {', '.join(codes)}; got {name!r}")
    return found


def check_backend(backend: str, known: Collection[str], foreign: Collection[str]) -> None:
    if backend in foreign:
        raise NotImplementedError(f"backend: {backend!r} names kernels of another library; here are {', '.join(known)}")
    if backend not in known:
        raise ValueError(f"backend: allowed are {', '.join(known)}; got {backend!r}")


def check_shape(num_qo_heads: int, num_kv_heads: int, page_size: int, **head_dims: int) -> None:
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads: a positive multiple of num_kv_heads ({num_kv_heads}) is required; got {num_qo_heads}"
        )
    for name, head_dim in head_dims.items():
        if head_dim < 8 or head_dim > 512 or head_dim % 8:
            raise ValueError(f"Unsupported head_dim: {name} must be a multiple of 8 up to 512; got {head_dim}")
    if page_size < 1:
        raise ValueError(f"page_size: at least 1 is required; got {page_size}")


def _dtype(dtype: torch.dtype | str, argument: str) -> torch.dtype:
    try:
        return canonicalize_torch_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {str(error).partition(': ')[2]}") from None


def data_types(
    q: torch.dtype | str | None,
    kv: torch.dtype | str | None,
    o: torch.dtype | str | None,
    both: torch.dtype | str | None,
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """(q, kv, o). data_type (`both`) fills q and kv where they are None. Then q defaults to float16, kv and o to q."""
    import torch

    if both is not None:
        q = both if q is None else q
        kv = both if kv is None else kv
    q = _dtype("float16" if q is None else q, "q_data_type")
    kv = q if kv is None else _dtype(kv, "kv_data_type")
    if kv is torch.uint8:
        raise no_nvfp4("kv_data_type")
    o = q if o is None else _dtype(o, "o_data_type")
    if not o.is_floating_point:
        raise TypeError(f"o_data_type: a float dtype is required; got {o}")
    return q, kv, o


def unpack(
    cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V caches with four axes. The usual forms are tested first, because every call passes here."""
    if type(cache) is tuple and cache[0].ndim == 4 and cache[1].ndim == 4:
        return cache
    if getattr(cache, "ndim", 0) == 5:
        k, v = cache.unbind(1)  # type: ignore[union-attr]
        return k, v
    return _unpack_paged_kv_cache(cache, kv_layout)


def cache_pair(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`unpack`, where dim 1 of a single tensor may also be 1: the keys are the values too."""
    if not isinstance(kv_cache, tuple) and kv_cache.ndim == 5 and kv_cache.shape[1] == 1:
        return kv_cache[:, 0], kv_cache[:, 0]
    return unpack(kv_cache, kv_layout)


def per_head(args: tuple[Any, ...]) -> tuple[float, float, tuple[Any, Any, Any]]:
    """scale_q, scale_k, scale_v from the positional arguments of run: (number for scores, for the output, tensors)."""
    if len(args) > 3:
        raise TypeError(f"run: scale_q, scale_k and scale_v may follow by position; got {len(args)} arguments")
    numbers = [1.0, 1.0, 1.0]
    tensors: list[Any] = [None, None, None]
    for i, scale in enumerate(args):
        if isinstance(scale, (int, float)):
            numbers[i] = scale
        else:
            tensors[i] = scale
    return numbers[0] * numbers[1], numbers[2], (tensors[0], tensors[1], tensors[2])


def last_value(indptr: torch.Tensor) -> int | None:
    """`indptr[-1]` if it is on the host; reading it from the device would synchronise."""
    return int(indptr[-1]) if indptr.device.type == "cpu" and len(indptr) else None


def check_length(last: int | None, indices: torch.Tensor, name: str) -> None:
    """Raises ValueError if a table is shorter than its offsets, whose `last` is known, require."""
    if last is not None and last > len(indices):
        raise ValueError(f"{name}: {last} are required, where the last request ends; got {len(indices)}")


def check_bounds(indptr: torch.Tensor, name: str, most: int) -> None:
    """Raises ValueError unless offsets `[batch_size + 1]` rise and stay in 0..most (with FI_CHECK=1).

    It reads them on the host, so it synchronises. It does nothing while a CUDA graph is captured.
    """
    import torch

    if torch.compiler.is_compiling() or is_graph_capturing() or not len(indptr):
        return
    start = indptr.cpu().long()
    if (start.diff() < 0).any() or start[0] < 0 or start[-1] > most:
        raise ValueError(f"{name}: must rise from 0 or more to at most {most}; got {start.tolist()}")


def check_pages(num_pages: int, indices: torch.Tensor, name: str, indptr: torch.Tensor) -> None:
    """`check_bounds` of a page table, and ValueError unless all its pages are in the cache."""
    import torch

    if torch.compiler.is_compiling() or is_graph_capturing():
        return
    check_bounds(indptr, "indptr", len(indices))
    start, pages = indptr.cpu().long(), indices.cpu()
    used = pages[start[0] : start[-1]]
    wrong = (used < 0) | (used >= num_pages)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(f"{name}: the cache has pages 0 to {num_pages - 1}; got {int(used[i])} at {i + int(start[0])}")


def check_tables(num_pages: int, block_tables: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> None:
    """`check_pages` of a block table, for the entries within the lengths."""
    import torch

    if torch.compiler.is_compiling() or is_graph_capturing():
        return
    counts = ((seq_lens.cpu().long() + page_size - 1) // page_size).clamp(max=block_tables.shape[1])
    used = [row[:count] for row, count in zip(block_tables.cpu(), counts.tolist())]
    check_pages(num_pages, torch.cat(used), "block_tables", torch.tensor([0, int(counts.sum())]))


def scale_product(number: float, *scales: Any) -> tuple[float, torch.Tensor | None]:
    """The product of numbers and of one-element tensors: (product of the numbers, product of the tensors or None)."""
    tensor: Any = None
    for scale in scales:
        if scale is None:
            continue
        if isinstance(scale, (int, float)):
            number *= scale
        else:
            tensor = scale if tensor is None else tensor * scale
    return number, tensor


def pages_of_chunk(fixed_split_size: int | None) -> int | None:
    """fixed_split_size of a plan; None for None and for -1, which engines pass. Raises ValueError for 0."""
    if fixed_split_size == 0:
        raise ValueError("fixed_split_size: pages of a chunk, or None or -1 for no fixed chunks, are required; got 0")
    return None if fixed_split_size is None or fixed_split_size < 0 else fixed_split_size


def no_nvfp4(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name}: NVFP4 keys and values are not supported; pass fp16, bf16 or fp8 ones")


def unsupported(name: str, came: Any, instead: str) -> NotImplementedError:
    """The error for an argument value that no kernel supports; `instead` is the advice."""
    got = f"{came.dtype} of shape {tuple(came.shape)}" if hasattr(came, "shape") else repr(came)
    return NotImplementedError(f"{name}: not supported, {instead}; got {got}")


def refuse_nvfp4(kv_cache_sf: Any, out: Any, out_dtype: Any, o_sf_scale: Any, o_sf_vec_size: Any) -> None:
    """Raises NotImplementedError where keys or output of one call are NVFP4."""
    if kv_cache_sf is not None:
        raise no_nvfp4("kv_cache_sf")
    dtype = "nvfp4" if getattr(out, "dtype", None) == "nvfp4" else out_dtype
    for name, came, asked in (
        ("out_dtype", dtype, dtype == "nvfp4"),
        ("o_sf_vec_size", o_sf_vec_size, o_sf_vec_size is not None),
        ("o_sf_scale", o_sf_scale, o_sf_scale is not None),
    ):
        if asked:
            raise unsupported(name, came, "NVFP4 output must be quantized afterwards: take a 16-bit out_dtype")


def refuse_split_tables(uses_shared_paged_kv_idx: bool) -> None:
    if not uses_shared_paged_kv_idx:
        raise unsupported(
            "uses_shared_paged_kv_idx", False, "keys and values must lie in pages of one id: pass one block table"
        )


def flat_tables(block_tables: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A block table as a flat list of page ids, and the distance of its rows. Raises ValueError."""
    if block_tables.ndim != 2 or block_tables.stride(1) != 1:
        raise ValueError(
            "block_tables: [batch_size, max_pages], contiguous in the last dimension, is required; got shape "
            f"{tuple(block_tables.shape)} with strides {block_tables.stride()}"
        )
    batch_size, most = block_tables.shape
    if block_tables.is_contiguous():
        return block_tables, most
    pitch = block_tables.stride(0)  # columns of a wider table
    return block_tables.as_strided(((batch_size - 1) * pitch + most,), (1,)), pitch


class computed:
    """A property that an assignment overrides: engines that plan by themselves assign the attributes of a plan."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.function(instance)
