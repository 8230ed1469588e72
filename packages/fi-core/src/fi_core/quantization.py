"""Packing of boolean masks into bits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fi_core.launch.op import Launcher
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Tensor, TraceTemplate, Var
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit

if TYPE_CHECKING:
    import torch


def _packbits_unit(axes: Axes) -> Unit:
    """Entries in order of preference; config = (elements a thread,): 8 takes any segments and addresses."""
    return Unit(
        "fi/quantization/packbits.cuh",
        "PackbitsParams",
        (
            Entry("packbits_vectors", "packbits_vectors<4>", 256, (64,)),
            Entry("packbits_bytes", "packbits_bytes", 256, (8,)),
        ),
    )


PACKBITS = Op(
    name="packbits",
    family="quantization",
    schema="(Tensor(a!) y, Tensor x, Tensor? indptr, Tensor? new_indptr, bool big) -> ()",
    axes={},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _packbits_unit)),
)

_packbits = Launcher(PACKBITS, lambda y, *_: (y.get_device(),))


def _is_big(bitorder: str) -> bool:
    if bitorder not in ("big", "little"):
        raise ValueError(f'bitorder: "big" or "little" is required; got {bitorder!r}')
    return bitorder == "big"


def _packbits_reference(x, bitorder="big"):  # type: ignore[no-untyped-def]
    bits = (x != 0).flatten().int()
    bits = bits.new_zeros(-(-bits.numel() // 8) * 8).index_copy(0, bits.new_tensor(range(bits.numel())).long(), bits)
    weights = bits.new_tensor([128, 64, 32, 16, 8, 4, 2, 1] if bitorder == "big" else [1, 2, 4, 8, 16, 32, 64, 128])
    return (bits.view(-1, 8) * weights).sum(-1).byte()


@fi_api(
    trace=TraceTemplate(
        "packbits",
        axes={"n": Var(), "num_bytes": Var()},
        inputs={"x": Tensor(["n"])},
        outputs={"y": Tensor(["num_bytes"], dtype="uint8")},
        reference=_packbits_reference,
        description="Eight elements to a byte; the last byte is filled up with zeros.",
    )
)
def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack eight elements into a byte, as numpy.packbits does on a flat array.

    x: bool or uint8 of any shape, taken in row-major order (copied if it is not contiguous); non-zero is 1.
    bitorder: "big", the first element becomes the highest bit, or "little" (what attention masks use).

    Returns uint8 `[ceil(x.numel() / 8)]`; the last byte is filled up with zeros. Raises ValueError (bitorder) or
    TypeError (dtype).
    """
    import torch

    big = _is_big(bitorder)
    y = x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)
    _packbits(y, x.contiguous(), None, None, big)
    return y


def packbits_segments(y: torch.Tensor, x: torch.Tensor, indptr: torch.Tensor, new_indptr: torch.Tensor) -> None:
    """Packs segments `x[indptr[i] : indptr[i + 1]]`, little endian, into `y[new_indptr[i] : new_indptr[i + 1]]`.

    x: bool or uint8; indptr: int32 or int64; new_indptr: int32, ends at the length of y (uint8). All flat, contiguous
    and on one device, which nothing waits for.
    """
    _packbits(y, x, indptr, new_indptr, False)


def _segment_packbits_reference(x, indptr, bitorder="big"):  # type: ignore[no-untyped-def]
    order = range(7, -1, -1) if bitorder == "big" else range(8)
    y, new_indptr, bounds, values = [], [0], indptr.tolist(), x.tolist()
    for begin, end in itertools.pairwise(bounds):
        for at in range(begin, end, 8):
            y.append(sum(bool(value) << bit for value, bit in zip(values[at : min(at + 8, end)], order)))
        new_indptr.append(len(y))
    return x.new_tensor(y).byte() if x.is_floating_point() else indptr.new_tensor(y).byte(), indptr.new_tensor(
        new_indptr
    ).int()


@fi_api(
    trace=TraceTemplate(
        "segment_packbits",
        axes={"n": Var(), "num_bounds": Var(), "num_bytes": Var()},
        inputs={"x": Tensor(["n"]), "indptr": Tensor(["num_bounds"])},
        outputs={
            "y": Tensor(["num_bytes"], dtype="uint8"),
            "new_indptr": Tensor(["num_bounds"], dtype="int32"),
        },
        reference=_segment_packbits_reference,
        description="Eight elements to a byte; every segment starts at a byte of its own.",
    )
)
def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """`packbits` of each segment `x[indptr[i] : indptr[i + 1]]`, every one to whole bytes.

    x: bool or uint8 `[indptr[-1]]`. indptr: `[num_segments + 1]`, int32 or int64, contiguous, on the device of x.
    Waits for the device once, to learn the size of the result; not for CUDA graphs or torch.compile(fullgraph=True).

    Returns (y uint8, new_indptr int32 `[num_segments + 1]`): segment i is `y[new_indptr[i] : new_indptr[i + 1]]`.
    Raises ValueError (bitorder, shape, device, an indptr that falls or does not end at the length of x) or TypeError
    (dtype).
    """
    import torch

    big = _is_big(bitorder)
    if indptr.ndim != 1 or indptr.numel() == 0 or indptr.is_floating_point():
        raise ValueError(
            f"indptr: integers of shape [num_segments + 1] are required; got {indptr.dtype} {list(indptr.shape)}"
        )
    if x.ndim != 1:
        raise ValueError(f"x: shape [indptr[-1]] is required; got {list(x.shape)}")
    lengths = indptr.diff()
    new_indptr = torch.nn.functional.pad(((lengths + 7) >> 3).cumsum(0, dtype=torch.int32), (1, 0))
    told = torch.stack((indptr[0].long(), indptr[-1].long(), new_indptr[-1].long(), (lengths < 0).sum())).tolist()
    start, end, size, falls = told
    if start < 0 or falls or end != x.numel():
        raise ValueError(
            f"indptr: must rise from 0 or more to the length of x, {x.numel()}; "
            f"got {start} to {end}, falling {falls} times"
        )
    y = x.new_empty(size, dtype=torch.uint8)
    _packbits(y, x.contiguous(), indptr, new_indptr, big)
    return y, new_indptr
