"""The workspace and the state of an exchange of tokens between the ranks of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.comm import ops
from fi_core.comm.mnnvl import MnnvlConfig, ranks_of
from fi_core.comm.workspace import MAX_WORLD, CommWorkspace, check_backend, find_by_address
from fi_core.quantization.layout import SfLayout
from fi_core.runtime.errors import refuse, unsupported
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

ALIGNMENT = 128  # of tensors in a workspace
_CONTROL_BYTES = 512  # MoeControl of fi/comm/moe_exchange.h
MAX_PAYLOADS = 4


def refuse_exchange(backend: str = "trtllm", **options: Any) -> None:
    """Refuses what a dispatch, and the workspace that it needs, does not have."""
    check_backend(backend)
    refuse("leave it out: statistics of load are the caller's to gather", **options)


def moe_a2a_active_rank_mask(active_ranks: Sequence[int] | torch.Tensor, ep_size: int) -> torch.Tensor:
    """The `active_rank_mask` of `moe_a2a_dispatch` and `moe_a2a_combine`, which takes masks of all ranks here.

    Args:
        active_ranks: the ranks that take part.
        ep_size: ranks of the group, 1 to 64.

    Returns:
        `[1]`, uint64, on the CPU: bit i is set for each rank i that takes part.

    Raises:
        ValueError: a rank is not in 0 to ep_size - 1, or ep_size is out of its range.
    """
    import torch

    ranks = [int(rank) for rank in active_ranks]
    if not 1 <= ep_size <= 64 or any(not 0 <= rank < ep_size for rank in ranks):
        raise ValueError(f"active_ranks must be 0 to ep_size - 1, ep_size 1 to 64; got {ranks} and {ep_size}")
    return torch.tensor([sum(1 << rank for rank in set(ranks))], dtype=torch.uint64, device="cpu")


def check_active_ranks(active_rank_mask: torch.Tensor | None, ep_size: int) -> None:
    """Refuses a mask without one of the ranks: memory of all of them takes part in an exchange."""
    if active_rank_mask is None:
        return
    if str(active_rank_mask.dtype) != "torch.uint64" or active_rank_mask.numel() != 1 or not active_rank_mask.is_cpu:
        raise ValueError(
            f"active_rank_mask must be uint64 [1] on the CPU, of moe_a2a_active_rank_mask; got "
            f"{active_rank_mask.dtype} {list(active_rank_mask.shape)} on {active_rank_mask.device}"
        )
    mask = int(active_rank_mask.item())
    missing = [rank for rank in range(ep_size) if not mask >> rank & 1]
    if missing:
        raise unsupported("active_rank_mask", f"a mask without ranks {missing}", "make a group of the ranks that run")


def refuse_combine(output_scalar_scale: float, sf_layout: SfLayout, backend: str = "trtllm", **options: Any) -> None:
    """Refuses what a combine does not have: output in another format than the payload's."""
    check_backend(backend)
    refuse(
        "leave it out: results travel and return in the payload's dtype; quantize them afterwards",
        output_scalar_scale=None if output_scalar_scale == 1.0 else output_scalar_scale,
        sf_layout=None if sf_layout is SfLayout.layout_linear else sf_layout,
        **options,
    )


class MoeExchange(CommWorkspace):
    """The workspace of a group, and the state between a dispatch and its combine."""

    def __init__(
        self, size: int, device: torch.device, config: MnnvlConfig | None, ranks: list[int], timeout: float
    ) -> None:
        comm = ranks_of(config)
        if comm.Get_size() != len(ranks):
            comm = comm.Split(min(ranks), comm.Get_rank())
        # Ranks on CPUs publish whole tensors in a rotation; GPUs write to each other's tensors.
        rotation = ALIGNMENT if device.type == "cuda" else round_up(size + 4096, ALIGNMENT)
        super().__init__(device, comm, rotation, _CONTROL_BYTES + size, timeout)
        self.data = self.buffer[self.more_offset + _CONTROL_BYTES :]
        self.rows: torch.Tensor | None = None  # of the dispatch that awaits its combine
        self.max_tokens = 0
        self.counts: torch.Tensor | None = None

    def tensor_at(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        bytes_needed = dtype.itemsize
        for size in shape:
            bytes_needed *= size
        if offset + bytes_needed > self.data.numel():
            raise ValueError(
                f"workspace: {offset + bytes_needed} bytes are required by these sizes; got {self.data.numel()}"
            )
        return self.data[offset : offset + bytes_needed].view(dtype).view(shape)

    def dispatch(
        self, experts: torch.Tensor, payloads: list[torch.Tensor], max_tokens: int, num_experts: int
    ) -> tuple[list[torch.Tensor], int]:
        import torch

        if not 1 <= len(payloads) <= MAX_PAYLOADS:
            raise ValueError(f"input_payloads: 1 to {MAX_PAYLOADS} tensors are required; got {len(payloads)}")
        if experts.dim() != 2 or experts.shape[0] > max_tokens:
            raise ValueError(
                f"token_selected_experts: shape [tokens, top_k] with at most {max_tokens} tokens, "
                f"runtime_max_tokens_per_rank, is required; got {list(experts.shape)}"
            )
        received, offset = [], 0
        for index, payload in enumerate(payloads):
            if not isinstance(payload, torch.Tensor) or payload.is_nested:
                raise TypeError(f"input_payloads: dense tensors are required; got {type(payload).__name__} at {index}")
            tensor = self.tensor_at(offset, (self.world_size, max_tokens, *payload.shape[1:]), payload.dtype)
            received.append(tensor)
            offset = round_up(offset + tensor.numel() * tensor.element_size(), ALIGNMENT)
        rows = torch.empty(experts.shape[0], MAX_WORLD, dtype=torch.int32, device=experts.device)
        counts = torch.empty(self.world_size, dtype=torch.int32, device=experts.device)
        pairs: dict[str, Any] = {}
        for index, (payload, tensor) in enumerate(zip(payloads, received)):
            pairs[f"payload{index}"], pairs[f"received{index}"] = payload, tensor
        ops.moe_dispatch(
            experts,
            control_offset=self.more_offset,
            num_experts=num_experts,
            rows=rows,
            counts=counts,
            **pairs,
            **self.shared,
        )
        self.rows, self.counts, self.max_tokens = rows, counts, max_tokens
        return received, offset

    def place(self, payload: torch.Tensor, offset: int) -> torch.Tensor:
        """The payload of a combine, copied to an offset of the workspace."""
        self._check(payload)
        if offset < 0 or offset % ALIGNMENT:
            raise ValueError(f"combine_payload_offset: the offset of a dispatch is required; got {offset}")
        inside = self.tensor_at(offset, tuple(payload.shape), payload.dtype)
        try:
            return inside.copy_(payload)
        except (RuntimeError, AssertionError):  # a sparse or a fake one
            raise TypeError(f"payload: a dense tensor with data is required; got {type(payload).__name__}") from None

    def _check(self, payload: torch.Tensor) -> None:
        if payload.dim() != 3 or payload.shape[:2] != (self.world_size, self.max_tokens):
            raise ValueError(
                f"payload: shape [{self.world_size}, {self.max_tokens}, hidden], as dispatched, is required; got "
                f"{list(payload.shape)}"
            )

    def combine(self, payload: torch.Tensor, output: torch.Tensor) -> None:
        assert self.rows is not None
        self._check(payload)
        ops.moe_combine(payload, control_offset=self.more_offset, rows=self.rows, out=output, **self.shared)
        self.rows = None

    def invalidate(self, expert_ids: torch.Tensor, invalid_expert_id: int) -> None:
        """Writes invalid_expert_id to the rows behind those that were received."""
        import torch

        if self.counts is None:
            raise ValueError("workspace: a dispatch is required before expert ids are sanitized")
        if not -(2**31) <= invalid_expert_id < 2**31:
            raise ValueError(
                f"invalid_expert_id (invalid_token_expert_id of dispatch): an integer of 32 bits is required; got "
                f"{invalid_expert_id}"
            )
        if not isinstance(expert_ids, torch.Tensor) or expert_ids.is_nested:
            raise TypeError(f"expert_ids: a dense tensor is required; got {type(expert_ids).__name__}")
        if expert_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"expert_ids: dtype int32 or int64 is required; got {expert_ids.dtype}")
        if expert_ids.dim() != 3 or expert_ids.shape[0] != self.world_size:
            raise ValueError(
                f"expert_ids: shape [{self.world_size}, max_tokens, top_k] is required; got {list(expert_ids.shape)}"
            )
        slots = torch.arange(expert_ids.shape[1], device=expert_ids.device, dtype=torch.int32)
        beyond = slots[None, :] >= self.counts[:, None]
        expert_ids.masked_fill_(beyond[..., None], invalid_expert_id)


exchanges: dict[int, MoeExchange] = {}  # by the address of the workspace of this rank


def exchange_of(workspace: torch.Tensor) -> MoeExchange:
    found = find_by_address(exchanges, workspace, "workspace")
    if found is None:
        raise ValueError("workspace: that of a MoeAlltoAll is required")
    return found
