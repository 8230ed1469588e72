"""Pipelines from logits to tokens: a list of steps, of which neighbours run as one kernel.

`LogitsPipe([Temperature(), Softmax(), TopK(), TopP(), Sample()])` checks that the steps fit each other. A call
`pipe(logits, temperature=0.7, top_k=40, top_p=0.9)` gives the tokens; these five steps are one call of
`fi_core.sample_from_logits`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fi_core import sampling

if TYPE_CHECKING:
    import torch

__all__ = [
    "LegalizationError",
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Sample",
    "Softmax",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
]


class TensorType(Enum):
    """What a tensor between two steps holds."""

    LOGITS = "logits"
    PROBS = "probs"
    INDICES = "indices"


LOGITS, PROBS, INDICES = TensorType.LOGITS, TensorType.PROBS, TensorType.INDICES


class LegalizationError(ValueError):
    """Raised by `LogitsPipe` when a step cannot follow the one before it."""


class LogitsProcessor(ABC):
    """A step. Subclasses name what they turn into what, and the argument that a call of the pipe gives them.

    Args:
        options: values of arguments that calls need not give.
    """

    turns: ClassVar[dict[TensorType, TensorType]]
    argument: ClassVar[str | None] = None

    def __init__(self, **options: Any) -> None:
        self.options = options

    @abstractmethod
    def apply(self, x: torch.Tensor, kind: TensorType, arguments: dict[str, Any]) -> torch.Tensor:
        """Computes the step.

        Args:
            x: `[batch, vocab]`.
            kind: what x holds.
            arguments: those of the call of the pipe.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


class Temperature(LogitsProcessor):
    """Divides logits by `temperature`, a number or a tensor `[batch]`."""

    turns: ClassVar = {LOGITS: LOGITS}
    argument = "temperature"

    def apply(self, x: torch.Tensor, kind: TensorType, arguments: dict[str, Any]) -> torch.Tensor:
        temperature = arguments["temperature"]
        return x / (temperature if isinstance(temperature, (int, float)) else temperature.view(-1, 1))


class Softmax(LogitsProcessor):
    """Turns logits into probabilities."""

    turns: ClassVar = {LOGITS: PROBS}

    def apply(self, x: torch.Tensor, kind: TensorType, arguments: dict[str, Any]) -> torch.Tensor:
        return sampling.softmax(x)


class TopK(LogitsProcessor):
    """Keeps the `top_k` largest elements, with ties.

    Args:
        joint_topk_topp: a following TopP counts its share of the whole row, not of the top-k elements.
    """

    turns: ClassVar = {LOGITS: LOGITS, PROBS: PROBS}
    argument = "top_k"

    def __init__(self, joint_topk_topp: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.joint = joint_topk_topp

    def apply(self, x: torch.Tensor, kind: TensorType, arguments: dict[str, Any]) -> torch.Tensor:
        keep = sampling.top_k_mask_logits if kind is LOGITS else sampling.top_k_renorm_probs
        return keep(x, arguments["top_k"])


class TopP(LogitsProcessor):
    """Keeps the smallest set of tokens whose probabilities reach `top_p`, with ties."""

    turns: ClassVar = {PROBS: PROBS}
    argument = "top_p"

    def apply(self, x: torch.Tensor, kind: TensorType, arguments: dict[str, Any]) -> torch.Tensor:
        return sampling.top_p_renorm_probs(x, arguments["top_p"])


class MinP(LogitsProcessor):
    """Keeps the tokens whose probability is at least `min_p` of the largest."""

    turns: ClassVar = {PROBS: PROBS}
    argument = "min_p"

    def apply(self, x: torch.Tensor, kind: TensorType, arguments: dict[str, Any]) -> torch.Tensor:
        share = arguments["min_p"]
        least = x.amax(-1, keepdim=True) * (share if isinstance(share, (int, float)) else share.view(-1, 1))
        kept = x.where(x >= least, 0)
        return kept / kept.sum(-1, keepdim=True)


class Sample(LogitsProcessor):
    """Draws a token from each row; the last step. Calls may give generator, seed, offset, indices and check_nan.

    Args:
        deterministic: accepted for compatibility; draws are always deterministic.
    """

    turns: ClassVar = {LOGITS: INDICES, PROBS: INDICES}

    def __init__(self, deterministic: bool = True, **options: Any) -> None:
        super().__init__(**options)

    def apply(self, x: torch.Tensor, kind: TensorType, arguments: dict[str, Any]) -> torch.Tensor:
        draw: Callable[..., Any] = sampling.sampling_from_logits if kind is LOGITS else sampling.sampling_from_probs
        return draw(x, **_of_draw(arguments))  # type: ignore[no-any-return]


_DRAW = ("generator", "seed", "offset", "indices", "check_nan")


def _of_draw(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _DRAW if name in arguments}


class _Step(NamedTuple):
    """One or more processors that run as one call of `function`."""

    processors: tuple[LogitsProcessor, ...]
    function: Callable[[Any, dict[str, Any]], Any]

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.processors))


def _filtered(processors: Sequence[LogitsProcessor], probs: bool) -> bool:
    """Whether the steps are filters in the order in which the sampling kernels apply them."""
    order = (Temperature, TopK, Softmax, TopK, TopP, MinP, Sample)
    places, at = [type(p) for p in processors], 0
    for place in places:
        while at < len(order) and order[at] is not place:
            at += 1
        if at == len(order):
            return False
        at += 1
    return places.count(TopK) <= 1 and (probs or Softmax in places or not {TopP, MinP} & set(places))


def _joint(processors: Sequence[LogitsProcessor]) -> dict[str, str]:
    joint = any(isinstance(p, TopK) and p.joint for p in processors)
    return {"filter_apply_order": "joint" if joint else "top_k_first"}


def _fused(processors: tuple[LogitsProcessor, ...], kind: TensorType) -> _Step | None:
    """One call for all of these steps, if there is one."""
    names, last = [p.argument for p in processors if p.argument], type(processors[-1])
    if [type(p) for p in processors] == [Temperature, Softmax]:
        return _Step(processors, lambda x, a: sampling.softmax(x, a["temperature"]))
    if last is not Sample or len(processors) < 2 or not _filtered(processors, kind is PROBS):
        return None
    order: dict[str, Any] = _joint(processors)
    if kind is LOGITS:

        def from_logits(x: Any, a: dict[str, Any]) -> Any:
            if {"indices", "check_nan"} & a.keys():  # which the kernel of all filters does not take
                return _in_turn(processors, x, LOGITS, a)
            chosen = {name: a[name] for name in names}
            return sampling.sample_from_logits(x, **chosen, **order, **_of_draw(a))[0]

        return _Step(processors, from_logits)
    functions: dict[tuple[str, ...], tuple[Callable[..., Any], dict[str, Any]]] = {
        ("top_k",): (sampling.top_k_sampling_from_probs, {}),
        ("top_p",): (sampling.top_p_sampling_from_probs, {}),
        ("min_p",): (sampling.min_p_sampling_from_probs, {}),
        ("top_k", "top_p"): (sampling.top_k_top_p_sampling_from_probs, order),
    }
    if tuple(names) not in functions:
        return None
    function, more = functions[tuple(names)]
    return _Step(processors, lambda x, a: function(x, *(a[name] for name in names), **more, **_of_draw(a)))


def _alone(processor: LogitsProcessor, kind: TensorType) -> _Step:
    return _Step((processor,), lambda x, a: processor.apply(x, kind, a))


def _separate(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """The steps as they run one by one: a joint TopK after its TopP, which then counts its share of the whole row."""
    steps = list(processors)
    joint = next((i for i, p in enumerate(steps) if isinstance(p, TopK) and p.joint), len(steps))
    top_p = next((i for i in range(joint, len(steps)) if isinstance(steps[i], TopP)), None)
    if top_p is not None:
        steps.insert(top_p, steps.pop(joint))
    return steps


def _in_turn(processors: Sequence[LogitsProcessor], x: Any, kind: TensorType, arguments: dict[str, Any]) -> Any:
    for processor in _separate(processors):
        x, kind = processor.apply(x, kind, arguments), processor.turns[kind]
    return x


class LogitsPipe:
    """Steps from logits, or probabilities, to tokens.

    Where one call computes a pipe from logits to tokens, it gives token 0 where nothing is allowed, and the first of
    the largest logits at temperature 0.

    Args:
        processors: the steps, in order.
        compile: whether neighbours run as one kernel where there is one. The tokens are of the same distribution.
        input_type: what a call gives; None: logits, or probabilities if the first step takes only those.

    Raises:
        LegalizationError: (a ValueError) There is no step, or one cannot follow another.
    """

    def __init__(
        self, processors: Sequence[LogitsProcessor], compile: bool = True, input_type: TensorType | None = None
    ) -> None:
        self.processors = tuple(processors)
        if not self.processors:
            raise LegalizationError("processors: at least one is required; got none")
        for processor in self.processors:
            if not isinstance(processor, LogitsProcessor):
                raise LegalizationError(f"processors: LogitsProcessor is required; got {type(processor).__name__}")
        first = self.processors[0]
        self.input_type = input_type or (LOGITS if LOGITS in first.turns else PROBS)
        kinds = [self.input_type]
        for processor in self.processors:
            if kinds[-1] not in processor.turns:
                takes = " or ".join(kind.value for kind in processor.turns)
                raise LegalizationError(f"processors: {processor} takes {takes}; got {kinds[-1].value}")
            kinds.append(processor.turns[kinds[-1]])
        self.output_type = kinds[-1]
        self.steps = tuple(self._compiled() if compile else self._single())

    def _single(self) -> list[_Step]:
        steps, kind = [], self.input_type
        for processor in _separate(self.processors):
            steps.append(_alone(processor, kind))
            kind = processor.turns[kind]
        return steps

    def _compiled(self) -> list[_Step]:
        """The longest groups that one call computes, from the front."""
        steps: list[_Step] = []
        left, kind = list(self.processors), self.input_type
        while left:
            groups = (_fused(tuple(left[:end]), kind) for end in range(len(left), 1, -1))
            step = next((group for group in groups if group), None)
            if step is None:
                left = _separate(left) if isinstance(left[0], TopK) else left
                step = _alone(left[0], kind)
            steps.append(step)
            left = left[len(step.processors) :]
            for processor in step.processors:
                kind = processor.turns[kind]
        return steps

    def __call__(self, x: torch.Tensor, **arguments: Any) -> Any:
        """Runs the steps.

        Args:
            x: `[batch, vocab]`, logits or probabilities.
            arguments: temperature, top_k, top_p and min_p, each a number or a tensor `[batch]`, of the steps that there
                are; generator, seed, offset, indices and check_nan of Sample.

        Returns:
            Tokens, int32 `[batch]`; probabilities or logits `[batch, vocab]` of a pipe without Sample.

        Raises:
            TypeError: An argument is missing, or belongs to no step.
        """
        given = {name: value for p in self.processors for name, value in p.options.items()} | arguments
        given = {name: value for name, value in given.items() if value is not None}
        needed = [p.argument for p in self.processors if p.argument]
        missing = [name for name in needed if name not in given]
        unknown = [name for name in given if name not in (*needed, *_DRAW)]
        if missing or unknown:
            what = [f"{name}: required by the pipe" for name in missing]
            raise TypeError("; ".join([*what, *(f"{name}: no step of the pipe takes it" for name in unknown)]))
        for step in self.steps:
            x = step.function(x, given)
        return x

    def __repr__(self) -> str:
        return f"LogitsPipe({', '.join(map(repr, self.steps))})"
