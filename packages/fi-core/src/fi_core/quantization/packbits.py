"""Packs boolean masks into bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Scalar, Tensor, TraceTemplate, Var, Work, samples
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import torch


class _Config(NamedTuple):
    elements_per_thread: int  # an entry with 8 supports segments and any alignment


def _packbits_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    return Unit(
        "fi/quantization/packbits.cuh",
        "PackbitsParams",
        (
            Entry("packbits_vectors", "packbits_vectors<4>", 256, _Config(64)),
            Entry("packbits_bytes", "packbits_bytes", 256, _Config(8)),
        ),
    )


PACKBITS = Op(
    name="packbits",
    family="quantization",
    arguments="Tensor(a!) y, Tensor x, Tensor? indptr=None, Tensor? new_indptr=None, bool big=True",
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _packbits_unit)),
    config=_Config,
)

_packbits = operator(PACKBITS)


def _is_big(bitorder: str) -> bool:
    if bitorder not in ("big", "little"):
        raise ValueError(f'bitorder: "big" or "little" is required; got {bitorder!r}')
    return bitorder == "big"


def _packbits_reference(x, bitorder="big"):  # type: ignore[no-untyped-def]
    import torch

    bits = torch.nn.functional.pad((x != 0).flatten().byte(), (0, -x.numel() % 8)).view(-1, 8)
    weights = bits.new_tensor([128, 64, 32, 16, 8, 4, 2, 1] if bitorder == "big" else [1, 2, 4, 8, 16, 32, 64, 128])
    return (bits * weights).sum(-1).byte()


def _make(draw: Draw, *, dtype: str = "bool", n: int = 1003, bitorder: str = "big") -> dict[str, Any]:
    return {"x": draw.integers(0, 2 if dtype == "bool" else 3, (n,), dtype), "bitorder": bitorder}


def _make_segments(
    draw: Draw, *, dtype: str = "bool", n: int = 1003, num_segments: int = 7, bitorder: str = "big"
) -> dict[str, Any]:
    """Segments of about equal lengths; if nasty, the second is empty."""
    ends = [n * i // num_segments for i in range(num_segments + 1)]
    if draw.nasty and num_segments > 2:
        ends[2] = ends[1]
    return {**_make(draw, dtype=dtype, n=n, bitorder=bitorder), "indptr": draw.int32(ends)}


def _work(arguments: Mapping[str, Any]) -> Work:
    """Elements are read, an eighth of their bytes is written; so is the indptr of the result."""
    x, indptr = arguments["x"], arguments.get("indptr")
    return Work(0, nbytes(x, indptr, indptr) + -(-x.numel() // 8))


_SAMPLES = samples({"dtype": ("bool", "uint8"), "n": (1003, 1, 0, 4096), "bitorder": ("big", "little")})


@fi_api(
    trace=TraceTemplate(
        "packbits",
        axes={"n": Var(), "num_bytes": Var()},
        inputs={"x": Tensor(["n"]), "bitorder": Scalar("string", optional=True)},
        outputs={"y": Tensor(["num_bytes"], dtype="uint8")},
        reference=_packbits_reference,
        op="packbits",
        make=_make,
        samples=_SAMPLES,
        work=_work,
        description="Packs eight elements into a byte; the last byte is padded with zeros.",
    )
)
def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Packs eight elements into a byte, as `numpy.packbits` does with a flat array.

    Args:
        x: any shape, bool or uint8; a non-zero element is a set bit. Elements are read in row-major order; a
            tensor that is not contiguous is copied.
        bitorder: "big": the first element is the highest bit of its byte; "little" (attention masks): the lowest.

    Returns:
        `[ceil(x.numel() / 8)]`, uint8; the last byte is padded with zeros.

    Raises:
        ValueError: bitorder is neither "big" nor "little".
        TypeError: x has another dtype.
    """
    import torch

    big = _is_big(bitorder)
    y = x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)
    _packbits(y, x.contiguous(), big=big)
    return y


def packbits_segments(y: torch.Tensor, x: torch.Tensor, indptr: torch.Tensor, new_indptr: torch.Tensor) -> None:
    """Packs segment `x[indptr[i] : indptr[i + 1]]`, little endian, into `y[new_indptr[i] : new_indptr[i + 1]]`.

    All tensors are flat, contiguous and on one device. The call does not synchronize with the device.

    Args:
        y: `[new_indptr[-1]]`, uint8; receives the packed segments.
        x: `[indptr[-1]]`, bool or uint8.
        indptr: `[num_segments + 1]`, int32 or int64, offsets into x.
        new_indptr: `[num_segments + 1]`, int32, offsets into y.
    """
    _packbits(y, x, indptr, new_indptr, big=False)


def _segment_packbits_reference(x, indptr, bitorder="big"):  # type: ignore[no-untyped-def]
    import itertools

    import torch

    parts, ends = [x.new_empty(0).byte()], [0]
    weights = indptr.new_tensor([128, 64, 32, 16, 8, 4, 2, 1] if bitorder == "big" else [1, 2, 4, 8, 16, 32, 64, 128])
    for begin, end in itertools.pairwise(indptr.tolist()):
        bits = torch.nn.functional.pad((x[begin:end] != 0).byte(), (0, (begin - end) % 8)).view(-1, 8)
        parts.append((bits * weights).sum(-1).byte())
        ends.append(ends[-1] + parts[-1].numel())
    return torch.cat(parts), indptr.new_tensor(ends).int()


@fi_api(
    trace=TraceTemplate(
        "segment_packbits",
        axes={"n": Var(), "num_bounds": Var(), "num_bytes": Var()},
        inputs={"x": Tensor(["n"]), "indptr": Tensor(["num_bounds"]), "bitorder": Scalar("string", optional=True)},
        outputs={
            "y": Tensor(["num_bytes"], dtype="uint8"),
            "new_indptr": Tensor(["num_bounds"], dtype="int32"),
        },
        reference=_segment_packbits_reference,
        op="packbits",
        make=_make_segments,
        samples=_SAMPLES,
        work=_work,
        description="Packs eight elements into a byte; each segment starts at a new byte.",
    )
)
def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Packs each segment `x[indptr[i] : indptr[i + 1]]` as `packbits` does; each segment starts at a new byte.

    The call synchronizes with the device once, because the size of the result depends on indptr. It therefore works
    neither in a CUDA graph nor with `torch.compile(fullgraph=True)`.

    Args:
        x: `[indptr[-1]]`, bool or uint8.
        indptr: `[num_segments + 1]`, int32 or int64, contiguous, on the device of x.
        bitorder: "big" or "little", as for `packbits`.

    Returns:
        (y, new_indptr): the bytes, uint8, and their offsets, `[num_segments + 1]`, int32. Segment i is
        `y[new_indptr[i] : new_indptr[i + 1]]`.

    Raises:
        ValueError: bitorder, a shape or a device does not fit, or indptr decreases or does not end at the length of x.
        TypeError: A dtype does not fit.
    """
    import torch

    big = _is_big(bitorder)
    if indptr.ndim != 1 or indptr.numel() == 0 or indptr.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indptr: integers of shape [num_segments + 1] are required, int32 or int64; got {indptr.dtype} "
            f"{list(indptr.shape)}"
        )
    if x.ndim != 1:
        raise ValueError(f"x: shape [indptr[-1]] is required; got {list(x.shape)}")
    lengths = indptr.diff()
    new_indptr = torch.zeros_like(indptr, dtype=torch.int32)
    torch.cumsum((lengths + 7) >> 3, 0, dtype=torch.int32, out=new_indptr[1:])
    # A difference wraps only if some offset is below 0 or above the last one.
    facts = torch.stack((*indptr.aminmax(), indptr[-1], new_indptr[-1], (lengths < 0).sum(dtype=indptr.dtype)))
    start, most, end, size, decreases = facts.tolist()  # one synchronization
    if start < 0 or decreases or most != end or end != x.numel():
        raise ValueError(
            f"indptr: must not decrease, start at 0 or more and end at the length of x, {x.numel()}; "
            f"got {start} to {end}, decreasing {decreases} times"
        )
    y = x.new_empty(size, dtype=torch.uint8)
    _packbits(y, x.contiguous(), indptr, new_indptr, big=big)
    return y, new_indptr
