"""rmsnorm and its relatives against fp64, on every device and implementation."""

from __future__ import annotations

import pytest
import torch
from families.harness import assert_close, assert_guards, guarded, impls, rand, strided, using

import fi_core

HALVES = (torch.float16, torch.bfloat16)


def rmsnorm_reference(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6, bias: float = 0.0) -> torch.Tensor:
    x, w = x.double(), w.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (w + bias)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("shape", [(1, 4096), (3, 128), (7, 111), (2, 500), (5, 8192), (2, 20480), (4, 3, 128), (0, 64)])
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
            assert_close(fi_core.rmsnorm(strided(x, 1), w), want)  # rows no vector load may touch


def test_rmsnorm_in_place_and_bad_rows(device: str) -> None:
    """A NaN or inf row spoils itself only; out may be the input."""
    x, w = rand(6, 256, dtype=torch.bfloat16, device=device), rand(256, dtype=torch.bfloat16, device=device, seed=1)
    x[1, 3], x[3, 7], x[4] = float("nan"), float("inf"), 0.0
    want = rmsnorm_reference(x, w)
    want[3] = torch.where(x[3].isinf(), torch.nan, 0.0).double()  # inf * rsqrt(inf), finite * rsqrt(inf)
    fi_core.rmsnorm(x, w, out=x)
    assert_close(x, want)


def test_rmsnorm_parameters_matter(device: str) -> None:
    x, w = rand(4, 512, dtype=torch.float16, device=device), rand(512, dtype=torch.float16, device=device, seed=1)
    for eps in (1e-6, 0.5):
        assert_close(fi_core.rmsnorm(x, w, eps), rmsnorm_reference(x, w, eps))
    for pdl in (False, True, None):
        assert_close(fi_core.rmsnorm(x, w, enable_pdl=pdl), rmsnorm_reference(x, w))


def test_rmsnorm_rows_do_not_depend_on_the_batch(device: str) -> None:
    x, w = rand(33, 4096, dtype=torch.bfloat16, device=device), rand(4096, dtype=torch.bfloat16, device=device, seed=1)
    assert torch.equal(fi_core.rmsnorm(x[5:6], w), fi_core.rmsnorm(x, w)[5:6])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.ones(5, dtype=torch.float16)}, ValueError, "weight must have shape .* got .5"),
        ({"weight": torch.ones(64)}, TypeError, "weight must have the dtype of input, float16; got float32"),
        ({"input": torch.ones(64, dtype=torch.float16)}, ValueError, "input must have shape"),
        ({"input": torch.ones(2, 64, dtype=torch.int32)}, ValueError, "requires dtype in"),
        ({"input": torch.ones(64, 64, dtype=torch.float16).t()}, ValueError, "input must be contiguous in its last"),
        ({"out": torch.ones(2, 65, dtype=torch.float16)}, ValueError, "out must have shape"),
        ({"out": torch.ones(2, 64)}, TypeError, "out must have the dtype of input"),
    ],
)
def test_rmsnorm_refuses(change: dict[str, torch.Tensor], error: type[Exception], words: str) -> None:
    good = {"input": torch.ones(2, 64, dtype=torch.float16), "weight": torch.ones(64, dtype=torch.float16)}
    with pytest.raises(error, match=words):
        fi_core.rmsnorm(**(good | change))
