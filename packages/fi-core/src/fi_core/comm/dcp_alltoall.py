"""All-to-all of decode context parallelism: partial attention results go to the ranks of their heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.comm import ops
from fi_core.comm.mapping import Mapping
from fi_core.comm.mnnvl import CommBackend, MnnvlConfig, ranks_of
from fi_core.comm.workspace import HEADER, MAX_WORLD, ROTATIONS, CommWorkspace, current_device, find_by_address
from fi_core.observe.log import fi_api
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

__all__ = [
    "AllToAllWorkspace",
    "decode_cp_a2a_allocate_mnnvl_workspace",
    "decode_cp_a2a_alltoall",
    "decode_cp_a2a_init_workspace",
    "decode_cp_a2a_workspace_size",
]

_MAX_BYTES = 16 << 20  # for each other rank; a larger message takes several launches
_MAX_FLAGS = 4096  # of chunks of 4 KB


class AllToAllWorkspace(CommWorkspace):
    """Memory for `all_to_all` and `all_gather` on the ranks of a group.

    Args:
        device, comm_backend, timeout: as of `CommWorkspace`.
    """

    def __init__(self, device: torch.device, comm_backend: CommBackend, timeout: float = 300.0) -> None:
        self._flags = _MAX_FLAGS if device.type == "cuda" else 0
        super().__init__(device, comm_backend, *_bytes_of(device, comm_backend.Get_size()), timeout)

    def all_to_all(self, input: torch.Tensor, out: torch.Tensor) -> None:
        """`out[j]` of rank i becomes `input[i]` of rank j.

        Args:
            input, out: `[ranks, ...]` of any dtype, contiguous, rows of a multiple of 16 bytes.

        Raises:
            ValueError: A shape or address does not fit.
            RuntimeError: An earlier call has failed; the text names the rank.
        """
        ops.all_to_all(input, max_flags=self._flags, out=out, **self.shared)

    def all_gather(self, input: torch.Tensor, out: torch.Tensor) -> None:
        """`out[j]` of every rank becomes `input` of rank j.

        Args:
            input: of any dtype, contiguous, a multiple of 16 bytes.
            out: `[ranks, ...]`, contiguous, each row of the size of input.

        Raises:
            ValueError: A shape or address does not fit.
            RuntimeError: An earlier call has failed; the text names the rank.
        """
        ops.all_to_all(input, max_flags=self._flags, out=out, gather=True, **self.shared)


def _bytes_of(device: torch.device, ranks: int) -> tuple[int, int]:
    """Bytes of a rotation, and of the bulk behind the rotations."""
    bulk = 2 * (ranks - 1) * (4 * _MAX_FLAGS + _MAX_BYTES) if device.type == "cuda" else 0
    return 128 if bulk else 1 << 20, bulk


workspaces: dict[int, AllToAllWorkspace] = {}  # by the address of the tensor


def decode_cp_a2a_workspace_size(cp_size: int) -> int:
    """Returns the bytes of each rank's workspace on the current device: what the allocation below takes.

    Args:
        cp_size: ranks of the context-parallel group, 1 to 8.

    Raises:
        ValueError: cp_size.
    """
    if type(cp_size) is not int or not 1 <= cp_size <= MAX_WORLD:
        raise ValueError(f"cp_size must be 1 to {MAX_WORLD}; got {cp_size!r}")
    rotation, bulk = _bytes_of(current_device(), cp_size)
    return HEADER + ROTATIONS * rotation + bulk


def decode_cp_a2a_allocate_mnnvl_workspace(mapping: Mapping, mnnvl_config: MnnvlConfig | None = None) -> torch.Tensor:
    """Allocates the workspace of `decode_cp_a2a_alltoall`; collective over the context-parallel ranks.

    Args:
        mapping: the ranks; cp_size and cp_rank count.
        mnnvl_config: its comm_backend exchanges the handles; None: torch.distributed's world.

    Returns:
        A tensor that stands for the workspace: this rank's bytes.

    Raises:
        RuntimeError: The GPUs cannot access each other.
    """
    comm = ranks_of(mnnvl_config)
    if comm.Get_size() != mapping.cp_size:
        comm = comm.Split(min(mapping.cp_group), comm.Get_rank())
    workspace = AllToAllWorkspace(current_device(), comm)
    workspaces[workspace.buffer.data_ptr()] = workspace
    return workspace.buffer


def _workspace(workspace: torch.Tensor, cp_rank: int, cp_size: int) -> AllToAllWorkspace:
    found = find_by_address(workspaces, workspace, "workspace")
    if found is None:
        raise ValueError("workspace: that of decode_cp_a2a_allocate_mnnvl_workspace is required")
    if (cp_rank, cp_size) != (found.rank, found.world_size):
        raise ValueError(
            f"cp_rank, cp_size: {found.rank} and {found.world_size} of the workspace are required; got {cp_rank} and "
            f"{cp_size}"
        )
    return found


def decode_cp_a2a_init_workspace(workspace: torch.Tensor, cp_rank: int, cp_size: int) -> None:
    """Checks that a workspace is of these ranks; its memory is ready when it is allocated.

    Raises:
        ValueError: workspace, cp_rank or cp_size.
    """
    _workspace(workspace, cp_rank, cp_size)


@fi_api
def decode_cp_a2a_alltoall(
    partial_o: torch.Tensor,
    softmax_stats: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    enable_pdl: bool | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchanges partial attention results: rank i gets what every rank has computed for it.

    Args:
        partial_o: `[..., cp_size, head_dim]`: row j is for rank j.
        softmax_stats: `[..., cp_size, n]`, of the same leading dimensions, such as maximum and sum.
        workspace: of `decode_cp_a2a_allocate_mnnvl_workspace`.
        cp_rank, cp_size: of the workspace.
        enable_pdl: accepted; the launches do not overlap.
        out: like partial_o and softmax_stats, to be written; allocated if None.

    Returns:
        partial_o and softmax_stats with the shapes of the arguments: row j is of rank j, for this rank.

    Raises:
        ValueError: A shape, or the workspace, does not fit.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    import torch

    found = _workspace(workspace, cp_rank, cp_size)
    cp_size = found.world_size  # which may have been equal, and no integer
    for name, tensor in (("partial_o", partial_o), ("softmax_stats", softmax_stats)):
        if tensor.dim() < 2 or tensor.shape[-2] != cp_size:
            raise ValueError(f"{name}: shape [..., {cp_size}, n] is required; got {list(tensor.shape)}")
    for written, like in zip(out or (), (partial_o, softmax_stats), strict=out is not None):
        if (written.shape, written.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"out: {like.dtype} of shape {list(like.shape)} is required; got {written.dtype} of shape "
                f"{list(written.shape)}"
            )
    parts = [t.movedim(-2, 0).reshape(cp_size, -1).contiguous().view(torch.uint8) for t in (partial_o, softmax_stats)]
    widths = [part.shape[1] for part in parts]
    begin = round_up(widths[0], 16)  # of the statistics, aligned for their elements
    sent = partial_o.new_empty(cp_size, begin + round_up(widths[1], 16), dtype=torch.uint8)
    sent[:, : widths[0]] = parts[0]
    sent[:, begin : begin + widths[1]] = parts[1]
    received = torch.empty_like(sent)
    found.all_to_all(sent, received)

    def restored(like: torch.Tensor, first: int, width: int) -> torch.Tensor:
        rows = received[:, first : first + width].contiguous().view(like.dtype)
        return rows.view(cp_size, *like.shape[:-2], like.shape[-1]).movedim(0, -2).contiguous()

    results = restored(partial_o, 0, widths[0]), restored(softmax_stats, begin, widths[1])
    if out is None:
        return results
    for tensor, result in zip(out, results):
        tensor.copy_(result)
    return out
