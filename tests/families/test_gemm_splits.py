"""Products whose k a cluster of CTAs splits: any number of them, alone or behind tiles that are not split."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch

from families.harness import assert_close, assert_guards, guarded, rand, using
from fi_core.gemm.ops import GEMM, GemmConfig, GemmKind, GemmStores, gemm
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.spec.target import Target

E4M3 = torch.float8_e4m3fn
TRANSPOSING = GemmStores.EITHER, GemmStores.TRANSPOSED, GemmStores.WHOLE


def configs(dtype: str) -> list[GemmConfig]:
    unit = choose(Request.of(GEMM, Target("cuda", "90a"), {"a": dtype, "b": dtype})).spec.unit()
    assert unit
    return [entry.config for entry in unit.entries]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(
    ("m", "n", "k", "splits"),
    [
        (257, 1000, 2064, (2, 3, 4)),  # tails of m, n and k; some CTAs have fewer blocks of k
        (70, 336, 1168, (2, 3, 4)),
        (300, 11504, 2048, (2,)),  # one or two waves of whole tiles, then tiles that are split
    ],
)
def test_a_split_product_is_the_product(dtype: str, m: int, n: int, k: int, splits: tuple[int, ...]) -> None:
    """Parts are added in the order of ranks: the same bits in each call."""
    torch_dtype = torch.bfloat16 if dtype == "bf16" else E4M3
    a, b = (rand(rows, k, dtype=torch_dtype, device="cuda", seed=rows) for rows in (m, n))
    scales: tuple[torch.Tensor, ...] = ()
    want = a.double() @ b.double().T
    if dtype == "e4m3":
        sa, sb = (rand(rows, dtype=torch.float32, device="cuda", seed=5).abs() for rows in (m, n))
        scales, want = (sa, sb), want * sa.double().unsqueeze(-1) * sb.double()
    all_configs = configs(dtype)
    transposing = [i for i, config in enumerate(all_configs) if config.stores in TRANSPOSING]
    split_by = collections.Counter[int]()
    for number, split in itertools.product(transposing, splits):
        results = [guarded((m, n), torch.bfloat16, "cuda", row_padding=8) for _ in range(2)]
        try:
            for out in results:
                with using("gemm", "wgmma_sm90"):
                    gemm(out, a, b, *scales, tactic=split * len(all_configs) + number)
        except ValueError:  # such tiles are more than the clusters that run at a time
            continue
        for out in results:
            assert_close(out, want, tolerance=(1e-2, 5e-2 * want.abs().mean().item()))
            assert_guards(out)
        assert torch.equal(*results)
        split_by[split] += 1
    assert all(split_by[split] >= 4 for split in splits), split_by


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(("m", "n", "k"), [(132, 576, 5120), (70, 333, 1168), (900, 130, 2064)])
def test_tiles_for_few_tokens_that_a_cluster_shares(dtype: str, m: int, n: int, k: int) -> None:
    """Each tile is split, also where m has several: the same bits in each call."""
    torch_dtype = torch.bfloat16 if dtype == "bf16" else E4M3
    a, b = (rand(rows, k, dtype=torch_dtype, device="cuda", seed=rows) for rows in (m, n))
    want = a.double() @ b.double().T
    all_configs = configs(dtype)
    number = next(i for i, config in enumerate(all_configs) if config[:3] == (GemmKind.SMALL_M, 64, 64))
    for splits in (2, 3, 4):
        results = [guarded((m, n), torch.bfloat16, "cuda", row_padding=8) for _ in range(2)]
        for out in results:
            with using("gemm", "wgmma_sm90"):
                gemm(out, a, b, tactic=splits * len(all_configs) + number)
            assert_close(out, want, tolerance=(1e-2, 5e-2 * want.abs().mean().item()))
            assert_guards(out)
        assert torch.equal(*results)
