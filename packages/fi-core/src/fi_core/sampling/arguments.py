"""Converts arguments of sampling functions: parameters per row, rows of logits or probabilities, seeds and offsets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.runtime.invariance import is_on
from fi_core.runtime.spec.dtype import short_name
from fi_core.utils import get_default_generators

if TYPE_CHECKING:
    import torch

_MAX_SIGNED = (1 << 63) - 1
Arguments = dict[str, Any]  # of the op, by name


class _Range(NamedTuple):
    """The range of a sampling parameter, and the argument of the op that takes it as a number."""

    argument: str
    low: float
    high: float


_INF = float("inf")
_RANGES = {
    "temperature": _Range("temperature_value", 0.0, _INF),
    "top_k": _Range("top_k_value", -1, (1 << 63) - 1),
    "top_p": _Range("top_p_value", 0.0, 1.0),
    "min_p": _Range("min_p_value", 0.0, 1.0),
    "repetition_penalty": _Range("repetition_penalty_value", -_INF, _INF),
    "frequency_penalty": _Range("frequency_penalty_value", -_INF, _INF),
    "presence_penalty": _Range("presence_penalty_value", -_INF, _INF),
}


@functools.lru_cache(maxsize=4096)  # a caller repeats its numbers; a look-up costs half of the checks
def _number(name: str, value: float) -> tuple[str, float]:
    """Returns a number for all rows as the op takes it, and the name of the argument."""
    argument, low, high = _RANGES[name]
    if name == "top_k":
        if value % 1 != 0 or not low <= value <= high:  # inf % 1 is NaN
            raise ValueError(f"{name}: an integer from -1 to 2^63 - 1 is required; got {value}")
        value = int(value)
    elif not low <= value <= high:
        raise ValueError(f"{name}: a number from {low:g} to {high:g} is required; got {value}")
    return argument, value


def row_arguments(parameters: Mapping[str, torch.Tensor | float], rows: int) -> Arguments:
    """Returns sampling parameters as the op takes them: numbers, or tensors with one element per row.

    Tensors of other dtypes than the op's are copied. An integer tensor of temperatures would be a mistake.
    """
    found: Arguments = {}
    for name, value in parameters.items():
        if isinstance(value, (int, float)):
            argument, number = _number(name, value)
            found[argument] = number
        elif name == "top_k":
            found[name] = _int32(_one_each(value, name, rows)).contiguous()
        else:
            dtype = getattr(value, "dtype", None)
            if name == "temperature" and dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name}: a tensor of a float dtype is required; got {dtype}")
            found[name] = _one_each(value, name, rows).float().contiguous()
    return found


def _int32(top_k: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as int32; a value that does not fit becomes the nearest one, which turns the filter off."""
    if top_k.itemsize <= 4 and not top_k.is_floating_point():
        return top_k.int()
    if top_k.is_complex() or top_k.itemsize == 1:
        raise TypeError(f"top_k: an integer dtype is required; got {top_k.dtype}")
    wide = top_k.float() if top_k.itemsize == 2 else top_k  # fp16 has no such limit
    return wide.clamp(-1, (1 << 31) - 129).int()


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


@functools.cache
def _is_native(dtype: torch.dtype) -> bool:
    return short_name(dtype) in ("f32", "bf16", "f16")


@functools.cache
def result_dtypes() -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of tokens and of flags; an import statement in each call takes twice the time of this one."""
    import torch

    return torch.int32, torch.bool


def native(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns rows of a dtype that kernels read; other float dtypes are copied to fp32."""
    if _is_native(x.dtype):
        return x
    if not x.is_floating_point() or x.itemsize == 1:
        raise TypeError(f"{name}: a float dtype of 16 bits or more is required; got {x.dtype}")
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
        RuntimeError: the current stream captures a CUDA graph, in which the two are known on the device only.
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


def _captured_seed(generator: torch.Generator, refusal: RuntimeError) -> torch.Tensor:
    """Returns an int64 `[1]` on the device: 63 random bits, new in each replay of the CUDA graph under capture.

    A captured kernel reads the generator's offset from device memory, which each replay advances. Only torch's own
    kernels know that memory, so one of them draws the seed.
    """
    import torch

    if not torch.cuda.is_current_stream_capturing():
        raise refusal
    try:
        return torch.empty(1, dtype=torch.int64, device=generator.device).random_(generator=generator)
    except RuntimeError as error:
        raise ValueError(
            "generator: one that the CUDA graph under capture knows is required; call "
            f"graph.register_generator_state(generator) before the capture ({error})"
        ) from error


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
) -> tuple[int, int, torch.Tensor | None, torch.Tensor | None]:
    """Returns seed and offset as the op takes them: as given, or from the generator, which advances by `increment`.

    They are two numbers and two tensors; where tensors are given, the numbers are 0. Under capture of a CUDA graph the
    generator gives a seed on the device, and advances by 4.
    """
    if is_on() and batch > 1 and [getattr(x, "shape", None) for x in (seed, offset)] != [(batch,), (batch,)]:
        raise ValueError(
            f"seed and offset: inside of fi_core.batch_invariant() tensors [{batch}] are required, a number for each "
            "row: with one number the draw of a row depends on its position"
        )
    if type(seed) is int and type(offset) is int and 0 <= seed <= _MAX_SIGNED and 0 <= offset <= _MAX_SIGNED:
        return seed, offset, None, None
    if seed is None and offset is None:
        index = input.get_device()
        if generator is None:
            generator = _default_generators.get(index)
            if generator is None:
                generator = _default_generators[index] = get_default_generators(input.device)
        elif generator.device.type != input.device.type:
            raise ValueError(f"generator: one for {input.device} is required; got one for {generator.device}")
        try:
            first, second = _advance(generator, increment, index < 0)
        except RuntimeError as error:  # torch refuses to read the offset of a generator under capture
            return 0, 0, _captured_seed(generator, error), None
        if first > _MAX_SIGNED or second > _MAX_SIGNED:
            first, second = _signed(first), _signed(second)
        return first, second, None, None
    if seed is None or offset is None:
        raise ValueError("seed and offset: give both or neither")
    given = [hasattr(value, "ndim") for value in (seed, offset)]
    if given == [False, False]:
        return _signed(seed), _signed(offset), None, None  # type: ignore[arg-type]
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
    return 0, 0, seed, offset  # type: ignore[return-value]


def rows_of(x: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """Returns the rows in a dtype that kernels read, and their number."""
    shape = x.shape
    if len(shape) != 2:
        raise ValueError(f"{name}: shape [rows, vocab] is required; got {list(shape)}")
    return x if _is_native(x.dtype) else native(x, name), shape[0]
