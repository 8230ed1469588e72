"""Logits of routers: products of 1 to 16 tokens with the weights of some models, by the names of FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fi_core.gemm.backends import takes_backends
from fi_core.gemm.ops import gemm
from fi_core.observe.log import fi_api

if TYPE_CHECKING:
    import torch

_MOST_TOKENS = 16


def _router(k: int, n: int, dtype: str, name: str) -> Callable[..., None]:
    """The function of a name: `[m, k]` by `[k, n]` into out of the dtype."""

    def multiply(mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True) -> None:
        m = mat_a.shape[0]
        for title, x, shape, own in (
            ("mat_a", mat_a, (m, k), "bfloat16"),
            ("mat_b", mat_b, (k, n), "bfloat16"),
            ("out", out, (m, n), dtype),
        ):
            if tuple(x.shape) != shape or str(x.dtype) != f"torch.{own}":
                raise ValueError(f"{title} must be {own} of shape {list(shape)}; got {x.dtype} {list(x.shape)}")
        if not 1 <= m <= _MOST_TOKENS:
            raise ValueError(f"mat_a must have 1 to {_MOST_TOKENS} rows; got {m}: use mm_bf16")
        if mat_b.stride(0) != 1:
            raise ValueError(f"mat_b must be the transposed view of weights [n, k]; got strides {mat_b.stride()}")
        gemm(out, mat_a, mat_b, b_transposed=True, enable_pdl=launch_with_pdl)

    multiply.__name__ = multiply.__qualname__ = name
    multiply.__doc__ = f"""Computes `out = mat_a @ mat_b` in fp32 with one rounding.

    Args:
        mat_a: `[m, {k}]`, bf16, m in 1..{_MOST_TOKENS}.
        mat_b: `[{k}, {n}]`, bf16, the transposed view of weights `[{n}, {k}]`.
        out: `[m, {n}]`, {dtype}.
        launch_with_pdl: programmatic dependent launch, where the hardware has it.

    Raises:
        ValueError: A shape, stride, dtype or device does not fit; the text names the argument.
    """
    return fi_api(takes_backends()(multiply))


mm_M1_16_K6144_N256 = _router(6144, 256, "float32", "mm_M1_16_K6144_N256")
mm_M1_16_K7168_N128 = _router(7168, 128, "bfloat16", "mm_M1_16_K7168_N128")
mm_M1_16_K7168_N256 = _router(7168, 256, "float32", "mm_M1_16_K7168_N256")
mm_M1_16_K7168_N256_bf16 = _router(7168, 256, "bfloat16", "mm_M1_16_K7168_N256_bf16")
mm_M1_16_K7168_N384 = _router(7168, 384, "float32", "mm_M1_16_K7168_N384")
mm_M1_16_K7168_N384_bf16 = _router(7168, 384, "bfloat16", "mm_M1_16_K7168_N384_bf16")
mm_M1_16_K7168_N896 = _router(7168, 896, "float32", "mm_M1_16_K7168_N896")
mm_M1_16_K7168_N896_bf16 = _router(7168, 896, "bfloat16", "mm_M1_16_K7168_N896_bf16")
