"""vLLM's matrix products of few tokens and bf16 weights on fi's kernels, which read the weights once.

vLLM has no seam there, so one function of TARGET is replaced, where its parameters are PARAMETERS: that by which linear
layers without quantization multiply, and the one behind the last layer. More tokens, other dtypes, small matrices and
batch-invariant products stay vLLM's.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

from vllm.platforms import current_platform

from fi_core.autotuner import autotune
from fi_core.gemm import mm_bf16
from fi_core.runtime.lazy import torch

TARGET, NAME = "vllm.model_executor.layers.utils", "default_unquantized_gemm"
PARAMETERS = ("layer", "x", "weight", "bias")
MOST_TOKENS = 64  # up to which fi's products take 0.89 of cuBLAS's time on an H200 (docs/performance/gemm.md)
_FEWEST_VALUES = 1 << 22  # of a matrix; such as 2048 x 2048. Smaller ones were not measured.
_SHORT_K = 512  # up to which another kernel computes more than 16 tokens
_log = logging.getLogger("vllm.plugins.fi_core")
_loaded: set[torch.Size] = set()  # shapes of weights whose kernels are loaded
_libraries: list[Any] = []  # a registration lives as long as its library


def register() -> None:
    """Replaces the function; the log says so if it is not that of a supported vLLM, and stays."""
    module = importlib.import_module(TARGET)
    own = getattr(module, NAME, None)
    if own is product or not is_used():
        return
    if own is None or tuple(inspect.signature(own).parameters) != PARAMETERS:
        _log.info("fi does not replace %s.%s: it is not that of a supported vLLM", TARGET, NAME)
        return
    _define()
    setattr(module, NAME, product)


def is_used() -> bool:
    """Whether fi multiplies: on the GPUs where that was measured."""
    return bool(current_platform.is_cuda() and current_platform.is_device_capability(90))


def product(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[tokens, n]`: x `[tokens, k]` times a weight `[n, k]`, with bias `[n]`."""
    if not fits(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    if torch.compiler.is_compiling():  # for any number of tokens, by an operator that compilers do not look into
        found: torch.Tensor = torch.ops.fi_vllm.product(x, weight, bias)
        return found
    return _product(x, weight, bias)


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether fi multiplies by this weight, where tokens are few."""
    is_bf16 = x.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16
    is_large = weight.ndim == 2 and weight.shape[1] > _SHORT_K and weight.numel() >= _FEWEST_VALUES
    return bool(is_bf16 and is_large and x.ndim == 2)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.shape not in _loaded:
        _load(x, weight, bias)
    if x.shape[0] > MOST_TOKENS:
        return torch.nn.functional.linear(x, weight, bias)
    out: torch.Tensor = mm_bf16(x, weight.t(), bias)
    return out


def _load(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Loads the kernels of a weight for all few tokens, when the engine starts."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    with autotune():
        mm_bf16(x[:1], weight.t(), bias)
    _loaded.add(weight.shape)


def _like(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _define() -> None:
    """Registers `_product` with torch."""
    if _libraries:
        return
    library = torch.library.Library("fi_vllm", "FRAGMENT")
    library.define("product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("product", _product, "CompositeExplicitAutograd")
    torch.library.register_fake("fi_vllm::product", _like, lib=library)
    _libraries.append(library)
