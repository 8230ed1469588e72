"""The recurrences of linear attention in fp64, token by token."""

from __future__ import annotations

import torch


def normalized(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[T, h, D]` in fp64, with each head repeated for those that share it."""
    return x.double().repeat_interleave(heads // x.shape[1], 1)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    scale: float, l2norm: bool = False, every: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Outputs `[T, H, V]`, and the states `[.., H, V, K]` before and after each `every` tokens, and after the last.

    alpha: `[T, H]` or `[T, H, K]`; state: `[H, V, K]`.
    """
    heads = state.shape[0]
    if l2norm:
        q, k = normalized(q), normalized(k)
    q, k, v = (by_head(x, heads) for x in (q, k, v))
    alpha, beta = alpha.double(), beta.double()
    alpha = alpha[..., None].expand_as(k) if alpha.ndim == 2 else alpha
    states, outputs = [state.double()], []
    s = states[0].clone()
    for t in range(q.shape[0]):
        s *= alpha[t, :, None, :]
        u = beta[t, :, None] * (v[t] - (s @ k[t, :, :, None])[..., 0])
        s = torch.baddbmm(s, u[..., None], k[t, :, None, :], out=s)
        outputs.append(scale * (s @ q[t, :, :, None])[..., 0])
        if (t + 1) % every == 0 or t + 1 == q.shape[0]:
            states.append(s.clone())
    empty = q.new_empty((0, *state.shape[:2]))
    return torch.stack(outputs) if outputs else empty, torch.stack(states)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha and beta `[T, H]` (alpha `[T, H, K]` if a is)."""
    rate = a_log.double().exp()
    x = a.double() + dt_bias.double()
    return torch.exp(-(rate[:, None] if a.ndim == 3 else rate) * torch.nn.functional.softplus(x)), b.double().sigmoid()


def selective_state_update(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: torch.Tensor | None = None, z: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Outputs `[T, H, D]` and states `[T + 1, H, D, N]`; dt `[T, H]` is final, a and d are `[H]`."""
    heads = state.shape[0]
    b, c = by_head(b, heads), by_head(c, heads)
    states, outputs = [state.double()], []
    for t in range(x.shape[0]):
        step = dt[t].double()[:, None, None]
        add = step * x[t].double()[..., None] * b[t][:, None, :]
        states.append(states[-1] * torch.exp(step * a.double()[:, None, None]) + add)
        y = (states[-1] * c[t][:, None, :]).sum(-1)
        if d is not None:
            y = y + d.double()[:, None] * x[t].double()
        if z is not None:
            y = y * torch.nn.functional.silu(z[t].double())
        outputs.append(y)
    return torch.stack(outputs), torch.stack(states)
