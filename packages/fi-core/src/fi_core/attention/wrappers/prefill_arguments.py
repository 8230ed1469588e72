"""Arguments of batch prefill: backends, the base and layout of lse, the buffers of CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import check_graph_buffer

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def fixed_batch_size(buffers: Mapping[str, Any]) -> int:
    """The batch size that the buffers of use_cuda_graph fix. Raises ValueError for one that does not fit."""
    for name, buffer in buffers.items():
        check_graph_buffer(buffer, name)
    rows = len(buffers["qo_indptr_buf"])
    for name, buffer in buffers.items():
        length = rows if name.endswith("indptr_buf") else rows - 1
        if len(buffer) != length and not name.endswith("indices_buf"):
            raise ValueError(f"{name}: length {length} is required, since qo_indptr_buf has {rows}; got {len(buffer)}")
    return rows - 1
