"""Arguments of batch decode: the older positional order of plan, backends, and lengths."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])

# Backends of the wrappers. Names of other libraries' kernels with the same semantics mean "auto".
BACKENDS = {name: name for name in ("auto", "fa2", "fa2_tc", "fa3", "cudnn")} | {"trtllm-gen": "auto", "xqa": "auto"}
FOREIGN = ("cute-dsl", "cutile", "prims-ts")

# The options of plan after page_size, in their older positional order.
_POSITIONAL = (
    "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "data_type",
    "sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "fixed_split_size",
    "disable_split_kv", "q_len_per_req",
)  # fmt: skip
_FIXED = 8  # positional parameters of plan, self included


def deprecated_positional(plan: F) -> F:
    """Accepts the keyword-only options of `plan` or `workspace_size` by position, with a warning."""

    @functools.wraps(plan)
    def wrapper(*args: Any, **options: Any) -> Any:
        if len(args) > _FIXED:
            more = args[_FIXED:]
            if len(more) > len(_POSITIONAL):
                most = _FIXED - 1 + len(_POSITIONAL)
                raise TypeError(f"{plan.__name__}: at most {most} positional arguments are taken; got {len(args) - 1}")
            named = dict(zip(_POSITIONAL, more))
            twice = [name for name in named if name in options]
            if twice:
                raise TypeError(f"{plan.__name__}: {', '.join(twice)} given by position and by keyword")
            warnings.warn(f"{plan.__name__}: pass {', '.join(named)} by keyword", DeprecationWarning, stacklevel=2)
            args, options = args[:_FIXED], {**named, **options}
        return plan(*args, **options)

    return wrapper  # type: ignore[return-value]


def lengths(
    indptr: torch.Tensor, last_page_len: torch.Tensor | None, seq_lens: torch.Tensor | None, page_size: int
) -> list[int]:
    """Tokens of each request; synchronises if a table is on the device."""
    if seq_lens is not None:
        return [int(n) for n in seq_lens.flatten().tolist()]
    assert last_page_len is not None
    starts, last = indptr.tolist(), last_page_len.tolist()
    return [(end - begin - 1) * page_size + n if end > begin else 0 for begin, end, n in zip(starts, starts[1:], last)]


def check_lengths(found: Sequence[int], q_len: int) -> None:
    if short := [b for b, n in enumerate(found) if n < q_len]:
        b = short[0]
        raise ValueError(f"q_len_per_req: all requests must have {q_len} tokens; request {b} has {found[b]}")
