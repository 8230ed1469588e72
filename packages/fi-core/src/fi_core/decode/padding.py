"""Requests that differ in query tokens, padded to as many: how rows and draft masks go there, and results come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST = 32  # query tokens of a request that a word of a mask has bits for


class Padding:
    """Each request has its rows behind others', `most` in all, so that its last query token is its last row.

    All of it is computed on the device. qo_indptr: int32 `[batch_size + 1]`; tokens: rows in all.
    """

    def __init__(self, qo_indptr: torch.Tensor, tokens: int, most: int) -> None:
        import torch

        ends, device = qo_indptr[1:].long(), qo_indptr.device
        self.absent = most - qo_indptr.diff()
        self.shape = len(ends), most
        self._source = (ends[:, None] + torch.arange(-most, 0, device=device)).clamp_(min=0).flatten()
        token = torch.arange(tokens, device=device)
        request = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
        self._place = ((request + 1) * most - ends[request] + token).clamp_(0, len(self._source) - 1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, ...]` as `[batch_size * most, ...]`; before the rows of a request stand any others."""
        return x.index_select(0, self._source)

    def draft_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """uint16 `[tokens, 2]`, whose bits count query tokens, as uint8 `[batch_size, most, 4]`, whose count rows."""
        import torch

        bits = self.rows(mask.view(torch.int32).view(-1)).view(self.shape).long()
        low = (1 << self.absent.long())[:, None]  # keys in the place of rows that are not there are seen by all
        return (bits * low | (low - 1)).to(torch.int32)[..., None].view(torch.uint8)

    def unpad(self, x: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        torch.index_select(x, 0, self._place, out=out)
