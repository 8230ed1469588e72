"""The paged KV cache: appending K and V (also for MLA), and the index tables of appended rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.observe.log import fi_api
from fi_core.page import trace
from fi_core.page.latent import append_sparse_mla_kv_cache
from fi_core.page.nvfp4 import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    nvfp4_quantize_append_paged_mla_kv_cache,
)
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values
from fi_core.utils import _unpack_paged_kv_cache, check_shape_dtype_device, int32_index

if TYPE_CHECKING:
    import torch

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "append_sparse_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_mla_kv_cache",
]


class _AppendConfig(NamedTuple):
    vec_bytes: int
    rows_per_thread: int


def _append_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    words = {16: "fi::uint32_t, 4", 4: "fi::uint32_t, 1", 2: "fi::uint16_t, 1", 1: "fi::uint8_t, 1"}
    return Unit(
        "fi/page/append_paged_kv_cache.cuh",
        "AppendParams",
        tuple(
            Entry(
                f"append_{size}_bytes_{rows}_rows",
                f"append_rows<{words[size]}, {rows}>",
                256,
                _AppendConfig(size, rows),
            )
            for size, rows in ((16, 4), (16, 1), (4, 1), (2, 1), (1, 1))
        ),
    )


APPEND_PAGED_KV_CACHE = Op(
    name="append_paged_kv_cache",
    family="page",
    arguments="Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
    "Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len, Tensor(a!)? v_cache=None, bool head_major=False, "
    "bool mla=False",
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _append_unit)),
    config=_AppendConfig,
)

GET_BATCH_INDICES_POSITIONS = Op(
    name="get_batch_indices_positions",
    family="page",
    arguments="Tensor(a!) batch_indices, Tensor(b!) positions, Tensor append_indptr, Tensor seq_lens, "
    "bool fill_positions=True",
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation(
            "cuda",
            at_least(80),
            lambda axes: Unit(
                "fi/page/get_batch_indices_positions.cuh",
                "BatchPositionsParams",
                (Entry("get_batch_indices_positions", "batch_indices_positions", 128),),
            ),
        ),
    ),
)

GET_SEQ_LENS = Op(
    name="get_seq_lens",
    family="page",
    arguments="Tensor(a!) seq_lens, Tensor kv_indptr, Tensor kv_last_page_len, int page_size",
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation(
            "cuda",
            at_least(80),
            lambda axes: Unit(
                "fi/page/get_seq_lens.cuh",
                "SeqLensParams",
                tuple(Entry(f"get_seq_lens_{w}", f"seq_lens<fi::{w}_t>", 128) for w in ("int32", "int64")),
            ),
        ),
    ),
)

_append = operator(APPEND_PAGED_KV_CACHE)
_positions = operator(GET_BATCH_INDICES_POSITIONS)
_seq_lens = operator(GET_SEQ_LENS)


@fi_api(trace=trace.append)
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes new K and V rows into the pages of their requests, in place.

    Row i becomes token `t = positions[i]` of request `b = batch_indices[i]`: slot `t % page_size` of page
    `kv_indices[kv_indptr[b] + t // page_size]`. Rows with `batch_indices[i] < 0` are skipped.

    All index tensors are contiguous and int32; int64 ones are copied to int32.

    Args:
        append_key: `[nnz, num_heads, head_dim]`, any dtype of whole bytes (the bytes are copied). Any strides, with the
            last dimension contiguous.
        append_value: `[nnz, num_heads, v_head_dim]`, as append_key.
        batch_indices: `[nnz]`, int32, the request of each row, as from `get_batch_indices_positions`.
        positions: `[nnz]`, int32, the position of each row in its request.
        paged_kv_cache: `[pages, 2, page_size, num_heads, head_dim]` ("NHD") or `[pages, 2, num_heads, page_size,
            head_dim]` ("HND"), or a tuple (k_cache, v_cache) without the axis of size 2; dtypes of append_key and
            append_value. Without a page axis, page_size is 1.
        kv_indices: `[num_indices]`, int32, the pages of all requests after the append.
        kv_indptr: `[batch_size + 1]`, int32, the offsets of the requests in kv_indices.
        kv_last_page_len: `[batch_size]`, int32, tokens in the last page of each request.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError: A shape, stride or device does not fit. A page, position or offset is out of range, on the
            CPU; on CUDA with FI_CHECK=1 at import, which synchronizes.
        TypeError: A dtype does not fit.
        KeyError: kv_layout is unknown, or paged_kv_cache is neither a tensor nor a tuple.
    """
    head_major = kv_layout == "HND"
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    if getattr(paged_kv_cache, "ndim", 0) == 5 and (head_major or kv_layout == "NHD"):
        k_cache, v_cache = paged_kv_cache, None  # type: ignore[assignment]  # the op splits it: views are slow
    else:
        k_cache, v_cache = _unpack_paged_kv_cache(paged_kv_cache, kv_layout)
    _append(
        append_key,
        append_value,
        int32_index(batch_indices),
        int32_index(positions),
        k_cache=k_cache,
        kv_indices=int32_index(kv_indices),
        kv_indptr=int32_index(kv_indptr),
        kv_last_page_len=int32_index(kv_last_page_len),
        v_cache=v_cache,
        head_major=head_major,
    )


@fi_api(trace=trace.APPEND_MLA)
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Writes one compressed KV row and one rope key row per token into the pages, in place (MLA, arXiv:2405.04434).

    Everything else, the errors and FI_CHECK are as in `append_paged_kv_cache`.

    Args:
        append_ckv: `[nnz, head_dim_ckv]`, any dtype of whole bytes; any head_dim_ckv (512 in the paper).
        append_kpe: `[nnz, head_dim_kpe]`, as append_ckv; any head_dim_kpe (64 in the paper).
        batch_indices: `[nnz]`, int32, the request of each row.
        positions: `[nnz]`, int32, the position of each row in its request.
        ckv_cache: `[pages, page_size, head_dim_ckv]`, dtype of append_ckv.
        kpe_cache: `[pages, page_size, head_dim_kpe]`, dtype of append_kpe.
        kv_indices: `[num_indices]`, int32, the pages of all requests after the append.
        kv_indptr: `[batch_size + 1]`, int32, the offsets of the requests in kv_indices.
        kv_last_page_len: `[batch_size]`, int32, tokens in the last page of each request.
    """
    _append(
        append_ckv,
        append_kpe,
        int32_index(batch_indices),
        int32_index(positions),
        k_cache=ckv_cache,
        kv_indices=int32_index(kv_indices),
        kv_indptr=int32_index(kv_indptr),
        kv_last_page_len=int32_index(kv_last_page_len),
        v_cache=kpe_cache,
        mla=True,
    )


@fi_api(trace=trace.POSITIONS)
def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the request b of each appended row and its position, `seq_lens[b] - (append_indptr[b + 1] - row)`.

    Args:
        append_indptr: `[batch_size + 1]`, int32, contiguous (int64 is copied to int32). Row r belongs to request b if
            `append_indptr[b] <= r < append_indptr[b + 1]`.
        seq_lens: `[batch_size]`, int32, contiguous (int64 is copied to int32), tokens after the append.
        nnz: number of rows to fill. It may exceed `append_indptr[-1]` (padding for CUDA graphs); the call does not
            synchronize with the device to read `append_indptr[-1]`.
        batch_indices: `[nnz]`, int32, buffer to fill. Allocated if None.
        positions: `[nnz]`, int32, buffer to fill. Allocated if None.

    Returns:
        (batch_indices, positions). A padding row (of no request) gets request -1; its position is 0 in an allocated
        tensor, and is not written in a buffer that the caller passes.

    Raises:
        ValueError: nnz is negative, or a shape, device or buffer does not fit.
        TypeError: A dtype does not fit.
    """
    import torch

    if type(nnz) is bool or not 0 <= nnz < 1 << 31:
        raise ValueError(f"nnz: must be 0 to 2^31 - 1; got {nnz}")
    append_indptr, seq_lens = int32_index(append_indptr), int32_index(seq_lens)
    fill_positions = positions is None
    if batch_indices is None:
        batch_indices = append_indptr.new_empty(nnz, dtype=torch.int32)
    else:
        check_shape_dtype_device(batch_indices, (nnz,), torch.int32, append_indptr.device, "batch_indices")
    if positions is None:
        positions = append_indptr.new_empty(nnz, dtype=torch.int32)
    else:
        check_shape_dtype_device(positions, (nnz,), torch.int32, append_indptr.device, "positions")
    _positions(batch_indices, positions, append_indptr, seq_lens, fill_positions=fill_positions)
    return batch_indices, positions


@fi_api(trace=trace.SEQ_LENS)
def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Computes the length of each request b: `max(num_pages - 1, 0) * page_size + kv_last_page_len[b]`.

    `num_pages = kv_indptr[b + 1] - kv_indptr[b]`.

    Args:
        kv_indptr: `[batch_size + 1]`, integers, contiguous, offsets in pages. Tables that are not both int32 or both
            int64 are converted to int64.
        kv_last_page_len: `[batch_size]`, integers, contiguous. It is the length of a request without pages, so pass 0
            there.
        page_size: tokens per page.

    Returns:
        `[batch_size]`, dtype of kv_last_page_len.

    Raises:
        ValueError: A shape, a device or page_size does not fit.
        TypeError: A dtype does not fit.
    """
    import torch

    signed = {torch.int32, torch.int64, torch.int16, torch.int8}
    integers = signed | {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    dtype, other = (getattr(x, "dtype", None) for x in (kv_last_page_len, kv_indptr))
    if (
        dtype is not None
        and {dtype, other} <= integers
        and not (dtype is other and dtype in (torch.int32, torch.int64))
    ):
        seq_lens = get_seq_lens(kv_indptr.long(), kv_last_page_len.long(), page_size)
        return seq_lens.clamp(max=min(torch.iinfo(dtype).max, (1 << 63) - 1)).to(dtype)
    seq_lens = torch.empty_like(kv_last_page_len)
    _seq_lens(seq_lens, kv_indptr, kv_last_page_len, page_size=page_size)
    return seq_lens
