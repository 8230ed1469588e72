"""Bit packing against the references of the templates and against numpy's rule, on every device and implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import impls, using
from fi_core.quantization.packbits import _packbits_reference, _segment_packbits_reference

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 64, 1000, 16384, 70003]


def bits(n: int, device: str, seed: int = 0) -> torch.Tensor:
    return (torch.rand(n, generator=torch.Generator().manual_seed(seed + n)) < 0.5).to(device)


def by_hand(x: torch.Tensor, bitorder: str) -> list[int]:
    """numpy.packbits, from its documentation."""
    values = [int(v != 0) for v in x.flatten().tolist()]
    values += [0] * (-len(values) % 8)
    groups = [values[i : i + 8] for i in range(0, len(values), 8)]
    order = 1 if bitorder == "big" else -1
    return [int("".join(map(str, group[::order])), 2) for group in groups]


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("n", SIZES)
def test_packbits(n: int, bitorder: str, device: str) -> None:
    x = bits(n, device)
    want = by_hand(x, bitorder)
    assert _packbits_reference(x.cpu(), bitorder).tolist() == want
    for impl in impls("packbits", device):
        with using("packbits", impl):
            y = fi_core.packbits(x, bitorder)
            assert y.dtype == torch.uint8 and y.device == x.device
            assert y.tolist() == want
            if n:  # a misaligned address
                assert fi_core.packbits(x[1:], bitorder).tolist() == by_hand(x[1:], bitorder)


def test_packbits_is_big_endian_by_default(device: str) -> None:
    one = torch.tensor([True] + [False] * 8, device=device)
    assert fi_core.packbits(one).tolist() == [128, 0]
    assert fi_core.packbits(one, "little").tolist() == [1, 0]


def test_every_byte_of_uint8_counts(device: str) -> None:
    """Any non-zero value is 1, and does not change its neighbours."""
    x = torch.arange(256 * 8, device=device).remainder(257).clamp(max=255).to(torch.uint8)
    for start in range(8):
        for bitorder in ("big", "little"):
            assert fi_core.packbits(x[start:], bitorder).tolist() == by_hand(x[start:], bitorder)
    for value in range(256):
        lone = torch.zeros(24, dtype=torch.uint8, device=device)
        lone[value % 24] = value
        assert fi_core.packbits(lone).tolist() == by_hand(lone, "big")


def test_packbits_flattens(device: str) -> None:
    x = bits(5 * 33, device).view(5, 33)
    assert fi_core.packbits(x).tolist() == by_hand(x, "big")
    assert fi_core.packbits(x.T).tolist() == by_hand(x.T, "big")
    assert fi_core.packbits(x[:, ::2], "little").tolist() == by_hand(x[:, ::2], "little")


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths", [[], [0], [8], [5, 8, 0, 1, 16, 0, 0, 33, 7], [0, 0, 3], [40000, 1, 50003], [3] * 999]
)
def test_segment_packbits(lengths: list[int], dtype: torch.dtype, bitorder: str, device: str) -> None:
    indptr = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=device)
    x = bits(sum(lengths), device)
    want = [byte for part in x.split(lengths) for byte in by_hand(part, bitorder)]
    assert _segment_packbits_reference(x.cpu(), indptr.cpu(), bitorder)[0].tolist() == want
    for impl in impls("packbits", device):
        with using("packbits", impl):
            y, new_indptr = fi_core.segment_packbits(x, indptr, bitorder)
            assert y.dtype == torch.uint8 and y.tolist() == want
            assert new_indptr.dtype == torch.int32
            assert new_indptr.tolist() == [0, *torch.tensor([-(-n // 8) for n in lengths]).long().cumsum(0).tolist()]
            assert torch.equal(fi_core.segment_packbits(x.byte() * 255, indptr, bitorder)[0], y)


def test_segments_may_start_behind_the_first_element(device: str) -> None:
    x = bits(50, device)
    y, new_indptr = fi_core.segment_packbits(x, torch.tensor([11, 20, 50], device=device))
    assert y.tolist() == by_hand(x[11:20], "big") + by_hand(x[20:], "big")
    assert new_indptr.tolist() == [0, 2, 6]


@pytest.mark.parametrize(
    ("x", "bitorder", "error", "words"),
    [
        (
            torch.ones(8, dtype=torch.bool),
            "middle",
            ValueError,
            'bitorder: "big" or "little" is required; got \'middle\'',
        ),
        (torch.ones(8), "big", TypeError, "x must be bool or uint8; got float32"),
        (torch.ones(8, dtype=torch.int8), "big", TypeError, "x must be bool or uint8; got int8"),
    ],
)
def test_packbits_rejects(x: torch.Tensor, bitorder: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fi_core.packbits(x, bitorder)
    with pytest.raises(error, match=words):
        fi_core.segment_packbits(x, torch.tensor([0, 8]), bitorder)


@pytest.mark.parametrize(
    ("indptr", "error", "words"),
    [
        (
            torch.tensor([0, 4, 7]),
            ValueError,
            "indptr: must not decrease.* x, 8; got 0 to 7, decreasing 0 times",
        ),
        (torch.tensor([0, 4, 9]), ValueError, "length of x, 8; got 0 to 9"),
        (torch.tensor([-1, 4, 8]), ValueError, "got -1 to 8"),
        (torch.tensor([0, 6, 5, 8]), ValueError, "decreasing 1 times"),
        (torch.tensor([[0, 8]]), ValueError, "indptr: integers of shape"),
        (torch.tensor([], dtype=torch.int32), ValueError, "indptr: integers of shape"),
        (torch.tensor([0.0, 8.0]), ValueError, "indptr: integers of shape"),
        (torch.tensor([0, 8], dtype=torch.int16), ValueError, "int32 or int64; got torch.int16"),
        (torch.tensor([0, 1, 8, 1])[::2], ValueError, "indptr must be contiguous"),
    ],
)
def test_segment_packbits_rejects(indptr: torch.Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fi_core.segment_packbits(torch.ones(8, dtype=torch.bool), indptr)


def test_segment_packbits_rejects_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"x: shape \[indptr\[-1\]\] is required; got \[2, 4\]"):
        fi_core.segment_packbits(torch.ones(2, 4, dtype=torch.bool), torch.tensor([0, 8]))


def test_packbits_compiles(device: str) -> None:
    x = bits(77, device)
    compiled: Any = torch.compile(fi_core.packbits, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, "little"), fi_core.packbits(x, "little"))


def test_packbits_is_registered_well() -> None:
    x, y = bits(77, "cpu"), torch.zeros(10, dtype=torch.uint8)
    fi_core.packbits(x)
    torch.library.opcheck(torch.ops.fi_core.packbits.default, (y, x, None, None, True))
