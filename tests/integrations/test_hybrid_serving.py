"""A Qwen3-Next model served by fi's linear attention and attention, beside transformers' forward pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

import fi_core
from fi_core.gdn_decode import gated_delta_rule_decode_pretranspose

pytestmark = pytest.mark.filterwarnings("ignore")
F = torch.nn.functional
SLOTS = 5  # of the pools of states; requests take slots 4, 3, 2
PROMPTS = (70, 5, 133)
# Tokens of each request in each step: prompts in chunks, beside requests that decode.
STEPS = ({0: 64, 1: 5}, {0: 6, 1: 1, 2: 100}, {0: 1, 1: 1, 2: 33}, *({0: 1, 1: 1, 2: 1} for _ in range(4)))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_of(device: str) -> Any:
    """Three layers of linear attention and one of attention; every token takes every expert, so nothing flips."""
    torch.manual_seed(1)
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4,
        num_experts_per_tok=4, moe_intermediate_size=64, shared_expert_intermediate_size=64, initializer_range=0.08,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval().to(device, torch.bfloat16)


class Server:
    """Continuous batching: a step takes rows of several requests, those of one token decode."""

    def __init__(self, model: Any, device: str) -> None:
        self.model, self.device = model, device
        self.layers = model.model.layers
        self.length: dict[int, int] = {}
        self.states, self.convs, self.kv = {}, {}, {}  # type: ignore[var-annotated]
        for i, layer in enumerate(self.layers):
            if hasattr(layer, "linear_attn"):
                net = layer.linear_attn
                shape = SLOTS, net.num_v_heads, net.head_v_dim, net.head_k_dim
                self.states[i] = torch.full(shape, float("nan"), device=device)
                self.convs[i] = torch.zeros(SLOTS, net.conv_dim, 3, dtype=torch.bfloat16, device=device)

    def step(self, tokens: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The logits of all new tokens of each request."""
        order = sorted(tokens, key=lambda r: (r not in self.length or len(tokens[r]) > 1, r))
        first = [self.length.get(r, 0) for r in order]
        for r in order:
            if r not in self.length:
                for i in self.states:
                    self.states[i][4 - r] = 0
        counts = [len(tokens[r]) for r in order]
        decodes = sum(n == 1 and begin > 0 for n, begin in zip(counts, first, strict=True))
        at = torch.cat([torch.arange(n) + begin for n, begin in zip(counts, first, strict=True)]).to(self.device)
        x = self.model.model.embed_tokens(torch.cat([tokens[r] for r in order]).to(self.device))
        angles = self.model.model.rotary_emb(x[None], at[None])
        for i, layer in enumerate(self.layers):
            mix = self._linear if i in self.states else self._attend
            x = x + mix(i, layer.input_layernorm(x), order, counts, decodes, angles)
            mlp = layer.mlp(layer.post_attention_layernorm(x)[None])
            x = x + (mlp[0] if isinstance(mlp, tuple) else mlp)[0]
        for r, n in zip(order, counts, strict=True):
            self.length[r] = self.length.get(r, 0) + n
        logits = self.model.lm_head(self.model.model.norm(x)).float()
        return dict(zip(order, logits.split(counts), strict=True))

    def _linear(
        self, i: int, x: torch.Tensor, order: list[int], counts: list[int], decodes: int, _: Any
    ) -> torch.Tensor:
        net, pool, convs = self.layers[i].linear_attn, self.states[i], self.convs[i]
        parts = net.fix_query_key_value_ordering(net.in_proj_qkvz(x[None]), net.in_proj_ba(x[None]))
        q, k, v, z, b, a = (part[0] for part in parts)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], -1)
        rows = []
        for r, own in zip(order, mixed.split(counts), strict=True):
            seen = torch.cat([convs[4 - r], own.T], 1)
            convs[4 - r] = seen[:, -3:]
            rows.append(F.silu(F.conv1d(seen[None], net.conv1d.weight, groups=net.conv_dim))[0].T)
        mixed = torch.cat(rows)
        heads, out = net.num_v_heads, torch.empty_like(v)
        q, k, v = mixed.split([net.key_dim, net.key_dim, net.value_dim], -1)  # strided: slices of a row
        q, k, v = (part.unflatten(-1, (-1, 128)) for part in (q, k, v))
        slots = torch.tensor([4 - r for r in order], dtype=torch.int32, device=self.device)
        if decodes:
            own = slice(0, decodes)
            gated_delta_rule_decode_pretranspose(
                *(part[own, None] for part in (q, k, v)), None, net.A_log.float(), a[own, None], net.dt_bias,
                b[own, None], output=out[own, None], initial_state=pool, initial_state_indices=slots[own],
            )  # fmt: skip
        if decodes < len(order):
            own = slice(decodes, None)
            g = torch.exp(-net.A_log.float().exp() * F.softplus(a[own].float() + net.dt_bias))
            ends = torch.tensor([0, *itertools.accumulate(counts[own])], device=self.device)
            fi_core.chunk_gated_delta_rule(
                q[own], k[own], v[own], g, b[own].float().sigmoid(), initial_state=pool, output_final_state=True,
                cu_seqlens=ends, use_qk_l2norm_in_kernel=True, output=out[own], output_state=pool,
                state_indices=slots[own],
            )  # fmt: skip
        out = net.norm(out.reshape(-1, 128), z.reshape(-1, 128)).view(-1, heads * 128)
        return net.out_proj(out)  # type: ignore[no-any-return]

    def _attend(
        self, i: int, x: torch.Tensor, order: list[int], counts: list[int], _: int, angles: Any
    ) -> torch.Tensor:
        net = self.layers[i].self_attn
        q, gate = net.q_proj(x).unflatten(-1, (-1, 128)).chunk(2, -1)
        q, k = net.q_norm(q), net.k_norm(net.k_proj(x).unflatten(-1, (-1, 64)))
        v = net.v_proj(x).unflatten(-1, (-1, 64))
        q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *angles)
        q, k = (part[0].transpose(0, 1).contiguous() for part in (q, k))
        outs = []
        for r, *own in zip(order, *(part.split(counts) for part in (q, k, v)), strict=True):
            old = self.kv.get((i, r), (k[:0], v[:0]))
            keys, values = self.kv[i, r] = torch.cat([old[0], own[1]]), torch.cat([old[1], own[2]])
            outs.append(fi_core.single_prefill_with_kv_cache(own[0], keys, values, causal=True))
        out = torch.cat(outs) * torch.sigmoid(gate)
        return net.o_proj(out.flatten(1))  # type: ignore[no-any-return]


@torch.inference_mode()
def test_served_logits_are_those_of_transformers(device: str) -> None:
    """Prompts in chunks and decoding in one batch: no farther from fp32 than transformers' own bfloat16."""
    model = model_of(device)
    server = Server(model, device)
    generator = torch.Generator().manual_seed(3)
    texts = {r: torch.randint(1, 256, (n,), generator=generator) for r, n in enumerate(PROMPTS)}
    logits: dict[int, list[torch.Tensor]] = {r: [] for r in texts}
    for step in STEPS:
        new = {}
        for r, n in step.items():
            begin = server.length.get(r, 0)
            if begin >= PROMPTS[r]:  # the likeliest token follows
                texts[r] = torch.cat([texts[r], logits[r][-1][-1].argmax()[None].cpu()])
            new[r] = texts[r][begin : begin + n]
        for r, own in server.step(new).items():
            logits[r].append(own)
    exact = model_of(device).float()
    for r, text in texts.items():
        served = torch.cat(logits[r])
        want, own = (m(text[None].to(device)).logits[0].float() for m in (exact, model))
        assert served.shape == want.shape
        error, allowed = ((x - want).norm() / want.norm() for x in (served, own))
        assert error <= 1.25 * allowed + 1e-3, f"request {r}: {error:.1e}, transformers {allowed:.1e}"
        near = (served.gather(1, want.argmax(1, True))[:, 0] - served.max(1).values).abs()
        assert near.max() <= 0.25 * want.std(), "the likeliest tokens are the same but for ties"
