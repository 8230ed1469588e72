"""Trace templates of the rope functions, with fp64 references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, options, tensors

if TYPE_CHECKING:
    import torch

_HEADS: dict[str, Var | Const] = {
    "nnz": Var("rows: the tokens of all requests"),
    "num_qo_heads": Const(abbrev="h"),
    "num_kv_heads": Const(abbrev="kv"),
}
_SEGMENTS: dict[str, Var | Const] = {"segments_plus_1": Var(), "segments": Var()}
_PLAIN = {
    **options(int32="rotary_dim", bool="interleave", float32="rope_scale rope_theta"),
}
_SMOOTH = {
    **options(float32="low_freq_factor high_freq_factor", int32="old_context_len"),
}


def _rope_reference(  # type: ignore[no-untyped-def]
    q,
    k,
    pos_ids=None,
    indptr: Any = None,
    offsets: Any = None,
    rotary_dim=None,
    interleave=False,
    rope_scale=1.0,
    rope_theta=1e4,
):
    import torch

    if pos_ids is None:
        pos_ids = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
        for b, offset in enumerate(offsets.tolist()):
            begin, end = indptr[b : b + 2].tolist()
            pos_ids[begin:end] = torch.arange(offset, offset + end - begin, device=q.device)
    width = rotary_dim or q.shape[-1]
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=q.device)
    angle = (pos_ids.double().unsqueeze(1) * rope_theta ** (-pair / width) / rope_scale).unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    first, second = (
        (slice(0, width, 2), slice(1, width, 2)) if interleave else (slice(width // 2), slice(width // 2, width))
    )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        y, a, b = x.to(torch.float64, copy=True), x[..., first].double(), x[..., second].double()
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
        return y

    return rotate(q), rotate(k)


def _rope_smooth_reference(  # type: ignore[no-untyped-def]
    q,
    k,
    pos_ids=None,
    indptr: Any = None,
    offsets: Any = None,
    rotary_dim=None,
    interleave=False,
    rope_scale=8.0,
    rope_theta=5e5,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    old_context_len=8192,
):
    import math

    import torch

    if pos_ids is None:
        pos_ids = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
        for b, offset in enumerate(offsets.tolist()):
            begin, end = indptr[b : b + 2].tolist()
            pos_ids[begin:end] = torch.arange(offset, offset + end - begin, device=q.device)
    width = rotary_dim or q.shape[-1]
    f = rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device=q.device) / width)
    spread = high_freq_factor - low_freq_factor
    smooth = (f * old_context_len / (2 * math.pi * spread) - low_freq_factor / spread).clamp(0, 1)
    angle = (pos_ids.double().unsqueeze(1) * (f * (1 - smooth) / rope_scale + f * smooth)).unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    first, second = (
        (slice(0, width, 2), slice(1, width, 2)) if interleave else (slice(width // 2), slice(width // 2, width))
    )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        y, a, b = x.to(torch.float64, copy=True), x[..., first].double(), x[..., second].double()
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
        return y

    return rotate(q), rotate(k)


def _angles(cos_sin_cache, positions):  # type: ignore[no-untyped-def]
    """The cosines and sines of each row, NaN at a position outside the cache."""
    inside, most = (positions >= 0) & (positions < len(cos_sin_cache)), max(len(cos_sin_cache) - 1, 0)
    return cos_sin_cache[positions.long().clamp(0, most)].double().where(inside.unsqueeze(1), float("nan"))


def _rope_table_reference(positions, query, key, head_size, cos_sin_cache, is_neox=True):  # type: ignore[no-untyped-def]
    import torch

    width = cos_sin_cache.shape[1]
    cos, sin = _angles(cos_sin_cache, positions).unsqueeze(1).chunk(2, -1)
    first, second = (
        (slice(width // 2), slice(width // 2, width)) if is_neox else (slice(0, width, 2), slice(1, width, 2))
    )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float64, copy=True).view(x.shape[0], -1, head_size)
        a, b = y[..., first].clone(), y[..., second].clone()
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
        return y.view(x.shape)

    return rotate(query), rotate(key)


def _rope_quantize_reference(  # type: ignore[no-untyped-def]
    q_rope,
    k_rope,
    q_nope,
    k_nope,
    cos_sin_cache,
    pos_ids,
    is_neox=True,
    quantize_dtype=None,
    quant_scale_q=1.0,
    quant_scale_kv=1.0,
):
    import torch

    dtype = quantize_dtype or torch.float8_e4m3fn
    top, width = torch.finfo(dtype).max, cos_sin_cache.shape[1]
    first, second = (
        (slice(width // 2), slice(width // 2, width)) if is_neox else (slice(0, width, 2), slice(1, width, 2))
    )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        cos, sin = _angles(cos_sin_cache, pos_ids).view(-1, *[1] * (x.ndim - 2), width).chunk(2, -1)
        y, a, b = torch.empty_like(x, dtype=torch.float64), x[..., first].double(), x[..., second].double()
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
        return y

    def cast(x: torch.Tensor | None, scale: float, like: torch.Tensor) -> torch.Tensor:
        given = like.new_empty(*like.shape[:-1], 0) if x is None else x
        return (given.double() * scale).clamp(-top, top).to(dtype)

    return (
        cast(rotate(q_rope), quant_scale_q, q_rope),
        cast(rotate(k_rope), quant_scale_kv, k_rope),
        cast(q_nope, quant_scale_q, q_rope),
        cast(k_nope, quant_scale_kv, k_rope),
    )


def _rope_quantize_append_reference(  # type: ignore[no-untyped-def]
    q_rope,
    k_rope,
    q_nope,
    k_nope,
    v,
    cos_sin_cache,
    pos_ids,
    k_cache,
    v_cache,
    kv_indices,
    kv_indptr,
    batch_indices,
    positions,
    is_neox=True,
    quantize_dtype=None,
    quant_scale_q=1.0,
    quant_scale_kv=1.0,
    page_size=16,
    kv_layout="NHD",
):
    import torch

    dtype = quantize_dtype or k_cache.dtype
    top, width = torch.finfo(dtype).max, cos_sin_cache.shape[1]
    first, second = (
        (slice(width // 2), slice(width // 2, width)) if is_neox else (slice(0, width, 2), slice(1, width, 2))
    )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        cos, sin = _angles(cos_sin_cache, pos_ids).view(-1, *[1] * (x.ndim - 2), width).chunk(2, -1)
        y, a, b = torch.empty_like(x, dtype=torch.float64), x[..., first].double(), x[..., second].double()
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
        return y

    def cast(x: torch.Tensor | None, scale: float, like: torch.Tensor) -> torch.Tensor:
        given = like.new_empty(*like.shape[:-1], 0) if x is None else x
        return (given.double() * scale).clamp(-top, top).to(dtype)

    rope, nope = cast(rotate(k_rope), quant_scale_kv, k_rope), cast(k_nope, quant_scale_kv, k_rope)
    if v is None:
        rows = ((k_cache, nope), (v_cache, rope))
    else:
        both = torch.cat([rope.float(), nope.float()], -1).to(dtype)
        rows = ((k_cache, both), (v_cache, cast(v, quant_scale_kv, v)))
    for row in (batch_indices >= 0).nonzero().flatten().tolist():
        nth, slot = divmod(int(positions[row]), page_size)
        page = int(kv_indices[kv_indptr[batch_indices[row]] + nth])
        for cache, values in rows:
            (cache[page] if kv_layout == "NHD" else cache[page].transpose(0, 1))[slot] = values[row]
    return cast(rotate(q_rope), quant_scale_q, q_rope), cast(q_nope, quant_scale_q, q_rope), k_cache, v_cache


def _segments(draw: Draw, nnz: int, num_segments: int | None, max_position: int) -> tuple[list[int], torch.Tensor]:
    """Lengths of equal segments and their first positions; None: of three segments, one of them empty."""
    counts = [nnz // 2, 0, nnz - nnz // 2] if num_segments is None else [nnz // num_segments] * num_segments
    return counts, draw.integers(0, max(max_position - max(counts), 1), (len(counts),))


def _positions(draw: Draw, nnz: int, num_segments: int | None, max_position: int) -> torch.Tensor:
    """Positions of the tokens of equal segments; None: in any order."""
    if num_segments is None:
        return draw.integers(0, max_position, (nnz,))
    counts, offsets = _segments(draw, nnz, num_segments, max_position)
    return (offsets.unsqueeze(1) + draw.int32(range(counts[0]))).flatten()


def _make_of_heads(ragged: bool) -> Callable[..., dict[str, Any]]:
    """q and k in strided rows; segments or positions."""

    def make(
        draw: Draw,
        *,
        dtype: str = "bfloat16",
        nnz: int = 7,
        num_qo_heads: int = 3,
        num_kv_heads: int = 1,
        head_dim: int = 66,
        num_segments: int | None = None,
        max_position: int = 5000,
        **options: Any,
    ) -> dict[str, Any]:
        found = {
            name: draw.rows(draw.normal((nnz, heads, head_dim), dtype))
            for name, heads in (("q", num_qo_heads), ("k", num_kv_heads))
        }
        if ragged:
            counts, offsets = _segments(draw, nnz, num_segments, max_position)
            rows = {"indptr": draw.offsets(counts), "offsets": offsets}
        else:
            rows = {"pos_ids": _positions(draw, nnz, num_segments, max_position)}
        return {**found, **rows, **options}

    return make


def _samples_of_heads() -> tuple[dict[str, Any], ...]:
    options: tuple[dict[str, Any], ...] = ({}, {"interleave": True}, {"rotary_dim": 32, "rope_theta": 5e5})
    dtypes = ("bfloat16", "float16", "float32")
    return (*({"dtype": dtype, **more} for dtype in dtypes for more in options), {"head_dim": 128, "num_qo_heads": 4})


def _work(arguments: Mapping[str, Any]) -> Work:
    """q, k and positions are read, and a row of the table for each position; q and k are written."""
    heads = [arguments[name] for name in ("q", "k", "query", "key") if name in arguments]
    rows = [arguments[name] for name in ("pos_ids", "positions", "indptr", "offsets") if name in arguments]
    table = arguments.get("cos_sin_cache")
    read = 0 if table is None else nbytes(table) * min(heads[0].shape[0], table.shape[0]) // max(table.shape[0], 1)
    return Work(3 * sum(x.numel() for x in heads), 2 * nbytes(heads) + nbytes(rows) + read)


# The angles of large positions are exact to fp32 only.
_TOLERANCE = {"float32": (1e-4, 1e-4)}


def _of_heads(
    name: str, ragged: bool, inplace: bool, scalars: dict[str, Scalar], reference: Any, text: str
) -> TraceTemplate:
    q, k = (["nnz", heads, "head_dim"] for heads in ("num_qo_heads", "num_kv_heads"))
    rows = (
        {"indptr": Tensor(["segments_plus_1"]), "offsets": Tensor(["segments"])}
        if ragged
        else {"pos_ids": Tensor(["nnz"])}
    )
    return TraceTemplate(
        "rope",
        name_prefix=name,
        axes=_HEADS | {"head_dim": Const(abbrev="d")} | (_SEGMENTS if ragged else {}),
        inputs={"q": Tensor(q), "k": Tensor(k), **rows, **scalars},
        outputs={
            "q_rope": Tensor(q, param="q" if inplace else None, dtype_from="q"),
            "k_rope": Tensor(k, param="k" if inplace else None, dtype_from="k"),
        },
        reference=reference,
        description=text + (", in place." if inplace else "."),
        op="rope",
        make=_make_of_heads(ragged),
        samples=_samples_of_heads(),
        work=_work,
        tolerance=_TOLERANCE,
    )


def plain(name: str, *, ragged: bool = False, inplace: bool = False) -> TraceTemplate:
    return _of_heads(name, ragged, inplace, _PLAIN, _rope_reference, "Rotary position embedding")


def llama31(name: str, *, ragged: bool = False, inplace: bool = False) -> TraceTemplate:
    text = "Rotary position embedding with the frequencies of Llama 3.1"
    return _of_heads(name, ragged, inplace, _PLAIN | _SMOOTH, _rope_smooth_reference, text)


def _cos_sin(angles: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([angles.cos(), angles.sin()], 1).float()


def _make_cached(
    draw: Draw,
    *,
    dtype: str = "bfloat16",
    nnz: int = 7,
    num_qo_heads: int = 3,
    num_kv_heads: int = 1,
    head_size: int = 66,
    rotary_dim: int = 66,
    num_segments: int | None = None,
    max_position: int = 50,
    rope_theta: float = 1e4,
    **options: Any,
) -> dict[str, Any]:
    """Strided rows and a table of max_position positions."""
    frequencies = rope_theta ** (-draw.int32(range(0, rotary_dim, 2)).double() / rotary_dim)
    angles = draw.int32(range(max_position)).double().unsqueeze(1) * frequencies
    return {
        "positions": _positions(draw, nnz, num_segments, max_position),
        "query": draw.rows(draw.normal((nnz, num_qo_heads * head_size), dtype)),
        "key": draw.rows(draw.normal((nnz, num_kv_heads * head_size), dtype)),
        "head_size": head_size,
        "cos_sin_cache": _cos_sin(angles),
        **options,
    }


def cached(name: str, *, inplace: bool = False) -> TraceTemplate:
    return TraceTemplate(
        "rope",
        name_prefix=name,
        axes={
            "nnz": Var("rows: the tokens of all requests"),
            "q_width": Const("num_qo_heads * head_size", abbrev="q"),
            "k_width": Const("num_kv_heads * head_size", abbrev="k"),
            "head_size": Const(abbrev="d"),
            "max_position": Var(),
            "rotary_dim": Const(abbrev="rd"),
        },
        inputs={
            **tensors(positions="nnz", query="nnz q_width", key="nnz k_width"),
            "head_size": Scalar("int32"),
            "cos_sin_cache": Tensor(["max_position", "rotary_dim"]),
            "is_neox": Scalar("bool", optional=True),
        },
        outputs={
            "query_out": Tensor(["nnz", "q_width"], param="query" if inplace else None, dtype_from="query"),
            "key_out": Tensor(["nnz", "k_width"], param="key" if inplace else None, dtype_from="key"),
        },
        reference=(_angles, _rope_table_reference),
        op="rope",
        make=_make_cached,
        samples=tuple(
            {"dtype": dtype, **more}
            for dtype in ("bfloat16", "float16", "float32")
            for more in ({}, {"is_neox": False}, {"rotary_dim": 32}, {"head_size": 128, "rotary_dim": 128})
        ),
        work=_work,
        others=("q_weight", "k_weight", "eps", "value", "paged_kv_cache", "slot_mapping", "kv_layout")
        if inplace
        else (),
        description="Rotary position embedding by a cache of cosines and sines" + (", in place." if inplace else "."),
    )


_PARTS: dict[str, Var | Const] = {
    "rotary_dim": Const(abbrev="rd"),
    "no_rope_dim": Const(abbrev="nd"),
    "max_position": Var(),
}
_OPTIONS = {
    **options(bool="is_neox", dtype="quantize_dtype", float32="quant_scale_q quant_scale_kv"),
}


def _fp8(dims: list[str], param: str | None = None) -> Tensor:
    return Tensor(dims, param=param, dtype="float8_e4m3fn", dtype_from_scalar="quantize_dtype")


def _sources(mla: bool) -> dict[str, Tensor]:
    q, k = ["nnz", "num_qo_heads"], ["nnz"] if mla else ["nnz", "num_kv_heads"]
    return {
        "q_rope": Tensor([*q, "rotary_dim"]),
        "k_rope": Tensor([*k, "rotary_dim"]),
        "q_nope": Tensor([*q, "no_rope_dim"], optional=True),
        "k_nope": Tensor([*k, "no_rope_dim"], optional=True),
    }


_TABLE = {"cos_sin_cache": Tensor(["max_position", "rotary_dim"]), "pos_ids": Tensor(["nnz"])}


def _axes(mla: bool) -> dict[str, Var | Const]:
    return {name: axis for name, axis in _HEADS.items() if not (mla and name == "num_kv_heads")} | _PARTS


def _quantize(name: str, mla: bool) -> TraceTemplate:
    sources = _sources(mla)
    return TraceTemplate(
        "rope_quantize",
        name_prefix=name + ("_mla" if mla and not name.startswith("mla") else ""),
        axes=_axes(mla),
        inputs={**sources, **_TABLE, **_OPTIONS},
        outputs={f"{part}_out": _fp8(list(source.dim_names), f"{part}_out") for part, source in sources.items()},
        reference=(_angles, _rope_quantize_reference),
        description="Rotary position embedding by a cos_sin cache, then a multiplication by a scale and a cast to fp8.",
    )


def quantize(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate:
    """The template for k with heads, or for MLA, where k has no head axis."""
    return _QUANTIZE[arguments["k_rope"].ndim == 2]


_QUANTIZE = {mla: _quantize("rope_quantize_fp8", mla) for mla in (False, True)}
quantize.templates = tuple(_QUANTIZE.values())  # type: ignore[attr-defined]
MLA_QUANTIZE = _quantize("mla_rope_quantize_fp8", True)


def _append(mla: bool, layout: str) -> TraceTemplate:
    slots = (
        ["page_size"] if mla else ["page_size", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "page_size"]
    )
    dims = [
        ["num_pages", *slots, dim] for dim in (("no_rope_dim", "rotary_dim") if mla else ("head_dim", "v_head_dim"))
    ]
    caches = {
        name: Tensor(d, param="paged_kv_cache", tuple_idx=i, dtype="float8_e4m3fn")
        for i, (name, d) in enumerate(zip(("k_cache", "v_cache"), dims))
    }
    sources = _sources(mla)
    values = {} if mla else {"v": Tensor(["nnz", "num_kv_heads", "v_head_dim"])}
    return TraceTemplate(
        "rope_quantize_append",
        name_prefix=f"rope_quantize_fp8_append_paged_{'mla_kv' if mla else 'kv'}_cache_{layout.lower()}",
        axes={
            **_axes(mla),
            **({} if mla else {"head_dim": Const(abbrev=""), "v_head_dim": Const(abbrev="")}),
            "page_size": Const(abbrev="ps"),
            **{name: Var() for name in ("num_pages", "num_indices", "batch_size_plus_1")},
        },
        inputs={
            **sources,
            **values,
            **_TABLE,
            **caches,
            **tensors(kv_indices="num_indices", kv_indptr="batch_size_plus_1", batch_indices="nnz", positions="nnz"),
            **_OPTIONS,
            **options(int32="page_size", string="kv_layout"),
        },
        outputs={
            "q_rope_out": _fp8(["nnz", "num_qo_heads", "rotary_dim"], "q_rope_out"),
            "q_nope_out": _fp8(["nnz", "num_qo_heads", "no_rope_dim"], "q_nope_out"),
            **caches,
        },
        reference=(_angles, _rope_quantize_append_reference),
        tags=(f"kv_layout:{layout}",),
        description="Rotary position embedding and cast to fp8; k and v are written into the pages of their requests.",
    )


def quantize_append(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of the layout, or of MLA; None for caches without a page axis."""
    mla = arguments.get("v") is None
    if not mla and arguments["paged_kv_cache"][0].ndim == 3:
        return None
    return _APPEND[mla, "NHD" if mla else arguments.get("kv_layout", "NHD")]


_APPEND = {key: _append(*key) for key in ((False, "NHD"), (False, "HND"), (True, "NHD"))}
quantize_append.templates = tuple(_APPEND.values())  # type: ignore[attr-defined]
