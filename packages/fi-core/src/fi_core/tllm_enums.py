"""The codes of activations, routings and layouts of expert weights, which kernels and checkpoints share."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TypeVar

DEFAULT_SWIGLU_ALPHA = 1.0
DEFAULT_SWIGLU_BETA = 0.0
DEFAULT_SWIGLU_LIMIT = (2 - 2.0**-23) * 2.0**127  # the largest fp32 number
DEFAULT_SITU_BETA = 4.0
DEFAULT_SITU_LINEAR_BETA = 25.0

__all__ = [
    "DEFAULT_SITU_BETA",
    "DEFAULT_SITU_LINEAR_BETA",
    "DEFAULT_SWIGLU_ALPHA",
    "DEFAULT_SWIGLU_BETA",
    "DEFAULT_SWIGLU_LIMIT",
    "ActivationType",
    "Fp8QuantizationType",
    "GatedActType",
    "QuantFormat",
    "RoutingInputMode",
    "RoutingMethodType",
    "WeightLayout",
    "is_gated_activation",
]


E = TypeVar("E", bound=IntEnum)


def member(name: str, kind: type[E], value: int) -> E:
    """The member with this code. Raises ValueError, naming the argument, if there is none."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{each.value} ({each.name})" for each in kind)
        raise ValueError(f"{name} must be a {kind.__name__}: {known}; got {value!r}") from None


class ActivationType(IntEnum):
    """The activation of an expert, with g the gate and u the linear projection; the gated ones have both.

    Swiglu: `silu(g) u`. Geglu: `gelu(g) u`, by erf; GegluTanh by tanh. SwigluBias: `g sigmoid(alpha g) (u + beta)` of
    clamped g and u. SwigluStep: `min(silu(g), limit) clamp(u)`. Relu2: `relu(x)^2`. Situ: `b tanh(g / b) sigmoid(g) l
    tanh(u / l)`. ClampedRelu2: `(l tanh(relu(x) / l))^2`.
    """

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11
    ClampedRelu2 = 12

    @property
    def is_gated(self) -> bool:
        """Whether the expert has a gate projection besides the linear one."""
        return self.name in ("Swiglu", "Geglu", "SwigluBias", "SwigluStep", "GegluTanh", "Situ")


class RoutingMethodType(IntEnum):
    """How the router's logits l choose top_k experts and weigh them.

    Default: top-k of softmax(l), its probabilities. Renormalize: top-k of l, softmax over those. DeepSeekV3: sigmoid
    with bias and groups. Llama4: top-1, sigmoid. RenormalizeNaive: top-k of softmax(l), divided by their sum. TopK: the
    logits themselves. SigmoidRenorm: top-k of sigmoid(l), divided by their sum. MiniMax2: the same with bias and
    scaling. Sigmoid: top-k of sigmoid(l). TopKSigmoid: top-k of l, their sigmoid.
    """

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    TopKSigmoid = 9
    Unspecified = 10


class WeightLayout(IntEnum):
    """The order of the elements of an expert's weight `[mn, k]`; BlockMajorK is that of `convert_to_block_layout`."""

    MajorK = 0
    MajorMn = 1
    BlockMajorK = 2


class GatedActType(IntEnum):
    """The gated activation of older callers."""

    SwiGlu = 0
    GeGlu = 1


class Fp8QuantizationType(IntEnum):
    """The scales of fp8 tensors: none, DeepSeek's blocks of 128, MXFP8's of 32, one per tensor, one per channel."""

    NoneFp8 = 0
    DeepSeekFp8 = 1
    MxFp8 = 2
    PerTensorFp8 = 3
    PerChannelFp8 = 4


class QuantFormat(Enum):
    """The format of the weights, activations or outputs of experts, or in which tokens are sent between ranks."""

    BF16 = 0
    FP16 = 1
    FP8PerTensor = 2
    DeepSeekFp8 = 3
    MXFP8 = 4
    NVFP4 = 5
    MXFP4 = 6
    MXINT4 = 7
    INT4 = 8


class RoutingInputMode(IntEnum):
    """How a layer learns the experts of its tokens: from logits, or from numbers and weights, packed or not."""

    FromLogits = 0
    PackedPrecomputed = 1
    UnpackedPrecomputed = 2


def is_gated_activation(activation_type: int) -> bool:
    """Whether an activation, or its code, is gated."""
    return ActivationType(activation_type).is_gated
