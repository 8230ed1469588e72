"""The experts of few tokens on Hopper: one launch for both products, which streams the weights of active experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.fused_moe.moe_layer import MOST_PASSES, STREAMED_ACTIVATIONS, TILE_TOKENS, chosen_tiles
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, VARIES, Rule, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values
from fi_core.tllm_enums import ActivationType

if TYPE_CHECKING:
    import torch

    from fi_core.fused_moe.layer import Activation, Layer, Tables, TokenExperts
    from fi_core.runtime.launch.plan import Launches

_SHARED = 227 * 1024  # bytes of a CTA
COUNTERS = MOST_PASSES + 1  # of a launch, zeros before it
_MOST_SLOTS, _MOST_SORTED_TOKENS = 64, 16  # that the kernel sorts and sums by itself: kMaxSlots, kMostSortedTokens
_MOST_SUMMED = 16 * (COUNTERS - 1 - _MOST_SLOTS)  # columns that have a counter for each 16
_SLOT_BYTES = 5 * 4 * 64  # of a SlotTable
_FP4_TOKENS = 32  # most of a tile of mxfp4 weights: registers hold weights too


class ExpertsConfig(NamedTuple):
    tokens: int  # of a tile
    weight_rows: int


class _Tile(NamedTuple):
    warpgroups: int  # of 64 rows of weights each
    blocks: int  # of 128 bytes along k of a stage
    loaders: int  # warps that load rows, at most the stages of the ring


def _tile(kind: str, tokens: int) -> _Tile:
    """The fastest for weights of a dtype and tiles of as many tokens (docs/notes/moe-experts.md)."""
    if kind == "u8":
        return _Tile(3, 1, 3)
    if kind == "e4m3" and tokens >= 32:
        return _Tile(4, 1, 5 if tokens == 32 else 3)
    return _Tile(2, 2, 4 if tokens == 64 else 5)


# For so few slots that tiles of 128 weight rows leave SMs without one (docs/notes/moe-few-slots.md). Of 16-bit weights
# inside of batch_invariant().
_FEW_SLOTS_TILE = _Tile(1, 4, 4)


def _entry(axes: Values, tile: _Tile) -> Entry:
    weight, x = DTYPES[axes["weight"]], DTYPES[axes["x"]]
    tokens, kind = axes["tokens"], axes["weight"]
    rows = 64 * tile.warpgroups
    scales = {"e4m3": 4 * (tokens + 2 * tile.warpgroups), "u8": 4 * tokens + 16 * rows}.get(kind, 0)  # bytes of a block
    lines = 1 if kind != "u8" else 6 if axes["x"] == "f16" else 4  # of a token: mxfp4 takes parts of them
    stage = tile.blocks * ((rows + tokens * lines) * 128 + scales) + 16
    stages = min(32, (_SHARED - 3 * 1024 - 256 - 8 * MOST_PASSES - 4 - _SLOT_BYTES) // stage)
    numbers = f"{tokens}, {tile.warpgroups}, {tile.blocks}, {stages}, {tile.loaders}"
    body = (
        f"expert_gemm_sm90<{'fi::E2m1' if kind == 'u8' else weight.device}, {x.device}, {x.device}, {numbers}, "
        f"fi::kExpert{axes['activation']}, "
        f"{_SHARED}>"
    )
    threads = 128 * tile.warpgroups + 32 + 32 * tile.loaders
    return Entry(f"moe_experts_{tokens}x{rows}", body, threads, ExpertsConfig(tokens, rows), _SHARED, 1)


def _unit(axes: Values) -> Unit:
    tokens, kind = axes["tokens"], axes["weight"]
    entries = [_entry(axes, _tile(kind, tokens))]
    if kind != "u8" and tokens == 8:
        entries.insert(0, _entry(axes, _FEW_SLOTS_TILE))
    return Unit("fi/fused_moe/moe_experts_sm90.cuh", "ExpertGemmParams", tuple(entries))


_WEIGHTS = Rule(("x", "weight"), "weights of x's dtype, e4m3 or mxfp4", lambda x, weight: weight in (x, "e4m3", "u8"))
# Of 16-bit weights its bits are those of moe_gated_gemm and gemm, which compute many rows.
_ONE_ORDER = Rule(
    ("weight", "batch_invariant"),
    "16-bit weights inside of fi_core.batch_invariant(), for other sums follow the batch",
    lambda weight, batch_invariant: not batch_invariant or weight in ("bf16", "f16"),
)
MOE_EXPERTS = Op(
    name="moe_experts",
    family="fused_moe",
    arguments="Tensor(a!) out, Tensor(b!) activated, Tensor x, Tensor up, Tensor down, Tensor offsets, Tensor rows, "
    "Tensor(c!) progress, Tensor? up_scale=None, Tensor? down_scale=None, Tensor? bias=None, Tensor? alpha=None, "
    "Tensor? beta=None, Tensor? limit=None, int activation=3, float alpha_value=1.0, float beta_value=0.0, "
    "float limit_value=3.4e38, int expected_tokens=8, Tensor(d!)? sum=None, Tensor? ids=None, Tensor? weights=None, "
    "Tensor? down_bias=None, int first_expert=0, int shuffle_tile=0, Tensor? delta=None, bool ready=False, "
    "bool? enable_pdl=None",
    # expected_tokens: rows that a tile is to hold; experts with more take several tiles. ready: offsets and progress
    # were complete before the call ahead in the stream began.
    fields={
        "x": Field(("bf16", "f16"), "bf16"),
        "weight": Field(("bf16", "f16", "e4m3", "u8"), "bf16"),  # u8: mxfp4
        "activation": Field(STREAMED_ACTIVATIONS, "Swiglu", ActivationType),
        "tokens": Field(TILE_TOKENS, 8),
    },
    config=ExpertsConfig,
    varies={"tokens": lambda given: chosen_tiles(given["weight"])},
    implementations=(
        Implementation("cpu", (*ON_CPU, *VARIES, _WEIGHTS)),
        Implementation("wgmma_sm90", (*exactly(90), _ONE_ORDER, _WEIGHTS), _unit),
    ),
    prebuilt=({"weight": "e4m3"},),
)
moe_experts = operator(MOE_EXPERTS)


def sums_slots(p: Launches, layer: Layer, routed: TokenExperts, out: torch.Tensor, tokens: int) -> bool:
    """Whether `stream_experts` with tiles of so many tokens sums the experts of each token as well."""
    ids, weights, bias = routed.ids, routed.weights, layer.down.bias

    def by_pairs(rows: torch.Tensor) -> bool:
        return (
            rows.dtype == layer.x.dtype and rows.stride(1) == 1 and not rows.stride(0) % 2 and not p.address(rows) % 4
        )

    return (
        tokens <= _MOST_SORTED_TOKENS
        and ids.numel() <= _MOST_SLOTS
        and str(ids.dtype) == "torch.int32"
        and ids.is_contiguous()
        and (weights is None or (str(weights.dtype) == "torch.float32" and weights.is_contiguous()))
        and (bias is None or by_pairs(bias))
        and by_pairs(out)
        and out.shape[1] <= _MOST_SUMMED
    )


def stream_experts(
    p: Launches,
    layer: Layer,
    tables: Tables,
    activation: Activation,
    tokens: int,
    sum: torch.Tensor | None = None,
    routed: TokenExperts | None = None,
    delta: torch.Tensor | None = None,
    keeps_activated: bool = False,
    ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of the experts for the sorted rows, as `run_experts` gives them, and the activated values.

    tokens: of a tile. sum and routed: what `sums_slots` allows; the weighted sums of the experts are written to sum.
    delta, keeps_activated, ready: as for `run_experts`.
    """
    x, up, down = layer.x, layer.up, layer.down
    slots = tables.rows.shape[0]
    out = p.scratch((slots, x.shape[1]), x.dtype)
    activated = (p.result if keeps_activated else p.scratch)((slots, activation.width(up.rows)), x.dtype)
    sums = {"sum": sum, "down_bias": down.bias, **routed._asdict()} if routed else {}
    p.add(
        MOE_EXPERTS,
        out,
        activated,
        x,
        up.weight,
        down.weight,
        offsets=tables.offsets,
        rows=tables.rows,
        progress=tables.counters,
        up_scale=up.scale,
        down_scale=down.scale,
        bias=up.bias,
        expected_tokens=tokens,
        shuffle_tile=up.shuffle_tile,
        delta=delta,
        ready=ready,
        **activation.options(),
        **sums,
    )
    return out, activated
