"""MoELayer: the formats that its configurations name, against the experts one by one in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import rand
from families.moe_reference import E4M3_LIMIT, activate, chosen, error, through_e4m3
from fi_core import fused_moe as moe
from fi_core.fused_moe import ExpertConfig, MoEConfig, QuantConfig, QuantFormat, RoutingConfig, RoutingInputMode

BF16 = torch.bfloat16
E, K, H, WIDTH, TOKENS = 4, 2, 256, 128, 9
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
F = QuantFormat
moe_layer: Any = moe
KINDS = {
    "CutlassBf16Config": (F.BF16, F.BF16), "CutlassW4A16Config": (F.MXFP4, F.BF16),
    "CutlassFp8BlockConfig": (F.DeepSeekFp8, F.DeepSeekFp8), "CutlassW4A8Config": (F.INT4, F.FP8PerTensor),
    "CutlassHummingConfig": (F.MXFP4, F.FP8PerTensor), "CutlassFp8PerTensorConfig": (F.FP8PerTensor, F.FP8PerTensor),
}  # fmt: skip
X_FACTOR, INNER_FACTOR = 60.0, 20.0  # of FP8PerTensor


def weights(device: str, gated: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    up = rand(E, (1 + gated) * WIDTH, H, dtype=BF16, device=device, seed=1, scale=H**-0.5)
    return up, rand(E, H, WIDTH, dtype=BF16, device=device, seed=2, scale=WIDTH**-0.5)


def quantized(w: torch.Tensor, kind: str) -> torch.Tensor:
    """What the documentation of each format makes of a weight, in fp64."""
    wide = w.double()
    if kind == "CutlassBf16Config":
        return wide
    if kind == "CutlassW4A8Config":
        groups = wide.unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        rounded = (groups.float() / scale.float()).round().clamp(-8, 7).double()
        return (rounded * scale.float().bfloat16().double()).flatten(-2)
    if kind == "CutlassFp8BlockConfig":
        blocks = wide.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        scale = (blocks.abs().amax((2, 4), keepdim=True) / 448).float()
        return ((blocks.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()).flatten(3).flatten(1, 2)
    if kind == "CutlassFp8PerTensorConfig":
        scale = (wide.abs().amax((1, 2), keepdim=True) / 448).float()
        return (w.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()
    blocks = wide.unflatten(-1, (-1, 32))
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil())
    size = (blocks / scale).abs()
    nearest = (size[..., None] - E2M1.to(w.device)).abs().argmin(-1)  # the smaller of two that are as near
    return (E2M1.to(w.device)[nearest] * blocks.sign() * scale).flatten(-2)


def rounded(x: torch.Tensor, kind: str, factor: float) -> torch.Tensor:
    """Activations before a product."""
    if kind == "CutlassFp8PerTensorConfig":
        return (x * factor).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() / factor
    return through_e4m3(x, {"CutlassHummingConfig": 0, "CutlassFp8BlockConfig": 128}[kind]) if (
        kind in ("CutlassHummingConfig", "CutlassFp8BlockConfig")) else x  # fmt: skip


def prepared(kind: str, device: str, up: torch.Tensor, down: torch.Tensor, **more: Any) -> Any:
    factors = {"hidden_states_scale_global": X_FACTOR, "intermediate_scale_global": torch.tensor(INNER_FACTOR)}
    own = factors if kind == "CutlassFp8PerTensorConfig" else {}
    sizes = {"num_local_experts": E, "hidden_size": H, "intermediate_size": WIDTH}
    return getattr(moe_layer, kind).prepare_weights(up, down, **sizes, **own, **more)


def pack(x: torch.Tensor, kind: str, **more: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    ids, scales = chosen(len(x), E, K, str(x.device))
    given = x
    if kind == "CutlassFp8PerTensorConfig":
        given, none = moe.CutlassFp8PerTensorConfig.prepare_activations(x, hidden_states_scale_global=X_FACTOR)
        assert none is None
    return moe.MoEActivationPack(given, None, ids, scales, **more), ids, scales


def configured(kind: str, **more: Any) -> MoEConfig:
    return MoEConfig(RoutingConfig(E, K), QuantConfig(*KINDS[kind]), ExpertConfig(WIDTH), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_formats(kind: str, device: str) -> None:
    up, down = weights(device)
    layer = moe.MoELayer(configured(kind), torch.device(device))
    views = moe.MoEWeightPack()
    views.prepare_for(getattr(moe_layer, kind).backend_key, prepared(kind, device, up, down))
    x = rand(TOKENS, H, dtype=BF16, device=device)
    act, ids, scales = pack(x, kind, routing_input_mode=RoutingInputMode.UnpackedPrecomputed)
    assert layer.winner_backend is None
    out = layer(act, views)
    assert layer.winner_backend == getattr(moe_layer, kind).backend_key
    w1, w2 = quantized(up, kind), quantized(down, kind)
    want, given = torch.zeros(TOKENS, H, dtype=torch.float64, device=device), rounded(x.double(), kind, X_FACTOR)
    for t, j in torch.cartesian_prod(torch.arange(TOKENS), torch.arange(K)).tolist():
        e = int(ids[t, j])
        inner = rounded(activate(w1[e] @ given[t], 3)[None], kind, INNER_FACTOR)[0]
        want[t] += scales[t, j].double() * (w2[e] @ inner)
    assert out.dtype == BF16 and error(out, want) < E4M3_LIMIT
    layer.refresh_backends()
    assert layer.winner_backend is None


@pytest.mark.parametrize(
    ("activation", "kind", "constants"),
    [
        (moe.SwiGLU(1.5, 0.5, 2.0), 5, {"alpha": 1.5, "beta": 0.5, "limit": 2.0}), (moe.SwiGLUStep(), 7, {}),
        (moe.GeGLU(), 4, {}), (moe.GeGLUTanh(), 8, {}), (moe.SiTU(3.0, 9.0), 10, {"alpha": 9.0, "beta": 3.0}),
        (moe.SiTU(3.0, None), 10, {"alpha": 1e6, "beta": 3.0}),
        (moe.ReLU2(), 6, {}), (moe.ReLU(), 1, {}), (moe.GELU(), 0, {}), (moe.SiLU(), 2, {}), (moe.Identity(), 9, {}),
    ],
)  # fmt: skip
def test_activations(activation: Any, kind: int, constants: dict[str, float]) -> None:
    up, down = weights("cpu", activation.is_gated)
    layer = moe.MoELayer(configured("CutlassBf16Config", activation=activation), torch.device("cpu"))
    views = moe.MoEWeightPack({"cutlass_bf16": prepared("CutlassBf16Config", "cpu", up, down, activation=activation)})
    x = rand(TOKENS, H, dtype=BF16, device="cpu")
    act, ids, scales = pack(x, "CutlassBf16Config")
    want = torch.zeros(TOKENS, H, dtype=torch.float64)
    for t, j in torch.cartesian_prod(torch.arange(TOKENS), torch.arange(K)).tolist():
        e = int(ids[t, j])
        inner = activate(up[e].double() @ x[t].double(), kind, **constants)
        want[t] += scales[t, j].double() * (down[e].double() @ inner)
    assert error(layer(act, views), want) < 3 * 2.0**-8  # the product, the activated value and the result are bf16


def test_constants_of_each_expert_and_parts_of_the_experts() -> None:
    """The second of two ranks; its view has constants that replace those of the activation."""
    up, down = weights("cpu")
    experts = ExpertConfig(WIDTH, local_expert_offset=E, local_num_experts=E)
    config = MoEConfig(RoutingConfig(2 * E, K), QuantConfig(), experts, moe.SwiGLU(2.0))
    assert eval(repr(config), vars(moe)) == config and "SwiGLU(alpha=2.0)" in repr(config)
    assert {**config}["experts"] is experts
    layer = moe.MoELayer(config, torch.device("cpu"))
    alpha = torch.linspace(0.5, 2.0, E)
    view = {**prepared("CutlassBf16Config", "cpu", up, down), "gemm1_alpha": alpha}
    ids, scales = chosen(TOKENS, 2 * E, K, "cpu")
    x = rand(TOKENS, H, dtype=BF16, device="cpu")
    out = layer(moe.MoEActivationPack(x, None, ids, scales), moe.MoEWeightPack({"cutlass_bf16": view}))
    want = torch.zeros(TOKENS, H, dtype=torch.float64)
    for t, j in (ids >= E).nonzero().tolist():
        e = int(ids[t, j]) - E
        inner = activate(up[e].double() @ x[t].double(), 5, alpha=float(alpha[e]))
        want[t] += scales[t, j].double() * (down[e].double() @ inner)
    assert error(out, want) < 3 * 2.0**-8
    with pytest.raises(ValueError, match="weights must not have situ_beta with SwiGLU"):
        layer(
            moe.MoEActivationPack(x, None, ids, scales),
            moe.MoEWeightPack({"cutlass_bf16": {**view, "situ_beta": alpha}}),
        )


def test_refusals_say_what_to_use() -> None:
    plain, cpu = configured("CutlassBf16Config"), torch.device("cpu")
    for changed, words in (
        (
            {"quant": QuantConfig(F.NVFP4, F.NVFP4)},
            "CutlassBf16Config: needs BF16 weights and BF16 activations; .*trtll",
        ),
        ({"finalize": moe.MoEFinalizeConfig(False)}, "CutlassBf16Config: do_finalize must be True"),
        ({"experts": ExpertConfig(WIDTH, 1, 2)}, "local_num_experts must divide num_experts and local_expert_offset"),
        ({"activation": moe.SiTU(clamp_limit=1.0)}, "SiTU must have no clamp_limit"),
    ):
        with pytest.raises(RuntimeError, match=words):
            moe.MoELayer(MoEConfig(**{**plain, **changed}), cpu)
    assert moe.BackendOptions((moe.CutlassBf16Config(),)).valid_for(75) == []
    x = rand(TOKENS, H, dtype=BF16, device="cpu")
    ids, scales = chosen(TOKENS, E, K, "cpu")
    logits = {"routing_input_mode": RoutingInputMode.FromLogits, "routing_logits": torch.zeros(TOKENS, E)}
    layer, views = moe.MoELayer(plain, cpu), moe.MoEWeightPack()
    with pytest.raises(NotImplementedError, match="routing_input_mode must be PackedPrecomputed or Unpacked"):
        layer(moe.MoEActivationPack(x, None, **logits), views)
    with pytest.raises(KeyError, match=r"no weights for backend 'cutlass_bf16'; prepared are \[\]"):
        layer(moe.MoEActivationPack(x, None, ids, scales), views)
    few = MoEConfig(**{**plain, "execution": moe.ExecutionConfig(tune_max_num_tokens=4)})
    with pytest.raises(ValueError, match="at most tune_max_num_tokens = 4 tokens; got 9"):
        moe.MoELayer(few, cpu)(moe.MoEActivationPack(x, None, ids, scales), views)
    for make, kind, words in (
        (lambda: moe.MoEActivationPack(x, None), ValueError, "topk_ids must be given with routing_input_mode Packed"),
        (lambda: moe.MoEActivationPack(x, None, ids.long(), scales), TypeError, "topk_ids must be int32; got torch.in"),
        (lambda: moe.MoEActivationPack(x, None, ids, **logits), ValueError, "topk_ids must be None with routing_input"),
        (lambda: moe.ActivationConfig(), TypeError, "ActivationConfig is a base"),
        (lambda: moe.SwiGLU(limit=0), ValueError, "limit must be finite and positive; got 0"),
        (lambda: QuantConfig(torch.float16), TypeError, "weight must be a QuantFormat"),
        (lambda: QuantConfig(nvfp4_4over6=None), ValueError, "nvfp4_4over6 must be left out"),
        (lambda: prepared("CutlassW4A16Config", "cpu", *(w[:, :100] for w in weights("cpu"))), ValueError,
         r"w1_bf16 must have shape \[4, 256, 256\]; got \[4, 100, 256\]"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            make()
