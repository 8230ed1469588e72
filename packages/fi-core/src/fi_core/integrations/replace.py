"""Replaces norms, rotary embedding and gated MLPs of a transformers model by fi's kernels."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import fi_core

if TYPE_CHECKING:
    import torch

_ROPE = "apply_rotary_pos_emb"
_REFUSALS = RuntimeError, TypeError, ValueError, IndexError


def replace(model: torch.nn.Module, *, norms: bool = True, rotary: bool = True, mlps: bool = True) -> dict[str, int]:
    """Replaces parts of a model, in place, by fi's kernels; the parameters stay where they are.

    A part is replaced only if fi's kernel gives the result of the part's own forward on random numbers; others stay as
    they are, so look at the counts. The rotary embedding is a function of the model's module: all models of that class
    in this process share it.

    Args:
        model: on the device on which it will run.
        norms: RMSNorm modules, of Llama's and of Gemma's form.
        rotary: the function that rotates queries and keys.
        mlps: modules of gate_proj, up_proj and down_proj, with silu or gelu.

    Returns:
        How many of each were replaced: "norms", "mlps", and the modules with a replaced function, "rotary".
    """
    counts: Counter[str] = Counter(norms=0, rotary=0, mlps=0)
    for module in model.modules():
        found = None
        if norms and "RMSNorm" in type(module).__name__:
            found = _norm(module), "norms"
        elif mlps and all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            found = _mlp(module), "mlps"
        if found and found[0] is not None:
            module.forward = found[0]
            counts[found[1]] += 1
    if rotary:
        files = {type(module).__module__ for module in model.modules()}
        counts["rotary"] = sum(_replace_rotary(sys.modules[name], model) for name in sorted(files))
    return dict(counts)


def _same(new: Callable[..., Any], old: Callable[..., Any], *arguments: torch.Tensor) -> bool:
    """Whether two functions agree, to the rounding of the dtype, on these arguments."""
    import torch

    with torch.no_grad():
        try:
            got, want = new(*(x.clone() for x in arguments)), old(*(x.clone() for x in arguments))
        except _REFUSALS:  # the part has another form
            return False
        got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        rounding = 8 * torch.finfo(arguments[0].dtype).eps
        return len(got) == len(want) and all(
            a.shape == b.shape and a.dtype == b.dtype and bool((a - b).abs().max() <= rounding * b.abs().max())
            for a, b in zip(got, want)
        )


def _random(like: torch.Tensor, *shape: int) -> torch.Tensor:
    import torch

    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(*shape, device=like.device, generator=generator).to(like.dtype)


def _norm(module: Any) -> Callable[..., Any] | None:
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)
    if weight is None or eps is None or weight.ndim != 1:
        return None
    own = module.forward

    def forward_of(kernel: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def forward(hidden_states: torch.Tensor, *more: Any) -> Any:
            # The gate of a gated norm, or a residual in float32 of a model in 16 bits.
            if more or hidden_states.dtype != module.weight.dtype:
                return own(hidden_states, *more)
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            out: torch.Tensor = kernel(rows, module.weight, eps)
            return out.view(hidden_states.shape)

        return forward

    made = map(forward_of, (fi_core.rmsnorm, fi_core.gemma_rmsnorm))
    x = _random(weight, 3, len(weight))
    return next((forward for forward in made if _same(forward, own, x)), None)


def _mlp(module: Any) -> Callable[..., Any] | None:
    import torch

    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    linear = all(type(part) is torch.nn.Linear and part.bias is None for part in (gate, up, down))
    if not linear or gate.weight.shape != up.weight.shape:
        return None

    def forward_of(kernel: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            rows, half = x.reshape(-1, x.shape[-1]), len(gate.weight)
            both = rows.new_empty(len(rows), 2 * half)
            torch.mm(rows, gate.weight.t(), out=both[:, :half])  # no copy of the weights, nor of the results
            torch.mm(rows, up.weight.t(), out=both[:, half:])
            out: torch.Tensor = down(kernel(both))
            return out.view(*x.shape[:-1], -1)

        return forward

    made = map(forward_of, (fi_core.silu_and_mul, fi_core.gelu_tanh_and_mul, fi_core.gelu_and_mul))
    x = _random(gate.weight, 3, gate.in_features)
    return next((forward for forward in made if _same(forward, module.forward, x)), None)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first channels of queries and keys, in place, by the angles of each token.

    Args:
        q, k: `[batch, heads, length, head_dim]`.
        cos, sin: `[batch or 1, length, rotary_dim]`, rotary_dim <= head_dim; the second half repeats the first.
        unsqueeze_dim: must be 1, the axis of heads.

    Returns:
        (q, k).
    """
    import torch

    if unsqueeze_dim != 1:
        raise ValueError(f"unsqueeze_dim: 1 is required, the axis of heads; got {unsqueeze_dim}")
    batch, _, length, dim = q.shape
    half = cos.shape[-1] // 2
    angles = torch.cat([cos[..., :half], sin[..., :half]], -1).float().expand(batch, -1, -1).flatten(0, 1)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]  # views of the projections' results
    positions = torch.arange(batch * length, dtype=torch.int32, device=q.device)
    fi_core.apply_rope_with_cos_sin_cache_inplace(positions, rows[0], rows[1], dim, angles)
    first, second = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in rows)
    return first, second


def _angles(model: Any, like: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin of three tokens, as the rotary modules of the model compute them for each kind of layer."""
    import torch

    positions, found = torch.tensor([[0, 1, 7]], device=like.device), []
    for module in model.modules():
        if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            continue
        for kind in getattr(module, "layer_types", None) or [None]:
            try:
                pair = module(like, positions) if kind is None else module(like, positions, kind)
            except _REFUSALS:  # such as of an image encoder, which has a function of its own
                continue
            if isinstance(pair, tuple) and len(pair) == 2 and pair[0].shape[:-1] == positions.shape:
                found.append(pair)
    return found


def _replace_rotary(module: Any, model: Any) -> bool:
    """Whether the module's function is `rotate`, by which it is replaced if both agree.

    They have to agree on the angles of this model, and on others that the function takes: all models of the class share
    the function.
    """
    own = getattr(module, _ROPE, None)
    if own is rotate:
        return True
    if not isinstance(own, FunctionType) or own.__module__ != module.__name__:
        return False
    like = next(model.parameters())
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, k = _random(like, 2, 3, 4, dim).transpose(1, 2), _random(like, 2, 3, 2, dim).transpose(1, 2)
    of_model = _angles(model, like)
    random = [_random(like, 1, 3, width // 2).repeat(1, 1, 2) for width in (dim, dim // 2)]
    others = [pair for pair in ((x.cos(), x.sin()) for x in random) if _runs(own, q, k, *pair)]
    if not of_model or not all(_same(rotate, own, q, k, *pair) for pair in (*of_model, *others)):
        return False
    setattr(module, _ROPE, rotate)
    return True


def _runs(function: Callable[..., Any], *arguments: torch.Tensor) -> bool:
    try:
        function(*(x.clone() for x in arguments))
    except _REFUSALS:
        return False
    return True
