"""Draw: where the inputs of a description come from; nasty by default, plain for benchmarks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FLOATS = ("bfloat16", "float16", "float32")
_PADDING = 8  # elements between rows of a strided tensor
_GUARD = 64  # elements of poison around it


class Draw:
    """Random tensors of one device.

    nasty: `rows` gives strided rows with NaN between them, and `special` puts special values in. Otherwise tensors are
    contiguous and values are normal, as in a benchmark. generator: a torch generator of the device, or a seed.
    """

    def __init__(self, device: Any = "cpu", generator: Any = 0, nasty: bool = True) -> None:
        import torch

        self.device, self.nasty = torch.device(device), nasty
        self.generator = torch.Generator(self.device).manual_seed(generator) if type(generator) is int else generator

    def normal(self, shape: Sequence[int], dtype: Any, scale: float = 1.0) -> torch.Tensor:
        """N(0, scale^2); a dtype or its name, also of 8 bits."""
        import torch

        dtype = dtype_of(dtype)
        wide = dtype if dtype.itemsize >= 2 else torch.float16
        x = torch.randn(tuple(shape), dtype=wide, device=self.device, generator=self.generator)
        return (x * scale if scale != 1.0 else x).to(dtype)

    def pages(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        """A cache of pages, `[num_pages, ...]`, of normal values."""
        return self.normal(shape, dtype)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: Any = "int32") -> torch.Tensor:
        """Uniform in [low, high)."""
        import torch

        kind = dtype_of(dtype)
        return torch.randint(low, high, tuple(shape), generator=self.generator, dtype=kind, device=self.device)

    def permutation(self, count: int) -> torch.Tensor:
        """The numbers below count in random order, int32."""
        import torch

        return torch.randperm(count, device=self.device, generator=self.generator).int()

    def empty(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        """An output buffer: poisoned (NaN, or 0x55) and with strided rows if nasty."""
        import torch

        dtype = dtype_of(dtype)
        out = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self.rows(self.poison(out)) if self.nasty else out

    def poison(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites x with NaN, or 0x55 if it holds integers."""
        return x.copy_(_poison(x.dtype, self.device).expand(x.shape))

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The same values in rows that lie apart in poison, if nasty."""
        if not self.nasty or x.ndim < 1:
            return x
        *outer, inner = x.shape
        pitch = inner + _PADDING
        canvas = _poison(x.dtype, self.device).repeat(math.prod(outer) * pitch + 2 * _GUARD)
        strides = [pitch * math.prod(outer[i + 1 :]) for i in range(len(outer))] + [1]
        return canvas.as_strided(x.shape, strides, _GUARD).copy_(x)

    def special(self, x: torch.Tensor, *values: float) -> torch.Tensor:
        """Puts values into the last elements of x, if nasty; x is contiguous."""
        if self.nasty and x.numel() >= len(values):
            x.view(-1)[x.numel() - len(values) :] = x.new_tensor(values)
        return x

    def int32(self, values: Sequence[int]) -> torch.Tensor:
        """These numbers."""
        import torch

        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def offsets(self, counts: Sequence[int]) -> torch.Tensor:
        """[0, c0, c0 + c1, ...], int32."""
        import torch

        return torch.tensor([0, *counts]).cumsum(0).to(dtype=torch.int32, device=self.device)


class Outline(Draw):
    """Tensors without contents, for a call that is only rehearsed; a cache is one page, expanded."""

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__(device, nasty=False)

    def normal(self, shape: Sequence[int], dtype: Any, scale: float = 1.0) -> torch.Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=dtype_of(dtype), device=self.device)

    def pages(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        page = self.normal(shape[1:], dtype)
        return page.as_strided(tuple(shape), (0, *page.stride()))

    def permutation(self, count: int) -> torch.Tensor:
        return self.int32([0]).expand(count).contiguous()


def without(make: Callable[..., dict[str, Any]], sizes: Collection[str]) -> Callable[..., dict[str, Any]]:
    """`make`, without these sizes in its signature: `why` and fi-bench do not offer what has no effect."""
    signature = inspect.signature(make)
    kept = [p for name, p in signature.parameters.items() if name not in sizes]
    make.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return make


def dtype_of(dtype: Any) -> torch.dtype:
    """The dtype of a name, or a dtype as it is."""
    import torch

    return getattr(torch, dtype) if isinstance(dtype, str) else dtype  # type: ignore[no-any-return]


def _poison(dtype: torch.dtype, device: Any) -> torch.Tensor:
    import torch

    if dtype.is_floating_point:
        return torch.full((1,), math.nan, dtype=torch.float32, device=device).to(dtype)
    return torch.full((1,), 0x55, dtype=torch.uint8, device=device).to(dtype)


def nbytes(*values: Any) -> int:
    """Bytes of the tensors among the values, and in tuples and lists of them."""
    total = 0
    for value in values:
        if isinstance(value, (tuple, list)):
            total += nbytes(*value)
        elif hasattr(value, "element_size"):
            total += value.numel() * value.element_size()
    return total
