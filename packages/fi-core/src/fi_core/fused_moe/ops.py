"""Declares the operators of a mixture of experts: routing, sorting, gathering, activation, weighted sum."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.gemm.ops import BLOCK_ORDERS, SCALES, TILES, GemmConfig
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import THREADS, Entry, Field, Implementation, Op, Unit, Values
from fi_core.tllm_enums import ActivationType

_FLOATS = ("bf16", "f16", "f32")


class _RouteConfig(NamedTuple):
    experts: int  # of a lane, at most


def _route_unit(axes: Values) -> Unit:
    types = f"{DTYPES[axes['logits']].device}, {DTYPES[axes['weights']].device}"
    entries = tuple(
        Entry(f"moe_route_{experts}", f"moe_route<{types}, {experts}>", 128, _RouteConfig(experts))
        for experts in (4, 8, 12, 16, 32)
    )
    return Unit("fi/fused_moe/moe_route.cuh", "MoeRouteParams", entries)


MOE_ROUTE = Op(
    name="moe_route",
    family="fused_moe",
    arguments="Tensor(a!) ids, Tensor(b!) weights, Tensor logits, Tensor? bias=None, Tensor(c!)? replay=None, "
    "int method=0, int n_group=1, int topk_group=1, float scale=1.0, bool normalize=True, int shared=0, "
    "bool? enable_pdl=None",
    axes={"logits": _FLOATS, "weights": ("f32", "bf16", "f16")},
    config=_RouteConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _route_unit)),
    prebuilt=({"logits": "bf16"},),
)


class _SortConfig(NamedTuple):
    ctas: int  # of the grid; several are one cluster


def _sort_unit(axes: Values) -> Unit:
    dtype = DTYPES[axes["ids"]].device
    ctas = (16, 1) if axes["capability"] == 90 else (1,)
    entries = tuple(
        Entry(f"moe_sort_{n}", f"moe_sort<{dtype}, {str(n > 1).lower()}>", 1024, _SortConfig(n)) for n in ctas
    )
    return Unit("fi/fused_moe/moe_sort.cuh", "MoeSortParams", entries)


MOE_SORT = Op(
    name="moe_sort",
    family="fused_moe",
    arguments="Tensor(a!) offsets, Tensor(b!) rows, Tensor(c!) positions, Tensor(d!) active, Tensor ids, "
    "Tensor(e!)? zeros=None, int first_expert=0, bool? enable_pdl=None",
    axes={"ids": ("i32", "i64", "i16")},
    config=_SortConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _sort_unit)),
    prebuilt=({"ids": "i32"},),
)


class _GatherConfig(NamedTuple):
    load_bytes: int
    loads: int  # of a thread


def _gather_unit(axes: Values) -> Unit:
    if axes["quantizes"]:
        body = f"moe_gather_quantize<{DTYPES[axes['x']].device}>"
        entries: tuple[Entry, ...] = (Entry("moe_gather_quantize", body, 256, _GatherConfig(16, 2)),)
    else:
        entries = tuple(
            Entry(f"moe_gather_{load}x{loads}", f"moe_gather_copy<{load}, {loads}>", 256, _GatherConfig(load, loads))
            for load, loads in ((16, 1), (2, 1), (1, 1))
        )
    return Unit("fi/fused_moe/moe_gather.cuh", "MoeGatherParams", entries)


MOE_GATHER = Op(
    name="moe_gather",
    family="fused_moe",
    arguments="Tensor(a!) out, Tensor(b!)? out_scale, Tensor x, Tensor? x_scale, Tensor positions, "
    "bool? enable_pdl=None",
    axes={"x": ("bf16", "f16", "e4m3", "u8"), "quantizes": (False, True)},
    config=_GatherConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _gather_unit)),
    prebuilt=({"x": "bf16", "quantizes": True},),
)


class _ActivationConfig(NamedTuple):
    vectors: bool  # 16 bytes, columns in order


_ACTIVATIONS = (
    "Swiglu",
    *(a.name for a in ActivationType if a.name not in ("Swiglu", "InvalidType")),
)  # the default first


def _activation_unit(axes: Values) -> Unit:
    types = f"{DTYPES[axes['x']].device}, {DTYPES[axes['out']].device}, fi::kExpert{axes['activation']}"
    entries = tuple(
        Entry(
            f"moe_activation_{name}",
            f"moe_activation<{types}, {str(vectors).lower()}>",
            256,
            _ActivationConfig(vectors),
        )
        for name, vectors in (("vectors", True), ("elements", False))
    )
    return Unit("fi/fused_moe/moe_activation.cuh", "MoeActivationParams", entries)


MOE_ACTIVATION = Op(
    name="moe_activation",
    family="fused_moe",
    arguments="Tensor(a!) out, Tensor(b!)? out_scale, Tensor x, Tensor offsets, Tensor? bias=None, Tensor? alpha=None, "
    "Tensor? beta=None, Tensor? limit=None, Tensor? quant=None, Tensor? columns=None, int activation=3, "
    "float alpha_value=1.0, float beta_value=0.0, float limit_value=3.4e38, Tensor? delta=None, bool? enable_pdl=None",
    fields={
        "x": Field(_FLOATS, "bf16"),
        "out": Field(("bf16", "f16", "e4m3"), "bf16"),
        "activation": Field(_ACTIVATIONS, "Swiglu", ActivationType),
    },
    config=_ActivationConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _activation_unit)),
    prebuilt=({"x": "bf16", "out": "e4m3"},),
)


_GATED = tuple(name for name in _ACTIVATIONS if ActivationType[name].is_gated)


def _gated_gemm_unit(axes: Values) -> Unit:
    dtype = DTYPES[axes["x"]]
    types = f"{{0}}, {dtype.device}, {dtype.device}"
    if dtype.bytes == 2:
        tiles, mainloop = TILES["16 bits"], f"fi::Accumulate<{types}, false>"
    else:
        tiles, mainloop = TILES["gated blocks"], f"fi::Promote<{types}, fi::GemmScales::{SCALES[axes['scales']]}>"
    epilogue = f"fi::StoreGated<{{0}}, {dtype.device}, fi::kExpert{axes['activation']}>"
    entries = [tile.entry("moe_gated_gemm", mainloop, epilogue, "GroupTiles", gated=True) for tile in tiles]
    flags = THREADS if len(entries) > 1 else ()
    return Unit("fi/fused_moe/moe_gated_gemm_sm90.cuh", "MoeGatedGemmParams", tuple(entries), flags=flags)


# The first product of experts with many rows, with the activation, and in fp8 the quantisation, in its epilogue: `gemm`
# and `moe_activation` in one launch.
MOE_GATED_GEMM = Op(
    name="moe_gated_gemm",
    family="fused_moe",
    arguments="Tensor(a!) out, Tensor(b!)? out_scale, Tensor x, Tensor? x_scale, Tensor weight, Tensor? weight_scale, "
    "Tensor offsets, Tensor? bias=None, Tensor? alpha=None, Tensor? beta=None, Tensor? limit=None, int activation=3, "
    "float alpha_value=1.0, float beta_value=0.0, float limit_value=3.4e38, int expected_m=-1, int tactic=-1, "
    "Tensor? delta=None, bool? enable_pdl=None",
    fields={
        "x": Field(("bf16", "f16", "e4m3"), "bf16"),
        "activation": Field(_GATED, "Swiglu", ActivationType),
        "scales": Field(("blocks", "row_blocks"), "blocks"),  # as those of gemm
    },
    config=GemmConfig,
    varies={"scales": lambda given: BLOCK_ORDERS if given["x"] == "e4m3" else ("blocks",)},
    prebuilt=({"x": "e4m3", "activation": "Swiglu", "scales": "row_blocks"},),
    implementations=(Implementation("cpu", ON_CPU), Implementation("wgmma_sm90", exactly(90), _gated_gemm_unit)),
)


class _FinalizeConfig(NamedTuple):
    vec_size: int  # columns of a lane that lie together; 1: any alignment
    parts: int  # such vectors of a lane


def _finalize_unit(axes: Values) -> Unit:
    types = f"{DTYPES[axes['y']].device}, {DTYPES[axes['out']].device}"
    entries = tuple(
        Entry(f"moe_finalize_{vec}", f"moe_finalize<{types}, {vec}, {parts}>", 256, _FinalizeConfig(vec, parts))
        for vec, parts in ((8, 2), (1, 2))
    )
    return Unit("fi/fused_moe/moe_finalize.cuh", "MoeFinalizeParams", entries)


MOE_FINALIZE = Op(
    name="moe_finalize",
    family="fused_moe",
    arguments="Tensor(a!) out, Tensor y, Tensor? positions, Tensor? weights=None, Tensor? offsets=None, "
    "Tensor? bias=None, Tensor? columns=None, Tensor? added=None, bool? enable_pdl=None",
    axes={"y": _FLOATS, "out": _FLOATS},
    config=_FinalizeConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _finalize_unit)),
    prebuilt=({"y": "bf16", "out": "bf16"},),
)

# Formats of weights: enum MixedFormat of moe_mixed_gemm.h.
MXFP4, NVFP4, INT4, MXFP8 = range(4)
_FORMATS = ("Mxfp4", "Nvfp4", "Int4", "Mxfp8")


class _MixedConfig(NamedTuple):
    tokens: int  # of a tile
    columns: int  # weight rows of a tile
    ctas: int  # of an SM


class _MixedTile(NamedTuple):
    """A tile shape: tokens, warps with 16 weight rows each, warps that share k, CTAs that fit an SM."""

    tokens: int
    row_warps: int
    k_warps: int
    ctas: int


_MIXED_TILES = (_MixedTile(8, 2, 2, 4), _MixedTile(16, 2, 2, 3), _MixedTile(32, 4, 1, 2), _MixedTile(64, 4, 1, 2))


def _mixed_unit(axes: Values) -> Unit:
    entries = []
    for tokens, row_warps, k_warps, ctas in _MIXED_TILES:
        pitch = (4 if tokens <= 16 else 64 // tokens) * 256 + 64
        sums = 4 * row_warps * (k_warps - 1) * 32 * tokens // 2 if k_warps > 1 else 4
        size = (2 * tokens * pitch + sums + 4 * tokens + 15) // 16 * 16 + 16
        types = f"{DTYPES[axes['x']].device}, fi::k{axes['format']}"
        body = f"moe_mixed_gemm<{types}, {tokens}, {row_warps}, {k_warps}, {size}>"
        config = _MixedConfig(tokens, 16 * row_warps, ctas)
        entries.append(Entry(f"moe_mixed_gemm_{tokens}", body, 32 * row_warps * k_warps, config, size, ctas))
    return Unit("fi/fused_moe/moe_mixed_gemm.cuh", "MoeMixedGemmParams", tuple(entries))


MOE_MIXED_GEMM = Op(
    name="moe_mixed_gemm",
    family="fused_moe",
    arguments="Tensor(a!) out, Tensor x, Tensor weight, Tensor scales, Tensor offsets, Tensor? rows=None, "
    "Tensor? alpha=None, int format=0, int layout=2, int expected_m=-1, bool? enable_pdl=None",
    axes={"x": ("bf16", "f16"), "format": _FORMATS},
    config=_MixedConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("mma_sm80", at_least(80), _mixed_unit)),
    prebuilt=({"x": "bf16", "format": "Mxfp4"},),
)

moe_route = operator(MOE_ROUTE)
moe_sort = operator(MOE_SORT)
moe_gather = operator(MOE_GATHER)
moe_activation = operator(MOE_ACTIVATION)
moe_finalize = operator(MOE_FINALIZE)
moe_mixed_gemm = operator(MOE_MIXED_GEMM)
moe_gated_gemm = operator(MOE_GATED_GEMM)
