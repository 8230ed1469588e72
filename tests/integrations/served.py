"""Models of transformers whose layers read and write the caches and the states of an engine: examples/serving.py."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

import fi_core
from fi_core.decode import trtllm_batch_decode_with_kv_cache
from fi_core.gdn_decode import gated_delta_rule_decode_pretranspose
from fi_core.mamba import causal_conv1d_fn, mamba_chunk_scan_combined_varlen, selective_state_update
from fi_core.mla import BatchMLAPagedAttentionWrapper
from fi_core.prefill import trtllm_batch_context_with_kv_cache

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serving

PAGE, NEW, SLOTS = 16, 12, 8  # tokens of a page and of an answer; states of requests
LATENT, ROPE = 512, 64
SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.08, "pad_token_id": 0, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}  # of 4
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {}, "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "GptOss": {"num_local_experts": 4, "sliding_window": 20, **EXPERTS},
    "DeepseekV3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": LATENT, "q_lora_rank": 64, "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": 32, "v_head_dim": 32, **EXPERTS,
    },
    "Qwen3Next": {
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4,
        "shared_expert_intermediate_size": 64, **EXPERTS,
    },
    "Mamba2": {"num_heads": 4, "state_size": 64, "n_groups": 2, "expand": 2, "chunk_size": 32},
}  # fmt: skip
STATES = ("Qwen3Next", "Mamba2")  # a step cannot be taken back
ROUNDED = ("DeepseekV3", *STATES)  # whose kernels take 16 bits


class Served:
    """A model of transformers, whose layers read and write the caches of an engine."""

    def __init__(self, family: str, device: str) -> None:
        torch.manual_seed(1)
        self.family = family
        is_exact = device == "cpu" and family not in ROUNDED
        options = SHAPE | MODELS[family]
        if not is_exact and "num_experts_per_tok" in options:
            # All of them. With 2 of 4, bfloat16 chooses others than fp32 in 1.5 % of the choices of GptOss and moves
            # the difference of two likely logits by up to 2.7 of their deviation (p99 0.84); with 4 of 4 by 0.13.
            options["num_experts_per_tok"] = 4
        config = getattr(transformers, f"{family}Config")(**options)
        self.dtype, self.device = torch.float32 if is_exact else torch.bfloat16, torch.device(device)
        self.net = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(device, self.dtype)
        for name, weight in self.net.named_parameters():
            if name.endswith("sinks"):
                weight.data.normal_(1, 1)
        self.layers, self.heads = self.net.base_model.layers, 4
        # An engine allocates 2 x kv_heads x head_dim numbers for a token.
        self.kv_heads, self.head_dim = (1, (LATENT + ROPE) // 2) if family == "DeepseekV3" else (2, 64)
        self.workspace = torch.empty(16 << 20, dtype=torch.uint8, device=device)
        self.slots = torch.arange(SLOTS, dtype=torch.int32, device=device)  # of the requests of a step
        self.states: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # inputs of convolutions, and states, by layer
        self.is_serving = False
        for module in self.net.modules():
            if type(module).__name__ in LAYERS:
                layer = LAYERS[type(module).__name__]
                module.forward = functools.partial(self.served, layer, module, module.forward)

    def served(self, layer: Any, module: Any, own: Any, hidden_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        if not self.is_serving:
            return own(hidden_states, *given, **named)
        return layer(self, module, hidden_states[0], *given, **named)

    def __call__(self, batch: serving.Batch, caches: list[torch.Tensor], attend: Any) -> torch.Tensor:
        """Logits of the last row of each request."""
        return self.rows(batch, caches)[batch.last_rows]

    def rows(self, batch: serving.Batch, caches: list[torch.Tensor]) -> torch.Tensor:
        self.batch, self.caches = batch, caches
        ends, pages = batch.indptr[1:], batch.indptr.diff()
        columns = torch.arange(int(pages.max()), device=self.device)
        at = (batch.indptr[:-1, None] + columns).clamp(max=len(batch.indices) - 1).long()
        self.tables, self.lengths = batch.indices[at], (pages - 1) * PAGE + batch.last_page_len
        self.starts = torch.cat([ends.new_zeros(1), batch.last_rows + 1]).int()
        self.begun = batch.positions[self.starts[:-1].long()] > 0
        self.latent: BatchMLAPagedAttentionWrapper | None = None
        AttentionInterface.register("engine", self.attention)
        AttentionMaskInterface.register("engine", lambda *args, **options: None)
        self.net.set_attn_implementation("engine")
        ids, positions = batch.tokens[None].long(), batch.positions[None].long()
        named = {} if self.family == "Mamba2" else {"position_ids": positions}
        self.is_serving = True
        try:
            return self.net(ids, use_cache=False, **named).logits[0]  # type: ignore[no-any-return]
        finally:
            self.is_serving = False

    def attention(
        self, module: Any, q: Any, k: Any, v: Any, mask: None, scaling: float = 1.0, sliding_window: int | None = None,
        s_aux: Any = None, **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        batch, cache = self.batch, self.caches[module.layer_idx]
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        k, v = (x.to(cache.dtype) for x in (k, v))
        fi_core.append_paged_kv_cache(
            k, v, batch.owners, batch.positions, cache, batch.indices, batch.indptr, batch.last_page_len
        )
        given: dict[str, Any] = {
            "bmm1_scale": scaling, "bmm2_scale": 1.0, "window_left": (sliding_window or 0) - 1, "kv_layout": "NHD",
            "sinks": None if s_aux is None else s_aux.float(),
        }  # fmt: skip
        count, longest = len(self.lengths), self.tables.shape[1] * PAGE
        where = q, cache, self.workspace, self.tables, self.lengths
        if len(q) == count:
            return trtllm_batch_decode_with_kv_cache(*where, longest, **given)[None], None  # type: ignore[index]
        starts = {"cum_seq_lens_q": self.starts, "cum_seq_lens_kv": self.starts}
        out = trtllm_batch_context_with_kv_cache(*where, longest, longest, batch_size=count, **starts, **given)
        return out[None], None  # type: ignore[index]

    @torch.inference_mode()
    def wanted(self, prompt: list[int], new: int = NEW, **options: Any) -> list[int]:
        """transformers' tokens."""
        self.net.set_attn_implementation("eager")
        ids = torch.tensor([prompt], device=self.device)
        mask = torch.ones_like(ids)
        out = self.net.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits of the next token."""
        self.net.set_attn_implementation("eager")
        return self.net(torch.tensor([tokens], device=self.device)).logits[0, -1].float()  # type: ignore[no-any-return]


class Engine(serving.Engine):
    """The engine of the example, whose model needs no plan; allowed: the tokens of an answer."""

    allowed: list[int] | None = None

    def __init__(self, model: Served, scheduler: serving.Scheduler) -> None:
        super().__init__(model, scheduler)  # type: ignore[arg-type]
        self.served, self.slots = model, dict[serving.Request, int]()

    def slot(self, request: serving.Request) -> int:
        """Where the states of a request lie."""
        return self.slots.setdefault(request, SLOTS - 1 - len(self.slots))

    def share(self, request: serving.Request, other: serving.Request) -> None:
        """Gives the other one the states after the tokens of a request."""
        for pools in self.served.states.values():
            for pool in pools:
                pool[self.slot(other)] = pool[self.slot(request)]

    def batch(self, chunks: list[serving.Chunk]) -> serving.Batch:
        slots = [self.slot(chunk.request) for chunk in chunks]
        self.served.slots = torch.tensor(slots, dtype=torch.int32, device=self.served.device)
        return super().batch(chunks)

    def plan(self, batch: serving.Batch, chunks: list[serving.Chunk], alone: int) -> Any:
        return None

    def sample(self, logits: torch.Tensor, rows: list[int], requests: list[serving.Request]) -> list[int]:
        if self.allowed is not None:
            kept = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
            kept[self.allowed] = True
            logits = logits.masked_fill(~kept, -torch.inf)
        return super().sample(logits, rows, requests)


def mixed_states(served: Served, module: Any, rows: torch.Tensor, bias: Any, shape: tuple[int, ...]) -> Any:
    """The convolution of rows, the states of the layer, and how many requests decode a token, which come first."""
    if module not in served.states:
        inputs = torch.full((SLOTS, rows.shape[1], 3), torch.nan, dtype=rows.dtype, device=rows.device)
        served.states[module] = inputs, torch.full((SLOTS, *shape), torch.nan, device=rows.device)
    inputs, states = served.states[module]
    slots = served.slots[: len(served.begun)]
    weight = module.conv1d.weight.squeeze(1)
    rows = causal_conv1d_fn(rows.T, weight, bias, inputs, served.starts, slots, served.begun, "silu").T
    states[slots[~served.begun].long()] = 0
    alone = (served.starts.diff() == 1) & served.begun
    return rows, states, slots, int(alone.int().cumprod(0).sum())


def gated_delta_net(served: Served, net: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Of Qwen3-Next."""
    parts = net.fix_query_key_value_ordering(net.in_proj_qkvz(x[None]), net.in_proj_ba(x[None]))
    q, k, v, z, b, a = (part[0] for part in parts)
    shape = net.num_v_heads, net.head_v_dim, net.head_k_dim
    rows, states, slots, decodes = mixed_states(
        served, net, torch.cat([part.flatten(1) for part in (q, k, v)], -1), None, shape
    )
    out = torch.empty_like(v)
    q, k, v = (
        part.unflatten(-1, (-1, dim))
        for part, dim in zip(
            rows.split([net.key_dim, net.key_dim, net.value_dim], -1), (net.head_k_dim, net.head_k_dim, net.head_v_dim)
        )
    )
    own = slice(0, decodes)
    if decodes:
        gated_delta_rule_decode_pretranspose(
            *(part[own, None] for part in (q, k, v)), None, net.A_log.float(), a[own, None], net.dt_bias,
            b[own, None], output=out[own, None], initial_state=states, initial_state_indices=slots[own],
        )  # fmt: skip
    if decodes < len(slots):
        own = slice(decodes, None)
        g = torch.exp(-net.A_log.float().exp() * torch.nn.functional.softplus(a[own].float() + net.dt_bias))
        fi_core.chunk_gated_delta_rule(
            q[own], k[own], v[own], g, b[own].float().sigmoid(), initial_state=states, output_final_state=True,
            cu_seqlens=served.starts[decodes:] - decodes, use_qk_l2norm_in_kernel=True, output=out[own],
            output_state=states, state_indices=slots[own],
        )  # fmt: skip
    width = net.head_v_dim
    return net.out_proj(net.norm(out.reshape(-1, width), z.reshape(-1, width)).view(len(x), -1))[None]  # type: ignore[no-any-return]


def mamba(served: Served, net: Any, x: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
    """A mixer of Mamba-2."""
    inner, groups, size = net.intermediate_size, net.n_groups, net.ssm_state_size
    gate, rows, dt = net.in_proj(x).split([inner, net.conv_dim, net.num_heads], -1)
    shape = net.num_heads, net.head_dim, size
    rows, states, slots, decodes = mixed_states(served, net, rows, net.conv1d.bias, shape)
    v, b, c = rows.split([inner, groups * size, groups * size], -1)
    v, b, c = v.unflatten(-1, (net.num_heads, -1)), *(part.unflatten(-1, (groups, -1)) for part in (b, c))
    v, b, c = v.contiguous(), b.contiguous(), c.contiguous()
    decay, out = -net.A_log.float().exp(), torch.empty_like(v)
    own = slice(0, decodes)
    if decodes:
        wide = decay[:, None, None].expand(*shape)
        selective_state_update(
            states, v[own], dt[own, :, None].expand(-1, -1, net.head_dim), wide, b[own], c[own],
            net.D[:, None].expand(-1, net.head_dim), dt_bias=net.dt_bias[:, None].expand(-1, net.head_dim),
            dt_softplus=True, state_batch_indices=slots[own], out=out[own],
        )  # fmt: skip
    if decodes < len(slots):
        own, of_states = slice(decodes, None), slots[decodes:].long()
        starts = served.starts[decodes:] - decodes
        after = mamba_chunk_scan_combined_varlen(
            v[own], dt[own], decay, b[own], c[own], net.chunk_size, starts, starts,
            torch.arange(len(of_states), device=x.device), torch.zeros_like(starts), out[own], D=net.D,
            dt_bias=net.dt_bias, initial_states=states[of_states], dt_softplus=True, state_dtype=torch.float32,
        )  # fmt: skip
        states[of_states] = after
    return net.out_proj(net.norm(out.flatten(1), gate))[None]  # type: ignore[no-any-return]


def latent_attention(
    served: Served, net: Any, x: torch.Tensor, position_embeddings: Any, *given: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Of DeepSeek-V3, with the projection of keys and values in that of the queries and behind the attention."""
    batch, heads, cache = served.batch, net.num_heads, served.caches[net.layer_idx].view(-1, PAGE, LATENT + ROPE)
    q = net.q_b_proj(net.q_a_layernorm(net.q_a_proj(x))).unflatten(-1, (heads, -1))
    q, q_rope = q.split([net.qk_nope_head_dim, ROPE], -1)
    latent, k_rope = net.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
    latent = net.kv_a_layernorm(latent)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(
        q_rope.transpose(0, 1)[None], k_rope[None, None], *position_embeddings
    )
    parts = cache[..., :LATENT], cache[..., LATENT:]
    fi_core.append_paged_mla_kv_cache(
        latent.to(cache.dtype), k_rope[0, 0].to(cache.dtype).contiguous(), batch.owners, batch.positions, *parts,
        batch.indices, batch.indptr, batch.last_page_len,
    )  # fmt: skip
    if served.latent is None:
        served.latent = BatchMLAPagedAttentionWrapper(served.workspace)
        served.latent.plan(
            served.starts, batch.indptr, batch.indices, served.lengths.int(), heads, LATENT, ROPE, PAGE, True,
            net.scaling, q.dtype, cache.dtype,
        )  # fmt: skip
    keys, values = net.kv_b_proj.weight.unflatten(0, (heads, -1)).split([net.qk_nope_head_dim, net.v_head_dim], 1)
    scales: dict[str, Any] = {"ckv_scale": 1.0, "kpe_scale": 1.0} if cache.dtype.itemsize == 1 else {}
    rotated = q_rope[0].transpose(0, 1).contiguous()
    out = served.latent.run(torch.einsum("thn,hnl->thl", q, keys), rotated, *parts, **scales)
    return net.o_proj(torch.einsum("thl,hvl->thv", out, values).flatten(1))[None], None


LAYERS = {
    "DeepseekV3Attention": latent_attention, "Qwen3NextGatedDeltaNet": gated_delta_net, "Mamba2Mixer": mamba,
}  # fmt: skip
