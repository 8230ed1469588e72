"""The workspace of all-reduce with the name and the sizes of FlashInfer's for multi-node NVLink."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.workspace import TRTLLMAllReduceFusionWorkspace
from fi_core.utils import ceil_div

if TYPE_CHECKING:
    import torch

    from fi_core.comm.mapping import Mapping
    from fi_core.comm.mnnvl import CommBackend

__all__ = ["MNNVLAllReduceFusionWorkspace", "MNNVLAllreduceFusionStrategy"]

_ONE_SHOT_BYTES = 64 * 1024 * 8 * 2  # of all ranks' messages, up to which AUTO means ONESHOT
_MOST_BYTES = (1 << 32) - 1
_COLUMNS = 1 << 15  # of a row where only bytes are given


class MNNVLAllreduceFusionStrategy(Enum):
    """Whether each rank sends its whole message to all others, or its parts and then a sum."""

    ONESHOT = 0
    TWOSHOT = 1
    AUTO = 99


class MNNVLAllReduceFusionWorkspace(TRTLLMAllReduceFusionWorkspace):
    """Memory for `allreduce_fusion`, made from a mapping. Ranks of one host share it by CUDA IPC, without multicast.

    Args:
        mapping: the tensor-parallel ranks, of one host.
        max_num_tokens, hidden_dim, dtype: the largest message.
        buffer_size_in_bytes: of `get_required_buffer_size_bytes`, in place of those.
        comm_backend: the tensor-parallel ranks; None: the world of torch.distributed.

    Raises:
        ValueError: no size is given, or one that is too large; the mapping is not that of the group.
        RuntimeError: the GPUs cannot access each other.
    """

    backend = "mnnvl"

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int | None = None,
        hidden_dim: int | None = None,
        dtype: torch.dtype | None = None,
        buffer_size_in_bytes: int | None = None,
        comm_backend: CommBackend | None = None,
    ) -> None:
        import torch

        if buffer_size_in_bytes is None:
            if max_num_tokens is None or hidden_dim is None or dtype is None:
                raise ValueError("max_num_tokens, hidden_dim and dtype must be given without buffer_size_in_bytes")
            row = mapping.tp_size * hidden_dim * dtype.itemsize
            one_shot = min(_ONE_SHOT_BYTES // row, max_num_tokens)
            buffer_size_in_bytes = max(
                self.get_required_buffer_size_bytes(mapping.tp_size, tokens, hidden_dim, dtype, strategy)
                for tokens, strategy in (
                    (one_shot, MNNVLAllreduceFusionStrategy.ONESHOT),
                    (max_num_tokens, MNNVLAllreduceFusionStrategy.TWOSHOT),
                )
            )
        if not 0 < buffer_size_in_bytes <= _MOST_BYTES:
            raise ValueError(f"buffer_size_in_bytes must be 1 to {_MOST_BYTES}; got {buffer_size_in_bytes}")
        self.buffer_size_bytes = buffer_size_in_bytes
        dtype = dtype or torch.bfloat16
        columns = hidden_dim or _COLUMNS
        rows = max_num_tokens or ceil_div(buffer_size_in_bytes, columns * dtype.itemsize)
        ranks = comm_backend or TorchDistBackend()
        super().__init__(mapping.tp_size, mapping.tp_rank, rows, columns, dtype, ranks)

    @staticmethod
    def get_required_buffer_size_bytes(
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    ) -> int:
        """Bytes of a message of this size: of all ranks in one shot, twice its rounded parts in two."""
        one_shot = num_tokens * hidden_dim * tp_size * dtype.itemsize
        if strategy is MNNVLAllreduceFusionStrategy.AUTO:
            strategy = MNNVLAllreduceFusionStrategy(int(one_shot > _ONE_SHOT_BYTES))
        if strategy is MNNVLAllreduceFusionStrategy.ONESHOT:
            return one_shot
        return 2 * ceil_div(num_tokens, tp_size) * tp_size * hidden_dim * dtype.itemsize

    def is_buffer_size_sufficient(  # type: ignore[override]
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    ) -> bool:
        """Whether the workspace was made for this group size and for messages of `[num_tokens, hidden_dim]`."""
        needed = self.get_required_buffer_size_bytes(tp_size, num_tokens, hidden_dim, dtype, strategy)
        return tp_size == self.world_size and needed <= self.buffer_size_bytes
