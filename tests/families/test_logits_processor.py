"""LogitsPipe: which steps fit each other, which run as one call, and that both forms draw alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fi_core.logits_processor import (
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Sample,
    Softmax,
    Temperature,
    TensorType,
    TopK,
    TopP,
)

ARGUMENTS = {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05}
Make = Callable[[], list[LogitsProcessor]]
FULL: Make = lambda: [Temperature(), Softmax(), TopK(), TopP(), MinP(), Sample()]  # noqa: E731


@pytest.mark.parametrize(
    ("make", "start", "calls"),
    [
        (FULL, None, 1),
        (lambda: [TopK(), Softmax(), TopP(), Sample()], None, 1),
        (lambda: [Temperature(), Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()], None, 1),
        (lambda: [Softmax(), MinP(), TopP(), Sample()], None, 3),
        (lambda: [TopP(), Sample()], None, 1),
        (lambda: [TopK(), TopP(), Sample()], TensorType.PROBS, 1),
        (lambda: [MinP(), Sample()], None, 1),
    ],
)
def test_fused_and_single_steps_draw_alike(make: Make, start: TensorType | None, calls: int) -> None:
    """The same distribution, over 20000 rows of one logit vector."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 2
    pipe, single = LogitsPipe(make(), input_type=start), LogitsPipe(make(), compile=False, input_type=start)
    assert len(pipe.steps) == calls and len(single.steps) == len(make())
    assert pipe.output_type is TensorType.INDICES
    x = logits if pipe.input_type is TensorType.LOGITS else logits.softmax(-1)
    rows = x.expand(20000, -1).contiguous()
    given = {name: value for name, value in ARGUMENTS.items() if any(p.argument == name for p in pipe.processors)}
    counts = [
        torch.bincount(p(rows, seed=seed, offset=0, **given).long(), minlength=12) / 20000
        for seed, p in enumerate((pipe, single))
    ]
    assert torch.equal(counts[0] > 0, counts[1] > 0), "the same tokens are allowed"
    assert (counts[0] - counts[1]).abs().max() < 0.02


@pytest.mark.parametrize("compile", [True, False])
def test_a_joint_filter_without_a_kernel_counts_the_whole_row(compile: bool) -> None:
    """Of 0.4, 0.3, 0.2, 0.1, the first two tokens have half of the row; of the first two, one has half."""
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    given = {"top_k": 2, "top_p": 0.5}
    for joint, kept in ((True, [4 / 7, 3 / 7, 0, 0]), (False, [1, 0, 0, 0])):
        of_probs = LogitsPipe([TopK(joint), TopP()], compile, TensorType.PROBS)
        of_logits = LogitsPipe([TopK(joint), Softmax(), TopP()], compile)
        for out in (of_probs(probs, **given), of_logits(probs.log(), **given)):
            torch.testing.assert_close(out, torch.tensor([kept], dtype=torch.float32))
    pipe = LogitsPipe([Softmax(), TopK(True), TopP(), Sample()], compile)
    tokens = pipe(probs.log(), indices=torch.zeros(500, dtype=torch.int32), seed=1, offset=0, **given)
    assert set(tokens.tolist()) == {0, 1}


def test_probabilities() -> None:
    x = torch.randn(3, 50)
    pipe = LogitsPipe([Temperature(), Softmax()])
    assert len(pipe.steps) == 1 and pipe.output_type is TensorType.PROBS
    torch.testing.assert_close(pipe(x, temperature=2.0), (x / 2.0).softmax(-1))
    kept = LogitsPipe([TopP(), TopK()])(x.softmax(-1), top_k=3, top_p=0.9)
    assert ((kept > 0).sum(-1) <= 3).all()
    rows = torch.tensor([0.5, 1.0, 2.0])
    torch.testing.assert_close(LogitsPipe([Temperature()])(x, temperature=rows), x / rows[:, None])


def test_options_and_indices() -> None:
    """A step may hold its argument; indices make the pipe run step by step."""
    x = torch.randn(3, 50)
    pipe = LogitsPipe([Softmax(), TopK(top_k=1), Sample()])
    assert pipe(x).tolist() == x.argmax(-1).tolist()
    assert pipe(x, indices=torch.tensor([2, 0], dtype=torch.int32)).tolist() == x.argmax(-1)[[2, 0]].tolist()
    assert pipe(x, generator=torch.Generator().manual_seed(1)).dtype is torch.int32


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([], "processors: at least one is required; got none"),
        ([Softmax(), Temperature()], r"processors: Temperature\(\) takes logits; got probs"),
        ([Sample(), TopK()], r"processors: TopK\(\) takes logits or probs; got indices"),
        ([Softmax], "processors: LogitsProcessor is required; got ABCMeta"),
    ],
)
def test_steps_that_do_not_fit(processors: list[Any], message: str) -> None:
    with pytest.raises(LegalizationError, match=message):
        LogitsPipe(processors)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="top_k: required by the pipe; top_q: no step of the pipe takes it"):
        LogitsPipe([Softmax(), TopK(), Sample()])(torch.randn(2, 9), top_q=3)


def test_a_step_of_the_user() -> None:
    class Ban(LogitsProcessor):
        turns = {TensorType.LOGITS: TensorType.LOGITS}  # noqa: RUF012
        argument = "banned"

        def apply(self, x: torch.Tensor, kind: TensorType, arguments: dict[str, Any]) -> torch.Tensor:
            return x.index_fill(-1, arguments["banned"], float("-inf"))

    x = torch.randn(4, 9)
    tokens = LogitsPipe([Ban(), Softmax(), TopK(), Sample()])(x, banned=x[:1].argmax(-1), top_k=1)
    assert tokens[0] != x[0].argmax()
