"""The contract of attention calls in all families: layouts, data types, scales, paged caches and their checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from numbers import Real
from typing import Any, TypeAlias

from fi_core.observe.subject import blamed
from fi_core.runtime.errors import UnknownWordError, unsupported
from fi_core.runtime.lazy import torch
from fi_core.runtime.tensors import unreadable
from fi_core.utils import (
    PosEncodingMode,
    TensorLayout,
    _unpack_paged_kv_cache,
    canonicalize_torch_dtype,
    check_shape_dtype_device,
)

Cache: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"  # keys and values, in one tensor or apart
Scale: TypeAlias = "float | torch.Tensor"
LAYOUTS = {name: layout.value for name, layout in TensorLayout.__members__.items()}
POS_ENCODINGS = {name: mode.value for name, mode in PosEncodingMode.__members__.items()}


def code(codes: dict[str, int], name: str, argument: str) -> int:
    found = codes.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnknownWordError(f"{argument}: allowed are {', '.join(codes)}; got {name!r}")
    return found


def check_backend(backend: str, known: Collection[str], foreign: Collection[str]) -> None:
    if backend in foreign:
        raise NotImplementedError(f"backend: {backend!r} names kernels of another library; here are {', '.join(known)}")
    if backend not in known:
        raise ValueError(f"backend: allowed are {', '.join(known)}; got {backend!r}")


_MOST_HEADS = 1 << 16  # times requests, a schedule counts tiles in 32 bits


def check_shape(num_qo_heads: int, num_kv_heads: int, page_size: int, **head_dims: int) -> None:
    try:
        if not 1 <= num_kv_heads <= num_qo_heads <= _MOST_HEADS or num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads: a positive multiple of num_kv_heads ({num_kv_heads}), at most {_MOST_HEADS}, is "
                f"required; got {num_qo_heads}"
            )
        for name, head_dim in head_dims.items():
            if head_dim < 8 or head_dim > 512 or head_dim % 8:
                raise ValueError(f"Unsupported head_dim: {name} must be a multiple of 8 up to 512; got {head_dim}")
        if page_size < 1:
            raise ValueError(f"page_size: at least 1 is required; got {page_size}")
    except TypeError:  # of a comparison
        given = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "page_size": page_size, **head_dims}
        name, value = next((name, value) for name, value in given.items() if not isinstance(value, int))
        raise TypeError(f"{name}: an integer is required; got {value!r}") from None


def number(value: float, argument: str) -> float:
    """The value, if it is a real number. Raises TypeError."""
    if isinstance(value, (float, Real)):  # the class first: an abstract one costs three times as much
        return value
    raise TypeError(f"{argument}: a number is required; got {type(value).__name__}")


def encoding(pos_encoding_mode: str) -> int:
    """The value of an encoding's name. Raises KeyError."""
    return code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")


SCORES = ("pos_encoding_mode", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")  # options of the wrappers


def score_fields(pos_encoding_mode: str, *values: float | None) -> dict[str, Any]:
    """The fields of a plan for the options SCORES. Raises KeyError and TypeError."""
    usual = {"soft_cap": 0.0, "sm_scale": None, "rope_scale": 1.0, "rope_theta": 1e4}
    given = zip(usual.items(), SCORES[1:], values)
    found = {field: default if x is None else number(x, name) for (field, default), name, x in given}
    return {"pos_encoding": encoding(pos_encoding_mode), **found}


def check_workspace(buffer: torch.Tensor, name: str, contiguous: bool = True) -> None:
    """Raises ValueError unless the bytes of a workspace may be used for anything."""
    form = "nested" if buffer.is_nested else "conjugate" if buffer.is_conj() else "negated" if buffer.is_neg() else ""
    if form or str(buffer.layout) != "torch.strided" or buffer.is_quantized or not buffer.ndim:
        raise ValueError(
            f"{name}: a dense tensor of plain numbers is required, with a dimension; got "
            f"{form or buffer.layout}, {buffer.dtype}, {buffer.ndim} dimensions"
        )
    if buffer.data_ptr() % 16:
        raise ValueError(f"{name}: must be 16-byte aligned; got address {buffer.data_ptr():#x}")
    if contiguous and not buffer.is_contiguous():
        raise ValueError(f"{name}: a contiguous tensor is required; got strides {buffer.stride()}")


def check_graph_buffer(buffer: torch.Tensor, name: str) -> None:
    """Raises ValueError or TypeError unless a plan can copy a table into the buffer, for a CUDA graph to read."""
    if not hasattr(buffer, "layout"):
        raise ValueError(f"{name}: a tensor is required with use_cuda_graph; got {buffer!r}")
    problem = unreadable(buffer)
    if not problem and (buffer.ndim != 1 or not buffer.is_contiguous()):
        problem = f"got shape {tuple(buffer.shape)} with strides {buffer.stride()}"
    if problem:
        raise ValueError(f"{name}: a contiguous tensor with data and one dimension is required; {problem}")
    if buffer.dtype is not torch.int32:
        raise TypeError(f"{name}: int32 is required, which graphs read; got {buffer.dtype}")


def dtype_of(dtype: torch.dtype | str, argument: str) -> torch.dtype:
    """The dtype that an argument names. Raises the error of canonicalize_torch_dtype, about the argument."""
    try:
        return canonicalize_torch_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {str(error).partition(': ')[2]}") from None


def type_fields(q: Any, kv: Any, o: Any, both: Any = None) -> dict[str, torch.dtype]:
    """The dtypes as fields of a plan. data_type (`both`) fills q and kv where they are None. Then q defaults to
    float16, kv and o to q. A kv of uint8 is NVFP4.
    """
    if both is not None:
        q = both if q is None else q
        kv = both if kv is None else kv
    q = dtype_of("float16" if q is None else q, "q_data_type")
    kv = q if kv is None else dtype_of(kv, "kv_data_type")
    o = q if o is None else dtype_of(o, "o_data_type")
    if not o.is_floating_point:
        raise TypeError(f"o_data_type: a float dtype is required; got {o}")
    return {"q_dtype": q, "kv_dtype": kv, "o_dtype": o}


def unpack(cache: Cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V caches with four axes. The usual forms are tested first, because every call passes here."""
    try:
        if type(cache) is tuple and len(cache) == 2 and cache[0].ndim == 4 and cache[1].ndim == 4:
            return cache
        shape: Any = getattr(cache, "shape", ())
        if len(shape) == 5 and shape[1] == 2:
            return cache.unbind(1)  # type: ignore[return-value, union-attr]
        return _unpack_paged_kv_cache(cache, kv_layout)
    except Exception as error:
        raise blamed(error, "paged_kv_cache", cache) from None


def cache_pair(kv_cache: Cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`unpack`, where dim 1 of a single tensor may also be 1: the keys are the values too."""
    if getattr(kv_cache, "ndim", 0) == 5 and kv_cache.shape[1] == 1:  # type: ignore[union-attr]
        return kv_cache[:, 0], kv_cache[:, 0]  # type: ignore[call-overload]
    return unpack(kv_cache, kv_layout)


def flag(name: str, value: Any) -> bool:
    """The truth of a flag; raises TypeError if it has none, as a tensor of several elements."""
    if value is False or value is True:
        return value
    try:
        return bool(value)
    except (RuntimeError, ValueError):
        raise TypeError(f"{name}: a bool is required; got a {type(value).__name__}") from None


def per_head(args: tuple[Any, ...]) -> tuple[float, float, tuple[Any, Any, Any]]:
    """scale_q, scale_k, scale_v from the positional arguments of run: (number for scores, for the output, tensors)."""
    if len(args) > 3:
        raise TypeError(f"run: scale_q, scale_k and scale_v may follow by position; got {len(args)} arguments")
    numbers = [1.0, 1.0, 1.0]
    tensors: list[Any] = [None, None, None]
    for i, scale in enumerate(args):
        if isinstance(scale, (int, float)):
            numbers[i] = scale
        else:
            tensors[i] = scale
    return numbers[0] * numbers[1], numbers[2], (tensors[0], tensors[1], tensors[2])


def log_base(lse_base: str) -> float:
    """The factor that converts a base-2 logarithm."""
    if lse_base == "log2":
        return 1.0
    if lse_base == "ln":
        return 0.6931471805599453
    raise ValueError(f'lse_base: "log2" or "ln" is required; got {lse_base!r}')


def last_value(indptr: torch.Tensor, name: str) -> int | None:
    """`indptr[-1]` if it is on the host; reading it from the device would synchronise. Raises ValueError."""
    try:
        return int(indptr[-1].item()) if indptr.is_cpu and indptr.numel() else None
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError):
        raise ValueError(
            f"{name}: [batch_size + 1] integers are required; got shape {tuple(indptr.shape)} of {indptr.dtype}"
        ) from None


def kv_lens(indptr: torch.Tensor, last_page_len: torch.Tensor | int, page_size: int) -> torch.Tensor:
    """The kv_len of each request by its pages, on the device of the tables."""
    pages = indptr.diff()
    return ((pages - 1) * page_size + last_page_len) * (pages > 0)


def lengths_of(indptr: Any, last_page_len: Any, seq_lens: Any, page_size: int, device: Any = "cpu") -> torch.Tensor:
    """The kv_len of each request, on a device; without last_page_len all pages are full."""
    bounds = indptr.to(device).long()
    if seq_lens is not None:
        return seq_lens.to(device).flatten().long().minimum(bounds.diff() * page_size)  # type: ignore[no-any-return]
    return kv_lens(bounds, page_size if last_page_len is None else last_page_len.to(device), page_size)


def check_length(last: int | None, indices: torch.Tensor, name: str) -> None:
    """Raises ValueError for a table that is no list, or shorter than its offsets, whose `last` is known, require."""
    if indices.ndim != 1 or (indices.stride(0) != 1 and indices.numel() > 1):
        got = f"shape {tuple(indices.shape)} with strides {indices.stride()}: call .contiguous()"
        raise ValueError(f"{name}: one contiguous dimension is required; got {got}")
    if last is not None and last > indices.numel():
        raise ValueError(f"{name}: {last} are required, where the last request ends; got {indices.numel()}")


def scale_product(number: float, *scales: Any) -> tuple[float, torch.Tensor | None]:
    """The product of numbers and of one-element tensors: (product of the numbers, product of the tensors or None).

    Raises:
        TypeError: tensors that torch does not multiply.
    """
    tensor: Any = None
    for scale in scales:
        if scale is None:
            continue
        if isinstance(scale, (int, float)) or (not hasattr(scale, "layout") and isinstance(scale, Real)):
            number *= float(scale)
        elif tensor is None:
            tensor = scale
        else:
            try:
                tensor = tensor * scale
            except (RuntimeError, TypeError) as error:  # of torch or Python, without names
                raise TypeError(f"q_scale, k_scale, kv_scale: numbers or float tensors are required; {error}") from None
    return number, tensor


def op_scales(scores: Sequence[Any], output: Sequence[Any], of_cache: tuple[Any, Any] = (None, None)) -> dict[str, Any]:
    """The scales of a call as arguments of the ops of batches.

    scores, output: the factors of both, a number and others; of_cache: the scales of NVFP4 keys and values.
    """
    (sm_scale, bmm1_scale), (out_scale, bmm2_scale) = scale_product(*scores), scale_product(*output)
    found = {"sm_scale": sm_scale, "bmm1_scale": bmm1_scale, "out_scale": out_scale, "bmm2_scale": bmm2_scale}
    return found if of_cache[0] is None else {**found, "k_scales": of_cache[0], "v_scales": of_cache[1]}


def bmm_scales(bmm1: Any, bmm2: Any, of_cache: tuple[Any, Any] = (None, None), factor: float = 1.0) -> dict[str, Any]:
    """`op_scales` of bmm1_scale, times a factor, and bmm2_scale. Raises TypeError for None, which means no default."""
    if bmm1 is None or bmm2 is None:
        name = "bmm1_scale" if bmm1 is None else "bmm2_scale"
        raise TypeError(f"{name}: a number or a fp32 tensor of one element is required; got None")
    return op_scales((factor, bmm1), (1.0, bmm2), of_cache)


def kv_type(dtype: torch.dtype) -> Any:
    """The dtype of keys and values as a field of a request: bytes hold NVFP4."""
    return "e2m1" if dtype is torch.uint8 else dtype


def row_elements(x: torch.Tensor) -> int:
    """Elements of a row of keys or values: NVFP4 has two in a byte."""
    return 2 * x.shape[-1] if x.dtype is torch.uint8 else x.shape[-1]


def scales_of(kv_cache_sf: Any, kv_layout: str, paged: bool = True) -> tuple[Any, Any]:
    """The scales of NVFP4 keys and of values, of caches in the same form; (None, None) for None."""
    if kv_cache_sf is None:
        return None, None
    if paged and isinstance(kv_cache_sf, (tuple, torch.Tensor)):
        return cache_pair(kv_cache_sf, kv_layout)
    if not isinstance(kv_cache_sf, tuple) or len(kv_cache_sf) != 2:
        raise TypeError(
            f"kv_cache_sf: a tuple (scales of k, scales of v) is required; got a {type(kv_cache_sf).__name__}"
        )
    return kv_cache_sf


def check_nvfp4(kv_cache_sf: Any, keys: torch.Tensor, name: str) -> None:
    """Raises ValueError where scales are missing or do not belong to the type of the keys, which are called `name`."""
    nvfp4 = keys.dtype is torch.uint8
    if nvfp4 and kv_cache_sf is None:
        raise ValueError(f"kv_cache_sf: the scales of {name} are required, since uint8 is NVFP4; got None")
    if not nvfp4 and kv_cache_sf is not None:
        raise ValueError(f"kv_cache_sf: {name} of uint8, which is NVFP4, is required with it; got {keys.dtype}")


def refuse_nvfp4(out: Any, out_dtype: Any, o_sf_scale: Any, o_sf_vec_size: Any) -> None:
    """Raises NotImplementedError where the output of a call is NVFP4."""
    dtype = "nvfp4" if getattr(out, "dtype", None) == "nvfp4" else out_dtype
    for name, came, asked in (
        ("out_dtype", dtype, dtype == "nvfp4"),
        ("o_sf_vec_size", o_sf_vec_size, o_sf_vec_size is not None),
        ("o_sf_scale", o_sf_scale, o_sf_scale is not None),
    ):
        if asked:
            raise unsupported(name, came, "NVFP4 output must be quantized afterwards: take a 16-bit out_dtype")


def flat_tables(block_tables: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A block table as a flat list of page ids, and the distance of its rows. Raises ValueError."""
    if block_tables.ndim != 2 or block_tables.stride(1) != 1:
        raise ValueError(
            "block_tables: [batch_size, max_pages], contiguous in the last dimension, is required; got shape "
            f"{tuple(block_tables.shape)} with strides {block_tables.stride()}"
        )
    batch_size, most = block_tables.shape
    if block_tables.is_contiguous():
        return block_tables, most
    pitch = block_tables.stride(0)  # columns of a wider table
    if pitch < most:  # rows that share their entries
        return block_tables.contiguous(), most
    return block_tables.as_strided(((batch_size - 1) * pitch + most,), (1,)), pitch


def page_tables(block_tables: torch.Tensor, shared: bool) -> tuple[torch.Tensor, int, int]:
    """`flat_tables`, and the v_table_offset of the ops: from the entry of a page of K to that of its page of V.

    shared: K and V have one table `[batch_size, max_pages]`; else `[batch_size, 2, max_pages]` has both. Raises
    ValueError.
    """
    if shared and block_tables.ndim != 3:
        return (*flat_tables(block_tables), 0)
    if shared or block_tables.ndim != 3 or block_tables.shape[1] != 2:
        raise ValueError(
            "block_tables: [batch_size, max_pages] is required, or [batch_size, 2, max_pages] with "
            f"uses_shared_paged_kv_idx=False; got shape {tuple(block_tables.shape)} with "
            f"uses_shared_paged_kv_idx={shared}"
        )
    batch_size, _, most = block_tables.shape
    pitch, offset, step = block_tables.stride()
    if step != 1 or (pitch < most and batch_size > 1):
        block_tables = block_tables.contiguous()
        pitch, offset = 2 * most, most
    end = max(batch_size - 1, 0) * pitch + offset + most
    return block_tables.as_strided((end if batch_size else 0,), (1,)), pitch, offset if batch_size else 0


def results(
    q: torch.Tensor,
    shape: Sequence[int],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    out_dtype: torch.dtype | str | None = None,
    lse_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) that a call writes: checked where they are given, else new; lse is None if nobody asks for it.

    out_dtype: of out; None: any given one, and q's of a new one. lse_shape: default `shape[:-1]`.
    """
    dtype = None if out_dtype is None else canonicalize_torch_dtype(out_dtype)
    if out is None:
        out = q.new_empty(shape, dtype=dtype or q.dtype)
    else:
        check_shape_dtype_device(out, shape, dtype, q.device, "out")
    lse_shape = shape[:-1] if lse_shape is None else lse_shape
    if lse is not None:
        check_shape_dtype_device(lse, lse_shape, torch.float32, q.device, "lse")
    elif return_lse:
        lse = q.new_empty(lse_shape, dtype=torch.float32)
    return out, lse


class computed:
    """A property that an assignment overrides: engines that plan by themselves assign the attributes of a plan."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.function(instance)
