"""Cases of collectives: every rank runs them, on inputs that all ranks draw alike, so that each knows the results."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Tolerance, Work, dtype_of
from fi_bench.cases.common import normal
from fi_bench.measure.ranks import grouped

if TYPE_CHECKING:
    pass

_PATTERNS = {"allreduce": 0, "ar_residual_rmsnorm": 1, "ar_residual_rmsnorm_dynamic_fp8": 10}
_EPS = 1e-6
_TIMEOUT = 120.0  # seconds that a call waits for another rank, which may compile a kernel


def _rank() -> tuple[int, int]:
    """The rank of this process and their number."""
    if not grouped():
        return 0, 1
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def _alone() -> dict[str, Any]:
    """What names the group: nothing for torch's world."""
    if grouped():
        return {}
    from fi_core.comm.mnnvl import OneRank

    return {"comm_backend": OneRank()}


def _make_reduce(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    rank, world = _rank()
    dtype, shape = dtype_of(p.input_dtype), (p.num_tokens, p.hidden_size)
    every = normal((world, *shape), dtype, device, generator)
    x = Inputs(x=every[rank].clone(), every=every, out=torch.empty(shape, dtype=dtype, device=device))
    x["pattern"] = p.pattern
    if p.pattern != "allreduce":
        x.update(residual=normal(shape, dtype, device, generator), norm=torch.empty_like(x.out))
        x["gamma"] = normal((p.hidden_size,), dtype, device, generator)
    if p.pattern.endswith("fp8"):
        x["quantized"] = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        x["scales"] = torch.empty(p.num_tokens, 1, device=device)
    return x


def _plan_reduce(function: Callable[..., Any], x: Inputs, backend: str) -> Callable[[Inputs], Any]:
    rank, world = _rank()
    package = function.__module__.partition(".")[0]
    create = importlib.import_module(f"{package}.comm").create_allreduce_fusion_workspace
    own = {**_alone(), "device": x.x.device, "timeout": _TIMEOUT} if package == "fi_core" else {"backend": "trtllm"}
    tokens, hidden = x.x.shape
    workspace = create(world_size=world, rank=rank, max_token_num=tokens, hidden_dim=hidden, dtype=x.x.dtype, **own)

    def run(x: Inputs) -> Any:
        pattern = _PATTERNS[x.pattern]
        if not pattern:
            return function(x.x, workspace, pattern, output=x.out)
        quantized = {"quant_out": x.quantized, "scale_out": x.scales} if "quantized" in x else {"norm_out": x.norm}
        return function(
            x.x,
            workspace,
            pattern,
            residual_in=x.residual,
            residual_out=x.out,
            rms_gamma=x.gamma,
            rms_eps=_EPS,
            **quantized,
        )

    return run


def _reduced(x: Inputs, returned: Any) -> Outputs:
    if x.pattern == "allreduce":
        return {"sum": x.out}
    norm = x.quantized.float() * x.scales if "quantized" in x else x.norm
    return {"sum": x.out, "quantized" if "quantized" in x else "norm": norm}


def _reduce_reference(x: Inputs) -> Outputs:
    import torch

    total = x.every.double().sum(0)
    if x.pattern == "allreduce":
        return {"sum": total}
    total = (total + x.residual.double()).to(x.x.dtype).double()  # the norm is that of the rounded sum
    norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + _EPS) * x.gamma.double()
    return {"sum": total, "quantized" if "quantized" in x else "norm": norm}


def _torch_reduce(x: Inputs) -> None:
    """torch.distributed: NCCL on GPUs, gloo on a CPU. It sums in place."""
    import torch

    x.out.copy_(x.x)
    if grouped():
        torch.distributed.all_reduce(x.out)
    if x.pattern == "allreduce":
        return
    x.out.add_(x.residual)
    x.norm.copy_(torch.nn.functional.rms_norm(x.out, x.gamma.shape, x.gamma, _EPS))
    if "quantized" in x:
        torch.div(x.norm.float().abs().amax(-1, keepdim=True), 448, out=x.scales)
        x.quantized.copy_(x.norm / x.scales)


def _reduce_work(p: Namespace, x: Inputs) -> Work:
    """Bytes that a ring of the ranks sends, 2 (N - 1) / N of the message; one rank writes the message."""
    world = len(x.every)
    message = x.x.numel() * x.x.element_size()
    return Work(x.x.numel() * world, 2 * (world - 1) * message // world or message)


def _reduce_unsupported(backend: str, p: Namespace) -> str | None:
    if p.ar_backend == "mnnvl":
        return "--ar_backend must be auto or trtllm, got mnnvl: there is no multi-node NVLink"
    if p.input_dtype not in ("bfloat16", "float16") and (p.input_dtype != "float32" or p.pattern.endswith("fp8")):
        return f"--input_dtype must be bfloat16 or float16 (float32 without fp8), got {p.input_dtype}"
    return None


def _make_exchange(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    rank, world = _rank()
    popular = torch.rand(world, p.num_tokens, p.num_experts, device=device, generator=generator)
    experts = popular.topk(p.top_k).indices[rank]
    x = normal((world, p.num_tokens, p.hidden_size), dtype_of(p.input_dtype), device, generator)[rank].clone()
    there = torch.zeros(p.num_tokens, world, dtype=torch.bool, device=device)
    there.scatter_(1, experts // (p.num_experts // world), True)
    return Inputs(
        x=x,
        experts=experts.int(),
        there=there,
        out=torch.empty_like(x),
        num_experts=p.num_experts,
        capacity=p.max_num_tokens or p.num_tokens,
    )


def _plan_exchange(function: Callable[..., Any], x: Inputs, backend: str) -> Callable[[Inputs], Any]:
    rank, world = _rank()
    package = function.__module__.partition(".")[0]
    comm = importlib.import_module(f"{package}.comm")
    mapping = comm.Mapping(world, rank, tp_size=world, moe_ep_size=world)
    (tokens, hidden), top_k = x.x.shape, x.experts.shape[1]
    own: dict[str, Any] = {"device": x.x.device, "timeout": _TIMEOUT} if package == "fi_core" else {}
    if not grouped():
        own["mnnvl_config"] = comm.MnnvlConfig(**_alone())
    exchange = function(mapping, x.capacity, top_k, x.num_experts, hidden_size=hidden, **own)

    def run(x: Inputs) -> Any:
        received = exchange.dispatch(x.experts, [x.x], tokens)[0]
        results = exchange.get_combine_payload_tensor_in_workspace(tokens, hidden, x.x.dtype)
        results.copy_(received)  # in place of the experts
        x.out.copy_(exchange.combine(results, tokens, payload_in_workspace=True))

    return run


def _torch_exchange(x: Inputs) -> None:
    """Two all-to-alls of rows for every rank, those without an expert there as zeros."""
    import torch

    sent = (x.x * x.there.t()[..., None]).contiguous()
    received, back = torch.empty_like(sent), torch.empty_like(sent)
    if grouped():
        torch.distributed.all_to_all_single(received, sent)
        torch.distributed.all_to_all_single(back, received)
    else:
        back = sent
    torch.sum(back.float(), 0, out=(total := torch.empty_like(x.x, dtype=torch.float32)))
    x.out.copy_(total)


def _exchange_work(p: Namespace, x: Inputs) -> Work:
    """Each token goes once to each rank that has an expert of it, and comes back."""
    rows = int(x.there.sum())
    return Work(rows * x.x.shape[1], 2 * rows * x.x.shape[1] * x.x.element_size())


def _exchange_unsupported(backend: str, p: Namespace) -> str | None:
    if p.num_experts % p.ranks:
        return f"--num_experts must be a multiple of --ranks ({p.ranks}), got {p.num_experts}"
    if p.max_num_tokens and p.max_num_tokens < p.num_tokens:
        return f"--max_num_tokens must be at least --num_tokens ({p.num_tokens}), got {p.max_num_tokens}"
    if p.input_dtype not in ("bfloat16", "float16"):
        return f"--input_dtype must be bfloat16 or float16, got {p.input_dtype}"
    for name in ("quant_dtype", "real_math", "per_phase_timing", "use_lora"):
        if getattr(p, name):
            return f"the case has no --{name}: it times dispatch, a copy in place of the experts, and combine"
    return None


CASES = (
    Case(
        routine="allreduce_fusion",
        function="comm.allreduce_fusion",
        op="all_reduce",
        make=_make_reduce,
        plan=_plan_reduce,
        call=lambda planned, x: planned(x),
        outputs=_reduced,
        reference=_reduce_reference,
        work=_reduce_work,
        torch=_torch_reduce,
        poison=("out", "norm", "quantized", "scales"),
        # NCCL rounds each partial sum to 16 bits; e4m3 has three bits behind the leading one.
        tolerance={"sum": Tolerance(1e-2, 3e-2), "norm": Tolerance(2e-2, 3e-2), "quantized": Tolerance(0.07, 3e-2)},
        unsupported=_reduce_unsupported,
    ),
    Case(
        routine="moe_a2a_dispatch_combine",
        function="comm.MoeAlltoAll",
        op="moe_dispatch",
        also=("moe_combine",),
        make=_make_exchange,
        plan=_plan_exchange,
        call=lambda planned, x: planned(x),
        outputs=lambda x, returned: {"output": x.out},
        reference=lambda x: {"output": x.x.double() * x.there.sum(1, keepdim=True)},
        work=_exchange_work,
        torch=_torch_exchange,
        poison=("out",),
        unsupported=_exchange_unsupported,
    ),
)
