"""Serves a small random model of DeepSeek-V3's architecture: MLA as ordinary heads in prefill, with absorbed weights in
decode. Compares every token with transformers' own generation.

    python examples/latent_attention.py [--device cuda] [--tokens 24] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

import fi_core

LATENT, ROPE, NOPE, VALUE, PAGE = 512, 64, 128, 128, 16  # the widths of DeepSeek-V3; tokens of a page
CONFIG = DeepseekV3Config(
    vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=8, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=LATENT, q_lora_rank=128, qk_rope_head_dim=ROPE,
    qk_nope_head_dim=NOPE, v_head_dim=VALUE, max_position_embeddings=1024, initializer_range=0.08,
)  # fmt: skip


class Batch:
    """The latent cache of all layers, the pages of each request, and the planned wrappers of a step."""

    def __init__(self, requests: int, capacity: int, scale: float, device: str, dtype: torch.dtype) -> None:
        layers, heads = CONFIG.num_hidden_layers, CONFIG.num_attention_heads
        each = -(-capacity // PAGE)
        self.pool = torch.zeros(layers, requests * each, PAGE, LATENT + ROPE, dtype=dtype, device=device)
        self.pages = torch.randperm(requests * each, dtype=torch.int32).view(requests, each)
        self.lengths, self.heads, self.scale = [0] * requests, heads, scale
        self.device, self.dtype = device, dtype
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        self.decode = fi_core.BatchMLAPagedAttentionWrapper(workspace)
        self.prefill = fi_core.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")

    def plan(self, tokens: list[int]) -> torch.Tensor:
        """Plans a step that appends so many tokens to each request; returns their positions."""
        positions = [range(n, n + more) for n, more in zip(self.lengths, tokens)]
        self.lengths = [n + more for n, more in zip(self.lengths, tokens)]
        counts = [-(-n // PAGE) for n in self.lengths]
        offsets = lambda xs: torch.tensor([0, *itertools.accumulate(xs)], dtype=torch.int32)  # noqa: E731
        rows, starts = offsets(tokens), offsets(counts)
        indices = torch.cat([own[:n] for own, n in zip(self.pages, counts)]).to(self.device)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        self.is_prefill = max(tokens) > 1
        if self.is_prefill:
            width = NOPE + ROPE
            self.prefill.plan(
                rows, rows, self.heads, self.heads, width, head_dim_vo=VALUE, causal=True, sm_scale=self.scale,
                q_data_type=self.dtype,
            )  # fmt: skip
        else:
            self.decode.plan(
                rows,
                starts,
                indices,
                lengths,
                self.heads,
                LATENT,
                ROPE,
                PAGE,
                False,
                self.scale,
                self.dtype,
                self.dtype,
            )
        flat = torch.tensor(list(itertools.chain(*positions)), dtype=torch.int32, device=self.device)
        requests = torch.repeat_interleave(torch.arange(len(tokens), dtype=torch.int32), torch.tensor(tokens))
        last = (lengths - 1) % PAGE + 1
        self.table = (requests.to(self.device), flat, indices, starts.to(self.device), last.to(self.device))
        return flat


class Attention(torch.nn.Module):
    """Replaces the attention of a layer: all tokens of a step lie behind each other in one row."""

    def __init__(self, own: Any, batch: Batch, layer: int) -> None:
        super().__init__()
        self.own, self.batch, self.layer = own, batch, layer
        # [heads, 128 + 128, 512]: the weights that make keys and values of a latent row
        weight = own.kv_b_proj.weight.view(batch.heads, NOPE + VALUE, LATENT)
        self.to_key, self.to_value = weight[:, :NOPE], weight[:, NOPE:]

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> tuple[torch.Tensor, None]:
        own, batch = self.own, self.batch
        tokens = hidden_states.shape[1]
        q = own.q_b_proj(own.q_a_layernorm(own.q_a_proj(hidden_states))).view(1, tokens, batch.heads, NOPE + ROPE)
        q_nope, q_pe = q.transpose(1, 2).split([NOPE, ROPE], -1)
        ckv, kpe = own.kv_a_proj_with_mqa(hidden_states).split([LATENT, ROPE], -1)
        ckv = own.kv_a_layernorm(ckv)
        q_pe, kpe = apply_rotary_pos_emb_interleave(q_pe, kpe.unsqueeze(1), *position_embeddings)
        q_nope, q_pe = q_nope[0].transpose(0, 1), q_pe[0].transpose(0, 1)  # [tokens, heads, width]
        ckv, kpe = ckv[0], kpe[0, 0]
        pool = batch.pool[self.layer]
        requests, positions, indices, starts, last = batch.table
        fi_core.append_paged_mla_kv_cache(
            ckv, kpe.contiguous(), requests, positions, pool[..., :LATENT], pool[..., LATENT:], indices, starts, last
        )
        if batch.is_prefill:
            k_nope, v = own.kv_b_proj(ckv).view(tokens, batch.heads, NOPE + VALUE).split([NOPE, VALUE], -1)
            k = ckv.new_empty(tokens, batch.heads, NOPE + ROPE)
            fi_core.concat_mla_k(k, k_nope, kpe.contiguous().unsqueeze(1))
            out = batch.prefill.run(torch.cat([q_nope, q_pe], -1), k, v.contiguous())
        else:
            absorbed = torch.einsum("thn,hnc->thc", q_nope, self.to_key).contiguous()
            latent = batch.decode.run(absorbed, q_pe.contiguous(), pool[..., :LATENT], pool[..., LATENT:])
            out = torch.einsum("thc,hvc->thv", latent, self.to_value)
        return own.o_proj(out.reshape(1, tokens, -1)), None


@torch.inference_mode()
def serve(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The tokens that follow each prompt, greedily."""
    device, dtype = str(model.device), model.dtype
    attention = model.model.layers[0].self_attn
    capacity = max(map(len, prompts)) + tokens
    batch = Batch(len(prompts), capacity, attention.scaling, device, dtype)
    for layer, block in enumerate(model.model.layers):
        block.self_attn = Attention(block.self_attn, batch, layer)
    generated: list[list[int]] = [[] for _ in prompts]
    step = [list(p) for p in prompts]
    for _ in range(tokens):
        positions = batch.plan([len(x) for x in step])
        ids = torch.tensor([list(itertools.chain(*step))], device=device)
        hidden = model.model(input_ids=ids, position_ids=positions[None].long(), use_cache=False).last_hidden_state[0]
        ends = torch.tensor([len(x) for x in step]).cumsum(0) - 1
        step = [[int(x)] for x in model.lm_head(hidden[ends.to(device)]).argmax(-1)]
        for own, new in zip(generated, step):
            own.extend(new)
    for block in model.model.layers:
        block.self_attn = block.self_attn.own
    return generated


@torch.inference_mode()
def check(model: Any, prompts: list[list[int]], generated: list[list[int]]) -> dict[str, Any]:
    """By transformers' eager attention over each whole text: the tokens that are the likeliest there, and how far the
    others are from it.
    """
    equal, worst = 0, 0.0
    for prompt, own in zip(prompts, generated):
        logits = model(torch.tensor([prompt + own], device=model.device)).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(own, device=model.device)[:, None])[:, 0]
        gap = logits.max(-1).values - chosen
        equal += int((gap == 0).sum())
        worst = max(worst, (gap / logits.std(-1)).max().item())
    return {"tokens": sum(map(len, generated)), "equal": equal, "worst_gap": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    CONFIG._attn_implementation = "eager"
    model = DeepseekV3ForCausalLM(CONFIG).eval().to(options.device, torch.float16)
    prompts = [torch.randint(0, CONFIG.vocab_size, (n,)).tolist() for n in (5, 40, 17, 1)]
    generated = serve(model, prompts, options.tokens)
    said = check(model, prompts, generated)
    if options.json:
        print(json.dumps({**said, "generated": generated}))
    else:
        print(f"{said['equal']} of {said['tokens']} tokens are transformers' likeliest; the others are within "
              f"{said['worst_gap']:.3f} standard deviations of its logits")  # fmt: skip


if __name__ == "__main__":
    main()
