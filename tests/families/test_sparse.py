"""Block-sparse attention against dense attention with the expanded mask, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.attention_reference import attention
from families.harness import assert_close, rand
from families.prefill_batch import LSE, workspace
from fi_core.quantization import segment_packbits
from fi_core.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper


def pattern(rows: int, columns: int, seed: int = 0, density: float = 0.4) -> torch.Tensor:
    """A random matrix of blocks, with a row of none."""
    found = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < density
    found[rows // 2] = False
    return found


def bsr(blocks: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    indptr = torch.nn.functional.pad(blocks.sum(1).cumsum(0), (1, 0))
    return indptr.int().to(device), blocks.nonzero()[:, 1].int().to(device)


def tensors(
    device: str, dtype: torch.dtype, m: int, n: int, heads: tuple[int, int], dim: int, unused: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """q, k and v; keys of blocks that no row selects are NaN."""
    q, k, v = (rand(size, h, dim, dtype=dtype, device=device, seed=seed)
               for seed, (size, h) in enumerate([(m, heads[0]), (n, heads[1]), (n, heads[1])]))  # fmt: skip
    for x in (k, v):
        x[unused.to(device)] = float("nan")
    return q, k, v


def finite(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [x.nan_to_num(0.0) for x in xs]


@pytest.mark.parametrize(("m", "n", "r", "c", "heads", "dim", "dtype"), [
    (300, 384, 64, 64, (8, 2), 128, torch.bfloat16),
    (100, 96, 16, 8, (4, 4), 64, torch.float16),
    (7, 30, 1, 3, (2, 1), 64, torch.float32),
    (128, 256, 128, 128, (4, 1), 256, torch.float16),
])  # fmt: skip
def test_a_pattern_of_blocks(
    m: int, n: int, r: int, c: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str
) -> None:
    if dtype is torch.float32 and device == "cuda":
        pytest.skip("prefill of fp32 runs on CPUs")
    blocks = pattern(-(-m // r), n // c)
    blocks[:, -1] = False
    dense = blocks.repeat_interleave(r, 0)[:m].repeat_interleave(c, 1)
    q, k, v = tensors(device, dtype, m, n, heads, dim, ~dense.any(0))
    w = BlockSparseAttentionWrapper(workspace(device, 64 << 20))
    for options in ({}, {"sm_scale": 0.3, "logits_soft_cap": 5.0}):
        w.plan(*bsr(blocks, device), m, n, r, c, *heads, dim, q_data_type=dtype, o_data_type=dtype, **options)
        out, lse = w.run_return_lse(q, k, v)
        want, want_lse = attention(q, *finite(k, v), custom_mask=dense, **options)
        assert out.dtype is dtype
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
        into = torch.empty_like(out)
        assert w.run(q, k, v, out=into) is into and torch.equal(into, out)
    assert_close(w.forward(q, k, v), attention(q, *finite(k, v), custom_mask=dense)[0])
    late = w.forward(q, k, v, logits_soft_cap=5.0, sm_scale=0.3)
    assert torch.equal(late, out), "forward replaces the options of the plan"
    w.plan(*bsr(blocks, device), m, n, r, c, *heads, dim, q_data_type=dtype)
    assert w.run(q, k, v).dtype is torch.float16, "the default of o_data_type"


@pytest.mark.parametrize("packed", [False, True])
def test_masks_inside_blocks(packed: bool, device: str) -> None:
    m, n, r, c = 70, 64, 16, 8
    blocks = pattern(-(-m // r), n // c, density=0.5)
    inside = torch.rand(int(blocks.sum()), r, c, generator=torch.Generator().manual_seed(3)) < 0.6
    dense = torch.zeros(-(-m // r) * r, n, dtype=torch.bool)
    by_row = [[] for _ in blocks]
    for block, (i, j) in zip(inside, blocks.nonzero().tolist()):
        dense[i * r : (i + 1) * r, j * c : (j + 1) * c] = block
        by_row[i].append(block)
    dense = dense[:m]
    q, k, v = tensors(device, torch.float16, m, n, (4, 2), 64, ~dense.any(0))
    options: dict[str, Any] = {"mask": inside.to(device)}
    if packed:
        flat = [torch.cat(row, 1)[: m - i * r].flatten() if row else torch.zeros(0, dtype=torch.bool)
                for i, row in enumerate(by_row)]  # fmt: skip
        ends = torch.tensor([0, *map(len, flat)]).cumsum(0).int()
        options = {"packed_mask": segment_packbits(torch.cat(flat), ends, bitorder="little")[0].to(device)}
    w = BlockSparseAttentionWrapper(workspace(device))
    w.plan(*bsr(blocks, device), m, n, r, c, 4, 2, 64, **options)
    assert_close(w.run(q, k, v), attention(q, *finite(k, v), custom_mask=dense)[0])


def test_causal_counts_the_selected_keys(device: str) -> None:
    blocks = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    q, k, v = tensors(device, torch.float16, 32, 48, (4, 2), 64, torch.zeros(48, dtype=torch.bool))
    w = BlockSparseAttentionWrapper(workspace(device))
    w.plan(*bsr(blocks, device), 32, 48, 16, 16, 4, 2, 64, causal=True)
    parts = [
        attention(q[16 * i : 16 * i + 16], *(x[row.repeat_interleave(16).to(device)] for x in (k, v)), causal=True)[0]
        for i, row in enumerate(blocks)
    ]
    assert_close(w.run(q, k, v), torch.cat(parts))


def test_a_column_at_the_end_reads_nothing(device: str) -> None:
    q, k, v = tensors(device, torch.float16, 32, 48, (4, 2), 64, torch.zeros(48, dtype=torch.bool))
    w = BlockSparseAttentionWrapper(workspace(device))
    seen = torch.zeros(32, 48, dtype=torch.bool)
    seen[:16, 16:32] = True
    plan = (torch.tensor([0, 2, 3]).int(), torch.tensor([1, 3, 3, 0]).int(), 32, 48, 16, 16, 4, 2, 64)
    for mask in (None, torch.ones(4, 16, 16, dtype=torch.bool, device=device)):  # with a block behind indptr[-1]
        w.plan(*plan, mask=mask)
        assert_close(w.run(q, k, v), attention(q, k, v, custom_mask=seen)[0])
    with pytest.raises(ValueError, match="mask: "):
        w.plan(*plan, mask=torch.ones(0, 16, 16, dtype=torch.bool, device=device))


@pytest.mark.parametrize("unit", [1, 3, 16])
def test_blocks_of_different_sizes(unit: int, device: str) -> None:
    heads, group, dim = 3, 2, 64
    generator = torch.Generator().manual_seed(unit)

    def sizes(total: int, count: int) -> torch.Tensor:
        cuts = torch.rand(heads, count - 1, generator=generator).mul(total + 1).long().sort(1).values
        return torch.nn.functional.pad(cuts, (1, 0)).diff(1, append=torch.full((heads, 1), total))

    rows, columns = sizes(90, 5), sizes(20, 6) * unit
    qo_len, kv_len = 90, 20 * unit
    blocks = torch.rand(heads, 5, 6, generator=generator) < 0.5
    blocks[1, 2] = False
    q, k, v = (rand(h, size, dim, dtype=torch.float16, device=device, seed=s)
               for s, (h, size) in enumerate([(heads * group, qo_len), (heads, kv_len), (heads, kv_len)]))  # fmt: skip
    dense = torch.stack([b.repeat_interleave(i, 0).repeat_interleave(j, 1) for b, i, j in zip(blocks, rows, columns)])
    for x in (k, v):
        x[~dense.any(1).to(device)] = float("nan")
    w = VariableBlockSparseAttentionWrapper(workspace(device, 64 << 20))
    w.plan(blocks.to(device), rows.to(device), columns.to(device), heads * group, heads, dim, sm_scale=0.2)
    out, lse = w.run(q, k, v, return_lse=True)
    for head in range(heads * group):
        kv = head // group
        k_, v_ = finite(k[kv][:, None], v[kv][:, None])
        want, want_lse = attention(q[head][:, None], k_, v_, custom_mask=dense[kv], sm_scale=0.2)
        assert_close(out[head][:, None], want)
        assert_close(lse[head][:, None], want_lse, tolerance=LSE)
    w.plan(blocks.to(device), rows.to(device), columns.to(device), heads * group, heads, dim)
    assert torch.equal(w.forward(q, k, v, "NONE", False, None, 0.2), out)


@pytest.mark.parametrize("made", [BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper])
def test_other_workspaces(made: Any, device: str) -> None:
    w = made(workspace(device))
    small = torch.empty(64, dtype=torch.uint8, device=device)
    w.reset_workspace_buffer(workspace(device), small)
    plan = {
        BlockSparseAttentionWrapper: (torch.tensor([0, 1]).int(), torch.tensor([0]).int(), 16, 16, 16, 16, 4, 2, 64),
        VariableBlockSparseAttentionWrapper: (
            torch.ones(2, 1, 1, dtype=torch.bool), torch.full((2, 1), 16), torch.full((2, 1), 16), 4, 2, 64,
        ),
    }[made]  # fmt: skip
    with pytest.raises(ValueError, match=r"int_workspace_buffer: .* got 64"):
        w.plan(*plan)
    with pytest.raises(RuntimeError, match="prewarm_paged_kv_stride_variant: the last plan failed"):
        w.prewarm_paged_kv_stride_variant()


def test_wrong_arguments_are_named(device: str) -> None:
    w = BlockSparseAttentionWrapper(workspace(device))
    good: dict[str, Any] = {"indptr": torch.tensor([0, 2, 3]).int(), "indices": torch.tensor([0, 2, 1]).int(),
                            "M": 32, "N": 48, "R": 16, "C": 16, "num_qo_heads": 4, "num_kv_heads": 2,
                            "head_dim": 64}  # fmt: skip
    q, k, v = tensors(device, torch.float16, 32, 48, (4, 2), 64, torch.zeros(48, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="call plan first"):
        w.run(q, k, v)
    for wrong, match in (
        ({"indices": torch.tensor([0, 4, 1]).int()}, "indices out of bound"),
        ({"indices": torch.tensor([0, -1, 1]).int()}, "indices out of bound"),
        ({"indptr": torch.tensor([0, 2]).int()}, "indptr"),
        ({"indptr": torch.tensor([0, 3, 2]).int()}, "indptr"),
        ({"indptr": torch.tensor([0, 2, 9]).int()}, "indptr"),
        ({"C": 0}, "C: "),
        ({"N": 50}, "N a multiple of C"),
        ({"mask": torch.ones(2, 16, 16, dtype=torch.bool)}, "mask"),
        ({"head_dim": 63}, "head_dim"),
    ):
        w.plan(**good)
        w.run(q, k, v)
        with pytest.raises(ValueError, match=match):
            w.plan(**(good | wrong))
        with pytest.raises(RuntimeError, match="the last plan failed"):
            w.run(q, k, v)
    with pytest.raises(NotImplementedError, match="block_mask"):
        w.plan(**good, block_mask=torch.ones(2, 3))
    w.plan(**good)
    with pytest.raises(ValueError, match="k: "):
        w.run(q, k[:-1], v)
    variable = VariableBlockSparseAttentionWrapper(workspace(device))
    blocks, rows, columns = torch.ones(2, 2, 3, dtype=torch.bool), torch.full((2, 2), 8), torch.full((2, 3), 4)
    uneven = torch.tensor([[8, 8], [8, 7]])
    for arguments, match in (((blocks, rows[:, :1], columns), "block_row_sz"), ((blocks, uneven, columns), "sum"),
                             ((blocks[0], rows, columns), "block_mask_map"),
                             ((blocks, rows, columns << 29), r"block_col_sz: .* below 2\^31"),
                             ((blocks, rows, columns << 60), "block_col_sz")):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            variable.plan(*arguments, 4, 2, 64)
    with pytest.raises(ValueError, match="num_qo_heads: "):
        variable.plan(blocks, rows, columns, 5, 2, 64)
    variable.plan(blocks, rows, columns, 4, 2, 64)
    with pytest.raises(ValueError, match="q: "):
        variable.run(q, k, v)


def test_public_names() -> None:
    assert fi_core.BlockSparseAttentionWrapper is BlockSparseAttentionWrapper
    assert fi_core.VariableBlockSparseAttentionWrapper is VariableBlockSparseAttentionWrapper
