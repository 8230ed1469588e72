"""The operators of the processors, and those that stand for several: each is one call of `fi_core.sampling`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fi_core import sampling
from fi_core.logits_processor.op import Op, ParameterizedOp
from fi_core.logits_processor.types import TaggedTensor, TensorType

if TYPE_CHECKING:
    import torch

LOGITS, PROBS, INDICES = TensorType.LOGITS, TensorType.PROBS, TensorType.INDICES
_DRAW = ("generator", "seed", "offset", "indices", "check_nan")


def _number(name: str, value: Any) -> Any:
    """The value of an argument, which is in its range if it is a number."""
    if isinstance(value, (int, float)):
        share = name in ("top_p", "min_p")
        if value <= 0 or (share and value > 1):
            raise ValueError(
                f"{name}: a number {'in (0, 1]' if share else 'above 0'} or a tensor is required; got {value}"
            )
    return value


class _Operator(ParameterizedOp):
    """An operator whose arguments are named by `takes`."""

    takes: ClassVar[tuple[str, ...]] = ()

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        """The result for the values of `takes`. draw: arguments of sampling, if OUT is tokens."""
        raise NotImplementedError

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        gives = self._validate_input_type(tensor)
        values = [_number(name, self._get_param(name, kwargs)) for name in self.takes]
        options = {name: self._get_param(name, kwargs, required=False) for name in _DRAW if gives is INDICES}
        draw = {name: value for name, value in options.items() if value is not None}
        return TaggedTensor(self.compute(tensor.data, *values, **draw), gives)


def _column(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else value.view(-1, 1)


class TemperatureOp(_Operator):
    """Divides logits by `temperature`."""

    IN, OUT, takes = LOGITS, LOGITS, ("temperature",)

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        scaled: torch.Tensor = x / _column(values[0])
        return scaled


class SoftmaxOp(_Operator):
    """Turns logits into probabilities."""

    IN, OUT = LOGITS, PROBS

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        return sampling.softmax(x, enable_pdl=self.default_params.get("enable_pdl"))


class FusedTemperatureSoftmaxOp(_Operator):
    """`sampling.softmax` with a temperature."""

    IN, OUT, takes = LOGITS, PROBS, ("temperature",)

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        return sampling.softmax(x, values[0], self.default_params.get("enable_pdl"))


class LogitsTopKOp(_Operator):
    """`sampling.top_k_mask_logits`."""

    IN, OUT, takes = LOGITS, LOGITS, ("top_k",)

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        return sampling.top_k_mask_logits(x, values[0])


class ProbsTopKOp(_Operator):
    """`sampling.top_k_renorm_probs`."""

    IN, OUT, takes = PROBS, PROBS, ("top_k",)

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        return sampling.top_k_renorm_probs(x, values[0])


class TopPOp(_Operator):
    """`sampling.top_p_renorm_probs`."""

    IN, OUT, takes = PROBS, PROBS, ("top_p",)

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        return sampling.top_p_renorm_probs(x, values[0])


class MinPOp(_Operator):
    """Keeps probabilities of at least `min_p` of the largest, and divides them by their sum."""

    IN, OUT, takes = PROBS, PROBS, ("min_p",)

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        kept = x.where(x >= x.amax(-1, keepdim=True) * _column(values[0]), 0)
        return kept / kept.sum(-1, keepdim=True)


class LogitsSampleOp(_Operator):
    """`sampling.sampling_from_logits`."""

    IN, OUT = LOGITS, INDICES

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        return sampling.sampling_from_logits(x, **draw)


class _SampleFromProbs(_Operator):
    """One function of sampling from probabilities."""

    IN, OUT = PROBS, INDICES
    function: ClassVar[Callable[..., Any]]

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        return type(self).function(x, *values, **draw)  # type: ignore[no-any-return]


class ProbsSampleOp(_SampleFromProbs):
    """`sampling.sampling_from_probs`."""

    function = staticmethod(sampling.sampling_from_probs)


class FusedProbsTopKSampleOp(_SampleFromProbs):
    """`sampling.top_k_sampling_from_probs`."""

    takes = ("top_k",)
    function = staticmethod(sampling.top_k_sampling_from_probs)


class FusedProbsTopPSampleOp(_SampleFromProbs):
    """`sampling.top_p_sampling_from_probs`."""

    takes = ("top_p",)
    function = staticmethod(sampling.top_p_sampling_from_probs)


class FusedProbsMinPSampleOp(_SampleFromProbs):
    """`sampling.min_p_sampling_from_probs`."""

    takes = ("min_p",)
    function = staticmethod(sampling.min_p_sampling_from_probs)


def is_joint(op: Op) -> bool:
    """Whether a top-k operator leaves the whole row to a top-p operator behind it."""
    return bool(isinstance(op, ParameterizedOp) and op.default_params.get("joint_topk_topp"))


class FusedProbsTopKTopPSampleOp(_SampleFromProbs):
    """`sampling.top_k_top_p_sampling_from_probs`; jointly with `joint_topk_topp`."""

    takes = ("top_k", "top_p")

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        order = "joint" if is_joint(self) else "top_k_first"
        top_k, top_p = values
        draw["filter_apply_order"] = order
        samples: torch.Tensor = sampling.top_k_top_p_sampling_from_probs(x, top_k, top_p, **draw)
        return samples


class FusedLogitsSampleOp(_Operator):
    """`sampling.sample_from_logits`, in place of all operators of a pipe.

    Args:
        ops: those operators.
        apart: the same as fewer calls; they run where a call gives `indices` or `check_nan`.
    """

    IN, OUT = LOGITS, INDICES

    def __init__(self, ops: Sequence[_Operator], apart: Sequence[Op], **default_params: Any) -> None:
        super().__init__(**default_params)
        self.takes = tuple(name for op in ops for name in op.takes)  # type: ignore[misc]
        self.apart = tuple(apart)

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        if any(self._get_param(name, kwargs, required=False) is not None for name in ("indices", "check_nan")):
            for op in self.apart:
                tensor = op(tensor, **kwargs)
            return tensor
        return super().__call__(tensor, **kwargs)

    def compute(self, x: torch.Tensor, *values: Any, **draw: Any) -> torch.Tensor:
        order = "joint" if is_joint(self) else "top_k_first"
        return sampling.sample_from_logits(x, **dict(zip(self.takes, values)), filter_apply_order=order, **draw)[0]
