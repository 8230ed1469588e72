"""Helpers that operator families and serving engines share: devices, dtypes, layouts, rounding, argument checks."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from fi_core.compat.backend import (
    backend_requirement,
    capability_if_any,
    cuda_index,
    experimental_backend,
    fi_experimental_api,
    get_compute_capability,
    supported_compute_capability,
)
from fi_core.compat.fp4 import (
    FP4Tensor,
    get_shuffle_block_size,
    get_shuffle_matrix_a_row_indices,
    get_shuffle_matrix_sf_a_row_indices,
)
from fi_core.runtime import errors
from fi_core.runtime.errors import BackendSupportedError, ExperimentalWarning, GPUArchitectureError, LibraryError
from fi_core.runtime.resolve.checks import checks_contents

if TYPE_CHECKING:
    import torch

__all__ = [
    "BackendSupportedError",
    "ExperimentalWarning",
    "FP4Tensor",
    "GPUArchitectureError",
    "LibraryError",
    "MaskMode",
    "PosEncodingMode",
    "TensorLayout",
    "backend_requirement",
    "canonicalize_torch_dtype",
    "ceil_div",
    "check_shape_dtype_device",
    "determine_attention_backend",
    "device_support_pdl",
    "experimental_backend",
    "fi_experimental_api",
    "get_alibi_slopes",
    "get_compute_capability",
    "get_default_generators",
    "get_device_sm_count",
    "get_shuffle_block_size",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
    "is_fa3_backend_supported",
    "is_float8",
    "is_graph_capturing",
    "is_sm100a_supported",
    "is_sm100f_supported",
    "is_sm110a_supported",
    "is_sm120a_supported",
    "is_sm120f_supported",
    "is_sm121a_supported",
    "is_sm12x_supported",
    "is_sm90a_supported",
    "last_positive_power_of_2",
    "next_positive_power_of_2",
    "round_up",
    "set_log_level",
    "supported_compute_capability",
    "version_at_least",
]


class TensorLayout(Enum):
    """The order of the token and head axes of K and V. Callers pass the name as `kv_layout`."""

    NHD = 0
    HND = 1


class MaskMode(Enum):
    """The attention mask, with FlashInfer's codes."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class PosEncodingMode(Enum):
    """The position encoding that attention applies, with FlashInfer's codes."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


# Arithmetic


def ceil_div(x: int, y: int) -> int:
    """Returns x / y, rounded up."""
    return (x + y - 1) // y


def round_up(x: int, y: int) -> int:
    """Returns the smallest multiple of y that is >= x."""
    return ceil_div(x, y) * y


def next_positive_power_of_2(x: int) -> int:
    """Returns the smallest power of two >= x; 1 for x < 1."""
    return 1 if x < 1 else 1 << (x - 1).bit_length()


def last_positive_power_of_2(x: int) -> int:
    """Returns the largest power of two <= x; 1 for x < 1."""
    return 1 if x < 1 else 1 << (x.bit_length() - 1)


def version_at_least(version: str, base_version: str) -> bool:
    """Returns whether the numeric release of `version` is at least that of `base_version`; "13.0" equals "13.0.0".

    Raises:
        ValueError: A version does not start with digits.
    """

    def release(text: str) -> list[int]:
        match = re.match(r"\d+(\.\d+)*", text)
        if match is None:
            raise ValueError(f"version: must start with digits, got {text!r}")
        return [int(part) for part in match[0].split(".")]

    mine, other = release(version), release(base_version)
    width = max(len(mine), len(other))
    return mine + [0] * (width - len(mine)) >= other + [0] * (width - len(other))


# Devices


@functools.cache
def sm_count_of(index: int) -> int:
    import torch

    return torch.cuda.get_device_properties(index).multi_processor_count


def get_device_sm_count(device: torch.device) -> int:
    """Returns the number of SMs of a CUDA device."""
    return sm_count_of(cuda_index(device, "get_device_sm_count"))


def _has(device: torch.device | str, major: int, cuda: str, minor: int | None = None) -> bool:
    import torch

    here, toolkit = capability_if_any(device), torch.version.cuda
    fits = here[0] == major and minor in (None, here[1])
    return fits and toolkit is not None and version_at_least(toolkit, cuda)


def is_sm90a_supported(device: torch.device | str = "cuda") -> bool:
    """Returns whether the device is sm_90 and torch's CUDA toolkit is 12.3 or later; False without a GPU."""
    return _has(device, 9, "12.3")


def is_sm100a_supported(device: torch.device | str = "cuda") -> bool:
    """Returns whether the device is sm_10x and torch's CUDA toolkit is 12.8 or later; False without a GPU."""
    return _has(device, 10, "12.8")


def is_sm100f_supported(device: torch.device | str = "cuda") -> bool:
    """Returns whether the device is sm_10x and torch's CUDA toolkit is 12.9 or later; False without a GPU."""
    return _has(device, 10, "12.9")


def is_sm110a_supported(device: torch.device | str = "cuda") -> bool:
    """Returns whether the device is sm_11x and torch's CUDA toolkit is 13.0 or later; False without a GPU."""
    return _has(device, 11, "13.0")


def is_sm120a_supported(device: torch.device | str = "cuda") -> bool:
    """Returns whether the device is sm_120 and torch's CUDA toolkit is 12.8 or later; False without a GPU."""
    return _has(device, 12, "12.8", minor=0)


def is_sm120f_supported(device: torch.device | str = "cuda") -> bool:
    """Returns whether the device is sm_12x and torch's CUDA toolkit is 12.9 or later; False without a GPU."""
    return _has(device, 12, "12.9")


def is_sm121a_supported(device: torch.device | str = "cuda") -> bool:
    """Returns whether the device is sm_121 and torch's CUDA toolkit is 12.9 or later; False without a GPU."""
    return _has(device, 12, "12.9", minor=1)


def is_sm12x_supported(device: torch.device | str = "cuda") -> bool:
    """Returns whether torch's CUDA toolkit supports this sm_12x device: 12.8 for sm_120, 12.9 for the others."""
    return is_sm120a_supported(device) or is_sm120f_supported(device)


def device_support_pdl(device: torch.device) -> bool:
    """Returns whether the device supports programmatic dependent launch (CUDA, sm_90 and later)."""
    import torch

    return torch.device(device).type == "cuda" and capability_if_any(device)[0] >= 9


def is_graph_capturing() -> bool:
    """Returns whether the current CUDA stream captures a graph; a call must not synchronize with the host then."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def get_default_generators(device: torch.device) -> torch.Generator:
    """Returns torch's default random generator of a device."""
    import torch

    if torch.device(device).type == "cpu":
        return torch.default_generator
    index = cuda_index(device, "get_default_generators")
    torch.cuda.init()  # the tuple of generators is empty before init
    return torch.cuda.default_generators[index]


def set_log_level(lvl_str: str) -> None:
    """Sets the level of the build logger.

    Args:
        lvl_str: "debug", "info", "warning", "error" or "critical".

    Raises:
        ValueError: lvl_str is another word.
    """
    level = logging.getLevelName(lvl_str.upper())
    if not isinstance(level, int):
        raise ValueError(f"lvl_str: must be debug, info, warning, error or critical; got {lvl_str!r}")
    log = logging.getLogger("fi_core.jit")
    streams = [handler for handler in log.handlers if type(handler) is logging.StreamHandler]  # not the log file
    for stream in streams:
        stream.setLevel(level)
    if not streams:  # the setup of the build logger reads this level
        log.setLevel(level)


# Tensors and dtypes


def canonicalize_torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a torch dtype, given the dtype or its name, such as "float16".

    Raises:
        ValueError: The name is not a torch dtype.
        TypeError: dtype is neither a str nor a torch dtype.
    """
    import torch

    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype: must be the name of a torch dtype, got {dtype!r}")
        return found
    if isinstance(dtype, torch.dtype):
        return dtype
    raise TypeError(f"dtype: must be a str or torch.dtype, got {type(dtype).__name__}")


def is_float8(x: torch.Tensor) -> bool:
    """Returns whether x is fp8 (e4m3fn or e5m2)."""
    import torch

    return x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def int32_index(x: torch.Tensor) -> torch.Tensor:
    """Converts an int64 or uint32 index tensor to int32, which kernels read; the op checks any other dtype.

    Where contents are checked, a number beyond int32 becomes the nearest one instead of one that wraps into range.
    """
    import torch

    if x.dtype is torch.int64:
        limits = torch.iinfo(torch.int32)
        return (x.clamp(limits.min, limits.max) if checks_contents(x.device.type) else x).int()
    return x.view(torch.int32) if x.dtype is torch.uint32 else x


def check_shape_dtype_device(
    x: torch.Tensor,
    expected_shape: Sequence[int] | None,
    expected_dtype: torch.dtype | None,
    expected_device: torch.device | None,
    name: str,
) -> None:
    """Checks shape, dtype and device of a tensor.

    Args:
        x: the tensor, which error texts call `name`.
        expected_shape, expected_dtype, expected_device: None skips the check.

    Raises:
        ValueError: x differs from what is expected.
    """
    try:
        shape = tuple(x.shape)
    except (AttributeError, RuntimeError) as error:
        errors.blame(error, **{name: x})
    if expected_shape is not None and shape != tuple(expected_shape):
        raise ValueError(f"{name}: shape must be {tuple(expected_shape)}, got {shape}")
    if expected_dtype is not None and x.dtype != expected_dtype:
        raise ValueError(f"{name}: dtype must be {expected_dtype}, got {x.dtype}")
    if expected_device is not None and x.device != expected_device:
        raise ValueError(f"{name}: device must be {expected_device}, got {x.device}")


def _check_kv_layout(kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):  # not the enum: torch.compile cannot trace its members
        raise errors.UnknownWordError(f"kv_layout: allowed are NHD, HND; got {kv_layout!r}")


def _with_page_axis(x: torch.Tensor, kv_layout: str, ndim: int, name: str) -> torch.Tensor:
    """Returns x with `ndim` axes. One axis fewer means page size 1: an axis of size 1 is inserted."""
    _check_kv_layout(kv_layout)
    if getattr(x, "ndim", None) not in (ndim - 1, ndim):
        try:
            shape = tuple(x.shape)
        except (AttributeError, RuntimeError) as error:
            errors.blame(error, **{name: x})
        raise ValueError(f"{name}: must have {ndim - 1} or {ndim} dimensions, got shape {shape}")
    return x if x.ndim == ndim else x.unsqueeze(-3 if kv_layout == "NHD" else -2)


def _expand_4d(x: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """Returns a K or V cache as [pages, page_size, heads, dim] (NHD) or [pages, heads, page_size, dim] (HND)."""
    return _with_page_axis(x, kv_layout, 4, "paged_kv_cache")


def _expand_5d(x: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """Returns a fused cache as [pages, 2, page_size, heads, dim] (NHD) or [pages, 2, heads, page_size, dim] (HND)."""
    return _with_page_axis(x, kv_layout, 5, "paged_kv_cache")


def _unpack_paged_kv_cache(
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of the K and V caches with four axes, from a fused tensor or a tuple of two."""
    import torch

    if isinstance(paged_kv_cache, tuple) and len(paged_kv_cache) == 2:
        k, v = paged_kv_cache
        return _expand_4d(k, kv_layout), _expand_4d(v, kv_layout)
    if torch.is_tensor(paged_kv_cache):
        both = _expand_5d(paged_kv_cache, kv_layout)
        if both.shape[1] != 2:
            raise ValueError(f"paged_kv_cache: dim 1 must be 2, for K and V; got shape {tuple(paged_kv_cache.shape)}")
        return both.unbind(1)  # type: ignore[return-value]
    got = f"{len(paged_kv_cache)} members" if isinstance(paged_kv_cache, tuple) else type(paged_kv_cache).__name__
    raise errors.UnknownWordError(f"paged_kv_cache: must be a tensor or a tuple (k_cache, v_cache), got {got}")


_cache_buf: dict[tuple[str, Any], torch.Tensor] = {}  # what engines pin: ("range_<size>", device) -> [0, ..., size - 1]
_ceil_pow2 = next_positive_power_of_2  # FlashInfer's name


def _get_range_buf(seq_len: int, device: torch.device | str) -> torch.Tensor:
    """Returns [0, ..., seq_len - 1], int32: a slice of a cached tensor, so the caller must not write it."""
    import torch

    place: Any = device  # as it is given, for the host; engines look up ("range_<size>", "cpu")
    device = torch.device(device)
    if device.type == "cuda":
        place = device = torch.device("cuda", cuda_index(device, "_get_range_buf"))
        if is_graph_capturing():  # a tensor of the capture is filled at replay only, so it must not enter the cache
            return torch.arange(seq_len, dtype=torch.int32, device=device)
    key = f"range_{_ceil_pow2(seq_len)}", place
    found = _cache_buf.get(key)
    if found is None:
        found = _cache_buf[key] = torch.arange(_ceil_pow2(seq_len), dtype=torch.int32, device=device)
    return found[:seq_len]


_constants: dict[Any, torch.Tensor] = {}


def constants(value: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns [value] * count, int32: a slice of a cached device tensor, so no copy from the host; do not write it."""
    import torch

    size = next_positive_power_of_2(count)
    found = _constants.get((value, size, device))
    if found is None:
        found = torch.full((size,), value, dtype=torch.int32, device=device)
        if not is_graph_capturing():  # a tensor of the capture is filled at replay only
            _constants[value, size, device] = found
    return found if size == count else found[:count]


# Attention


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """Returns the bytes of `multi_ctas_kv_counter_buffer`, which engines allocate: 0, because fi needs no counters."""
    return 0


def get_alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Computes the ALiBi slope of each head (arXiv:2108.12409).

    With n the largest power of two <= n_heads, the first n slopes are `2^(-8 k / n)`, k = 1, ..., n. The others are
    every second term of the series of 2 n heads: `2^(-4 (2 k - 1) / n)`.

    Args:
        n_heads: number of heads.
        device: where the result lies; None: the CPU.

    Returns:
        `[n_heads]`, fp32.
    """
    import torch

    n2 = last_positive_power_of_2(n_heads)
    exponents: Iterable[float] = [-8 * k / n2 for k in range(1, n2 + 1)]
    extra = [-4 * (2 * k - 1) / n2 for k in range(1, n_heads - n2 + 1)]
    return torch.tensor([math.pow(2.0, e) for e in [*exponents, *extra]], dtype=torch.float32, device=device)


def is_fa3_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """Returns whether the sm_90 attention kernels support these options. It does not check the device.

    Args:
        pos_encoding_mode: code of `PosEncodingMode`.
        use_fp16_qk_reductions: whether q k^T accumulates in fp16.
        use_custom_mask: whether a custom mask is applied.
        dtype_q: dtype of q.
        dtype_kv: dtype of k and v.
    """
    import torch

    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    if use_custom_mask or use_fp16_qk_reductions or pos_encoding_mode != PosEncodingMode.NONE.value:
        return False
    if dtype_kv == torch.uint8:  # packed NVFP4
        return False
    return dtype_q in fp8 or dtype_kv not in fp8


FA3_HEAD_DIMS = frozenset({(64, 64), (128, 128), (256, 256), (192, 128)})  # (qk, vo)


def determine_attention_backend(
    device: torch.device,
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    *,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
) -> str:
    """Returns the attention backend for a CUDA device: "fa3" (sm_90 kernels) or "fa2" (sm_80 kernels).

    Args:
        device: CUDA device.
        pos_encoding_mode: this and the next four are those of `is_fa3_backend_supported`.
        head_dim_qk: head dimension of q and k; None skips the check of head dimensions.
        head_dim_vo: head dimension of v and the output; None skips the check of head dimensions.
    """
    known: Any = (head_dim_qk, head_dim_vo)
    if (
        is_sm90a_supported(device)
        and is_fa3_backend_supported(pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv)
        and (None in known or known in FA3_HEAD_DIMS)
    ):
        return "fa3"
    return "fa2"
