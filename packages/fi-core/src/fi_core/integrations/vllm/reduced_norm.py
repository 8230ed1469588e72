"""Sums over tensor-parallel ranks, the residual and its norm in one kernel, in vLLM's models of Llama and Qwen.

vLLM has no seam between a row-parallel layer and the norm behind it. So a model that is made of layers whose `forward`
is LAYER leaves the sums to its norms, if its own `forward` is one of MODEL; TARGETS are replaced to see it made.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from itertools import islice
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear

from fi_core import comm
from fi_core.autotuner import autotune
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch

TARGETS = ("vllm.model_executor.models.llama.LlamaModel", "vllm.model_executor.models.qwen2.Qwen2Model")
LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")  # the names that it reads, in order
_BEGIN, _END = "get_pp_group is_first_rank embed_input_ids", "is_last_rank IntermediateTensors"
MODEL = (  # of 0.24.0 and 0.33.0
    f"{_BEGIN} _maybe_add_hidden_state enumerate islice layers start_layer end_layer {_END} norm len",
    f"{_BEGIN} collect_remote_aux_hidden_states _maybe_add_hidden_state start_layer enumerate islice layers end_layer "
    f"{_END} pack_local_aux_hidden_states norm len",
)
MOST_RANKS = 8  # of a host
_log = logging.getLogger("vllm.plugins.fi_core")
workspaces: list[Any] = []  # a norm has the number of its own
_libraries: list[Any] = []  # a registration lives as long as its library


def register() -> None:
    """Replaces `__init__` of TARGETS."""
    _define()
    for target in TARGETS:
        path, _, name = target.rpartition(".")
        model = getattr(importlib.import_module(path), name)
        if not hasattr(model.__init__, "of_fi"):
            model.__init__ = _followed(model.__init__)


def _followed(own: Any) -> Any:
    @functools.wraps(own)
    def init(self: Any, *given: Any, vllm_config: Any, **named: Any) -> None:
        own(self, *given, vllm_config=vllm_config, **named)
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            reason = fuse(self, vllm_config)
            say(reason)

    init.of_fi = True  # type: ignore[attr-defined]
    return init


@functools.cache  # once for all models of an engine
def say(reason: str | None) -> None:
    if reason is None:
        _log.info("fi sums over the ranks in the norms")
    else:
        _log.info("fi does not sum over the ranks in the norms: %s", reason)


def reason_against(model: Any, config: Any) -> str | None:
    """Why the sums of a model stay vLLM's; None if they do not. The same on all ranks."""
    parallel, compilation = config.parallel_config, config.compilation_config
    if parallel.pipeline_parallel_size > 1:
        return "the layers are on several pipeline ranks"
    if parallel.tensor_parallel_size > MOST_RANKS or getattr(parallel, "nnodes", 1) > 1:
        return f"more than {MOST_RANKS} ranks or one host"
    if config.speculative_config is not None or config.lora_config is not None:
        return "drafts or adapters may read what a layer returns"
    if is_on():
        return "batch invariance is on"
    passes = getattr(compilation, "pass_config", None)
    if any(getattr(passes, name, False) for name in ("enable_sp", "fuse_gemm_comms", "fuse_allreduce_rms")):
        return "a pass of vLLM's compiler fuses them"
    if " ".join(type(model).forward.__code__.co_names) not in MODEL or not all(map(_fits, _layers(model))):
        return f"{type(model).__name__} is not that of a supported vLLM"
    return None


def _layers(model: Any) -> list[Any]:
    return [*islice(model.layers, model.start_layer, model.end_layer)]


def _fits(layer: Any) -> bool:
    products: tuple[Any, Any] = getattr(layer.self_attn, "o_proj", None), getattr(layer.mlp, "down_proj", None)
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return (
        type(layer).forward.__code__.co_names == LAYER
        and all(isinstance(x, RowParallelLinear) and x.reduce_results and x.tp_size > 1 for x in products)
        and all(isinstance(x, RMSNorm) and x.variance_size_override is None for x in norms)
    )


def fuse(model: Any, config: Any) -> str | None:
    """Lets the norms of a model add what its row-parallel layers leave on each rank; or returns why not. Collective."""
    reason = reason_against(model, config)
    if reason is not None:
        return reason
    try:
        number = _workspace(model.norm.weight, config)
    except (RuntimeError, ValueError) as error:  # on all ranks alike
        return str(error)
    layers = _layers(model)
    for layer, behind in zip(layers, [*(layer.input_layernorm for layer in layers[1:]), model.norm]):
        for product, norm in (
            (layer.self_attn.o_proj, layer.post_attention_layernorm),
            (layer.mlp.down_proj, behind),
        ):
            product.reduce_results = False
            norm.ranks = number
            norm.forward = types.MethodType(_forward, norm)
    return None


def _workspace(weight: torch.Tensor, config: Any) -> int:
    """The number of a new workspace of the tensor-parallel group. Its kernels are loaded."""
    group = get_tp_group()
    workspace = comm.create_allreduce_fusion_workspace(
        max_token_num=config.scheduler_config.max_num_batched_tokens,
        hidden_dim=weight.shape[0],
        dtype=weight.dtype,
        comm_backend=comm.TorchDistBackend(group.cpu_group),
        device=weight.device,
    )
    x, residual = weight.new_zeros(2, 1, weight.shape[0]).unbind()
    after: dict[str, Any] = {
        "residual_in": residual,
        "residual_out": residual,
        "norm_out": x,
        "rms_gamma": weight.detach(),
    }
    with autotune():
        for one_shot in (True, False):
            comm.allreduce_fusion(x, workspace, 1, use_oneshot=one_shot, **after)
    workspaces.append(workspace)
    return len(workspaces) - 1


def _forward(
    self: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Of an `RMSNorm`: adds x of all ranks to the residual, and returns the norm of the sum and the sum, in place."""
    given = x, residual, self.weight.data, self.variance_epsilon, self.ranks
    if torch.compiler.is_compiling():
        torch.ops.fi_vllm.reduced_norm(*given)
    else:
        _reduced_norm(*given)
    assert residual is not None
    return x, residual


def _reduced_norm(x: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, ranks: int) -> None:
    comm.allreduce_fusion(
        x,
        workspaces[ranks],
        comm.AllReduceFusionPattern.kARResidualRMSNorm,
        launch_with_pdl=None,
        residual_in=residual,
        residual_out=residual,
        norm_out=x,
        rms_gamma=weight,
        rms_eps=eps,
    )


def _define() -> None:
    """Registers `_reduced_norm` with torch."""
    if _libraries:
        return
    library = torch.library.Library("fi_vllm", "FRAGMENT")
    library.define("reduced_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, int ranks) -> ()")
    library.impl("reduced_norm", _reduced_norm, "CompositeExplicitAutograd")
    torch.library.register_fake("fi_vllm::reduced_norm", lambda x, residual, weight, eps, ranks: None, lib=library)
    _libraries.append(library)
