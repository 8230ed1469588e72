"""All-reduce that sends e4m3 with a scale for each group of elements: half of the bytes of bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.comm.dcp_alltoall import AllToAllWorkspace
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.observe.log import fi_api
from fi_core.utils import ceil_div, round_up

if TYPE_CHECKING:
    import torch

__all__ = ["quantized_all_reduce"]

_LIMIT = 448.0  # the largest number of e4m3
workspaces: dict[tuple[object, torch.device], AllToAllWorkspace] = {}


def _packed(x: torch.Tensor, scale_group: int) -> torch.Tensor:
    """Rows of bytes: e4m3 values of fp32 rows, then the fp32 scale of each group; a multiple of 16 bytes."""
    import torch

    groups = x.unflatten(-1, (-1, scale_group))
    scale = groups.abs().amax(-1, keepdim=True) / _LIMIT
    values = (groups / scale.where(scale > 0, 1.0)).clamp(-_LIMIT, _LIMIT).to(torch.float8_e4m3fn).flatten(-2)
    parts = values.view(torch.uint8), scale.squeeze(-1).contiguous().view(torch.uint8)
    rows, width = x.shape[0], x.shape[1]
    begin = round_up(width, 16)
    out = torch.zeros(rows, round_up(begin + parts[1].shape[1], 16), dtype=torch.uint8, device=x.device)
    out[:, :width] = parts[0]
    out[:, begin : begin + parts[1].shape[1]] = parts[1]
    return out


def _unpacked(rows: torch.Tensor, width: int, scale_group: int) -> torch.Tensor:
    import torch

    begin, groups = round_up(width, 16), width // scale_group
    values = rows[:, :width].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows[:, begin : begin + 4 * groups].contiguous().view(torch.float32)
    wide: torch.Tensor = values.unflatten(-1, (groups, scale_group)) * scale.unsqueeze(-1)
    return wide.flatten(-2)


@fi_api
def quantized_all_reduce(
    inp: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    scale_group: int = 256,
    block_size: int | None = None,
    num_warps: int | None = None,
    max_num_blocks: int | None = None,
    p2p_phase3: bool | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums a tensor over the ranks of a host, sent in e4m3: all ranks get the same bits.

    Each rank quantizes its tensor, sums in fp32 in the order of ranks the part that it is sent, and quantizes that sum
    for all. The scale of a group is `max(abs(x)) / 448`, so that either step is within 2^-4 of each element, or within
    2^-18 of the largest of its group. The first call of a group and device allocates what the ranks share.

    Args:
        inp: bf16, contiguous, a multiple of 8 elements.
        group: 1 to 8 ranks, a group of torch.distributed.
        scale_group: elements that share a scale.
        block_size, num_warps, max_num_blocks, p2p_phase3: FlashInfer's choice of a launch; no effect.
        output: like inp; allocated if None.

    Returns:
        output.

    Raises:
        ValueError: a shape, dtype or number does not fit.
        TypeError: group is none.
        RuntimeError: the GPUs cannot access each other, or an earlier call has failed.
    """
    import torch

    if inp.dtype is not torch.bfloat16 or not inp.is_contiguous() or inp.numel() % 8:
        raise ValueError(
            f"inp must be bfloat16, contiguous and a multiple of 8 elements; got {inp.dtype}, {list(inp.shape)}, "
            f"strides {inp.stride()}"
        )
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"group must be a process group of torch.distributed; got {type(group).__name__}")
    if scale_group <= 0:
        raise ValueError(f"scale_group must be positive; got {scale_group}")
    scale_group = min(scale_group, round_up(max(inp.numel(), 1), 16))  # one group, and no memory for what is not there
    if output is None:
        output = torch.empty_like(inp)
    elif (output.shape, output.dtype, output.device) != (
        inp.shape,
        inp.dtype,
        inp.device,
    ) or not output.is_contiguous():
        raise ValueError(
            f"output must be {inp.dtype} of shape {list(inp.shape)}, contiguous; got {output.dtype}, "
            f"{list(output.shape)}, strides {output.stride()}"
        )
    if inp.numel() == 0:
        return output
    workspace = workspaces.get((group, inp.device))
    if workspace is None:
        workspace = workspaces[group, inp.device] = AllToAllWorkspace(inp.device, TorchDistBackend(group))
    world, count = workspace.world_size, inp.numel()
    width = ceil_div(ceil_div(count, scale_group), world) * scale_group  # elements that a rank sums
    rows = torch.zeros(world, width, dtype=torch.float32, device=inp.device)
    rows.view(-1)[:count] = inp.view(-1)
    sent = _packed(rows, scale_group)
    received = torch.empty_like(sent)
    workspace.all_to_all(sent, received)
    summed = _unpacked(received, width, scale_group).sum(0, keepdim=True)
    workspace.all_gather(_packed(summed, scale_group)[0], received)
    output.view(-1).copy_(_unpacked(received, width, scale_group).view(-1)[:count])
    return output
