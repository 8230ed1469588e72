"""NVFP4 whose blocks choose between the scales of amax / 6 and amax / 4, against both choices in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import rand
from fi_core import NVFP44Over6Config, NVFP44Over6ErrMode, SfLayout
from fi_core.quantization import nvfp4_e4m3_max

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
LINEAR = SfLayout.layout_linear


def wide(q: torch.Tensor, scales: torch.Tensor, factor: float) -> torch.Tensor:
    """The values of linear scales, in fp64."""
    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2).long().cpu()
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0).double()
    steps = scales.cpu().view(torch.float8_e4m3fn).double().repeat_interleave(16, -1) / factor
    return values * steps


def candidates(x: torch.Tensor, factor: float, e4m3_max: int) -> list[torch.Tensor]:
    """What a block becomes with either scale, in fp64: `[rows, blocks, 16]` for 6 and for 4."""
    blocks, found = x.double().cpu().unflatten(-1, (-1, 16)), []
    for largest in (6, 4):
        scale = (blocks.abs().amax(-1, keepdim=True) * factor / largest).clamp(max=e4m3_max)
        step = scale.float().to(torch.float8_e4m3fn).double() / factor
        near = ((blocks / step).abs()[..., None] - E2M1).abs()
        best = near.argmin(-1)
        tie = (
            (near.gather(-1, (best + 1).clamp(max=7)[..., None])[..., 0] == near.amin(-1))
            & (best % 2 == 1)
            & (best < 7)
        )
        found.append(E2M1[best + tie.long()] * blocks.sign() * step)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mode", ["MAE", "mse"])
@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_each_block_has_the_smaller_error(e4m3_max: int, mode: str, dtype: torch.dtype, device: str) -> None:
    x = rand(40, 96, dtype=dtype, device=device, scale=3.0)
    x[1] = 0
    recipe = NVFP44Over6Config(e4m3_max, mode)
    factor = float((e4m3_max * 6 / x.double().abs().max()).float())
    given: dict[str, Any] = {"sfLayout": LINEAR, "nvfp4_4over6": recipe}
    q, scales = fi_core.nvfp4_quantize(x, torch.tensor([factor], device=device), **given)
    assert q.shape == (40, 48) and scales.shape == (40, 6) and q.dtype == scales.dtype == torch.uint8
    got, blocks = wide(q, scales, factor).unflatten(-1, (-1, 16)), x.double().cpu().unflatten(-1, (-1, 16))
    six, four = candidates(x, factor, e4m3_max)
    power = 2 if mode == "mse" else 1
    errors = torch.stack([((c - blocks).abs() ** power).sum(-1).nan_to_num(0.0) for c in (six, four)])
    own = ((got - blocks).abs() ** power).sum(-1)
    # Both errors are sums in fp32 of 16 values that fp32 divides: within 2^-18 of those in fp64.
    assert (own <= errors.amin(0) * (1 + 2**-18) + 1e-12).all()
    chosen = (got == four.nan_to_num(0.0)).all(-1) & (errors[1] < errors[0])
    assert 0.1 < chosen.double().mean() < 0.9
    assert (own <= errors[0] * (1 + 2**-18) + 1e-12).all() and own.sum() < 0.97 * errors[0].sum()


def test_special_values_and_ties(device: str) -> None:
    """Midpoints go to even codes, NaN to 6, and signs stay; the block's largest magnitude is exact with the scale 6."""
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor([[*halves, *(-v for v in halves)]], device=device)
    x[0, 0] = torch.nan
    one = torch.ones(1, device=device)
    q, scales = fi_core.fp4_quantize(x, one, is_sf_swizzled_layout=False, nvfp4_4over6=NVFP44Over6Config())
    codes = torch.stack((q & 15, q >> 4), -1).flatten().tolist()
    assert scales.view(torch.float8_e4m3fn).float().item() == 1.0
    assert [code & 7 for code in codes] == [7, 2, 2, 4, 4, 6, 6, 7, 0, 2, 2, 4, 4, 6, 6, 7]
    assert [code >> 3 for code in codes[1:]] == [0] * 7 + [1] * 8


def test_a_scale_for_each_row(device: str) -> None:
    x, factors = rand(6, 32, dtype=torch.bfloat16, device=device), torch.arange(1, 7, device=device).float()
    given: dict[str, Any] = {"is_sf_swizzled_layout": False, "nvfp4_4over6": NVFP44Over6Config()}
    of_all = fi_core.fp4_quantize(x, factors, **given)
    for i in range(6):
        alone = fi_core.fp4_quantize(x[i : i + 1], factors[i : i + 1], **given)
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(of_all, alone))


def test_layouts_and_forms(device: str) -> None:
    """Every quantizer has the values and scales of the linear form, in its own layout."""
    recipe, factor = NVFP44Over6Config(), torch.tensor([40.0], device=device)
    x = rand(3, 128, 128, dtype=torch.bfloat16, device=device)
    given: dict[str, Any] = {"nvfp4_4over6": recipe}
    q, scales = fi_core.fp4_quantize(x, factor, is_sf_swizzled_layout=False, **given)
    assert q.shape == (3, 128, 64) and scales.shape == (384, 8)
    parts = list(zip(q, scales.view(3, 128, 8)))
    tiled = fi_core.fp4_quantize(x, factor, **given)[1]
    assert torch.equal(tiled.flatten(), fi_core.block_scale_interleave(scales.contiguous()))
    plain = fi_core.nvfp4_quantize(x[0], factor, SfLayout.layout_8x4)[1]
    eight = fi_core.nvfp4_quantize(x[0], factor, SfLayout.layout_8x4, **given)[1]
    assert eight.shape == plain.shape
    at = (parts[0][1].view(16, 8, 2, 4).transpose(1, 2)).flatten()
    assert torch.equal(eight.flatten(), at)
    shuffled_q, shuffled_s = fi_core.nvfp4_quantize(x[0], factor, do_shuffle=True, **given)
    assert torch.equal(shuffled_q, fi_core.shuffle_matrix_a(parts[0][0], 128))
    assert torch.equal(shuffled_s.flatten(), fi_core.shuffle_matrix_sf_a(parts[0][1].contiguous(), 128).flatten())
    batch_q, batch_s = fi_core.nvfp4_batched_quantize(x, factor, **given)
    for i, (own, own_scales) in enumerate(parts):
        assert torch.equal(batch_q[i], own)
        assert torch.equal(batch_s[i], fi_core.block_scale_interleave(own_scales.contiguous()))
    mask = torch.tensor([128, 5, 0], dtype=torch.int32, device=device)
    masked_q, masked_s = fi_core.scaled_fp4_grouped_quantize(x, mask, factor.expand(3).contiguous(), **given)
    assert masked_q.shape == (64 * 2, 64, 3) and torch.equal(masked_q[:5, :, 1], q[1, :5])
    back = masked_s.view(torch.uint8).permute(5, 2, 4, 0, 1, 3)[1].reshape(-1)
    only = torch.zeros_like(parts[1][1])
    only[:5] = parts[1][1][:5]
    assert torch.equal(back, fi_core.block_scale_interleave(only))
    gated = fi_core.silu_and_mul_nvfp4_quantize(x[0], factor, is_sf_swizzled_layout=False, **given)
    product = fi_core.fp4_quantize(fi_core.silu_and_mul(x[0]), factor, is_sf_swizzled_layout=False, **given)
    assert all(torch.equal(a, b) for a, b in zip(gated, product))
    row_q, row_s, row_factor = fi_core.nvfp4_quantize(
        x[0], torch.tensor([1 / 2688], device=device), LINEAR, per_token_activation=True, **given
    )
    assert row_factor.shape == (128,)
    relative = (wide(row_q, row_s, 1.0) * row_factor.cpu().double()[:, None] - x[0].cpu().double()).norm()
    assert relative < 0.12 * x[0].double().norm().cpu()  # of e2m1, whose steps are up to a third of a value


def test_recipes_and_wrong_arguments() -> None:
    assert NVFP44Over6Config(256, "mse").err_mode is NVFP44Over6ErrMode.MSE
    assert NVFP44Over6Config().err_mode_name == "MAE" and nvfp4_e4m3_max() == 448.0
    assert nvfp4_e4m3_max(NVFP44Over6Config(256)) == 256.0 and fi_core.resolve_nvfp4_4over6(None) is None
    x, one = torch.ones(4, 32), torch.ones(1)
    for call, kind, words in (
        (lambda: NVFP44Over6Config(300), ValueError, "e4m3_max must be 256 or 448; got 300"),
        (lambda: NVFP44Over6Config(err_mode="max"), ValueError, "err_mode must be MAE or MSE; got 'max'"),
        (lambda: NVFP44Over6Config(err_use_fast_math=True), NotImplementedError, "err_use_fast_math is not supported"),
        (lambda: fi_core.fp4_quantize(x, one, nvfp4_4over6=2), TypeError, "nvfp4_4over6 must be an NVFP44Over6Config"),
        (lambda: fi_core.fp4_quantize(x, one, 32, nvfp4_4over6=NVFP44Over6Config()), ValueError,
         "nvfp4_4over6 must be None unless blocks of 16 have e4m3 scales; got blocks of 32"),
        (lambda: fi_core.fp4_quantize(x.to(torch.float8_e4m3fn), one, nvfp4_4over6=NVFP44Over6Config()), ValueError,
         "nvfp4_4over6 must be None for torch.float8_e4m3fn"),
        (lambda: fi_core.fp4_quantize(x.long(), one, nvfp4_4over6=NVFP44Over6Config()), ValueError,
         "nvfp4_4over6 must be None for torch.int64: pass float16"),
        (lambda: fi_core.fp4_quantize(x, torch.ones(3), nvfp4_4over6=NVFP44Over6Config()), ValueError,
         r"global_scale must have 1 element, or one for each of 1 matrices or of the 4 rows of one; got \[3\]"),
        (lambda: fi_core.nvfp4_batched_quantize(x[None].expand(2, -1, -1), torch.ones(4),
                                                nvfp4_4over6=NVFP44Over6Config()), ValueError,
         r"one for each of 2 matrices or of the 4 rows of one; got \[4\]"),
        (lambda: fi_core.scaled_fp4_grouped_quantize(x[None], torch.ones(2, dtype=torch.int32), one,
                                                     nvfp4_4over6=NVFP44Over6Config()), ValueError,
         r"mask: shape must be \(1,\), got \(2,\)"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            call()
