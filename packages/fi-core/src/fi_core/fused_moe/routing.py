"""Routing: the experts of each token and their weights, from the logits of the router."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.fused_moe import trace
from fi_core.fused_moe.ops import MOE_ROUTE, moe_route
from fi_core.observe.log import fi_api
from fi_core.tllm_enums import RoutingMethodType

if TYPE_CHECKING:
    import torch

    from fi_core.runtime.launch.plan import Launches

_MOST_EXPERTS = 32  # of a token: kMostTopK


class Routed(NamedTuple):
    """Chosen experts `[tokens, top_k]` and their weights, fp32 or bf16 of the same shape."""

    ids: torch.Tensor
    weights: torch.Tensor


def route(
    p: Launches,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    scale: float | None,
    method: int,
    normalize: bool,
    replay: torch.Tensor | None,
    *,
    in_bf16: bool = False,
    shared: int = 0,
) -> Routed:
    """Chooses top_k experts for each token by a `RoutingMethodType`; weights are fp32, or a result in_bf16.

    Behind them come the `shared` experts after num_experts, with weight 1.

    Raises:
        ValueError: a shape or number does not fit; the text names the argument.
    """
    import torch

    if logits.ndim != 2 or logits.shape[1] != num_experts:
        raise ValueError(f"routing_logits must have shape [tokens, {num_experts}]; got {list(logits.shape)}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..{num_experts}; got {top_k}")
    if shared and top_k + shared > _MOST_EXPERTS:
        raise ValueError(f"num_fused_shared_experts must be at most {_MOST_EXPERTS} - top_k {top_k}; got {shared}")
    if (n_group or 1) > 1 and not topk_group:  # without groups, engines pass 0
        raise ValueError(f"topk_group must be in 1..n_group = {n_group}; got {topk_group}")
    if (n_group or 1) > 1 and method != RoutingMethodType.DeepSeekV3:
        raise ValueError(
            f"n_group must be None or 1 for routing_method_type {int(method)}: groups are those of DeepSeekV3 "
            f"({int(RoutingMethodType.DeepSeekV3)}); got {n_group}"
        )
    ids = p.scratch((logits.shape[0], top_k + shared), torch.int32)
    weights = p.result(ids.shape, torch.bfloat16) if in_bf16 else p.scratch(ids.shape, torch.float32)
    p.add(
        MOE_ROUTE,
        ids,
        weights,
        logits,
        bias=bias,
        replay=replay,
        method=int(method),
        n_group=n_group or 1,
        topk_group=topk_group or 1,
        scale=1.0 if scale is None else scale,
        normalize=normalize,
        shared=shared,
    )
    return Routed(ids, weights)


def unpacked(topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor], top_k: int, shared: int = 0) -> Routed:
    """Experts that the caller chose, top_k and up to `shared` more of each token: (ids, weights), or int32
    `expert << 16 | bits of a bf16 weight`.

    Raises:
        ValueError: a shape does not fit.
        TypeError: weights are no floats.
    """
    import torch

    members = topk_ids if isinstance(topk_ids, (tuple, list)) else (topk_ids,)
    if not 1 <= len(members) <= 2:
        raise ValueError(f"topk_ids must be a tensor, or a tuple (ids, weights); got {len(members)} members")
    ids, weights = members[0], members[1] if len(members) == 2 else None
    if ids.ndim == 2 and not top_k <= ids.shape[1] <= top_k + shared:  # of another rank: refused below
        most = f" to {top_k + shared}" if shared else ""
        raise ValueError(f"topk_ids must have {top_k}{most} columns, top_k; got {list(ids.shape)}")
    if weights is not None:
        if not weights.dtype.is_floating_point:
            raise TypeError(f"topk_ids[1], the weights, must be floats; got {weights.dtype}")
        return Routed(ids, weights if weights.dtype is torch.bfloat16 else weights.float())
    if ids.ndim != 2 or ids.dtype is not torch.int32:
        raise ValueError(
            f"topk_ids must be int32 [tokens, top_k], or a tuple of ids and weights; got {ids.dtype} {list(ids.shape)}"
        )
    halves = ids.contiguous()  # of little-endian words
    return Routed(halves.view(torch.int16)[:, 1::2], halves.view(torch.bfloat16)[:, ::2])


@fi_api(trace=trace.FUSED_TOPK)
def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    *,
    backend: str = "default",
) -> None:
    """Chooses experts by DeepSeek-V3's rule (arXiv:2412.19437): sigmoid, a bias for the choice, and groups of experts.

    With s = sigmoid(scores) and b = s + bias, the topk_group groups with the largest sum of their two largest b stay,
    and of them the topk experts with the largest b; ties go to the lower number. Weights are
    `s / (sum of the chosen s + 1e-20) * routed_scaling_factor`. NaN counts as -inf.

    Args:
        scores: `[tokens, experts]`, logits of the router: fp32, bf16 or fp16; at most 512 experts.
        bias: `[experts]`, fp32, bf16 or fp16.
        n_group: groups of consecutive experts, at most 32; divides the number of experts.
        topk_group: groups that stay.
        topk: experts of a token, at most 32.
        routed_scaling_factor: factor of the weights.
        topk_values: `[tokens, topk]`, fp32, bf16 or fp16; receives the weights.
        topk_indices: `[tokens, topk]`, int32; receives the experts.
        launch_with_pdl: programmatic dependent launch, where the hardware has it.
        routing_replay_out: int16 `[tokens or more, topk]`; receives the experts too.
        backend: "default".

    Raises:
        ValueError: a shape or number does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    if backend != "default":
        raise ValueError(f'backend must be "default"; got {backend!r}')
    if scores.ndim != 2:
        raise ValueError(f"scores must have shape [tokens, experts]; got {list(scores.shape)}")
    if bias is None:
        raise TypeError("bias must be a torch.Tensor of [experts], zeros for none; got None")
    experts = scores.shape[1]
    if not 1 <= n_group <= 32 or experts % n_group:
        raise ValueError(f"n_group must be in 1..32 and divide the {experts} experts of scores; got {n_group}")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group must be in 1..n_group = {n_group}; got {topk_group}")
    if not 1 <= topk <= experts // n_group * topk_group:
        raise ValueError(f"topk must be in 1..{experts // n_group * topk_group}, the experts that stay; got {topk}")
    expected = (scores.shape[0], topk)
    for name, x in (("topk_values", topk_values), ("topk_indices", topk_indices)):
        if tuple(x.shape) != expected:
            raise ValueError(f"{name} must have shape {list(expected)}; got {list(x.shape)}")
    moe_route(
        topk_indices,
        topk_values,
        scores,
        bias=bias,
        replay=routing_replay_out,
        method=int(RoutingMethodType.DeepSeekV3),
        n_group=n_group,
        topk_group=topk_group,
        scale=routed_scaling_factor,
        enable_pdl=launch_with_pdl,
    )


@fi_api
def hash_topk(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    launch_with_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the experts of a token from a table, with weights `w / sum of w`, `w = sqrt(softplus(logit))`.

    Args:
        router_logits: `[tokens, experts]`, fp32.
        input_ids: `[tokens]`, int64, rows of the table.
        tid2eid: `[vocabulary, topk]`, int32.
        num_fused_shared_experts: 0 or 1; 1 adds expert number `experts` with weight `1 / routed_scaling_factor`.
        routed_scaling_factor: positive.
        launch_with_pdl: accepted.

    Returns:
        (weights fp32, ids int32), `[tokens, topk + num_fused_shared_experts]`.

    Raises:
        ValueError: a shape, dtype, device or number does not fit; the text names the argument.
    """
    import torch

    kinds = {
        "router_logits": (router_logits, 2, torch.float32),
        "input_ids": (input_ids, 1, torch.int64),
        "tid2eid": (tid2eid, 2, torch.int32),
    }
    for name, (x, ndim, dtype) in kinds.items():
        if x.ndim != ndim or x.dtype is not dtype or x.device != router_logits.device:
            raise ValueError(
                f"{name} must be {dtype} of {ndim} dimensions on {router_logits.device}; got {x.dtype} "
                f"{list(x.shape)} on {x.device}"
            )
    if len(input_ids) != len(router_logits):
        raise ValueError(f"input_ids must have shape [{len(router_logits)}], that of tokens; got {len(input_ids)}")
    if num_fused_shared_experts not in (0, 1):
        raise ValueError(f"num_fused_shared_experts must be 0 or 1; got {num_fused_shared_experts}")
    if num_fused_shared_experts and not 0 < routed_scaling_factor < float("inf"):
        raise ValueError(f"routed_scaling_factor must be positive and finite; got {routed_scaling_factor}")
    experts = router_logits.shape[1]
    if not 0 < experts < 1 << 31:
        raise ValueError(f"router_logits must have 1 to 2^31 - 1 experts; got {list(router_logits.shape)}")
    if router_logits.device.type == "cpu":  # elsewhere that would wait for the device
        _check_range("input_ids", input_ids, len(tid2eid))
        _check_range("tid2eid", tid2eid, experts)
    ids = tid2eid[input_ids]
    weights = torch.nn.functional.softplus(router_logits.gather(1, ids.long())).sqrt()
    weights = weights / weights.sum(1, keepdim=True)
    if num_fused_shared_experts:
        ids = torch.nn.functional.pad(ids, (0, 1), value=experts)
        weights = torch.nn.functional.pad(weights, (0, 1), value=1 / routed_scaling_factor)
    return weights, ids


def _check_range(name: str, x: torch.Tensor, end: int) -> None:
    """Raises ValueError unless all are in 0..end - 1."""
    if x.numel() and not (int(x.min()) >= 0 and int(x.max()) < end):
        raise ValueError(f"{name} must be in 0..{end - 1}; got {int(x.min())} to {int(x.max())}")
