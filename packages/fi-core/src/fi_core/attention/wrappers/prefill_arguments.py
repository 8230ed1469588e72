"""Arguments of batch prefill: backends, and the base and layout of lse."""

from __future__ import annotations

# Names of other libraries' kernels with the same semantics mean "auto".
BACKENDS = {name: name for name in ("auto", "fa2", "fa3", "cudnn")} | {"trtllm-gen": "auto", "cutlass": "auto"}
FOREIGN = ("cute-dsl", "cute-dsl-prims")


def log_base(lse_base: str) -> float:
    """The factor that converts a base-2 logarithm."""
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
