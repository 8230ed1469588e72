"""The parts of a `MoEConfig`, which describe a layer of experts: routing, formats, sizes, activation, execution."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from fi_core.tllm_enums import (
    DEFAULT_SITU_BETA,
    DEFAULT_SITU_LINEAR_BETA,
    DEFAULT_SWIGLU_ALPHA,
    DEFAULT_SWIGLU_BETA,
    DEFAULT_SWIGLU_LIMIT,
    ActivationType,
    QuantFormat,
    RoutingMethodType,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Readable:
    """Its `repr` is the call that makes an equal object, without what has its default."""

    def __repr__(self) -> str:
        fields: Sequence[dataclasses.Field[Any]] = dataclasses.fields(self)  # type: ignore[arg-type]
        given = {f.name: getattr(self, f.name) for f in fields}
        own = [f for f in fields if f.default is dataclasses.MISSING or given[f.name] != f.default]
        words = (
            f"{f.name}={type(x).__name__}.{x.name}" if isinstance(x := given[f.name], Enum) else f"{f.name}={x!r}"
            for f in own
        )
        return f"{type(self).__name__}({', '.join(words)})"


@dataclass(frozen=True, repr=False)
class RoutingConfig(Readable):
    """How the router chooses: top_k of num_experts (of all ranks) by a method, DeepSeek-V3's in groups."""

    num_experts: int
    top_k: int
    method: RoutingMethodType = RoutingMethodType.Default
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float | None = None


class _Unset:
    """Stands for a setting that is not given, where None means off."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()


@dataclass(frozen=True, repr=False)
class QuantConfig(Readable):
    """The formats of weights, of activations in the products, and of the result.

    nvfp4_4over6 is for NVFP4 activations, which no configuration here has: any value of it raises ValueError.
    """

    weight: QuantFormat = QuantFormat.BF16
    activation: QuantFormat = QuantFormat.BF16
    output: QuantFormat = QuantFormat.BF16
    _: KW_ONLY
    swizzled_scale_factors: bool | None = None
    per_token_scale: bool | None = None
    nvfp4_4over6: Any = UNSET

    def __post_init__(self) -> None:
        for name in ("weight", "activation", "output"):
            if not isinstance(getattr(self, name), QuantFormat):
                raise TypeError(f"{name} must be a QuantFormat; got {getattr(self, name)!r}")
        if self.nvfp4_4over6 is not UNSET and self.activation is not QuantFormat.NVFP4:
            raise ValueError(f"nvfp4_4over6 must be left out without NVFP4 activations; got {self.nvfp4_4over6!r}")

    @property
    def pair(self) -> tuple[QuantFormat, QuantFormat]:
        """The formats of weights and of activations."""
        return self.weight, self.activation


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and positive; got {value!r}")


@dataclass(frozen=True, repr=False)
class ActivationConfig(Readable):
    """Base of the activations of an expert, with their constants; the formulas are those of `ActivationType`."""

    type: ClassVar[ActivationType]

    def __post_init__(self) -> None:
        if type(self) is ActivationConfig:
            raise TypeError("ActivationConfig is a base: use SwiGLU(), GeGLU(), ReLU2() or another of its kinds")

    @property
    def is_gated(self) -> bool:
        """Whether the expert has a gate projection besides the linear one."""
        return self.type.is_gated


@dataclass(frozen=True, repr=False)
class SwiGLU(ActivationConfig):
    """`g sigmoid(alpha g) (u + beta)`, g at most limit, u within +-limit."""

    type: ClassVar[ActivationType] = ActivationType.Swiglu
    alpha: float = DEFAULT_SWIGLU_ALPHA
    beta: float = DEFAULT_SWIGLU_BETA
    limit: float = DEFAULT_SWIGLU_LIMIT

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise ValueError(f"{name} must be finite; got {value!r}")
        _positive(limit=self.limit)


@dataclass(frozen=True, repr=False)
class SiTU(ActivationConfig):
    """`b tanh(g / b) sigmoid(g) l tanh(u / l)` with b = gate_scale, l = linear_scale."""

    type: ClassVar[ActivationType] = ActivationType.Situ
    gate_scale: float = DEFAULT_SITU_BETA
    linear_scale: float | None = DEFAULT_SITU_LINEAR_BETA
    clamp_limit: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_scale is None:
            raise ValueError("gate_scale must be finite and positive; got None")
        _positive(gate_scale=self.gate_scale, linear_scale=self.linear_scale, clamp_limit=self.clamp_limit)


@dataclass(frozen=True, repr=False)
class GeGLU(ActivationConfig):
    """`gelu(g) u`, by erf."""

    type: ClassVar[ActivationType] = ActivationType.Geglu


@dataclass(frozen=True, repr=False)
class GeGLUTanh(ActivationConfig):
    """`gelu(g) u`, by tanh."""

    type: ClassVar[ActivationType] = ActivationType.GegluTanh


@dataclass(frozen=True, repr=False)
class SwiGLUStep(ActivationConfig):
    """`min(silu(g), limit) clamp(u)`, u within +-limit."""

    type: ClassVar[ActivationType] = ActivationType.SwigluStep
    limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(limit=self.limit)


@dataclass(frozen=True, repr=False)
class ReLU2(ActivationConfig):
    """`relu(x)^2`, without a gate."""

    type: ClassVar[ActivationType] = ActivationType.Relu2


@dataclass(frozen=True, repr=False)
class Identity(ActivationConfig):
    """x, without a gate."""

    type: ClassVar[ActivationType] = ActivationType.Identity


@dataclass(frozen=True, repr=False)
class GELU(ActivationConfig):
    """`gelu(x)`, by erf, without a gate."""

    type: ClassVar[ActivationType] = ActivationType.Gelu


@dataclass(frozen=True, repr=False)
class ReLU(ActivationConfig):
    """`relu(x)`, without a gate."""

    type: ClassVar[ActivationType] = ActivationType.Relu


@dataclass(frozen=True, repr=False)
class SiLU(ActivationConfig):
    """`silu(x)`, without a gate."""

    type: ClassVar[ActivationType] = ActivationType.Silu


@dataclass(frozen=True, repr=False)
class ExpertConfig(Readable):
    """Sizes: the inner size of an expert; this rank's experts (None: all); shared experts behind the routed ones."""

    intermediate_size: int
    local_expert_offset: int = 0
    local_num_experts: int | None = None
    num_fused_shared_experts: int = 0

    def __post_init__(self) -> None:
        if self.num_fused_shared_experts < 0:
            raise ValueError(f"num_fused_shared_experts must be at least 0; got {self.num_fused_shared_experts}")


@dataclass(frozen=True, repr=False)
class MoEFinalizeConfig(Readable):
    """The sum of each token's experts. use_fused_finalize is accepted; the sum has the same bits in every run."""

    do_finalize: bool = True
    use_fused_finalize: bool = True


@dataclass(frozen=True, repr=False)
class ExecutionConfig(Readable):
    """Programmatic dependent launch (None: where the hardware has it), and the most tokens of a call."""

    enable_pdl: bool | None = None
    tune_max_num_tokens: int = 8192
