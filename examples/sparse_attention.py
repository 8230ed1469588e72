"""Serves a small random model of DeepSeek-V3.2's architecture: an fp8 indexer chooses the keys of each token, and MLA
attends to these alone. Compares every layer with transformers' torch code, and tokens with dense attention.

    python examples/sparse_attention.py [--device cuda] [--tokens 8] [--top-k 16] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from fi_core.dsa_indexer import fp8_indexer_topk, fp8_paged_indexer_topk
from fi_core.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache

LATENT, ROPE, NOPE, VALUE, PAGE = 512, 64, 128, 128, 16  # the widths of DeepSeek-V3.2; tokens of a page
INDEX_HEADS, INDEX_DIM = 16, 128
# No layer has experts: their choice turns the rounding of a bf16 cache into other tokens.
SHAPE: dict[str, Any] = dict(  # noqa: C408
    vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=8, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    n_group=2, topk_group=1, first_k_dense_replace=2, kv_lora_rank=LATENT, q_lora_rank=128, qk_rope_head_dim=ROPE,
    qk_nope_head_dim=NOPE, v_head_dim=VALUE, index_n_heads=INDEX_HEADS, index_head_dim=INDEX_DIM,
    max_position_embeddings=1024, initializer_range=0.08, attn_implementation="eager",
)  # fmt: skip


def e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and a scale of each row."""
    scale = x.abs().amax(-1).clamp(min=1e-6) / 448
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


def index_inputs(indexer: Any, hidden: torch.Tensor, q_resid: torch.Tensor, rope: Any) -> tuple[torch.Tensor, ...]:
    """The indexer's queries [tokens, heads, dim], keys [tokens, dim] and weights of heads [tokens, heads]."""
    q = indexer.wq_b(q_resid).view(1, -1, INDEX_HEADS, INDEX_DIM)
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    turned = apply_rotary_pos_emb(q[..., :ROPE], k[..., :ROPE], *rope, unsqueeze_dim=2)
    q, k = (torch.cat([a, x[..., ROPE:]], -1)[0] for a, x in zip(turned, (q, k)))
    weights = indexer.weights_proj(hidden)[0].float() * INDEX_HEADS**-0.5 * indexer.softmax_scale
    return q.float(), k[:, 0].float(), weights


class TorchIndexer(torch.nn.Module):
    """transformers' indexer with queries and keys in fp8, as the model was trained; it keeps what it chose."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, self.chosen = own, torch.empty(0)

    def forward(
        self, hidden: torch.Tensor, q_resid: torch.Tensor, rope: Any, mask: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        q, k, weights = index_inputs(self.own, hidden, q_resid, rope)
        (q, q_scale), (k, k_scale) = e4m3(q), e4m3(k)
        scores = (q.float() * q_scale[..., None]) @ (k.float() * k_scale[:, None]).T
        logits = (scores.relu() * weights[..., None]).sum(1) + mask[0]
        self.chosen = logits.topk(min(self.own.index_topk, len(k)), -1).indices[None]
        return self.chosen


class Batch:
    """The caches of all layers, the pages of each request, and the tables of a step."""

    def __init__(self, model: Any, requests: int, capacity: int) -> None:
        each, device, layers = -(-capacity // PAGE), model.device, model.config.num_hidden_layers
        self.latents = torch.zeros(layers, requests * each, PAGE, LATENT + ROPE, dtype=torch.bfloat16, device=device)
        # A page of the indexer's cache: its values, then its scales.
        size = PAGE * (INDEX_DIM + 4)
        self.keys = torch.zeros(layers, requests * each, size, dtype=torch.uint8, device=device)
        self.pages = torch.randperm(requests * each, dtype=torch.int32).view(requests, each).to(device)
        self.lengths, self.rotary, self.device = [0] * requests, model.model.rotary_emb, device
        self.position_of = torch.zeros(requests * each * PAGE, dtype=torch.long, device=device)
        self.rows, self.equal, self.worst = 0, 0, 0.0  # of the comparison

    def plan(self, tokens: list[int]) -> torch.Tensor:
        """Makes the tables of a step that appends so many tokens to each request; returns their positions."""
        before = self.lengths
        self.lengths = [n + more for n, more in zip(before, tokens)]
        self.is_prefill, self.tokens = not any(before), tokens
        ints = {"dtype": torch.int32, "device": self.device}
        flat = [range(n, n + more) for n, more in zip(before, tokens)]
        positions = torch.tensor(list(itertools.chain(*flat)), device=self.device)
        owner = torch.arange(len(tokens), device=self.device).repeat_interleave(
            torch.tensor(tokens, device=self.device)
        )
        self.page, self.offset = self.pages[owner, positions // PAGE].long(), positions % PAGE
        self.position_of[self.page * PAGE + self.offset] = positions
        starts = torch.tensor([0, *itertools.accumulate(tokens)][:-1], **ints)
        self.starts, self.kv_len = starts[owner], torch.tensor(self.lengths, **ints)
        self.ends = torch.arange(1, len(positions) + 1, **ints)
        return positions


class Attention(torch.nn.Module):
    """Replaces the attention of a layer: all tokens of a step lie behind each other in one row."""

    def __init__(self, own: Any, batch: Batch, layer: int) -> None:
        super().__init__()
        self.own, self.batch, self.layer = own, batch, layer
        own.indexer = TorchIndexer(own.indexer)
        # [heads, 128 + 128, 512]: the weights that make keys and values of a latent row
        weight = own.kv_b_proj.weight.view(-1, NOPE + VALUE, LATENT)
        self.to_key, self.to_value = weight[:, :NOPE], weight[:, NOPE:]
        self.texts = [torch.empty(0, own.hidden_size, device=batch.device) for _ in batch.lengths]

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> tuple[torch.Tensor, None]:
        own, tokens = self.own, hidden_states.shape[1]
        q_resid = own.q_a_layernorm(own.q_a_proj(hidden_states))
        q = own.q_b_proj(q_resid).view(1, tokens, -1, NOPE + ROPE).transpose(1, 2)
        ckv, kpe = own.kv_a_proj_with_mqa(hidden_states).split([LATENT, ROPE], -1)
        ckv = own.kv_a_layernorm(ckv)
        q_pe, kpe = apply_rotary_pos_emb_interleave(q[..., NOPE:], kpe.unsqueeze(1), *position_embeddings)
        q_nope, q_pe = q[0, ..., :NOPE].transpose(0, 1), q_pe[0].transpose(0, 1)  # [tokens, heads, width]
        absorbed = torch.einsum("thn,hnc->thc", q_nope, self.to_key)
        query = torch.cat([absorbed, q_pe], -1).bfloat16()
        latents = torch.cat([ckv[0], kpe[0, 0]], -1).bfloat16()
        chosen, out = self._attend(query, latents, hidden_states, q_resid, position_embeddings)
        result = own.o_proj(torch.einsum("thc,hvc->thv", out.to(q.dtype), self.to_value).reshape(1, tokens, -1))
        self._compare(hidden_states[0], chosen, result[0])
        return result, None

    def _attend(
        self, query: torch.Tensor, latents: torch.Tensor, hidden: torch.Tensor, q_resid: torch.Tensor, rope: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions that each token chose, its attention to them in the latent space); stores the step's keys."""
        batch, indexer = self.batch, self.own.indexer.own
        index_q, index_k, weights = index_inputs(indexer, hidden, q_resid, rope)
        (index_q, q_scale), (index_k, k_scale) = e4m3(index_q), e4m3(index_k)
        weights, top_k, scale = weights * q_scale, indexer.index_topk, self.own.scaling
        pool, keys = batch.latents[self.layer], batch.keys[self.layer]
        pool[batch.page, batch.offset] = latents
        values, scales = keys[:, : PAGE * INDEX_DIM], keys[:, PAGE * INDEX_DIM :].view(torch.float32)
        values.view(-1, PAGE, INDEX_DIM)[batch.page, batch.offset] = index_k.view(torch.uint8)
        scales[batch.page, batch.offset] = k_scale
        if batch.is_prefill:
            rows = fp8_indexer_topk(index_q, (index_k, k_scale), weights, batch.starts, batch.ends, top_k)
            out, _, _ = flash_mla_sparse_fwd(query, latents.unsqueeze(1), rows.unsqueeze(1), scale)
            return torch.where(rows < 0, rows, rows - batch.starts[:, None]), out
        slots = fp8_paged_indexer_topk(
            index_q.unsqueeze(1), keys.view(-1, PAGE, 1, INDEX_DIM + 4), weights, batch.kv_len, batch.pages, top_k,
            output="slot",
        )  # fmt: skip
        out, _ = flash_mla_with_kvcache(
            query.unsqueeze(1), pool.unsqueeze(2), None, None, LATENT, None, softmax_scale=scale,
            indices=slots.unsqueeze(1),
        )  # fmt: skip
        return torch.where(slots < 0, slots, batch.position_of[slots.long()].int()), out[:, 0]

    def _compare(self, hidden: torch.Tensor, chosen: torch.Tensor, result: torch.Tensor) -> None:
        """With transformers' attention over the whole text of each request."""
        batch, bounds = self.batch, [0, *itertools.accumulate(self.batch.tokens)]
        for r, (first, end) in enumerate(itertools.pairwise(bounds)):
            text = self.texts[r] = torch.cat([self.texts[r], hidden[first:end]])
            length = len(text)
            mask = torch.full((length, length), float("-inf"), device=text.device).triu(1)[None, None]
            rope = batch.rotary(text, torch.arange(length, device=text.device)[None])
            want = self.own(text[None], rope, mask)[0][0, first - end :]
            gap = (result[first:end] - want).norm(dim=-1) / want.norm(dim=-1)
            batch.worst = max(batch.worst, gap.max().item())
            others = self.own.indexer.chosen[0, first - end :].tolist()
            for row, own, other in zip(range(length + first - end, length), chosen[first:end].tolist(), others):
                batch.rows += 1
                batch.equal += {x for x in own if x >= 0} == {x for x in other if x <= row}


@torch.inference_mode()
def serve(model: Any, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], dict[str, Any]]:
    """The tokens that follow each prompt, greedily; and how the layers compare with transformers'."""
    batch = Batch(model, len(prompts), max(map(len, prompts)) + tokens)
    for layer, block in enumerate(model.model.layers):
        block.self_attn = Attention(block.self_attn, batch, layer)
    generated: list[list[int]] = [[] for _ in prompts]
    step = [list(p) for p in prompts]
    for _ in range(tokens):
        positions = batch.plan([len(x) for x in step])
        ids = torch.tensor([list(itertools.chain(*step))], device=model.device)
        hidden = model.model(input_ids=ids, position_ids=positions[None], use_cache=False).last_hidden_state[0]
        ends = torch.tensor([len(x) for x in step]).cumsum(0) - 1
        step = [[int(x)] for x in model.lm_head(hidden[ends.to(model.device)]).argmax(-1)]
        for own, new in zip(generated, step):
            own.extend(new)
    for block in model.model.layers:
        block.self_attn = block.self_attn.own
        block.self_attn.indexer = block.self_attn.indexer.own
    return generated, {"rows": batch.rows, "equal": batch.equal, "worst_error": batch.worst}


@torch.inference_mode()
def dense_gap(model: Any, prompts: list[list[int]], generated: list[list[int]]) -> float:
    """How far tokens are from the likeliest of transformers' model, in standard deviations of its logits."""
    worst = 0.0
    for prompt, own in zip(prompts, generated):
        logits = model(torch.tensor([prompt + own], device=model.device)).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(own, device=model.device)[:, None])[:, 0]
        worst = max(worst, ((logits.max(-1).values - chosen) / logits.std(-1)).max().item())
    return worst


def compare(device: str, tokens: int, top_k: int) -> dict[str, Any]:
    """Serves the prompts with all keys chosen, as many as the longest text has, and with top_k of them."""
    lengths, said = (5, 40, 17, 1), dict[str, Any]()
    for name, chosen in (("all", max(lengths) + tokens), ("few", top_k)):
        torch.manual_seed(0)
        model = DeepseekV32ForCausalLM(DeepseekV32Config(**SHAPE, index_topk=chosen)).eval().to(device)
        prompts = [torch.randint(0, 512, (n,)).tolist() for n in lengths]
        generated, found = serve(model, prompts, tokens)
        said[name] = {**found, "top_k": chosen, "generated": generated}
        if name == "all":
            said[name]["gap"] = dense_gap(model, prompts, generated)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    said = compare(options.device, options.tokens, options.top_k)
    if options.json:
        print(json.dumps(said))
        return
    for one in said.values():
        print(
            f"top-k {one['top_k']}: {one['equal']} of {one['rows']} rows chose the keys that torch chooses; outputs of "
            f"layers differ by {one['worst_error']:.1e}"
        )
    print(f"with all keys chosen, tokens are within {said['all']['gap']:.3f} standard deviations of dense attention's")


if __name__ == "__main__":
    main()
