"""Functions that consist of other operators, against fp64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, rand
from families.test_gemm_block_scaled import packed, scales, wide
from fi_core import comm, fused_moe, gemm, topk_varlen
from fi_core.runtime.errors import BackendSupportedError, UnsupportedError

BF16 = torch.bfloat16
HALVES = (torch.float16, BF16)
FINE = (1e-5, 1e-3)


def factors(m: int, n: int, k: int, dtype: torch.dtype, device: str, batch: tuple[int, ...] = ()) -> Any:
    return (rand(*batch, *shape, dtype=dtype, device=device, seed=n) for n, shape in enumerate(((m, k), (k, n))))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True])
def test_masked_bmm(transposed: bool, dtype: torch.dtype, device: str) -> None:
    a, b = factors(9, 40, 64, dtype, device, (3,))
    given = (x.mT.contiguous() for x in (a, b)) if transposed else (a, b)
    rows = torch.tensor([4, 0, 9], device=device)
    out = gemm.masked_bmm(*given, rows, transpose_a=transposed, transpose_b=transposed)
    want = a.double() @ b.double()
    for own, reference, count in zip(out, want, rows.tolist()):
        assert_close(own[:count], reference[:count])
    into = torch.empty_like(out)
    assert gemm.masked_bmm(a, b, rows, False, False, into, "cutile") is into
    for own, reference, count in zip(into, want, rows.tolist()):
        assert_close(own[:count], reference[:count])
    with pytest.raises(TypeError, match="out must have the dtype of a"):
        gemm.masked_bmm(a, b, rows, out=into.float())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True])
def test_ragged_bmm(transposed: bool, dtype: torch.dtype, device: str) -> None:
    a, (_, b) = rand(13, 64, dtype=dtype, device=device), factors(1, 40, 64, dtype, device, (3,))
    ends = torch.tensor([0, 4, 4, 13], device=device)
    given = (a.T.contiguous(), b) if transposed else (a, b.mT.contiguous())
    out = gemm.ragged_bmm(*given, ends, 9, transpose_a=transposed, transpose_b=not transposed, out_dtype=torch.float32)
    want = torch.cat((a[:4].double() @ b[0].double(), a[4:].double() @ b[2].double()))
    assert_close(out, want, tolerance=FINE)
    assert gemm.ragged_bmm(*given, ends, 9, None, transposed, not transposed).dtype == dtype


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 0.0), (0.5, -2.0)])
def test_gemm_alpha_beta(alpha: float, beta: float, dtype: torch.dtype, device: str) -> None:
    """With beta = 0, c is not read."""
    a, b = factors(9, 40, 64, BF16, device)
    c = rand(9, 40, dtype=dtype, device=device, seed=5) if beta else torch.full((9, 40), torch.nan, dtype=dtype)
    c = c.to(device)
    want = alpha * a.double() @ b.double() + (beta * c.double() if beta else 0)
    assert gemm.gemm_alpha_beta(a, b.T.contiguous(), c, alpha=alpha, beta=beta) is c
    assert_close(c, want, tolerance=FINE if dtype is torch.float32 else None)
    turned = gemm.gemm_alpha_beta(a.T.contiguous(), b, torch.empty_like(c), True, False, alpha)
    assert_close(turned, alpha * a.double() @ b.double(), tolerance=FINE if dtype is torch.float32 else None)
    with pytest.raises(ValueError, match="c must not share storage with a or b"):
        gemm.gemm_alpha_beta(a, b.T.contiguous(), a)
    assert gemm.gemm_alpha_beta(a[:0], b.T.contiguous(), c[:0]).shape == (0, 40), "an empty c shares nothing"


def test_backends_of_ragged_products() -> None:
    x, ends = torch.zeros(1, 8, 8, dtype=BF16), torch.tensor([0, 8])
    for name in ("cutile", "triton"):
        for call in (
            lambda name: gemm.masked_bmm(x, x, ends[1:], backend=name),
            lambda name: gemm.ragged_bmm(x[0], x, ends, 8, backend=name),
            lambda name: gemm.gemm_alpha_beta(x[0], x[0], x[0].clone(), backend=name),
        ):
            if name == "cutile":
                call(name)
            else:
                with pytest.raises(BackendSupportedError, match="does not support backend 'triton': it has cutile"):
                    call(name)


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(
    ("k", "n", "suffix", "dtype"),
    [
        (6144, 256, "", torch.float32), (7168, 128, "", BF16), (7168, 256, "", torch.float32),
        (7168, 256, "_bf16", BF16), (7168, 384, "", torch.float32), (7168, 384, "_bf16", BF16),
        (7168, 896, "", torch.float32), (7168, 896, "_bf16", BF16),
    ],
)  # fmt: skip
def test_router_logits(k: int, n: int, suffix: str, dtype: torch.dtype, m: int, device: str) -> None:
    function: Any = getattr(gemm, f"mm_M1_16_K{k}_N{n}{suffix}")
    a, w = rand(m, k, dtype=BF16, device=device), rand(n, k, dtype=BF16, device=device, seed=1, scale=k**-0.5)
    out = torch.empty(m, n, dtype=dtype, device=device)
    function(a, w.t(), out)
    assert_close(out, a.double() @ w.double().T, tolerance=FINE if dtype is torch.float32 else None)
    for given, words in (
        ((a.repeat(17, 1), w.t(), out.repeat(17, 1)), "mat_a must have 1 to 16 rows"),
        ((a, w.t().contiguous(), out), "mat_b must be the transposed view"),
        ((a, w.t(), out.half()), "out must be (float32|bfloat16) of shape"),
        ((a[:, 1:], w.t(), out), "mat_a must be bfloat16 of shape"),
    ):
        with pytest.raises(ValueError, match=words):
            function(*given)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(7, 96), (2, 3, 64), (0, 32)])
def test_nvfp4_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    rows, k = int(torch.tensor(shape[:-1]).prod()), shape[-1]
    values, codes = packed(rows, k, device), scales(rows, k // 16, device, 1, 100)
    want = (wide(values, codes, 16) * 0.25).view(shape)
    given = values.view(*shape[:-1], k // 2), codes.view(*shape[:-1], k // 16)
    out = fi_core.nvfp4_kv_dequantize(*given, torch.tensor([0.25], device=device), output_dtype=dtype)
    assert out.dtype == dtype
    assert_close(out, want)
    e4m3 = fi_core.nvfp4_kv_dequantize(
        given[0], given[1].view(torch.float8_e4m3fn), torch.tensor([0.25], device=device)
    )
    assert e4m3.dtype == BF16
    with pytest.raises(ValueError, match="block_scales: shape"):
        fi_core.nvfp4_kv_dequantize(given[0], given[1][..., :-1], torch.ones(1, device=device))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_nvfp4_pages(dtype: torch.dtype, stacked: bool, kv_layout: str, device: str) -> None:
    """Positions behind a request stay as they are; both tensors may have head dims of their own."""
    pages, size, heads, dims = 6, 4, 2, (64, 64 if stacked else 128)
    values = [packed(pages * size * heads, d, device, d + i).view(pages, size, heads, -1) for i, d in enumerate(dims)]
    codes = [scales(pages * size * heads, d // 16, device, 1, 100, i).view(pages, size, heads, -1)
             for i, d in enumerate(dims)]  # fmt: skip
    order = (lambda x: x.transpose(1, 2).contiguous()) if kv_layout == "HND" else (lambda x: x)
    cache, factors_ = ([order(x) for x in own] for own in (values, codes))
    given: Any = (torch.stack(cache, 1), torch.stack(factors_, 1)) if stacked else (tuple(cache), tuple(factors_))
    table, lengths = torch.tensor([[2, 5, -1], [1, -1, -1], [0, 3, 4]], device=device), [6, 0, 9]
    outs = [torch.full((3, 10, heads, d), 123.0, dtype=dtype, device=device) for d in dims]
    one = torch.tensor([0.5], device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    fi_core.nvfp4_kv_dequantize_paged(*given, table, seq_lens, one, 0.25, *outs, kv_layout=kv_layout)
    for out, own, scale, factor, d in zip(outs, values, codes, (0.5, 0.25), dims):
        dense = (wide(own.reshape(-1, d // 2), scale.reshape(-1, d // 16), 16) * factor).view(pages, size, heads, d)
        want = torch.full(out.shape, 123.0, dtype=torch.float64)
        for b, n in enumerate(lengths):
            for t in range(n):
                want[b, t] = dense[int(table[b, t // size]), t % size]
        assert_close(out, want)
    with pytest.raises(ValueError, match="block_tables column count insufficient"):
        fi_core.nvfp4_kv_dequantize_paged(*given, table[:, :2], seq_lens, one, one, *outs, kv_layout=kv_layout)
    with pytest.raises(ValueError, match="k_scale and v_scale must be scalar tensors"):
        fi_core.nvfp4_kv_dequantize_paged(*given, table, seq_lens, torch.ones(2), one, *outs, kv_layout=kv_layout)
    if device == "cpu":
        with pytest.raises(ValueError, match="block_tables must name pages of the cache, 0 to 5"):
            fi_core.nvfp4_kv_dequantize_paged(*given, table + 4, seq_lens, one, one, *outs, kv_layout=kv_layout)


@pytest.mark.parametrize("dtype", HALVES)
def test_rmsnorm_silu(dtype: torch.dtype, device: str) -> None:
    x, w = rand(7, 130, dtype=dtype, device=device), rand(130, dtype=dtype, device=device, seed=1)
    norm = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * w.double()
    want = norm * torch.sigmoid(norm)
    assert_close(fi_core.fused_rmsnorm_silu(x, w, 1e-5), want)
    out = torch.empty(7, 130, dtype=torch.float8_e4m3fn, device=device)
    assert fi_core.fused_rmsnorm_silu(x, w, 1e-5, out) is out
    assert_close(out.float(), want, tolerance=(0.07, 0.01))
    assert fi_core.fused_rmsnorm_silu(x, w * 1e4, 1e-5, out).float().abs().max() == 448
    with pytest.raises(UnsupportedError, match="call nvfp4_quantize on the result in 16 bits"):
        fi_core.fused_rmsnorm_silu(x, w, 1e-5, torch.empty(7, 65, dtype=torch.uint8, device=device))


@pytest.mark.parametrize("shared", [0, 1])
def test_hash_topk(shared: int, device: str) -> None:
    logits = rand(5, 8, dtype=torch.float32, device=device, scale=4.0)
    logits[0, 3] = 40.0
    table = torch.stack([torch.randperm(8)[:3] for _ in range(11)]).int().to(device)
    ids = torch.tensor([3, 0, 10, 3, 7], device=device)
    table[3, 0] = 3
    weights, experts = fused_moe.hash_topk(logits, ids, table, shared, 2.5)
    own = torch.log1p(torch.exp(logits.double())).sqrt().gather(1, table[ids].long())
    want = own / own.sum(1, keepdim=True)
    assert experts.dtype == torch.int32
    assert torch.equal(experts[:, :3], table[ids])
    torch.testing.assert_close(weights[:, :3].double(), want, rtol=2e-6, atol=1e-7)
    if shared:
        assert experts[:, 3].tolist() == [8] * 5
        assert weights[:, 3].tolist() == pytest.approx([0.4] * 5)
    with pytest.raises(ValueError, match=r"tid2eid must be torch\.int32 of 2 dimensions"):
        fused_moe.hash_topk(logits, ids, table.long())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("next_n", "ratio"), [(1, 1), (2, 1), (3, 4)])
def test_top_k_varlen(next_n: int, ratio: int, dtype: torch.dtype, device: str) -> None:
    lens = torch.tensor([90, 2, 17, 0], dtype=torch.int32, device=device)
    logits = torch.randperm(4 * next_n * 64).view(4 * next_n, 64).to(device)
    logits = (logits % 251 if dtype is BF16 else logits).to(dtype)
    indices, values = fi_core.top_k_varlen(logits, lens, 8, None, ratio, next_n, return_values=True)
    assert indices.dtype == torch.int32
    for row, (found, own) in enumerate(zip(indices.tolist(), logits)):
        seen = min(64, max(0, (int(lens[row // next_n]) - next_n + row % next_n + 1) // ratio))
        count = min(seen, 8)
        assert found[count:] == [-1] * (8 - count)
        assert len(set(found[:count])) == count
        assert all(0 <= i < seen for i in found[:count])
        assert sorted(own[found[:count]].tolist()) == sorted(own[:seen].topk(count).values.tolist())
        assert values is not None
        assert values[row].tolist() == [*own[found[:count]].tolist(), *[-torch.inf] * (8 - count)]
    room = torch.empty_like(indices)
    assert fi_core.top_k_varlen(logits, lens, 8, None, ratio, next_n, out_indices=room) == (room, None)
    assert torch.equal(room, indices)
    assert values is not None
    own = torch.zeros_like(values)
    found, written = fi_core.top_k_varlen(logits, lens, 8, None, ratio, next_n, True, room, own)
    assert found is room
    assert written is own
    assert torch.equal(own, values)
    with pytest.raises(BackendSupportedError):
        fi_core.top_k_varlen(logits, lens, 8, backend="gvr")
    with pytest.raises(ValueError, match="logits must have shape"):
        fi_core.top_k_varlen(logits, lens, 8, next_n=next_n + 1)
    assert topk_varlen.release_gvr2_resources("cuda:0") == topk_varlen.release_gvr2_resources(0) == 0
    with pytest.raises(ValueError, match="device must be a CUDA device, its index or None; got 'cpu'"):
        topk_varlen.release_gvr2_resources("cpu")


def test_sampling_with_a_slab(device: str) -> None:
    """Tokens are those of top_k_top_p_sampling_from_probs; the slab has the selected ones by falling probability."""
    probs = torch.rand(4, 3000, generator=torch.Generator().manual_seed(1)).to(device)
    probs[1, 100:120] = 2.0  # equal ones, by rising index
    probs /= probs.sum(1, keepdim=True)
    top_k = torch.tensor([1, 7, 500, 30], dtype=torch.int32, device=device)
    for k, most in ((top_k, 500), (top_k, None), (20, None)):
        values, tokens = (torch.full((4, 1024), -5, dtype=d, device=device) for d in (torch.float32, torch.int32))
        counts, out = (torch.empty(4, dtype=torch.int32, device=device) for _ in range(2))
        kept = torch.full_like(values, -5)
        drawn = fi_core.cake_top_k_top_p_sampling_from_probs(
            probs, k, 0.6, top_k_max=most, philox_seed=3, philox_offset=8, out=out, renorm_out=kept,
            workspace=(values, tokens, counts),
        )  # fmt: skip
        assert drawn is out
        assert torch.equal(out, fi_core.top_k_top_p_sampling_from_probs(probs, k, 0.6, seed=3, offset=8))
        assert torch.equal(fi_core.cake_top_k_top_p_sampling_from_probs(probs, k, 0.6, philox_seed=3, philox_offset=8),
                           out)  # fmt: skip
        for row, count in enumerate(top_k.tolist() if k is top_k else [20] * 4):
            order = probs[row].cpu().double().sort(descending=True, stable=True)
            assert int(counts[row]) == count
            assert tokens[row, :count].tolist() == order.indices[:count].tolist()
            best = order.values[:count]
            assert torch.equal(values[row, :count].cpu(), best.float())
            inside = best.cumsum(0) - best < 0.6 * best.sum()
            inside |= best == best[inside][-1]
            assert_close(kept[row, :count], best * inside / best[inside].sum(), tolerance=FINE)
            for x in (values, tokens, kept):
                assert (x[row, count:] == -5).all()
    for options, error, words in (
        ({"top_k": 2000}, ValueError, "top_k must be 1 to 1024; got 2000: top_k_top_p_sampling_from_probs takes any"),
        ({"philox_seed": 3}, ValueError, "philox_seed and philox_offset must be given together; got 3 and None"),
        ({"probs": probs.half()}, TypeError, "probs must be torch.float32; got torch.float16"),
        ({"out": out.long()}, ValueError, "out: dtype must be torch.int32, got torch.int64"),
        ({"probs": probs.mT}, ValueError, "probs must be contiguous"),
    ):
        with pytest.raises(error, match=words):
            fi_core.cake_top_k_top_p_sampling_from_probs(**{"probs": probs, "top_k": 5, "top_p": 0.5, **options})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("batch", [1, 2])
def test_dit_layernorms(batch: int, dtype: torch.dtype, device: str) -> None:
    """The modulation comes in chunks of a wider tensor; results are rounded once."""
    n, d = 5, 96
    x, residual = (rand(batch, n, d, dtype=dtype, device=device, seed=i, scale=3.0) for i in (1, 2))
    chunks = [c.squeeze(2) for c in rand(batch, n, 6, d, dtype=dtype, device=device).chunk(6, 2)]
    gate, scale, shift = chunks[:3]
    rows = [rand(d, dtype=torch.float32, device=device, seed=i) for i in range(5)]
    gamma, beta, gate_bias, scale_bias, shift_bias = rows
    outs = {"residual_out": torch.empty_like(x), "norm_out": torch.empty_like(x)}
    gated = residual.double() + x.double() * (gate.double() + gate_bias.double())
    added = residual.double() + x.double()

    def norm(total: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(total, (d,), eps=1e-5)

    factor, offset = 1 + scale.double() + scale_bias.double(), shift.double() + shift_bias.double()
    biases = {"scale_bias": scale_bias[None], "shift_bias": shift_bias, "epsilon": 1e-5}
    cases = [
        (
            fi_core.fused_dit_gate_residual_layernorm_gamma_beta(
                x, residual, gate, gamma, beta, gate_bias=gate_bias, epsilon=1e-5, **outs
            ),
            (gated, norm(gated) * gamma.double() + beta.double()),
        ),
        (
            fi_core.fused_dit_gate_residual_layernorm_scale_shift(
                x, residual, gate, scale, shift, gate_bias=gate_bias, **biases
            ),
            (gated, norm(gated) * factor + offset),
        ),
        (
            fi_core.fused_dit_residual_layernorm_scale_shift(x, scale, shift, residual=residual, **biases),
            (added, norm(added) * factor + offset),
        ),
        (
            fi_core.fused_dit_residual_layernorm_scale_shift(x, scale, shift, epsilon=1e-5),
            (x.double(), norm(x.double()) * (1 + scale.double()) + shift.double()),
        ),
    ]
    for got, want in cases:
        for own, other in zip(got, want):
            assert own.dtype is dtype
            assert_close(own, other)
    assert cases[0][0] == (outs["residual_out"], outs["norm_out"])
    with pytest.raises(UnsupportedError, match="use_nvfp4, sf_out: results have the dtype of input; call nvfp4_quant"):
        fi_core.fused_dit_residual_layernorm_scale_shift(x, scale, shift, use_nvfp4=True, sf_out=gamma)
    with pytest.raises(
        ValueError, match=r"scale_bias must be torch.float32 of shape \[96\]; got torch.float32, \[95\]"
    ):
        fi_core.fused_dit_residual_layernorm_scale_shift(x, scale, shift, scale_bias=scale_bias[1:])
    with pytest.raises(ValueError, match="gate must be"):
        fi_core.fused_dit_gate_residual_layernorm_gamma_beta(x, residual, gate.float(), gamma, beta)
    with pytest.raises(ValueError, match="norm_out must be"):
        fi_core.fused_dit_residual_layernorm_scale_shift(x, scale, shift, norm_out=torch.empty_like(x).float())


@pytest.mark.parametrize("dtype", HALVES)
def test_nvfp4_rows_come_back(dtype: torch.dtype, device: str) -> None:
    """An element of a block is off by at most a quarter of the largest magnitude's step: 1 / 6 of it."""
    x = rand(7, 96, dtype=dtype, device=device, scale=5.0)
    factor = (x.float().abs().max() / (448 * 6)).reshape(1)
    values, codes = fi_core.nvfp4_kv_quantize(x, factor)
    assert (values.dtype, values.shape, codes.dtype, codes.shape) == (torch.uint8, (7, 48), torch.uint8, (7, 6))
    back = fi_core.nvfp4_kv_dequantize(values, codes, factor, dtype).double().view(7, 6, 16)
    blocks = x.double().view(7, 6, 16)
    assert ((back - blocks).abs() <= blocks.abs().amax(-1, keepdim=True) * 0.2).all()
    want = (wide(values, codes, 16).to(device) * factor.double()).view(7, 6, 16)
    assert_close(back.to(dtype), want)
    with pytest.raises(ValueError, match=r"input must have shape \[m, k\], k divisible by 16; got \[7, 95\]"):
        fi_core.nvfp4_kv_quantize(x[:, 1:], factor)


def test_bands_of_heads_go_to_ranks_and_back(device: str) -> None:
    """Bands of 2 and 1 of the 3 heads of 4 ranks: q, k and v are views of one projection."""
    world, local, d = 4, 3, 8
    q, k, v = rand(2, 5, world * local, 3 * d, dtype=BF16, device=device).split(d, -1)
    merged = torch.full((2, 5, world * local, d), 9.0, dtype=BF16, device=device)
    for offset, count in ((0, 2), (2, 1)):
        packed = comm.pack_ulysses_qkv_head_chunk(q, k, v, world_size=world, head_offset=offset, head_count=count)
        for rank in range(world):
            for head in range(count):
                row = packed[:, :, rank * count + head]
                source = rank * local + offset + head
                assert torch.equal(row, torch.cat([x[:, :, source] for x in (q, k, v)], -1))
        out = torch.empty_like(packed)
        band = {"world_size": world, "head_offset": offset, "head_count": count}
        assert comm.pack_ulysses_qkv_head_chunk(q, k, v, out=out, **band) is out
        assert torch.equal(out, packed)
        before = merged.clone()
        received = packed[..., :d].contiguous()
        band = {"world_size": world, "local_heads": local, "head_offset": offset}
        assert comm.merge_ulysses_output_head_chunk(received, out=merged, **band) is merged
        changed = [h for h in range(world * local) if offset <= h % local < offset + count]
        kept = [h for h in range(world * local) if h not in changed]
        assert torch.equal(merged[:, :, kept], before[:, :, kept])
    assert torch.equal(merged, q)
    with pytest.raises(
        ValueError, match=r"head_offset \+ head_count must be at most the 3 heads of a rank; got 2 \+ 2"
    ):
        comm.pack_ulysses_qkv_head_chunk(q, k, v, world_size=world, head_offset=2, head_count=2)
    with pytest.raises(ValueError, match="head_count must be an integer of 1 or more; got 0"):
        comm.pack_ulysses_qkv_head_chunk(q, k, v, world_size=world, head_offset=0, head_count=0)
    with pytest.raises(ValueError, match="out must be a contiguous tensor"):
        comm.merge_ulysses_output_head_chunk(q, world_size=world, local_heads=local, head_offset=0, out=q.float())
