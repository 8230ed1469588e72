"""Serves models of transformers through fi's operators, with the engine of serving.py and a prefix cache.

    python examples/transformers_serving.py [--families NAMES] [--device cpu|cuda] [--drafts N] [--json]

The modules of a model run as transformers wrote them, but for those that keep something between tokens: attention
reads and writes pages by their tables, with a latent cache in DeepSeek-V3; layers of Mamba-2 and gated delta nets keep
a state for each token that may be the last one. In 16 bits the experts are fi's.

Small models with random weights serve requests that begin with the same tokens, with guesses of which half are wrong. A
row shows how many tokens are the likeliest by transformers' own layers, how far the others are from that, in deviations
of the logits, and whether all logits have the same bits without prefixes and guesses (in 16 bits; fp32 is not batch
invariant).
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import transformers
from prefix_cache import PrefixScheduler, StateEngine, Step
from serving import Batch, Request, product
from torch.nn.functional import linear, softplus
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

import fi_core
import fi_core.integrations.transformers as fi
from fi_core.decode import trtllm_batch_decode_with_kv_cache
from fi_core.gdn_decode import gated_delta_rule_mtp
from fi_core.mamba import causal_conv1d_fn, causal_conv1d_update, selective_state_update, ssd_combined_fwd
from fi_core.mla import BatchMLAPagedAttentionWrapper
from fi_core.prefill import trtllm_batch_context_with_kv_cache

PAGE = 16  # tokens
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
    "GptOss-mxfp4": {"num_local_experts": 4, "sliding_window": 20, **EXPERTS},
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
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        "num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2,
        "chunk_size": 32,
    },
}  # fmt: skip
STATES = ("Qwen3Next", "Mamba2", "NemotronH")
ROUNDED = ("DeepseekV3", "GptOss-mxfp4", *STATES)  # whose kernels take 16 bits


class Products(TorchFunctionMode):
    """Has fi multiply matrices of 16 bits: rows have the same bits in any batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear or args[0].dtype.itemsize != 2:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        out = product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return out if not bias or bias[0] is None else out + bias[0]


class Model:
    """A model of transformers with random weights, whose layers read and write the caches of an engine."""

    step: Step

    def __init__(self, family: str, device: str) -> None:
        torch.manual_seed(1)
        self.family = family
        is_exact = device == "cpu" and family not in ROUNDED
        options = SHAPE | MODELS[family]
        if not is_exact and "num_experts_per_tok" in options:
            # All of them. With 2 of 4, bfloat16 chooses others than fp32 in 1.5 % of the choices of GptOss and moves
            # the difference of two likely logits by up to 2.7 of their deviation (p99 0.84); with 4 of 4 by 0.13.
            options["num_experts_per_tok"] = 4
        name, _, weights = family.partition("-")
        config = getattr(transformers, f"{name}Config")(**options)
        self.dtype, self.device = torch.float32 if is_exact else torch.bfloat16, torch.device(device)
        self.net = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(device, self.dtype)
        for name, weight in self.net.named_parameters():
            if name.endswith("sinks"):
                weight.data.normal_(1, 1)
        self.layers, self.multiply = self.net.base_model.layers, linear
        # An engine allocates 2 x kv_heads x head_dim numbers for a token.
        self.kv_heads, self.head_dim = (1, (LATENT + ROPE) // 2) if family == "DeepseekV3" else (2, 64)
        self.workspace = torch.empty(16 << 20, dtype=torch.uint8, device=device)
        self.references: dict[torch.dtype, Any] = {}
        AttentionInterface.register("engine", self.attention)
        AttentionMaskInterface.register("engine", lambda *args, **options: None)
        self.net.set_attn_implementation("engine")
        # The rotary function is shared with the references; products of MLPs are for Products.
        fi.replace(self.net, rotary=False, mlps=False)
        if "num_experts_per_tok" in options and not is_exact:  # fi's experts take 16 bits
            fi.register_experts()
            self.net.set_experts_implementation("fi")
        for module in self.net.modules():
            if weights and type(module).__name__ == "GptOssExperts":
                module.forward = FewBits(module)
            if type(module).__name__ in LAYERS:
                module.forward = functools.partial(self.forward, LAYERS[type(module).__name__], module)

    def forward(self, layer: Any, module: Any, hidden_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        return layer(self, module, hidden_states[0], *given, **named)

    def reset(self, slots: int) -> None:
        """Forgets all states; there are so many of a layer from now on."""
        self.slots = slots
        self.pools: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # inputs of convolutions, and states, by layer

    def __call__(self, batch: Batch, caches: list[torch.Tensor], attend: Any) -> torch.Tensor:
        """Logits `[outputs, vocab]` after the rows `batch.outputs`."""
        self.batch, self.caches = batch, caches
        ends, pages = batch.indptr[1:], batch.indptr.diff()
        columns = torch.arange(int(pages.max()), device=self.device)
        at = (batch.indptr[:-1, None] + columns).clamp(max=len(batch.indices) - 1).long()
        self.tables, self.lengths = batch.indices[at], (pages - 1) * PAGE + batch.last_page_len
        self.starts = torch.cat([ends.new_zeros(1), batch.last_rows + 1]).int()
        self.latent: BatchMLAPagedAttentionWrapper | None = None
        ids, positions = batch.tokens[None].long(), batch.positions[None].long()
        named = {} if self.family == "Mamba2" else {"position_ids": positions}
        AttentionInterface.register("engine", self.attention)
        with Products() if self.multiply is product else nullcontext():
            logits = self.net(ids, use_cache=False, **named).logits[0]
        return logits[batch.outputs]  # type: ignore[no-any-return]

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
        if len(q) == count and self.multiply is linear:  # decode adds in another order
            return trtllm_batch_decode_with_kv_cache(*where, longest, **given)[None], None  # type: ignore[index]
        starts = {"cum_seq_lens_q": self.starts, "cum_seq_lens_kv": self.starts}
        out = trtllm_batch_context_with_kv_cache(*where, longest, longest, batch_size=count, **starts, **given)
        return out[None], None  # type: ignore[index]

    @torch.inference_mode()
    def wanted(self, request: Request, dtype: torch.dtype | None = None) -> torch.Tensor:
        """transformers' logits before each generated token, from one pass of its own layers over the whole text."""
        dtype = dtype or self.dtype
        if dtype not in self.references:
            config = copy.deepcopy(self.net.config)
            config._attn_implementation = config._experts_implementation = "eager"
            net = self.references[dtype] = type(self.net)(config).eval().to(self.device)
            net.load_state_dict(self.net.state_dict())
            net.to(dtype)
        ids = torch.tensor([request.tokens[:-1]], device=self.device)
        logits = self.references[dtype](ids, use_cache=False).logits
        return logits[0, len(request.prompt) - 1 :].float()  # type: ignore[no-any-return]


def gaps(request: Request, logits: torch.Tensor) -> torch.Tensor:
    """How far each generated token is from the likeliest one, in deviations of the logits."""
    chosen = logits.gather(1, torch.tensor(request.generated, device=logits.device)[:, None])[:, 0]
    return (logits.max(1).values - chosen) / logits[logits.isfinite()].std()


class Rows(NamedTuple):
    """Of a layer with states: those of requests that decode come first, then chunks of prompts."""

    decodes: slice
    prompts: slice
    decode_starts: torch.Tensor  # [decodes + 1]
    prompt_starts: torch.Tensor  # [prompts + 1]


def convolve(model: Model, net: Any, rows: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, Rows, Any]:
    """The short convolution of rows; where they lie, and the pool of states of a layer."""
    step, width, bias = model.step, model.step.width, net.conv1d.bias
    if net not in model.pools:
        inputs = rows.new_full((model.slots, rows.shape[1], net.conv1d.kernel_size[0] - 2 + width), torch.nan)
        states = torch.full((model.slots, *shape), torch.nan, device=rows.device)
        inputs[step.first] = states[step.first] = 0
        model.pools[net] = inputs, states
    inputs, states = model.pools[net]
    count, at = step.decodes, step.decodes * width
    where = Rows(slice(at), slice(at, None), model.starts[: count + 1], model.starts[count:] - at)
    weight, out = net.conv1d.weight.squeeze(1), torch.empty_like(rows)
    if count:
        # A window of inputs moves on by what is accepted: it is in one slot, whichever token it ends at.
        out[where.decodes] = causal_conv1d_update(
            rows[where.decodes], inputs, weight, bias, "silu",
            torch.stack([step.after[:count, 0], step.own[:count, 0]], 1), step.accepted[:count], where.decode_starts,
            width, initial_state_idx=step.zeros[:count], block_idx_last_scheduled_token=step.ones[:count],
        )  # fmt: skip
    if count < len(step.read):
        out[where.prompts] = causal_conv1d_fn(
            rows[where.prompts].T, weight, bias, inputs, where.prompt_starts,
            torch.stack([step.read[count:], step.write[count:]], 1), step.ones[count:].bool(), "silu",
            initial_state_idx=step.zeros[count:], block_idx_last_scheduled_token=step.ones[count:],
        ).T  # fmt: skip
    return out, where, states


def gated_delta_net(model: Model, net: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Of Qwen3-Next."""
    parts = net.fix_query_key_value_ordering(net.in_proj_qkvz(x[None]), net.in_proj_ba(x[None]))
    q, k, v, z, b, a = (part[0] for part in parts)
    step, count, shape = model.step, model.step.decodes, (net.num_v_heads, net.head_v_dim, net.head_k_dim)
    rows, where, states = convolve(model, net, torch.cat([part.flatten(1) for part in (q, k, v)], -1), shape)
    out = torch.empty_like(v)
    q, k, v = rows.split([net.key_dim, net.key_dim, net.value_dim], -1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip((q, k, v), (*shape[2:] * 2, shape[1])))
    if count:
        each = (part[where.decodes].unflatten(0, (count, -1)) for part in (q, k, v, a, b, out))
        q_own, k_own, v_own, a_own, b_own, out_own = each
        gated_delta_rule_mtp(
            q_own, k_own, v_own, states, step.read[:count], net.A_log.float(), a_own, net.dt_bias, b_own,
            output=out_own, ssm_state_indices=step.own[:count], disable_state_update=False,
        )  # fmt: skip
    if count < len(step.read):
        own = where.prompts
        # In fp64: torch computes the last elements of a tensor in another way, which must not show in the bits.
        g = torch.exp(-net.A_log.double().exp() * softplus(a[own].double() + net.dt_bias)).float()
        beta = b[own].double().sigmoid().float()
        fi_core.chunk_gated_delta_rule(
            q[own], k[own], v[own], g, beta, initial_state=states, output_final_state=True,
            cu_seqlens=where.prompt_starts, use_qk_l2norm_in_kernel=True, output=out[own], output_state=states,
            state_indices=step.read[count:], output_state_indices=step.write[count:],
        )  # fmt: skip
    width = net.head_v_dim
    return net.out_proj(net.norm(out.reshape(-1, width), z.reshape(-1, width)).view(len(x), -1))[None]  # type: ignore[no-any-return]


def mamba(model: Model, net: Any, x: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
    """A mixer of Mamba-2."""
    inner, groups, size = net.intermediate_size, net.n_groups, net.ssm_state_size
    gate, rows, dt = net.in_proj(x).split([inner, inner + 2 * groups * size, net.num_heads], -1)
    step, count, shape = model.step, model.step.decodes, (net.num_heads, net.head_dim, size)
    rows, where, states = convolve(model, net, rows, shape)
    v, b, c = rows.split([inner, groups * size, groups * size], -1)
    v, b, c = v.unflatten(-1, (net.num_heads, -1)), *(part.unflatten(-1, (groups, -1)) for part in (b, c))
    v, b, c = v.contiguous(), b.contiguous(), c.contiguous()
    decay, out = -net.A_log.float().exp(), torch.empty_like(v)
    if count:
        own = where.decodes
        selective_state_update(
            states, v[own], dt[own, :, None].expand(-1, -1, net.head_dim), decay[:, None, None].expand(*shape), b[own],
            c[own], net.D[:, None].expand(-1, net.head_dim), dt_bias=net.dt_bias[:, None].expand(-1, net.head_dim),
            dt_softplus=True, state_batch_indices=step.after[:count], dst_state_batch_indices=step.own[:count],
            cu_seqlens=where.decode_starts, num_accepted_tokens=step.accepted[:count], out=out[own],
        )  # fmt: skip
    if count < len(step.read):
        own = where.prompts
        ssd_combined_fwd(
            v[None, own], dt[None, own], decay, b[None, own], c[None, own], net.D, dt_bias=net.dt_bias,
            dt_softplus=True, dt_limit=net.time_step_limit, initial_states=states, out=out[None, own],
            cu_seqlens=where.prompt_starts, initial_state_indices=step.read[count:], final_states=states,
            final_state_indices=step.write[count:],
        )  # fmt: skip
    return net.out_proj(net.norm(out.flatten(1), gate))[None]  # type: ignore[no-any-return]


def gated_attention(
    model: Model, net: Any, x: torch.Tensor, position_embeddings: Any, *given: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Of Qwen3-Next, which rotates a quarter of the channels of a head."""
    q, gate = net.q_proj(x).unflatten(-1, (-1, 2 * net.head_dim)).chunk(2, -1)
    k, v = (projection(x).unflatten(-1, (-1, net.head_dim)) for projection in (net.k_proj, net.v_proj))
    q, k = net.q_norm(q), net.k_norm(k)
    cos_sin = torch.cat([table[0, :, : table.shape[2] // 2] for table in position_embeddings], 1).float()
    rows = torch.arange(len(x), device=x.device)  # whose angles are in the tables
    fi_core.apply_rope_with_cos_sin_cache_inplace(rows, q, k, net.head_dim, cos_sin)
    out, _ = model.attention(net, *(part.transpose(0, 1)[None] for part in (q, k, v)), None, net.scaling)
    return net.o_proj((out[0] * torch.sigmoid(gate)).flatten(1))[None], None


def latent_attention(
    model: Model, net: Any, x: torch.Tensor, position_embeddings: Any, *given: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Of DeepSeek-V3, with the projection of keys and values in that of the queries and behind the attention."""
    batch, heads, cache = model.batch, net.num_heads, model.caches[net.layer_idx].view(-1, PAGE, LATENT + ROPE)
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
    if model.latent is None:
        model.latent = BatchMLAPagedAttentionWrapper(model.workspace)
        model.latent.plan(
            model.starts, batch.indptr, batch.indices, model.lengths.int(), heads, LATENT, ROPE, PAGE, True,
            net.scaling, q.dtype, cache.dtype,
        )  # fmt: skip
    keys, values = net.kv_b_proj.weight.unflatten(0, (heads, -1)).split([net.qk_nope_head_dim, net.v_head_dim], 1)
    scales: dict[str, Any] = {"ckv_scale": 1.0, "kpe_scale": 1.0} if cache.dtype.itemsize == 1 else {}
    rotated = q_rope[0].transpose(0, 1).contiguous()
    out = model.latent.run(torch.einsum("thn,hnl->thl", q, keys), rotated, *parts, **scales)
    return net.o_proj(torch.einsum("thl,hvl->thv", out, values).flatten(1))[None], None


class FewBits:
    """gpt-oss's experts in mxfp4; the weights of the module become what the codes stand for."""

    def __init__(self, module: Any) -> None:
        def coded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [experts, outputs, inputs]
            codes, scales = fi_core.mxfp4_quantize(rows.flatten(0, 1), sfLayout=fi_core.SfLayout.layout_linear)
            rows.copy_(fi_core.mxfp4_dequantize(codes, scales, fi_core.SfLayout.layout_linear).view(rows.shape))
            return codes.unflatten(0, rows.shape[:2]), scales.view(*rows.shape[:2], -1)

        with torch.no_grad():
            up, up_scales = (linear_first(x) for x in coded(module.gate_up_proj.mT))
            down, down_scales = coded(module.down_proj.mT)
        self.weights, each = (up, down), module.gate_up_proj.new_ones(len(up), dtype=torch.float32)
        self.options = {
            "quant_scales": [up_scales, down_scales],
            "use_w4_group_scaling": True,
            "fc1_expert_biases": linear_first(module.gate_up_proj_bias.detach()),
            "fc2_expert_biases": module.down_proj_bias.detach(),
            "swiglu_beta": each,
            "swiglu_alpha": each * module.alpha,
            "swiglu_limit": each * module.limit,
        }

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return fi_core.fused_moe.cutlass_fused_moe(x, ids.int(), scores.float(), *self.weights, x.dtype, **self.options)


def linear_first(x: torch.Tensor) -> torch.Tensor:
    """Rows of gates and of the linear projection alternate in the model; the kernels read the latter first."""
    return torch.cat([x[:, 1::2], x[:, ::2]], 1)


LAYERS = {
    "DeepseekV3Attention": latent_attention, "Qwen3NextAttention": gated_attention,
    "Qwen3NextGatedDeltaNet": gated_delta_net, "Mamba2Mixer": mamba, "NemotronHMamba2Mixer": mamba,
}  # fmt: skip


def served(model: Model, prompts: list[list[int]], new: int, texts: list[list[int]], drafts: int) -> Any:
    """The engine after it served prompts, and their requests. drafts: guesses in each step, of which the first half is
    right by the texts; with them prefixes are kept.
    """
    requests = [Request(prompt, new, arrival=2 * i, logits=[]) for i, prompt in enumerate(prompts)]

    def guess(request: Request) -> list[int]:
        tokens = (texts[requests.index(request)][len(request.generated) :] + [0] * drafts)[:drafts]
        return [(token + (i >= drafts // 2)) % 256 for i, token in enumerate(tokens)]

    scheduler = PrefixScheduler(40, PAGE, 80, 4, drafts=drafts, num_prefixes=8 if drafts else 0)
    is_rounded = model.dtype.itemsize == 2
    engine = StateEngine(model, scheduler, batch_invariant=is_rounded, draft=guess if drafts else None)
    engine.serve(requests)
    return engine, requests


def row(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens beside transformers', and logits beside those of an engine without prefixes and drafts."""
    model, generator = Model(family, options.device), torch.Generator().manual_seed(3)
    head, *tails = (torch.randint(1, 256, (n,), generator=generator).tolist() for n in (64, 6, 33, 70))
    prompts = [head + tail for tail in tails]
    plain, requests = served(model, prompts, options.new_tokens, [], 0)
    texts = [request.generated for request in requests]
    engine, guessed = served(model, prompts, options.new_tokens, texts, options.drafts)
    found = torch.cat([gaps(request, model.wanted(request)) for request in guessed])
    is_same = (torch.equal(x, y) for r, g in zip(requests, guessed) for x, y in zip(r.logits, g.logits))
    return {
        "model": family,
        "tokens": len(found),
        "equal": int((found == 0).sum()),
        "worst gap": round(found.max().item(), 3),
        "steps": len(plain.times),
        "steps with prefixes and drafts": len(engine.times),
        "reused tokens": engine.scheduler.reused,
        "same bits": all(is_same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--families", default="NemotronH,Qwen3Next", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--drafts", type=int, default=4, help="guesses in each step")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each model")
    options = parser.parse_args()
    for family in options.families.split(","):
        found = row(family, options)
        print(json.dumps(found) if options.json else ", ".join(f"{k} {v}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
