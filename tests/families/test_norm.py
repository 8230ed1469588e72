"""RMSNorm and LayerNorm in all their forms against fp64, on every device and implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, assert_guards, guarded, impls, rand, strided, using

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Reach every kernel entry: warps and CTAs of each size, the loop, the scalar loop; one row, no row, one column.
WIDTHS = (1, 64, 111, 128, 256, 500, 512, 1024, 2880, 4096, 5120, 8192, 16384, 20480)


def rmsnorm_reference(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6, bias: float = 0.0) -> torch.Tensor:
    x, w = x.double(), w.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (w + bias)


def layernorm_reference(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], gamma.double(), beta.double(), eps)


def scalar(value: float, device: str) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*((3, d) for d in WIDTHS), (1, 4096), (0, 64), (70, 128), (4, 3, 128), (2, 0, 64)])
def test_rmsnorm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, w = rand(*shape, dtype=dtype, device=device), rand(shape[-1], dtype=dtype, device=device, seed=1)
    want = rmsnorm_reference(x, w)
    for impl in impls("rmsnorm", device):
        with using("rmsnorm", impl):
            assert_close(fi_core.rmsnorm(x, w), want)
            out = guarded(shape, dtype, device, row_padding=8)
            assert fi_core.rmsnorm(strided(x, 24), w, out=out) is out
            assert_close(out, want)
            assert_guards(out)
            assert_close(fi_core.rmsnorm(strided(x, 1), w), want)  # misaligned rows: scalar loads
            assert_close(fi_core.gemma_rmsnorm(x, w), rmsnorm_reference(x, w, bias=1.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*((3, d) for d in WIDTHS), (1, 4096), (0, 64), (70, 128)])
def test_fused_add_rmsnorm(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x, r = rand(*shape, dtype=dtype, device=device), rand(*shape, dtype=dtype, device=device, seed=2)
    w = rand(shape[-1], dtype=dtype, device=device, seed=1)
    total = x.double() + r.double()
    for impl in impls("rmsnorm", device):
        with using("rmsnorm", impl):
            for function, bias in ((fi_core.fused_add_rmsnorm, 0.0), (fi_core.gemma_fused_add_rmsnorm, 1.0)):
                for paddings in ((0, 0), (8, 24), (1, 2)):
                    input, residual = (strided(t, padding) for t, padding in zip((x, r), paddings))
                    assert function(input, residual, w) is None
                    assert_close(residual, total, tolerance=None if dtype != torch.float32 else (1e-6, 1e-6))
                    assert_close(input, rmsnorm_reference(total, w, bias=bias))
                    assert_guards(input)
                    assert_guards(residual)


@pytest.mark.parametrize("d", [64, 1536, 20480, 20481])
def test_fused_add_normalizes_the_unrounded_sum(d: int, device: str) -> None:
    """1 + 2^-9 rounds to 1 in bf16. With this eps, 1 normalizes to 1, and 1 + 2^-9 to the next larger bf16 number."""
    x = torch.full((1, d), 0.98828125, dtype=torch.bfloat16, device=device)
    r = torch.zeros_like(x)
    x[0, 5], r[0, 5] = 1.0, 2**-9
    factor = (1 + 2**-8) * (1 - 2**-11)
    eps = factor**-2 - (x.double() + r.double()).square().mean().item()
    fi_core.fused_add_rmsnorm(x, r, torch.ones(d, dtype=torch.bfloat16, device=device), eps)
    assert r[0, 5].item() == 1.0
    assert x[0, 5].item() == 1 + 2**-7


def test_rmsnorm_in_place_and_bad_rows(device: str) -> None:
    """A NaN or inf changes its own row only; out may be the input."""
    x, w = rand(6, 256, dtype=torch.bfloat16, device=device), rand(256, dtype=torch.bfloat16, device=device, seed=1)
    x[1, 3], x[3, 7], x[4] = float("nan"), float("inf"), 0.0
    want = rmsnorm_reference(x, w)
    want[3] = torch.where(x[3].isinf(), torch.nan, 0.0).double()  # inf * rsqrt(inf), finite * rsqrt(inf)
    fi_core.rmsnorm(x, w, out=x)
    assert_close(x, want)


def test_strided_heads(device: str) -> None:
    """q and k are slices of a fused qkv: rows and heads are strided."""
    qkv, w = (
        rand(5, 12, 128, dtype=torch.bfloat16, device=device),
        rand(128, dtype=torch.bfloat16, device=device, seed=1),
    )
    want = qkv.double()
    want[:, :8], want[:, 8:10] = rmsnorm_reference(qkv[:, :8], w), rmsnorm_reference(qkv[:, 8:10], w)
    fi_core.rmsnorm(qkv[:, :8], w, out=qkv[:, :8])
    fi_core.rmsnorm(qkv[:, 8:10], w, out=qkv[:, 8:10])
    assert_close(qkv, want)
    swapped = rand(8, 5, 128, dtype=torch.bfloat16, device=device).transpose(0, 1)
    assert_close(fi_core.rmsnorm(swapped, w), rmsnorm_reference(swapped, w))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FP8)
@pytest.mark.parametrize("d", [111, 128, 500, 512, 4096, 8192, 16384, 20480])
def test_rmsnorm_quant(d: int, out_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    x, r = rand(3, d, dtype=dtype, device=device), rand(3, d, dtype=dtype, device=device, seed=2)
    w, total = rand(d, dtype=dtype, device=device, seed=1), x.double() + r.double()
    x[1, 3] = r[1, 3] = total[1, 3] = float("nan")  # NaN stays NaN; the scales below saturate and underflow
    for impl in impls("rmsnorm", device):
        with using("rmsnorm", impl):
            for scale in (0.5, 1e-5, 3e4):
                out = guarded((3, d), out_dtype, device, row_padding=8)
                assert fi_core.rmsnorm_quant(out, x, w, scalar(scale, device)) is None
                assert_close(out, rmsnorm_reference(x, w) / scale)
                assert_guards(out)
            out, input, residual = guarded((3, d), out_dtype, device, row_padding=3), strided(x), strided(r)
            assert fi_core.fused_add_rmsnorm_quant(out, input, residual, w, scalar(0.7, device)[None]) is None
            assert_close(out, rmsnorm_reference(total, w) / 0.7)
            assert_close(residual, total)
            assert torch.equal(input.nan_to_num(), x.nan_to_num())
            for view in (out, input, residual):
                assert_guards(view)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*((3, d) for d in WIDTHS), (1, 4096), (0, 64), (70, 128)])
def test_layernorm(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = rand(*shape, dtype=dtype, device=device)
    gamma, beta = (rand(shape[-1], dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    want = layernorm_reference(x, gamma, beta)
    for impl in impls("layernorm", device):
        with using("layernorm", impl):
            assert_close(fi_core.layernorm(x, gamma, beta), want)
            assert_close(fi_core.layernorm(strided(x, 8), gamma, beta), want)
            assert_close(fi_core.layernorm(strided(x, 1), gamma, beta), want)
            off = torch.cat([gamma[:1], gamma])[1:]  # a misaligned address
            assert_close(fi_core.layernorm(x, off, beta), want)
            for out_dtype in FP8:
                out = guarded(shape, out_dtype, device, row_padding=8)
                assert fi_core.layernorm_quant(out, x, gamma, beta, scalar(0.3, device)) is None
                assert_close(out, want / 0.3)
                assert_guards(out)


@pytest.mark.parametrize("d", [128, 1000, 2880, 4096, 20480, 20481])
def test_layernorm_far_from_zero(d: int, device: str) -> None:
    """mean(x^2) - mean^2 loses the variance here. A constant row has variance 0, so the output is beta."""
    x = rand(3, d, dtype=torch.float32, device=device) + 3000.0
    x[1] = 3000.0
    gamma, beta = (rand(d, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    assert_close(fi_core.layernorm(x, gamma, beta), layernorm_reference(x, gamma, beta), tolerance=(2e-3, 2e-3))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "shape", [(1, 128), (3, 128), (5, 4096), (4, 5120), (2, 16384), (3, 20480), (0, 256), (6, 2688)]
)
def test_block_quant(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    n, d = shape
    x, r = rand(n, d, dtype=dtype, device=device), rand(n, d, dtype=dtype, device=device, seed=2)
    w, total = rand(d, dtype=dtype, device=device, seed=1), x.double() + r.double()
    if n > 1:
        x[1], r[1], total[1] = 0.0, 0.0, 0.0  # all-zero row: the scale has its lower bound
    for impl in impls("rmsnorm_block_quant", device):
        with using("rmsnorm_block_quant", impl):
            out = guarded(shape, torch.float8_e4m3fn, device, row_padding=8)
            block_scale = guarded((d // 128, -(-n // 4) * 4), torch.float32, device)
            normed, input, residual = guarded(shape, dtype, device, row_padding=8), strided(x), strided(r, 16)
            fi_core.fused_add_rmsnorm_fp8_block_quant(out, block_scale, normed, input, residual, w)
            assert_close(residual, total)
            assert_close(normed, rmsnorm_reference(total, w))
            blocks = normed.double().unflatten(-1, (-1, 128))
            scale = blocks.abs().amax(-1).clamp(min=1e-10) / 448
            assert_close(block_scale[:, :n], scale.T, tolerance=(1e-6, 0))
            assert block_scale[:, n:].isnan().all()
            assert_close(out, (blocks / scale[..., None]).flatten(-2))
            assert torch.equal(input, x)
            for view in (out, block_scale, normed, input, residual):
                assert_guards(view)


def test_eps_and_pdl(device: str) -> None:
    x, w = rand(4, 512, dtype=torch.float16, device=device), rand(512, dtype=torch.float16, device=device, seed=1)
    for eps in (1e-6, 0.5):
        assert_close(fi_core.rmsnorm(x, w, eps), rmsnorm_reference(x, w, eps))
        assert_close(fi_core.layernorm(x, w.float(), w.float(), eps), layernorm_reference(x, w, w, eps))
    for pdl in (False, True, None):
        assert_close(fi_core.rmsnorm(x, w, enable_pdl=pdl), rmsnorm_reference(x, w))


@pytest.mark.parametrize("d", [128, 512, 4096, 8192, 20480])
def test_rows_do_not_depend_on_the_batch(d: int, device: str) -> None:
    x, w = rand(301, d, dtype=torch.bfloat16, device=device), rand(d, dtype=torch.bfloat16, device=device, seed=1)
    assert torch.equal(fi_core.rmsnorm(x[5:6], w), fi_core.rmsnorm(x, w)[5:6])
    assert torch.equal(fi_core.layernorm(x[5:6], w.float(), w.float()), fi_core.layernorm(x, w.float(), w.float())[5:6])
    many, one = (x.clone(), x.clone()), (x[5:6].clone(), x[5:6].clone())
    for tensors in (many, one):
        fi_core.fused_add_rmsnorm(*tensors, w)
    assert all(torch.equal(a[5:6], b) for a, b in zip(many, one))


def test_float_scale_warns(device: str) -> None:
    x, w = rand(2, 64, dtype=torch.float16, device=device), torch.ones(64, dtype=torch.float16, device=device)
    out = torch.empty(2, 64, dtype=torch.float8_e4m3fn, device=device)
    with pytest.warns(FutureWarning, match="scale: .* pass a float32 tensor") as caught:
        fi_core.rmsnorm_quant(out, x, w, 0.5)
    assert caught[0].filename == __file__
    assert_close(out, rmsnorm_reference(x, w) / 0.5)


HALF = torch.ones(2, 64, dtype=torch.float16)
E4M3 = torch.ones(2, 64).to(torch.float8_e4m3fn)
WEIGHT, WIDE = torch.ones(64, dtype=torch.float16), torch.ones(2, 256, dtype=torch.float16)
GOOD: dict[str, dict[str, Any]] = {
    "rmsnorm": {"input": HALF, "weight": WEIGHT},
    "fused_add_rmsnorm": {"input": HALF, "residual": HALF, "weight": WEIGHT},
    "rmsnorm_quant": {"out": E4M3, "input": HALF, "weight": WEIGHT, "scale": torch.ones(1)},
    "layernorm": {"input": HALF, "gemma": torch.ones(64), "beta": torch.ones(64)},
    "fused_add_rmsnorm_fp8_block_quant": {
        "out": WIDE.to(torch.float8_e4m3fn),
        "block_scale": torch.ones(2, 4),
        "normed_out": WIDE,
        "input": WIDE,
        "residual": WIDE.clone(),
        "weight": torch.ones(256, dtype=torch.float16),
    },
}


@pytest.mark.parametrize(
    ("function", "change", "error", "words"),
    [
        ("rmsnorm", {"weight": torch.ones(5).half()}, ValueError, "weight must have shape .* got .5"),
        ("rmsnorm", {"weight": torch.ones(64)}, TypeError, "weight must have the dtype of input, float16; got float32"),
        ("rmsnorm", {"input": WEIGHT}, ValueError, "input must have shape"),
        ("rmsnorm", {"input": HALF[None, None]}, ValueError, "input must have shape"),
        ("rmsnorm", {"input": HALF.int()}, ValueError, "requires dtype in"),
        ("rmsnorm", {"input": torch.ones(64, 64).half().t()}, ValueError, "input must be contiguous in its last"),
        ("rmsnorm", {"out": torch.ones(2, 65).half()}, ValueError, "out must have shape"),
        ("rmsnorm", {"out": torch.ones(2, 64)}, TypeError, "out must have the dtype of input"),
        ("rmsnorm", {"out": E4M3}, TypeError, "scale must be a float32 tensor with one element .* got None"),
        (
            "fused_add_rmsnorm",
            {"residual": HALF[:1].clone()},
            ValueError,
            "residual must have shape .* n = 2.* got .1, 64",
        ),
        ("fused_add_rmsnorm", {"residual": HALF.float()}, TypeError, "residual must have the dtype of input"),
        ("fused_add_rmsnorm", {"input": HALF.clone()[:, None]}, ValueError, r"input must have shape \[n, d\] when"),
        ("rmsnorm_quant", {"scale": torch.ones(2)}, ValueError, r"scale must have shape \[\] or \[1\]; got \[2\]"),
        ("rmsnorm_quant", {"scale": torch.ones(1, 1)}, ValueError, r"scale must have shape \[\] or \[1\]; got"),
        ("rmsnorm_quant", {"scale": WEIGHT[:1]}, TypeError, "scale must be float32; got float16"),
        ("rmsnorm_quant", {"scale": None}, TypeError, "scale must be a torch.Tensor or a number; got None"),
        ("rmsnorm_quant", {"out": E4M3[:1]}, ValueError, "out must have shape"),
        (
            "rmsnorm_quant",
            {"out": HALF.clone()},
            TypeError,
            "out must be float8_e4m3fn or float8_e5m2 with a scale; got float16",
        ),
        ("layernorm", {"gemma": WEIGHT}, TypeError, "gemma must be float32; got float16"),
        ("layernorm", {"beta": torch.ones(63)}, ValueError, "beta must have shape .* got .63"),
        ("layernorm", {"input": HALF[:, None]}, ValueError, r"input must have shape \[n, d\]"),
        ("fused_add_rmsnorm_fp8_block_quant", {"input": HALF}, ValueError, "a multiple of 128 .* got .2, 64"),
        (
            "fused_add_rmsnorm_fp8_block_quant",
            {"block_scale": torch.ones(2, 2)},
            ValueError,
            "n rounded up .* got .2, 2",
        ),
        (
            "fused_add_rmsnorm_fp8_block_quant",
            {"residual": strided(WIDE, 1)},
            ValueError,
            "residual must .* of 16 bytes",
        ),
        (
            "fused_add_rmsnorm_fp8_block_quant",
            {"out": WIDE.clone()},
            TypeError,
            "out must be float8_e4m3fn; got float16",
        ),
    ],
)
def test_rejects(function: str, change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        getattr(fi_core, function)(**(GOOD[function] | change))


@pytest.mark.parametrize("function", GOOD)
def test_rejected_calls_work_without_the_change(function: str) -> None:
    getattr(fi_core, function)(**{k: v.clone() for k, v in GOOD[function].items()})


def names(function: Callable[..., Any], **arguments: torch.Tensor) -> str:
    definition = function.fi_trace(**arguments)  # type: ignore[attr-defined]
    assert "unknown" not in {entry["dtype"] for entry in definition["outputs"].values()}
    return str(definition["name"])


def test_traces() -> None:
    assert names(fi_core.rmsnorm, **GOOD["rmsnorm"]) == "rmsnorm_h64"
    assert names(fi_core.gemma_rmsnorm, input=HALF[:, None], weight=WEIGHT) == "gemma_rmsnorm_n1_h64"
    assert names(fi_core.fused_add_rmsnorm, **GOOD["fused_add_rmsnorm"]) == "fused_add_rmsnorm_h64"
    assert names(fi_core.rmsnorm_quant, **GOOD["rmsnorm_quant"]) == "rmsnorm_quant_h64"
    assert names(fi_core.layernorm, **GOOD["layernorm"]) == "layernorm_h64"
    block_quant = fi_core.fused_add_rmsnorm_fp8_block_quant
    assert names(block_quant, **GOOD[block_quant.__name__]) == "fused_add_rmsnorm_fp8_block_quant_h256"


def test_compiled_in_place(device: str) -> None:
    """torch.compile keeps the operator, and its in-place writes to arguments."""
    x, r = rand(3, 64, dtype=torch.float32, device=device), rand(3, 64, dtype=torch.float32, device=device, seed=2)
    w, total = torch.ones(64, device=device), x + r

    def layer(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        fi_core.fused_add_rmsnorm(x, r, w)
        return fi_core.layernorm(x * 2, w, w)

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, r)
    assert_close(r, total)
    assert_close(x, rmsnorm_reference(total, w))
    assert_close(got, layernorm_reference(rmsnorm_reference(total, w) * 2, w, w))


def test_the_residual_is_another_tensor_than_the_input() -> None:
    """Both are written: the sum would be of the input with itself."""
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match="input and residual are written, so they must not share memory"):
        fi_core.fused_add_rmsnorm(x, x, torch.ones(64))
    with pytest.raises(ValueError, match="eps must be 0 or more; got -1"):
        fi_core.rmsnorm(x, torch.ones(64), eps=-1.0)
