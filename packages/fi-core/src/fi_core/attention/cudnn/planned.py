"""The plan of a batch for cuDNN, which the wrappers run with backend="cudnn"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fi_core.attention.cudnn.graph import Operand, attend, dense, finish_lse, frontend, packed, page_table, per_request
from fi_core.runtime.lazy import torch
from fi_core.utils import _get_range_buf, ceil_div, next_positive_power_of_2


def require(device: torch.device) -> None:
    """Raises LibraryError without cuDNN's frontend, ValueError for a CPU."""
    frontend()
    if device.type != "cuda":
        raise ValueError(f'backend: "cudnn" requires a CUDA device; float_workspace_buffer is on {device}')


class PlannedBatch:
    """Lengths, page table and offsets of a batch on the device, and the shape that a graph is built for.

    fixed: of a wrapper with use_cuda_graph. All tensors then stay at the addresses of the first plan, and no bound may
    grow.
    """

    def __init__(self, fixed: bool) -> None:
        self._fixed = fixed
        self._kept: dict[str, torch.Tensor] = {}
        self._begins: dict[tuple[str, int], torch.Tensor] = {}
        self._most = 0, 0

    def plan(
        self,
        lens_q: torch.Tensor,
        lens_kv: torch.Tensor,
        most: tuple[int, int],
        indptr: torch.Tensor,
        page_indices: torch.Tensor | None,
        page_size: int,
        rows: torch.Tensor | None,
    ) -> None:
        """Sets the batch.

        Args:
            lens_q, lens_kv: int32 `[batch]`.
            most: upper bounds of qo_len and kv_len.
            indptr: offsets of pages, or of keys without page_indices.
            page_indices: page ids.
            page_size: tokens of a page.
            rows: offsets of the rows of q; None: all requests have as many rows.
        """
        # So that few graphs are built: what a request has no tokens for is not computed. NOTE: where there is room for
        # one row of a request, cuDNN 9.19 writes the LSE of the first head alone.
        least = 1 if rows is None else 2
        rounded = max(least, next_positive_power_of_2(most[0])), max(64, next_positive_power_of_2(most[1]))
        if self._fixed and self._kept:
            if rounded[0] > self._most[0] or rounded[1] > self._most[1]:
                raise ValueError(
                    f"max_token_per_sequence, max_sequence_kv: fixed at {self._most} by the first plan with "
                    f"use_cuda_graph; got {most}"
                )
        else:
            self._most = rounded
        self._begins.clear()
        self._keep("lens_q", lens_q)
        self._keep("lens_kv", lens_kv)
        if rows is not None:
            self._keep("rows", rows.long())
        if page_indices is None:
            self._keep("keys", indptr.long())
        else:
            self._keep("table", self._table(indptr, page_indices, ceil_div(self._most[1], page_size)))

    def _keep(self, name: str, x: torch.Tensor) -> None:
        if self._fixed and name in self._kept:
            self._kept[name].copy_(x)
        else:
            self._kept[name] = x

    @staticmethod
    def _table(indptr: torch.Tensor, page_indices: torch.Tensor, pages: int) -> torch.Tensor:
        """`[batch, pages]`; entries beyond the pages of a request are those of others, and are not read."""
        if not len(page_indices):
            return page_indices.new_zeros(len(indptr) - 1, pages)
        at = indptr[:-1, None] + _get_range_buf(pages, indptr.device)
        return page_indices[at.clamp_(max=len(page_indices) - 1).long()]

    def _packed(self, x: torch.Tensor, name: str, layout: int = 0) -> Operand:
        """x with its offsets `name` ("rows" or "keys"), in elements."""
        step = x.stride(layout)
        begin = self._begins.get((name, step))
        if begin is None:
            begin = self._kept[name] * step
            if not self._fixed:  # else the next plan changes it: it is computed in the captured graph
                self._begins[name, step] = begin
        return packed(x, self._most[name == "keys"], begin, layout)

    def _rows(self, x: torch.Tensor) -> Operand:
        if "rows" in self._kept:
            return self._packed(x, "rows")
        return dense(x.unflatten(0, (len(self._kept["lens_q"]), -1)).transpose(1, 2))

    def without_keys(self, rows: int) -> torch.Tensor:
        """Which of the first rows belong to a request without keys: bool `[rows]`."""
        ends = self._kept["rows"][1:]
        request = torch.searchsorted(ends, _get_range_buf(rows, ends.device).long(), right=True)
        return (self._kept["lens_kv"] == 0)[request.clamp_(max=len(ends) - 1)]

    def attend(
        self, tensors: Sequence[Any], layout: int, workspace: Any, scale: float, causal: bool, window_left: int
    ) -> None:
        """Attention of the planned batch. tensors: out, lse, q, k, v (caches, or all keys and values) and sinks."""
        out, lse, q, k, v, sinks = tensors
        operands = {
            "q": self._rows(q),
            "seq_len_q": per_request(self._kept["lens_q"]),
            "seq_len_kv": per_request(self._kept["lens_kv"]),
            "out": self._rows(out),
        }
        if "table" in self._kept:
            operands["k"], operands["v"] = (dense(x if layout else x.transpose(1, 2)) for x in (k, v))
            table = page_table(self._kept["table"], self._kept["table"].shape[1])
            operands["paged_attention_k_table"] = operands["paged_attention_v_table"] = table
        else:
            operands["k"], operands["v"] = (self._packed(x, "keys", layout) for x in (k, v))
        if lse is not None:
            operands["stats"] = self._rows(lse.unsqueeze(2))
        if sinks is not None:
            operands["sink_token"] = dense(sinks.view(1, -1, 1, 1))
        attend(operands, workspace, scale, causal, window_left)
        if lse is not None and "rows" in self._kept:
            finish_lse(lse, self.without_keys(lse.shape[0]), sinks)
