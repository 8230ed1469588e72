"""LogitsPipe: processors, their operators, and a call that runs these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fi_core.logits_processor.compiler import FusionRule, ValidityCheck, compile_pipeline, whole_rows
from fi_core.logits_processor.op import CompileError, LegalizationError, Op
from fi_core.logits_processor.processors import LogitsProcessor
from fi_core.logits_processor.types import TaggedTensor, TensorType

if TYPE_CHECKING:
    import torch


def _legalized(processor: Any, input_type: TensorType) -> list[Op]:
    if not isinstance(processor, LogitsProcessor):
        raise LegalizationError(f"LogitsProcessor is required; got {type(processor).__name__}")
    ops = processor.legalize(input_type)
    if not ops:
        raise LegalizationError(f"{processor} has no operators for {input_type.value}")
    for op in ops:
        op.processor = processor
    return list(ops)


def legalize_processors(
    processors: Sequence[LogitsProcessor], initial_type: TensorType = TensorType.LOGITS
) -> list[Op]:
    """The operators of processors, of which the first gets a tensor of this type.

    Raises:
        LegalizationError: (a ValueError) There is no processor, or one has no operator for the output before it.
    """
    if not processors:
        raise LegalizationError("processors: at least one is required; got none")
    ops: list[Op] = []
    for place, processor in enumerate(processors):
        try:
            ops += _legalized(processor, ops[-1].OUT if ops else initial_type)
        except Exception as error:
            raise LegalizationError(f"processor {place}: {error}") from error
    return ops


def _only_type(processor: Any) -> TensorType:
    """The type of the input that a processor takes, where it takes one."""
    takes = []
    for kind in (TensorType.LOGITS, TensorType.PROBS):
        try:
            takes += [kind] if _legalized(processor, kind)[0].IN is kind else []
        except ValueError:
            continue
    if len(takes) == 1:
        return takes[0]
    if takes:
        raise LegalizationError(f"input_type: cannot infer it, {processor} takes logits and probs; got None")
    raise LegalizationError(f"processors: {processor!r} takes neither logits nor probs")


class LogitsPipe:
    """Processors from logits, or probabilities, to tokens.

    The tokens are those of the functions of `fi_core.sampling` that the operators name, with the same generator. Where
    one call computes a pipe from logits to tokens, it gives token 0 where nothing is allowed.

    Args:
        processors: the steps, in order.
        compile: whether neighbours run as one kernel where there is one; `compile()` does so later.
        input_type: what a call gives. It must be given if the first processor takes logits and probabilities.
        custom_fusion_rules, custom_validity_checks: as for `compile`.

    Raises:
        ValueError: There is no processor, one cannot follow another, or a check refuses the operators.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        self.processors = list(processors)
        if not self.processors:
            raise ValueError("processors: at least one is required; got none")
        self.compiled_ops: list[Op] | None = None
        try:
            self._initial_type = input_type or _only_type(self.processors[0])
            self.ops = legalize_processors(self.processors, self._initial_type)
            if compile:
                self.compile(custom_fusion_rules, custom_validity_checks)
        except (LegalizationError, CompileError) as error:
            raise type(error)(f"Pipeline creation failed: {error}") from error

    @property
    def initial_type(self) -> TensorType:
        """What a call gives: logits or probabilities."""
        return self._initial_type

    def compile(
        self,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        """Replaces neighbouring operators by those that stand for them.

        Args:
            custom_fusion_rules: rules of the caller; of two that match, that of the higher priority applies.
            custom_validity_checks: functions of the operators that raise CompileError.

        Raises:
            CompileError: (a ValueError) Operators do not fit each other, or a check refuses them.
        """
        self.compiled_ops = compile_pipeline(self.ops, custom_fusion_rules, custom_validity_checks)

    def __call__(self, x: torch.Tensor | TaggedTensor, **kwargs: Any) -> Any:
        """Runs the operators.

        Args:
            x: `[batch, vocab]`, logits or probabilities.
            kwargs: temperature, top_k, top_p and min_p, each a number or a tensor `[batch]`, of the processors that
                there are; generator, seed, offset, indices and check_nan of Sample. What no operator takes is ignored.

        Returns:
            Tokens, int32 `[batch]`; probabilities or logits `[batch, vocab]` of a pipe without Sample.

        Raises:
            ValueError: An operator refuses its input or an argument; the text names both.
        """
        tensor = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self._initial_type)
        for place, op in enumerate(whole_rows(self.ops) if self.compiled_ops is None else self.compiled_ops):
            try:
                tensor = op(tensor, **kwargs)
            except Exception as error:
                raise ValueError(f"Error executing operator {place} ({type(op).__name__}): {error}") from error
        return tensor.data

    def __repr__(self) -> str:
        def names(found: Sequence[Any]) -> str:
            return " -> ".join(type(one).__name__ for one in found)

        ops, compiled = names(self.ops), names(self.compiled_ops or ())
        return f"LogitsPipe([{names(self.processors)}], ops=[{ops}], compiled_ops=[{compiled}])"
