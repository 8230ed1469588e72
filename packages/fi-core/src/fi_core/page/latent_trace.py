"""The trace template of appending latent rows to bytes: reference, inputs and work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fi_core.observe.draw import Draw
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, sized


def _reference(kv, kv_cache, slot_mapping, scale_format="auto"):  # type: ignore[no-untyped-def]
    import torch

    packed = kv.shape[1] == 512
    codes, group = (448, 64) if packed else (512, 128)
    page_size, step = kv_cache.shape[1], 576 if packed else 656
    for row, slot in zip(kv, slot_mapping.tolist()):
        if slot < 0:
            continue
        page = kv_cache[slot // page_size].as_strided(
            (page_size * kv_cache.shape[-1],), (1,), kv_cache[slot // page_size].storage_offset()
        )
        offset = slot % page_size
        groups = row[:codes].float().view(-1, group)
        scale = (groups.abs().amax(1).double() / 448).float()  # in fp32, torch on CUDA multiplies by 1 / 448
        scale = scale.clamp(min=2.0**-126)
        if packed or scale_format == "pow2_fp32":
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        values = (groups / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8).flatten()
        page[offset * step : offset * step + codes] = values
        rest = offset * step + codes
        if packed:
            scales = page_size * step + offset * 8
            page[scales : scales + 7] = (torch.log2(scale) + 127).to(torch.uint8)
            page[scales + 7] = 0
        else:
            page[rest : rest + 16] = scale.view(torch.uint8)
            rest += 16
        page[rest : rest + 128] = row[codes:].contiguous().view(torch.uint8)
    return kv_cache


def _eager(kv, kv_cache, slot_mapping, scale_format="auto"):  # type: ignore[no-untyped-def]
    import torch

    packed, page_size = kv.shape[1] == 512, kv_cache.shape[1]
    codes, group = (448, 64) if packed else (512, 128)
    groups = kv[:, :codes].float().view(len(kv), -1, group)
    scale = (groups.abs().amax(2).double() / 448).float()
    if packed or scale_format == "pow2_fp32":
        scale = scale.clamp(min=2.0**-126).log2().ceil().exp2()
    values = (groups / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    rest = kv[:, codes:].contiguous().view(torch.uint8)
    flat = kv_cache.as_strided((len(kv_cache), page_size * kv_cache.shape[-1]), (kv_cache.stride(0), 1))
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    if not packed:
        row = torch.cat([values, scale.view(torch.uint8), rest], 1)
        flat.view(len(kv_cache), page_size, -1)[page, offset] = row
        return kv_cache
    flat[:, : page_size * 576].view(len(kv_cache), page_size, 576)[page, offset] = torch.cat([values, rest], 1)
    scales = torch.nn.functional.pad(scale.log2() + 127, (0, 1)).to(torch.uint8)
    flat[:, page_size * 576 :].view(len(kv_cache), page_size, 8)[page, offset] = scales
    return kv_cache


@sized(num_tokens=9, width=576, page_size=6, scale_format="auto")
def _make(draw: Draw, s: Any) -> dict[str, Any]:
    token, pages = 656 if s.width == 576 else 584, -(-s.num_tokens // s.page_size) + 1
    page = s.page_size * token
    if draw.nasty or page % 16:
        page = -(-page // 576) * 576
    cache = draw.integers(0, 126, (pages, page), "uint8")
    chosen = draw.permutation(pages * s.page_size)[: s.num_tokens].long()
    rows = draw.special(draw.normal((s.num_tokens, s.width), "bfloat16"), 0.0, -0.0, 3e4)
    if draw.nasty:
        rows[0] = 0
    return {
        "kv": draw.rows(rows),
        "kv_cache": cache.as_strided((pages, s.page_size, 1, token), (page, token, token, 1)),
        "slot_mapping": draw.special(chosen, -1),
        "scale_format": s.scale_format,
    }


def _work(x: Mapping[str, Any]) -> Work:
    """Each row once, and its bytes."""
    n, width = x["kv"].shape
    return Work(2 * n * width, n * (2 * width + x["kv_cache"].shape[-1] + x["slot_mapping"].element_size()))


TEMPLATE = TraceTemplate(
    "append_sparse_mla_kv_cache",
    axes={
        "num_tokens": Var(),
        "width": Const(abbrev="d"),
        "num_pages": Var(),
        "page_size": Const(abbrev="ps"),
        "one": Const(abbrev=""),
        "bytes": Const(abbrev=""),
    },
    inputs={
        "kv": Tensor(["num_tokens", "width"]),
        "kv_cache": Tensor(["num_pages", "page_size", "one", "bytes"]),
        "slot_mapping": Tensor(["num_tokens"]),
        "scale_format": Scalar("string", optional=True),
    },
    outputs={"kv_cache": Tensor(["num_pages", "page_size", "one", "bytes"], dtype_from="kv_cache", param="kv_cache")},
    reference=_reference,
    op="append_latent_rows",
    make=_make,
    samples=({}, {"scale_format": "pow2_fp32"}, {"width": 512}, {"width": 512, "page_size": 64}),
    work=_work,
    eager=_eager,
    tolerance={"uint8": (0.0, 0.0)},
    description="Quantizes latent rows to slots of a cache of bytes, as sparse MLA reads it.",
)
