"""Batch decode by cuDNN, over a block table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.attention.contract import results
from fi_core.attention.cudnn.graph import Operand, attend, dense, frontend, packed, paged_keys, per_request
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import unsupported
from fi_core.utils import constants

if TYPE_CHECKING:
    import torch


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
    """Decode attention over a block table by cuDNN: `softmax(q k^T * scale) v` for each request.

    Each new set of shapes, scale and options builds a graph, which takes the host 40 ms, or 0.7 s with q_len_per_req >
    1 (cuDNN 9.19).

    Args:
        q: `[batch_size * q_len_per_req, num_qo_heads, head_dim]`, fp16 or bf16.
        k_cache, v_cache: `[pages, num_kv_heads, page_size, head_dim]`, page_size a power of 2. With q_len_per_req > 1
            the unused tokens of a request's last page must be finite.
        scale: factor of the scores.
        workspace_buffer: scratch of cuDNN, on the device.
        max_sequence_kv: upper bound of the lengths.
        actual_seq_lens_kv: int32 `[batch_size, 1, 1, 1]`, on the device; required.
        block_tables: int32 `[batch_size, max_pages]`, on the device; required.
        is_cuda_graph_compatible: without effect. A call may be captured once its graph is built, that is after one call
            of the same shapes.
        batch_offsets_q, batch_offsets_o: int32 or int64 `[batch_size + 1]`, offsets of the requests in q and in out, in
            elements; default: concatenated.
        batch_offsets_k, batch_offsets_v: not supported.
        out: written and returned if given.
        return_lse: also return lse.
        lse: fp32 `[rows, num_qo_heads]`, written if given.
        q_len_per_req: query tokens of each request; each attends to the keys up to its own position.
        window_left: number of keys before its own that a query attends to; -1: all.
        sinks: fp32 `[num_qo_heads]` (cuDNN 9.19 supports them with q_len_per_req > 1 only).

    Returns:
        out, or (out, lse) with lse `[rows, num_qo_heads]`, fp32, base 2.

    Raises:
        LibraryError: cuDNN's Python frontend is missing.
        ValueError: shapes, devices or workspace.
        NotImplementedError: batch_offsets_k, batch_offsets_v.
        UnsupportedError: cuDNN does not support the request; with its message.
    """
    for name, offsets in (("batch_offsets_k", batch_offsets_k), ("batch_offsets_v", batch_offsets_v)):
        if offsets is not None:
            raise unsupported(name, offsets, "block_tables says where keys and values are: pass None")
    if block_tables is None or actual_seq_lens_kv is None:
        raise ValueError("block_tables and actual_seq_lens_kv: both are required")
    frontend()
    batch_size, (rows, heads) = block_tables.shape[0], q.shape[:2]
    if rows != batch_size * q_len_per_req:
        raise ValueError(f"q: batch_size * q_len_per_req = {batch_size * q_len_per_req} rows are required; got {rows}")
    out, lse = results(q, (rows, heads, v_cache.shape[3]), out, lse, return_lse, q.dtype)

    def rows_of(x: torch.Tensor, offsets: torch.Tensor | None) -> Operand:
        if offsets is not None:
            return packed(x, q_len_per_req, offsets)
        return dense(x.unflatten(0, (batch_size, q_len_per_req)).transpose(1, 2))

    operands = {
        **paged_keys(k_cache, v_cache, block_tables, max_sequence_kv),
        "q": rows_of(q, batch_offsets_q),
        "seq_len_q": per_request(constants(q_len_per_req, batch_size, q.device)),
        "seq_len_kv": per_request(actual_seq_lens_kv),
        "out": rows_of(out, batch_offsets_o),
    }
    if lse is not None:
        operands["stats"] = rows_of(lse.unsqueeze(2), None)
    if sinks is not None:
        operands["sink_token"] = dense(sinks.view(1, heads, 1, 1))
    causal = q_len_per_req > 1
    attend(operands, workspace_buffer, float(scale), causal, window_left)
    return (out, lse) if return_lse and lse is not None else out
