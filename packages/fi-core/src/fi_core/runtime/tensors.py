"""Which tensors a kernel can read, what their numbers and strides permit, and where they lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)
# The object; the address of its first element, and a hash of its integers on the host, 0 where it has none.
Place = tuple[int, int, int]
PLACES = "places_of_tensors"
_MOST_NUMBERS = 1 << 16  # that are compared


def is_special(value: Any) -> bool:
    """Whether only torch's dispatcher knows what a tensor is: a subclass with its own dispatch, or a wrapped tensor.

    A nested tensor is none: no operator takes it.
    """
    import torch

    private: Any = torch  # its stubs leave some names out
    kind: Any = type(value)
    return (
        isinstance(value, torch.Tensor)
        and not value.is_nested
        and (
            kind.__torch_dispatch__ is not private.Tensor.__torch_dispatch__
            or private._C._functorch.is_functorch_wrapped_tensor(value)
            or private._is_functional_tensor(value)
        )
    )


def real_among_fakes(values: Sequence[Any]) -> list[int]:
    """Where the real tensors are that a fake mode, of one of the values or active, would refuse."""
    from torch import Tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, fake_tensor_tls
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None) or _get_current_dispatch_mode()
    allowed = fake_tensor_tls.allow_non_fake_inputs_override
    if not isinstance(mode, FakeTensorMode) or (mode.allow_non_fake_inputs if allowed is None else allowed):
        return []
    return [i for i, value in enumerate(values) if isinstance(value, Tensor) and not is_special(value)]


def unreadable(value: Any) -> str:
    """Why no kernel can read this tensor, and what to do; empty if one can."""
    import torch

    if is_special(value):
        return "got a tensor that only torch's dispatcher can read"
    if not isinstance(value, torch.Tensor):
        return f"got {'None' if value is None else f'a {type(value).__name__}'}: pass a torch.Tensor"
    if value.is_nested:
        return "got a nested tensor: pass its values() and offsets()"
    if value.is_quantized:
        return "got a quantized tensor: pass its dequantize()d values"
    if value.layout is not torch.strided:
        return f"got layout {value.layout}: call to_dense() on it"
    if value.is_meta:
        return "got a meta tensor, which has no data: pass a tensor on a cpu or cuda device"
    if value.is_conj():
        return "got a conjugate view: call resolve_conj() on it"
    if value.is_neg():
        return "got a negative view: call resolve_neg() on it"
    return ""


def integers(name: str, x: Any) -> Any:
    """The tensor. Raises TypeError unless it holds integers, which others would be rounded to."""
    import torch

    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool:
        raise TypeError(f"{name}: integers are required; got {x.dtype}")
    return x


def _place(x: Any) -> Place:
    if unreadable(x):
        return id(x), 0, 0
    kind = x.dtype
    is_compared = x.is_cpu and x.numel() <= _MOST_NUMBERS and not (kind.is_floating_point or kind.is_complex)
    return id(x), x.data_ptr(), hash(tuple(x.flatten().tolist())) if is_compared else 0


def viewed(name: str, x: Any, *shape: int) -> Any:
    """A view of the tensor in another shape. Raises ValueError, naming the argument, if its strides permit none."""
    try:
        return x.view(*shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: strides that permit a view of shape {list(shape)} are required; got shape {list(x.shape)} with "
            f"strides {x.stride()}: call .contiguous()"
        ) from None


def check_writable(name: str, x: Any) -> None:
    """Raises ValueError where elements may share memory: a dimension steps over less than the smaller ones take."""
    taken = 1
    for step, size in sorted((step, size) for size, step in zip(x.shape, x.stride()) if size > 1):
        if step < taken:
            raise ValueError(
                f"{name} is written, so no two of its elements may share memory; got shape {list(x.shape)} with "
                f"strides {x.stride()}: pass a tensor of its own memory"
            )
        taken += step * (size - 1)


def check_apart(written: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Raises ValueError for a tensor that a function writes before or after it reads or writes the same memory for
    another one; of tensors that torch writes, as host entries compare those of kernels.
    """
    import torch

    if torch.compiler.is_compiling():
        return
    tensors = {name: x for name, x in {**written, **read}.items() if isinstance(x, torch.Tensor)}
    spans = {name: _span(x) for name, x in tensors.items()}
    for name, other in itertools.combinations(spans, 2):
        (begin, end), (first, last) = spans[name], spans[other]
        if name in written and begin < last and first < end:
            both = f"{name} and {other} are written" if other in written else f"{name} is written while {other} is read"
            raise ValueError(f"{both}, so they must not share memory: pass a tensor of its own memory")


def _span(x: Any) -> tuple[int, int]:
    """The addresses from the first element to behind the last one."""
    if unreadable(x) or not x.numel():
        return 0, 0
    elements = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + elements * x.element_size()


def places(arguments: Iterable[tuple[str, Any]]) -> dict[str, Place]:
    return {name: _place(x) for name, x in arguments if x is not None and not isinstance(x, (int, float))}


def note(error: E, arguments: Iterable[tuple[str, Any]]) -> E:
    """The error, with the places of the tensors, or of what came instead, that its text may name; none is kept."""
    vars(error)[PLACES] = places(arguments)
    return error
