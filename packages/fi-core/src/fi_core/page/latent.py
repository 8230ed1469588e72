"""Rows of latent caches, which multi-head latent attention reads: their layouts, and appending to bytes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.observe.log import fi_api
from fi_core.page import latent_trace
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    import torch

LATENT, ROPE = 512, 64  # columns
WIDTH = LATENT + ROPE
# A row of DeepSeek V3.2's cache: 512 e4m3, a fp32 scale of each 128, 64 bf16 of the rotary part.
_SCALES, _ROPE, ROW_BYTES = LATENT, LATENT + 16, LATENT + 16 + 2 * ROPE
# A token of DeepSeek V4's pages: page_size rows of 448 e4m3 and 64 bf16, then page_size times 8 bytes, of which 7 are
# ue8m0 scales of 64 columns.
PACKED_BYTES = 584


class LatentCache(NamedTuple):
    """The parts of a cache `[num_pages, page_size, ...]`; packed pages are one part.

    Of rows as slots, pages of page_size slots are pitch slots apart.
    """

    ckv: torch.Tensor
    kpe: torch.Tensor
    scales: torch.Tensor | None
    page_size: int = 1
    pitch: int = 1

    def placed(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots `page * page_size + offset`, or negative, as rows of the parts."""
        if self.pitch == self.page_size:
            return slots
        moved = slots + slots.div(self.page_size, rounding_mode="floor") * (self.pitch - self.page_size)
        return moved.clamp_(min=-1)


def latent_cache(name: str, cache: torch.Tensor, q: torch.Tensor, sparse: bool) -> LatentCache:
    """The parts of a cache `[num_pages, page_size, width]` for queries; of sparse attention as `[slots, 1, width]`.

    Raises:
        ValueError: names the cache, or the query.
    """
    import torch

    width, is_bytes = q.shape[-1], cache.ndim == 3 and cache.element_size() == 1
    if is_bytes and sparse and width == LATENT and cache.shape[-1] == PACKED_BYTES:
        packed = cache.view(torch.uint8)
        return LatentCache(packed, packed[..., :0], None)
    mixed = is_bytes and width == WIDTH and cache.shape[-1] == ROW_BYTES
    if not mixed and (cache.ndim != 3 or cache.shape[-1] != width):
        raise ValueError(
            f"{name}: [num_pages, page_size, {width}], rows of {ROW_BYTES} bytes for queries of width {WIDTH}, or "
            f"either with an axis of 1, is required; got {cache.dtype}, shape {tuple(cache.shape)}"
        )
    pages, page_size, last = cache.shape
    pitch = page_size
    if sparse:
        row = cache.stride(1 if page_size > 1 else 0)
        pitch = cache.stride(0) // max(row, 1) if pages > 1 else page_size
        if pages > 1 and (cache.stride(0) != pitch * row or pitch < page_size):
            raise ValueError(
                f"{name}: pages at a multiple of the distance of tokens are required for sparse indices; got strides "
                f"{cache.stride()}"
            )
        slots = max(pages - 1, 0) * pitch + page_size
        if slots >= 1 << 31:
            raise ValueError(f"{name}: less than 2^31 rows, those between pages included, are required; got {slots}")
        cache = cache.as_strided((slots if pages else 0, 1, last), (row, row, cache.stride(2)))
    if not mixed:
        return LatentCache(cache[..., :LATENT], cache[..., LATENT:], None, page_size, pitch)
    if q.dtype is not torch.bfloat16:
        raise ValueError(f"query: torch.bfloat16 is required with rows of {ROW_BYTES} bytes; got {q.dtype}")
    if cache.stride(2) != 1 or any(x % 16 for x in (*cache.stride()[:2], cache.storage_offset())):
        raise ValueError(
            f"{name}: contiguous rows at multiples of 16 bytes are required; got strides {cache.stride()}, offset "
            f"{cache.storage_offset()}"
        )
    return LatentCache(
        cache[..., :LATENT].view(torch.float8_e4m3fn),
        cache[..., _ROPE:].view(torch.bfloat16),
        cache[..., _SCALES:_ROPE].view(torch.float32),
        page_size,
        pitch,
    )


class _AppendConfig(NamedTuple):
    packed: bool


def _append_unit(axes: Values) -> Unit:
    entries = tuple(
        Entry(f"append_latent_{name}", f"append_latent_rows<{str(packed).lower()}>", 128, _AppendConfig(packed))
        for name, packed in (("rows", False), ("packed", True))
    )
    return Unit("fi/page/append_latent_rows.cuh", "AppendLatentRowsParams", entries)


APPEND_LATENT_ROWS = Op(
    name="append_latent_rows",
    family="page",
    arguments="Tensor kv, Tensor(a!) kv_cache, Tensor slot_mapping, bool power_of_two=False",
    config=_AppendConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _append_unit)),
)
_append = operator(APPEND_LATENT_ROWS)

# The words of scale_format by the bytes of a token, and whether scales are powers of two.
_FORMATS = {
    ROW_BYTES: {"auto": False, "arbitrary_fp32": False, "pow2_fp32": True},
    PACKED_BYTES: {"auto": True, "ue8m0": True},
}


@fi_api(trace=latent_trace.TEMPLATE)
def append_sparse_mla_kv_cache(
    kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, scale_format: str = "auto"
) -> None:
    """Quantizes latent rows to slots of a cache of bytes, in place, as sparse MLA reads it (DeepSeek-V3.2,
    arXiv:2512.02556).

    A row of 576 becomes 656 bytes: 512 e4m3, a fp32 scale of each 128 columns, amax / 448, and 64 bf16. A row of 512
    becomes a token of packed pages of 584 bytes a token: 448 e4m3 and 64 bf16 among the rows, which stand first in a
    page, and 8 bytes behind all rows: 7 ue8m0 scales of 64 columns, amax / 448 rounded up, and a zero.

    Args:
        kv: `[n, 576 or 512]`, bf16; rows may be strided. On CUDA they begin at multiples of 16 bytes.
        kv_cache: `[pages, page_size, 1, 656]`, or 584 for rows of 512; uint8, int8 or e4m3, with or without the axis
            of 1. Tokens are as many bytes apart, pages any multiple of 16.
        slot_mapping: `[n]`, int32 or int64, `page * page_size + offset`; negative: the row is skipped.
        scale_format: "auto"; of 656 bytes "arbitrary_fp32" (as auto), or "pow2_fp32": rounded up to powers of two; of
            584 bytes "ue8m0" (as auto).

    Raises:
        ValueError: a shape, stride, device or scale_format is wrong; on the CPU also a slot that does not exist.
        TypeError: a dtype is wrong.
    """
    import torch

    cache = kv_cache.squeeze(2) if kv_cache.ndim == 4 and kv_cache.shape[2] == 1 else kv_cache
    if cache.ndim != 3 or cache.element_size() != 1:
        raise ValueError(
            f"kv_cache: bytes [pages, page_size, 1, {ROW_BYTES} or {PACKED_BYTES}] are required; got {kv_cache.dtype}, "
            f"shape {tuple(kv_cache.shape)}"
        )
    words = _FORMATS.get(cache.shape[-1], _FORMATS[ROW_BYTES])
    if scale_format not in words:
        raise ValueError(
            f"scale_format: one of {', '.join(words)} is required of tokens of {cache.shape[-1]} bytes; got "
            f"{scale_format!r}"
        )
    _append(kv, cache.view(torch.uint8), slot_mapping, power_of_two=words[scale_format])
