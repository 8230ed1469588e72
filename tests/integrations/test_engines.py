"""An engine over paged caches and states serves transformers' models: every token is transformers' likeliest.

The engine is that of examples/serving.py, with the prefix cache and the models of the examples beside it.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from prefix_cache import PrefixScheduler, Slots, StateEngine
from serving import Request
from transformers_serving import MODELS, PAGE, STATES, Model, gaps, served

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS, NEW = (70, 5, 33, 90), 12
made = functools.cache(Model)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str, device: str) -> Model:
    return made(family, device)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 256, (n,), generator=generator).tolist() for n in PROMPTS]


def assert_tokens(model: Model, request: Request) -> None:
    """In 16 bits rounding may choose another token at a near tie; logits are then no farther from those in fp32 than
    transformers' own.
    """
    own = model.wanted(request)
    apart = gaps(request, own)
    assert len(apart) == request.max_new_tokens
    if model.dtype is torch.float32:
        assert not apart.any(), apart
        return
    assert apart.max() <= 0.25, apart
    want, got = model.wanted(request, torch.float32), torch.stack(request.logits).float()  # type: ignore[arg-type]
    error, allowed = ((x - want).norm() / want.norm() for x in (got, own))
    assert error <= 1.25 * allowed + 1e-3, f"{error:.1e}, transformers {allowed:.1e}"


def assert_nothing_is_lost(scheduler: PrefixScheduler) -> None:
    scheduler.clear()
    for pool, kept in ((scheduler.pages, []), (scheduler.slots, [scheduler.zeros])):
        assert sorted(pool.free + kept) == list(range(len(pool.users)))


def test_chunks_and_preemption(model: Model) -> None:
    """Prompts in chunks beside requests that generate, in too few pages for all of them."""
    a, _, b, c = prompts()
    requests = [Request(p, NEW, arrival=i, logits=[]) for i, p in enumerate((a[:60], b[:30], c[:46]))]
    engine = StateEngine(model, PrefixScheduler(9, PAGE, 40, 3))
    engine.serve(requests)
    assert engine.scheduler.preemptions
    for request in requests:
        assert_tokens(model, request)
    assert_nothing_is_lost(engine.scheduler)


def test_a_cached_prefix(model: Model) -> None:
    """The second request begins with the pages of the first one, and shares them while both generate. A layer with
    states begins with that of the first request.
    """
    first, _, second, _ = prompts()
    a, b = Request(first, NEW, logits=[]), Request(first[:64] + second, NEW, arrival=3, logits=[])
    engine = StateEngine(model, PrefixScheduler(20, PAGE, 64, 4))
    engine.serve([a, b])
    assert engine.scheduler.reused == 64 and engine.times[3].prompt_tokens == len(second)
    for request in (a, b):
        assert_tokens(model, request)
    assert_nothing_is_lost(engine.scheduler)


def test_drafts(model: Model) -> None:
    """Steps verify four drafts, of which two are wrong: the answers are those without drafts, in a third of steps."""
    prompt = prompts()[0]
    _, (plain,) = served(model, [prompt], NEW, [], 0)
    engine, (request,) = served(model, [prompt], NEW, [plain.generated], 4)
    if model.dtype is torch.float32 or model.family in STATES:  # which are batch invariant
        assert len(engine.times) == 2 + -(-(NEW - 1) // 3)
        assert request.generated == plain.generated
    assert_tokens(model, request)


@pytest.mark.parametrize("family", ["NemotronH", "Qwen3Next"])
def test_prefixes_and_drafts_where_pages_run_out(model: Model) -> None:
    """Requests that begin alike are preempted while they verify drafts, and prefixes are dropped for pages."""
    head, _, tail, other = prompts()
    texts = [head, head[:64] + tail[:9], (other + tail + tail)[:124]]
    requests = [Request(text, NEW, arrival=i, logits=[]) for i, text in enumerate(texts)]
    scheduler = PrefixScheduler(14, PAGE, 70, 3, drafts=2, num_prefixes=2)
    engine = StateEngine(model, scheduler, draft=lambda request: [request.tokens[-1], 7])
    engine.serve(requests)
    assert scheduler.preemptions and scheduler.reused
    for request in requests:
        assert_tokens(model, request)
    assert_nothing_is_lost(scheduler)


def states_of(model: Model, slots: Slots) -> list[torch.Tensor]:
    """Of all layers, after the last token: the inputs of the convolution, and the state."""
    found = []
    for net, (inputs, states) in model.pools.items():
        last = slots.accepted - 1
        window = inputs[slots.after[0], :, last : last + net.conv1d.kernel_size[0] - 1]
        found += [window.clone(), states[slots.last].clone()]
    return found


@pytest.mark.parametrize("family", STATES)
def test_prefixes_and_drafts_change_no_bit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, and the states after the last token, are those of a run without either."""
    kept: dict[Request, list[torch.Tensor]] = {}
    finish = PrefixScheduler.finish

    def record(scheduler: PrefixScheduler, request: Request) -> None:
        kept[request] = states_of(model, scheduler.states[request])
        finish(scheduler, request)

    monkeypatch.setattr(PrefixScheduler, "finish", record)
    head, _, tail, other = prompts()
    texts = [head, head[:64] + tail, head[:64] + other]
    plain, requests = served(model, texts, NEW, [], 0)
    engine, guessed = served(model, texts, NEW, [request.generated for request in requests], 4)
    assert engine.scheduler.reused == 128 and len(engine.times) < len(plain.times)
    for one, two in zip(requests, guessed):
        assert one.generated == two.generated and one.logits and two.logits
        for x, y in zip([*one.logits, *kept[one]], [*two.logits, *kept[two]], strict=True):
            assert torch.equal(x, y)


class Masked(StateEngine):
    """Samples some tokens only."""

    allowed = range(48, 58)

    def sample(self, logits: torch.Tensor, requests: list[Request]) -> list[int]:
        kept = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        kept[self.allowed] = True
        return super().sample(logits.masked_fill(~kept, -torch.inf), requests)


def test_masks_of_structured_output(model: Model) -> None:
    """With drafts, which are outside of the mask at times."""
    request = Request(prompts()[0], NEW)

    def draft(request: Request) -> list[int]:
        return [Masked.allowed[len(request.tokens) % 10], 7]

    engine = Masked(model, PrefixScheduler(20, PAGE, 48, 2, drafts=2), draft=draft)
    engine.serve([request])
    assert set(request.generated) <= set(Masked.allowed)
    kept = list(Masked.allowed)
    own = model.wanted(request)
    logits = torch.full_like(own, -torch.inf)
    logits[:, kept] = own[:, kept]
    assert gaps(request, logits).max() <= (0 if model.dtype is torch.float32 else 0.25)


@pytest.mark.parametrize("family", [name for name in MODELS if name != "Mamba2"])  # which has no keys
def test_an_fp8_cache(family: str, device: str) -> None:
    """The logits of the first token and of one behind chunks are near those of a cache that rounds nothing."""
    model, results = Model(family, device), []
    if device == "cpu":
        model.net, model.dtype = model.net.to(torch.bfloat16), torch.bfloat16
    for dtype in (model.dtype, torch.float8_e4m3fn):
        engine = StateEngine(model, PrefixScheduler(20, PAGE, 48, 4))
        engine.caches = [torch.zeros_like(cache).to(dtype) for cache in engine.caches]
        request = Request(prompts()[0], 1, logits=[])
        engine.serve([request])
        results.append(request.logits[0].float())  # type: ignore[index]
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert 0 < error < 0.1, f"{error:.1e}"
