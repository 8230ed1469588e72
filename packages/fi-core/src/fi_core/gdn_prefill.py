"""Prefill with a gated delta rule: packed sequences, in chunks of tokens."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fi_core.linear_attention.ops import chunk_gated_delta_rule as _chunk
from fi_core.linear_attention.trace import prefill
from fi_core.observe.log import fi_api
from fi_core.runtime.invariance import is_on
from fi_core.runtime.machine import multiprocessors_of, rehearsal

if TYPE_CHECKING:
    import torch

__all__ = ["chunk_gated_delta_rule"]

_BACKENDS = ("auto", "flashinfer", "sm90", "cutlass")
_CHUNK = 64  # tokens
# A split computes all but the outputs twice, so it pays from about three segments on
# (docs/notes/linear-attention-more-heads.md).
_LEAST_SEGMENTS = 3
_LEAST_LENGTH = 256  # tokens


def _segment_tokens(multiprocessors: int, tokens: int, heads: int, dim: int, sequences: int, length: int | None) -> int:
    """Tokens of a segment, so that each SM gets 64 columns of a state; 0: sequences are not split. length: or None."""
    if sequences <= 0 or heads == 0:
        return 0
    if not length:
        most = multiprocessors // (heads * (dim // 64 or 1)) - (sequences - 1)
        if most < _LEAST_SEGMENTS * sequences:
            return 0
        length = max(-(-tokens // most), _LEAST_LENGTH)
        if length * _LEAST_SEGMENTS * sequences > tokens:
            return 0
    return -(-length // _CHUNK) * _CHUNK


def _segments(device: int, *facts: Any) -> int:
    """_segment_tokens for a device, by its index."""
    return _segment_tokens(multiprocessors_of(device), *facts)


_segments_on = functools.lru_cache(maxsize=1024)(_segments)  # so that a call does not look for the SMs of a GPU


def _wrong_shape(q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> ValueError:
    wanted = (("q", q, "[T, Hq, D]"), ("v", v, "[T, Hv, D]"), ("cu_seqlens", cu_seqlens, "[N + 1]"))
    name, x, shape = next((name, x, shape) for name, x, shape in wanted if x.ndim != shape.count(",") + 1)
    return ValueError(f"{name} must have shape {shape}; got {list(x.shape)}")


def _wrong_option(use_cp: bool | str, backend: str) -> ValueError:
    if use_cp not in ("auto", True, False):
        return ValueError(f"use_cp must be 'auto', True or False; got {use_cp!r}")
    return ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")


@fi_api(trace=prefill)
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
    state_indices: torch.Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
    *,
    output_state_indices: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes a gated delta rule over packed sequences (arXiv:2412.06464), also with a gate for each channel of k
    (Kimi Delta Attention, arXiv:2510.26692).

    For each token and head with the state S `[V, K]`: `S *= g`, `u = beta (v - S k)`, `S += u k^T`,
    `output = scale S q`. Sums are in fp32; operands of products, the state among them, are rounded to the dtype of q.

    Args:
        q: `[T, Hq, D]`, bf16 or fp16; on CUDA D is 64 or 128. Inputs may be strided, with contiguous last dimension.
        k: `[T, Hk, D]`, dtype of q.
        v: `[T, Hv, D]`, dtype of q. H = max(Hq, Hv) heads have a state; Hq, Hk and Hv divide H.
        g: `[T, H]`, or `[T, H, K]` with a gate for each channel, fp32: the decay itself (not its logarithm), in [0, 1];
            None means 1. Gates of channels have a contiguous last dimension, and on CUDA take 6 K bytes of workspace
            for each token and head.
        beta: `[T, H]`, fp32; None means 1.
        scale: of q; None or 0 means `1 / sqrt(D)`.
        initial_state: `[N, H, V, K]`, fp32, bf16 or fp16; None means zeros.
        output_final_state: whether the state after each sequence is returned.
        cu_seqlens: `[N + 1]`, int32 or int64, offsets of the sequences; required. Sequences may be empty.
        use_qk_l2norm_in_kernel: whether q and k are divided by `sqrt(sum(x^2) + 1e-6)` first.
        output: `[T, H, D]`, dtype of q; allocated if None. Tokens of no sequence are not written.
        output_state: `[N, H, V, K]`; allocated in fp32 if None and output_final_state.
        state_checkpoints: `[.., H, V, K]`, receives the state after each checkpoint_every_n_tokens tokens of sequence
            i, from row `checkpoint_cu_starts[i]` on.
        checkpoint_cu_starts: `[N + 1]`, int32 or int64.
        checkpoint_every_n_tokens: a multiple of 64, or 0.
        use_cp: "auto" or True: long sequences are split into segments where there are few heads, which changes results
            by rounding; False: they are not. "auto" means False with output_state_indices: then a prompt from a state
            in fp32 after a multiple of 64 tokens has the bits of the whole prompt.
        state_indices: `[N]`, int32 or int64, distinct slots: initial_state and output_state are pools
            `[P, H, V, K]` whose rows are read and written. Both must then be given to be read and written. A sequence
            with a negative one starts from zeros, and its last state is not written.
        _cp_chunk_len: tokens of a segment, unless use_cp is False; None: the library's choice.
        backend: "auto", "flashinfer", "sm90" or "cutlass"; all of them select the kernels of this library.
        max_seqlen: accepted; it has no effect.
        output_state_indices: `[N]`, int32 or int64: the slots of output_state that are written, if others than those
            read; negative ones are not. A slot that one sequence writes must not be read by another.

    Returns:
        output, or (output, output_state) if output_final_state.

    Raises:
        AssertionError: cu_seqlens is None.
        ValueError: a shape, stride, device, backend, use_cp or checkpoint_every_n_tokens is wrong.
        TypeError: a dtype is wrong.
    """
    assert cu_seqlens is not None, "cu_seqlens must be given"
    try:
        tokens, q_heads, dim = q.shape
        _, v_heads, dim_v = v.shape
        (ends,) = cu_seqlens.shape
    except ValueError:
        raise _wrong_shape(q, v, cu_seqlens) from None
    if ends < 1:
        raise ValueError(f"cu_seqlens must have shape [N + 1]; got {[ends]}")
    if use_cp not in ("auto", True, False) or backend not in _BACKENDS:
        raise _wrong_option(use_cp, backend)
    heads, sequences = q_heads if q_heads > v_heads else v_heads, ends - 1
    output = q.new_empty(tokens, heads, dim_v) if output is None else output
    if output_state is None and output_final_state:
        import torch

        if state_indices is not None or output_state_indices is not None:
            raise ValueError("output_state must be given with state_indices and output_state_indices")
        output_state = q.new_empty(sequences, heads, dim_v, dim, dtype=torch.float32)
    device, segment_tokens = q.get_device(), 0  # the device is 0 or more on CUDA
    if (device >= 0 or rehearsal()) and (use_cp is True or (use_cp and output_state_indices is None)):
        found = _segments_on if device >= 0 else _segments
        segment_tokens = found(device, tokens, heads, dim, sequences, _cp_chunk_len)
        segment_tokens = 0 if segment_tokens and is_on() else segment_tokens
    if not checkpoint_every_n_tokens:
        state_checkpoints = checkpoint_cu_starts = None
    _chunk(  # mostly by position, and without a dictionary of names, which is slower
        output, q, k, v, cu_seqlens, scale or (dim or 1) ** -0.5, g, beta, use_qk_l2norm_in_kernel, initial_state,
        output_state, state_indices=state_indices, state_checkpoints=state_checkpoints,
        checkpoint_cu_starts=checkpoint_cu_starts, checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        segment_tokens=segment_tokens, output_state_indices=output_state_indices,
    )  # fmt: skip
    return (output, output_state) if output_final_state and output_state is not None else output
