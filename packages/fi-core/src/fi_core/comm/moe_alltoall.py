"""Expert parallelism: tokens go to the ranks of their experts, and the experts' results come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.comm import ops
from fi_core.comm.mapping import Mapping
from fi_core.comm.mnnvl import MnnvlConfig, ranks_of
from fi_core.comm.workspace import MAX_WORLD, CommWorkspace, device_of, find_by_address
from fi_core.observe.log import fi_api
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

__all__ = [
    "MoeAlltoAll",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
]

_ALIGNMENT = 128  # of tensors in a workspace
_CONTROL_BYTES = 512  # MoeControl of fi/comm/moe_exchange.h
_MAX_PAYLOADS = 4


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
) -> int:
    """Bytes of the workspace of a rank.

    Args:
        ep_size: number of ranks.
        max_num_tokens: the most tokens of a rank in a call.
        total_dispatch_payload_size_per_token: bytes of a token in all payloads of a dispatch.
        combine_payload_size_per_token: bytes of a token in a combine.
        eplb_stats_num_experts: must be 0; statistics for load balancing are not exchanged.

    Raises:
        ValueError: eplb_stats_num_experts is not 0.
    """
    if eplb_stats_num_experts:
        raise ValueError(f"eplb_stats_num_experts: 0 is required; got {eplb_stats_num_experts}")
    rows = ep_size * max_num_tokens
    dispatch = rows * total_dispatch_payload_size_per_token + _MAX_PAYLOADS * _ALIGNMENT
    return round_up(dispatch, _ALIGNMENT) + round_up(rows * combine_payload_size_per_token, _ALIGNMENT)


class _Exchange(CommWorkspace):
    """The workspace of a group, and the state between a dispatch and its combine."""

    def __init__(
        self, size: int, device: torch.device, config: MnnvlConfig | None, ranks: list[int], timeout: float
    ) -> None:
        comm = ranks_of(config)
        if comm.Get_size() != len(ranks):
            comm = comm.Split(min(ranks), comm.Get_rank())
        # Ranks on CPUs publish whole tensors in a rotation; GPUs write to each other's tensors.
        rotation = _ALIGNMENT if device.type == "cuda" else round_up(size + 4096, _ALIGNMENT)
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

        if not 1 <= len(payloads) <= _MAX_PAYLOADS:
            raise ValueError(f"input_payloads: 1 to {_MAX_PAYLOADS} tensors are required; got {len(payloads)}")
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
            offset = round_up(offset + tensor.numel() * tensor.element_size(), _ALIGNMENT)
        rows = torch.empty(experts.shape[0], MAX_WORLD, dtype=torch.int32, device=experts.device)
        counts = torch.empty(self.world_size, dtype=torch.int32, device=experts.device)
        pairs: dict[str, Any] = {}
        for index, (payload, tensor) in enumerate(zip(payloads, received)):
            pairs[f"payload{index}"], pairs[f"received{index}"] = payload, tensor
        ops.moe_dispatch(
            experts, control_offset=self.more_offset, num_experts=num_experts, rows=rows, counts=counts, **pairs,
            **self.shared,
        )  # fmt: skip
        self.rows, self.counts, self.max_tokens = rows, counts, max_tokens
        return received, offset

    def place(self, payload: torch.Tensor, offset: int) -> torch.Tensor:
        """The payload of a combine, copied to an offset of the workspace."""
        self._check(payload)
        if offset < 0 or offset % _ALIGNMENT:
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


_exchanges: dict[int, _Exchange] = {}  # by the address of the workspace of this rank


def _exchange(workspace: torch.Tensor) -> _Exchange:
    found = find_by_address(_exchanges, workspace, "workspace")
    if found is None:
        raise ValueError("workspace: that of a MoeAlltoAll is required")
    return found


class MoeAlltoAll:
    """All-to-all of expert parallelism over the ranks of one host: `dispatch`, the experts, `combine`.

    Expert e is on rank `e // (num_experts / ep_size)`. A token is sent once to each rank that has any of its experts.
    Calls can be captured in CUDA graphs; every rank makes the same calls. Creating is collective.

    Args:
        mapping: the ranks; `moe_ep_size` and `moe_ep_rank` count.
        max_num_tokens: the most tokens of a rank in a call.
        top_k: experts of a token.
        num_experts: of all ranks; a multiple of moe_ep_size.
        workspace_size_per_rank: bytes, of `get_moe_workspace_size_per_rank`; None: by hidden_size.
        hidden_size: of 16-bit activations, where workspace_size_per_rank is None.
        mnnvl_config: its comm_backend exchanges the handles; None: torch.distributed's world.
        device: None: the current CUDA device, or the CPU where there is none.
        timeout: seconds that a call waits for another rank before it fails.

    Raises:
        ValueError: A size is missing or does not fit.
        RuntimeError: The GPUs cannot access each other.
    """

    @fi_api
    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
        *,
        device: torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        if workspace_size_per_rank is None:
            if hidden_size is None:
                raise ValueError("hidden_size: hidden_size or workspace_size_per_rank is required; got None of both")
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                mapping.moe_ep_size, top_k, max_num_tokens, hidden_size
            )
        if num_experts % mapping.moe_ep_size:
            raise ValueError(f"num_experts: a multiple of {mapping.moe_ep_size} ranks is required; got {num_experts}")
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        self.ep_size, self.ep_rank = mapping.moe_ep_size, mapping.moe_ep_rank
        self.exchange = _Exchange(
            workspace_size_per_rank, device_of(device), mnnvl_config, mapping.moe_ep_group, timeout
        )
        self.workspace = self.exchange.data
        _exchanges[self.workspace.data_ptr()] = self.exchange
        self._combine_offset = 0

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int, top_k: int, max_num_tokens: int, hidden_size: int, extra_payload_bytes_per_token: int = 0
    ) -> int:
        """Bytes of the workspace for 16-bit activations, int32 experts and fp32 weights of a token, and extra bytes."""
        dispatch = 2 * hidden_size + 8 * top_k + extra_payload_bytes_per_token
        return moe_a2a_get_workspace_size_per_rank(ep_size, max_num_tokens, dispatch, 2 * hidden_size)

    @fi_api
    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
    ) -> list[torch.Tensor]:
        """Sends each token to the ranks of its experts.

        Args:
            token_selected_experts: `[tokens, top_k]`, int32; others than 0 to num_experts - 1 are ignored.
            input_payloads: up to 4 tensors `[tokens, ...]`, contiguous, of any dtype.
            runtime_max_tokens_per_rank: the most tokens of any rank in this call, equal on all ranks.
            invalid_token_expert_id: what the expert ids of rows are set to that hold no token; None: left as they are.
            expert_id_payload_index: the payload of expert ids, `[tokens, top_k]`, for invalid_token_expert_id.

        Returns:
            For each payload `[ep_size, runtime_max_tokens_per_rank, ...]`: the rows from each rank, in the order of its
            tokens. They are views of the workspace, valid until the next dispatch; `received_counts` has the numbers
            of rows, and rows behind them are undefined.

        Raises:
            ValueError: A shape does not fit, or a dispatch awaits its combine.
            RuntimeError: An earlier call has failed; the text names the rank.
        """
        if self.exchange.rows is not None:
            raise ValueError("dispatch: a combine is required after each dispatch")
        if invalid_token_expert_id is not None and expert_id_payload_index is None:
            raise ValueError("expert_id_payload_index: required with invalid_token_expert_id; got None")
        received, self._combine_offset = self.exchange.dispatch(
            token_selected_experts, input_payloads, runtime_max_tokens_per_rank, self.num_experts
        )
        if invalid_token_expert_id is not None and expert_id_payload_index is not None:
            self.exchange.invalidate(received[expert_id_payload_index], invalid_token_expert_id)
        return received

    @property
    def received_counts(self) -> torch.Tensor:
        """Rows that the last dispatch received from each rank, `[ep_size]`, int32, on the device."""
        if self.exchange.counts is None:
            raise ValueError("received_counts: a dispatch is required first")
        return self.exchange.counts

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The place for the results, `[ep_size, runtime_max_tokens_per_rank, hidden_size]`, after a dispatch."""
        shape = self.ep_size, runtime_max_tokens_per_rank, hidden_size
        return self.exchange.tensor_at(self._combine_offset, shape, dtype)

    @fi_api
    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the results to the ranks of the tokens, and adds those of a token in fp32, in the order of ranks.

        Args:
            payload: `[ep_size, runtime_max_tokens_per_rank, hidden]`, fp16, bf16 or fp32: for each received row the sum
                of this rank's experts, weighted.
            runtime_max_tokens_per_rank: of the dispatch.
            payload_in_workspace: payload is of `get_combine_payload_tensor_in_workspace`; else it is copied there.
            output_dtype: must be None or payload's.
            output: `[tokens, hidden]`, dtype of payload; allocated if None.

        Returns:
            output.

        Raises:
            ValueError: A shape does not fit, or there was no dispatch.
            RuntimeError: An earlier call has failed; the text names the rank.
        """
        if self.exchange.rows is None:
            raise ValueError("combine: a dispatch is required before each combine")
        if output_dtype not in (None, payload.dtype):
            raise ValueError(f"output_dtype: None or {payload.dtype} is required; got {output_dtype}")
        if not payload_in_workspace:
            if runtime_max_tokens_per_rank != self.exchange.max_tokens:
                raise ValueError(
                    f"runtime_max_tokens_per_rank: {self.exchange.max_tokens} of the dispatch is required; got "
                    f"{runtime_max_tokens_per_rank}"
                )
            payload = self.exchange.place(payload, self._combine_offset)
        if output is None:
            output = payload.new_empty(self.exchange.rows.shape[0], payload.shape[-1])
        self.exchange.combine(payload, output)
        return output

    def destroy(self) -> None:
        """Frees the workspace; collective."""
        _exchanges.pop(self.workspace.data_ptr(), None)
        self.exchange.destroy()


def moe_a2a_initialize(workspace: torch.Tensor, ep_rank: int, ep_size: int, max_num_tokens: int) -> torch.Tensor:
    """Describes a workspace for the functions below: `[4]`, int64, its size, ep_rank, ep_size and max_num_tokens.

    Args:
        workspace: the attribute of a `MoeAlltoAll`.
        ep_rank, ep_size: of its group.
        max_num_tokens: the most tokens of a rank in a call.

    Raises:
        ValueError: workspace is of no MoeAlltoAll, or ep_rank or ep_size is not its.
    """
    import torch

    found = _exchange(workspace)
    if (ep_rank, ep_size) != (found.rank, found.world_size):
        raise ValueError(
            f"ep_rank, ep_size: {found.rank} and {found.world_size} of the workspace are required; got {ep_rank} and "
            f"{ep_size}"
        )
    return torch.tensor([workspace.numel(), ep_rank, ep_size, max_num_tokens], dtype=torch.int64)


@fi_api
def moe_a2a_dispatch(
    token_selected_experts: torch.Tensor,
    input_payloads: list[torch.Tensor],
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
) -> tuple[list[torch.Tensor], int]:
    """`MoeAlltoAll.dispatch` as a function; metainfo is of `moe_a2a_initialize`.

    Returns:
        The received payloads, and the offset in bytes of the combine's payload in the workspace.

    Raises:
        ValueError: workspace is of no MoeAlltoAll, or a shape does not fit.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    found = _exchange(workspace)
    return found.dispatch(token_selected_experts, input_payloads, runtime_max_tokens_per_rank, num_experts)


@fi_api
def moe_a2a_combine(
    payload: torch.Tensor,
    local_num_tokens: int,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
) -> torch.Tensor:
    """`MoeAlltoAll.combine` as a function; combine_payload_offset is of `moe_a2a_dispatch`.

    Raises:
        ValueError: workspace is of no MoeAlltoAll, there was no dispatch, or a shape does not fit.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    found = _exchange(workspace)
    if found.rows is None or found.rows.shape[0] != local_num_tokens:
        raise ValueError(f"local_num_tokens: the tokens of a dispatch before are required; got {local_num_tokens}")
    if not payload_in_workspace:
        payload = found.place(payload, combine_payload_offset)
    output = payload.new_empty(local_num_tokens, payload.shape[-1])
    found.combine(payload, output)
    return output


def moe_a2a_sanitize_expert_ids(
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
) -> None:
    """Sets the expert ids, `[ep_size, max_tokens, top_k]`, of rows that hold no token, in place, after a dispatch.

    Raises:
        ValueError: workspace is of no MoeAlltoAll.
    """
    _exchange(workspace).invalidate(expert_ids, invalid_expert_id)


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: torch.Tensor, leading_shape: list[int], slice_start: int, slice_end: int, dtype: torch.dtype
) -> torch.Tensor:
    """The bytes slice_start to slice_end of a workspace as `[*leading_shape, n]`."""
    return workspace[slice_start:slice_end].view(dtype).view(*leading_shape, -1)
