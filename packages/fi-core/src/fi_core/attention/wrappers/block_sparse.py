"""Block-sparse attention: the selected blocks of keys are the pages of a request, and each row of blocks is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import POS_ENCODINGS, score_options, scores
from fi_core.attention.wrappers import pattern_trace
from fi_core.attention.wrappers.base import AroundWrapper
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.attention.wrappers.plan_state import ReturnsLse
from fi_core.observe.checked import checked
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse
from fi_core.utils import int32_index

if TYPE_CHECKING:
    import torch


def _pattern(
    indptr: torch.Tensor, indices: torch.Tensor, M: int, N: int, R: int, C: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and columns of the blocks, on the host; a column may be N / C, which is no block. Raises ValueError."""
    for name, value in (("M", M), ("N", N), ("R", R), ("C", C)):
        if not isinstance(value, int) or value < (name in "RC"):
            raise ValueError(f"{name}: {'a positive' if name in 'RC' else 'no negative'} integer; got {value!r}")
    rows = -(-M // R)
    if N % C or indptr.ndim != 1 or len(indptr) != rows + 1 or indices.ndim != 1:
        raise ValueError(
            f"indptr: N a multiple of C, ceil(M / R) + 1 = {rows + 1} offsets and flat indices are required; got N "
            f"= {N}, C = {C}, indptr of shape {tuple(indptr.shape)} and indices of shape {tuple(indices.shape)}"
        )
    begins, columns = indptr.cpu().long(), indices.cpu().long()
    if rows and (begins[0] != 0 or (begins.diff() < 0).any() or begins[-1] > len(columns)):
        raise ValueError(f"indptr: ascending offsets from 0 to at most {len(columns)} are required; got {indptr}")
    columns = columns[: int(begins[-1])]
    if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) <= N // C:
        raise ValueError(
            f"indices out of bound: columns of blocks below N / C = {N // C} are required; got "
            f"{int(columns.min())} to {int(columns.max())}"
        )
    return begins, columns


def _without_padding(
    begins: torch.Tensor, columns: torch.Tensor, blocks: int, mask: torch.Tensor | None, packed_mask: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The pattern and its mask without columns that are no block. Raises ValueError for a packed mask."""
    import torch

    kept = columns < blocks
    if kept.all():
        return begins, columns, mask
    if packed_mask is not None:
        raise ValueError(f"indices: below N / C = {blocks} is required with packed_mask; got {blocks}")
    mask = None if mask is None else mask[: len(kept)][kept[: len(mask)].to(mask.device)]
    return torch.nn.functional.pad(kept.cumsum(0), (1, 0))[begins], columns[kept], mask


class PatternWrapper(ReturnsLse, AroundWrapper):
    """What the block-sparse wrappers have in common: the batch prefill whose pages are the selected blocks."""

    _described: dict[str, Any]

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._inner = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, "NHD", backend=backend)

    @property
    def resolved_backend(self) -> str:
        """As in BatchPrefillWithPagedKVCacheWrapper."""
        backend: str = self._inner.resolved_backend
        return backend

    def _set_scores(self, *options: Any) -> None:
        """Replaces the options of the plan's scores by those of `forward`, which are the arguments of `scores`."""
        plan = self._inner._change(**scores(*options))
        if self._inner._plan_info is not None:
            plain = plan.pos_encoding == POS_ENCODINGS["NONE"] and not plan.soft_cap
            covered = {"covered": self._described["covered"] and plain}
            self._described = {**self._described, **covered, "sm_scale": plan.wanted_scale}


@fi_api
class BlockSparseAttentionWrapper(PatternWrapper):
    """Attention of M query tokens over the blocks of N keys that a matrix of blocks (BSR) selects, for all heads alike.

    A row of blocks is a request of R query tokens, whose pages of C tokens are the selected blocks of k and v.

    Args:
        float_workspace_buffer, backend: as in BatchPrefillWithPagedKVCacheWrapper.
    """

    @fi_api
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str = "float16",
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
        kv_block_lens: torch.Tensor | None = None,
        q2k_indices: torch.Tensor | None = None,
        q2k_num: torch.Tensor | None = None,
        kv_splits: int | None = None,
        use_clc: bool | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Plans the next `run` calls. It reads indptr and indices, so it synchronises where they are on the device.

        Args:
            indptr: int32 `[ceil(M / R) + 1]`; row r of blocks has the columns `indices[indptr[r] : indptr[r + 1]]`.
            indices: int32 `[nnz]`, columns of blocks below N / C. A column equal to N / C is left out.
            M, N: query tokens and keys. R, C: those of a block; N is a multiple of C.
            num_qo_heads, num_kv_heads, head_dim: as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
            mask: bool `[nnz, R, C]`, the keys that a row of a selected block attends to; default all.
            packed_mask: uint8, the same as bits: the masks `[R, selected columns * C]` of the rows of blocks, each from
                a new byte on, as `segment_packbits` makes them. It takes precedence over mask.
            causal: row i of R sees the selected keys j <= i + (number of selected keys) - R, by their place among the
                selected keys.
            pos_encoding_mode: positions are those among the selected keys as well.
            o_data_type: dtype of the output, float16 unless given, also for other dtypes of q.
            kv_splits, use_clc: without effect.
            block_mask, kv_block_lens, q2k_indices, q2k_num: another form of the pattern, not supported.
            q_scale, k_scale, v_scale: factors of the scores and of the output.
            others: as in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError: a shape, or an index out of bounds. Other errors are those of that function.
            NotImplementedError: another form of the pattern.
        """
        import torch

        self._inner._forget_plan()
        forms = {"block_mask": block_mask, "kv_block_lens": kv_block_lens, "q2k_indices": q2k_indices}
        refuse("pass the pattern as indptr and indices", **forms, q2k_num=q2k_num)
        begins, columns = _pattern(indptr, indices, M, N, R, C)
        begins, columns, mask = _without_padding(begins, columns, N // C, mask, packed_mask)
        qo_indptr = (torch.arange(len(begins)) * R).clamp(max=M)
        if packed_mask is None and mask is not None:
            mask = _by_row(mask, begins, len(columns), R, C)[: int((qo_indptr.diff() * begins.diff()).sum()) * C]
        self._shape = N, C
        self._scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        tables = (*map(int32_index, (qo_indptr, begins, columns)), torch.full((len(begins) - 1,), C, dtype=torch.int32))
        options = score_options(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        options |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "o_data_type": o_data_type}
        options |= {"custom_mask": mask, "packed_custom_mask": packed_mask, "causal": causal}
        self._inner.plan(*tables, num_qo_heads, num_kv_heads, head_dim, C, non_blocking=non_blocking, **options)
        pattern = {"indptr": indptr, "indices": indices, "R": R, "C": C, "causal": causal, "o_data_type": o_data_type}
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        others = (mask, packed_mask, q_scale, k_scale, v_scale, logits_soft_cap)
        covered = all(x is None for x in others) and pos_encoding_mode == "NONE"
        self._described = {**pattern, "sm_scale": scale, "covered": covered}

    begin_forward = plan

    @fi_api(trace=pattern_trace.blocks, planned=pattern_trace.PLANNED_BLOCKS)
    @checked
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of the planned pattern.

        Args:
            q: `[M, num_qo_heads, head_dim]`.
            k, v: `[N, num_kv_heads, head_dim]`.
            scale_q, scale_k, scale_v: factors by head, for fp8, as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            out, lse, return_lse, enable_pdl: as in that function, which also has the errors.

        Returns:
            out `[M, num_qo_heads, head_dim]` in o_data_type, or (out, lse) with lse `[M, num_qo_heads]`, base 2. Rows
            without blocks have out = 0 and lse = -inf.
        """
        if self._inner._plan_info is None:
            raise self._inner._no_plan()
        tokens, size = self._shape
        for name, x in (("k", k), ("v", v)):
            if x.ndim != 3 or x.shape[0] != tokens:
                raise ValueError(f"{name}: [N = {tokens}, num_kv_heads, head_dim] is required; got {tuple(x.shape)}")
        scales = () if scale_q is scale_k is scale_v is None else (scale_q, scale_k, scale_v)
        k, v = (x.unflatten(0, (tokens // size, size)) for x in (k, v))
        given = tuple(1.0 if scale is None else scale for scale in scales)
        return self._inner.run(
            q, (k, v), *given, **self._scales, out=out, lse=lse, return_lse=return_lse, enable_pdl=enable_pdl
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """The older form of `run`. Its options replace those of the plan; an omitted option has its default."""
        self._set_scores(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v, scale_q, scale_k, scale_v)


def _by_row(mask: torch.Tensor, begins: torch.Tensor, nnz: int, R: int, C: int) -> torch.Tensor:
    """The masks `[R, C]` of blocks, flat, in the order of the keys of each row of blocks."""
    import torch

    if mask.ndim != 3 or mask.shape[1:] != (R, C) or mask.shape[0] < nnz:
        raise ValueError(f"mask: [nnz, R, C] = [{nnz}, {R}, {C}] is required; got {tuple(mask.shape)}")
    # An element (block, row of it) goes before one of a later row of blocks, or of a later row of the same.
    block_row = torch.repeat_interleave(torch.arange(len(begins) - 1), begins.diff())
    order = (block_row[:, None] * R + torch.arange(R)).flatten().argsort(stable=True).to(mask.device)
    return mask[:nnz].reshape(nnz * R, C)[order].flatten()
