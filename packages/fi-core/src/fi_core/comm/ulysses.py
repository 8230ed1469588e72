"""All-to-all of Ulysses context parallelism (arXiv:2309.14509): between shards of the sequence and of the heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fi_core.comm.dcp_alltoall import AllToAllWorkspace
from fi_core.comm.mnnvl import TorchDistBackend
from fi_core.comm.ulysses_head_chunk import merge_ulysses_output_head_chunk, pack_ulysses_qkv_head_chunk
from fi_core.comm.ulysses_topology import ULYSSES_BACKENDS, Backend, UlyssesBackendDecision, UlyssesBackendError
from fi_core.comm.workspace import device_of
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

__all__ = ["UlyssesCommunicator", "UlyssesWorkspace"]

_ROW_BYTES = 16  # rows of an exchange over shared memory are multiples of it


def _check_sizes(max_elems: int, dtype: torch.dtype) -> None:
    import torch

    if type(max_elems) is not int or not 0 < max_elems < 1 << 31:
        raise ValueError(f"max_elems must be an integer from 1 to 2^31 - 1; got {max_elems!r}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype must be torch.float16, torch.bfloat16 or torch.float32; got {dtype}")


class UlyssesWorkspace:
    """Memory for what a communicator sends and receives, so that calls allocate only their results.

    Calls that share one come one after another.

    Args:
        max_elems: elements of the largest operand.
        dtype: fp16, bf16 or fp32.
        device: None: the current CUDA device, or the CPU where there is none.

    Raises:
        ValueError: max_elems, dtype or device.
    """

    def __init__(self, *, max_elems: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        import torch

        _check_sizes(max_elems, dtype)
        self.max_elems, self.dtype, self.device = max_elems, dtype, device_of(device)
        self._buffers = torch.empty(2, max_elems, dtype=dtype, device=self.device)

    @property
    def send_buffer(self) -> torch.Tensor:
        """`[max_elems]`: what is sent."""
        return self._buffers[0]

    @property
    def recv_buffer(self) -> torch.Tensor:
        """`[max_elems]`: what is received."""
        return self._buffers[1]


class UlyssesCommunicator:
    """Exchanges shards of the sequence for shards of the heads, and back, on the ranks of a group.

    Making and closing one is collective. All ranks make the same calls in the same order, on one stream of each rank.
    Both backends give the same bits. A group of one rank gets its tensors back.

    Args:
        group: the ranks; None is the world of torch.distributed.
        max_elems: elements of the largest operand.
        dtype: fp16, bf16 or fp32, of all operands.
        backend: "nvlink": memory that up to 8 ranks of a host share; "nccl": `all_to_all_single` of the group; "auto":
            the first if the ranks can share memory.
        device: None: the current CUDA device, or the CPU where there is none.

    Attributes:
        backend: "nvlink" or "nccl".
        fallback_reason: why "auto" has taken "nccl"; else None.
        decision: both as a `UlyssesBackendDecision`.

    Raises:
        ValueError: an argument does not fit, or the group of "nccl" moves no CUDA tensors.
        UlyssesBackendError: the ranks cannot share memory, with "nvlink".
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        max_elems: int,
        dtype: torch.dtype,
        backend: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        _check_sizes(max_elems, dtype)
        if backend not in ULYSSES_BACKENDS:
            raise ValueError(f"backend must be 'auto', 'nvlink' or 'nccl'; got {backend!r}")
        ranks = TorchDistBackend(group)
        self.group, self.rank, self.world_size = group, ranks.Get_rank(), ranks.Get_size()
        self.max_elems, self.dtype, self.device = max_elems, dtype, device_of(device)
        self._memory: AllToAllWorkspace | None = None
        self._open = True
        self.decision = UlyssesBackendDecision("nccl", "it is asked for")
        if backend != "nccl" and self.world_size > 1:
            self.decision = self._share(ranks, backend)
        self.backend: Backend = self.decision.backend
        self.fallback_reason = self.decision.reason if self.backend == "nccl" and backend == "auto" else None
        if self.backend == "nccl" and self.world_size > 1 and self.device.type == "cuda":
            import torch.distributed as dist

            found = dist.get_backend_config(group)
            if "cuda:nccl" not in str(found):
                raise ValueError(f"group must have NCCL for CUDA tensors with backend 'nccl'; got {found}")

    def _share(self, ranks: TorchDistBackend, asked: str) -> UlyssesBackendDecision:
        try:
            self._memory = AllToAllWorkspace(self.device, ranks)
        except (RuntimeError, ValueError) as error:
            if asked == "nvlink":
                raise UlyssesBackendError(f"backend 'nvlink': {error}") from error
            return UlyssesBackendDecision("nccl", str(error))
        return UlyssesBackendDecision("nvlink", "the ranks share memory")

    def create_workspace(self, *, max_elems: int | None = None) -> UlyssesWorkspace:
        """A workspace for calls of this communicator.

        Args:
            max_elems: elements of the largest operand; None: those of the communicator.
        """
        return UlyssesWorkspace(max_elems=max_elems or self.max_elems, dtype=self.dtype, device=self.device)

    def _check(self, x: torch.Tensor, axis: int, name: str) -> None:
        if not self._open:
            raise RuntimeError("the communicator has been closed")
        if x.ndim != 4 or x.dtype is not self.dtype or x.device != self.device or not x.is_contiguous():
            raise ValueError(
                f"x must be a contiguous tensor of {self.dtype} and 4 dimensions on {self.device}; got {x.dtype}, "
                f"{list(x.shape)}, {x.device}"
            )
        if not 0 < x.numel() <= self.max_elems:
            raise ValueError(f"x must have 1 to max_elems, {self.max_elems}, elements; got {list(x.shape)}")
        if x.shape[axis] % self.world_size:
            raise ValueError(f"x must have {name} that {self.world_size} ranks share; got {list(x.shape)}")

    def _exchanged(self, parts: torch.Tensor, workspace: UlyssesWorkspace | None) -> torch.Tensor:
        """Row j of the result, of the shape of parts, is this rank's row of rank j's parts."""
        row = math.prod(parts.shape[1:])
        step = _ROW_BYTES // parts.element_size() if self._memory else 1
        pitch = -(-row // step) * step
        count = self.world_size * pitch
        if workspace is None or workspace.max_elems < count:
            workspace = self.create_workspace(max_elems=count)
        elif workspace.dtype is not self.dtype or workspace.device != self.device:
            raise ValueError(f"workspace must be of {self.dtype} on {self.device}, as create_workspace() makes it")
        buffers = workspace.send_buffer, workspace.recv_buffer
        sent, received = (buffer[:count].view(self.world_size, pitch) for buffer in buffers)
        if pitch == row:
            sent.view(parts.shape).copy_(parts)
        else:
            sent[:, :row] = parts.reshape(self.world_size, row)
        if self._memory:
            self._memory.all_to_all(sent, received)
        else:
            import torch.distributed as dist

            dist.all_to_all_single(received, sent, group=self.group)
        rows: torch.Tensor = received[:, :row].unflatten(1, parts.shape[1:])
        return rows

    def _output(self, x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            return x.new_empty(shape)
        if out.shape != shape or out.dtype is not x.dtype or out.device != x.device or not out.is_contiguous():
            raise ValueError(
                f"out must be a contiguous tensor of {x.dtype} and shape {list(shape)} on {x.device}; got {out.dtype}, "
                f"{list(out.shape)}, {out.device}"
            )
        return out

    @fi_api
    def scatter_heads(
        self, x: torch.Tensor, *, out: torch.Tensor | None = None, workspace: UlyssesWorkspace | None = None
    ) -> torch.Tensor:
        """Gives each rank all tokens of its heads.

        Args:
            x: `[batch, local_seq, heads, head_dim]`, contiguous; heads is a multiple of the number of ranks.
            out: receives the result, contiguous; allocated if None.
            workspace: memory for the exchange; allocated if None, or if rows are padded beyond it.

        Returns:
            out: `[batch, ranks * local_seq, heads / ranks, head_dim]`: tokens of rank 0 first. x itself for one rank.

        Raises:
            ValueError: a shape, dtype or device does not fit.
            RuntimeError: the communicator is closed, or another rank has failed.
        """
        self._check(x, 2, "heads")
        if self.world_size == 1:
            return x if out is None else self._output(x, tuple(x.shape), out).copy_(x)
        batch, length, heads, width = x.shape
        out = self._output(x, (batch, self.world_size * length, heads // self.world_size, width), out)
        parts = x.unflatten(2, (self.world_size, -1)).movedim(2, 0)
        out.view(batch, self.world_size, length, -1, width).copy_(self._exchanged(parts, workspace).movedim(0, 1))
        return out

    @fi_api
    def gather_heads(
        self, x: torch.Tensor, *, out: torch.Tensor | None = None, workspace: UlyssesWorkspace | None = None
    ) -> torch.Tensor:
        """The reverse of `scatter_heads`: gives each rank all heads of its tokens.

        Args:
            x: `[batch, ranks * local_seq, local_heads, head_dim]`, contiguous.
            out: receives the result, contiguous; allocated if None.
            workspace: memory for the exchange; allocated if None, or if rows are padded beyond it.

        Returns:
            out: `[batch, local_seq, ranks * local_heads, head_dim]`: heads of rank 0 first. x itself for one rank.

        Raises:
            ValueError: a shape, dtype or device does not fit.
            RuntimeError: the communicator is closed, or another rank has failed.
        """
        self._check(x, 1, "tokens")
        if self.world_size == 1:
            return x if out is None else self._output(x, tuple(x.shape), out).copy_(x)
        batch, length, heads, width = x.shape
        length //= self.world_size
        out = self._output(x, (batch, length, self.world_size * heads, width), out)
        parts = x.unflatten(1, (self.world_size, length)).movedim(1, 0)
        received = self._exchanged(parts, workspace).movedim(0, 2)
        out.view(batch, length, self.world_size, heads, width).copy_(received)
        return out

    def scatter_qkv_head_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        head_offset: int,
        head_count: int,
        out: torch.Tensor | None = None,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """`scatter_heads` of a band of heads of q, k and v, as `pack_ulysses_qkv_head_chunk` packs it.

        Args:
            query, key, value: `[batch, local_seq, heads, head_dim]`, any strides.
            head_offset, head_count: the band within each rank's share of the heads.
            out: receives the result; allocated if None.
            workspace: memory for the exchange; allocated if None.

        Returns:
            out: `[batch, ranks * local_seq, head_count, 3 * head_dim]`.
        """
        packed = pack_ulysses_qkv_head_chunk(
            query, key, value, world_size=self.world_size, head_offset=head_offset, head_count=head_count
        )
        return self.scatter_heads(packed, out=out, workspace=workspace)

    def gather_output_head_chunk(
        self,
        x: torch.Tensor,
        *,
        local_heads: int,
        head_offset: int,
        out: torch.Tensor,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """`gather_heads` of a band of heads, which `merge_ulysses_output_head_chunk` writes to its place.

        Args:
            x: `[batch, ranks * local_seq, head_count, head_dim]`, contiguous.
            local_heads: heads of each rank.
            head_offset: first head of the band among them.
            out: `[batch, local_seq, ranks * local_heads, head_dim]`; the rest of it stays.
            workspace: memory for the exchange; allocated if None.

        Returns:
            out.
        """
        received = self.gather_heads(x, workspace=workspace)
        band = {"world_size": self.world_size, "local_heads": local_heads, "head_offset": head_offset}
        return merge_ulysses_output_head_chunk(received, out=out, **band)

    def close(self) -> None:
        """Frees what the ranks share; collective. A second call does nothing."""
        if self._memory is not None:
            self._memory.destroy()
        self._memory, self._open = None, False

    def __enter__(self) -> UlyssesCommunicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
