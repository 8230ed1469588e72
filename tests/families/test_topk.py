"""Top-k selection against a stable sort, on every device and implementation, with ties, NaN and signed zeros."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_guards, guarded, impls, rand, strided, using
from fi_core.topk import TopKTieBreak, can_implement_filtered_topk

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = math.inf


def selected(x: torch.Tensor, k: int, *, large: bool = False, by_value: bool = False) -> torch.Tensor:
    """Returns the indices of the k largest of each row, by rising index or by descending value."""
    x = x.double().nan_to_num(nan=INF, posinf=1.7e308, neginf=-INF)
    if large:
        places = x.shape[1] - 1 - x.flip(1).argsort(dim=1, descending=True, stable=True)[:, :k]
    else:
        places = x.argsort(dim=1, descending=True, stable=True)[:, :k]
    places = places.sort(1).values
    if by_value:
        places = places.gather(1, x.gather(1, places).argsort(dim=1, descending=True, stable=True))
    return places


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check(x: torch.Tensor, k: int, tie_break: int = 0, **options: Any) -> None:
    """Checks that top_k of x is exact, unsorted and sorted, with the values of x bit for bit."""
    for by_value in (False, True):
        values, indices = fi_core.top_k(x, k, sorted=by_value, tie_break=tie_break, **options)
        want = selected(x, k, large=tie_break == 2, by_value=by_value)
        assert values.dtype == x.dtype and indices.dtype == torch.int64 and values.shape == indices.shape == want.shape
        wrong = (indices != want).any(1).nonzero().flatten().tolist()
        assert not wrong, f"rows {wrong[:5]} differ, k={k}, sorted={by_value}"
        assert torch.equal(bits(values), bits(x.gather(1, want)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width"),
    [(3, 1), (2, 31), (5, 2049), (64, 32000), (1000, 333), (3, 50257), (1, 151936), (1, 262144), (16, 131072)],
)
def test_top_k(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and rows * width > 1 << 20:
        rows = 2
    x = rand(rows, width, dtype=dtype, device=device)
    for impl in impls("top_k", device):
        with using("top_k", impl):
            for k in (1, 7, 50, 256, 2048, width):
                if k <= width:
                    check(x, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_and_no_k(dtype: torch.dtype, device: str) -> None:
    for rows, width, k in ((0, 9, 3), (3, 9, 0), (3, 0, 0)):
        values, indices = fi_core.top_k(torch.ones(rows, width, dtype=dtype, device=device), k, sorted=True)
        assert values.shape == indices.shape == (rows, k) and values.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1003, 40001])
def test_any_alignment_of_rows(width: int, dtype: torch.dtype, device: str) -> None:
    """Rows of any alignment are exact. The padding between them is NaN, which would be selected."""
    x = rand(4, width, dtype=dtype, device=device)
    for impl in impls("top_k", device):
        with using("top_k", impl):
            for padding in (1, 2, 3, 5, 8):
                check(strided(x, padding), 100)


def adversarial(width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Returns rows that are hard to select from: ties, infinities, NaN, equal digits."""
    noise = rand(width, dtype=torch.float32, device="cpu")
    steps = torch.arange(width, dtype=torch.float32)
    tiny = torch.finfo(dtype).smallest_normal
    with_nan = noise.clone()
    with_nan[::3], with_nan[1::7], with_nan[2::5] = math.nan, INF, -INF
    negative_nan = noise.clone()
    negative_nan[5::11] = -math.nan
    rows = [
        torch.zeros(width),
        torch.full((width,), -INF),
        torch.full((width,), INF),
        torch.full((width,), math.nan),
        (steps % 2) * 2 - 1,
        torch.where(steps % 2 == 0, 0.0, -0.0),
        torch.where(noise > 0.5, 1.0, -0.0),
        torch.where(noise > 2.0, INF, -INF),
        with_nan,
        negative_nan,
        steps / width,
        -steps / width,
        1 + steps / width * 2.0**-9,  # equal first digit
        1 + (steps % 97) * 2.0**-23,  # and equal second digit
        noise * tiny,  # subnormal
        (noise * 3).round(),
        torch.full((width,), -1.0) - (steps == width // 2).float(),
        torch.full((width,), -3.0) + (steps == width - 1).float(),
    ]
    return torch.stack(rows).to(dtype).to(device)


@pytest.mark.parametrize("tie_break", list(TopKTieBreak))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4099, 36000])
def test_adversarial_rows(width: int, dtype: torch.dtype, tie_break: TopKTieBreak, device: str) -> None:
    x = adversarial(width, dtype, device)
    for impl in impls("top_k", device):
        with using("top_k", impl):
            for k in (1, 7, 256, 2048, 3000, width - 1):
                check(x, k, tie_break)
            check(x[:, 3:-2], 50, tie_break)
            for row in x:
                check(row[None, : width // 2 * 2 - 6], 1000, tie_break)


def test_sorted_beyond_shared_memory(device: str) -> None:
    """A k too large for the sort in the kernel is sorted too, with ties, NaN and signed zeros."""
    x = adversarial(9000, torch.float32, device)
    for k in (4096, 4097, 9000):
        check(x, k)
        check(x, k, TopKTieBreak.LARGE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(dtype: torch.dtype, device: str) -> None:
    """Rows that exceed the shared memory of a cluster, which a CPU does not have, are exact."""
    x = (rand(1, 3_000_001 if device == "cuda" else 300_001, dtype=torch.float32, device=device) * 100).to(dtype)
    for impl in impls("top_k", device):
        with using("top_k", impl):
            for k in (5, 2048, 100_000):
                check(x, k)
                check(x, k, TopKTieBreak.LARGE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, device: str) -> None:
    """Results of a row are bit-identical alone, in any batch, at any position and in every run."""
    x = (rand(130, 33000, dtype=torch.float32, device=device) * 4).round().to(dtype)
    for impl in impls("top_k", device):
        with using("top_k", impl):
            values, indices = fi_core.top_k(x, 300)
            for some in (slice(7, 8), slice(5, 9), slice(0, 64), slice(0, 130)):
                for _ in range(3):
                    again = fi_core.top_k(x[some], 300, deterministic=True, dsa_graph_safe=True)
                    assert torch.equal(again[0], values[some]) and torch.equal(again[1], indices[some])


def mapped(x: torch.Tensor, k: int, lengths: list[int], starts: list[int], to_slot: Any, large: bool) -> torch.Tensor:
    """Returns what the transforms give, row by row; `to_slot(row, x)` maps an index."""
    rows = []
    for i, (length, start) in enumerate(zip(lengths, starts)):
        segment = x[i : i + 1, start : start + max(length, 0)].cpu()
        places = selected(segment, min(k, segment.shape[1]), large=large)[0].tolist()
        rows.append([to_slot(i, place) for place in places] + [-1] * (k - len(places)))
    return torch.tensor(rows, dtype=torch.int32).reshape(x.shape[0], k)


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


WIDTH = 9001
LENGTHS = [0, 5, 64, 65, 9001, 4500, -3, 100_000]  # the last is clamped to the row
STARTS = [9001, 8996, 1, 17, 0, 4501, 3, 8000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tie_break", [TopKTieBreak.NONE, TopKTieBreak.LARGE])
@pytest.mark.parametrize("k", [1, 64, 2048])
def test_ragged_transform(k: int, tie_break: TopKTieBreak, dtype: torch.dtype, device: str) -> None:
    x = (rand(8, WIDTH, dtype=torch.float32, device=device) * 50).round().to(dtype)
    offsets = [0, 7, 100, 5, 10**6, 2, 3, 40]
    large = tie_break == TopKTieBreak.LARGE
    for impl in impls("top_k", device):
        with using("top_k", impl):
            for starts in (None, STARTS):
                got = fi_core.top_k_ragged_transform(
                    x,
                    ints(offsets, device),
                    ints(LENGTHS, device),
                    k,
                    tie_break=tie_break,
                    row_starts=ints(starts, device) if starts else None,
                )
                want = mapped(x, k, LENGTHS, starts or [0] * 8, lambda i, place: place + offsets[i], large)
                assert got.dtype == torch.int32 and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("page_size", [1, 16, 60])
@pytest.mark.parametrize("k", [7, 2048])
def test_page_table_transform(k: int, page_size: int, device: str) -> None:
    x = (rand(8, WIDTH, dtype=torch.float32, device=device) * 50).round()
    to_batch, columns = [2, 0, 1, 1, 2, 0, 0, 2], [0, 1, 2, 5, 0, 3, 9, 4]
    pages = WIDTH // page_size + 11 + max(STARTS) * (page_size == 1)
    table = torch.randperm(8 * pages, generator=torch.Generator().manual_seed(1)).int().reshape(8, pages)
    source = strided(table, 3).to(device) if device == "cuda" else table
    source.copy_(table)

    def slot(batch: int, column: int, place: int) -> int:
        return int(table[batch, column + place // page_size]) * page_size + place % page_size

    forms: list[tuple[dict[str, Any], Any]] = [
        ({}, lambda i, place: slot(i, 0, place)),
        ({"row_to_batch": to_batch}, lambda i, place: slot(to_batch[i], 0, place)),
        ({"page_table_row_starts": columns}, lambda i, place: slot(i, columns[i], place)),
        (
            {"row_starts": STARTS, "page_table_row_starts": columns, "row_to_batch": to_batch},
            lambda i, place: slot(to_batch[i], columns[i], place),
        ),
    ]
    if page_size == 1:
        forms.append(({"row_starts": STARTS}, lambda i, place: slot(i, STARTS[i], place)))
    for impl in impls("top_k", device):
        with using("top_k", impl):
            for given, to_slot in forms:
                out, raw = (guarded((8, k), torch.int32, device) for _ in range(2))
                got = fi_core.top_k_page_table_transform(
                    x,
                    source,
                    ints(LENGTHS, device),
                    k,
                    **{name: ints(values, device) for name, values in given.items()},
                    page_size=page_size,
                    out=out,
                    out_raw_indices=raw,
                )
                assert got is out
                starts = given.get("row_starts") or [0] * 8
                assert torch.equal(got.cpu(), mapped(x, k, LENGTHS, starts, to_slot, False))
                assert torch.equal(raw.cpu(), mapped(x, k, LENGTHS, starts, lambda i, place: place, False))
                assert_guards(out)
                assert_guards(raw)


def test_transforms_of_long_rows(device: str) -> None:
    """Lengths far below the width, as in decoding with room for the longest context."""
    x = rand(5, 120_000, dtype=torch.bfloat16, device=device)
    lengths, offsets = [120_000, 2049, 2048, 30_000, 1], [0, 1, 2, 3, 4]
    want = mapped(x, 2048, lengths, [0] * 5, lambda i, place: place + offsets[i], False)
    for impl in impls("top_k", device):
        with using("top_k", impl):
            got = fi_core.top_k_ragged_transform(x, ints(offsets, device), ints(lengths, device), 2048)
            assert torch.equal(got.cpu(), want)


def test_int64_indices_are_taken(device: str) -> None:
    x = rand(3, 200, dtype=torch.float32, device=device)
    table = torch.arange(600, device=device).reshape(3, 200) + 1000
    row, lengths = torch.tensor([0, 1, 2], device=device), torch.tensor([200, 50, 3], device=device)
    got = fi_core.top_k_page_table_transform(x, table, lengths, 10, row, row_starts=row * 0)
    assert torch.equal(got, fi_core.top_k_page_table_transform(x, table.int(), lengths.int(), 10))
    assert torch.equal(fi_core.top_k_ragged_transform(x, row * 200 + 1000, lengths, 10, row_starts=row * 0), got)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cluster", "cuda"])
def test_graph_capture(impl: str) -> None:
    """A replayed graph uses the scores and lengths that its tensors hold at replay."""
    x = rand(4, 70_000, dtype=torch.float32, device="cuda")
    lengths, offsets = ints([70_000] * 4, "cuda"), ints([0] * 4, "cuda")
    if impl not in impls("top_k", "cuda"):
        pytest.skip("not on this device")
    with using("top_k", impl):
        fi_core.top_k(x, 500, sorted=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values, indices = fi_core.top_k(x, 500, sorted=True)
            slots = fi_core.top_k_ragged_transform(x, offsets, lengths, 500, dsa_graph_safe=True)
        for seed, length in ((1, 60_000), (2, 100), (3, 0)):
            x.copy_(rand(4, 70_000, dtype=torch.float32, device="cuda", seed=seed))
            lengths.fill_(length)
            graph.replay()
            want = selected(x, 500, by_value=True)
            assert torch.equal(indices, want) and torch.equal(values, x.gather(1, want))
            expected = mapped(x, 500, [length] * 4, [0] * 4, lambda i, place: place, False)
            assert torch.equal(slots.cpu(), expected)


def test_top_k_compiles(device: str) -> None:
    x = rand(3, 500, dtype=torch.float32, device=device)
    lengths = ints([500, 3, 0], device)
    for function, arguments in (
        (fi_core.top_k, (x, 9, True)),
        (fi_core.top_k, (x, 9, False, False, TopKTieBreak.LARGE)),
        (fi_core.top_k_ragged_transform, (x, lengths, lengths, 9)),
        (fi_core.top_k_page_table_transform, (x, torch.ones(3, 500, dtype=torch.int32, device=device), lengths, 9)),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        got, want = compiled(*arguments), function(*arguments)
        for a, b in zip(got, want) if isinstance(got, tuple) else [(got, want)]:
            assert torch.equal(a, b)


X, L = torch.ones(2, 10), torch.tensor([3, 4], dtype=torch.int32)
TABLE = torch.ones(2, 10, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fi_core.top_k(X, 11), ValueError, "k: 0 to the length of a row, 10, is required; got 11"),
        (lambda: fi_core.top_k(X, -1), ValueError, "k: 0 to the length"),
        (lambda: fi_core.top_k(X, 2, tie_break=3), ValueError, "tie_break: TopKTieBreak NONE .* got 3"),
        (lambda: fi_core.top_k(X[0], 2), ValueError, r"input must have shape \[rows, width\]; got \[10\]"),
        (lambda: fi_core.top_k(X.mT, 2), ValueError, "input must be contiguous in its last dimension"),
        (lambda: fi_core.top_k(X.double(), 2), ValueError, "requires dtype in f32, f16, bf16, got torch.float64"),
        (lambda: fi_core.top_k_ragged_transform(X, L, L, -1), ValueError, r"k: 0 to 2\^31 - 1 is required; got -1"),
        (lambda: fi_core.top_k_ragged_transform(X, L, L.float(), 2), TypeError, "lengths must be int32; got float32"),
        (lambda: fi_core.top_k_ragged_transform(X, L[:1], L, 2), ValueError, r"offsets must have shape .* got \[1\]"),
        (
            lambda: fi_core.top_k_ragged_transform(X, L, L, 2, row_starts=L[:1]),
            ValueError,
            r"row_starts must have shape \[rows\] with rows = 2; got \[1\]",
        ),
        (
            lambda: fi_core.top_k_page_table_transform(X, TABLE, L, 2, row_starts=L, page_size=4),
            ValueError,
            "page_table_row_starts is required with row_starts where page_size is not 1; got page_size 4",
        ),
        (
            lambda: fi_core.top_k_page_table_transform(X, TABLE, L, 2, page_size=0),
            ValueError,
            "page_size must be 1 or more",
        ),
        (
            lambda: fi_core.top_k_page_table_transform(X, TABLE[:1], L, 2),
            ValueError,
            r"src_page_table must have a row for each row of input, 2, .* got \[1, 10\]",
        ),
        (
            lambda: fi_core.top_k_page_table_transform(X, TABLE, L, 2, out=TABLE.clone()),
            ValueError,
            r"out must have shape \[rows, k\] with rows = 2, k = 2; got \[2, 10\]",
        ),
        (
            lambda: fi_core.top_k_page_table_transform(X, TABLE, L, 2, out_raw_indices=X[:, :2].contiguous()),
            TypeError,
            "out_raw_indices must be int32; got float32",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_names_equal_to_flashinfer() -> None:
    assert (TopKTieBreak.NONE, TopKTieBreak.SMALL, TopKTieBreak.LARGE) == (0, 1, 2)
    assert fi_core.TopKTieBreak is TopKTieBreak
    assert torch.cuda.is_available() or can_implement_filtered_topk() is False
    assert fi_core.top_k.fi_trace(input=X, k=3)["name"] == "top_k_v10_k3"
    fi_core.top_k_page_table_transform.fi_trace(input=X, src_page_table=TABLE, lengths=L, k=3)
    assert fi_core.top_k_ragged_transform.fi_trace(input=X, offsets=L, lengths=L, k=3)["axes"]["k"]["value"] == 3
