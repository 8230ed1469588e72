"""Computes a linear layer and a layer of experts for a batch whose tokens have different low-rank adapters, or none.

    python examples/adapters.py [--device cuda] [--tokens 24]

Compares each token with its own adapter in fp64, and tokens without one with the layer alone. On a GPU a CUDA graph is
captured once and replayed after the tokens have changed their adapters.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import silu

import fi_core
from fi_core.fused_moe import ExpertLora, cutlass_fused_moe

ADAPTERS, EXPERTS, TOP_K, HIDDEN, WIDTH, RANK = 3, 8, 2, 256, 128, 16
DTYPE = torch.bfloat16


def weights(*shape: int, device: str) -> torch.Tensor:
    drawn: torch.Tensor = torch.randn(shape) * shape[-1] ** -0.5
    return drawn.to(device, DTYPE)


class Layers:
    """`y = W x + B[l] A[l] x`, and experts of which each product has such a part; l is the adapter of a token."""

    def __init__(self, tokens: int, device: str) -> None:
        self.w = weights(HIDDEN, HIDDEN, device=device)
        self.a = weights(ADAPTERS, 1, RANK, HIDDEN, device=device)
        self.b = weights(ADAPTERS, 1, HIDDEN, RANK, device=device)
        self.up_gate = weights(
            EXPERTS, 2 * WIDTH, HIDDEN, device=device
        )  # an expert's linear projection, then its gate
        self.down = weights(EXPERTS, HIDDEN, WIDTH, device=device)
        self.of = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.scale = torch.tensor([2.0, 1.0, 0.5], device=device)  # alpha / rank of each adapter
        self.lora = ExpertLora(
            [weights(ADAPTERS, EXPERTS, RANK, HIDDEN, device=device) for _ in range(2)],
            [weights(ADAPTERS, EXPERTS, WIDTH, RANK, device=device) for _ in range(2)],
            weights(ADAPTERS, EXPERTS, RANK, WIDTH, device=device),
            weights(ADAPTERS, EXPERTS, HIDDEN, RANK, device=device),
            self.of,
            self.scale,
        )
        ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
        self.ids = ids.int().to(device)
        self.shares = torch.full((tokens, TOP_K), 1 / TOP_K, device=device)

    def linear(self, x: torch.Tensor, adapted: bool) -> torch.Tensor:
        y = x @ self.w.mT
        if adapted:
            fi_core.lora.add_lora_linear(y, x, (self.a,), (self.b,), 1.0, (HIDDEN,), lora_indices=self.of)
        return y

    def experts(self, x: torch.Tensor, adapted: bool) -> torch.Tensor:
        lora = self.lora if adapted else None
        return cutlass_fused_moe(x, self.ids, self.shares, self.up_gate, self.down, DTYPE, lora=lora)

    def both(self, x: torch.Tensor, adapted: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x, adapted), self.experts(x, adapted)

    def token(self, x: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both layers for one token, in fp64."""
        up_a, gate_a, up_b, gate_b, down_a, down_b = (w.double() for w in self.lora[:6])
        row, n = x[t].double(), int(self.of[t])
        scale = 0.0 if n < 0 else float(self.scale[n])
        y, out = self.w.double() @ row, torch.zeros_like(row)
        if n >= 0:
            y += self.b[n, 0].double() @ (self.a[n, 0].double() @ row)
        for e in self.ids[t].tolist():
            up, gate = (self.up_gate[e].double() @ row).chunk(2)
            up, gate = up + scale * up_b[n, e] @ (up_a[n, e] @ row), gate + scale * gate_b[n, e] @ (gate_a[n, e] @ row)
            act = silu(gate) * up
            out += (self.down[e].double() @ act + scale * down_b[n, e] @ (down_a[n, e] @ act)) / TOP_K
        return y, out


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    torch.manual_seed(0)
    layers, x = Layers(options.tokens, options.device), weights(options.tokens, HIDDEN, device=options.device) * 16
    found, graph = layers.both(x), None
    if options.device != "cpu":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layers.both(x)
    worst = 0.0
    for step in range(2):
        layers.of.copy_((torch.arange(options.tokens) + step) % (ADAPTERS + 1) - 1)  # -1: no adapter
        if graph is None:
            found = layers.both(x)
        else:
            graph.replay()
        for t in range(options.tokens):
            for got, want in zip(found, layers.token(x, t)):
                worst = max(worst, float((got[t].double() - want).norm() / want.norm()))
        plain = layers.of < 0
        same = all(torch.equal(y[plain], z[plain]) for y, z in zip(found, layers.both(x, adapted=False)))
        print(f"{int((~plain).sum())} tokens with an adapter, {int(plain.sum())} without; those have the bits of the "
              f"layers alone: {same}")  # fmt: skip
    print(f"largest relative error of a token {worst:.4f}")


if __name__ == "__main__":
    main()
