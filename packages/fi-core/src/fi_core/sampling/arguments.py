"""Arguments of sampling functions: numbers or one a row, and where the random numbers come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.utils import get_default_generators

if TYPE_CHECKING:
    import torch

_NATIVE = ("torch.float32", "torch.bfloat16", "torch.float16")
PerRow = tuple["torch.Tensor | None", float]  # by row, else the number


def per_row(
    value: torch.Tensor | float,
    name: str,
    rows: int,
    default: float,
    low: float = float("-inf"),
    high: float = float("inf"),
) -> PerRow:
    """A parameter for the op: (fp32 tensor, default) or (None, number).

    A tensor has one element for each of the rows; another number type is copied to fp32.
    """
    if isinstance(value, (int, float)):
        if not low <= value <= high:
            raise ValueError(f"{name}: a number from {low:g} to {high:g} is required; got {value}")
        return None, value
    return _one_each(value, name, rows).float().contiguous(), default


def float_per_row(value: torch.Tensor | float, name: str, rows: int) -> PerRow:
    """`per_row` from 0 on, whose tensors must be of floats, since an integer one would be a mistake."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"{name}: a tensor of a float dtype is required; got {dtype}")
    return per_row(value, name, rows, 1.0, 0.0)


def count_per_row(value: torch.Tensor | int, name: str, rows: int) -> tuple[torch.Tensor | None, int]:
    """As `per_row`, for integers; -1 and 0 are no limit."""
    if isinstance(value, (int, float)):
        if value % 1 != 0 or value < -1:  # inf % 1 is NaN
            raise ValueError(f"{name}: an integer from -1 on is required; got {value}")
        return None, int(value)
    return _one_each(value, name, rows).int().contiguous(), 0


def _one_each(value: torch.Tensor, name: str, rows: int) -> torch.Tensor:
    """The tensor, of one element for each row."""
    if not hasattr(value, "ndim"):
        raise TypeError(f"{name}: a number or a 1D tensor is required; got {type(value).__name__}")
    if value.shape == (rows,):
        return value
    if value.ndim == 0:
        raise ValueError(
            f"Expected a 1D tensor of shape (batch_size,) or scalar for {name}, got a 0-dimensional tensor: "
            f"pass {name}.item() or {name}.reshape(1)"
        )
    if value.ndim != 1:
        raise ValueError(f"Expected a 1D tensor or scalar for {name}, got a {value.ndim}D tensor")
    raise ValueError(
        f"Sampling parameter tensor batch size mismatch: {name} must have one element for each of the {rows} rows; "
        f"got {value.shape[0]}"
    )


def native(x: torch.Tensor, name: str) -> torch.Tensor:
    """Rows of a float type that kernels read; other float types are copied to fp32."""
    if str(x.dtype) in _NATIVE:
        return x
    if not x.is_floating_point():
        raise TypeError(f"{name}: a float dtype is required; got {x.dtype}")
    return x.float()


def require_no_nan(x: torch.Tensor, what: str) -> None:
    if x.isnan().any().item():
        raise ValueError(f"Input {what} contains NaN.")


def get_seed_and_offset(
    increment: int, generator: torch.Generator | None = None, device: torch.device | None = None
) -> tuple[int, int]:
    """Seed and offset for a call that uses `increment` numbers, and the generator moves on past them.

    generator: a CUDA generator, whose offset grows by increment rounded up to a multiple of four; None is the default
    one of `device`. A CPU generator has no offset: it gives 63 random bits as seed, and offset 0.
    """
    if generator is None:
        if device is None:
            raise ValueError("device: required where no generator is given")
        generator = get_default_generators(device)
    return _taken(generator, increment, generator.device.type == "cpu")


def _taken(generator: torch.Generator, increment: int, on_cpu: bool) -> tuple[int, int]:
    if on_cpu:
        import torch

        return int(torch.empty((), dtype=torch.int64).random_(generator=generator)), 0
    offset = generator.get_offset()
    generator.set_offset(offset + (increment + 3) // 4 * 4)
    return generator.initial_seed(), offset


_default_generators: dict[int, torch.Generator] = {}  # by index of the device: torch makes them once
Randomness = tuple["torch.Tensor | None", int, "torch.Tensor | None", int]  # seed and offset: tensor, else number


def _signed(value: int) -> int:
    """The 64 bits of a seed, as the signed integer that passes to C."""
    value = int(value)
    return value if -(1 << 63) <= value < 1 << 63 else (value + (1 << 63)) % (1 << 64) - (1 << 63)


def randomness(
    seed: torch.Tensor | int | None,
    offset: torch.Tensor | int | None,
    generator: torch.Generator | None,
    input: torch.Tensor,
    batch: int,
    increment: int,
) -> Randomness:
    """Seed and offset as given, or from the generator, which then moves on by `increment`."""
    if type(seed) is int and type(offset) is int:
        return None, _signed(seed), None, _signed(offset)
    if seed is None and offset is None:
        index = input.get_device()
        if generator is None:
            generator = _default_generators.get(index)
            if generator is None:
                generator = _default_generators[index] = get_default_generators(input.device)
        elif generator.device.type != input.device.type:
            raise ValueError(f"generator: one for {input.device} is required; got one for {generator.device}")
        first, second = _taken(generator, increment, index < 0)
        return None, _signed(first), None, _signed(second)
    if seed is None or offset is None:
        raise ValueError("seed and offset: give both or neither")
    given = [hasattr(value, "ndim") for value in (seed, offset)]
    if given == [False, False]:
        return None, _signed(seed), None, _signed(offset)  # type: ignore[arg-type]
    if given != [True, True]:
        raise ValueError(
            "seed and offset: both integers or both tensors are required; got "
            f"{type(seed).__name__} and {type(offset).__name__}"
        )
    for name, value in (("seed", seed), ("offset", offset)):
        if value.ndim != 1 or value.shape[0] not in (1, batch):  # type: ignore[union-attr]
            raise ValueError(
                f"{name}: a 1D tensor of length 1 or {batch} is required; got shape {list(value.shape)}"  # type: ignore[union-attr]
            )
        if str(value.dtype) not in ("torch.int64", "torch.uint64"):  # type: ignore[union-attr]
            raise ValueError(f"{name}: int64 or uint64 is required; got {value.dtype}")  # type: ignore[union-attr]
        if value.device != input.device:  # type: ignore[union-attr]
            raise ValueError(f"{name}: a tensor on {input.device} is required; got {value.device}")  # type: ignore[union-attr]
    return seed, 0, offset, 0  # type: ignore[return-value]
