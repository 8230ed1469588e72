"""Batch decode by cuDNN's own kernels, through its Python frontend (pip package nvidia-cudnn-frontend)."""

from __future__ import annotations

import functools
import importlib
import math
from typing import TYPE_CHECKING, Any

from fi_core.errors import LibraryError
from fi_core.observe.log import fi_api
from fi_core.utils import check_shape_dtype_device

if TYPE_CHECKING:
    import torch

_LOG2E = math.log2(math.e)


def _frontend() -> Any:
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        raise LibraryError(
            f"cuDNN's Python frontend is required: pip install nvidia-cudnn-frontend ({error}). "
            "BatchDecodeWithPagedKVCacheWrapper and trtllm_batch_decode_with_kv_cache need no other library."
        ) from None


@functools.cache
def _handle(device: int) -> Any:
    import torch

    with torch.cuda.device(device):
        return _frontend().create_handle()


class _Graph:
    """A built graph for one set of shapes, strides and options; `tensors` are its variables by name."""

    def __init__(self, given: dict[str, torch.Tensor], options: dict[str, Any], handle: Any, max_kv: int) -> None:
        cudnn = _frontend()
        float32 = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(intermediate_data_type=float32, compute_data_type=float32, handle=handle)
        inputs = {name: graph.tensor_like(x) for name, x in given.items() if name not in ("out", "stats")}
        tables = {"paged_attention_max_seq_len_kv": max_kv} if "paged_attention_k_table" in inputs else {}
        out, stats = graph.sdpa(
            name="decode", generate_stats="stats" in given, use_padding_mask=True, **inputs, **tables, **options
        )
        for name, found in (("out", out), ("stats", stats)):
            if name in given:
                x = given[name]
                kind = float32 if name == "stats" else _type(cudnn, x)
                found.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind)
                inputs[name] = found
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph, self.tensors = graph, inputs

    def run(self, given: dict[str, torch.Tensor], workspace: torch.Tensor, handle: Any) -> None:
        need = self.graph.get_workspace_size()
        if need > workspace.nbytes:
            raise ValueError(f"workspace_buffer: {need} bytes are required by cuDNN; got {workspace.nbytes}")
        self.graph.execute({self.tensors[name]: x for name, x in given.items()}, workspace, handle=handle)


def _type(cudnn: Any, x: torch.Tensor) -> Any:
    return {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[str(x.dtype).removeprefix("torch.")]


_graphs: dict[Any, _Graph] = {}


@fi_api
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    q_len_per_req: int = 1,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a block table by cuDNN: `softmax(q k^T * scale) v`.

    q: `[batch_size * q_len_per_req, num_qo_heads, head_dim]`, fp16 or bf16. k_cache, v_cache:
    `[pages, num_kv_heads, page_size, head_dim]`. block_tables: `[batch_size, max_pages]`, actual_seq_lens_kv:
    `[batch_size, 1, 1, 1]`, both int32 and required. max_sequence_kv: the longest request there may be. With
    q_len_per_req > 1 each query token sees the keys up to its own; window_left: how many before it, -1 all. sinks: fp32
    `[num_qo_heads]`. For each new shape a graph is built, which takes tens of milliseconds. is_cuda_graph_compatible:
    makes no difference.

    Returns out, or (out, lse) with lse `[rows, num_qo_heads]`, fp32, base 2. Raises LibraryError without cuDNN's Python
    frontend, ValueError (shapes, devices, workspace), NotImplementedError (batch_offsets_*); what cuDNN does not
    support it says itself.
    """
    import torch

    offsets = {"batch_offsets_q": batch_offsets_q, "batch_offsets_o": batch_offsets_o,
               "batch_offsets_k": batch_offsets_k, "batch_offsets_v": batch_offsets_v}  # fmt: skip
    for name, given_offsets in offsets.items():
        if given_offsets is not None:
            raise NotImplementedError(f"{name}: requests must lie one after another, with q_len_per_req rows each")
    if block_tables is None or actual_seq_lens_kv is None:
        raise ValueError("block_tables and actual_seq_lens_kv: both are required")
    _frontend()
    if not q.is_cuda:
        raise ValueError(f"q: a CUDA device is required by cuDNN; got {q.device}")
    batch_size, most = block_tables.shape
    rows, heads = q.shape[:2]
    if rows != batch_size * q_len_per_req:
        raise ValueError(f"q: batch_size * q_len_per_req = {batch_size * q_len_per_req} rows are required; got {rows}")
    shape = (rows, heads, v_cache.shape[3])
    if out is None:
        out = q.new_empty(shape)
    check_shape_dtype_device(out, shape, q.dtype, q.device, "out")
    if lse is not None:
        check_shape_dtype_device(lse, shape[:2], torch.float32, q.device, "lse")
    elif return_lse:
        lse = q.new_empty(shape[:2], dtype=torch.float32)
    table = block_tables.view(batch_size, 1, most, 1)
    query_lens = torch.full((batch_size, 1, 1, 1), q_len_per_req, dtype=torch.int32, device=q.device)
    given = {
        "q": q.unflatten(0, (batch_size, q_len_per_req)).transpose(1, 2),
        "k": k_cache,
        "v": v_cache,
        "seq_len_q": query_lens,
        "seq_len_kv": actual_seq_lens_kv.view(batch_size, 1, 1, 1),
        "paged_attention_k_table": table,
        "paged_attention_v_table": table,
        "out": out.unflatten(0, (batch_size, q_len_per_req)).transpose(1, 2),
    }
    if lse is not None:
        given["stats"] = lse.view(batch_size, q_len_per_req, heads, 1).transpose(1, 2)
    if sinks is not None:
        given["sink_token"] = sinks.view(1, heads, 1, 1)
    options: dict[str, Any] = {"attn_scale": float(scale)}
    if q_len_per_req > 1 or window_left >= 0:
        options["use_causal_mask_bottom_right"] = True
    if window_left >= 0:
        options["sliding_window_length"] = window_left + 1
    handle = _handle(q.device.index or 0)
    _frontend().set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
    shapes = tuple((name, x.dtype, x.shape, x.stride()) for name, x in given.items())
    key = q.device, max_sequence_kv, shapes, tuple(options.items())
    if key not in _graphs:
        _graphs[key] = _Graph(given, options, handle, max_sequence_kv)
    _graphs[key].run(given, workspace_buffer, handle)
    if lse is not None:
        lse.mul_(_LOG2E)  # cuDNN's is natural
    return (out, lse) if return_lse and lse is not None else out
