"""The product of gathered activations by a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.comm.dcp_alltoall import AllToAllWorkspace
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.gemm.dense import mm_bf16
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import BackendSupportedError
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

__all__ = ["all_gather_matmul"]

workspaces: dict[tuple[object, torch.device], AllToAllWorkspace] = {}


@fi_api
def all_gather_matmul(
    inp: torch.Tensor,
    w: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    backend: str = "auto",
    verbose: bool = False,
) -> torch.Tensor:
    """Gathers the rows of all ranks of a host and multiplies them by this rank's weight, in fp32 with one rounding.

    The first call of a group and device allocates what the ranks share, and is collective.

    Args:
        inp: `[m, k]`, bf16 or fp16, contiguous, of the same shape on all ranks.
        w: `[k, n]`, dtype of inp. Either dimension may be the contiguous one; a transposed weight `[n, k]` is fastest.
        group: 1 to 8 ranks, a group of torch.distributed.
        backend: "auto".
        verbose: accepted; nothing is printed.

    Returns:
        `[ranks * m, n]`, dtype of inp: rows of rank 0 first.

    Raises:
        ValueError: a shape, stride or device does not fit.
        TypeError: a dtype does not fit, or group is none.
        BackendSupportedError: backend is another.
        RuntimeError: the GPUs cannot access each other, or an earlier call has failed.
    """
    import torch

    if backend != "auto":
        raise BackendSupportedError(f"backend must be 'auto': the others are for Blackwell; got {backend!r}")
    if inp.dtype not in (torch.bfloat16, torch.float16) or w.dtype is not inp.dtype:
        raise TypeError(f"inp and w must be bfloat16 or float16, both the same; got {inp.dtype} and {w.dtype}")
    if inp.ndim != 2 or w.ndim != 2 or w.shape[0] != inp.shape[1] or not inp.is_contiguous():
        raise ValueError(
            f"inp must be contiguous [m, k] and w [k, n]; got {list(inp.shape)}, strides {inp.stride()}, and "
            f"{list(w.shape)}"
        )
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"group must be a process group of torch.distributed; got {type(group).__name__}")
    workspace = workspaces.get((group, inp.device))
    if workspace is None:
        workspace = workspaces[group, inp.device] = AllToAllWorkspace(inp.device, TorchDistBackend(group))
    count, step = inp.numel(), 16 // inp.element_size()
    sent = inp.view(-1)
    if count % step or inp.data_ptr() % 16:  # an exchange moves multiples of 16 bytes
        sent = torch.cat([sent, sent.new_zeros(-count % step)])
    gathered = inp.new_empty(workspace.world_size, round_up(count, step))
    if count:
        workspace.all_gather(sent, gathered)
    rows = gathered[:, :count].reshape(workspace.world_size * inp.shape[0], inp.shape[1])
    return mm_bf16(rows, w, out_dtype=inp.dtype)
