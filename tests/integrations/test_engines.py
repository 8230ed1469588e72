"""An engine over paged caches serves transformers' models: every token is that of transformers' generate().

The scheduler and the engine are those of examples/serving.py; attention reads the cache by page tables, and layers of
linear attention and Mamba-2 have a state for each request.
"""

from __future__ import annotations

import functools

import pytest
import torch

from integrations.served import MODELS, NEW, PAGE, STATES, Engine, Served, serving

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = 70, 5, 33, 90


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    engine = Engine(model, serving.Scheduler(9, PAGE, 40, 3))
    engine.serve(requests)
    assert engine.scheduler.preemptions
    assert sorted(engine.scheduler.free) == list(range(9)), "no page is lost"
    for request in requests:
        assert_tokens(model, request.prompt, request.generated, model.wanted(request.prompt))


@torch.inference_mode()
def test_a_cached_prefix(model: Served) -> None:
    """The second request begins with the pages of the first one, and shares them while both generate. A layer with
    states begins with those that the first request had there.
    """
    first, _, second, _ = prompts()
    engine = Engine(model, serving.Scheduler(20, PAGE, 64, 4))
    a, b = serving.Request(first, 40), serving.Request(first[:64] + second, 40)
    engine.scheduler.add(a)
    engine.step(0)
    b.pages, b.cached = a.pages[:4], 64
    engine.share(a, b)
    engine.scheduler.running.append(b)
    for number in range(1, NEW):
        engine.step(number)
    assert a.pages[:4] == b.pages[:4] and engine.times[1].prompt_tokens == 39
    for request in (a, b):
        assert_tokens(model, request.prompt, request.generated, model.wanted(request.prompt, NEW - 1))


@torch.inference_mode()
@pytest.mark.parametrize("family", [name for name in MODELS if name not in STATES])
def test_drafts(model: Served) -> None:
    """Steps verify three drafts, of which some are wrong: the answer is that without drafts, in fewer steps."""
    prompt, *_ = prompts()
    want = model.wanted(prompt)
    engine = Engine(model, serving.Scheduler(20, PAGE, 128, 1))
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
    engine = Engine(model, serving.Scheduler(20, PAGE, 48, 2))
    engine.allowed = list(range(48, 58))
    request = serving.Request(prompt, NEW)
    engine.serve([request])
    want = model.wanted(prompt, prefix_allowed_tokens_fn=lambda batch, ids: engine.allowed)
    assert set(request.generated) <= set(engine.allowed)
    assert_tokens(model, prompt, request.generated, want)


@pytest.mark.parametrize("family", [name for name in MODELS if name not in STATES])
def test_an_fp8_cache(family: str, device: str) -> None:
    """The logits of the first token and of one behind chunks are near those of a cache that rounds nothing."""
    model, results = Served(family, device), []
    if device == "cpu":
        model.net, model.dtype = model.net.to(torch.bfloat16), torch.bfloat16
    for dtype in (model.dtype, torch.float8_e4m3fn):
        engine = Engine(model, serving.Scheduler(20, PAGE, 48, 4))
        engine.caches = [torch.zeros_like(cache).to(dtype) for cache in engine.caches]
        request = serving.Request(prompts()[0], 1, logits=[])
        engine.serve([request])
        results.append(request.logits[0].float())  # type: ignore[index]
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert 0 < error < 0.1, f"{error:.1e}"
