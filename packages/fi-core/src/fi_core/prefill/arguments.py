"""What callers of batch prefill pass: backends, and scales by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Names of other libraries' kernels whose semantics ours have mean the best of ours.
BACKENDS = {name: name for name in ("auto", "fa2", "fa3", "cudnn")} | {"trtllm-gen": "auto", "cutlass": "auto"}
FOREIGN = ("cute-dsl", "cute-dsl-prims")


def check_backend(backend: str) -> None:
    if backend in FOREIGN:
        raise NotImplementedError(
            f"backend: {backend!r} names kernels of another library; here are {', '.join(BACKENDS)}"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend: allowed are {', '.join(BACKENDS)}; got {backend!r}")


def check_shape(num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, page_size: int) -> None:
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads: a positive multiple of num_kv_heads ({num_kv_heads}) is required; got {num_qo_heads}"
        )
    for name, head_dim in (("head_dim_qk", head_dim_qk), ("head_dim_vo", head_dim_vo)):
        if head_dim < 8 or head_dim > 512 or head_dim % 8:
            raise ValueError(f"Unsupported head_dim: {name} must be a multiple of 8 up to 512; got {head_dim}")
    if page_size < 1:
        raise ValueError(f"page_size: at least 1 is required; got {page_size}")


def per_head(args: tuple[Any, ...]) -> tuple[float, float, list[Any]]:
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
    return numbers[0] * numbers[1], numbers[2], tensors


def log_base(lse_base: str) -> float:
    """What base-2 logarithms are multiplied by."""
    if lse_base == "log2":
        return 1.0
    if lse_base == "ln":
        return 0.6931471805599453
    raise ValueError(f'lse_base: "log2" or "ln" is required; got {lse_base!r}')


def lse_shape(lse_layout: str, rows: int, heads: int) -> tuple[int, int]:
    if lse_layout == "NH":
        return rows, heads
    if lse_layout == "HN":
        return heads, rows
    raise ValueError(f'lse_layout: "NH" or "HN" is required; got {lse_layout!r}')


def last_value(indptr: torch.Tensor) -> int | None:
    """`indptr[-1]` if it lies on the host: reading it elsewhere would wait for the device."""
    return int(indptr[-1]) if indptr.device.type == "cpu" else None
