"""What callers of batch decode pass: the older positional order of plan, data types, backends, scales and lengths."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fi_core.env import env
from fi_core.utils import (
    PosEncodingMode,
    TensorLayout,
    _unpack_paged_kv_cache,
    canonicalize_torch_dtype,
    is_graph_capturing,
)

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])

CHECK = env.check  # read once: calls pay nothing for it
LAYOUTS = {name: layout.value for name, layout in TensorLayout.__members__.items()}
POS_ENCODINGS = {name: mode.value for name, mode in PosEncodingMode.__members__.items()}
# Backends of the wrappers. Names of other libraries' kernels whose semantics ours have mean the best of ours.
BACKENDS = {name: name for name in ("auto", "fa2", "fa2_tc", "fa3", "cudnn")} | {"trtllm-gen": "auto", "xqa": "auto"}
FOREIGN = ("cute-dsl", "cutile", "prims-ts")

# Of plan, after page_size, in the order in which callers once passed them.
_POSITIONAL = (
    "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "data_type",
    "sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "fixed_split_size",
    "disable_split_kv", "q_len_per_req",
)  # fmt: skip
_FIXED = 8  # positional parameters of plan, self included


def deprecated_positional(plan: F) -> F:
    """Lets the keyword-only options of `plan` follow its positional arguments, with a warning."""

    @functools.wraps(plan)
    def wrapper(*args: Any, **options: Any) -> Any:
        if len(args) > _FIXED:
            more = args[_FIXED:]
            if len(more) > len(_POSITIONAL):
                most = _FIXED - 1 + len(_POSITIONAL)
                raise TypeError(f"plan: at most {most} positional arguments are taken; got {len(args) - 1}")
            named = dict(zip(_POSITIONAL, more))
            twice = [name for name in named if name in options]
            if twice:
                raise TypeError(f"plan: {', '.join(twice)} given by position and by keyword")
            warnings.warn(f"plan: pass {', '.join(named)} by keyword", DeprecationWarning, stacklevel=2)
            args, options = args[:_FIXED], {**named, **options}
        return plan(*args, **options)

    return wrapper  # type: ignore[return-value]


def code(codes: dict[str, int], name: str, argument: str) -> int:
    found = codes.get(name)
    if found is None:
        raise KeyError(f"{argument}: allowed are {', '.join(codes)}; got {name!r}")
    return found


def check_backend(backend: str) -> None:
    if backend in FOREIGN:
        raise NotImplementedError(
            f"backend: {backend!r} names kernels of another library; here are {', '.join(BACKENDS)}"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend: allowed are {', '.join(BACKENDS)}; got {backend!r}")


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
    """(q, kv, o). data_type (`both`) fills q and kv where they are None; then q is float16, kv and o are q's."""
    import torch

    if both is not None:
        q = both if q is None else q
        kv = both if kv is None else kv
    q = _dtype("float16" if q is None else q, "q_data_type")
    kv = q if kv is None else _dtype(kv, "kv_data_type")
    if kv is torch.uint8:
        raise NotImplementedError("kv_data_type: NVFP4 keys and values (uint8) are not supported")
    return q, kv, q if o is None else _dtype(o, "o_data_type")


def check_shape(num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> None:
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads: a positive multiple of num_kv_heads ({num_kv_heads}) is required; got {num_qo_heads}"
        )
    if head_dim < 8 or head_dim > 512 or head_dim % 8:
        raise ValueError(f"Unsupported head_dim: a multiple of 8 up to 512 is required; got {head_dim}")
    if page_size < 1:
        raise ValueError(f"page_size: at least 1 is required; got {page_size}")


def unpack(
    cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V caches with four axes; the usual forms come first, since they come with every call."""
    if type(cache) is tuple and cache[0].ndim == 4 and cache[1].ndim == 4:
        return cache
    if getattr(cache, "ndim", 0) == 5:
        k, v = cache.unbind(1)  # type: ignore[union-attr]
        return k, v
    return _unpack_paged_kv_cache(cache, kv_layout)


def lengths(
    indptr: torch.Tensor, last_page_len: torch.Tensor | None, seq_lens: torch.Tensor | None, page_size: int
) -> list[int]:
    """Tokens of each request; waits for the device if a table lies there."""
    if seq_lens is not None:
        return [int(n) for n in seq_lens.tolist()]
    assert last_page_len is not None
    starts, last = indptr.tolist(), last_page_len.tolist()
    return [(end - begin - 1) * page_size + n if end > begin else 0 for begin, end, n in zip(starts, starts[1:], last)]


def check_lengths(found: Sequence[int], q_len: int) -> None:
    if short := [b for b, n in enumerate(found) if n < q_len]:
        b = short[0]
        raise ValueError(f"q_len_per_req: all requests must have so many tokens, {q_len}; request {b} has {found[b]}")


def check_pages(num_pages: int, indices: torch.Tensor, name: str, indptr: torch.Tensor) -> None:
    """Raise ValueError unless all pages that indptr `[batch_size + 1]` names are in the cache (with FI_CHECK=1).

    Reads the tables on the host, so it waits for the device; does nothing while a CUDA graph is captured.
    """
    import torch

    if torch.compiler.is_compiling() or is_graph_capturing():
        return
    start, pages = indptr.cpu().long(), indices.cpu()
    if (start.diff() < 0).any() or start[0] < 0 or start[-1] > len(pages):
        raise ValueError(f"indptr: must rise from 0 or more to at most {len(pages)}, the indices; got {start.tolist()}")
    used = pages[start[0] : start[-1]]
    wrong = (used < 0) | (used >= num_pages)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(f"{name}: the cache has pages 0 to {num_pages - 1}; got {int(used[i])} at {i + int(start[0])}")


def check_tables(num_pages: int, block_tables: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> None:
    """`check_pages` of a block table: the entries that the lengths reach."""
    import torch

    if torch.compiler.is_compiling() or is_graph_capturing():
        return
    counts = ((seq_lens.cpu().long() + page_size - 1) // page_size).clamp(max=block_tables.shape[1])
    used = [row[:count] for row, count in zip(block_tables.cpu(), counts.tolist())]
    check_pages(num_pages, torch.cat(used), "block_tables", torch.tensor([0, int(counts.sum())]))


def scale_product(number: float, *scales: Any) -> tuple[float, torch.Tensor | None]:
    """The product of numbers and of one-element tensors: (the numbers', the tensors' or None)."""
    tensor: Any = None
    for scale in scales:
        if scale is None:
            continue
        if isinstance(scale, (int, float)):
            number *= scale
        else:
            tensor = scale if tensor is None else tensor * scale
    return number, tensor


def refuse(asked: Mapping[str, bool]) -> None:
    """Raises NotImplementedError for the first feature that is asked for and that no kernel here has."""
    for name, given in asked.items():
        if given:
            raise NotImplementedError(f"{name}: not supported; leave it out")


class computed:
    """A property that gives way to an assignment, since engines that plan by themselves assign what plan used to."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.function(instance)
