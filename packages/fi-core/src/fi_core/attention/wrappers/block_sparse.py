"""Block-sparse attention, with a pattern for all heads or one for each kv head: each row of blocks is a request, whose
pages are the selected blocks of keys.
"""

from __future__ import annotations

import math
from typing import Any

from fi_core.attention import derived
from fi_core.attention.contract import check_shape
from fi_core.attention.wrappers import pattern_trace
from fi_core.attention.wrappers.base import AroundWrapper, older_form
from fi_core.attention.wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from fi_core.observe.checked import checked
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import method_setting_lse
from fi_core.runtime.signature import takes
from fi_core.runtime.tensors import check_writable, integers
from fi_core.utils import check_shape_dtype_device, int32_index

_OF_BLOCKS = words(
    "self indptr indices M N R C num_qo_heads num_kv_heads head_dim=head_dim_qk mask=custom_mask",
    "packed_mask=packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale",
    "rope_theta q_data_type kv_data_type o_data_type non_blocking block_mask kv_block_lens q2k_indices q2k_num",
    "kv_splits use_clc q_scale k_scale v_scale",
)
_OF_HEAD_BLOCKS = words(
    "self block_mask_map block_row_sz block_col_sz num_qo_heads num_kv_heads head_dim=head_dim_qk causal",
    "pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta non_blocking q_data_type",
    "kv_data_type",
)


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
    begins, columns = integers("indptr", indptr).cpu().long(), integers("indices", indices).cpu().long()
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
    kept = columns < blocks
    if kept.all():
        return begins, columns, mask
    if packed_mask is not None:
        raise ValueError(f"indices: below N / C = {blocks} is required with packed_mask; got {blocks}")
    mask = None if mask is None else mask[: len(kept)][kept[: len(mask)].to(mask.device)]
    return torch.nn.functional.pad(kept.cumsum(0), (1, 0))[begins], columns[kept], mask


class PatternWrapper(AroundWrapper):
    """What the block-sparse wrappers have in common: the batch prefill whose pages are the selected blocks."""

    _described: dict[str, Any]

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._inner = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, "NHD", backend=backend)

    @property
    def resolved_backend(self) -> str:
        """As in BatchPrefillWithPagedKVCacheWrapper."""
        backend: str = self._inner.resolved_backend
        return backend

    def _replace_options(self, **fields: Any) -> None:
        self._inner._change(**fields)


@fi_api
class BlockSparseAttentionWrapper(PatternWrapper):
    """Attention of M query tokens over the blocks of N keys that a matrix of blocks (BSR) selects, for all heads alike.

    A row of blocks is a request of R query tokens, whose pages of C tokens are the selected blocks of k and v.

    Args:
        float_workspace_buffer, backend: as in BatchPrefillWithPagedKVCacheWrapper.
    """

    @fi_api
    @takes(derived.blocks_plan, _OF_BLOCKS, BatchPrefillWithPagedKVCacheWrapper.plan, o_data_type="float16")
    def plan(
        self,
        given: dict[str, Any],
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
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
            packed_mask: uint8, the same as bits: the masks `[R, selected columns * C]` of the rows of blocks, each
                starting at a new byte, as `segment_packbits` makes them. It takes precedence over mask.
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
        self._inner._forget_plan()
        forms = {"block_mask": block_mask, "kv_block_lens": kv_block_lens, "q2k_indices": q2k_indices}
        refuse("pass the pattern as indptr and indices", **forms, q2k_num=q2k_num)
        begins, columns = _pattern(indptr, indices, M, N, R, C)
        mask, packed_mask = given["custom_mask"], given["packed_custom_mask"]
        begins, columns, mask = _without_padding(begins, columns, N // C, mask, packed_mask)
        qo_indptr = (torch.arange(len(begins)) * R).clamp(max=M)
        if packed_mask is None and mask is not None:
            mask = _by_row(mask, begins, len(columns), R, C)[: int((qo_indptr.diff() * begins.diff()).sum()) * C]
        self._shape = N, C
        self._scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        tables = (*map(int32_index, (qo_indptr, begins, columns)), torch.full((len(begins) - 1,), C, dtype=torch.int32))
        self._inner.plan(*tables, page_size=C, **{**given, "custom_mask": mask})
        self._described = {"indptr": indptr, "indices": indices, "R": R, "C": C}

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
        self._inner._require_plan()
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

    forward = older_form(
        derived.blocks_forward,
        run,
        plan,
        "q k v scale_q scale_k scale_v pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale",
        "rope_scale rope_theta",
    )
    run_return_lse = method_setting_lse(run)


def _by_row(mask: torch.Tensor, begins: torch.Tensor, nnz: int, R: int, C: int) -> torch.Tensor:
    """The masks `[R, C]` of blocks, flat, in the order of the keys of each row of blocks."""
    if mask.ndim != 3 or mask.shape[1:] != (R, C) or mask.shape[0] < nnz:
        raise ValueError(f"mask: [nnz, R, C] = [{nnz}, {R}, {C}] is required; got {tuple(mask.shape)}")
    # An element (block, row of it) goes before one of a later row of blocks, or of a later row of the same.
    block_row = torch.repeat_interleave(torch.arange(len(begins) - 1), begins.diff())
    order = (block_row[:, None] * R + torch.arange(R)).flatten().argsort(stable=True).to(mask.device)
    return mask[:nnz].reshape(nnz * R, C)[order].flatten()


def _check_sizes(mask: torch.Tensor, row_sz: torch.Tensor, col_sz: torch.Tensor, num_kv_heads: int) -> None:
    """Raises ValueError unless there is a size for each row and column of blocks of each kv head."""
    heads, *grid = mask.shape if mask.ndim == 3 else (0, 0, 0)
    for name, sizes, blocks in (("block_row_sz", row_sz, grid[0]), ("block_col_sz", col_sz, grid[1])):
        integers(name, sizes)
        wanted = (num_kv_heads, blocks)
        if tuple(sizes.shape) != wanted or heads != num_kv_heads:
            raise ValueError(
                f"{name}: shape {wanted} is required, by num_kv_heads and block_mask_map of shape "
                f"{tuple(mask.shape)}; got {tuple(sizes.shape)}"
            )


def _total(name: str, sizes: torch.Tensor) -> int:
    """The sum of the sizes of a kv head. Raises ValueError unless all have the same."""
    sums = sizes.double().sum(1)  # of int64 it may wrap
    if not len(sums) or not ((sums == sums[0]).all() and (sizes >= 0).all() and sums[0] < 1 << 31):
        raise ValueError(
            f"{name}: sizes with the same sum below 2^31 for each kv head are required; got the sums {sums.tolist()}"
        )
    return int(sums[0])


@fi_api
class VariableBlockSparseAttentionWrapper(PatternWrapper):
    """Attention over the blocks of keys that a mask of blocks selects for each kv head; blocks may differ in size.

    Each kv head has its own keys, as if it were a sequence, and each of its rows of blocks is a request.

    Args:
        float_workspace_buffer, backend: as in BatchPrefillWithPagedKVCacheWrapper.
    """

    @fi_api
    @takes(derived.head_blocks_plan, _OF_HEAD_BLOCKS, BatchPrefillWithPagedKVCacheWrapper.plan)
    def plan(
        self,
        given: dict[str, Any],
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
    ) -> None:
        """Plans the next `run` calls. It synchronises, to read the sizes of blocks.

        The greatest common divisor of the sizes of columns is the page size: larger ones are faster.

        Args:
            block_mask_map: bool `[num_kv_heads, MB, NB]`, the blocks that each kv head selects.
            block_row_sz: integers `[num_kv_heads, MB]`, query tokens of each row of blocks; the same sum for each head.
            block_col_sz: integers `[num_kv_heads, NB]`, keys of each column of blocks; the same sum for each head.
            causal, pos_encoding_mode: by the places of keys among the selected ones.
            others: as in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError: shapes, or sums that differ. Other errors are those of that function.
        """
        self._inner._forget_plan()
        num_qo_heads, num_kv_heads = given.pop("num_qo_heads"), given.pop("num_kv_heads")
        check_shape(num_qo_heads, num_kv_heads, 1, head_dim=given["head_dim_qk"])
        _check_sizes(block_mask_map, block_row_sz, block_col_sz, num_kv_heads)
        rows, columns, mask = block_row_sz.cpu().long(), block_col_sz.cpu().long(), block_mask_map != 0
        mask = mask if mask.device == self._inner.device else mask.cpu()
        qo_len, kv_len = _total("block_row_sz", rows), _total("block_col_sz", columns)
        page_size = math.gcd(*columns.flatten().tolist()) or 1
        pages = kv_len // page_size  # of a kv head
        block_of_page = torch.repeat_interleave(
            torch.arange(columns.shape[1]).repeat(num_kv_heads), columns.flatten() // page_size
        ).view(num_kv_heads, pages)
        selected = mask.gather(2, block_of_page.to(mask.device)[:, None].expand(-1, mask.shape[1], -1))
        head, _, page = selected.nonzero(as_tuple=True)

        def offsets(counts: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0)).int()

        last = torch.full((rows.numel(),), page_size, dtype=torch.int32)
        self._shape = num_kv_heads, qo_len, kv_len, page_size, num_qo_heads // num_kv_heads
        tables = (offsets(rows), offsets(selected.sum(2)), (head * pages + page).int(), last)
        self._inner.plan(*tables, self._shape[4], 1, page_size=page_size, **given)
        sizes = {"block_row_sz": block_row_sz, "block_col_sz": block_col_sz}
        self._described = {"block_mask_map": block_mask_map, **sizes}

    begin_forward = plan

    @fi_api(trace=pattern_trace.head_blocks, planned=pattern_trace.PLANNED_HEAD_BLOCKS)
    @checked
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of the planned pattern. Heads come first in all tensors.

        Args:
            q: `[num_qo_heads, qo_len, head_dim]`.
            k, v: `[num_kv_heads, kv_len, head_dim]`.
            out: written if given: `[num_kv_heads * qo_len, num_qo_heads / num_kv_heads, head_dim]`, or in the shape of
                the result, which is then out.
            lse: fp32 `[num_kv_heads * qo_len, num_qo_heads / num_kv_heads]`, written if given.
            return_lse, enable_pdl: as in `BatchPrefillWithPagedKVCacheWrapper.run`, which also has the errors.

        Returns:
            out `[num_qo_heads, qo_len, head_dim]`, or (out, lse) with lse `[num_qo_heads, qo_len]`, base 2. Rows
            without blocks have out = 0 and lse = -inf.
        """
        self._inner._require_plan()
        heads, qo_len, kv_len, page_size, group = self._shape
        for name, x, planned in zip("qkv", (q, k, v), ((heads * group, qo_len), *[(heads, kv_len)] * 2)):
            if x.ndim != 3 or tuple(x.shape[:2]) != planned:
                raise ValueError(f"{name}: [{planned[0]}, {planned[1]}, head_dim] was planned; got {tuple(x.shape)}")
        rows = q.unflatten(0, (heads, group)).transpose(1, 2).flatten(0, 1).contiguous()
        k, v = (x.contiguous().view(heads * kv_len // page_size, page_size, 1, x.shape[2]) for x in (k, v))
        as_result = None
        if out is not None and out.shape != rows.shape and out.shape == (*q.shape[:2], v.shape[-1]):
            check_shape_dtype_device(out, tuple(out.shape), self._inner._plan.out_dtype, q.device, "out")
            check_writable("out", out)
            as_result, out = out, None
        found = self._inner.run(rows, (k, v), out=out, lse=lse, return_lse=return_lse, enable_pdl=enable_pdl)

        def by_head(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (heads, qo_len)).transpose(1, 2).flatten(0, 1)  # type: ignore[no-any-return]

        rows, row_lse = found if isinstance(found, tuple) else (found, None)
        result = by_head(rows)
        result = result if as_result is None else as_result.copy_(result)
        return result if row_lse is None else (result, by_head(row_lse))

    forward = older_form(
        derived.head_blocks_forward,
        run,
        plan,
        "q k v pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta",
    )
    run_return_lse = method_setting_lse(run)
