"""Prefill of Mamba-2 layers: state space duality in chunks, over batches and packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.linear_attention.mamba_ops import ssd_combined as _ssd
from fi_core.linear_attention.mamba_trace import SSD
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

_REFERENCE_CHUNK = 128  # tokens, of seq_chunk_cumsum


_UNBOUNDED = (0.0, float("inf"))


def _scan(
    out: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt_limit: tuple[float, float],
    **more: Any,
) -> None:
    """x `[b, T, heads, dim]`."""
    given = {name: value for name, value in more.items() if value is not None}  # names are slower
    if dt_limit != _UNBOUNDED:
        given["dt_low"], given["dt_high"] = _limits(dt_limit)
    _ssd(out, x, dt, A, B, C, **given)


def _limits(dt_limit: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = map(float, dt_limit)
    except (TypeError, ValueError):
        raise ValueError(f"dt_limit must be two numbers; got {dt_limit!r}") from None
    if not low <= high:
        raise ValueError(f"dt_limit must be a range, the smaller number first; got {dt_limit!r}")
    return low, high


def _offsets(seq_idx: torch.Tensor, sequences: int) -> torch.Tensor:
    """`[sequences + 1]` from the sequence of each token, `[1, T]`, on its device."""
    import torch

    ids = torch.arange(sequences + 1, device=seq_idx.device, dtype=seq_idx.dtype)
    return torch.searchsorted(seq_idx[0].contiguous(), ids, out_int32=True)


def _chunk_counts(offsets: torch.Tensor, chunk_size: int, out: torch.Tensor | None) -> torch.Tensor:
    """`[sequences + 1]`: the sums of the chunks of `chunk_size` packed tokens that hold tokens of each sequence."""
    import torch

    first, end = offsets[:-1], offsets[1:]
    counts = torch.where(end > first, (end - 1) // chunk_size - first // chunk_size + 1, 0)
    sums = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return sums if out is None else out.copy_(sums)


def _rows(*tensors: torch.Tensor | None) -> int | None:
    return next((t.shape[0] for t in tensors if t is not None), None)


def _sequences(
    x: torch.Tensor, seq_idx: torch.Tensor | None, cu_seqlens: torch.Tensor | None, known: int | None
) -> tuple[int, torch.Tensor | None]:
    """How many there are, and their offsets if they are packed. known: the number that other arguments give."""
    if cu_seqlens is not None and cu_seqlens.numel() == 0:
        raise ValueError("cu_seqlens must have one number more than there are sequences; got none")
    if seq_idx is None:
        return x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1, cu_seqlens
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens and seq_idx must not be given together: cu_seqlens is enough")
    if seq_idx.shape != (1, x.shape[1]) or x.shape[0] != 1:
        came = f"{list(seq_idx.shape)} and {list(x.shape)}"
        raise ValueError(f"seq_idx must have shape [1, T], and x [1, T, heads, dim]; got {came}")
    if known is None:
        raise ValueError("num_seqs must be given with seq_idx without initial_states")
    return known, _offsets(seq_idx, known)


@fi_api(trace=SSD)
def ssd_combined_fwd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    seq_chunk_cumsum: torch.Tensor | None = None,
    update_seq_chunk_cumsum: bool = False,
    checkpoint_token_indices: torch.Tensor | None = None,
    checkpoint_state_slots: torch.Tensor | None = None,
    checkpoint_states: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_final_states: bool = True,
    num_seqs: int | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    final_states: torch.Tensor | None = None,
    final_state_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes selective state spaces over prompts (Mamba-2, arXiv:2405.21060, section 6).

    For each token and head with the state S `[dim, dstate]`: `d = clamp(softplus(dt + dt_bias), dt_limit)`,
    `S = exp(d A) S + d x B^T`, `out = S C + D x`, `out *= silu(z)`. Decays and states are fp32; operands of products,
    the state among them, are rounded to the dtype of x, and sums are fp32.

    Chunks of 64 tokens are counted from the first token of each sequence, and no sequence is split: alone, in a batch,
    or cut at multiples of 64 tokens with fp32 states, a sequence gives the same bits. Neither lengths nor indices are
    read on the host.

    Args:
        x: `[b, T, heads, dim]`, bf16 or fp16; dim is 32, 64 or 128 on CUDA. Heads and tokens may be strided; batches
            follow on each other. Packed sequences have b = 1.
        dt: `[b, T, heads]`, fp32, bf16 or fp16.
        A: `[heads]`, fp32, negative.
        B, C: `[b, T, groups, dstate]`, dtype of x; groups divides heads. dstate is a multiple of 16 up to 256, on CUDA
            up to 128.
        D: `[heads]` or `[heads, dim]`, or None.
        z: shape and dtype of x, or None.
        dt_bias: `[heads]`, or None.
        dt_softplus: whether dt is `softplus(dt + dt_bias)`.
        dt_limit: the range of d.
        initial_states: `[n, heads, dim, dstate]`, fp32, bf16 or fp16; None: zeros. n is the number of sequences, or b.
        seq_idx: `[1, T]`, int32 or int64, the sequence of each token, not decreasing; the number of sequences is that
            of initial_states, of seq_chunk_cumsum, or num_seqs. It costs a launch; cu_seqlens costs none.
        chunk_indices, chunk_offsets: accepted; they have no effect.
        seq_chunk_cumsum: `[n + 1]`, int32; filled if update_seq_chunk_cumsum, for chunks of 128 packed tokens.
        checkpoint_token_indices: `[n]` or `[n, m]`, int32 or int64, where states are stored in between: after so many
            tokens, of the packed axis, or in batches of the sequence. Negative: nowhere.
        checkpoint_state_slots: shape of checkpoint_token_indices, the rows of checkpoint_states; negative: none.
        checkpoint_states: `[slots, heads, dim, dstate]`.
        out: like x; allocated if None.
        return_final_states: whether the states after the last tokens are returned.
        num_seqs: the sequences of seq_idx.
        cu_seqlens: `[n + 1]`, int32 or int64, offsets of packed sequences. The state of an empty one stays.
        initial_state_indices: `[n]`, int32 or int64: initial_states is a pool with these slots; negative: zeros.
        final_states: `[n, heads, dim, dstate]`, takes the last states; allocated if None, of the dtype of
            initial_states or checkpoint_states, or bf16.
        final_state_indices: `[n]`: final_states is a pool with these slots; negative: the state is not stored.

    The three pools may be one tensor if no slot that a sequence writes is read by another one.

    Returns:
        (out, final_states), or (out, None) without return_final_states.

    Raises:
        ValueError: a shape, stride or device is wrong; the number of sequences is not known.
        TypeError: a dtype is wrong.
    """
    import torch

    if x.ndim != 4 or B.ndim != 4:
        name, t = ("x", x) if x.ndim != 4 else ("B", B)
        raise ValueError(f"{name} must have 4 dimensions, [b, T, heads, size]; got {list(t.shape)}")
    known = _rows(initial_state_indices, initial_states) or num_seqs
    if known is None and seq_chunk_cumsum is not None:
        known = seq_chunk_cumsum.shape[0] - 1
    sequences, cu_seqlens = _sequences(x, seq_idx, cu_seqlens, known)
    if update_seq_chunk_cumsum and seq_chunk_cumsum is not None and cu_seqlens is not None:
        _chunk_counts(cu_seqlens, _REFERENCE_CHUNK, seq_chunk_cumsum)
    if out is None:
        out = x.new_empty(x.shape)
    if final_states is None and return_final_states:
        if final_state_indices is not None:
            raise ValueError("final_states must be given with final_state_indices")
        like = initial_states if initial_states is not None else checkpoint_states
        dtype = torch.bfloat16 if like is None else like.dtype
        final_states = x.new_empty((sequences, *x.shape[2:], B.shape[-1]), dtype=dtype)
    _scan(
        out, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        cu_seqlens=cu_seqlens, initial_states=initial_states, initial_state_indices=initial_state_indices,
        final_states=final_states, final_state_indices=final_state_indices, checkpoint_states=checkpoint_states,
        checkpoint_token_indices=checkpoint_token_indices, checkpoint_state_slots=checkpoint_state_slots,
    )  # fmt: skip
    return out, final_states if return_final_states else None


@fi_api
def mamba_chunk_scan_combined_varlen(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    cu_seqlens: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    last_chunk_indices: torch.Tensor,
    seq_idx: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes what `ssd_combined_fwd` does over packed sequences, with vLLM's signature: tokens first, no batch axis.

    Args:
        x: `[T, heads, dim]`, bf16 or fp16.
        dt: `[T, heads]`.
        A, D, dt_bias, dt_softplus, dt_limit: as in `ssd_combined_fwd`.
        B, C: `[T, groups, dstate]`, dtype of x.
        chunk_size, seq_idx: accepted; they have no effect.
        cu_seqlens: `[n + 1]`, int32 or int64, offsets of the sequences.
        cu_chunk_seqlens: `[chunks + 1]`, int32 or int64, offsets of the chunks of whose ends states are returned.
        last_chunk_indices: `[n]`, int32 or int64, the last chunk of each sequence.
        out: `[T, heads, dim]`, receives the outputs.
        z: shape and dtype of x, or None.
        initial_states: `[n, heads, dim, dstate]`, fp32, bf16 or fp16; None: zeros.
        return_intermediate_states: whether the state after each chunk is returned, not only that of each sequence.
        state_dtype: of the result; None: the dtype of C.

    Returns:
        `[n, heads, dim, dstate]`, or `[chunks, heads, dim, dstate]` with return_intermediate_states.

    Raises:
        ValueError: a shape, stride or device is wrong.
        TypeError: a dtype is wrong.
    """
    if x.ndim != 3:
        raise ValueError(f"x must have shape [T, heads, dim]; got {list(x.shape)}")
    for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_chunk_seqlens", cu_chunk_seqlens)):
        if offsets.ndim != 1 or not len(offsets):
            raise ValueError(f"{name} must have one number more than it has parts; got shape {list(offsets.shape)}")
    sequences, rows = cu_seqlens.shape[0] - 1, cu_chunk_seqlens.shape[0] - 1
    count = rows if return_intermediate_states else sequences
    states = x.new_empty((count, *x.shape[1:], B.shape[-1]), dtype=C.dtype if state_dtype is None else state_dtype)
    kept: dict[str, Any] = {"final_states": states}
    if return_intermediate_states:
        kept = {
            "checkpoint_states": states,
            "checkpoint_token_indices": cu_chunk_seqlens[1:],
            "checkpoint_last": last_chunk_indices,
        }
    _scan(
        out[None],
        x[None],
        dt[None],
        A,
        B[None],
        C[None],
        D=D,
        z=None if z is None else z[None],
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        cu_seqlens=cu_seqlens,
        initial_states=initial_states,
        **kept,
    )
    return states


class SSDCombined:
    """`ssd_combined_fwd` for a layer whose sizes are given once; nothing is planned, so it may be made at any time.

    Args:
        chunk_size: of seq_chunk_cumsum; results do not depend on it.
        nheads, headdim, dstate, ngroups: of the layer.
        io_dtype: of x, bf16 or fp16.
        state_dtype: of the states that `run` allocates, and of those it is given.
        has_d, d_has_hdim, has_initial_states, has_varlen, has_z: whether `run` gets D, D `[heads, dim]`,
            initial_states, seq_idx and z.
        seq_idx_dtype: accepted.
        backend: "cute" or "cake"; both select the kernels of this library.
    """

    def __init__(
        self,
        chunk_size: int,
        nheads: int,
        headdim: int,
        dstate: int,
        ngroups: int,
        io_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        has_d: bool = True,
        d_has_hdim: bool = False,
        has_initial_states: bool = False,
        has_varlen: bool = False,
        has_z: bool = False,
        seq_idx_dtype: torch.dtype | None = None,
        backend: str = "cute",
    ) -> None:
        import torch

        if backend not in ("cute", "cake"):
            raise ValueError(f"backend must be cute or cake; got {backend!r}")
        self.chunk_size, self.backend = chunk_size, backend
        self._sizes = {"heads": nheads, "dim": headdim, "dstate": dstate, "groups": ngroups}
        self._io_dtype = torch.bfloat16 if io_dtype is None else io_dtype
        self._state_dtype = torch.bfloat16 if state_dtype is None else state_dtype
        self._has = {"D": has_d, "initial_states": has_initial_states, "seq_idx": has_varlen, "z": has_z}
        self._d_ndim = 2 if d_has_hdim else 1

    @staticmethod
    def tile_state_size(num_seqs: int) -> int:
        """Bytes of the `tile_state` of `compute_seq_chunk_cumsum`, which needs none: 0."""
        return 0

    def compute_seq_chunk_cumsum(
        self,
        seq_idx: torch.Tensor,
        chunk_indices: torch.Tensor,
        chunk_offsets: torch.Tensor,
        chunk_size: int,
        num_seqs: int,
        seq_chunk_cumsum: torch.Tensor | None = None,
        tile_state: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[num_seqs + 1]`, int32: the sums of the chunks of packed tokens that hold tokens of each sequence.

        Args:
            seq_idx: `[1, T]`, int32 or int64, the sequence of each token.
            chunk_indices, chunk_offsets, tile_state: accepted; they have no effect.
            chunk_size: tokens.
            num_seqs: sequences.
            seq_chunk_cumsum: `[num_seqs + 1]`, int32, filled and returned; allocated if None.
        """
        return _chunk_counts(_offsets(seq_idx, num_seqs), chunk_size, seq_chunk_cumsum)

    def run(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        initial_states: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        chunk_offsets: torch.Tensor | None = None,
        seq_chunk_cumsum: torch.Tensor | None = None,
        update_seq_chunk_cumsum: bool = False,
        checkpoint_token_indices: torch.Tensor | None = None,
        checkpoint_state_slots: torch.Tensor | None = None,
        checkpoint_states: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_final_states: bool = True,
        num_seqs: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Calls `ssd_combined_fwd`; its sizes must be those of the layer.

        `out` is `[b, T, heads, dim]`, and only backend="cake" takes it: FlashInfer's "cute" has it in chunks.

        Raises:
            ValueError: a size or dtype is not that of the layer, or a tensor is missing.
        """
        sizes = {"heads": x.shape[-2], "dim": x.shape[-1], "dstate": B.shape[-1], "groups": B.shape[-2]}
        if sizes != self._sizes:
            raise ValueError(f"x and B must have the sizes of the layer, {self._sizes}; got {sizes}")
        if x.dtype != self._io_dtype:
            raise ValueError(f"x must be {self._io_dtype}, the io_dtype of the layer; got {x.dtype}")
        given = {"D": D, "initial_states": initial_states, "seq_idx": seq_idx, "z": z}
        for name, has in self._has.items():
            if has != (given[name] is not None):
                raise ValueError(f"{name} must be {'given' if has else 'None'}, as the layer was made")
        if D is not None and self._d_ndim != D.ndim:
            raise ValueError(f"D must have {self._d_ndim} dimensions, as the layer was made; got {list(D.shape)}")
        if out is not None and self.backend == "cute":
            raise ValueError('out must be None with backend="cute": make SSDCombined with backend="cake"')
        final_states = None
        if return_final_states:
            count = x.shape[0] if seq_idx is None else _rows(initial_states) or num_seqs
            if count is None and seq_chunk_cumsum is not None:
                count = seq_chunk_cumsum.shape[0] - 1
            if count is not None:
                final_states = x.new_empty((count, *x.shape[2:], B.shape[-1]), dtype=self._state_dtype)
        if update_seq_chunk_cumsum and seq_chunk_cumsum is not None and seq_idx is not None:
            _chunk_counts(_offsets(seq_idx, seq_chunk_cumsum.shape[0] - 1), self.chunk_size, seq_chunk_cumsum)
        return ssd_combined_fwd(
            x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx=seq_idx,
            chunk_indices=chunk_indices, chunk_offsets=chunk_offsets, seq_chunk_cumsum=seq_chunk_cumsum,
            checkpoint_token_indices=checkpoint_token_indices, checkpoint_state_slots=checkpoint_state_slots,
            checkpoint_states=checkpoint_states, out=out, return_final_states=return_final_states, num_seqs=num_seqs,
            final_states=final_states,
        )  # fmt: skip
