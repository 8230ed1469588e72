"""Exchange of partial attention results between the ranks of decode context parallelism, and their merge."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from fi_core.comm.dcp_alltoall import (
    AllToAllWorkspace,
    decode_cp_a2a_alltoall,
    decode_cp_a2a_workspace_size,
    workspaces,
)
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.workspace import current_device
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = [
    "decode_cp_a2a_lse_reduce",
    "decode_cp_a2a_lse_reduce_create_workspace",
    "decode_cp_a2a_lse_reduce_workspace_size",
]


def _check(max_tokens: int, local_heads: int, cp_size: int, head_dim: int, dtype: torch.dtype) -> None:
    import torch

    if min(max_tokens, local_heads, cp_size, head_dim) <= 0:
        raise ValueError(
            "max_tokens, local_heads, cp_size and head_dim must be positive; got "
            f"{max_tokens}, {local_heads}, {cp_size}, {head_dim}"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"dtype must be torch.float16 or torch.bfloat16; got {dtype}")


def decode_cp_a2a_lse_reduce_workspace_size(
    max_tokens: int, local_heads: int, cp_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Returns the bytes of each rank's workspace on the current device: what the allocation below takes.

    Args:
        max_tokens, local_heads, head_dim: sizes of the largest message, positive; a larger one takes more launches.
        cp_size: ranks of the group, 1 to 8.
        dtype: fp16 or bf16.

    Raises:
        ValueError: a size is not positive, or cp_size is above 8.
        TypeError: dtype is another.
    """
    _check(max_tokens, local_heads, cp_size, head_dim, dtype)
    return decode_cp_a2a_workspace_size(cp_size)


def decode_cp_a2a_lse_reduce_create_workspace(
    max_tokens: int,
    local_heads: int,
    cp_size: int,
    head_dim: int,
    dtype: torch.dtype,
    group: torch.distributed.ProcessGroup,
) -> torch.Tensor:
    """Allocates the workspace of `decode_cp_a2a_lse_reduce`; collective over the ranks of the group.

    Args:
        max_tokens, local_heads, head_dim: sizes of the largest message, positive; a larger one takes more launches.
        cp_size: ranks of the group.
        dtype: fp16 or bf16.
        group: the ranks, a group of torch.distributed.

    Returns:
        A tensor that stands for the workspace: this rank's bytes.

    Raises:
        ValueError: a size is not positive, or cp_size is not that of the group.
        TypeError: dtype is another.
        RuntimeError: The GPUs cannot access each other.
    """
    _check(max_tokens, local_heads, cp_size, head_dim, dtype)
    ranks = TorchDistBackend(group)
    if ranks.Get_size() != cp_size:
        raise ValueError(f"cp_size must be that of the group, {ranks.Get_size()}; got {cp_size}")
    workspace = AllToAllWorkspace(current_device(), ranks)
    workspaces[workspace.buffer.data_ptr()] = workspace
    return workspace.buffer


@fi_api
def decode_cp_a2a_lse_reduce(
    partial_o: torch.Tensor,
    partial_lse: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    lse_mode: Literal["base2", "basee"] = "base2",
) -> torch.Tensor:
    """Merges what all ranks have computed for this rank's part of the heads, or of the queries.

    With o and lse of rank r: `out = sum over r of softmax_r(lse) o_r`, in fp32 with one rounding; 0 where every lse is
    -inf.

    Args:
        partial_o: `[..., cp_size, head_dim]`, fp16 or bf16: row j is for rank j.
        partial_lse: `[..., cp_size]`, fp32, of the same leading dimensions.
        workspace: of `decode_cp_a2a_lse_reduce_create_workspace`.
        cp_rank: of the workspace.
        cp_size: of the workspace.
        lse_mode: the logarithms of partial_lse: "base2", or "basee" for natural ones.

    Returns:
        `[..., head_dim]`, dtype of partial_o.

    Raises:
        ValueError: lse_mode, a shape, or the workspace does not fit.
        TypeError: a dtype does not fit.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    import torch

    if lse_mode not in ("base2", "basee"):
        raise ValueError(f"lse_mode must be 'base2' or 'basee'; got {lse_mode!r}")
    if partial_o.dtype not in (torch.float16, torch.bfloat16) or partial_lse.dtype is not torch.float32:
        raise TypeError(
            "partial_o must be float16 or bfloat16, and partial_lse float32; got "
            f"{partial_o.dtype} and {partial_lse.dtype}"
        )
    if partial_lse.shape != partial_o.shape[:-1]:
        raise ValueError(f"partial_lse must have shape {list(partial_o.shape[:-1])}; got {list(partial_lse.shape)}")
    o, lse = decode_cp_a2a_alltoall(partial_o, partial_lse.unsqueeze(-1), workspace, cp_rank, cp_size)
    natural = lse * math.log(2) if lse_mode == "base2" else lse
    weights = torch.softmax(natural, -2).nan_to_num_(0.0)  # of -inf alone: 0 / 0
    return torch.where(weights > 0, o.float() * weights, 0.0).sum(-2).to(partial_o.dtype)
