"""The processors of a pipeline, which name their operators for logits and for probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from fi_core.logits_processor import operators
from fi_core.logits_processor.op import LegalizationError, Op, ParameterizedOp
from fi_core.logits_processor.types import TensorType

LOGITS, PROBS = TensorType.LOGITS, TensorType.PROBS


class LogitsProcessor(ABC):
    """A step of a pipeline. A subclass returns its operators from `legalize`.

    Args:
        params: what the operators get; an argument of a call that stands here need not be given there.
    """

    def __init__(self, **params: Any) -> None:
        self.params = params

    @abstractmethod
    def legalize(self, input_type: TensorType) -> list[Op]:
        """The operators for an input of this type.

        Raises:
            LegalizationError: (a ValueError) There are none for it.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.params.items())})"


class _Processor(LogitsProcessor):
    """A processor of this library: one operator by the type of the input."""

    ops: ClassVar[dict[TensorType, type[ParameterizedOp]]]

    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type not in self.ops:
            takes = " or ".join(kind.value for kind in self.ops)
            raise LegalizationError(f"{self} takes {takes}; got {input_type.value}")
        return [self.ops[input_type](**self.params)]


class Temperature(_Processor):
    """Divides logits by `temperature`, a number above 0 or a tensor `[batch]`."""

    ops: ClassVar = {LOGITS: operators.TemperatureOp}


class Softmax(_Processor):
    """Turns logits into probabilities; at most once in a pipe.

    Args:
        enable_pdl: programmatic dependent launch; None enables it where the hardware has it.
    """

    ops: ClassVar = {LOGITS: operators.SoftmaxOp}

    def __init__(self, enable_pdl: bool | None = None, **params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **params)


class TopK(_Processor):
    """Keeps the `top_k` largest elements, with ties: a number above 0 or a tensor `[batch]`.

    Args:
        joint_topk_topp: a TopP behind it counts its share of the whole row, not of the top-k elements.
    """

    ops: ClassVar = {LOGITS: operators.LogitsTopKOp, PROBS: operators.ProbsTopKOp}

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(joint_topk_topp=joint_topk_topp, **params)


class TopP(_Processor):
    """Keeps the fewest tokens whose probabilities reach `top_p`, with ties: in (0, 1], or a tensor `[batch]`."""

    ops: ClassVar = {PROBS: operators.TopPOp}


class MinP(_Processor):
    """Keeps the tokens whose probability is at least `min_p` of the largest: in (0, 1], or a tensor `[batch]`."""

    ops: ClassVar = {PROBS: operators.MinPOp}


class Sample(_Processor):
    """Draws a token from each row; the last step. Calls may give generator, seed, offset, indices and check_nan.

    Args:
        deterministic: accepted for compatibility; draws are always deterministic.
    """

    ops: ClassVar = {LOGITS: operators.LogitsSampleOp, PROBS: operators.ProbsSampleOp}

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)
