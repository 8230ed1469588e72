"""Arguments of batch decode and batch prefill: backends, options by position, what a plan fixes, results."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from fi_core.attention import contract
from fi_core.attention.schedule import PrefillPlan
from fi_core.attention.wrappers.base import check_results, check_types
from fi_core.observe.describe import words
from fi_core.runtime.invariance import check_plan
from fi_core.runtime.lazy import torch

F = TypeVar("F", bound=Callable[..., Any])

# Backends of decode and of prefill, and names of other libraries' kernels. Those with the same semantics mean "auto".
DECODE_BACKENDS = {name: name for name in ("auto", "fa2", "fa2_tc", "fa3", "cudnn")}
DECODE_BACKENDS |= {"trtllm-gen": "auto", "xqa": "auto"}
PREFILL_BACKENDS = {name: name for name in ("auto", "fa2", "fa3", "cudnn")} | {"trtllm-gen": "auto", "cutlass": "auto"}
DECODE_FOREIGN, PREFILL_FOREIGN = ("cute-dsl", "cutile", "prims-ts"), ("cute-dsl", "cute-dsl-prims")

# The options of decode's plan after page_size, in their older positional order.
_POSITIONAL = words(
    "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale rope_scale",
    "rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req",
)
_FIXED = 8  # positional parameters of plan, self included
SIZE_OPTIONS = (
    *(name for name in _POSITIONAL if name != "non_blocking"),
    "*",
    "window_right",
    "is_causal",
)  # of workspace_size


def deprecated_positional(plan: F) -> F:
    """Accepts the keyword-only options of `plan` by position, with a warning."""

    @functools.wraps(plan)
    def wrapper(*args: Any, **options: Any) -> None:
        if len(args) > _FIXED:
            named = dict(zip(_POSITIONAL, args[_FIXED:]))
            if len(named) < len(args) - _FIXED:
                raise TypeError(f"plan: at most {len(named)} options may go by position; got {len(args) - _FIXED}")
            plan(*args[:_FIXED], **named, **options)
            warnings.warn(f"plan: pass {', '.join(named)} by keyword", DeprecationWarning, stacklevel=2)
        else:
            plan(*args, **options)

    return wrapper  # type: ignore[return-value]


def lse_shape(lse_layout: str, rows: int, heads: int) -> tuple[int, int]:
    if lse_layout == "NH":
        return rows, heads
    if lse_layout == "HN":
        return heads, rows
    raise ValueError(f'lse_layout: "NH" or "HN" is required; got {lse_layout!r}')


def check_rows(plan: PrefillPlan, graph: bool, q: torch.Tensor) -> None:
    """Raises unless q has the planned shape; with a CUDA graph it may have more rows."""
    rows, shape = plan.rows, q.shape
    fits = len(shape) == 3 and (rows is None or shape[0] == rows or (graph and shape[0] > rows))
    if not fits or shape[1] != plan.num_qo_heads or shape[2] != plan.head_dim_qk:
        first = "any" if rows is None else rows
        raise ValueError(
            f"q: shape ({first}, {plan.num_qo_heads}, {plan.head_dim_qk}) was planned (qo_indptr[-1] rows); "
            f"got {tuple(q.shape)}"
        )


def check_call(plan: PrefillPlan, graph: bool, out: Any, lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> None:
    """Raises the error that names the argument of a run that differs from its plan. rest: those of batch_prefill."""
    layout = "HND" if plan.kv_layout else "NHD"
    if v is None:
        k, v = contract.unpack(k, layout)
    *_, scales = rest
    check_types(plan, q, k, v, scales, "k and v (paged_kv_cache)")
    check_plan(plan.max_partials > 0)
    check_rows(plan, graph, q)
    if contract.row_elements(v) != plan.head_dim_vo:
        raise ValueError(f"v: head_dim_vo {plan.head_dim_vo} was planned; got shape {tuple(v.shape)}")
    tokens, heads = k.shape[-3:-1] if plan.kv_layout == 0 else (k.shape[-2], k.shape[-3])
    if plan.page_indices is None and (heads != plan.num_kv_heads or tokens < plan.kv_tokens):
        raise ValueError(
            f"k: {plan.num_kv_heads} heads and {plan.kv_tokens} tokens were planned (kv_indptr[-1]); "
            f"got shape {tuple(k.shape)} ({layout})"
        )
    if plan.page_indices is not None and (tokens, heads) != (plan.page_size, plan.num_kv_heads):
        raise ValueError(
            f"paged_kv_cache: page_size {plan.page_size} and {plan.num_kv_heads} kv heads were planned; "
            f"got shape {tuple(k.shape)} ({layout})"
        )
    check_results(q, (*q.shape[:2], plan.head_dim_vo), plan.out_dtype, out, None)


def variant_tensors(plan: PrefillPlan, k_scales: Any, v_scales: Any) -> dict[str, Any]:
    """The tensors that a user's variant may declare and that a run does not give."""
    custom = plan.mask if plan.items is None else None
    items = None if plan.items is None else plan.items.view(-1)
    of_items = {"prefix_len_ptr": plan.prefix_len, "max_item_len_ptr": plan.longest_item}
    masks = {"custom_mask": custom, "mask_indptr": None if custom is None else plan.mask_indptr}
    found = {**masks, **of_items, "token_pos_in_items_ptr": items, "k_cache_sf": k_scales, "v_cache_sf": v_scales}
    return {f"maybe_{name}": tensor for name, tensor in found.items()}


def allowed_for(kept: str, allowed: str) -> str:
    """The backend for a mask: no kernel for Hopper alone has masks of items, so the name fa3 means any with them."""
    return "auto" if kept == "items" and allowed == "fa3" else allowed


def items_fields(
    batch: int, prefix_len: Any, positions: Any, length: int, longest: Any, on_device: Callable[..., torch.Tensor]
) -> dict[str, Any]:
    """Multi-item scoring as fields of the plan: prefix lengths, and the position of each token within its item.

    on_device: makes the device copy of a table, after its name.
    """
    fields = {"prefix_len": prefix_len, "items": None, "item_positions": positions}
    fields |= {"items_len": length, "longest_item": longest}
    if prefix_len is None and positions is not None:
        raise ValueError("prefix_len_ptr: a tensor is required with token_pos_in_items_ptr; got None")
    if prefix_len is None:
        return fields
    given = 0 if positions is None else positions.numel()
    if positions is None or not 0 < given <= batch * length:
        raise ValueError(
            f"token_pos_in_items_ptr: 1 to batch_size * token_pos_in_items_len = {batch} * {length} elements are "
            f"required with prefix_len_ptr; got {None if positions is None else given}"
        )
    if prefix_len.numel() not in (1, batch):
        raise ValueError(f"prefix_len_ptr: one element, or {batch}, is required; got {prefix_len.numel()}")
    if positions.dtype is not torch.uint16:
        raise ValueError(f"token_pos_in_items_ptr: dtype torch.uint16 is required; got {positions.dtype}")
    fields["prefix_len"] = on_device("prefix_len", prefix_len.reshape(-1)).expand(batch).contiguous()
    items = on_device("items", positions.reshape(-1))
    if given < batch * length:  # the rest is padding, which may be left out
        rest = torch.zeros(batch * length - given, dtype=torch.int16, device=items.device)
        items = torch.cat((items.view(torch.int16), rest))
    return {**fields, "items": items.view(torch.uint16).view(batch, length)}
