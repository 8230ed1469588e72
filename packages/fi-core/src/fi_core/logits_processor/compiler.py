"""Checks the operators of a pipeline, and replaces neighbours by operators that stand for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fi_core.logits_processor import operators
from fi_core.logits_processor.op import CompileError, Op, ParameterizedOp
from fi_core.logits_processor.operators import (
    LogitsSampleOp,
    LogitsTopKOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
    is_joint,
)
from fi_core.logits_processor.types import TensorType

ValidityCheck = Callable[[list[Op]], None]


class FusionRule(NamedTuple):
    """Neighbouring operators that another one stands for.

    pattern  their classes, or those of the processors that they come from
    guard    whether the rule applies to operators that match
    build    the operator that stands for them
    prio     rules of a higher one are tried first
    """

    pattern: tuple[type, ...]
    guard: Callable[[list[Op]], bool]
    build: Callable[[list[Op]], Op]
    prio: int = 0

    def matches(self, window: list[Op]) -> bool:
        """Whether the rule applies to these operators."""
        fits = len(window) == len(self.pattern) and all(
            isinstance(op, kind) or isinstance(op.processor, kind) for op, kind in zip(window, self.pattern)
        )
        return fits and self.guard(window)


def _defaults(window: Sequence[Op]) -> dict[str, Any]:
    """The default arguments of operators."""
    return {name: value for op in window for name, value in getattr(op, "default_params", {}).items()}


def _rule(kind: type[ParameterizedOp], *pattern: type[Op]) -> FusionRule:
    return FusionRule(pattern, lambda _: True, lambda window: kind(**_defaults(window)), prio=10)


def _default_rules() -> list[FusionRule]:
    joint = _rule(operators.FusedProbsTopKTopPSampleOp, ProbsTopKOp, TopPOp, ProbsSampleOp)
    return [
        joint._replace(guard=lambda window: is_joint(window[0]), prio=100),
        joint,
        _rule(operators.FusedTemperatureSoftmaxOp, TemperatureOp, SoftmaxOp),
        _rule(operators.FusedProbsTopKSampleOp, ProbsTopKOp, ProbsSampleOp),
        _rule(operators.FusedProbsTopPSampleOp, TopPOp, ProbsSampleOp),
        _rule(operators.FusedProbsMinPSampleOp, MinPOp, ProbsSampleOp),
    ]


def _whole_pipes() -> Iterator[FusionRule]:
    """Pipes from logits to tokens that one kernel computes: the filters in its order, top-k at most once."""

    def build(window: list[Op]) -> Op:
        return operators.FusedLogitsSampleOp(window, Compiler().compile(window), **_defaults(window))  # type: ignore[arg-type]

    ways: list[tuple[tuple[type[Op], ...], ...]] = [
        (t, k, (LogitsSampleOp,)) for t in ((), (TemperatureOp,)) for k in ((), (LogitsTopKOp,))
    ]
    top_k = (((), ()), ((LogitsTopKOp,), ()), ((), (ProbsTopKOp,)))
    ways += [
        (t, before, (SoftmaxOp,), behind, p, m, (ProbsSampleOp,))
        for t, (before, behind), p, m in itertools.product(
            ((), (TemperatureOp,)), top_k, ((), (TopPOp,)), ((), (MinPOp,))
        )
    ]
    for way in ways:
        pattern = tuple(itertools.chain.from_iterable(way))
        if len(pattern) > 1:
            yield FusionRule(pattern, lambda _: True, build)


def whole_rows(ops: Sequence[Op], fusing: bool = False) -> list[Op]:
    """The operators with each joint top-k behind its top-p, which then counts its share of the whole row.

    Args:
        ops: as processors gave them.
        fusing: whether a rule stands for a joint top-k of probabilities directly before a top-p and a draw.
    """
    found = list(ops)
    at = next(
        (i for i, op in enumerate(found) if isinstance(op, (LogitsTopKOp, ProbsTopKOp)) and is_joint(op)), len(ops)
    )
    behind = next((i for i in range(at, len(found)) if isinstance(found[i], TopPOp)), None)
    fused = fusing and [type(op) for op in found[at : at + 3]] == [ProbsTopKOp, TopPOp, ProbsSampleOp]
    if behind is not None and not fused:
        found.insert(behind, ProbsTopKOp(**_defaults([found.pop(at)])))
    return found


class Compiler:
    """Rules and checks; new ones hold those of this library."""

    def __init__(self) -> None:
        self.fusion_rules = _default_rules()
        self.validity_checks: list[ValidityCheck] = [_types_fit, _one_softmax]

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Adds a rule; among those of one priority the earlier goes first."""
        self.fusion_rules.append(rule)

    def register_validity_check(self, check: ValidityCheck) -> None:
        """Adds a check, which raises CompileError for operators that it does not let pass."""
        self.validity_checks.append(check)

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        """The operators to run.

        Raises:
            CompileError: (a ValueError) There are no operators, they do not fit each other, or a check refuses them.
        """
        if not ops:
            raise CompileError("ops: at least one is required; got none")
        for check in self.validity_checks:
            check(list(ops))
        return self._fused(whole_rows(ops, fusing=True))

    def _fused(self, ops: list[Op]) -> list[Op]:
        rules, at = sorted(self.fusion_rules, key=lambda rule: -rule.prio), 0
        while at < len(ops):
            rule = next((rule for rule in rules if rule.matches(ops[at : at + len(rule.pattern)])), None)
            if rule is not None:
                window = ops[at : at + len(rule.pattern)]
                ops[at : at + len(window)] = [rule.build(window)]
            at = at + 1 if rule is None else max(at - 1, 0)
        return ops


def _types_fit(ops: list[Op]) -> None:
    if ops[0].IN is TensorType.INDICES:
        raise CompileError(f"{ops[0]}: logits or probs are required first")
    for before, op in itertools.pairwise(ops):
        if op.IN is not before.OUT:
            raise CompileError(f"{op} cannot follow {before}")


def _one_softmax(ops: list[Op]) -> None:
    if sum(isinstance(op, SoftmaxOp) for op in ops) > 1:
        raise CompileError("Softmax: at most one is required; got more")


def compile_pipeline(
    ops: Sequence[Op],
    custom_fusion_rules: Sequence[FusionRule] | None = None,
    custom_validity_checks: Sequence[ValidityCheck] | None = None,
) -> list[Op]:
    """The operators to run in place of `ops`.

    Args:
        ops: those of processors, in order.
        custom_fusion_rules: rules beside those of this library, which has priority 10, of joint top-k and top-p 100.
            They see every operator: a whole pipe is then not one kernel.
        custom_validity_checks: functions of the operators that raise CompileError.

    Raises:
        CompileError: as `Compiler.compile`.
    """
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    made = compiler.compile(ops)
    whole = next((rule for rule in _whole_pipes() if rule.matches(list(ops))), None)
    return made if custom_fusion_rules or whole is None else [whole.build(list(ops))]
