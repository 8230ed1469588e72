"""MoELayer: a layer of experts from a description, over `cutlass_fused_moe`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fi_core.fused_moe.activations import UNBOUNDED
from fi_core.fused_moe.backend_configs import BACKENDS, BackendConfig
from fi_core.fused_moe.configs import (
    UNSET,
    ActivationConfig,
    ExecutionConfig,
    ExpertConfig,
    MoEFinalizeConfig,
    QuantConfig,
    Readable,
    RoutingConfig,
    SiTU,
    SwiGLU,
    SwiGLUStep,
)
from fi_core.fused_moe.cutlass import cutlass_fused_moe
from fi_core.observe.log import fi_api
from fi_core.tllm_enums import QuantFormat, RoutingInputMode, RoutingMethodType

if TYPE_CHECKING:
    import torch

# Tensors of a view that replace constants of the activation, one for each expert.
_CONSTANTS = {"gemm1_alpha": "swiglu_alpha", "gemm1_beta": "swiglu_beta", "gemm1_clamp_limit": "swiglu_limit"}
_OF_SITU = {"situ_beta": "situ_beta", "situ_linear_beta": "situ_linear_beta"}
_OF_STEP = {"gemm1_clamp_limit": "swiglu_limit"}


@dataclass(frozen=True, repr=False)
class BackendOptions(Readable):
    """The formats that a layer may use, in order of preference."""

    candidates: tuple[BackendConfig, ...] = ()

    def valid_for(self, arch: int) -> list[BackendConfig]:
        """Those that a GPU of compute capability arch, as 90, computes."""
        return [c for c in self.candidates if c.supported(arch)]

    def __len__(self) -> int:
        return len(self.candidates)

    def __iter__(self) -> Iterator[BackendConfig]:
        return iter(self.candidates)


@dataclass(frozen=True, repr=False)
class MoEConfig(Readable):
    """A layer of experts. `**config` gives its parts by name."""

    routing: RoutingConfig
    quant: QuantConfig
    experts: ExpertConfig
    activation: ActivationConfig = field(default_factory=SwiGLU)
    backend: BackendOptions = field(default_factory=lambda: BackendOptions(tuple(kind() for kind in BACKENDS)))
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    finalize: MoEFinalizeConfig = field(default_factory=MoEFinalizeConfig)

    def __post_init__(self) -> None:
        if self.experts.num_fused_shared_experts and self.routing.method is not RoutingMethodType.DeepSeekV3:
            raise ValueError(
                f"method must be DeepSeekV3 with num_fused_shared_experts above 0; got {self.routing.method!r}"
            )

    def keys(self) -> Iterator[str]:
        """The names of the parts."""
        return (f.name for f in dataclasses.fields(self))

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


@dataclass
class MoEActivationPack:
    """Tokens and the experts that were chosen for them.

    hidden_states_q: `[tokens, hidden]`, bf16, or e4m3 of FP8PerTensor. hidden_states_scale: None in all formats here.
    topk_ids: int32 `[tokens, top_k]`; topk_weights: `[tokens, top_k]`, fp32 or bf16.
    """

    hidden_states_q: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    per_token_scale: torch.Tensor | None = field(default=None, kw_only=True)
    routing_input_mode: RoutingInputMode = field(default=RoutingInputMode.PackedPrecomputed, kw_only=True)
    routing_logits: torch.Tensor | None = field(default=None, kw_only=True)
    routing_bias: torch.Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        from_logits = self.routing_input_mode is RoutingInputMode.FromLogits
        given = {
            name: getattr(self, name) is not None
            for name in ("topk_ids", "topk_weights", "routing_logits", "routing_bias")
        }
        wanted = ("routing_logits",) if from_logits else ("topk_ids", "topk_weights")
        for name in wanted:
            if not given[name]:
                raise ValueError(f"{name} must be given with routing_input_mode {self.routing_input_mode.name}")
        for name in set(given) - set(wanted) - ({"routing_bias"} if from_logits else set()):
            if given[name]:
                raise ValueError(f"{name} must be None with routing_input_mode {self.routing_input_mode.name}")
        if self.topk_ids is not None and str(self.topk_ids.dtype) != "torch.int32":
            raise TypeError(f"topk_ids must be int32; got {self.topk_ids.dtype}: torch.topk returns int64")
        for f in dataclasses.fields(self):
            other = getattr(getattr(self, f.name), "device", self.hidden_states_q.device)
            if other != self.hidden_states_q.device:
                raise ValueError(f"{f.name} must be on {self.hidden_states_q.device}, as hidden_states_q; got {other}")

    @property
    def num_tokens(self) -> int:
        """Rows of hidden_states_q."""
        return int(self.hidden_states_q.shape[0])


@dataclass
class MoEWeightPack:
    """Weights in the formats of one or more configurations, by their `backend_key`."""

    native_views: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def prepare_for(self, backend_key: str, view: dict[str, torch.Tensor]) -> None:
        """Keeps what `prepare_weights` has returned."""
        self.native_views[backend_key] = view

    def get_view(self, backend_key: str) -> dict[str, torch.Tensor]:
        """The tensors of a format. Raises KeyError where they were not prepared."""
        if backend_key not in self.native_views:
            raise KeyError(f"no weights for backend {backend_key!r}; prepared are {sorted(self.native_views)}")
        return self.native_views[backend_key]


class MoELayer:
    """Computes a layer of experts in the format that its configuration names: `layer(activations, weights)`.

    Of each pair of formats there is one configuration, so nothing is measured to choose one.

    Args:
        config: the layer. The formats are bf16, mxfp4 weights with bf16 or e4m3 activations, int4 weights, and e4m3
            with scales of experts or of 128 x 128. Ranks hold equal parts of the experts.
        device: where it runs; None: the current CUDA device, or the CPU where there is none.

    Raises:
        RuntimeError: no candidate computes this configuration; the text has the reason of each.
    """

    @fi_api
    def __init__(self, config: MoEConfig, device: torch.device | None = None) -> None:
        import torch

        if not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a MoEConfig; got {type(config).__name__}")
        self.config = config
        here = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        if device is not None and not isinstance(device, (str, torch.device)):
            raise TypeError(f"device must be a device of torch; got {device!r}")
        try:
            self.device = torch.device(here if device is None else device)
        except RuntimeError as error:
            raise ValueError(f"device must be a device of torch; got {device!r}") from error
        self._winner: str | None = None
        reasons = {type(candidate).__name__: self._missing(candidate) for candidate in config.backend}
        chosen = [candidate for candidate in config.backend if not reasons[type(candidate).__name__]]
        if not chosen:
            raise RuntimeError(
                "no candidate of config.backend computes this layer: "
                + "; ".join(f"{name}: {why}" for name, why in reasons.items() if why)
                + ". cutlass_fused_moe, trtllm_fp8_block_scale_moe and trtllm_fp4_block_scale_moe compute other formats"
            )
        self._backend: BackendConfig = chosen[0]
        self._constants = self._of_activation(config.activation)

    def _missing(self, candidate: BackendConfig) -> str:
        """Why a candidate does not compute the layer; "" if it does."""
        config, quant, experts = self.config, self.config.quant, self.config.experts
        local = experts.local_num_experts or config.routing.num_experts
        checks = (
            (
                quant.pair == candidate.pair,
                f"needs {candidate.pair[0].name} weights and {candidate.pair[1].name} activations",
            ),
            (quant.output is QuantFormat.BF16, "the output must be BF16"),
            (not quant.swizzled_scale_factors, "swizzled_scale_factors must be None: tokens have no scales"),
            (not quant.per_token_scale, "per_token_scale must be None"),
            (quant.nvfp4_4over6 is UNSET, "nvfp4_4over6 must be left out"),
            (config.finalize.do_finalize, "do_finalize must be True"),
            (not experts.num_fused_shared_experts, "num_fused_shared_experts must be 0"),
            (
                not config.routing.num_experts % local and not experts.local_expert_offset % local,
                "local_num_experts must divide num_experts and local_expert_offset",
            ),
            (getattr(config.activation, "clamp_limit", None) is None, "SiTU must have no clamp_limit"),
        )
        return next((words for holds, words in checks if not holds), "")

    def _of_activation(self, activation: ActivationConfig) -> dict[str, Any]:
        """The constants that are not the defaults, as `cutlass_fused_moe` takes them."""
        import torch

        if isinstance(activation, SiTU):
            linear = UNBOUNDED if activation.linear_scale is None else activation.linear_scale
            return {"situ_beta": activation.gate_scale, "situ_linear_beta": linear}
        local = self.config.experts.local_num_experts or self.config.routing.num_experts
        values: dict[str, float] = {}
        if isinstance(activation, SwiGLU) and activation != SwiGLU():
            values = {name: getattr(activation, name) for name in ("alpha", "beta", "limit")}
        elif isinstance(activation, SwiGLUStep):
            values = {"limit": activation.limit}
        return {
            f"swiglu_{name}": torch.full((local,), value, dtype=torch.float32, device=self.device)
            for name, value in values.items()
        }

    def _given_constants(self, view: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Those of the activation, with what the view has for each expert. Raises ValueError for another activation."""
        activation, known = self.config.activation, {**_CONSTANTS, **_OF_SITU}
        taken = {SiTU: _OF_SITU, SwiGLU: _CONSTANTS, SwiGLUStep: _OF_STEP}.get(type(activation), {})
        foreign = sorted(view.keys() & (known.keys() - taken.keys()))
        if foreign:
            raise ValueError(f"weights must not have {foreign[0]} with {type(activation).__name__}; it has no such one")
        return self._constants | {taken[key]: view[key] for key in taken if key in view}

    @fi_api
    def __call__(self, act_pack: MoEActivationPack, weight_pack: MoEWeightPack) -> torch.Tensor:
        """The layer.

        Args:
            act_pack: the tokens and their experts; routing from logits is refused.
            weight_pack: weights in this layer's format; `gemm1_alpha`, `gemm1_beta`, `gemm1_clamp_limit` (SwiGLU),
                `situ_beta`, `situ_linear_beta` in it replace the activation's constants for each expert.

        Returns:
            `[tokens, hidden]`, bf16.

        Raises:
            ValueError: there are more tokens than execution.tune_max_num_tokens, or a shape does not fit.
            TypeError: a pack or a dtype is another.
            KeyError: weights of this format were not prepared.
            NotImplementedError: routing_input_mode is FromLogits.
        """
        import torch

        for name, pack, kind in (
            ("act_pack", act_pack, MoEActivationPack),
            ("weight_pack", weight_pack, MoEWeightPack),
        ):
            if not isinstance(pack, kind):
                raise TypeError(f"{name} must be a {kind.__name__}; got {type(pack).__name__}")
        config, limit = self.config, self.config.execution.tune_max_num_tokens
        if act_pack.num_tokens > limit:
            raise ValueError(
                f"act_pack must have at most tune_max_num_tokens = {limit} tokens; got {act_pack.num_tokens}"
            )
        if act_pack.routing_input_mode is RoutingInputMode.FromLogits:
            raise NotImplementedError(
                "routing_input_mode must be PackedPrecomputed or UnpackedPrecomputed: route with fused_topk_deepseek "
                "or torch.topk, or call trtllm_bf16_moe or another function with routing_logits"
            )
        for name in ("hidden_states_scale", "per_token_scale"):
            if getattr(act_pack, name) is not None:
                raise ValueError(f"{name} must be None for {self._backend.backend_key}; its tokens have no scales")
        assert act_pack.topk_ids is not None  # a pack without logits has it
        view = weight_pack.get_view(self._backend.backend_key)
        local = config.experts.local_num_experts or config.routing.num_experts
        self._winner = self._backend.backend_key
        result: torch.Tensor = cutlass_fused_moe(
            act_pack.hidden_states_q,
            act_pack.topk_ids,
            act_pack.topk_weights,
            output_dtype=torch.bfloat16,
            ep_size=config.routing.num_experts // local,
            ep_rank=config.experts.local_expert_offset // local,
            activation_type=config.activation.type,
            enable_pdl=config.execution.enable_pdl,
            use_fused_finalize=config.finalize.use_fused_finalize,
            **self._backend.arguments(view),
            **self._given_constants(view),
        )
        return result

    @property
    def winner_backend(self) -> str | None:
        """The `backend_key` of the last call; None before the first."""
        return self._winner

    def reset_winner(self) -> None:
        """Forgets the last call."""
        self._winner = None

    def refresh_backends(self) -> None:
        """Forgets the last call; nothing else is kept between calls."""
        self.reset_winner()
