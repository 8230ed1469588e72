"""A layer of few tokens on Hopper: one launch finds the experts, computes both products and sums for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, VARIES, Rule, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values
from fi_core.tllm_enums import ActivationType

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation, Layer, TokenExperts
    from fi_core.runtime.launch.plan import Launches

_SHARED = 227 * 1024  # bytes of a CTA
_WARPS = 16  # of a CTA: kFewWarps
_TABLE_BYTES = 4096  # of ActiveExperts and a barrier
_RING = 4  # lines of weights that a warp has in flight; more are not faster (docs/notes/moe-few-tokens.md)
ACTIVATIONS = ("Swiglu", "SwigluBias")
MOST_TOKENS, MOST_SLOTS, MOST_TOP_K = 8, 64, 32  # kFewTokens, kFewSlots, kFewTopK


class FewTokensConfig(NamedTuple):
    row_bytes: int  # of shared memory for rows of tokens and their scales


def _row_bytes(fp8: bool) -> int:
    line = 16 * 128 + 4 * (16 if fp8 else 1)
    return (_SHARED - 128 - _TABLE_BYTES - _WARPS * (_RING * line + 2 * 8 * 16 * 4)) // 128 * 128


def fits_shared_memory(tokens: int, slots: int, hidden: int, width: int, fp8: bool) -> bool:
    """Whether a CTA holds the rows of all tokens, and the activated rows of all slots."""
    k, padding = (128, 16) if fp8 else (64, 64)
    lines, of_slots = -(-hidden // k), -(-width // k)
    scales = 32 * max(lines, slots * of_slots) if fp8 else 0
    rows = max(tokens * (2 * k * lines + padding), slots * (2 * k * of_slots + padding))
    return scales + rows <= _row_bytes(fp8)


def _unit(axes: Values) -> Unit:
    weight, x = DTYPES[axes["weight"]], DTYPES[axes["x"]]
    config = FewTokensConfig(_row_bytes(axes["weight"] == "e4m3"))
    numbers = f"{_RING}, {config.row_bytes}, fi::kExpert{axes['activation']}, {_SHARED}"
    body = f"moe_few_tokens<{weight.device}, {x.device}, {numbers}>"
    entry = Entry("moe_few_tokens", body, 32 * _WARPS, config, _SHARED, 1)
    return Unit("fi/fused_moe/moe_few_tokens.cuh", "MoeFewTokensParams", (entry,))


_WEIGHTS = Rule(("x", "weight"), "weights of x's dtype or e4m3", lambda x, weight: weight in (x, "e4m3"))
MOE_FEW_TOKENS = Op(
    name="moe_few_tokens",
    family="fused_moe",
    arguments="Tensor(a!) out, Tensor(b!) activated, Tensor x, Tensor up, Tensor down, Tensor ids, "
    "Tensor? weights=None, Tensor? up_scale=None, Tensor? down_scale=None, Tensor? bias=None, Tensor? down_bias=None, "
    "Tensor? alpha=None, Tensor? beta=None, Tensor? limit=None, int activation=3, float alpha_value=1.0, "
    "float beta_value=0.0, float limit_value=3.4e38, int first_expert=0, int expected_slots=8, Tensor? delta=None, "
    "bool? enable_pdl=None",
    # expected_slots: of the experts here, by which work is shared out.
    fields={
        "x": Field(("bf16", "f16"), "bf16"),
        "weight": Field(("bf16", "f16", "e4m3"), "bf16"),
        "activation": Field(ACTIVATIONS, "Swiglu", ActivationType),
    },
    config=FewTokensConfig,
    implementations=(
        Implementation("cpu", (*ON_CPU, *VARIES, _WEIGHTS)),
        Implementation("mma_sm90", (*exactly(90), *VARIES, _WEIGHTS), _unit),
    ),
    prebuilt=({"weight": "e4m3"},),
)
moe_few_tokens = operator(MOE_FEW_TOKENS)


def takes_slots(layer: Layer, routed: TokenExperts, out: torch.Tensor) -> bool:
    """Whether the kernel reads these slots, sums to `out` and knows the order of the rows of the second weight."""
    ids, weights, down = routed.ids, routed.weights, layer.down
    return (
        str(ids.dtype) == "torch.int32"
        and ids.is_contiguous()
        and (weights is None or (str(weights.dtype) == "torch.float32" and weights.is_contiguous()))
        and down.columns is None
        and down.weight.ndim == 3
        and all(p.scale is None or p.scale.stride(-1) == 1 for p in (layer.up, down))
        and all(p.bias is None or (p.bias.dtype == layer.x.dtype and p.bias.stride(1) == 1) for p in (layer.up, down))
        and out.dtype == layer.x.dtype
        and out.stride(1) == 1
    )


def compute_few_tokens(
    p: Launches,
    out: torch.Tensor,
    layer: Layer,
    activation: Activation,
    routed: TokenExperts,
    expected_slots: int,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the weighted sum of the experts of each token to `out`, where `takes_slots` is true.

    expected_slots: of the experts of this rank. delta: as for `run_experts`, of slots in order. Returns the activated
    values of the slots.
    """
    up, down = layer.up, layer.down
    activated = p.scratch((routed.ids.numel(), down.weight.shape[2]), layer.x.dtype)
    p.add(
        MOE_FEW_TOKENS,
        out,
        activated,
        layer.x,
        up.weight,
        down.weight,
        up_scale=up.scale,
        down_scale=down.scale,
        bias=up.bias,
        down_bias=down.bias,
        expected_slots=expected_slots,
        delta=delta,
        **activation.options(),
        **routed._asdict(),
    )
    return activated
