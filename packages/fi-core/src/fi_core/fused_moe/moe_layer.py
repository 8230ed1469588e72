"""Declares moe_layer: the ways to compute the experts of a layer, of which the dispatcher chooses one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fi_core.fused_moe import moe_few_tokens
from fi_core.fused_moe.ops import MXFP4
from fi_core.quantization.layout import SfLayout
from fi_core.runtime.resolve.ahead import composition
from fi_core.runtime.spec.constraint import VARIES, Constraint, Rule, exactly
from fi_core.runtime.spec.op import Field, Implementation, Op
from fi_core.tllm_enums import ActivationType

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation, Layer, Projection
    from fi_core.runtime.launch.plan import Launches

MOST_PASSES = 640  # of a launch of moe_experts: kMaxExpertPasses
TILE_TOKENS = (8, 16, 32, 64)  # of moe_experts
STREAMED_ACTIVATIONS = ("Swiglu", "SwigluBias", "Relu2")
_MOST_EXPERTS = 512
# Mean rows of an expert up to which moe_experts is faster than grouped GEMMs, by the format of weights
# (docs/notes/moe-experts.md).
_MOST_STREAMED = {"bf16": 16, "f16": 16, "e4m3 blocks": 4, "mxfp4": 16}
# Bytes of weights that a rank expects to read, by the number of tokens from 1 on, up to which moe_few_tokens is faster
# than moe_experts (docs/notes/moe-few-tokens.md).
_MOST_FEW = {"bf16": (256 << 20, 128 << 20), "f16": (256 << 20, 128 << 20), "e4m3 blocks": 4 * (104 << 20,)}
# Mean rows of an expert from which the activation is part of the first product (docs/notes/moe-gated-gemm.md).
_LEAST_GATED = 48
_MOST_ROWS_OF_STREAM = 48  # mean rows of an expert up to which the stream of weights takes most time
_SCALED = 128  # rows and columns of weights that share a scale


def expected_rows(mean: float, quantized: bool) -> int:
    """The rows of an expert for which tiles of grouped GEMMs are chosen, from their mean.

    While an expert has one tile of tokens, weights are streamed once; so nearly all experts of an even routing are to
    have one. Of a mean of 64, larger tiles than those of 64 rows are faster (docs/notes/moe-tiles.md).
    """
    if 60 < mean <= 64 and not quantized:
        return 65
    return math.ceil(mean) if mean > _MOST_ROWS_OF_STREAM else min(64, math.ceil(mean + 1.65 * mean**0.5))


def _is_few(tokens: int, mean_rows: float, experts: int, sizes: tuple[int, ...], weights: str) -> bool:
    most = _MOST_FEW[weights]
    of_expert = (sizes[0] * sizes[1] + sizes[2] * sizes[3]) * (1 if weights == "e4m3 blocks" else 2)
    return 0 < tokens <= len(most) and min(1.0, mean_rows) * experts * of_expert <= most[tokens - 1]


_ALIGNED = Constraint("alignment", ">=", 16)
_MULTIPLES = Rule(
    ("sizes",), "weights whose sizes are multiples of 8", lambda sizes: all(size % 8 == 0 for size in sizes)
)
_GATED_KINDS = tuple(kind.name for kind in ActivationType if kind.is_gated)
_STREAMED: tuple[Constraint | Rule, ...] = (
    *exactly(90),
    Rule(
        ("weights", "activation", "rows_in_order", "sizes", "batch_invariant"),
        "inside of fi_core.batch_invariant() 16-bit weights and a gated activation: bits that moe_gated_gemm has, too",
        lambda weights, activation, in_order, sizes, batch_invariant: (
            not batch_invariant
            or (weights in ("bf16", "f16") and activation in _GATED_KINDS and in_order and sizes[0] % 16 == 0)
        ),
    ),
    Constraint("weights", "in", tuple(_MOST_STREAMED)),
    Rule(("x", "dtype"), "tokens of the dtype of sums", lambda x, dtype: x == dtype),
    Rule(("x", "bias"), "no bias or one of the tokens' dtype", lambda x, bias: bias in (None, x)),
    Constraint("activation", "in", STREAMED_ACTIVATIONS),
    Constraint("known_order", "==", True),
    Constraint("row_scale", "==", False),
    _ALIGNED,
    _MULTIPLES,
    Constraint("experts", "<=", _MOST_EXPERTS),
    Constraint("passes", "<=", MOST_PASSES),
)
_FEW: tuple[Constraint | Rule, ...] = (
    *exactly(90),
    *VARIES,
    Constraint("weights", "in", tuple(_MOST_FEW)),
    Constraint("activation", "in", moe_few_tokens.ACTIVATIONS),
    Constraint("slots_in_order", "==", True),
    Constraint("rows_in_order", "==", True),
    Constraint("row_scale", "==", False),
    _ALIGNED,
    _MULTIPLES,
    Constraint("experts", "<=", _MOST_EXPERTS),
    Constraint("tokens", "<=", moe_few_tokens.MOST_TOKENS),
    Constraint("slots", "<=", moe_few_tokens.MOST_SLOTS),
    Rule(
        ("tokens", "slots"),
        f"at most {moe_few_tokens.MOST_TOP_K} experts of a token",
        lambda tokens, slots: slots <= tokens * moe_few_tokens.MOST_TOP_K,
    ),
    Rule(
        ("tokens", "slots", "sizes", "weights"),
        "rows of tokens and activated rows that fit shared memory",
        lambda tokens, slots, sizes, weights: moe_few_tokens.fits_shared_memory(
            tokens, slots, sizes[1], sizes[3], weights == "e4m3 blocks"
        ),
    ),
)
_GATED: tuple[Constraint | Rule, ...] = (
    *exactly(90),
    Constraint("weights", "in", ("bf16", "f16", "e4m3 blocks")),
    Constraint("activation", "in", _GATED_KINDS),
    Rule(
        ("weights", "bias"),
        "no bias, or one of fp32 or the weights' dtype",
        lambda weights, bias: bias in (None, "f32", weights),
    ),
    Constraint("rows_in_order", "==", True),
    Constraint("row_scale", "==", False),
    _ALIGNED,
    Rule(
        ("weights", "sizes"),
        f"rows of multiples of 16 bytes; with scales a first weight [experts, multiple of {2 * _SCALED}, multiple of "
        f"{_SCALED}]",
        lambda weights, sizes: (
            sizes[0] % 16 == 0
            and (weights != "e4m3 blocks" or (sizes[0] % (2 * _SCALED) == 0 and sizes[1] % _SCALED == 0))
        ),
    ),
)
# The implementations are named after the op that computes the first product.
MOE_LAYER = Op(
    name="moe_layer",
    family="fused_moe",
    fields={
        "x": Field(None, "bf16"),
        "dtype": Field(None, "bf16"),  # of sums
        "weights": Field(None, "bf16"),  # their format
        "activation": Field(None, "Swiglu"),
        "bias": Field(None, None),  # of the first product
        "known_order": Field((True, False), True),  # of the rows of both weights, to moe_experts
        "rows_in_order": Field((True, False), True),  # of the first weight
        "row_scale": Field((True, False), False),
        "alignment": Field((1, 16), 16),
        "sizes": Field(None, (256, 128, 128, 128)),  # rows and columns of both weights, as they are stored
        "experts": Field(None, 8),
        "mean_rows": Field(None, 1.0),  # of an expert
        "passes": Field(None, 16),
        "tokens": Field(None, 8),
        "slots": Field(None, 16),  # tokens times experts of a token
        "slots_in_order": Field((True, False), False),  # what `takes_slots` says
    },
    implementations=(
        Implementation(
            "moe_few_tokens",
            _FEW,
            preferred=(
                Rule(
                    ("tokens", "mean_rows", "experts", "sizes", "weights"), "few tokens and bytes of weights", _is_few
                ),
            ),
        ),
        Implementation(
            "moe_experts",
            _STREAMED,
            preferred=(
                Rule(
                    ("mean_rows", "weights"),
                    "few rows of an expert",
                    lambda rows, weights: rows <= _MOST_STREAMED[weights],
                ),
            ),
        ),
        Implementation(
            "moe_gated_gemm",
            _GATED,
            preferred=(
                Rule(
                    ("mean_rows", "batch_invariant"),
                    f"{_LEAST_GATED} rows of an expert on average",
                    lambda rows, batch_invariant: batch_invariant or rows >= _LEAST_GATED,
                ),
            ),
        ),
        Implementation("gemm", ()),  # or moe_mixed_gemm
    ),
)


def tile_tokens(tokens: int, mean_rows: float) -> int:
    """The rows of a tile of moe_experts. Experts with more rows take several tiles."""
    wanted = min(tokens, 2 * mean_rows)
    return next((tile for tile in TILE_TOKENS if tile >= wanted), TILE_TOKENS[-1])


def chosen_tiles(weight: str) -> tuple[int, ...]:
    """The tiles of the calls for which moe_experts is preferred, by the short dtype of weights; u8: mxfp4."""
    most = _MOST_STREAMED[{"e4m3": "e4m3 blocks", "u8": "mxfp4"}.get(weight, weight)]
    return tuple(tile for tile in TILE_TOKENS if tile <= tile_tokens(2 * most, most))


def _is_aligned(p: Launches, x: torch.Tensor) -> bool:
    """Whether TMA and vector loads take the rows."""
    steps = (step * x.element_size() for step in x.stride()[:-1])
    return x.stride(-1) == 1 and p.address(x) % 16 == 0 and all(step % 16 == 0 for step in steps)


def _has_known_order(p: Projection) -> bool:
    """Whether moe_experts knows the order of the rows of a weight."""
    if p.weight.ndim == 4 and not p.weight.is_contiguous():
        return False
    if p.columns is None:
        return True
    tiles = (64, 128) if p.weight.element_size() == 2 else (64,)
    return p.mixed is None and p.shuffle_tile in tiles and p.rows % p.shuffle_tile == 0


def _is_mxfp4(p: Launches, of: Projection) -> bool:
    """Whether a weight is mxfp4 in the only layout that moe_experts reads."""
    return (
        of.mixed is not None
        and of.mixed.format == MXFP4
        and of.mixed.layout == SfLayout.layout_linear.value
        and of.mixed.alpha is None
        and of.mixed.input_scale is None
        and of.scale is not None
        and of.scale.ndim == 3
        and p.address(of.scale) % 8 == 0
    )


def _format(p: Launches, layer: Layer) -> object:
    """A dtype, or the name of a format with scales."""
    up, down = layer.up, layer.down
    if up.mixed is None and down.mixed is None:
        if layer.blocks:
            return "e4m3 blocks"
        return up.weight.dtype if up.weight.dtype == down.weight.dtype == layer.x.dtype else "several dtypes"
    if layer.activations:
        return f"mxfp4 for {layer.activations}"
    return "mxfp4" if _is_mxfp4(p, up) and _is_mxfp4(p, down) else "mixed"


def compose_layer(
    p: Launches,
    layer: Layer,
    slots: int,
    activation: Activation,
    all_experts: int,
    scales_rows: bool,
    slots_in_order: bool,
) -> str:
    """The implementation of moe_layer that computes a layer. It depends on shapes, dtypes and addresses only."""
    x, up, down = layer.x, layer.up, layer.down
    experts = up.weight.shape[0]
    mean = slots / all_experts
    known_order = (
        _has_known_order(up)
        and _has_known_order(down)
        and up.shuffle_tile == down.shuffle_tile
        and (down.columns is None or down.bias is None)
    )
    request = {
        "x": x.dtype,
        "dtype": layer.dtype,
        "weights": _format(p, layer),
        "activation": ActivationType(activation.kind).name,
        "bias": None if up.bias is None else up.bias.dtype,
        "known_order": known_order,
        "rows_in_order": up.columns is None and up.weight.ndim == 3,
        "row_scale": scales_rows,
        "alignment": 16 if all(_is_aligned(p, t) for t in (x, up.weight, down.weight)) else 1,
        "sizes": (up.rows, up.weight.shape[-1], down.rows, down.weight.shape[-1]),
        "experts": experts,
        "mean_rows": mean,
        "passes": experts + slots // tile_tokens(x.shape[0], mean),
        "tokens": x.shape[0],
        "slots": slots,
        "slots_in_order": slots_in_order,
    }
    return composition(MOE_LAYER, p.device, *(request[name] for name in MOE_LAYER.fields))
