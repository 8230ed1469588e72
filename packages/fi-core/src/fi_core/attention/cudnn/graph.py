"""Attention by cuDNN's kernels: graphs of its frontend (pip package nvidia-cudnn-frontend), and plans of batches."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fi_core.observe.describe import words
from fi_core.runtime.errors import LibraryError, UnsupportedError
from fi_core.runtime.lazy import torch
from fi_core.utils import _get_range_buf, ceil_div, next_positive_power_of_2

_LOG2E = math.log2(math.e)
_MOST_GRAPHS = 256  # kept; building one takes as long as thousands of calls


@functools.cache
def frontend() -> Any:
    """The module `cudnn`. Raises LibraryError without it."""
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        raise LibraryError(
            f"cuDNN's Python frontend is required: pip install nvidia-cudnn-frontend ({error}). "
            "The wrappers with another backend and the trtllm_batch_* functions need no other library."
        ) from None


@functools.cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return frontend().create_handle()


class Operand(NamedTuple):
    """A tensor in cuDNN's form: `[batch, heads, tokens, dim]` with strides, over the memory of `data`.

    offsets: int32 or int64 `[batch + 1]`, offsets of the requests in elements; None: the stride of the batch axis
    applies.
    """

    data: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: torch.Tensor | None = None


def dense(x: torch.Tensor) -> Operand:
    """A tensor of four axes with its own strides."""
    return Operand(x, tuple(x.shape), x.stride())


def packed(x: torch.Tensor, most: int, offsets: torch.Tensor, layout: int = 0) -> Operand:
    """`[tokens, heads, dim]` (layout 0) or `[heads, tokens, dim]` (1) of requests of at most `most` tokens."""
    heads, step = (1, 0) if layout == 0 else (0, 1)
    shape = len(offsets) - 1, x.shape[heads], most, x.shape[2]
    return Operand(x, shape, (most * x.stride(step), x.stride(heads), x.stride(step), 1), offsets)


def per_request(x: torch.Tensor) -> Operand:
    """`[batch]` numbers."""
    return Operand(x, (x.numel(), 1, 1, 1), (1, 1, 1, 1))


def page_table(x: torch.Tensor, pages: int) -> Operand:
    """`[batch, max_pages]` page ids, contiguous in the last dimension, limited to a number of pages per request."""
    pitch = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    return Operand(x, (x.shape[0], 1, min(pages, x.shape[1]), 1), (pitch, pitch, 1, 1))


def paged_keys(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, longest: int
) -> dict[str, Operand]:
    """Keys and values in pages, of at most `longest` tokens each."""
    table = page_table(block_tables, ceil_div(longest, k_cache.shape[2]))
    names = ("k", "v", "paged_attention_k_table", "paged_attention_v_table")
    return dict(zip(names, (dense(k_cache), dense(v_cache), table, table)))


# Variables of a graph are numbered: those of the operands in this order, from 1, and behind all of them their offsets.
_RESULTS = ("out", "stats")
_OPERANDS = words("q k v seq_len_q seq_len_kv paged_attention_k_table paged_attention_v_table sink_token", *_RESULTS)
_UIDS = {name: (1 + i, 1 + i + len(_OPERANDS)) for i, name in enumerate(_OPERANDS)}


_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "int32": "INT32", "int64": "INT64"}


class _Graph:
    """A built graph for one set of shapes, strides and options."""

    def __init__(self, operands: dict[str, Operand], options: dict[str, Any], handle: Any) -> None:
        cudnn = frontend()
        float32 = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(intermediate_data_type=float32, compute_data_type=float32, handle=handle)

        def type_of(x: torch.Tensor) -> Any:
            return getattr(cudnn.data_type, _TYPES[str(x.dtype).removeprefix("torch.")])

        def with_offsets(variable: Any, name: str, offsets: torch.Tensor | None) -> Any:
            if offsets is not None:
                shape, stride = [len(offsets), 1, 1, 1], [1, 1, 1, 1]
                variable.set_ragged_offset(
                    graph.tensor(dim=shape, stride=stride, data_type=type_of(offsets), uid=_UIDS[name][1])
                )
            return variable

        inputs = {
            name: with_offsets(
                graph.tensor(dim=list(x.shape), stride=list(x.stride), data_type=type_of(x.data), uid=_UIDS[name][0]),
                name,
                x.offsets,
            )
            for name, x in operands.items()
            if name not in _RESULTS
        }
        try:
            given = {"name": "attention", "generate_stats": "stats" in operands, "use_padding_mask": True}
            found = graph.sdpa(**given, **inputs, **_options(cudnn, options))
            for name, variable in zip(_RESULTS, found):
                if name in operands:
                    x = operands[name]
                    variable.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride))
                    variable.set_data_type(type_of(x.data)).set_uid(_UIDS[name][0])
                    with_offsets(variable, name, x.offsets)
            graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except cudnn.cudnnGraphNotSupportedError as error:
            version = cudnn.backend_version()
            raise UnsupportedError(f"cuDNN {version} does not support this attention: {error}") from None
        self.execute, self.workspace = graph.execute, graph.get_workspace_size()


def _options(cudnn: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Causal masks are aligned to the bottom right, as are windows."""
    given = {name: x for name, x in options.items() if name not in ("causal", "window_left")}
    if options["causal"] or options["window_left"] >= 0:
        given["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
    if options["causal"]:
        given["diagonal_band_right_bound"] = 0
    if options["window_left"] >= 0:
        given["diagonal_band_left_bound"] = options["window_left"] + 1  # keys that a row sees, its own included
    return given


def finish_lse(lse: torch.Tensor, empty: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
    """Sets lse of requests without keys, for which cuDNN 9.19 writes other values: -inf, or the lse of the sinks.

    lse: `[..., num_qo_heads]`; empty: bool, of its shape without the heads.
    """
    if sinks is None:
        lse.masked_fill_(empty.unsqueeze(-1), -math.inf)
    else:
        lse.copy_((sinks * _LOG2E).where(empty.unsqueeze(-1), lse))


_graphs: dict[Any, _Graph] = {}


def attend(operands: dict[str, Operand], workspace: torch.Tensor, scale: float, causal: bool, window_left: int) -> None:
    """`softmax(mask(q k^T * scale)) v` of each request into operands["out"], and lse in base 2 into operands["stats"].

    Args:
        operands: q, k, v, seq_len_q, seq_len_kv (int32) and out; optionally stats (fp32), sink_token,
            paged_attention_k_table and paged_attention_v_table (int32).
        workspace: scratch of cuDNN.
        scale: factor of the scores.
        causal: causal mask, aligned to the bottom right.
        window_left: number of keys before its own that a row attends to; -1: all.

    Raises:
        LibraryError: cuDNN's Python frontend is missing.
        UnsupportedError: cuDNN does not support the request; with its message.
        ValueError: device, dtype or workspace.
    """
    cudnn, q = frontend(), operands["q"].data
    if not q.is_cuda:
        raise ValueError(f"q: a CUDA device is required by cuDNN; got {q.device}")
    device = q.device.index
    handle = _handle(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    key: list[Any] = [device, scale, causal, window_left]
    bind: dict[int, torch.Tensor] = {}
    for name, (x, shape, stride, offsets) in operands.items():
        uid = _UIDS[name]
        bind[uid[0]] = x
        key += (name, x.dtype, shape, stride)
        if offsets is not None:
            bind[uid[1]] = offsets
            key.append(offsets.dtype)
    graph = _graphs.get(frozen := tuple(key))
    if graph is None:
        for name in ("q", "k", "v", "out"):
            if operands[name].data.dtype not in (torch.float16, torch.bfloat16):
                raise UnsupportedError(f"{name}: float16 or bfloat16 is required; got {operands[name].data.dtype}")
        options: dict[str, Any] = {"attn_scale": scale, "causal": causal, "window_left": window_left}
        table = operands.get("paged_attention_k_table")
        if table is not None:  # cuDNN requires exactly the pages that this many keys take
            options["paged_attention_max_seq_len_kv"] = table.shape[2] * operands["k"].shape[2]
        if len(_graphs) == _MOST_GRAPHS:
            del _graphs[next(iter(_graphs))]
        graph = _graphs[frozen] = _Graph(operands, options, handle)
    if graph.workspace > workspace.nbytes:
        raise ValueError(f"workspace_buffer: {graph.workspace} bytes are required by cuDNN; got {workspace.nbytes}")
    graph.execute(bind, workspace, handle=handle)
    if "stats" in operands:
        operands["stats"].data.mul_(_LOG2E)  # cuDNN's is natural


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
