"""The levels of a cascade as one page table: for attention in which the position of a key matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fi_core.utils import int32_index

if TYPE_CHECKING:
    import torch

    Tables = Sequence[torch.Tensor]


def joined(
    qo_indptrs: Tables, indptrs: Tables, indices: Tables, last_page_lens: Tables, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qo_indptr, indptr, indices and last_page_len of the requests of the last level, with the pages of all levels.

    It reads the tables on the host, which synchronises.

    Raises:
        ValueError: a request of the last level that lies in no group of another one, or a shared level whose last page
            is not full, so that no page table has its keys.
    """
    import torch

    offsets, pages, lasts = ([x.cpu().long() for x in tables] for tables in (qo_indptrs, indptrs, last_page_lens))
    begin, end = offsets[-1][:-1], offsets[-1][1:]
    first_pages, counts, entries = [], [], 0
    for level, (rows, own, last, listed) in enumerate(zip(offsets, pages, lasts, indices)):
        if len(rows) != len(own) or len(last) != len(rows) - 1:
            raise ValueError(
                f"paged_kv_indptr_arr[{level}]: length {len(rows)} is required, that of qo_indptr_arr[{level}], and "
                f"one less of paged_kv_last_page_len; got {len(own)} and {len(last)}"
            )
        group = torch.searchsorted(rows, begin, right=True).sub(1).clamp(0, max(len(rows) - 2, 0))
        if ((rows[group + 1] < end) & (begin < end)).any():
            raise ValueError(f"qo_indptr_arr[{level}]: groups of whole requests of the last level are required")
        if level < len(offsets) - 1 and ((last != page_size) & (own.diff() > 0)).any():
            raise ValueError(
                f"paged_kv_last_page_len[{level}]: {page_size}, full pages, are required of shared levels with a "
                "position encoding or a window; got another length"
            )
        first_pages.append(own[group] + entries)
        counts.append(own.diff()[group])
        entries += listed.numel()
    lengths = torch.stack(counts, 1).flatten()
    places = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    order = torch.repeat_interleave(torch.stack(first_pages, 1).flatten() - places[:-1], lengths)
    order += torch.arange(len(order))
    listed = torch.cat([x.flatten() for x in indices])
    # A request without pages of its own ends with a full page.
    last = lasts[-1].where(counts[-1] > 0, page_size)
    return qo_indptrs[-1], int32_index(places[:: len(counts)]), listed[order.to(listed.device)], int32_index(last)
