"""Which tensors a kernel can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
