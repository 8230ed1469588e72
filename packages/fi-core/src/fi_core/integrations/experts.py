"""Experts of transformers' models on fi's kernels: `experts_implementation="fi"`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from fi_core.fused_moe import cutlass_fused_moe
from fi_core.tllm_enums import ActivationType

if TYPE_CHECKING:
    import torch

NAME = "fi"


class _Prepared(NamedTuple):
    """What `cutlass_fused_moe` takes of a layer."""

    source: tuple[Any, ...]  # of the weights, which tells whether they have changed
    up: torch.Tensor  # [experts, 2 inter, hidden], rows of the linear projection first
    down: torch.Tensor  # [experts, hidden, inter]
    options: dict[str, Any]


_prepared: WeakKeyDictionary[torch.nn.Module, _Prepared] = WeakKeyDictionary()


def require(name: str, minor: int) -> None:
    """Raises ImportError, with the name of what requires it, if transformers is older than 5.minor."""
    import transformers

    version: str = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < (5, minor):
        raise ImportError(f"{name}: transformers 5.{minor} or newer is required; got {version}")


def register_experts() -> None:
    """Adds `experts_implementation="fi"` to transformers, for models with mixtures of experts.

    Raises:
        ImportError: transformers is older than 5.17, whose experts do not say how their weights lie.
    """
    require("register_experts", 17)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    The first call of a layer copies its weights to the order of rows that the kernels read, and the copy stays: a
    layer takes up to twice the memory of its experts. Weights that change are copied again.

    Args:
        module: experts of transformers with gates: gate_up_proj, down_proj, and biases if it has_bias.
        hidden_states: `[tokens, hidden]`, float16 or bfloat16.
        top_k_index: `[tokens, top_k]`; indices beyond the experts add nothing.
        top_k_weights: `[tokens, top_k]`.

    Returns:
        `[tokens, hidden]`.

    Raises:
        ValueError: the layer has no gates, has norms of its outputs, or an activation that no kernel computes.
        TypeError: the dtype.
    """
    made, source = _prepared.get(module), tuple(_state(module))
    if made is None or made.source != source:
        made = _prepared[module] = _prepare(module, source)
    out: torch.Tensor = cutlass_fused_moe(
        hidden_states, top_k_index, top_k_weights.float(), made.up, made.down, hidden_states.dtype, **made.options
    )
    return out


def _state(module: Any) -> Iterator[Any]:
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        weight = getattr(module, name, None)
        if weight is not None:
            yield weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version


def _prepare(module: Any, source: tuple[Any, ...]) -> _Prepared:
    name = type(module).__name__
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):  # which 5.17 has not
        raise ValueError(
            f"experts_implementation: {name} has no gates, or norms its outputs; use another one than 'fi'"
        )

    def rows(weight: torch.Tensor) -> torch.Tensor:  # [experts, outputs, ...]
        gate, up = weight.chunk(2, 1) if module.is_concatenated else (weight[:, ::2], weight[:, 1::2])
        joined: torch.Tensor = weight.new_empty(weight.shape)
        for half, part in zip(joined.chunk(2, 1), (up, gate)):
            half.copy_(part)
        return joined

    up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    options = _activation(module, down.shape[2], up)
    if module.has_bias:
        options["fc1_expert_biases"] = rows(module.gate_up_proj_bias.detach())
        options["fc2_expert_biases"] = module.down_proj_bias.detach()
    return _Prepared(source, rows(up), down.contiguous(), options)


def _activation(module: Any, inter: int, weight: torch.Tensor) -> dict[str, Any]:
    """The arguments of the activation that gives the layer's own result on random numbers."""
    import torch
    from torch.nn import functional as f

    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(4, 2 * inter, device=weight.device, generator=generator) * 8  # beyond limits
    gate, up = x.chunk(2, -1) if module.is_concatenated else (x[:, ::2], x[:, 1::2])
    limit, alpha = (float(getattr(module, name, None) or 0) for name in ("limit", "alpha"))
    low, high = gate.clamp(max=limit), up.clamp(-limit, limit)
    constants = {"swiglu_alpha": alpha, "swiglu_beta": 1.0, "swiglu_limit": limit}
    of_each = {name: torch.full(weight.shape[:1], x, device=weight.device) for name, x in constants.items()}
    known: tuple[tuple[dict[str, Any], Callable[[], torch.Tensor]], ...] = (
        ({"activation_type": ActivationType.Swiglu}, lambda: f.silu(gate) * up),
        ({"activation_type": ActivationType.Geglu}, lambda: f.gelu(gate) * up),
        ({"activation_type": ActivationType.GegluTanh}, lambda: f.gelu(gate, approximate="tanh") * up),
        (of_each, lambda: low * torch.sigmoid(alpha * low) * (high + 1)),
    )
    with torch.no_grad():
        want = module._apply_gate(x)
    for options, result in known if limit else itertools.islice(known, 3):
        if torch.allclose(result(), want, rtol=1e-5, atol=1e-6):
            return dict(options)
    raise ValueError(
        f"experts_implementation: silu, gelu, gelu_tanh or gpt-oss's gate is required; {type(module).__name__} has "
        "another activation; use another one than 'fi'"
    )
