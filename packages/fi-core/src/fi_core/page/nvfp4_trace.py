"""Trace templates of the appends in NVFP4: references, inputs and work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, samples, sized, tensors
from fi_core.page.trace import _TABLE, _TABLE_AXES, _make_table, _write_rows
from fi_core.quantization.reference import block_amax, e2m1, e4m3_scaled

_PARTS = ("k_cache", "v_cache", "k_scales", "v_scales")


def _quantized(k, v, k_scale, v_scale):  # type: ignore[no-untyped-def]
    """The bytes of both tensors, then their scales."""
    import torch

    (key, key_sf), (value, value_sf) = (
        e4m3_scaled(x, 16, 1.0 / torch.tensor([float(scale)], device=x.device))
        for x, scale in ((k, k_scale), (v, v_scale))
    )
    return key, value, key_sf, value_sf


def _append_reference(  # type: ignore[no-untyped-def]
    append_key,
    append_value,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    batch_indices,
    positions,
    kv_indices,
    kv_indptr,
    kv_last_page_len,
    k_scale,
    v_scale,
):
    caches = k_cache, v_cache, k_scales, v_scales
    rows = _quantized(append_key, append_value, k_scale, v_scale)
    return _write_rows(rows, caches, batch_indices, positions, kv_indices, kv_indptr)


def _append_head_major_reference(  # type: ignore[no-untyped-def]
    append_key,
    append_value,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    batch_indices,
    positions,
    kv_indices,
    kv_indptr,
    kv_last_page_len,
    k_scale,
    v_scale,
):
    caches = k_cache, v_cache, k_scales, v_scales
    rows = _quantized(append_key, append_value, k_scale, v_scale)
    _write_rows(rows, [c.transpose(1, 2) for c in caches], batch_indices, positions, kv_indices, kv_indptr)
    return caches


def _slots_reference(  # type: ignore[no-untyped-def]
    append_key, append_value, k_cache, v_cache, k_scales, v_scales, slot_mapping, k_scale, v_scale
):
    import torch

    pages = torch.arange(k_cache.shape[0], device=k_cache.device)  # of one request
    owner, caches = (slot_mapping >= 0).long() - 1, (k_cache, v_cache, k_scales, v_scales)
    rows = _quantized(append_key, append_value, k_scale, v_scale)
    return _write_rows(rows, caches, owner, slot_mapping, pages, pages.new_zeros(1))


def _slots_head_major_reference(  # type: ignore[no-untyped-def]
    append_key, append_value, k_cache, v_cache, k_scales, v_scales, slot_mapping, k_scale, v_scale
):
    import torch

    pages = torch.arange(k_cache.shape[0], device=k_cache.device)  # of one request
    owner, caches = (slot_mapping >= 0).long() - 1, (k_cache, v_cache, k_scales, v_scales)
    rows = _quantized(append_key, append_value, k_scale, v_scale)
    _write_rows(rows, [c.transpose(1, 2) for c in caches], owner, slot_mapping, pages, pages.new_zeros(1))
    return caches


_REFERENCES: dict[tuple[str, bool], Callable[..., Any]] = {
    ("NHD", False): _append_reference,
    ("HND", False): _append_head_major_reference,
    ("NHD", True): _slots_reference,
    ("HND", True): _slots_head_major_reference,
}


def _make(layout: str, by_slot: bool) -> Callable[..., dict[str, Any]]:
    @sized(
        dtype="bfloat16", batch_size=4, page_size=5, qo_len=3, kv_len=None, num_kv_heads=3, head_dim=64, v_head_dim=32
    )
    def make(draw: Draw, s: Any) -> dict[str, Any]:
        table, pages = _make_table(draw, s.batch_size, s.page_size, s.qo_len, s.kv_len)
        nnz = len(table["positions"])
        slots = (s.page_size, s.num_kv_heads) if layout == "NHD" else (s.num_kv_heads, s.page_size)
        k, v = (draw.normal((nnz, s.num_kv_heads, dim), s.dtype) for dim in (s.head_dim, s.v_head_dim))
        dims = s.head_dim, s.v_head_dim
        cache, scales = (
            tuple(draw.rows(draw.integers(0, 126, (pages, *slots, dim // part), "uint8")) for dim in dims)
            for part in (2, 16)
        )
        found: dict[str, Any] = {"append_key": draw.rows(k), "append_value": draw.rows(draw.special(v, 0.0, -0.0, 3e4))}
        found |= {"paged_kv_cache": cache, "kv_cache_sf": scales}
        found |= {"k_scale": 0.0013, "v_scale": 0.25, "kv_layout": layout}
        if not by_slot:
            return found | table
        chosen = draw.permutation(pages * s.page_size)[:nnz].long()
        return found | {"slot_mapping": draw.special(chosen, -1)}

    return make


def _work(arguments: Mapping[str, Any]) -> Work:
    """Reads the new rows and the tables, and writes 9 bytes for each 16 elements."""
    rows = (arguments["append_key"], arguments["append_value"])
    tables = (arguments.get(name) for name in (*_TABLE, "slot_mapping"))
    return Work(0, nbytes(*rows, *tables) + 9 * sum(x.numel() for x in rows) // 16)


def _template(layout: str, by_slot: bool) -> TraceTemplate:
    tokens = ["page_size", "num_kv_heads"] if layout == "NHD" else ["num_kv_heads", "page_size"]

    def part(name: str) -> Tensor:
        dim = ("head_dim" if name[0] == "k" else "v_head_dim") + ("_bytes" if name.endswith("cache") else "_blocks")
        owner = "paged_kv_cache" if name.endswith("cache") else "kv_cache_sf"
        return Tensor(["num_pages", *tokens, dim], dtype="uint8", param=owner, tuple_idx=int(name[0] == "v"))

    parts = {name: part(name) for name in _PARTS}
    unnamed = ("v_head_dim", *(f"{dim}_{unit}" for unit in ("bytes", "blocks") for dim in ("head_dim", "v_head_dim")))
    axes = {
        "num_kv_heads": Const(abbrev="kv"),
        "head_dim": Const(abbrev="d"),
        "page_size": Const(abbrev="ps"),
        **dict.fromkeys(unnamed, Const(abbrev="")),
    }
    given = {"slot_mapping": Tensor(["nnz"])} if by_slot else _TABLE
    base = {"nnz": Var(), "num_pages": Var()} if by_slot else _TABLE_AXES
    return TraceTemplate(
        "nvfp4_quantize_append_paged_kv_cache" + ("_with_slot_mapping" if by_slot else ""),
        axes={**base, **axes},
        inputs={
            **tensors(append_key="nnz num_kv_heads head_dim", append_value="nnz num_kv_heads v_head_dim"),
            **parts,
            **given,
            **dict.fromkeys(("k_scale", "v_scale"), Scalar()),
        },
        outputs=parts,
        reference=(block_amax, e2m1, e4m3_scaled, _write_rows, _quantized, _REFERENCES[layout, by_slot]),
        tags=(f"kv_layout:{layout}",),
        op="append_nvfp4_kv_cache",
        make=_make(layout, by_slot),
        samples=samples({"dtype": ("bfloat16", "float16"), "page_size": (1, 5, 16)}),
        work=_work,
        tolerance=dict.fromkeys(_PARTS, (0.0, 0.0)),
        description=f"Quantizes new K and V rows to NVFP4 into the pages of their requests, {layout} layout.",
    )


def _mla_reference(  # type: ignore[no-untyped-def]
    append_ckv,
    append_kpe,
    ckv_cache,
    ckv_sf_cache,
    kpe_cache,
    batch_indices,
    positions,
    kv_indices,
    kv_indptr,
    kv_last_page_len,
    ckv_scale,
    kpe_scale,
):
    import torch

    ckv, kpe = (1.0 / torch.tensor([float(scale)], device=append_ckv.device) for scale in (ckv_scale, kpe_scale))
    packed, scales = e4m3_scaled(append_ckv, 16, ckv)
    rope = (append_kpe.float() * kpe).clamp(-448, 448).to(torch.float8_e4m3fn)
    caches = ckv_cache, ckv_sf_cache.view(torch.uint8), kpe_cache.view(torch.uint8)
    rows = packed, scales.view(torch.uint8), rope.view(torch.uint8)
    _write_rows(rows, caches, batch_indices, positions, kv_indices, kv_indptr)
    return ckv_cache, ckv_sf_cache, kpe_cache


def _make_mla(
    draw: Draw,
    *,
    dtype: str = "bfloat16",
    batch_size: int = 4,
    page_size: int = 5,
    qo_len: int = 3,
    kv_len: int | None = None,
    head_dim_ckv: int = 512,
    head_dim_kpe: int = 64,
) -> dict[str, Any]:
    table, pages = _make_table(draw, batch_size, page_size, qo_len, kv_len)
    nnz = len(table["positions"])
    ckv, kpe = (draw.normal((nnz, dim), dtype) for dim in (head_dim_ckv, head_dim_kpe))
    cache = draw.rows(draw.integers(0, 126, (pages, page_size, head_dim_ckv // 2), "uint8"))
    e4m3 = [draw.normal((pages, page_size, dim), "float8_e4m3fn") for dim in (head_dim_ckv // 16, head_dim_kpe)]
    return {
        "append_ckv": draw.rows(ckv),
        "append_kpe": draw.rows(draw.special(kpe, 0.0, -0.0, 3e4)),
        "ckv_cache": cache,
        "ckv_sf_cache": draw.rows(e4m3[0]),
        "kpe_cache": draw.rows(e4m3[1]),
        "ckv_scale": 0.0013,
        "kpe_scale": 0.25,
        **table,
    }


def _mla_work(arguments: Mapping[str, Any]) -> Work:
    """Reads the new rows and the tables; writes 9 bytes for each 16 latents, and a byte for each rope element."""
    ckv, kpe = arguments["append_ckv"], arguments["append_kpe"]
    return Work(0, nbytes(ckv, kpe, *(arguments[n] for n in _TABLE)) + 9 * ckv.numel() // 16 + kpe.numel())


_MLA_PARTS = {
    "ckv_cache": Tensor(["num_pages", "page_size", "ckv_bytes"], dtype="uint8", param="ckv_cache"),
    "ckv_sf_cache": Tensor(["num_pages", "page_size", "ckv_blocks"], dtype="float8_e4m3fn", param="ckv_sf_cache"),
    "kpe_cache": Tensor(["num_pages", "page_size", "head_dim_kpe"], dtype="float8_e4m3fn", param="kpe_cache"),
}
MLA = TraceTemplate(
    "nvfp4_quantize_append_paged_mla_kv_cache",
    axes={
        **_TABLE_AXES,
        "head_dim_ckv": Const(abbrev="ckv"),
        "head_dim_kpe": Const(abbrev="kpe"),
        "page_size": Const(abbrev="ps"),
        "ckv_bytes": Const(abbrev=""),
        "ckv_blocks": Const(abbrev=""),
    },
    inputs={
        "append_ckv": Tensor(["nnz", "head_dim_ckv"]),
        "append_kpe": Tensor(["nnz", "head_dim_kpe"]),
        **_MLA_PARTS,
        **_TABLE,
        "ckv_scale": Scalar("float32"),
        "kpe_scale": Scalar("float32"),
    },
    outputs=_MLA_PARTS,
    reference=(block_amax, e2m1, e4m3_scaled, _write_rows, _mla_reference),
    op="append_nvfp4_kv_cache",
    make=_make_mla,
    samples=samples({"dtype": ("bfloat16", "float16"), "page_size": (1, 16), "head_dim_ckv": (512, 48)}),
    work=_mla_work,
    tolerance=dict.fromkeys(_MLA_PARTS, (0.0, 0.0)),
    description="Quantizes new latents to NVFP4 and rope keys to e4m3 into the pages of their requests.",
)


_TEMPLATES = {(layout, by_slot): _template(layout, by_slot) for by_slot in (False, True) for layout in ("NHD", "HND")}


def _chosen(by_slot: bool, arguments: Mapping[str, Any]) -> TraceTemplate | None:
    """The template of the layout; None for caches without a page axis (page size 1)."""
    cache = arguments["paged_kv_cache"]
    axes = cache[0].ndim + 1 if isinstance(cache, tuple) else cache.ndim
    return _TEMPLATES.get((arguments.get("kv_layout", "NHD"), by_slot)) if axes == 5 else None


def append(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of nvfp4_quantize_append_paged_kv_cache."""
    return _chosen(False, arguments)


def slots(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of nvfp4_quantize_append_paged_kv_cache_with_slot_mapping."""
    return _chosen(True, arguments)


for _by_slot, _function in ((False, append), (True, slots)):
    _function.templates = tuple(t for (_, s), t in _TEMPLATES.items() if s is _by_slot)  # type: ignore[attr-defined]
