"""Serves a small random model of Qwen3-MoE's architecture: each token takes two of sixteen experts in one fused call.
Compares every token with transformers' own model.

    python examples/mixture_of_experts.py [--device cuda] [--tokens 24] [--json]

The engine is in `serving.py`: requests of different lengths share a paged KV cache, prompts come in chunks, and on a
GPU steps that only generate replay a CUDA graph, in which the experts change from step to step.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import torch
from serving import Attention, Batch, Engine, Request, Scheduler
from torch.nn.functional import embedding, linear
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fi_core

PAGE = 16
CONFIG = Qwen3MoeConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=2,
    norm_topk_prob=True, max_position_embeddings=1024, initializer_range=0.08,
)  # fmt: skip


class Layer(NamedTuple):
    """Weights of a decoder layer. The first weight of an expert is its linear projection, then its gate."""

    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    router: torch.Tensor
    up_gate: torch.Tensor  # [experts, 2 * width, hidden]
    down: torch.Tensor  # [experts, hidden, width]
    next_norm: torch.Tensor


class Qwen3Moe:
    """transformers' Qwen3MoeForCausalLM as `Engine` takes it: torch multiplies shared matrices, fi does the rest."""

    def __init__(self, model: Any, max_positions: int) -> None:
        c, body = model.config, model.model
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.eps, self.top_k, self.dtype, self.device = c.rms_norm_eps, c.num_experts_per_tok, model.dtype, model.device
        self.embedding, self.lm_head = body.embed_tokens.weight.detach(), model.lm_head.weight.detach()
        self.first_norm = body.layers[0].input_layernorm.weight.detach()
        norms = [layer.input_layernorm for layer in body.layers[1:]] + [body.norm]
        self.layers = [
            Layer(
                torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).detach(),
                a.q_norm.weight.detach(),
                a.k_norm.weight.detach(),
                a.o_proj.weight.detach(),
                layer.post_attention_layernorm.weight.detach(),
                m.gate.weight.detach(),
                torch.cat(m.experts.gate_up_proj.detach().chunk(2, 1)[::-1], 1),
                m.experts.down_proj.detach(),
                norm.weight.detach(),
            )
            for layer, norm in zip(body.layers, norms)
            for a, m in [(layer.self_attn, layer.mlp)]
        ]
        every = torch.arange(max_positions, device=self.device)[None]
        tables = body.rotary_emb(torch.empty(0, device=self.device), every)
        self.cos_sin = torch.cat([table[0, :, : table.shape[2] // 2] for table in tables], 1)

    def __call__(self, batch: Batch, caches: list[torch.Tensor], attend: Attention) -> torch.Tensor:
        """Logits `[requests, vocab]` after the last row of each request; appends all rows to the caches."""
        residual = embedding(batch.tokens, self.embedding)
        x = fi_core.rmsnorm(residual, self.first_norm, self.eps)
        for layer, cache in zip(self.layers, caches):
            qkv = linear(x, layer.qkv).unflatten(1, (-1, self.head_dim))
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            q, k = fi_core.rmsnorm(q, layer.q_norm, self.eps), fi_core.rmsnorm(k, layer.k_norm, self.eps)
            fi_core.apply_rope_with_cos_sin_cache_inplace(batch.positions, q, k, self.head_dim, self.cos_sin)
            fi_core.append_paged_kv_cache(
                k, v, batch.owners, batch.positions, cache, batch.indices, batch.indptr, batch.last_page_len
            )
            x = linear(attend(q, cache).flatten(1), layer.o)
            fi_core.fused_add_rmsnorm(x, residual, layer.mlp_norm, self.eps)
            x = self.experts(x, layer)
            fi_core.fused_add_rmsnorm(x, residual, layer.next_norm, self.eps)
        return linear(x[batch.outputs], self.lm_head)

    def experts(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        weights, ids = linear(x, layer.router).softmax(-1, torch.float32).topk(self.top_k)
        weights /= weights.sum(-1, keepdim=True)
        return fi_core.fused_moe.cutlass_fused_moe(x, ids.int(), weights, layer.up_gate, layer.down, x.dtype)


@torch.inference_mode()
def check(model: Any, requests: list[Request]) -> dict[str, Any]:
    """By transformers' eager attention and experts over each whole text: the tokens that are the likeliest there, and
    how far the others are from it.
    """
    equal, worst = 0, 0.0
    for r in requests:
        logits = model(torch.tensor([r.tokens], device=model.device)).logits[0, len(r.prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(r.generated, device=model.device)[:, None])[:, 0]
        gap = logits.max(-1).values - chosen
        equal += int((gap == 0).sum())
        worst = max(worst, (gap / logits.std(-1)).max().item())
    return {"tokens": sum(len(r.generated) for r in requests), "equal": equal, "worst_gap": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Of the first 14 seeds the one whose texts stay farthest from ties: by 0.009 standard deviations of the logits.
    torch.manual_seed(9)
    CONFIG._attn_implementation = CONFIG._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(CONFIG).eval().to(options.device, torch.float16)
    prompts = [torch.randint(0, CONFIG.vocab_size, (n,)).tolist() for n in (5, 70, 17, 1)]
    requests = [Request(prompt, options.tokens, arrival=i) for i, prompt in enumerate(prompts)]
    scheduler = Scheduler(num_pages=24, page_size=PAGE, token_budget=32, max_running=4)
    engine = Engine(Qwen3Moe(model, 1024), scheduler, cuda_graph=options.device != "cpu")  # type: ignore[arg-type]
    engine.serve(requests)
    said = check(model, requests)
    if options.json:
        print(json.dumps({**said, "steps": len(engine.times), "generated": [r.generated for r in requests]}))
    else:
        print(f"{said['equal']} of {said['tokens']} tokens are transformers' likeliest; the others are within "
              f"{said['worst_gap']:.3f} standard deviations of its logits")  # fmt: skip


if __name__ == "__main__":
    main()
