"""Batch decode by cuDNN over a block table, and batch prefill over one or over contiguous keys."""

from __future__ import annotations

import functools
from typing import Any

from fi_core.attention.contract import log_base, results
from fi_core.attention.cudnn import graph
from fi_core.attention.cudnn.graph import Operand, attend, dense, frontend, packed, paged_keys, per_request
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import unsupported
from fi_core.runtime.lazy import torch
from fi_core.utils import constants, int32_index


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


def starts(lens: torch.Tensor, step: int) -> torch.Tensor:
    """Offsets of concatenated requests of these lengths, in elements: int64 `[batch + 1]`."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)) * step


def lengths(
    name: str, given: torch.Tensor | None, x: torch.Tensor, offsets: torch.Tensor | None, in_tokens: bool
) -> torch.Tensor:
    """The lengths of the requests on the device of x, from their offsets in x if they are not given."""
    if given is None and offsets is None:
        raise ValueError(f"{name}: the lengths of the requests are required where there are no batch_offsets")
    if given is None:
        assert offsets is not None
        given = offsets.diff() if in_tokens else offsets.diff() // x.stride(0)
    return int32_index(given.reshape(-1)).to(x.device, non_blocking=True).int()


def _check(
    q: torch.Tensor, batch_offsets_stats: torch.Tensor | None, backend: str | None, o_data_type: Any, units: str
) -> None:
    if batch_offsets_stats is not None:
        raise unsupported("batch_offsets_stats", batch_offsets_stats, "lse is padded to max_token_per_sequence rows")
    if backend not in (None, "cudnn"):
        raise ValueError(f'backend: None or "cudnn" is required; got {backend!r}')
    if units not in ("elements", "tokens"):
        raise ValueError(f"batch_offsets_units: elements or tokens is required; got {units!r}")
    if o_data_type not in (None, q.dtype):
        raise ValueError(f"o_data_type: the dtype of q, {q.dtype}, is required; got {o_data_type}")


def _scaled(scale: float, **factors: float | torch.Tensor | None) -> float:
    for name, factor in factors.items():
        if getattr(factor, "is_cuda", False):
            raise unsupported(name, factor, "on the device: pass a number or a host tensor, or multiply q by it")
        scale = scale if factor is None else scale * float(factor)
    return scale


def _ragged(
    x: torch.Tensor, longest: int, lens: torch.Tensor, offsets: torch.Tensor | None, in_tokens: bool
) -> Operand:
    if offsets is None:
        return packed(x, longest, starts(lens, x.stride(0)))
    return packed(x, longest, offsets * x.stride(0) if in_tokens else offsets)


@fi_api
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None = None,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    batch_offsets_stats: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: torch.dtype | None = None,
    batch_offsets_units: str = "elements",
    lse_base: str = "log2",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prefill attention by cuDNN: `softmax(mask(q k^T * scale)) v` for each request.

    Each new set of shapes, scale and options builds a graph, which takes the host 0.7 s (cuDNN 9.19). Arguments that
    are not listed are those of `cudnn_batch_decode_with_kv_cache`.

    Args:
        q: `[qo_tokens, num_qo_heads, head_dim_qk]`, fp16 or bf16.
        k_cache, v_cache: with block_tables `[pages, num_kv_heads, page_size, head_dim]`, page_size a power of 2, where
            the unused tokens of a request's last page must be finite; else `[kv_tokens, num_kv_heads, head_dim]`.
        max_token_per_sequence, max_sequence_kv: upper bounds of qo_len and kv_len.
        actual_seq_lens_q, actual_seq_lens_kv: integers `[batch_size]` or `[batch_size, 1, 1, 1]`, on the host or on the
            device. None: the distances of batch_offsets_q and batch_offsets_k.
        block_tables: int32 `[batch_size, max_pages]`; None: ragged keys.
        causal: causal mask, aligned to the bottom right.
        q_scale, k_scale: factors of the scores, numbers or one-element host tensors.
        v_scale: factor of the output, a number or a tensor.
        batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v: int32 or int64 `[batch_size + 1]`, on the
            device, offsets of the requests in q, out, k_cache and v_cache; default: concatenated.
        batch_offsets_stats: not supported.
        lse: fp32, written if given.
        backend: None or "cudnn".
        o_data_type: None, or q's dtype.
        batch_offsets_units: unit of the offsets, "elements" or "tokens".
        lse_base: base of lse, "log2" or "ln".

    Returns:
        (out `[qo_tokens, num_qo_heads, head_dim_vo]`, None), or with return_lse (out, lse) with lse fp32 `[batch_size,
        max_token_per_sequence, num_qo_heads]`; its rows beyond those of a request are undefined.

    Raises:
        LibraryError: cuDNN's Python frontend is missing.
        ValueError: shape, dtype, device, workspace, backend, batch_offsets_units or lse_base; no lengths.
        NotImplementedError: scales on the device, batch_offsets_stats.
        UnsupportedError: cuDNN does not support the request; with its message.
    """
    _check(q, batch_offsets_stats, backend, o_data_type, batch_offsets_units)
    in_tokens, factor = batch_offsets_units == "tokens", log_base(lse_base)
    lens_q = lengths("actual_seq_lens_q", actual_seq_lens_q, q, batch_offsets_q, in_tokens)
    lens_kv = lengths("actual_seq_lens_kv", actual_seq_lens_kv, k_cache, batch_offsets_k, in_tokens)
    graph.frontend()
    scale, most = _scaled(scale, q_scale=q_scale, k_scale=k_scale), max_token_per_sequence
    shape, lse_shape = (*q.shape[:2], v_cache.shape[-1]), (len(lens_q), most, q.shape[1])
    out, lse = results(q, shape, out, lse, return_lse, q.dtype, lse_shape)
    ragged = functools.partial(_ragged, in_tokens=in_tokens)
    operands = {
        "q": ragged(q, most, lens_q, batch_offsets_q),
        "seq_len_q": per_request(lens_q),
        "seq_len_kv": per_request(lens_kv),
        "out": ragged(out, most, lens_q, batch_offsets_o),
    }
    if block_tables is None:
        operands["k"] = ragged(k_cache, max_sequence_kv, lens_kv, batch_offsets_k)
        operands["v"] = ragged(v_cache, max_sequence_kv, lens_kv, batch_offsets_v)
    else:
        operands.update(graph.paged_keys(k_cache, v_cache, block_tables, max_sequence_kv))
    if lse is not None:
        operands["stats"] = graph.dense(lse.transpose(1, 2).unsqueeze(3))
    graph.attend(operands, workspace_buffer, float(scale), causal, -1)
    if lse is not None:
        graph.finish_lse(lse, (lens_kv == 0).view(-1, 1).expand(-1, most))
        if factor != 1.0:
            lse.mul_(factor)
    if v_scale is not None:
        out.mul_(v_scale)
    return out, lse if return_lse else None
