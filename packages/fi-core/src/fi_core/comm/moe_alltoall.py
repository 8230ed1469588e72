"""Expert parallelism: tokens go to the ranks of their experts, and the experts' results come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.comm.mapping import Mapping
from fi_core.comm.mnnvl import MnnvlConfig
from fi_core.comm.moe_exchange import (
    ALIGNMENT,
    MAX_PAYLOADS,
    MoeExchange,
    check_active_ranks,
    exchange_of,
    exchanges,
    refuse_combine,
    refuse_exchange,
)
from fi_core.comm.workspace import check_backend, device_of
from fi_core.observe.log import fi_api
from fi_core.quantization.layout import SfLayout
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


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Bytes of the workspace of a rank.

    Args:
        ep_size: number of ranks.
        max_num_tokens: the most tokens of a rank in a call.
        total_dispatch_payload_size_per_token: bytes of a token in all payloads of a dispatch.
        combine_payload_size_per_token: bytes of a token in a combine.
        eplb_stats_num_experts: must be 0; statistics for load balancing are not exchanged.
        backend: "trtllm".

    Raises:
        NotImplementedError: eplb_stats_num_experts is not 0.
        BackendSupportedError: backend is another.
    """
    refuse_exchange(backend, eplb_stats_num_experts=eplb_stats_num_experts)
    rows = ep_size * max_num_tokens
    dispatch = rows * total_dispatch_payload_size_per_token + MAX_PAYLOADS * ALIGNMENT
    return round_up(dispatch, ALIGNMENT) + round_up(rows * combine_payload_size_per_token, ALIGNMENT)


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
        eplb_stats_num_experts: must be 0.
        enable_rank_mask: accepted; every rank takes part in each call.
        backend: "trtllm".
        device: None: the current CUDA device, or the CPU where there is none.
        timeout: seconds that a call waits for another rank before it fails.

    Raises:
        ValueError: A size is missing or does not fit.
        NotImplementedError: eplb_stats_num_experts is set.
        BackendSupportedError: backend is another.
        RuntimeError: The GPUs cannot access each other.
    """

    eplb_gathered_stats: torch.Tensor | None = None  # statistics of load are not exchanged

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
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
        device: torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        refuse_exchange(backend, eplb_stats_num_experts=eplb_stats_num_experts)
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
        self.exchange = MoeExchange(
            workspace_size_per_rank, device_of(device), mnnvl_config, mapping.moe_ep_group, timeout
        )
        self.workspace = self.exchange.data
        exchanges[self.workspace.data_ptr()] = self.exchange
        self._combine_offset = 0

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> int:
        """Bytes of the workspace for 16-bit activations, int32 experts and fp32 weights of a token, and extra bytes."""
        dispatch = 2 * hidden_size + 8 * top_k + extra_payload_bytes_per_token
        return moe_a2a_get_workspace_size_per_rank(
            ep_size, max_num_tokens, dispatch, 2 * hidden_size, eplb_stats_num_experts, backend=backend
        )

    @classmethod
    def get_workspace(
        cls,
        workspace_size_per_rank: int,
        ep_rank: int,
        ep_size: int,
        max_num_tokens: int,
        mapping: Mapping,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> dict[str, Any]:
        """Raises NotImplementedError: every MoeAlltoAll has a workspace of its own, its attribute `workspace`."""
        raise NotImplementedError("get_workspace: not supported, construct a MoeAlltoAll, whose workspace it is")

    def checkpoint_prepare(self) -> None:
        """Raises NotImplementedError: a workspace does not survive a checkpoint of the process."""
        self.exchange.checkpoint_prepare()

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Raises NotImplementedError: a workspace does not survive a checkpoint of the process."""
        self.exchange.checkpoint_restore(comm_backend)

    @fi_api
    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Sends each token to the ranks of its experts.

        Args:
            token_selected_experts: `[tokens, top_k]`, int32; others than 0 to num_experts - 1 are ignored.
            input_payloads: up to 4 tensors `[tokens, ...]`, contiguous, of any dtype.
            runtime_max_tokens_per_rank: the most tokens of any rank in this call, equal on all ranks.
            invalid_token_expert_id: what the expert ids of rows are set to that hold no token; None: left as they are.
            expert_id_payload_index: the payload of expert ids, `[tokens, top_k]`, for invalid_token_expert_id.
            eplb_local_stats: must be None.
            active_rank_mask: of `moe_a2a_active_rank_mask`, with all ranks; or None.

        Returns:
            For each payload `[ep_size, runtime_max_tokens_per_rank, ...]`: the rows from each rank, in the order of its
            tokens. They are views of the workspace, valid until the next dispatch; `received_counts` has the numbers
            of rows, and rows behind them are undefined.

        Raises:
            ValueError: A shape does not fit, or a dispatch awaits its combine.
            NotImplementedError: eplb_local_stats is given, or active_rank_mask lacks a rank.
            RuntimeError: An earlier call has failed; the text names the rank.
        """
        refuse_exchange(eplb_local_stats=eplb_local_stats)
        check_active_ranks(active_rank_mask, self.ep_size)
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
        output_scales: torch.Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: SfLayout = SfLayout.layout_linear,
        output: torch.Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the results to the ranks of the tokens, and adds those of a token in fp32, in the order of ranks.

        Args:
            payload: `[ep_size, runtime_max_tokens_per_rank, hidden]`, fp16, bf16 or fp32: for each received row the sum
                of this rank's experts, weighted.
            runtime_max_tokens_per_rank: of the dispatch.
            payload_in_workspace: payload is of `get_combine_payload_tensor_in_workspace`; else it is copied there.
            output_dtype: must be None or payload's.
            output_scales, output_scalar_scale, sf_layout: must be None, 1 and linear: the output is not quantized.
            output: `[tokens, hidden]`, dtype of payload; allocated if None.
            use_low_precision: must be False.
            active_rank_mask: as for `dispatch`.

        Returns:
            output.

        Raises:
            ValueError: A shape does not fit, or there was no dispatch.
            NotImplementedError: An option that must be left out is set, or active_rank_mask lacks a rank.
            RuntimeError: An earlier call has failed; the text names the rank.
        """
        refuse_combine(
            output_scalar_scale,
            sf_layout,
            output_scales=output_scales,
            use_low_precision=use_low_precision,
        )
        check_active_ranks(active_rank_mask, self.ep_size)
        if self.exchange.rows is None:
            raise ValueError("combine: a dispatch is required before each combine")
        _check_dtype(output_dtype, payload)
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
        exchanges.pop(self.workspace.data_ptr(), None)
        self.exchange.destroy()


def _check_dtype(output_dtype: torch.dtype | None, payload: torch.Tensor) -> None:
    if output_dtype not in (None, payload.dtype):
        raise ValueError(f"output_dtype: None or {payload.dtype} is required; got {output_dtype}")


def moe_a2a_initialize(
    workspace: torch.Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> torch.Tensor:
    """Describes a workspace for the functions below: `[4]`, int64, its size, ep_rank, ep_size and max_num_tokens.

    Args:
        workspace: the attribute of a `MoeAlltoAll`.
        ep_rank, ep_size: of its group.
        max_num_tokens: the most tokens of a rank in a call.
        eplb_stats_num_experts: must be 0.
        backend: "trtllm".

    Raises:
        ValueError: workspace is of no MoeAlltoAll, or ep_rank or ep_size is not its.
        NotImplementedError: eplb_stats_num_experts is set.
        BackendSupportedError: backend is another.
    """
    import torch

    refuse_exchange(backend, eplb_stats_num_experts=eplb_stats_num_experts)
    found = exchange_of(workspace)
    if (ep_rank, ep_size) != (found.rank, found.world_size):
        raise ValueError(
            f"ep_rank, ep_size: {found.rank} and {found.world_size} of the workspace are required; got {ep_rank} and "
            f"{ep_size}"
        )
    return torch.tensor([workspace.numel(), ep_rank, ep_size, max_num_tokens], dtype=torch.int64, device="cpu")


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
    enable_pdl: bool | None = None,
    eplb_local_stats: torch.Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    *,
    backend: str = "trtllm",
    recv_view_cache: dict[Any, Any] | None = None,
) -> tuple[list[torch.Tensor], int]:
    """`MoeAlltoAll.dispatch` as a function; metainfo is of `moe_a2a_initialize`.

    Args:
        enable_pdl: accepted; the launches do not overlap.
        eplb_local_stats: must be left out.
        enable_rank_mask, active_rank_mask: as for `MoeAlltoAll`.
        backend: "trtllm".
        recv_view_cache: accepted; views are made in each call.

    Returns:
        The received payloads, and the offset in bytes of the combine's payload in the workspace.

    Raises:
        ValueError: workspace is of no MoeAlltoAll, or a shape does not fit.
        NotImplementedError: An option that must be left out is set.
        BackendSupportedError: backend is another.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    refuse_exchange(backend, eplb_local_stats=eplb_local_stats)
    check_active_ranks(active_rank_mask, ep_size)
    found = exchange_of(workspace)
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
    output_dtype: torch.dtype | None = None,
    output_scales: torch.Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: SfLayout = SfLayout.layout_linear,
    output: torch.Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    backend: str = "trtllm",
) -> torch.Tensor:
    """`MoeAlltoAll.combine` as a function; combine_payload_offset is of `moe_a2a_dispatch`.

    Args:
        enable_pdl: accepted; the launches do not overlap.
        enable_rank_mask: accepted; the other options are those of `MoeAlltoAll.combine`.
        backend: "trtllm".

    Raises:
        ValueError: workspace is of no MoeAlltoAll, there was no dispatch, or a shape does not fit.
        NotImplementedError: An option that must be left out is set.
        BackendSupportedError: backend is another.
        RuntimeError: An earlier call has failed; the text names the rank.
    """
    refuse_combine(
        output_scalar_scale,
        sf_layout,
        backend,
        output_scales=output_scales,
        use_low_precision=use_low_precision,
    )
    check_active_ranks(active_rank_mask, ep_size)
    _check_dtype(output_dtype, payload)
    found = exchange_of(workspace)
    if found.rows is None or found.rows.shape[0] != local_num_tokens:
        raise ValueError(f"local_num_tokens: the tokens of a dispatch before are required; got {local_num_tokens}")
    if not payload_in_workspace:
        payload = found.place(payload, combine_payload_offset)
    if output is None:
        output = payload.new_empty(local_num_tokens, payload.shape[-1])
    found.combine(payload, output)
    return output


def moe_a2a_sanitize_expert_ids(
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Sets the expert ids, `[ep_size, max_tokens, top_k]`, of rows that hold no token, in place, after a dispatch.

    enable_pdl is accepted; backend is "trtllm".

    Raises:
        ValueError: workspace is of no MoeAlltoAll.
        BackendSupportedError: backend is another.
    """
    check_backend(backend)
    exchange_of(workspace).invalidate(expert_ids, invalid_expert_id)


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: torch.Tensor, leading_shape: list[int], slice_start: int, slice_end: int, dtype: torch.dtype
) -> torch.Tensor:
    """The bytes slice_start to slice_end of a workspace as `[*leading_shape, n]`."""
    return workspace[slice_start:slice_end].view(dtype).view(*leading_shape, -1)
