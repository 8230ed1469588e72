"""An operator of a pipeline, and the errors of operators that do not fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from fi_core.logits_processor.types import TaggedTensor, TensorType


class LegalizationError(ValueError):
    """Raised when a processor has no operator for the output of the one before it."""


class CompileError(ValueError):
    """Raised when operators do not fit each other, or by a validity check of the caller."""


class Op(ABC):
    """An operator: subclasses set `IN` and `OUT`, and compute in `__call__`."""

    IN: ClassVar[TensorType]
    OUT: ClassVar[TensorType]
    processor: Any = None  # that the operator comes from

    def __init__(self) -> None:
        if not all(isinstance(getattr(self, name, None), TensorType) for name in ("IN", "OUT")):
            raise ValueError(f"{type(self).__name__}: IN and OUT of TensorType are required")

    @abstractmethod
    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        """Computes the operator.

        Args:
            tensor: of type IN, `[batch, vocab]`.
            kwargs: all arguments of the call of the pipe.

        Returns:
            The result, of type OUT.
        """

    def _validate_input_type(self, tensor: TaggedTensor) -> TensorType:
        """OUT, for an input of type IN."""
        if tensor.type is not self.IN:
            raise ValueError(f"{type(self).__name__} takes {self.IN.value}; got {tensor.type.value}")
        return self.OUT

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.IN.value} -> {self.OUT.value})"


class ParameterizedOp(Op):
    """An operator with arguments.

    Args:
        default_params: values of arguments that calls of the pipe need not give.
    """

    def __init__(self, **default_params: Any) -> None:
        super().__init__()
        self.default_params = default_params

    def _get_param(self, name: str, kwargs: dict[str, Any], required: bool = True) -> Any:
        """The value of an argument: that of the call, else the default; None counts as not given."""
        value = kwargs.get(name)
        value = self.default_params.get(name) if value is None else value
        if value is None and required:
            raise ValueError(f"{name}: required by {type(self).__name__}; got None")
        return value
