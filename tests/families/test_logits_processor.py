"""LogitsPipe: which processors fit each other, which operators run as one call, and that all forms draw alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fi_core import sampling
from fi_core.logits_processor import (
    CompileError,
    Compiler,
    FusionRule,
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Op,
    ParameterizedOp,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    compile_pipeline,
    legalize_processors,
)
from fi_core.logits_processor.operators import ProbsSampleOp, ProbsTopKOp, SoftmaxOp, TopPOp

LOGITS, PROBS = TensorType.LOGITS, TensorType.PROBS
ARGUMENTS = {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05}  # no pipe takes all: the rest is ignored
Make = Callable[[], list[LogitsProcessor]]
FULL: Make = lambda: [Temperature(), Softmax(), TopK(), TopP(), MinP(), Sample()]  # noqa: E731


def names(ops: Any) -> list[str]:
    return [type(op).__name__ for op in ops]


@pytest.mark.parametrize(
    ("make", "start", "compiled"),
    [
        (FULL, None, ["FusedLogitsSampleOp"]),
        (lambda: [TopK(), Softmax(), TopP(), Sample()], LOGITS, ["FusedLogitsSampleOp"]),
        (
            lambda: [Temperature(), Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()],
            None,
            ["FusedLogitsSampleOp"],
        ),
        (lambda: [Softmax(), MinP(), TopP(), Sample()], None, ["SoftmaxOp", "MinPOp", "FusedProbsTopPSampleOp"]),
        (lambda: [TopP(), Sample()], None, ["FusedProbsTopPSampleOp"]),
        (lambda: [TopK(), TopP(), Sample()], PROBS, ["FusedProbsTopKTopPSampleOp"]),
        (lambda: [MinP(), Sample()], None, ["FusedProbsMinPSampleOp"]),
    ],
)
def test_fused_and_single_operators_draw_alike(make: Make, start: TensorType | None, compiled: list[str]) -> None:
    """The same distribution, over 20000 rows of one logit vector."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 2
    pipe, single = LogitsPipe(make(), input_type=start), LogitsPipe(make(), compile=False, input_type=start)
    assert names(pipe.compiled_ops) == compiled
    assert single.compiled_ops is None and len(single.ops) == len(make())
    x = logits if pipe.initial_type is LOGITS else logits.softmax(-1)
    rows = x.expand(20000, -1).contiguous()
    counts = [
        torch.bincount(p(rows, seed=seed, offset=0, **ARGUMENTS).long(), minlength=12) / 20000
        for seed, p in enumerate((pipe, single))
    ]
    assert torch.equal(counts[0] > 0, counts[1] > 0), "the same tokens are allowed"
    assert (counts[0] - counts[1]).abs().max() < 0.02
    single.compile()
    assert names(single.compiled_ops) == compiled
    assert torch.equal(single(rows, seed=1, offset=0, **ARGUMENTS), pipe(rows, seed=1, offset=0, **ARGUMENTS))


def test_tokens_are_those_of_the_functions() -> None:
    """With the same generator."""
    x = torch.randn(3000, 50, generator=torch.Generator().manual_seed(0)) * 2
    t, k, p, m = ARGUMENTS.values()
    warm, probs = sampling.softmax(x, t), sampling.softmax(x)
    cases: list[tuple[list[LogitsProcessor], Callable[..., Any], torch.Tensor, tuple[Any, ...]]] = [
        ([Sample()], sampling.sampling_from_logits, x, ()),
        ([Temperature(), Softmax(), Sample()], sampling.sampling_from_probs, warm, ()),
        ([Temperature(), Softmax(), TopK(), Sample()], sampling.top_k_sampling_from_probs, warm, (k,)),
        ([Temperature(), Softmax(), TopP(), Sample()], sampling.top_p_sampling_from_probs, warm, (p,)),
        ([Temperature(), Softmax(), MinP(), Sample()], sampling.min_p_sampling_from_probs, warm, (m,)),
        ([TopK(), Softmax(), TopP(), Sample()], sampling.top_k_top_p_sampling_from_logits, x, (k, p)),
        ([Softmax(), TopK(), TopP(), Sample()], sampling.top_k_top_p_sampling_from_probs, probs, (k, p)),
        (
            [Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()],
            lambda *given, **more: sampling.top_k_top_p_sampling_from_probs(*given, filter_apply_order="joint", **more),
            probs,
            (k, p),
        ),
    ]
    for processors, function, given, values in cases:
        pipe = LogitsPipe(processors, input_type=LOGITS)
        got = pipe(x, generator=torch.Generator().manual_seed(5), **ARGUMENTS)
        want = function(given, *values, generator=torch.Generator().manual_seed(5))
        assert torch.equal(got, want), pipe


@pytest.mark.parametrize("compile", [True, False])
def test_a_joint_filter_without_a_kernel_counts_the_whole_row(compile: bool) -> None:
    """Of 0.4, 0.3, 0.2, 0.1, the first two tokens have half of the row; of the first two, one has half."""
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    given = {"top_k": 2, "top_p": 0.5}
    for joint, kept in ((True, [4 / 7, 3 / 7, 0, 0]), (False, [1, 0, 0, 0])):
        of_probs = LogitsPipe([TopK(joint), TopP()], compile, PROBS)
        of_logits = LogitsPipe([TopK(joint), Softmax(), TopP()], compile, LOGITS)
        for out in (of_probs(probs, **given), of_logits(probs.log(), **given)):
            torch.testing.assert_close(out, torch.tensor([kept], dtype=torch.float32))
    pipe = LogitsPipe([Softmax(), TopK(True), TopP(), Sample()], compile)
    tokens = pipe(probs.log(), indices=torch.zeros(500, dtype=torch.int32), seed=1, offset=0, **given)
    assert set(tokens.tolist()) == {0, 1}


def test_probabilities() -> None:
    x = torch.randn(3, 50)
    pipe = LogitsPipe([Temperature(), Softmax()])
    assert names(pipe.compiled_ops) == ["FusedTemperatureSoftmaxOp"]
    torch.testing.assert_close(pipe(x, temperature=2.0), (x / 2.0).softmax(-1))
    kept = LogitsPipe([TopP(), TopK()])(x.softmax(-1), top_k=3, top_p=0.9)
    assert ((kept > 0).sum(-1) <= 3).all()
    rows = torch.tensor([0.5, 1.0, 2.0])
    torch.testing.assert_close(LogitsPipe([Temperature()])(x, temperature=rows), x / rows[:, None])
    torch.testing.assert_close(LogitsPipe([Softmax(enable_pdl=False)])(TaggedTensor.logits(x)), x.softmax(-1))
    with pytest.raises(ValueError, match=r"operator 0 \(SoftmaxOp\): SoftmaxOp takes logits; got probs"):
        LogitsPipe([Softmax()])(TaggedTensor.probs(x))


def test_defaults_and_indices() -> None:
    """A processor may hold its argument; indices make a pipe run by more calls; None is not given."""
    x = torch.randn(3, 50)
    pipe = LogitsPipe([Softmax(), TopK(top_k=1), Sample()])
    assert pipe(x).tolist() == pipe(x, top_k=None).tolist() == x.argmax(-1).tolist()
    assert pipe(x, indices=torch.tensor([2, 0], dtype=torch.int32)).tolist() == x.argmax(-1)[[2, 0]].tolist()
    assert pipe(x, generator=torch.Generator().manual_seed(1)).dtype is torch.int32


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([], "processors: at least one is required; got none"),
        ([Softmax(), Temperature()], r"creation failed: processor 1: Temperature\(\) takes logits; got probs"),
        ([Temperature(), Sample(), TopK()], r"processor 2: TopK\(.*\) takes logits or probs; got indices"),
        ([Softmax], "LogitsProcessor is required; got ABCMeta|takes neither logits nor probs"),
        ([TopK(), Sample()], r"input_type: cannot infer it, TopK\(.*\) takes logits and probs"),
    ],
)
def test_processors_that_do_not_fit(processors: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogitsPipe(processors)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 1.0}, r"Error executing operator 1 \(ProbsTopKOp\): top_k: required by ProbsTopKOp; got None"),
        ({"temperature": 0.0, "top_k": 3}, "temperature: a number above 0 or a tensor is required; got 0.0"),
        ({"temperature": 1, "top_k": 0}, "top_k: a number above 0"),
        ({"temperature": 1, "top_k": 2, "top_p": 1.5}, r"top_p: a number in \(0, 1\]"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogitsPipe([Temperature(), Softmax(), TopK(), TopP()])(torch.randn(2, 9), **given)


class BanOp(ParameterizedOp):
    IN, OUT = LOGITS, LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        kind = self._validate_input_type(tensor)
        return TaggedTensor(tensor.data.index_fill(-1, self._get_param("banned", kwargs), float("-inf")), kind)


class Ban(LogitsProcessor):
    def legalize(self, input_type: TensorType) -> list[Op]:
        return [BanOp(**self.params)]


def test_a_processor_of_the_user() -> None:
    x = torch.randn(4, 9)
    first = x[:1].argmax(-1)
    pipe = LogitsPipe([Ban(), Softmax(), TopK(), Sample()])
    assert pipe.initial_type is LOGITS, "what its operator takes"
    assert pipe(x, banned=first, top_k=1)[0] != first
    assert LogitsPipe([Ban(banned=first)])(x)[0, first].isinf().all()
    ops = legalize_processors([Ban(), TopK(top_k=3)])
    assert names(ops) == ["BanOp", "LogitsTopKOp"] and ops[0].OUT is LOGITS
    with pytest.raises(LegalizationError, match="at least one"):
        legalize_processors([])
    with pytest.raises(ValueError, match="IN and OUT of TensorType are required"):
        type("Bare", (BanOp,), {"IN": None})()


class EvenOp(ParameterizedOp):
    """Probability for even tokens alone, in place of a temperature and a softmax."""

    IN, OUT = LOGITS, PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        probs = torch.zeros_like(tensor.data)
        probs[:, ::2] = 1
        return TaggedTensor.probs(probs / probs.sum(-1, keepdim=True))


def test_rules_of_the_user() -> None:
    """A pattern names processors or operators; the higher priority goes first; a guard sees the operators."""

    def rule(prio: int = 20, guard: Any = bool, pattern: Any = (Temperature, Softmax)) -> FusionRule:
        return FusionRule(pattern, guard, lambda _: EvenOp(), prio)

    x = torch.randn(500, 9)
    pipe = LogitsPipe([Temperature(), Softmax(), Sample()], custom_fusion_rules=[rule()])
    assert names(pipe.compiled_ops) == ["EvenOp", "ProbsSampleOp"]
    assert set(pipe(x, temperature=1.0).tolist()) == {0, 2, 4, 6, 8}
    assert repr(pipe) == (
        "LogitsPipe([Temperature -> Softmax -> Sample], ops=[TemperatureOp -> SoftmaxOp -> ProbsSampleOp], "
        "compiled_ops=[EvenOp -> ProbsSampleOp])"
    )
    for other in (rule(prio=5), rule(guard=lambda window: len(window) != 2)):
        pipe.compile(custom_fusion_rules=[other])
        assert names(pipe.compiled_ops) == ["FusedTemperatureSoftmaxOp", "ProbsSampleOp"]
    pipe = LogitsPipe([Softmax(), TopP(), Sample()], True, None, [rule(pattern=(SoftmaxOp,))])
    assert names(pipe.compiled_ops) == ["EvenOp", "FusedProbsTopPSampleOp"]


def test_checks_of_the_user() -> None:
    def no_sample(ops: list[Op]) -> None:
        if isinstance(ops[-1], ProbsSampleOp):
            raise CompileError("no draws here")

    with pytest.raises(ValueError, match="no draws here"):
        LogitsPipe([Softmax(), Sample()], custom_validity_checks=[no_sample])
    assert LogitsPipe([Softmax()], custom_validity_checks=[no_sample]).compiled_ops


def test_the_compiler() -> None:
    ops: list[Op] = [ProbsTopKOp(top_k=3), TopPOp(top_p=0.5), ProbsSampleOp()]
    assert names(compile_pipeline(ops)) == names(Compiler().compile(ops)) == ["FusedProbsTopKTopPSampleOp"]
    for wrong, words in (
        ([], "at least one"),
        ([SoftmaxOp(), SoftmaxOp()], "cannot follow"),
        ([ops[-1], ops[-1]], r"ProbsSampleOp\(probs -> indices\) cannot follow"),
    ):
        with pytest.raises(CompileError, match=words):
            Compiler().compile(wrong)


def test_the_module_paths_of_flashinfer() -> None:
    from fi_core import logits_processor
    from fi_core.compat import lacking

    for path in (
        "compiler.Compiler",
        "fusion_rules.FusionRule",
        "op.Op",
        "types.TaggedTensor",
        "validators.CompileError",
    ):
        module, name = path.split(".")
        assert lacking.find(f"logits_processor.{module}", name) is getattr(logits_processor, name), path


def test_tagged_tensors() -> None:
    x = torch.zeros(2, 3, dtype=torch.float16)
    tagged = TaggedTensor.indices(x)
    assert tagged.type is TensorType.INDICES and tagged.data is x
    assert (tagged.shape, tagged.size(), tagged.size(1)) == (x.shape, x.shape, 3)
    assert (tagged.dtype, tagged.device) == (x.dtype, x.device)
