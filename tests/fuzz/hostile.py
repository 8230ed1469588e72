"""Hostile arguments: what the fuzz puts in the place of a valid one, as metadata or as contents."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import _neg_view


class Change(NamedTuple):
    """A value in the place of another.

    same: the same numbers, laid out in another way. extreme: numbers whose answer depends on the order of operations;
    special values in harmless places are for the tests of descriptions.
    """

    text: str
    value: Any
    same: bool = False
    extreme: bool = False


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool, torch.complex64,
]  # fmt: skip
HUGE = (2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62)
NUMBERS: list[Any] = [
    0, 1, 2, -1, -2, 3, 7, 64, 1000, 2**31 - 1, 2**31, -(2**31), 2**32, 2**32 + 1, 2**62, 2**63 - 1, 2**63, -(2**63),
    2**64, 10**30, 0.0, -0.0, 0.5, -1.5, 1e-45, 1e38, 1e300, -1e300, math.nan, math.inf, -math.inf,
]  # fmt: skip
OTHERS: list[Any] = [
    None,
    "",
    "x",
    "auto",
    b"x",
    (),
    [],
    {},
    True,
    False,
    object,
    1j,
    torch.float32,
    [1],
    (None,),
    [[]],
]
WORDS = ["", "x", "NHD", "HND", "AUTO", "fa2", "fa3", "cudnn", "NONE", "ROPE_LLAMA", "ALIBI", "\0", "é" * 50, "%s%n"]
INTEGERS = (-1, -2, 0, 1, 2, 7, 63, 64, 1000, 2**31 - 1, -(2**31), 2**31 - 16, -1000)
FLOATS = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 65504.0, 1e-45, 0.0, -0.0, -1.0, 1e-7)


def _storage(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(count * dtype.itemsize, dtype=torch.uint8).view(dtype)


def tight(x: torch.Tensor) -> torch.Tensor:
    """The same tensor in an allocation that ends with its last element, where a sanitizer sees one byte more."""
    if not is_plain(x) or x.numel() == 0:
        return x
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride()))
    if extent > 1 << 24:
        return x
    made = _storage(extent, x.dtype).as_strided(x.shape, x.stride())
    if 0 in x.stride():
        return x
    return made.copy_(x)


def is_plain(x: Any) -> bool:
    """A dense tensor on the CPU."""
    return type(x) is torch.Tensor and x.layout is torch.strided and x.device.type == "cpu" and not x.is_neg()


def _dtype(rng: Random, x: torch.Tensor) -> Change:
    other = rng.choice([dtype for dtype in DTYPES if dtype is not x.dtype])
    wide = x.float() if x.dtype.itemsize == 1 else x
    return Change(f"dtype {other}", wide.to(other))


def _rank(rng: Random, x: torch.Tensor) -> Change:
    forms: list[Callable[[], torch.Tensor]] = [lambda: x.reshape(-1), lambda: x[None], lambda: x[..., None]]
    if x.ndim:
        forms += [lambda: x.select(0, 0) if x.shape[0] else x.new_zeros(()), lambda: x.new_zeros(())]
        forms += [lambda: x.transpose(0, -1), lambda: x.flatten(0, min(1, x.ndim - 1))]
    made = rng.choice(forms)()
    return Change(f"shape {tuple(made.shape)}", made)


def _size(rng: Random, x: torch.Tensor) -> Change:
    if not x.ndim:
        return _rank(rng, x)
    axis = rng.randrange(x.ndim)
    old = x.shape[axis]
    size = rng.choice([0, 1, max(old - 1, 0), old + 1, 2 * old, old + 64])
    if old == 0 or x.numel() * (size + 1) > 1 << 24:
        made = x.new_zeros([*x.shape[:axis], min(size, 3), *x.shape[axis + 1 :]])
    else:
        made = x.view(bits_of(x)).index_select(axis, torch.arange(size) % old).view(x.dtype)
    return Change(f"shape {tuple(made.shape)}", made)


def bits_of(x: torch.Tensor) -> torch.dtype:
    """An integer dtype of the same width, which every function of torch takes."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(x.element_size(), torch.int64)


def _stretched(rng: Random, x: torch.Tensor) -> Change:
    """An axis of any length, of one element: stride 0."""
    if not x.ndim or not x.numel():
        return _rank(rng, x)
    axis = rng.randrange(x.ndim)
    shape = list(x.shape)
    if rng.random() < 0.6:
        shape[axis] = rng.choice(HUGE)
    shape[axis] = min(shape[axis], (2**63 - 1) // max(1, math.prod(s for i, s in enumerate(shape) if i != axis)))
    made = x.narrow(axis, 0, 1).expand(shape)
    return Change(f"shape {tuple(made.shape)}, strides {made.stride()}", made)


def _overlapping(rng: Random, x: torch.Tensor) -> Change:
    steps = [rng.choice((0, 1, 2, 3)) for _ in x.shape]
    extent = 1 + sum(max(size - 1, 0) * step for size, step in zip(x.shape, steps))
    made = _storage(extent, x.dtype).as_strided(x.shape, steps)
    return Change(f"strides {tuple(steps)}", made)


def _layout(rng: Random, x: torch.Tensor) -> Change:
    """The same numbers with gaps, in another order in memory, or at an odd address."""
    kind = rng.choice(("inner", "transposed", "padded", "offset", "odd"))
    if not x.ndim:
        kind = "offset"
    if kind == "inner":
        made = _storage(2 * x.numel(), x.dtype).view(*x.shape, 2)[..., 0]
    elif kind == "transposed":
        made = _storage(x.numel(), x.dtype).view(x.shape[::-1]).permute(*range(x.ndim)[::-1])
    elif kind == "padded":
        pad = rng.choice((1, 3, 8))
        made = _storage(math.prod(x.shape[:-1]) * (x.shape[-1] + pad), x.dtype)
        made = made.view(*x.shape[:-1], x.shape[-1] + pad)[..., : x.shape[-1]]
    elif kind == "offset":
        shift = rng.choice((1, 2, 4))
        made = _storage(x.numel() + shift, x.dtype)[shift:].view(x.shape)
    elif x.numel():
        room = bytearray(x.numel() * x.element_size() + 1)
        made = torch.frombuffer(room, dtype=x.dtype, offset=1).view(x.shape)
    else:
        made = x.clone()
    made.view(bits_of(x)).copy_(x.view(bits_of(x))) if kind != "odd" or x.element_size() == 1 else made.copy_(x)
    return Change(f"{kind} layout, strides {made.stride()}", made, same=True)


class Subclass(torch.Tensor):
    """A tensor subclass without behaviour of its own."""


def _kind(rng: Random, x: torch.Tensor) -> Change:
    """Another kind of tensor."""

    def fake() -> torch.Tensor:
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode().from_tensor(x)

    forms: dict[str, Callable[[], Any]] = {
        "meta": lambda: x.to("meta"),
        "sparse": lambda: x.float().to_sparse(),
        "sparse rows": lambda: x.float().reshape(x.shape[0] if x.ndim else 1, -1).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([x.reshape(-1), x.reshape(-1)[:1]]),
        "negated": lambda: _neg_view(x),
        "conjugate": lambda: x.to(torch.complex64).conj(),
        "imaginary part": lambda: torch.complex(x.float(), x.float()).conj().imag,
        "gradient": lambda: x.detach().clone().requires_grad_(),
        "parameter": lambda: torch.nn.Parameter(x.clone(), requires_grad=False),
        "subclass": lambda: x.as_subclass(Subclass),
        "fake": fake,
        "numpy": lambda: x.float().numpy(),
        "list": lambda: x.reshape(-1)[:8].tolist(),
        "tuple": lambda: (x, x),
        "number": lambda: 3,
    }
    name = rng.choice(list(forms))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls some of them experimental
            return Change(name, forms[name](), same=name in ("gradient", "parameter", "subclass"))
    except (RuntimeError, ValueError, TypeError):  # torch makes none of this tensor
        return Change("meta", x.to("meta"))


def metadata(rng: Random, value: Any, others: Sequence[torch.Tensor]) -> Change:
    """A value of another kind, shape, stride, dtype, place."""
    chance = rng.random()
    if isinstance(value, torch.Tensor) and is_plain(value):
        if chance < 0.06:
            return Change(*_named(rng.choice([*OTHERS, *NUMBERS[:8]])))
        if chance < 0.1 and others:
            return Change("another argument", rng.choice(others))
        forms = (_dtype, _rank, _size, _size, _stretched, _overlapping, _layout, _layout, _kind)
        return rng.choice(forms)(rng, value)
    if isinstance(value, (tuple, list)) and value and chance < 0.8:
        items = list(value)
        at = rng.randrange(len(items))
        if chance < 0.15:
            del items[at]
            text = f"without member {at}"
        elif chance < 0.25:
            items.append(items[at])
            text = "one member more"
        else:
            change = metadata(rng, items[at], others)
            items[at], text = change.value, f"member {at}: {change.text}"
        return Change(text, tuple(items) if isinstance(value, tuple) else items)
    if isinstance(value, (tuple, list)):
        return Change("as another kind", rng.choice([list, tuple, str])(value))
    if value is None and chance < 0.4:
        shape = [rng.choice((0, 1, 2, 5, 64)) for _ in range(rng.randrange(4))]
        made = torch.ones(shape).to(rng.choice(DTYPES))
        return Change(f"a tensor {tuple(shape)} of {made.dtype}", made)
    if value is None and chance < 0.6 and others:
        return Change("another argument", rng.choice(others))
    return scalar(rng, value, wild=True)


def _named(value: Any) -> tuple[str, Any]:
    return repr(value)[:60], value


def scalar(rng: Random, value: Any, wild: bool = False) -> Change:
    """Another number, word or flag; wild: also of another type."""
    if wild and rng.random() < 0.35:
        return Change(*_named(rng.choice(OTHERS)))
    if isinstance(value, str):
        return Change(*_named(rng.choice(WORDS)))
    if isinstance(value, torch.dtype):
        return Change(*_named(rng.choice(DTYPES)))
    if isinstance(value, float):
        number = float(rng.choice(NUMBERS))
        # A factor that is much larger also magnifies roundings beyond the tolerance.
        usual = 1e-4 < abs(number) < 1e4 and abs(number) <= max(2.0, 16 * abs(value))
        return Change(repr(number), number, extreme=not usual)
    if isinstance(value, int) and not wild:
        return Change(*_named(rng.choice([n for n in NUMBERS if isinstance(n, int)])))
    number = rng.choice(NUMBERS)
    factor = value is None and abs(number) > 1e4  # perhaps one, which magnifies roundings
    return Change(repr(number), number, extreme=isinstance(number, float) or factor)


def contents(rng: Random, value: Any) -> Change | None:
    """Other numbers in the same tensor, written in place; None where there is no number."""
    if isinstance(value, (tuple, list)) and value:
        at = rng.randrange(len(value))
        change = contents(rng, value[at])
        return None if change is None else change._replace(text=f"member {at}: {change.text}", value=value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return scalar(rng, value)
    if not isinstance(value, torch.Tensor) or not is_plain(value) or not value.numel():
        return None
    own = value  # one element of each that share memory
    for axis in range(value.ndim):
        own = own.narrow(axis, 0, 1) if value.stride(axis) == 0 else own
    if value.dtype.is_floating_point:
        return _floats(rng, own)._replace(value=value)
    if value.dtype in (torch.bool, torch.uint8):
        bits = rng.randrange(2 if value.dtype is torch.bool else 256)
        # As a scale of 8 bits, with a sign or without, a larger one magnifies roundings, as of a number.
        usual = value.dtype is torch.bool or (bits <= int(own.max()) and bits % 128 <= int((own % 128).max()))
        _fill(rng, own, [bits])
        return Change("other bits", value, extreme=not usual)
    return _integers(rng, own)._replace(value=value)


def _fill(rng: Random, x: torch.Tensor, values: Sequence[Any]) -> None:
    """Writes values to some places, or to all."""
    whole = torch.tensor([rng.choice(values)], dtype=torch.float64 if x.dtype.is_floating_point else torch.int64)
    whole = whole.to(torch.float32).to(x.dtype) if x.dtype.is_floating_point else whole.to(x.dtype)
    if rng.random() < 0.25:
        x.copy_(whole.expand(x.shape))
        return
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = tuple(slice(i, i + 1) for i in (rng.randrange(size) for size in x.shape))
        x[at].copy_(whole.reshape([1] * x.ndim))


def _floats(rng: Random, x: torch.Tensor) -> Change:
    value = rng.choice(FLOATS)
    # As of a number; products with a subnormal one depend on the order of factors.
    usual = (value == 0 or abs(value) > 1e-30) and abs(value) < 1e4 and abs(value) <= 2 * float(x.float().abs().max())
    _fill(rng, x, [value])
    return Change(f"{value} inside", x, extreme=not usual)


def _integers(rng: Random, x: torch.Tensor) -> Change:
    kind = rng.choice(("values", "values", "values", "order", "near", "wrap"))
    flat = x.reshape(-1).tolist()
    if kind == "order":
        flat.sort(reverse=True)
        x.copy_(torch.tensor(flat).reshape(x.shape))
    elif kind == "near":
        at = rng.randrange(len(flat))
        flat[at] += rng.choice((-1, 1, 16, -16))
        x.copy_(torch.tensor(flat).reshape(x.shape))
    elif kind == "wrap":  # sums of 32 bits that overflow
        top = 2**62 if x.dtype.itemsize == 8 else 2**30
        flat = [rng.choice((top, 2 * top - 1, -top, n)) for n in flat]
        x.copy_(torch.tensor(flat).reshape(x.shape))
    else:
        limits = torch.iinfo(x.dtype)
        values = [n for n in (*INTEGERS, limits.max, limits.min, len(flat)) if limits.min <= n <= limits.max]
        _fill(rng, x, values)
    return Change(f"{kind}: {x.reshape(-1)[:12].tolist()}", x)
