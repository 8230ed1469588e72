"""An engine over paged caches serves transformers' models: every token is that of transformers' generate().

The scheduler and the engine are those of examples/serving.py; attention reads the cache by page tables.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

import fi_core
from fi_core.decode import trtllm_batch_decode_with_kv_cache
from fi_core.prefill import trtllm_batch_context_with_kv_cache

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serving

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE, PROMPTS, NEW = 16, (70, 5, 33, 90), 12
SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.08, "pad_token_id": 0, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {}, "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "GptOss": {"num_local_experts": 4, "sliding_window": 20, **EXPERTS},
}  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Served:
    """A model of transformers, whose layers read and write the caches of an engine."""

    def __init__(self, family: str, device: str) -> None:
        torch.manual_seed(1)
        config = getattr(transformers, f"{family}Config")(**SHAPE | MODELS[family])
        self.dtype, self.device = torch.float32 if device == "cpu" else torch.bfloat16, torch.device(device)
        self.net = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(device, self.dtype)
        for name, weight in self.net.named_parameters():
            if name.endswith("sinks"):
                weight.data.normal_(1, 1)
        self.layers, self.heads, self.kv_heads, self.head_dim = self.net.model.layers, 4, 2, 64
        self.workspace = torch.empty(16 << 20, dtype=torch.uint8, device=device)

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
        AttentionInterface.register("engine", self.attention)
        AttentionMaskInterface.register("engine", lambda *args, **options: None)
        self.net.set_attn_implementation("engine")
        ids, positions = batch.tokens[None].long(), batch.positions[None].long()
        return self.net(ids, position_ids=positions, use_cache=False).logits[0]  # type: ignore[no-any-return]

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

    def plan(self, batch: serving.Batch, chunks: list[serving.Chunk], alone: int) -> Any:
        return None

    def sample(self, logits: torch.Tensor, rows: list[int], requests: list[serving.Request]) -> list[int]:
        if self.allowed is not None:
            kept = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
            kept[self.allowed] = True
            logits = logits.masked_fill(~kept, -torch.inf)
        return super().sample(logits, rows, requests)


made = functools.cache(Served)


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str, device: str) -> Served:
    return made(family, device)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 256, (n,), generator=generator).tolist() for n in PROMPTS]


def assert_tokens(model: Served, prompt: list[int], got: list[int], want: list[int]) -> None:
    """In bfloat16 rounding may choose another token at a near tie, and the rest of an answer follows it."""
    at = next((i for i, (x, y) in enumerate(zip(got, want, strict=True)) if x != y), None)
    if at is None:
        return
    assert model.dtype is torch.bfloat16, f"{got} for {want}"
    logits = model.logits(prompt + want[:at])
    assert logits[want[at]] - logits[got[at]] <= 0.25 * logits.std(), f"{got} for {want}"


def test_chunks_and_preemption(model: Served) -> None:
    """Prompts in chunks beside requests that generate, in too few pages for all of them."""
    a, _, b, c = prompts()
    requests = [serving.Request(p, NEW, arrival=i) for i, p in enumerate((a[:60], b[:30], c[:46]))]
    engine = Engine(model, serving.Scheduler(9, PAGE, 40, 3))  # type: ignore[arg-type]
    engine.serve(requests)
    assert engine.scheduler.preemptions
    assert sorted(engine.scheduler.free) == list(range(9)), "no page is lost"
    for request in requests:
        assert_tokens(model, request.prompt, request.generated, model.wanted(request.prompt))


@torch.inference_mode()
def test_a_cached_prefix(model: Served) -> None:
    """The second request begins with the pages of the first one, and shares them while both generate."""
    first, _, second, _ = prompts()
    engine = Engine(model, serving.Scheduler(20, PAGE, 128, 4))  # type: ignore[arg-type]
    a, b = serving.Request(first, 40), serving.Request(first[:64] + second, 40)
    engine.scheduler.add(a)
    engine.step(0)
    b.pages, b.cached = a.pages[:4], 64
    engine.scheduler.running.append(b)
    for number in range(1, NEW):
        engine.step(number)
    assert a.pages[:4] == b.pages[:4] and engine.times[1].prompt_tokens == 33
    for request, new in ((a, NEW), (b, NEW - 1)):
        assert_tokens(model, request.prompt, request.generated, model.wanted(request.prompt, new))


@torch.inference_mode()
def test_drafts(model: Served) -> None:
    """Steps verify three drafts, of which some are wrong: the answer is that without drafts, in fewer steps."""
    prompt, *_ = prompts()
    want = model.wanted(prompt)
    engine = Engine(model, serving.Scheduler(20, PAGE, 128, 1))  # type: ignore[arg-type]
    request = serving.Request(prompt, 40)
    engine.scheduler.add(request)
    engine.step(0)
    steps = 0
    while len(request.generated) < NEW:
        begin, steps = len(request.generated), steps + 1
        drafts = (want[begin:] + [0] * 3)[:3]
        if steps % 2:
            drafts[steps % 3] = (drafts[steps % 3] + 1) % 256
        known = len(request.tokens)
        request.tokens += drafts
        rows = engine.batch(engine.scheduler.schedule(steps))
        best = model.rows(rows, engine.caches).argmax(-1).tolist()
        right = next((i for i, draft in enumerate(drafts) if draft != best[i]), 3)
        request.tokens[known:] = best[: right + 1]  # keys of wrong drafts are written over by the next step
        request.cached += right + 1
    assert steps < NEW - 1
    assert_tokens(model, prompt, request.generated[:NEW], want)


def test_masks_of_structured_output(model: Served) -> None:
    prompt, *_ = prompts()
    engine = Engine(model, serving.Scheduler(20, PAGE, 48, 2))  # type: ignore[arg-type]
    engine.allowed = list(range(48, 58))
    request = serving.Request(prompt, NEW)
    engine.serve([request])
    want = model.wanted(prompt, prefix_allowed_tokens_fn=lambda batch, ids: engine.allowed)
    assert set(request.generated) <= set(engine.allowed)
    assert_tokens(model, prompt, request.generated, want)


def test_an_fp8_cache(family: str, device: str) -> None:
    """The logits of the first token and of one behind chunks are near those of a cache that rounds nothing."""
    model, results = Served(family, device), []
    if device == "cpu":
        model.net, model.dtype = model.net.to(torch.bfloat16), torch.bfloat16
    for dtype in (model.dtype, torch.float8_e4m3fn):
        engine = Engine(model, serving.Scheduler(20, PAGE, 48, 4))  # type: ignore[arg-type]
        engine.caches = [torch.zeros_like(cache).to(dtype) for cache in engine.caches]
        request = serving.Request(prompts()[0], 1, logits=[])
        engine.serve([request])
        results.append(request.logits[0].float())  # type: ignore[index]
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert 0 < error < 0.1, f"{error:.1e}"
