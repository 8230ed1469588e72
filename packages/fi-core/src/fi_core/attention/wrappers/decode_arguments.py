"""Arguments of batch decode: the older positional order of plan, backends, and lengths."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fi_core.attention.contract import kv_lens
from fi_core.observe.describe import words
from fi_core.runtime.lazy import torch
from fi_core.utils import int32_index

F = TypeVar("F", bound=Callable[..., Any])

# Backends of the wrappers. Names of other libraries' kernels with the same semantics mean "auto".
BACKENDS = {name: name for name in ("auto", "fa2", "fa2_tc", "fa3", "cudnn")} | {"trtllm-gen": "auto", "xqa": "auto"}
FOREIGN = ("cute-dsl", "cutile", "prims-ts")

# The options of plan after page_size, in their older positional order.
_POSITIONAL = words(
    "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale rope_scale",
    "rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req",
)
_FIXED = 8  # positional parameters of plan, self included
SIZE_OPTIONS = tuple(name for name in _POSITIONAL if name != "non_blocking")  # of workspace_size


def by_name(function: str, names: Sequence[str], values: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options, with values that are given by position under these names. Raises TypeError as a call does."""
    if len(values) > len(names):
        raise TypeError(f"{function}: at most {len(names)} options may go by position; got {len(values)}")
    named = dict(zip(names, values))
    twice = [name for name in named if name in options]
    if twice:
        raise TypeError(f"{function}: {', '.join(twice)} given by position and by keyword")
    return {**named, **options}


def options_of_size(names: Sequence[str], values: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """`by_name` of workspace_size, which has no other options. Raises TypeError for one."""
    given = by_name("workspace_size", names, values, options)
    unknown = [name for name in options if name not in names]
    if unknown:
        raise TypeError(f"workspace_size: no option is named {', '.join(unknown)}; there are {', '.join(names)}")
    return given


def deprecated_positional(plan: F) -> F:
    """Accepts the keyword-only options of `plan` by position, with a warning."""

    @functools.wraps(plan)
    def wrapper(*args: Any, **options: Any) -> Any:
        if len(args) > _FIXED:
            more = args[_FIXED:]
            options = by_name(plan.__name__, _POSITIONAL, more, options)
            names = ", ".join(_POSITIONAL[: len(more)])
            warnings.warn(f"{plan.__name__}: pass {names} by keyword", DeprecationWarning, stacklevel=2)
        return plan(*args[:_FIXED], **options)

    return wrapper  # type: ignore[return-value]


def lengths(
    indptr: torch.Tensor, last_page_len: torch.Tensor | None, seq_lens: torch.Tensor | None, page_size: int
) -> list[int]:
    """Tokens of each request; synchronises if a table is on the device."""
    if seq_lens is not None:
        return [int(n) for n in seq_lens.flatten().tolist()]
    assert last_page_len is not None
    return kv_lens(indptr.cpu().long(), last_page_len.cpu().long(), page_size).tolist()


def copy_tables(buffers: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], non_blocking: bool) -> None:
    """Copies each table into the beginning of its buffer, all tables of one device in one kernel."""
    together: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for buffer, table in zip(buffers, map(int32_index, tables)):
        if table.data_ptr() == buffer.data_ptr():
            continue
        if table.ndim != 1:
            raise ValueError(f"indptr, indices and last_page_len: one dimension is required; got {tuple(table.shape)}")
        if table.dtype is not buffer.dtype:
            raise TypeError(f"indptr, indices and last_page_len: {buffer.dtype} as in the buffers; got {table.dtype}")
        target = buffer if table.shape == buffer.shape else buffer[: table.numel()]
        if table.device == buffer.device:
            together[0].append(target)
            together[1].append(table)
        else:
            target.copy_(table, non_blocking=non_blocking)
    if together[0]:
        torch._foreach_copy_(*together)  # pyright: ignore[reportPrivateImportUsage]
