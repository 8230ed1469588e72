"""NVFP4 and MXFP4: values by hand, layouts by their formulas, forms of the input, refusals, equality of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from fi_core import SfLayout, quantization
from fi_core.quantization import ops

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.exp2(torch.arange(shape[-2])[:, None] % 9 - 4.0)).to(dtype)


def codes(packed: torch.Tensor) -> list[int]:
    return torch.stack((packed & 15, packed >> 4), -1).flatten().tolist()


def one(value: float, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([value], device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_round_to_nearest_even_and_saturate(dtype: torch.dtype, device: str) -> None:
    """With 6 in each block and a global scale of 1 the scale is 1, so each value is rounded by itself."""
    x = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.0, -0.25, -0.26, -5.1, 0.24, 1.7, 2.6, 5.9])
    want = [7, 0, 2, 2, 4, 4, 6, 6, 8, 8, 9, 15, 0, 3, 5, 7]
    for f in (fi_core.nvfp4_quantize, lambda a, _: fi_core.mxfp4_quantize(a)):
        q, scales = f(x.repeat(2).to(device, dtype)[None], one(1.0, device))
        assert codes(q) == want * 2
        assert scales.flatten()[0] == (0x38 if f is fi_core.nvfp4_quantize else 127)


def test_a_block_of_zeros_gives_zeros(device: str) -> None:
    x = normal(3, 64).to(device)
    x[:, 16:48] = 0
    q, scales = fi_core.nvfp4_quantize(x, one(100.0, device), SfLayout.layout_linear)
    assert not q[:, 8:24].any()
    assert not scales[:, 1:3].any()
    assert scales[:, [0, 3]].all()
    q, scales = fi_core.mxfp4_quantize(torch.zeros_like(x), sfLayout=SfLayout.layout_linear)
    assert not q.any()
    assert not scales.any()


def test_blocks_of_32_with_e4m3_scales(device: str) -> None:
    """Each form has the values and scales of fp4_quantize."""
    x, scale = normal(2, 37, 160).to(device), one(90.0, device)
    q, scales = fi_core.fp4_quantize(x, scale, 32, is_sf_swizzled_layout=False)
    own = fi_core.nvfp4_quantize(x.flatten(0, 1), scale, SfLayout.layout_linear, sf_vec_size=32)
    assert torch.equal(own[0], q.flatten(0, 1))
    assert torch.equal(own[1], scales)
    batched, swizzled = fi_core.nvfp4_batched_quantize(x, scale, 32)
    assert torch.equal(batched, q)
    for matrix, of_matrix in zip(swizzled, scales.view(2, 37, 5)):
        assert torch.equal(matrix, fi_core.block_scale_interleave(of_matrix.contiguous()))


@pytest.mark.parametrize("block", [16, 32])
def test_the_inverse_is_within_half_a_step(block: int, device: str) -> None:
    x = normal(37, 160).to(device)
    scale = 448 * 6 / x.abs().max().float()
    q, scales = fi_core.fp4_quantize(x, scale.reshape(1), block)
    y = fi_core.e2m1_and_ufp8sf_scale_to_float(q, scales, 1 / scale.reshape(1), block)
    amax = x.cpu().float().unflatten(-1, (-1, block)).abs().amax(-1).repeat_interleave(block, -1)
    # The largest step is amax / 3, and a scale is rounded by at most 1/16 or half of the smallest one.
    assert ((y - x.cpu().float()).abs() <= amax * (1 / 6 + 1 / 16) + 0.004 / scale.cpu()).all()


def stored(scales: torch.Tensor, layout: SfLayout, r: int, s: int, columns: int) -> int:
    """The scale of row r, column s, by the formulas of the layouts."""
    c = columns if layout is SfLayout.layout_linear else -(-columns // 4) * 4
    offset = {
        SfLayout.layout_linear: r * c + s,
        SfLayout.layout_8x4: (r // 8) * (c // 4) * 32 + (s // 4) * 32 + (r % 8) * 4 + s % 4,
        SfLayout.layout_128x4: (r // 128) * (c // 4) * 512 + s // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + s % 4,
    }[layout]
    return int(scales.flatten()[offset])


def test_every_quantizer_takes_the_recipe_last_and_refuses_it() -> None:
    """FlashInfer's callers pass None or False for the usual recipe."""
    batch, mask = X[None], torch.ones(1, dtype=torch.int32)
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (fi_core.fp4_quantize, (X, ONE, 16, False, True, False, False, None, "cuda")),
        (fi_core.nvfp4_quantize, (X, ONE, SfLayout.layout_128x4, False, 16, None, "cuda", False, None, None)),
        (fi_core.silu_and_mul_nvfp4_quantize, (X, ONE, 16, True, False, None)),
        (fi_core.nvfp4_batched_quantize, (batch, ONE, 16)),
        (fi_core.scaled_fp4_grouped_quantize, (batch, mask, ONE)),
    )
    for function, arguments in calls:
        for recipe in (None, False):
            function(*arguments, recipe)
        with pytest.raises(TypeError, match="nvfp4_4over6 must be an NVFP44Over6Config or None; got"):
            function(*arguments, object())


@pytest.mark.parametrize("layout", list(SfLayout))
@pytest.mark.parametrize(("m", "k"), [(1, 16), (131, 336), (33, 64), (8, 96)])
def test_scales_are_where_the_layout_has_them(m: int, k: int, layout: SfLayout, device: str) -> None:
    x = normal(m, k).to(device)
    linear = fi_core.nvfp4_quantize(x, one(50.0, device), SfLayout.layout_linear)
    q, scales = fi_core.nvfp4_quantize(x, one(50.0, device), layout)
    assert torch.equal(q, linear[0])
    assert linear[1].shape == (m, k // 16)
    if layout is not SfLayout.layout_linear:
        rows = {SfLayout.layout_8x4: 8, SfLayout.layout_128x4: 128}[layout]
        assert scales.shape == (-(-m // rows) * rows, -(-(k // 16) // 4) * 4)
    flat = scales.cpu()
    found = [[stored(flat, layout, r, s, k // 16) for s in range(k // 16)] for r in range(m)]
    assert found == linear[1].tolist()
    assert int(scales.long().sum()) == int(linear[1].long().sum()), "the padding is zero"
    if layout is SfLayout.layout_128x4:
        assert torch.equal(fi_core.block_scale_interleave(linear[1]), scales.flatten())


def test_interleave_pads_each_matrix_alone(device: str) -> None:
    x = normal(3, 5, 10).to(device)
    y = fi_core.block_scale_interleave(x)
    assert y.shape == (3 * 128 * 12,)
    assert torch.equal(y, torch.cat([fi_core.block_scale_interleave(matrix) for matrix in x]))
    out = torch.empty_like(y)
    assert fi_core.nvfp4_block_scale_interleave(x, out=out) is out
    assert torch.equal(out, y)
    for kind in (TypeError, AssertionError):  # the latter is FlashInfer's
        with pytest.raises(kind, match="unswizzled_sf: uint8 or bfloat16 is required; got"):
            fi_core.block_scale_interleave(x.float())


def test_an_interleave_over_its_input_is_refused(device: str) -> None:
    """A scale would be overwritten before it is read."""
    x = torch.zeros(128, 4, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="must not share memory: pass a tensor of its own memory"):
        fi_core.block_scale_interleave(x, out=x.view(-1))


def test_shuffled_rows_are_those_of_the_matrix(device: str) -> None:
    x = normal(256, 128).to(device)
    q, scales = fi_core.nvfp4_quantize(x, one(50.0, device), do_shuffle=True)
    q_linear, linear = fi_core.nvfp4_quantize(x, one(50.0, device), SfLayout.layout_linear)
    assert torch.equal(q, fi_core.shuffle_matrix_a(q_linear, 128))
    assert torch.equal(scales.flatten(), fi_core.shuffle_matrix_sf_a(linear, 128))


def test_shuffles_follow_their_tables() -> None:
    """Row i of a block moves to place TABLE[i]."""
    tables = {
        64: [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15],
        128: [8 * (i % 4) + i // 4 for i in range(32)],
    }
    for tile, table in tables.items():
        assert fi_core.get_shuffle_block_size(tile) == len(table)
        x = torch.arange(128)[:, None].expand(128, 4)
        y = fi_core.shuffle_matrix_a(x, tile)
        for old in range(128):
            block, i = divmod(old, len(table))
            assert y[block * len(table) + table[i], 0] == old
        indices = fi_core.get_shuffle_matrix_sf_a_row_indices(x, tile)
        assert torch.equal(indices, fi_core.get_shuffle_matrix_a_row_indices(x, tile))
    with pytest.raises(ValueError, match=r"input_tensor: shape \[m, k\] with m a multiple of 32"):
        fi_core.shuffle_matrix_a(torch.zeros(48, 4), 128)
    with pytest.raises(ValueError, match=r"input_tensor: .* m a multiple of 128 .*got \[64, 4\]"):
        fi_core.shuffle_matrix_sf_a(torch.zeros(64, 4, dtype=torch.uint8), 128)


def same(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def test_forms_of_the_input(device: str) -> None:
    x, scale = normal(6, 5, 64).to(device), one(40.0, device)
    q, scales = fi_core.fp4_quantize(x, scale)
    flat = fi_core.fp4_quantize(x.view(30, 64), scale)
    same((q.view(30, 32), scales), flat)
    assert q.shape == (6, 5, 32)
    batched = fi_core.nvfp4_batched_quantize(x, scale)
    for i in range(6):
        alone = fi_core.fp4_quantize(x[i], scale)
        same((batched[0][i], batched[1][i]), (alone[0], alone[1].flatten()))
    # An odd address, rows whose stride is not a multiple of 16 bytes, and a column-major matrix.
    canvas = torch.zeros(30 * 67 + 1, dtype=x.dtype, device=device)[1:].view(30, 67)[:, :64]
    same(fi_core.fp4_quantize(canvas.copy_(x.view(30, 64)), scale), flat)
    column_q, column_scales = fi_core.fp4_quantize(x.view(30, 64).T, scale)
    same((column_q.T, column_scales.T), flat)
    # The reciprocal of the global scale, and a scale of another dtype.
    same(
        fi_core.fp4_quantize(x, one(0.5, device), is_global_scale_inversed=True),
        fi_core.fp4_quantize(x, one(2.0, device)),
    )
    same(fi_core.fp4_quantize(x, scale.bfloat16()), (q, scales))
    same(fi_core.fp4_quantize(x), fi_core.fp4_quantize(x, one(1.0, device)))


def test_e4m3_input_is_quantized_as_its_values(device: str) -> None:
    x = normal(9, 96).to(device).to(torch.float8_e4m3fn)
    same(fi_core.fp4_quantize(x, one(9.0, device)), fi_core.fp4_quantize(x.float(), one(9.0, device)))


def test_nan_and_infinity(device: str) -> None:
    x = torch.ones(1, 32, device=device)
    x[0, 1], x[0, 17] = float("nan"), float("-inf")
    q, scales = fi_core.nvfp4_quantize(x, one(6.0, device), SfLayout.layout_linear)
    assert codes(q)[:2] == [7, 7], "NaN becomes 6 and does not count for the scale"
    assert codes(q)[17] == 15
    assert scales.flatten().tolist() == [0x38, 0x7E], "1, and the largest scale"


@pytest.mark.parametrize("mask", [[0, 1, 129, 200], [200, -3, 128, 999]])
def test_masked_rows_are_not_touched(mask: list[int], device: str) -> None:
    x = normal(4, 200, 64).to(device)
    scale = torch.tensor([1.0, 20.0, 3.0, 7.0], device=device)
    out = torch.full((4, 200, 32), 0x55, dtype=torch.uint8, device=device)
    scales = torch.full((4, 256, 4), 0x55, dtype=torch.uint8, device=device)
    counts = torch.tensor(mask, dtype=torch.int32, device=device)
    ops.block_quantize(out, scales, x, scale, counts)
    q, sf = fi_core.scaled_fp4_grouped_quantize(x, counts, scale)
    assert q.shape == (200, 32, 4)
    assert sf.shape == (32, 4, 2, 4, 1, 4)
    assert sf.dtype == torch.float8_e4m3fn
    for i, count in enumerate(min(max(n, 0), 200) for n in mask):
        alone = fi_core.fp4_quantize(x[i, :count], scale[i : i + 1])
        assert torch.equal(out[i, :count], alone[0])
        assert torch.equal(q[:count, :, i], alone[0])
        tiles = -(-count // 128) * 128
        assert torch.equal(scales[i, :tiles], alone[1]), "padded with zeros to a whole tile"
        assert torch.equal(
            sf.view(torch.uint8).permute(5, 2, 4, 0, 1, 3)[i].reshape(-1)[: tiles * 4], alone[1].flatten()
        )
        assert (out[i, count:] == 0x55).all()
        assert (scales[i, tiles:] == 0x55).all()


def test_silu_and_mul_is_rounded_before_it_is_quantized(device: str) -> None:
    x = normal(20, 256).to(device)
    product = fi_core.silu_and_mul(x)
    for swizzled, tiles_of_8 in ((True, False), (True, True), (False, False)):
        got = fi_core.silu_and_mul_nvfp4_quantize(x, one(30.0, device), 16, swizzled, tiles_of_8)
        want = fi_core.fp4_quantize(product, one(30.0, device), 16, False, swizzled, tiles_of_8)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            assert (a != b).float().mean() < 1e-3  # the fused kernel may round a product differently


@pytest.mark.parametrize("shape", [(0, 64), (5, 0)])
def test_empty_inputs(shape: tuple[int, int], device: str) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    q, scales = fi_core.nvfp4_quantize(x, one(1.0, device))
    assert q.shape == (shape[0], shape[1] // 2)
    assert scales.numel() == 0
    assert fi_core.mxfp4_dequantize(*fi_core.mxfp4_quantize(x)).shape == shape


def test_dequantizers_agree(device: str) -> None:
    x = normal(40, 96).to(device)
    for layout in SfLayout:
        q, scales = fi_core.mxfp4_quantize(x, sfLayout=layout)
        y = fi_core.mxfp4_dequantize(q, scales, layout)
        assert y.device == x.device
        if layout is SfLayout.layout_linear:
            assert torch.equal(fi_core.mxfp4_dequantize_host(q, scales), y)
        swizzled = layout is not SfLayout.layout_linear
        z = fi_core.e2m1_and_ufp8sf_scale_to_float(q, scales, None, 32, 0, swizzled, layout is SfLayout.layout_8x4)
        assert torch.equal(z, y.cpu())


@pytest.mark.parametrize("layout", SfLayout)
def test_scales_in_another_order_are_refused(layout: SfLayout, device: str) -> None:
    """As many scales in another shape would be read as those of rows."""
    x, swizzled = normal(40, 96).to(device), layout is not SfLayout.layout_linear
    fp4, scales = fi_core.mxfp4_quantize(x, sfLayout=layout)
    fp8, flat = fi_core.mxfp8_quantize(x, sf_swizzle_layout=layout)
    calls: dict[str, Any] = {
        "a_sf": lambda s: fi_core.mxfp4_dequantize(fp4, s, layout),
        "ufp8_scale_tensor": lambda s: fi_core.e2m1_and_ufp8sf_scale_to_float(
            fp4, s, None, 32, 0, swizzled, layout is SfLayout.layout_8x4
        ),
        "scale_tensor": lambda s: fi_core.mxfp8_dequantize_host(fp8, s, sf_swizzle_layout=layout),
    }
    if not swizzled:
        calls["scale"] = lambda s: fi_core.mxfp4_dequantize_host(fp4, s)
    for name, call in calls.items():
        own = flat.view_as(scales) if name == "scale_tensor" else scales
        assert torch.equal(call(own.flatten()), call(own))
        for other in (own.t().contiguous(), own.view(-1, 2 * own.shape[1])):
            with pytest.raises(ValueError, match=rf"{name} must have shape .* in {layout.name}, or be flat"):
                call(other)


X, ONE = torch.zeros(4, 64, dtype=torch.bfloat16), torch.ones(1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fi_core.fp4_quantize(X, ONE, 8), NotImplementedError, "sf_vec_size: 16 or 32 is required; got 8"),
        (lambda: fi_core.fp4_quantize(X[:, :40], ONE), ValueError, r"input .*multiple of 16; got \[4, 40\]"),
        (lambda: fi_core.fp4_quantize(X[0], ONE), ValueError, r"input: shape \[..., m, k\] is required; got \[64\]"),
        (lambda: fi_core.fp4_quantize(X.double(), ONE), ValueError, "requires dtype in f16, bf16, f32, e4m3"),
        (lambda: fi_core.fp4_quantize(X, torch.ones(3)), ValueError, r"global_scale must have 1 element.*got \[3\]"),
        (lambda: fi_core.fp4_quantize(X, ONE, backend="trtllm"), ValueError, "backend: .* got 'trtllm'"),
        (lambda: fi_core.fp4_quantize(X, ONE, nvfp4_4over6=2), TypeError, "nvfp4_4over6 must be an NVFP44Over6Config"),
        (
            lambda: fi_core.nvfp4_quantize(X, ONE, expanded_idx_to_permuted_idx=torch.zeros(4)),
            NotImplementedError,
            "expanded_idx_to_permuted_idx: not supported, index the rows",
        ),
        (
            lambda: fi_core.nvfp4_quantize(X, ONE, per_token_activation=True, out_scale=torch.zeros(4)),
            NotImplementedError,
            "out_scale: not supported, take the third result",
        ),
        (lambda: fi_core.nvfp4_quantize(X, ONE, 3), ValueError, "sfLayout: a member of SfLayout is required; got 3"),
        (lambda: fi_core.nvfp4_quantize(X, ONE, do_shuffle=True), ValueError, r"do_shuffle: .*got layout_128x4 and"),
        (
            lambda: fi_core.nvfp4_quantize(X[None], ONE, per_token_activation=True),
            ValueError,
            r"per_token_activation: a of shape \[m, k\]",
        ),
        (lambda: fi_core.mxfp4_quantize(X[:, :48]), ValueError, "a must have .* multiple of 32"),
        (
            lambda: fi_core.silu_and_mul_nvfp4_quantize(X[:, :48], ONE),
            ValueError,
            r"multiple of 2 \* 16; got",
        ),
        (
            lambda: fi_core.nvfp4_batched_quantize(X, ONE),
            ValueError,
            r"a: shape \[b, m, k\] is required; got \[4, 64\]",
        ),
        (
            lambda: fi_core.scaled_fp4_grouped_quantize(X[None], torch.zeros(2, dtype=torch.int32), ONE),
            ValueError,
            r"mask must have shape \[batch\] with batch = 1; got \[2\]",
        ),
        (
            lambda: fi_core.scaled_fp4_grouped_quantize(X[None], torch.zeros(1), ONE),
            TypeError,
            "mask must be int32; got float32",
        ),
        (
            lambda: fi_core.mxfp4_dequantize(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)),
            ValueError,
            r"a_sf must have shape .* in layout_128x4, or be flat; got \[3\]",
        ),
        (
            lambda: fi_core.mxfp4_dequantize_host(X.byte(), X[:, :4].to(torch.float8_e4m3fn)),
            TypeError,
            "scale: uint8 or float8_e8m0fnu is required; got torch.float8_e4m3fn",
        ),
        (
            lambda: fi_core.e2m1_and_ufp8sf_scale_to_float(X.byte(), X.byte(), ufp8_type=2),
            ValueError,
            "ufp8_type: 0",
        ),
    ],
)
def test_refusals_name_the_argument(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("layout", list(SfLayout))
def test_scales_of_tokens(layout: SfLayout, device: str) -> None:
    """Each row has the values and scales that it gets alone with its own global scale; a row of zeros has scale 0."""
    x = torch.randn(37, 96, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 37).unsqueeze(1)
    x[5] = 0
    x = x.to(torch.bfloat16).to(device)
    factor = torch.full((1,), 1 / (448 * 6), device=device)
    values, scales, tokens = fi_core.nvfp4_quantize(x, factor, layout, per_token_activation=True)
    assert torch.equal(tokens, x.float().abs().amax(1) * factor)
    for row in (0, 5, 36):
        own = 1 / torch.where(tokens[row : row + 1] == 0, 1.0, tokens[row : row + 1])
        one, _ = fi_core.nvfp4_quantize(x[row : row + 1], own, layout)
        assert torch.equal(values[row : row + 1], one)
    swizzled, small = layout is not SfLayout.layout_linear, layout is SfLayout.layout_8x4
    wide = fi_core.e2m1_and_ufp8sf_scale_to_float(
        values, scales, is_sf_swizzled_layout=swizzled, is_sf_8x4_layout=small
    ) * tokens.cpu().unsqueeze(1)
    error = (wide - x.float().cpu()).abs().amax(1)
    assert (error <= x.float().cpu().abs().amax(1) / 5).all(), "half a step of the largest values, and their scales"


def test_the_earlier_module_paths_hold_the_same_functions() -> None:
    import fi_core.fp4_quantization
    import fi_core.fp8_quantization
    import fi_core.quantization.packbits

    assert fi_core.fp4_quantization.nvfp4_quantize is quantization.nvfp4_quantize is fi_core.nvfp4_quantize
    assert fi_core.fp8_quantization.mxfp8_quantize is quantization.fp8_quantization.mxfp8_quantize
    assert fi_core.utils.get_shuffle_matrix_a_row_indices is fi_core.get_shuffle_matrix_a_row_indices


def test_under_torch_compile(device: str) -> None:
    x, scale = normal(7, 64).to(device), one(3.0, device)
    compiled: Any = torch.compile(fi_core.nvfp4_quantize, fullgraph=True, backend="aot_eager")
    same(compiled(x, scale), fi_core.nvfp4_quantize(x, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    """All 65536 values of a type, in order and shuffled, so that every block and every rounding occurs."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    shuffled = every[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]
    for x in (every.view(256, 256), shuffled.view(256, 256), every.view(256, 256).T.contiguous()):
        for scale in (1.0, 37.3, 1e-3):
            cuda = fi_core.fp4_quantize(x.cuda(), one(scale, "cuda"))
            same([y.cpu() for y in cuda], fi_core.fp4_quantize(x, one(scale)))
        same([y.cpu() for y in fi_core.mxfp4_quantize(x.cuda())], fi_core.mxfp4_quantize(x))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_global_scale_of_another_dtype(dtype: torch.dtype, per_token: bool) -> None:
    a, scale = torch.randn(3, 32).half(), torch.full((1,), 0.5)
    want = fi_core.nvfp4_quantize(a, scale, per_token_activation=per_token)
    got = fi_core.nvfp4_quantize(a, scale.to(dtype), per_token_activation=per_token)
    assert all(map(torch.equal, got, want))
