"""Stand-ins for a dense model of vLLM whose layers are spread over tensor-parallel ranks."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

HIDDEN, WIDTH, LAYERS = 64, 96, 3
GROUP: Any = SimpleNamespace(cpu_group=None)  # torch.distributed's world


def get_tp_group() -> Any:
    return GROUP


class RMSNorm(torch.nn.Module):
    variance_size_override: int | None = None

    def __init__(self, size: int, eps: float = 1e-6, device: Any = None, seed: int = 0) -> None:
        super().__init__()
        drawn = torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.5
        self.weight, self.variance_epsilon = torch.nn.Parameter(drawn.bfloat16().to(device), requires_grad=False), eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        rms = total.float().square().mean(-1, keepdim=True).add(self.variance_epsilon).rsqrt()
        normed = (total.float() * rms * self.weight.float()).to(x.dtype)
        return normed if residual is None else (normed, total)


class RowParallelLinear(torch.nn.Module):
    """Columns of the ranks, each with its part of the inputs."""

    def __init__(self, inputs: int, outputs: int, device: Any, seed: int, reduce_results: bool = True) -> None:
        super().__init__()
        self.tp_size, rank = dist.get_world_size(), dist.get_rank()
        whole = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / inputs**0.5
        self.weight = torch.nn.Parameter(whole.chunk(self.tp_size, 1)[rank].bfloat16().to(device), requires_grad=False)
        self.reduce_results, self.rank = reduce_results, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.nn.functional.linear(x.chunk(self.tp_size, -1)[self.rank], self.weight)
        if self.reduce_results and self.tp_size > 1:
            total = own.float()
            dist.all_reduce(total)
            own = total.to(own.dtype)
        return own


class Part(torch.nn.Module):
    """Attention or MLP: what matters is its last product."""

    def __init__(self, name: str, device: Any, seed: int) -> None:
        super().__init__()
        setattr(self, name, RowParallelLinear(HIDDEN, HIDDEN, device, seed))
        self.last = name

    def forward(self, positions: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(self, self.last)(torch.tanh(hidden_states))
        return found


class LlamaDecoderLayer(torch.nn.Module):
    def __init__(self, number: int, device: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN, device=device, seed=2 * number)
        self.post_attention_layernorm = RMSNorm(HIDDEN, device=device, seed=2 * number + 1)
        self.self_attn, self.mlp = Part("o_proj", device, 50 + number), Part("down_proj", device, 70 + number)

    def forward(self, positions: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(positions, hidden_states), residual


class LlamaModel(torch.nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        device = vllm_config.device
        self.layers = torch.nn.ModuleList(LlamaDecoderLayer(i, device) for i in range(LAYERS))
        self.start_layer, self.end_layer = 0, LAYERS
        self.norm = RMSNorm(HIDDEN, device=device, seed=99)

    def forward(self, hidden_states: torch.Tensor, positions: Any = None) -> torch.Tensor:
        residual = None
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)
        found: torch.Tensor = self.norm(hidden_states, residual)[0]
        return found


def engine(device: Any, ranks: int, **changed: Any) -> Any:
    """A configuration of vLLM."""
    parallel = {"tensor_parallel_size": ranks, "pipeline_parallel_size": 1, "nnodes": 1}
    values = {
        "device": device,
        "parallel_config": SimpleNamespace(**parallel | changed.pop("parallel", {})),
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=64),
        "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(**changed.pop("passes", {}))),
        "speculative_config": None,
        "lora_config": None,
    }
    return SimpleNamespace(**values | changed)


MODULES: dict[str, dict[str, Any]] = {
    "vllm.distributed": {},
    "vllm.distributed.parallel_state": {"get_tp_group": get_tp_group},
    "vllm.model_executor.layers.linear": {"RowParallelLinear": RowParallelLinear},
    "vllm.model_executor.models.llama": {"LlamaModel": LlamaModel},
    "vllm.model_executor.models.qwen2": {"Qwen2Model": type("Qwen2Model", (LlamaModel,), {})},
}
