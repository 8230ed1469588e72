"""Every implementation of batch_decode against fp64: shapes, types, pages, masks and scales, among poisoned pages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from families.harness import assert_close, assert_guards, guarded, impls, rand
from families.paged import numbers_of
from fi_core.attention.ops import decode as ops
from fi_core.runtime.dispatch import Choice, Request, choose
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.machine import target_of
from fi_core.runtime.spec.dtype import short_name
from fi_core.utils import PosEncodingMode, get_alibi_slopes

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LOG2E = 1.4426950408889634
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 130, 1000]


class Problem(NamedTuple):
    """Requests in a paged cache with NaN in unused pages and slots, and page ids that must not be read."""

    q: torch.Tensor
    k: torch.Tensor  # [pages, page_size, heads, dim] whatever the order in memory
    v: torch.Tensor
    indices: torch.Tensor
    indptr: torch.Tensor
    last: torch.Tensor
    lengths: list[int]
    q_len: int
    layout: int

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


def cache(pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype, layout: int, padding: int) -> Any:
    """A cache of NaN, as NHD over the memory order of the layout, with rows `padding` elements longer."""
    shape = (pages, page_size, heads, dim + padding) if layout == 0 else (pages, heads, page_size, dim + padding)
    x = torch.full(shape, math.nan).to(dtype)[..., :dim]
    return x if layout == 0 else x.transpose(1, 2)


def problem(
    lengths: list[int] = LENGTHS,
    qo_heads: int = 8,
    kv_heads: int = 2,
    dim: int = 128,
    dim_vo: int = 0,
    page_size: int = 16,
    q: torch.dtype = BF16,
    kv: torch.dtype | None = None,
    q_len: int = 1,
    layout: int = 0,
    padding: int = 0,
    device: str = "cpu",
) -> Problem:
    kv, dim_vo = kv or q, dim_vo or dim
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(total + 3, generator=generator)[:total]
    k, v = (cache(total + 3, page_size, kv_heads, d, kv, layout, padding) for d in (dim, dim_vo))
    at = 0
    for n, count in zip(lengths, counts):
        for i in range(count):
            page, used = int(order[at]), min(page_size, n - i * page_size)
            for x, seed in ((k, 1), (v, 2)):
                x[page, :used] = rand(used, kv_heads, x.shape[3], dtype=F32, device="cpu", seed=seed + 17 * page).to(kv)
            at += 1
    indices = torch.cat([order, torch.tensor([2**31 - 1] * 5)]).to(torch.int32)
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor([n - (c - 1) * page_size if c else 0 for n, c in zip(lengths, counts)], dtype=torch.int32)
    queries = rand(len(lengths) * q_len, qo_heads, dim, dtype=F32, device="cpu", seed=3).to(q)

    def move(x: torch.Tensor) -> torch.Tensor:  # strides stay as they are
        if device == "cpu":
            return x
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        moved.copy_(x.to(device)) if x.dtype not in (E4M3, E5M2) else moved.view(torch.uint8).copy_(
            x.view(torch.uint8).to(device)
        )
        return moved

    return Problem(
        queries.to(device), move(k), move(v), *(t.to(device) for t in (indices, indptr, last)), lengths, q_len, layout
    )


def reference(
    x: Problem,
    sm_scale: float,
    window_left: int = -1,
    soft_cap: float = 0.0,
    alibi: bool = False,
    rope: bool = False,
    sinks: torch.Tensor | None = None,
    draft: list[list[int]] | None = None,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, dim = x.q.shape
    group, q_len = heads // x.k.shape[2], x.q_len
    out = torch.zeros(rows, heads, x.v.shape[3], dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    k, v, indices = x.k.cpu(), x.v.cpu(), x.indices.cpu()

    def rotate(y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = dim // 2
        angles = positions[:, None].double() * 1e4 ** (-2.0 * torch.arange(half, dtype=torch.float64) / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = y[..., :half], y[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    at = 0
    for b, n in enumerate(x.lengths):
        count = -(-n // x.page_size)
        pages = indices[at : at + count].long()
        at += count
        keys = k[pages].double().reshape(-1, *k.shape[2:])[:n]
        values = v[pages].double().reshape(-1, *v.shape[2:])[:n]
        q = x.q[b * q_len : (b + 1) * q_len].cpu().double()
        if scale_q is not None:
            q = q * scale_q.cpu().double()[:, None]
        if scale_k is not None:
            keys = keys * scale_k.cpu().double()[:, None]
        if scale_v is not None:
            values = values * scale_v.cpu().double()[:, None]
        if rope:
            q = rotate(q, torch.arange(n - q_len, n))
            keys = rotate(keys, torch.arange(n))
        s = torch.einsum("ihd,jhd->ihj", q, keys.repeat_interleave(group, 1)) * sm_scale
        if soft_cap > 0:
            s = soft_cap * torch.tanh(s / soft_cap)
        j, i = torch.arange(n)[None], torch.arange(q_len)[:, None]
        if alibi:
            s = s + get_alibi_slopes(heads).double().cpu()[None, :, None] * (j - i)[:, None]
        position = n - q_len + i
        seen = j <= position if draft is None else j < n - q_len
        if draft is not None and n:
            bits = torch.tensor(draft, dtype=torch.bool)
            tail = torch.zeros(q_len, n, dtype=torch.bool)
            tail[:, max(0, n - q_len) :] = bits[:, max(0, q_len - n) :]
            seen = seen | tail
        if window_left >= 0:
            seen = seen & (j >= position - window_left)
        s = s.masked_fill(~seen[:, None], -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.cpu().double()[None, :, None].expand(q_len, -1, 1)], -1)
        total = s.logsumexp(-1) if s.shape[-1] else torch.full((q_len, heads), -math.inf, dtype=torch.float64)
        weights = torch.exp(s - total.where(total.isfinite(), 0.0)[..., None])[..., :n]
        out[b * q_len : (b + 1) * q_len] = torch.einsum("ihj,jhd->ihd", weights, values.repeat_interleave(group, 1))
        lse[b * q_len : (b + 1) * q_len] = total * LOG2E
    return out, lse


def choice(x: Problem, impl: str, k: torch.Tensor, v: torch.Tensor, mode: int) -> Choice:
    """The choice of the named implementation, or UnsupportedError with its reasons."""
    steps = [t.data_ptr() | step * t.element_size() for t in (x.q, k, v) for step in t.stride()[:-1]]
    alignment = math.gcd(16, *steps)
    page_size, kv_heads = (k.shape[1], k.shape[2]) if x.layout == 0 else (k.shape[2], k.shape[1])
    fields = {
        "q": short_name(x.q.dtype), "kv": short_name(k.dtype), "out": short_name(x.q.dtype),
        "head_dim_qk": x.q.shape[2], "head_dim_vo": v.shape[3], "group_size": x.q.shape[1] // kv_heads,
        "page_size": page_size, "pos_encoding": PosEncodingMode(mode).name, "alignment": alignment,
    }  # fmt: skip
    device = torch.device(x.q.device.type, 0) if x.q.is_cuda else x.q.device
    return choose(Request.of(ops.BATCH_DECODE, target_of(device), fields, impl))


def run(
    x: Problem,
    impl: str,
    split_kv: int = ops.BALANCED,
    window_left: int = -1,
    out_dtype: torch.dtype | None = None,
    num_ctas: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """num_ctas: 0 for those of the device, or so few that CTAs take dynamic ranges one after another."""
    device, (rows, heads, _) = x.q.device, x.q.shape
    device = torch.device(device.type, 0) if device.type == "cuda" else device
    kv_heads, batch = x.k.shape[2], len(x.lengths)
    q_tiles = ops.num_q_tiles(heads, kv_heads, x.q_len)
    k, v = (x.k, x.v) if x.layout == 0 else (x.k.transpose(1, 2), x.v.transpose(1, 2))
    mode = options.get("pos_encoding", 0)
    tokens = x.indices.numel() * x.page_size
    sizes = ops.buffer_sizes(device, batch, q_tiles, split_kv, tokens, choice(x, impl, k, v, mode))
    if num_ctas:
        words = 12 + (3 * num_ctas + 1) * 8 + 4 * batch + 6 * num_ctas
        sizes = ops.Sizes(words, 6 * num_ctas, num_ctas, 3 * num_ctas, split_kv)
    buffers = ops.allocate(device, sizes, x.v.shape[3])
    buffers.partials.fill_(math.nan)
    buffers.schedule.fill_(-7)
    ops.decode_plan(
        buffers.schedule,
        x.indptr,
        x.last,
        None,
        x.page_size,
        q_tiles,
        **numbers_of(buffers),
        q_len=x.q_len,
        window_left=window_left,
    )
    dynamic_ranges = int(buffers.schedule[7])
    assert (dynamic_ranges > 0) == (num_ctas > 0)
    out = guarded(
        (rows, heads, x.v.shape[3]), out_dtype or (x.q.dtype if x.q.element_size() > 1 else BF16), x.q.device.type
    )
    lse = torch.full((rows, heads), math.nan, dtype=F32, device=device)
    for _ in range(2):  # counters come back to zero
        ran = ops.batch_decode(
            out, lse, buffers.partials, buffers.schedule, x.q, k, v, x.indices, x.layout, buffers.num_ctas,
            buffers.num_ranges, buffers.split_kv, q_len=x.q_len, window_left=window_left, backend=impl, **options,
        )  # fmt: skip
        assert ran is not None and ran.implementation == impl
    assert_guards(out)
    return out, lse


def check(
    x: Problem,
    impl: str,
    split_kv: int = ops.BALANCED,
    sm_scale: float = 0.0,
    out_dtype: torch.dtype | None = None,
    num_ctas: int = 0,
    **options: Any,
) -> None:
    sm_scale = sm_scale or x.q.shape[2] ** -0.5
    out, lse = run(x, impl, split_kv, out_dtype=out_dtype, num_ctas=num_ctas, sm_scale=sm_scale, **options)
    known = {n: y for n, y in options.items() if n not in ("pos_encoding", "mask")}
    mode = options.get("pos_encoding", 0)
    if "mask" in options:
        packed = options["mask"][: x.q_len].cpu()
        known["draft"] = [[int(row[t // 8]) >> t % 8 & 1 for t in range(x.q_len)] for row in packed]
    expected, expected_lse = reference(x, sm_scale, alibi=mode == 2, rope=mode == 1, **known)
    assert_close(out, expected, tolerance=(2e-2, 1e-2) if x.q.dtype != F32 else None)
    assert_close(lse, expected_lse, tolerance=(2e-3, 1e-2) if x.q.dtype != F32 else (1e-5, 1e-4))


def each(x: Problem, **options: Any) -> None:
    """Checks every implementation that supports the problem."""
    mode = options.get("pos_encoding", 0)
    tried = 0
    k, v = (x.k, x.v) if x.layout == 0 else (x.k.transpose(1, 2), x.v.transpose(1, 2))
    for impl in impls("batch_decode", x.q.device.type):
        try:
            choice(x, impl, k, v, mode)
        except UnsupportedError:
            continue
        tried += 1
        try:
            check(x, impl, **options)
            if impl == "tma_sm90":  # which takes other ways where there may be more to do
                check(
                    x._replace(indices=torch.cat([x.indices, x.indices.new_full((1 << 20,), 2**31 - 1)])),
                    impl,
                    **options,
                )
        except AssertionError as error:
            raise AssertionError(f"{impl}: {error}") from error
    assert tried


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256, 8, 72, 512])
def test_head_dims(dim: int, device: str) -> None:
    each(problem(dim=dim, device=device))


@pytest.mark.parametrize(
    ("q", "kv"), [(F16, F16), (F32, F32), (F16, E4M3), (BF16, E4M3), (BF16, E5M2), (E4M3, E4M3), (E5M2, E5M2)], ids=str
)
@pytest.mark.parametrize("dim", [64, 128])
def test_types(q: torch.dtype, kv: torch.dtype, dim: int, device: str) -> None:
    each(problem(q=q, kv=kv, dim=dim, device=device))


@pytest.mark.parametrize("dim", [80, 96, 192, 256])
def test_fp8_keys_of_other_head_dims(dim: int, device: str) -> None:
    each(problem(kv=E4M3, dim=dim, device=device))


def test_head_dims_that_differ(device: str) -> None:
    each(problem(dim=64, dim_vo=128, device=device))


@pytest.mark.parametrize("out", [F16, F32, E4M3], ids=str)
def test_output_types(out: torch.dtype, device: str) -> None:
    x = problem([33, 700], device=device)
    for impl in impls("batch_decode", device):
        got, _ = run(x, impl, sm_scale=0.1, out_dtype=out)
        assert_close(got, reference(x, 0.1)[0], tolerance=(7e-2 if out == E4M3 else 2e-2, 1e-2))


@pytest.mark.parametrize("page_size", [1, 5, 16, 48, 64, 128, 256])
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("kv", [BF16, E4M3], ids=str)
def test_pages(page_size: int, layout: int, kv: torch.dtype, device: str) -> None:
    each(
        problem(
            [*LENGTHS, page_size - 1, page_size, page_size + 1, 3000],
            page_size=page_size,
            layout=layout,
            kv=kv,
            device=device,
        )
    )


@pytest.mark.parametrize("padding", [8, 1])
@pytest.mark.parametrize("layout", [0, 1])
def test_strided_caches(padding: int, layout: int, device: str) -> None:
    each(problem(layout=layout, padding=padding, device=device))


@pytest.mark.parametrize(
    ("qo_heads", "kv_heads"), [(1, 1), (3, 1), (4, 4), (14, 2), (28, 4), (16, 1), (20, 1), (128, 1), (32, 32)]
)
def test_groups(qo_heads: int, kv_heads: int, device: str) -> None:
    each(problem([5, 300, 1000], qo_heads, kv_heads, device=device))


@pytest.mark.parametrize("dtype", [F16, BF16, F32, E4M3], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "group", "padding"), [(3, 64, 1, 1), (20, 96, 1, 0), (2, 80, 1, 0), (5, 256, 1, 8), (5, 64, 3, 1)]
)
def test_few_rows_of_a_kv_head(heads: int, dim: int, group: int, padding: int, dtype: torch.dtype, device: str) -> None:
    """The CPU kernel computes several heads at a time and reads rows in place, at any alignment."""
    x = problem([1, 16, 37, 600], group * heads, heads, dim, page_size=5, q=dtype, padding=padding, device=device)
    each(x, window_left=550)


@pytest.mark.parametrize("q_len", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_several_query_tokens_are_causal(q_len: int, group: int, device: str) -> None:
    each(problem([8, 9, 64, 65, 1000], 2 * group, 2, q_len=q_len, device=device))


@pytest.mark.parametrize("window", [0, 1, 15, 63, 64, 200])
@pytest.mark.parametrize("q_len", [1, 3])
def test_sliding_window(window: int, q_len: int, device: str) -> None:
    each(problem([3, 64, 65, 129, 777], q_len=q_len, device=device), window_left=window)


@pytest.mark.parametrize("window", [20, 40, 63])
def test_a_window_that_begins_within_a_tile_of_large_rows(window: int, device: str) -> None:
    """With head dim 256 a stage holds half a KV tile, which may be entirely before the window."""
    each(problem([100, 127, 600], 2, 2, 256, page_size=16, device=device), window_left=window)


def test_evicted_pages_of_a_window_are_not_read(device: str) -> None:
    x = problem([1000], device=device)
    expected = reference(x, 0.1, window_left=99)[0]
    x.indices[: (1000 - 100) // 16] = -1
    for impl in impls("batch_decode", device):
        assert_close(run(x, impl, window_left=99, sm_scale=0.1)[0], expected, tolerance=(2e-2, 1e-2))


@pytest.mark.parametrize("kv", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"soft_cap": 3.0}, {"pos_encoding": 2}, {"pos_encoding": 1}, {"sm_scale": 0.3}],
    ids=str,
)
def test_scores(options: dict[str, Any], kv: torch.dtype, device: str) -> None:
    each(problem(kv=kv, device=device), **options)
    each(problem([7, 300], q_len=2, kv=kv, device=device), **options)


def test_sinks(device: str) -> None:
    each(problem(device=device), sinks=torch.linspace(-3, 5, 8).to(device))


def test_scales_of_heads(device: str) -> None:
    q, kv = torch.linspace(0.3, 2, 8).to(device), torch.tensor([0.7, 1.9]).to(device)
    each(problem([50, 700], kv=E4M3, device=device), scale_q=q, scale_k=kv, scale_v=kv.flip(0))


def test_scales_on_the_device(device: str) -> None:
    x = problem([50, 700], device=device)
    one, two = (torch.tensor([value], device=device) for value in (0.25, 3.0))
    for impl in impls("batch_decode", device):
        out, lse = run(x, impl, sm_scale=0.5, out_scale=0.5, bmm1_scale=one, bmm2_scale=two)
        expected, expected_lse = reference(x, 0.125)
        assert_close(out, expected * 1.5, tolerance=(2e-2, 1e-2))
        assert_close(lse, expected_lse, tolerance=(1e-3, 1e-2))


def test_draft_mask(device: str) -> None:
    rows = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    lengths = [5, 64, 66, 300]
    packed = torch.zeros(len(lengths), 5, 4, dtype=torch.uint8)
    for i, row in enumerate(rows):
        packed[:, i, 0] = sum(bit << t for t, bit in enumerate(row))
    each(problem(lengths, q_len=5, device=device), mask=packed.view(-1, 4).to(device))


@pytest.mark.parametrize("options", [{}, {"window_left": 20}, {"split_kv": 2}], ids=str)
def test_requests_that_differ_in_query_tokens(options: dict[str, Any], device: str) -> None:
    """The same number of query tokens for each request; rows outside all requests are not written."""
    x, counts = problem([300, 64, 17, 130, 5], q_len=9, device=device), [9, 1, 0, 5, 3]
    kept = [b * 9 + i for b, n in enumerate(counts) for i in range(9 - n, 9)]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    ragged = x._replace(q=torch.cat([x.q[kept], x.q[:2]]))
    expected, expected_lse = reference(x, 0.1, **{k: v for k, v in options.items() if k != "split_kv"})
    for impl in impls("batch_decode", device):
        out, lse = run(ragged, impl, **options, sm_scale=0.1, qo_indptr=starts)
        assert_close(out[:-2], expected[kept], tolerance=(2e-2, 1e-2))
        assert_close(lse[:-2], expected_lse[kept], tolerance=(2e-3, 1e-2))
        assert bool(lse[-2:].isnan().all()), impl


@pytest.mark.parametrize("split_kv", [ops.NO_SPLIT, 1, 3, 16])
def test_chunks_and_whole_requests(split_kv: int, device: str) -> None:
    each(problem([0, 1, 64, 65, 1000, 4000], device=device), split_kv=split_kv)


@pytest.mark.parametrize("lengths", [[1] * 300, [20_000], [9000, 1, 0, 5000], [1024] * 16], ids=lambda x: f"b{len(x)}")
def test_batches(lengths: list[int], device: str) -> None:
    each(problem(lengths, 8, 8, 64, device=device))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[12_000], [2500, 2540]], ids=["one", "two"])
def test_many_parts_of_a_head(lengths: list[int], dim: int, device: str) -> None:
    each(problem(lengths, 13, 1, dim, device=device))


@pytest.mark.parametrize("lengths", [[30_000, 100, 0, 40_000], [9000] * 8], ids=["varied", "equal"])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_dynamic_ranges(kv_heads: int, lengths: list[int], device: str) -> None:
    each(problem(lengths, 2 * kv_heads, kv_heads, 64, device=device), num_ctas=kv_heads)


@pytest.mark.parametrize("split_kv", [2, ops.NO_SPLIT])
def test_a_request_gives_the_same_bits_in_every_batch(split_kv: int, device: str) -> None:
    def result(lengths: list[int], request: int, impl: str) -> torch.Tensor:
        x = problem([777], device=device)
        if len(lengths) > 1:
            many = problem(lengths, device=device)
            first, one = int(many.indptr[request]), x.indices[: -(-777 // 16)].long()
            pages = many.indices[first : first + one.numel()].long()
            many.k[pages], many.v[pages] = x.k[one], x.v[one]
            many.q[request] = x.q[0]
            x = many
        return run(x, impl, split_kv, sm_scale=0.1)[0][request]

    for impl in impls("batch_decode", device):
        alone = result([777], 0, impl)
        for lengths, row in (([777, 30, 5000], 0), ([3000] * 9 + [777], 9)):
            assert torch.equal(result(lengths, row, impl), alone), impl


def test_results_do_not_depend_on_old_memory_contents(device: str) -> None:
    x = problem(device=device)
    for impl in impls("batch_decode", device):
        first = run(x, impl, sm_scale=0.1)
        again = run(x, impl, sm_scale=0.1)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
