"""Matrix products of tokens and weights: the op behind every GEMM of the public modules."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, Rule, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import THREADS, Entry, Field, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHARED = 227 * 1024  # bytes of a CTA
_TMA_BYTES = 16  # that addresses and strides of operands are multiples of


class GemmKind(IntEnum):
    """The kernel that an entry instantiates."""

    WGMMA = 0
    SMALL_M = 1  # wgmma for few tokens
    MMA = 2  # mma.sync


class GemmStores(IntEnum):
    """The epilogue of a WGMMA entry."""

    ROWS = 0
    TMA = 1
    TMA_HALVES = 2
    EITHER = 3  # rows, or the transposed tile of exchanged operands
    TRANSPOSED = 4  # only the latter
    WHOLE = 5  # the same by TMA, for aligned rows of out


_BY_WARPS = {
    GemmStores.ROWS: "StoreRows",
    GemmStores.EITHER: "StoreEither",
    GemmStores.TRANSPOSED: "StoreTransposed",
    GemmStores.WHOLE: "StoreWhole",
}


class GemmConfig(NamedTuple):
    kind: GemmKind
    rows: int  # of a tile
    columns: int
    k_block_clocks: int = 0  # of a tile and 128 bytes of k, for the cost model of any number of tokens
    load_bytes: int = 0  # MMA: of a load; 16, or 1 for single elements with any strides
    stage_blocks: int = 0  # SMALL_M: of 128 bytes along k in a stage
    stores: GemmStores = GemmStores.ROWS
    alone_clocks: int = 0  # as k_block_clocks, of products that are neither groups nor a batch


class _Tile(NamedTuple):
    """A tile shape of the wgmma kernel."""

    rows: int
    columns: int
    stages: int
    k_block_clocks: int
    stores: GemmStores = GemmStores.ROWS  # of 16-bit out

    def entry(self, op: str, mainloop: str, epilogue: str, tiles: str, gated: bool = False) -> Entry:
        """A kernel entry of the op; {0} in the types of the mainloop and of the epilogue stands for the tile's."""
        tile = f"fi::GemmTileSm90<{self.rows}, {self.columns}, {self.stages}{', true' if gated else ''}>"
        body = f"gemm_sm90<{{0}}, {mainloop}, {epilogue}, fi::{tiles}>".format(tile)
        config = GemmConfig(GemmKind.WGMMA, self.rows, self.columns, self.k_block_clocks, stores=self.stores)
        suffix = {GemmStores.TMA_HALVES: "_early_stores", GemmStores.WHOLE: "_whole"}.get(self.stores, "")
        return Entry(f"{op}_{self.rows}x{self.columns}{suffix}", body, 384, config, 0, 1)


# H200: a stage is 128 bytes of k. Tiles of fp8 have two sets of accumulators, one of the last 128 k.
TILES = {
    "16 bits": (
        _Tile(128, 256, 4, 1024),
        _Tile(128, 192, 5, 805, GemmStores.EITHER),
        _Tile(128, 176, 5, 730, GemmStores.EITHER),
        _Tile(128, 128, 6, 590, GemmStores.EITHER),
        _Tile(64, 256, 5, 615),
        _Tile(64, 128, 8, 450),
    ),
    "rows": (
        _Tile(256, 128, 4, 1035, GemmStores.TMA),
        _Tile(128, 192, 5, 820, GemmStores.EITHER),
        _Tile(128, 176, 5, 735, GemmStores.EITHER),
        _Tile(128, 128, 6, 620),
        _Tile(64, 256, 5, 600),
        _Tile(64, 128, 8, 450),
    ),
    "blocks": (
        _Tile(256, 128, 4, 1240),
        _Tile(128, 192, 4, 937),
        _Tile(128, 176, 5, 930),
        _Tile(128, 128, 6, 650),
        _Tile(64, 256, 5, 660),
        _Tile(64, 128, 8, 500),
    ),
    "column_blocks": (_Tile(128, 128, 6, 800), _Tile(64, 128, 8, 560)),
    # Of moe_gated_gemm: 128 features of both projections, which share a scale.
    "gated blocks": (_Tile(128, 256, 4, 1240),),
}
# fp8 without sums in fp32 has the tiles and clocks of 16 bits: tensor cores take as long for 128 bytes of k.
TILES["fast"] = TILES["16 bits"]
# Of block scales and 16-bit out, beside the same shape for any product (kGemmHalvesK). Its clocks include what is
# saved behind the mainloop (docs/notes/gemm-epilogue.md). Groups would gain 1.6 % and compile an entry more.
_EARLY_STORES = _Tile(256, 128, 4, 1190, GemmStores.TMA_HALVES)
# Of single and batched products, beside those for any product: where weights are the rows of a tile, tokens fill one of
# 160, 208 or 272 columns better than tiles of 128 rows (docs/notes/gemm-drawn.md).
_EXCHANGED = {
    "16 bits": (
        _Tile(128, 272, 4, 1095, GemmStores.TRANSPOSED),
        _Tile(128, 208, 4, 895, GemmStores.WHOLE),
        _Tile(128, 160, 5, 672, GemmStores.WHOLE),
        _Tile(128, 112, 6, 500, GemmStores.WHOLE),
        _Tile(128, 96, 6, 450, GemmStores.WHOLE),
        _Tile(128, 80, 7, 400, GemmStores.WHOLE),
        _Tile(64, 128, 8, 450, GemmStores.WHOLE),
        _Tile(64, 96, 9, 350, GemmStores.WHOLE),
    ),
    "rows": (
        _Tile(128, 208, 4, 891, GemmStores.TRANSPOSED),
        _Tile(128, 160, 5, 726, GemmStores.WHOLE),
        _Tile(128, 112, 6, 500, GemmStores.WHOLE),
        _Tile(128, 96, 6, 450, GemmStores.WHOLE),
        _Tile(128, 80, 7, 400, GemmStores.WHOLE),
        _Tile(64, 128, 8, 450, GemmStores.WHOLE),
        _Tile(64, 96, 9, 350, GemmStores.WHOLE),
    ),
}
_EXCHANGED["fast"] = _EXCHANGED["16 bits"]
# Tiles that such products can do without: of 118 drawn shapes the best tile takes 1.0017 of its time without this one,
# and of 20 of more than 1024 tokens 1.0000. Binaries have a seventh less.
_LEFT_OUT = {"rows": ((128, 128),)}
# Tiles of the kernel for few tokens beside those for any number: warpgroups, blocks of a stage, clocks of a tile and
# 128 bytes of k. Fitted together with _EXCHANGED to 67 drawn shapes of 65 to 1024 tokens; on 66 others the choice takes
# 1.005 of the time of the best tile.
_MORE_TOKENS = {
    "16 bits": ((1, 2, 412), (3, 1, 520)),
    "rows": ((1, 2, 412), (3, 1, 520)),
    "blocks": ((1, 2, 451),),
    "column_blocks": (),
}
_MORE_TOKENS["fast"] = _MORE_TOKENS["rows"]
# Clocks of tiles and 128 bytes of k for products alone, fitted with the clocks of clusters in gemm_cost.h to drawn
# shapes. Fitted to one half of them, the choice takes 1.026 (bf16) and 1.011 (fp8, one scale) of the best tile on the
# other half; those of 16-bit and fp8 operands here are fitted to both.
_ALONE = {
    "16 bits": {
        "128x256": 1139,
        "128x192": 858,
        "128x176": 770,
        "128x128": 609,
        "64x256": 608,
        "64x64": 200,
        "64x128": 292,
        "128x272": 1183,
        "128x208_whole": 944,
        "128x160_whole": 691,
        "128x112_whole": 519,
        "128x96_whole": 494,
        "128x80_whole": 419,
        "64x128_whole": 375,
        "64x96_whole": 304,
        "small_m_64x64": 205,
        "small_m_64x128": 480,
        "small_m_64x192": 362,
    },
    "rows": {
        "256x128": 1200,
        "128x192": 889,
        "128x176": 871,
        "64x256": 699,
        "64x128": 394,
        "128x208": 1010,
        "128x160_whole": 756,
        "128x112_whole": 612,
        "128x96_whole": 537,
        "128x80_whole": 469,
        "64x128_whole": 360,
        "64x96_whole": 340,
        "small_m_64x64": 271,
        "small_m_64x192": 535,
    },
    "blocks": {
        "256x128": 1346,
        "128x192": 995,
        "128x176": 1017,
        "128x128": 731,
        "64x256": 766,
        "64x128": 433,
        "small_m_64x64": 382,
        "256x128_early_stores": 1292,
    },
}
_ALONE["fast"] = _ALONE["16 bits"] | {name: _ALONE["rows"][name] for name in ("small_m_64x64", "small_m_64x192")}
# Of row_blocks, four k of a row of a_scale are one copy. A unit has the code for one order of block scales only.
SCALES = {"rows": "kRows", "blocks": "kBlocks", "row_blocks": "kRowBlocks", "column_blocks": "kColumnBlocks"}
BLOCK_ORDERS = ("row_blocks", "blocks")  # of the products of a layer: rows of scales are aligned for some k only


def _any_order(scales: str) -> str:
    """The scales without their order."""
    return "blocks" if scales == "row_blocks" else scales


def _alone(entry: Entry, clocks: Mapping[str, int]) -> Entry:
    """The entry with its clocks for products alone."""
    config: GemmConfig = entry.config
    own = clocks.get(entry.name.removeprefix("gemm_"), config.k_block_clocks)
    return entry._replace(config=config._replace(alone_clocks=own))


def _unit(axes: Values) -> Unit:
    a, b, out = (DTYPES[axes[name]] for name in ("a", "b", "out"))
    kind = "16 bits" if a.bytes == 2 else "fast" if axes["fast_accum"] else _any_order(axes["scales"])
    short = out.bytes == 2
    n_major = axes["b_major"] == "n"
    if kind in ("16 bits", "fast"):
        mainloop = f"fi::Accumulate<{{0}}, {a.device}, {b.device}, {str(n_major).lower()}>"
    else:
        mainloop = f"fi::Promote<{{0}}, {a.device}, {b.device}, fi::GemmScales::{SCALES[axes['scales']]}>"
    scaled = {"16 bits": "kBias", "fast": "kAlways", "rows": "kAlways"}.get(kind, "kNever")
    epilogues = {
        **{stores: f"fi::{name}<{{0}}, {out.device}, fi::GemmScaled::{scaled}>" for stores, name in _BY_WARPS.items()},
        GemmStores.TMA: f"fi::StoreTma<{{0}}, {out.device}>",
        GemmStores.TMA_HALVES: f"fi::StoreTmaHalves<{{0}}, {out.device}>",
    }
    tiles = "BatchedTiles" if axes["tiles"] == "batched" else "GroupTiles"
    batched, k_major = tiles == "BatchedTiles", not n_major
    more = (_EARLY_STORES,) if kind == "blocks" and short and batched else ()
    either = short and batched and k_major
    if either:
        more = (*more, *_EXCHANGED.get(kind, ()))
    entries = [
        (tile if short and (either or tile.stores != GemmStores.EITHER) else tile._replace(stores=GemmStores.ROWS))
        for tile in (*TILES[kind], *more)
        if (k_major or tile.columns % 64 == 0) and not (either and tile[:2] in _LEFT_OUT.get(kind, ()))
    ]
    made = [tile.entry("gemm", mainloop, epilogues[tile.stores], tiles) for tile in entries]
    if batched and k_major:
        made += [_small_m_entry(axes, _SMALL_M_TOKENS[-1], *tile) for tile in _MORE_TOKENS[kind]]
    made = [_alone(entry, _ALONE.get(kind, {})) for entry in made]
    header = "fi/gemm/gemm_any_m_sm90.cuh" if batched and k_major else "fi/gemm/gemm_sm90.cuh"
    return Unit(header, "GemmSm90Params", tuple(made), flags=THREADS)


class _MmaTile(NamedTuple):
    """A tile shape of the mma.sync kernel, its warps along m and n, and stages of 64 bytes of k."""

    rows: int
    columns: int
    warps_m: int
    warps_n: int
    stages: int
    vectors: bool = True


# By bytes of an element: fp8 also has sums in fp32 beside the products, so its largest tile is smaller.
_MMA_TILES = {
    bytes: (largest, _MmaTile(64, 128, 2, 4, 5), _MmaTile(32, 64, 1, 4, 8), _MmaTile(64, 64, 4, 2, 2, False))
    for bytes, largest in ((2, _MmaTile(128, 128, 2, 4, 4)), (1, _MmaTile(128, 64, 4, 2, 4)))
}


def _mma_unit(axes: Values) -> Unit:
    a, b, out = (DTYPES[axes[name]] for name in ("a", "b", "out"))
    tiles = "BatchedTilesOf" if axes["tiles"] == "batched" else "GroupTilesOf"
    blocks = str(axes["scales"] != "rows").lower()
    entries = []
    for tile in _MMA_TILES[a.bytes]:
        size = 64 * tile.stages * (tile.rows + tile.columns) + 128
        numbers = ", ".join(map(str, tile[:5]))
        vectors = str(tile.vectors).lower()
        body = f"gemm_mma<{a.device}, {b.device}, {out.device}, {numbers}, {vectors}, {blocks}, fi::{tiles}, {size}>"
        config = GemmConfig(GemmKind.MMA, tile.rows, tile.columns, load_bytes=16 if tile.vectors else 1)
        name = f"gemm_{tile.rows}x{tile.columns}{'' if tile.vectors else '_elements'}"
        ctas = 2 if tile.rows == 128 and a.bytes == 2 else 0
        entries.append(Entry(name, body, 32 * tile.warps_m * tile.warps_n, config, size, ctas))
    return Unit("fi/gemm/gemm_mma.cuh", "GemmMmaParams", tuple(entries))


# The kernel for few tokens: warpgroups, each with 64 rows of b, and blocks of 128 bytes along k of a stage. With one or
# two warpgroups a cluster may split k.
_SMALL_M_TILES = ((1, 2), (2, 2), (3, 1), (4, 1))
_SMALL_M_TOKENS = (8, 16, 32, 64)  # of a tile
_LARGE_M = _SMALL_M_TOKENS[-1] + 1
_SHORT_K_TOKENS = 16  # of a tile, where k is "short": request_of of gemm.cc tells
_SCALE_ROWS = {"rows": 0, "blocks": 128, "row_blocks": 128, "column_blocks": 1}


def _small_m_entry(axes: Values, tokens: int, warpgroups: int, blocks: int, k_block_clocks: int = 0) -> Entry:
    a, b, out = (DTYPES[axes[name]] for name in ("a", "b", "out"))
    scale_rows = _SCALE_ROWS[axes["scales"]] if a.bytes == 1 else 0
    tiles = "BatchedTiles" if axes["tiles"] == "batched" else "GroupTiles"
    rows = 64 * warpgroups
    floats = 0 if scale_rows == 0 else tokens + (rows if scale_rows == 1 else warpgroups)
    stage = blocks * ((rows + tokens) * 128 + 4 * floats) + 16
    partial = rows * tokens * 4 + 7 * 256 + 8 * rows + 4 * tokens if warpgroups <= 2 else 256
    fixed = partial + 4 * blocks * (tokens + warpgroups) + 64 + 2048
    stages = min(32, (_SHARED - fixed) // stage)
    types = f"{a.device}, {b.device}, {out.device}"
    numbers = f"{tokens}, {warpgroups}, {blocks}, {stages}, {scale_rows}"
    body = f"gemm_small_m_sm90<{types}, {numbers}, fi::{tiles}, {_SHARED}>"
    config = GemmConfig(GemmKind.SMALL_M, tokens, rows, k_block_clocks, stage_blocks=blocks)
    return Entry(f"gemm_small_m_{tokens}x{rows}", body, 128 * warpgroups + 64, config, _SHARED, 1)


def _small_m_unit(axes: Values) -> Unit:
    entries = tuple(_small_m_entry(axes, axes["tokens"], *tile) for tile in _SMALL_M_TILES)
    return Unit("fi/gemm/gemm_small_m_sm90.cuh", "GemmSm90Params", entries)


# Tiles of 16-bit products that add k in parts: there are registers for two sets of sums of up to 176 columns.
_PARTS_TILES = ((128, 192), (128, 176), (128, 128), (64, 128))
_SMALL_PARTS_TILE = _Tile(64, 64, 12, 300)  # for 65 to a few hundred tokens
_PARTS_FEW_TOKENS = ((1, 2, 412), (2, 2, 600))  # as _MORE_TOKENS


def _parts_unit(axes: Values) -> Unit:
    a, out = DTYPES[axes["a"]], DTYPES[axes["out"]]
    mainloop, epilogue = (
        f"fi::AccumulateParts<{{0}}, {a.device}, {a.device}>",
        f"fi::StoreRows<{{0}}, {out.device}, fi::GemmScaled::kBias>",
    )
    tiles = [tile._replace(stores=GemmStores.ROWS) for tile in TILES["16 bits"] if tile[:2] in _PARTS_TILES]
    tiles.append(_SMALL_PARTS_TILE)
    made = [tile.entry("gemm", mainloop, epilogue, "BatchedTiles") for tile in tiles]
    made += [_small_m_entry(axes, _SMALL_M_TOKENS[-1], *tile) for tile in _PARTS_FEW_TOKENS]
    entries = tuple(_alone(entry, _ALONE["16 bits"]) for entry in made)
    return Unit("fi/gemm/gemm_any_m_sm90.cuh", "GemmSm90Params", entries, flags=THREADS)


_SAME_OR_FP8 = Rule(
    ("a", "b"),
    "b of a's dtype, or both fp8, one of them e4m3",
    lambda a, b: (a == b and a != "e5m2") or {a, b} == {"e4m3", "e5m2"},
)


def _exact(values: Values) -> Values:
    """The axes of a kernel for any number of tokens and any order of block scales that always adds in fp32."""
    return {**values, "scales": _any_order(values["scales"]), "tokens": 0, "fast_accum": False}


def _any_m(values: Values) -> Values:
    """The axes where fp8 operands without scales of blocks may be added by the tensor cores."""
    fast = values["fast_accum"] and values["scales"] == "rows" and DTYPES[values["a"]].bytes == 1
    return {**values, "tokens": 0, "fast_accum": fast}


# The kernel for few tokens adds k as that for any number does: wgmma of 16 k after 16 k. Of fp8 it adds the products of
# other blocks of k in fp32, and with scales of blocks it begins elsewhere.
_ONE_ORDER = Rule(
    ("a", "batch_invariant"),
    "16-bit operands inside of fi_core.batch_invariant(), for its sums of fp8 differ from those of more tokens",
    lambda a, batch_invariant: not batch_invariant or DTYPES[a].bytes == 2,
)
_ONE_PART = Rule(("k",), "k that is not added in parts", lambda k: k != "parts")
_PARTS = (
    Constraint("k", "==", "parts"),
    Constraint("a", "in", ("f16", "bf16")),
    Constraint("b_major", "==", "k"),
    Constraint("tiles", "==", "batched"),
)
_HOPPER: tuple[Constraint | Rule, ...] = (*exactly(90), _SAME_OR_FP8, Constraint("alignment", ">=", _TMA_BYTES))
_FLOATS = ("f16", "bf16", "e4m3", "e5m2")
GEMM = Op(
    name="gemm",
    family="gemm",
    arguments="Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale=None, Tensor? b_scale=None, Tensor? bias=None, "
    "Tensor? m_indptr=None, Tensor? m_indices=None, Tensor? masked_m=None, Tensor? b_indices=None, "
    "int expected_m=-1, int tactic=-1, bool b_constant=False, bool b_transposed=False, bool scales_transposed=False, "
    'int scale_rows=0, bool use_fast_accum=False, bool? enable_pdl=None, str backend="auto"',
    fields={
        "a": Field(_FLOATS, "bf16"),
        "b": Field(_FLOATS, "bf16"),
        "out": Field(("f16", "bf16", "f32"), "bf16"),
        "scales": Field(tuple(SCALES), "rows"),
        "tiles": Field(("batched", "groups"), "batched"),
        "b_major": Field(("k", "n"), "k"),
        "fast_accum": Field((False, True), False),
        "alignment": Field((1, 2, 4, 8, 16), 16),
        "m": Field(None, _LARGE_M),
        # parts: inside of batch_invariant(), of weights of few rows
        "k": Field(("short", "long", "parts"), "long"),
    },
    axes={
        "a": _FLOATS,
        "b": _FLOATS,
        "out": ("f16", "bf16", "f32"),
        "scales": tuple(SCALES),
        "tiles": ("batched", "groups"),
        "b_major": ("k", "n"),
        "fast_accum": (False, True),
        "tokens": (0, *_SMALL_M_TOKENS),
    },
    config=GemmConfig,
    varies={
        "scales": lambda given: BLOCK_ORDERS if given["scales"] in BLOCK_ORDERS else (given["scales"],),
        "m": (*_SMALL_M_TOKENS, _LARGE_M),
    },
    implementations=(
        Implementation("cpu", (*ON_CPU, _SAME_OR_FP8), axes=_exact),
        Implementation(
            "wgmma_small_m_sm90",
            (*_HOPPER, _ONE_ORDER, Rule(("b_major",), "K-major b", lambda major: major == "k")),
            _small_m_unit,
            axes=lambda v: {
                **_exact(v),
                "tokens": next((t for t in _SMALL_M_TOKENS if t >= v["m"]), _SMALL_M_TOKENS[-1]),
            },
            preferred=(
                Rule(("m",), f"at most {_SMALL_M_TOKENS[-1]} tokens", lambda m: m <= _SMALL_M_TOKENS[-1]),
                Rule(
                    ("m", "k"),
                    f"at most {_SHORT_K_TOKENS} tokens where k is short",
                    lambda m, k: k != "short" or m <= _SHORT_K_TOKENS,
                ),
            ),
        ),
        Implementation("wgmma_parts_sm90", (*_HOPPER, *_PARTS), _parts_unit, axes=_exact),
        Implementation(
            "wgmma_sm90",
            (
                *_HOPPER,
                _ONE_PART,
                Rule(("a", "b_major"), "K-major b, or 16 bits", lambda a, major: major == "k" or a in ("f16", "bf16")),
            ),
            _unit,
            axes=_any_m,
        ),
        Implementation("mma_sm80", (*at_least(80), _SAME_OR_FP8), _mma_unit, axes=_exact),
    ),
    # Beside those of served models.
    prebuilt=(
        *({"a": "bf16", "b": "bf16", "m": tokens} for tokens in (*_SMALL_M_TOKENS, _LARGE_M)),
        {"a": "bf16", "b": "bf16", "m": _LARGE_M, "k": "parts"},
        *({"a": "e4m3", "b": "e4m3", "m": tokens} for tokens in (*_SMALL_M_TOKENS, _LARGE_M)),
        *({"a": "e4m3", "b": "e4m3", "tiles": "groups", "m": tokens} for tokens in (_SMALL_M_TOKENS[-1], _LARGE_M)),
        *({"a": "e4m3", "b": "e4m3", "scales": "column_blocks", "m": m} for m in (_SMALL_M_TOKENS[-1], _LARGE_M)),
    ),
)
gemm = operator(GEMM)
