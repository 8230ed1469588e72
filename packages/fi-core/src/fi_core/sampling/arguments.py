"""Converts arguments of sampling functions: parameters per row, rows of logits or probabilities, seeds and offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.utils import get_default_generators

if TYPE_CHECKING:
    import torch

_NATIVE = ("torch.float32", "torch.bfloat16", "torch.float16")
Arguments = dict[str, Any]  # of the op, by name


class _Range(NamedTuple):
    """What a sampling parameter may be as a number, and the argument of the op that takes the number."""

    argument: str
    low: float
    high: float


_INF = float("inf")
_RANGES = {
    "temperature": _Range("temperature_value", 0.0, _INF),
    "top_k": _Range("top_k_value", -1, _INF),
    "top_p": _Range("top_p_value", 0.0, 1.0),
    "min_p": _Range("min_p_value", 0.0, 1.0),
    "repetition_penalty": _Range("repetition_penalty_value", -_INF, _INF),
    "frequency_penalty": _Range("frequency_penalty_value", -_INF, _INF),
    "presence_penalty": _Range("presence_penalty_value", -_INF, _INF),
}


def row_arguments(parameters: Mapping[str, torch.Tensor | float], rows: int) -> Arguments:
    """Returns sampling parameters as the op takes them: numbers, or tensors with one element per row.

    Tensors of other dtypes than the op's are copied. An integer tensor of temperatures would be a mistake.
    """
    found: Arguments = {}
    for name, value in parameters.items():
        argument, low, high = _RANGES[name]
        if isinstance(value, (int, float)):
            if name == "top_k":
                if value % 1 != 0 or value < low:  # inf % 1 is NaN
                    raise ValueError(f"{name}: an integer from -1 on is required; got {value}")
                value = int(value)
            elif not low <= value <= high:
                raise ValueError(f"{name}: a number from {low:g} to {high:g} is required; got {value}")
            found[argument] = value
        elif name == "top_k":
            found[name] = _one_each(value, name, rows).int().contiguous()
        else:
            dtype = getattr(value, "dtype", None)
            if name == "temperature" and dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name}: a tensor of a float dtype is required; got {dtype}")
            found[name] = _one_each(value, name, rows).float().contiguous()
    return found


def _one_each(value: torch.Tensor, name: str, rows: int) -> torch.Tensor:
    """Returns the tensor, which must have one element per row."""
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
    """Returns rows of a dtype that kernels read; other float dtypes are copied to fp32."""
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
    """Returns seed and offset for a call that uses `increment` random numbers, and advances the generator past them.

    Args:
        increment: how many random numbers the call uses.
        generator: a CUDA generator, whose offset grows by increment rounded up to a multiple of four, or a CPU
            generator, which has no offset: it gives 63 random bits as seed, and offset 0. None: torch's default
            generator of `device`.
        device: required without a generator.

    Returns:
        seed: int.
        offset: int.

    Raises:
        ValueError: neither a generator nor a device is given.
    """
    if generator is None:
        if device is None:
            raise ValueError("device: required where no generator is given")
        generator = get_default_generators(device)
    return _advance(generator, increment, generator.device.type == "cpu")


def _advance(generator: torch.Generator, increment: int, on_cpu: bool) -> tuple[int, int]:
    if on_cpu:
        import torch

        return int(torch.empty((), dtype=torch.int64).random_(generator=generator)), 0
    offset = generator.get_offset()
    generator.set_offset(offset + (increment + 3) // 4 * 4)
    return generator.initial_seed(), offset


_default_generators: dict[int, torch.Generator] = {}  # by device index: torch creates them once


def _signed(value: int) -> int:
    """Returns the 64 bits of a seed as the signed integer that C functions take."""
    value = int(value)
    return value if -(1 << 63) <= value < 1 << 63 else (value + (1 << 63)) % (1 << 64) - (1 << 63)


def randomness(
    seed: torch.Tensor | int | None,
    offset: torch.Tensor | int | None,
    generator: torch.Generator | None,
    input: torch.Tensor,
    batch: int,
    increment: int,
) -> Arguments:
    """Returns seed and offset as the op takes them: as given, or from the generator, which advances by `increment`."""
    if type(seed) is int and type(offset) is int:
        return {"seed_value": _signed(seed), "offset_value": _signed(offset)}
    if seed is None and offset is None:
        index = input.get_device()
        if generator is None:
            generator = _default_generators.get(index)
            if generator is None:
                generator = _default_generators[index] = get_default_generators(input.device)
        elif generator.device.type != input.device.type:
            raise ValueError(f"generator: one for {input.device} is required; got one for {generator.device}")
        first, second = _advance(generator, increment, index < 0)
        return {"seed_value": _signed(first), "offset_value": _signed(second)}
    if seed is None or offset is None:
        raise ValueError("seed and offset: give both or neither")
    given = [hasattr(value, "ndim") for value in (seed, offset)]
    if given == [False, False]:
        return {"seed_value": _signed(seed), "offset_value": _signed(offset)}  # type: ignore[arg-type]
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
    return {"seed": seed, "offset": offset}


def rows_of(x: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """Returns the rows in a dtype that kernels read, and their number."""
    if x.ndim != 2:
        raise ValueError(f"{name}: shape [rows, vocab] is required; got {list(x.shape)}")
    return native(x, name), x.shape[0]
