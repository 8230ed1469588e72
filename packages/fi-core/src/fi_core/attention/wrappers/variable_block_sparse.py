"""Block-sparse attention with a pattern and block sizes for each kv head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fi_core.attention.contract import check_shape, score_options
from fi_core.attention.wrappers import pattern_trace
from fi_core.attention.wrappers.block_sparse import PatternWrapper
from fi_core.observe.checked import checked
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import blame
from fi_core.utils import _check_writable, check_shape_dtype_device

if TYPE_CHECKING:
    import torch


def _check_sizes(mask: torch.Tensor, row_sz: torch.Tensor, col_sz: torch.Tensor, num_kv_heads: int) -> None:
    """Raises ValueError unless there is a size for each row and column of blocks of each kv head."""
    heads, *grid = mask.shape if mask.ndim == 3 else (0, 0, 0)
    for name, sizes, blocks in (("block_row_sz", row_sz, grid[0]), ("block_col_sz", col_sz, grid[1])):
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
    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
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
        import torch

        self._inner._forget_plan()
        check_shape(num_qo_heads, num_kv_heads, 1, head_dim=head_dim)
        _check_sizes(block_mask_map, block_row_sz, block_col_sz, num_kv_heads)
        try:
            rows, columns, mask = block_row_sz.cpu().long(), block_col_sz.cpu().long(), block_mask_map != 0
            mask = mask if mask.device == self._inner.device else mask.cpu()
        except (RuntimeError, NotImplementedError) as error:
            blame(error, block_mask_map=block_mask_map, block_row_sz=block_row_sz, block_col_sz=block_col_sz)
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
        options = score_options(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        options |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "causal": causal}
        self._inner.plan(*tables, self._shape[4], 1, head_dim, page_size, non_blocking=non_blocking, **options)
        self._described = {
            "block_mask_map": block_mask_map,
            "block_row_sz": block_row_sz,
            "block_col_sz": block_col_sz,
            "causal": causal,
            "sm_scale": head_dim**-0.5 if sm_scale is None else sm_scale,
            "covered": pos_encoding_mode == "NONE" and not logits_soft_cap,
        }

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
        if self._inner._plan_info is None:
            raise self._inner._no_plan()
        heads, qo_len, kv_len, page_size, group = self._shape
        for name, x, first, tokens in (
            ("q", q, heads * group, qo_len),
            ("k", k, heads, kv_len),
            ("v", v, heads, kv_len),
        ):
            if x.ndim != 3 or tuple(x.shape[:2]) != (first, tokens):
                raise ValueError(f"{name}: [{first}, {tokens}, head_dim] was planned; got {tuple(x.shape)}")
        rows = q.unflatten(0, (heads, group)).transpose(1, 2).flatten(0, 1).contiguous()
        k, v = (x.contiguous().view(heads * kv_len // page_size, page_size, 1, x.shape[2]) for x in (k, v))
        as_result = None
        if out is not None and out.shape != rows.shape and out.shape == (*q.shape[:2], v.shape[-1]):
            check_shape_dtype_device(out, tuple(out.shape), self._inner._plan.out_dtype, q.device, "out")
            _check_writable(out, "out")
            as_result, out = out, None
        found = self._inner.run(rows, (k, v), out=out, lse=lse, return_lse=return_lse, enable_pdl=enable_pdl)

        def by_head(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (heads, qo_len)).transpose(1, 2).flatten(0, 1)  # type: ignore[no-any-return]

        rows, row_lse = found if isinstance(found, tuple) else (found, None)
        result = by_head(rows)
        result = result if as_result is None else as_result.copy_(result)
        return result if row_lse is None else (result, by_head(row_lse))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """The older form of `run`. Its options replace those of the plan; an omitted option has its default."""
        self._set_scores(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v)
