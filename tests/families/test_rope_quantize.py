"""RoPE with fp8 output and its paged append against fp64, in every form, on every device and implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import FP8, assert_close, assert_guards, guarded, impls, rand, strided, using
from families.test_rope import frequencies, rotated, spots
from fi_core import rope

MAX_POS = 5000
# (num_qo_heads, num_kv_heads or None for MLA, rotary_dim, no_rope_dim or None, v_dim)
SHAPES = [
    (32, 8, 128, None, 128),
    (8, 2, 64, 64, 128),
    (4, 4, 64, 32, 64),
    (16, None, 64, 512, None),
    (3, None, 64, None, None),
    (2, 1, 24, 20, 300),
]
Parts = dict[str, torch.Tensor | None]


def table_of(width: int, device: str) -> torch.Tensor:
    angle = torch.arange(MAX_POS, dtype=torch.float64).unsqueeze(1) * frequencies(width)
    return torch.cat([angle.cos(), angle.sin()], 1).float().to(device)


def parts_of(n: int, shape: tuple[Any, ...], dtype: torch.dtype, device: str) -> Parts:
    hq, hk, width, rest, _ = shape
    rows = {"q": (n, hq), "k": (n,) if hk is None else (n, hk)}
    parts: Parts = {}
    for name, size in (("rope", width), ("nope", rest)):
        for seed, (x, outer) in enumerate(rows.items()):
            made = None if size is None else rand(*outer, size, dtype=dtype, device=device, seed=seed)
            parts[f"{x}_{name}"] = made
    return parts


def expected(
    parts: Parts, table: torch.Tensor, pos_ids: torch.Tensor, is_neox: bool, scales: tuple[float, float]
) -> Parts:
    """The outputs before the cast, in fp64."""
    cos, sin = table.cpu()[pos_ids.cpu().long()].double().chunk(2, -1)
    want: Parts = {}
    for name, x in parts.items():
        if x is None:
            continue
        y = x.cpu().double()
        if name.endswith("rope"):
            y = rotated(y if y.ndim == 3 else y.unsqueeze(1), cos, sin, not is_neox).view(y.shape)
        want[name] = y * scales[name.startswith("k")]
    return want


def assert_rounded(got: torch.Tensor, want: torch.Tensor) -> None:
    """Every value is close to the reference, and almost every value is the nearest fp8 number."""
    assert_close(got, want)
    top = torch.finfo(got.dtype).max
    exact = got.cpu().float() == want.clamp(-top, top).float().to(got.dtype).float()
    assert exact.numel() == 0 or exact.float().mean() > 0.999


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_quantize(shape: tuple[Any, ...], is_neox: bool, fp8: torch.dtype, device: str) -> None:
    table, scales = table_of(shape[2], device), (1.5, 0.75)
    function = rope.mla_rope_quantize_fp8 if shape[1] is None else rope.rope_quantize_fp8
    for n, dtype, index in ((1, torch.bfloat16, torch.int32), (70, torch.float16, torch.int64)):
        parts, pos_ids = parts_of(n, shape, dtype, device), spots(n, device, index, MAX_POS)
        want = expected(parts, table, pos_ids, is_neox, scales)
        for impl in impls("rope_quantize", device):
            with using("rope_quantize", impl):
                got = function(*parts.values(), table, pos_ids, is_neox, fp8, *scales)
                for name, y in zip(parts, got):
                    assert y.dtype == fp8
                    if parts[name] is None:
                        assert y.shape == (*parts[name.replace("nope", "rope")].shape[:-1], 0)
                    else:
                        assert_rounded(y, want[name])
                for padding in (16, 1):
                    inputs = {name: x if x is None else strided(x, padding) for name, x in parts.items()}
                    outs = {
                        f"{n}_out": guarded(x.shape, fp8, device, row_padding=padding)
                        for n, x in parts.items()
                        if x is not None
                    }
                    again = function(*inputs.values(), table, pos_ids, is_neox, fp8, *scales, **outs, enable_pdl=True)
                    for name, x, y in zip(parts, got, again):
                        assert torch.equal(x.float(), y.float())
                        if f"{name}_out" in outs:
                            assert y is outs[f"{name}_out"]
                            assert_guards(y)


def test_outputs_may_be_slices(device: str) -> None:
    """Outputs are slices of one q and of one k, nope beside rope, as SGLang passes them."""
    parts, table, pos_ids = (
        parts_of(5, SHAPES[3], torch.bfloat16, device),
        table_of(64, device),
        spots(5, device, top=MAX_POS),
    )
    q = torch.zeros(5, 16, 576, device=device).to(torch.float8_e4m3fn)
    k = torch.zeros(5, 1, 576, device=device).to(torch.float8_e4m3fn)
    outs = {
        "q_nope_out": q[..., :512],
        "q_rope_out": q[..., 512:],
        "k_nope_out": k[:, 0, :512],
        "k_rope_out": k[:, 0, 512:],
    }
    rope.mla_rope_quantize_fp8(**parts, cos_sin_cache=table, pos_ids=pos_ids, quant_scale_q=2.0, **outs)
    want = expected(parts, table, pos_ids, True, (2.0, 1.0))
    assert_rounded(q, torch.cat([want["q_nope"], want["q_rope"]], -1))
    assert_rounded(k[:, 0], torch.cat([want["k_nope"], want["k_rope"]], -1))


@pytest.mark.parametrize("fp8", FP8)
def test_saturates_and_keeps_nan(fp8: torch.dtype, device: str) -> None:
    parts, table = parts_of(4, SHAPES[1], torch.bfloat16, device), table_of(64, device)
    parts["q_nope"][0, 0, :3] = torch.tensor([1e30, -1e30, float("nan")], dtype=torch.bfloat16)
    parts["k_rope"] *= 1e5
    pos_ids = torch.tensor([1, MAX_POS, 2, 3], device=device)
    got = rope.rope_quantize_fp8(*parts.values(), table, pos_ids, quantize_dtype=fp8)
    pos_ids[1] = 0
    want = expected(parts, table, pos_ids, True, (1.0, 1.0))
    for name in ("q_rope", "k_rope"):
        want[name][1] = torch.nan  # its position is outside the cache
    for name, y in zip(parts, got):
        assert_close(y, want[name])


def test_dtype_follows_the_first_output(device: str) -> None:
    parts, table, pos_ids = parts_of(2, SHAPES[1], torch.float16, device), table_of(64, device), spots(2, device)
    out = torch.empty_like(parts["k_rope"], dtype=torch.float8_e5m2)
    got = rope.rope_quantize_fp8(*parts.values(), table, pos_ids, k_rope_out=out, backend="cutile")
    assert {y.dtype for y in got} == {torch.float8_e5m2}
    assert {y.dtype for y in rope.rope_quantize_fp8(*parts.values(), table, pos_ids)} == {torch.float8_e4m3fn}


def test_no_rows(device: str) -> None:
    parts, table = parts_of(0, SHAPES[3], torch.float16, device), table_of(64, device)
    got = rope.mla_rope_quantize_fp8(*parts.values(), table, torch.zeros(0, dtype=torch.int32, device=device))
    assert [tuple(y.shape) for y in got] == [(0, 16, 64), (0, 64), (0, 16, 512), (0, 512)]


class Pages:
    """Three requests of 1, 5 and 9 new tokens, padding rows, shuffled pages; caches are filled with sevens."""

    def __init__(self, shape: tuple[Any, ...], layout: str, page_size: int, fp8: torch.dtype, device: str) -> None:
        _, hk, width, rest, v_dim = shape
        self.layout, self.page_size = layout, page_size
        lengths = (4 * page_size + 1, 5, page_size + 9)
        counts = [-(-length // page_size) for length in lengths]
        total = sum(counts) + 2
        self.indices = torch.randperm(total, generator=torch.Generator().manual_seed(1))[: sum(counts)]
        self.indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0)])
        new = ((0, 1), (1, 5), (2, 9))
        self.batch = torch.tensor([b for b, n in new for _ in range(n)] + [-1, -1])
        self.positions = torch.tensor([lengths[b] - n + i for b, n in new for i in range(n)] + [10**6, 0])
        dims = (rest or 0, width) if hk is None else (width + (rest or 0), v_dim)
        slots = (page_size,) if hk is None else (page_size, hk) if layout == "NHD" else (hk, page_size)
        self.caches = tuple(guarded((total, *slots, d), fp8, device, row_padding=16) for d in dims)
        for cache in self.caches:
            cache.copy_(torch.full(cache.shape, 7.0))

    def expect(self, rows: tuple[torch.Tensor, torch.Tensor], got: tuple[torch.Tensor, ...] | None = None) -> None:
        """The caches hold the appended rows, and sevens elsewhere."""
        for values, cache in zip(rows, got or self.caches):
            want = torch.full(cache.shape, 7.0, dtype=torch.float64)
            for row in (self.batch >= 0).nonzero().flatten().tolist():
                nth, slot = divmod(int(self.positions[row]), self.page_size)
                page = want[int(self.indices[self.indptr[self.batch[row]] + nth])]
                (page if self.layout == "NHD" else page.transpose(0, 1))[slot] = values[row]
            assert_rounded(cache, want)
            if got is None:
                assert_guards(cache)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_append(shape: tuple[Any, ...], layout: str, device: str) -> None:
    mla = shape[1] is None
    table, scales = table_of(shape[2], device), (1.5, 0.75)
    for page_size, fp8, index, other, is_neox in (
        (1, FP8[0], torch.int32, torch.int64, True),
        (16, FP8[1], torch.int64, torch.int32, False),
    ):
        for impl in impls("rope_quantize", device):
            pages = Pages(shape, "NHD" if mla else layout, page_size, fp8, device)
            n = len(pages.batch)
            parts, pos_ids = parts_of(n, shape, torch.bfloat16, device), spots(n, device, index, MAX_POS)
            v = None if mla else rand(n, shape[1], shape[4], dtype=torch.bfloat16, device=device, seed=5)
            tables = [
                t.to(device, d)
                for t, d in zip((pages.indices, pages.indptr, pages.batch, pages.positions), (index, other) * 2)
            ]
            with using("rope_quantize", impl):
                inputs = [x if x is None else strided(x) for x in (*parts.values(), v)]
                q_rope, q_nope = rope.rope_quantize_fp8_append_paged_kv_cache(
                    *inputs, table, pos_ids, pages.caches, *tables, is_neox, None, *scales, page_size, layout
                )
            want = expected(parts, table, pos_ids, is_neox, scales)
            assert_rounded(q_rope, want["q_rope"])
            assert q_nope.shape[-1] == 0 if shape[3] is None else assert_rounded(q_nope, want["q_nope"]) is None
            k_nope = want.get("k_nope", want["k_rope"][..., :0])
            if v is None:
                pages.expect((k_nope, want["k_rope"]))
            else:
                pages.expect((torch.cat([want["k_rope"], k_nope], -1), v.cpu().double() * 0.75))


def test_append_to_one_fused_cache(device: str) -> None:
    """[pages, 2, page_size, heads, d], and the form without a page axis (page size 1)."""
    shape = SHAPES[0]
    for page_size in (4, 1):
        pages = Pages(shape, "NHD", page_size, FP8[0], device)
        n = len(pages.batch)
        parts, pos_ids, table = parts_of(n, shape, torch.float16, device), spots(n, device), table_of(128, device)
        v = rand(n, 8, 128, dtype=torch.float16, device=device, seed=5)
        fused = torch.stack([c.float() for c in pages.caches], 1).to(FP8[0])
        tables = [t.to(device) for t in (pages.indices, pages.indptr, pages.batch, pages.positions)]
        given = fused if page_size > 1 else fused[:, :, 0]
        rope.rope_quantize_fp8_append_paged_kv_cache(
            *parts.values(), v, table, pos_ids, given, *tables, page_size=page_size
        )
        want = expected(parts, table, pos_ids, True, (1.0, 1.0))
        pages.expect((want["k_rope"], v.cpu().double()), got=(fused[:, 0], fused[:, 1]))


_WIDE, _HALF = torch.ones(4, 2, 64, dtype=torch.float16), torch.ones(4, 64, dtype=torch.float16)
_GOOD: dict[str, Any] = {
    "q_rope": _WIDE,
    "k_rope": _WIDE[:, :1],
    "q_nope": _WIDE[..., :32],
    "k_nope": _WIDE[:, :1, :32],
    "cos_sin_cache": torch.ones(9, 64),
    "pos_ids": torch.arange(4),
}
_INDEX = torch.zeros(4, dtype=torch.int32)
_PAGED: dict[str, Any] = {
    "v": _WIDE[:, :1],
    "paged_kv_cache": (torch.zeros(2, 16, 1, 96).to(FP8[0]), torch.zeros(2, 16, 1, 64).to(FP8[0])),
    "kv_indices": _INDEX,
    "kv_indptr": torch.tensor([0, 4, 4, 4], dtype=torch.int32),
    "batch_indices": _INDEX,
    "positions": _INDEX,
}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q_rope": _WIDE.float()}, ValueError, "requires dtype in"),
        ({"k_rope": _WIDE[:, :1].bfloat16()}, TypeError, "k_rope must have the dtype of q_rope"),
        ({"k_rope": _HALF}, ValueError, "k_nope must have shape .nnz, no_rope_dim"),
        ({"q_nope": _WIDE[:2]}, ValueError, "q_nope must have shape"),
        ({"cos_sin_cache": torch.ones(9, 64, dtype=torch.bfloat16)}, ValueError, "cos_sin_cache should be float32"),
        ({"cos_sin_cache": torch.ones(9, 32)}, ValueError, "cos_sin_cache must have shape .max_pos, rotary_dim"),
        ({"pos_ids": torch.arange(4.0)}, TypeError, "pos_ids must be int32 or int64"),
        ({"quantize_dtype": torch.float16, "q_rope_out": None}, ValueError, "requires out in"),
        (
            {"quantize_dtype": FP8[1]},
            TypeError,
            "outputs must have one dtype, torch.float8_e5m2; got torch.float8_e4m3fn",
        ),
        ({"q_rope_out": torch.empty(4, 2, 65).to(FP8[0])}, ValueError, "q_rope_out must have shape"),
        (
            {"k_rope_out": _WIDE[:, :1].to(FP8[1])},
            TypeError,
            "outputs must have one dtype, torch.float8_e4m3fn; got torch.float8_e5m2",
        ),
        ({"backend": "triton"}, ValueError, "backend must be 'cuda' or 'cutile'; got 'triton'"),
    ],
)
def test_rejects(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = _GOOD | {"q_rope_out": _WIDE.to(FP8[0])}
    rope.rope_quantize_fp8(**good)
    with pytest.raises(error, match=words):
        rope.rope_quantize_fp8(**(good | change))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_layout": "DHN"}, KeyError, "kv_layout: allowed are NHD, HND"),
        ({"kv_layout": "HND"}, ValueError, r"paged_kv_cache\[0\] must have shape"),
        ({"page_size": 8}, ValueError, r"paged_kv_cache\[0\] must have shape .* page_size = 8"),
        ({"page_size": 0}, ValueError, "page_size must be positive"),
        ({"paged_kv_cache": list(_PAGED["paged_kv_cache"])}, KeyError, "paged_kv_cache"),
        ({"paged_kv_cache": tuple(x.half() for x in _PAGED["paged_kv_cache"])}, ValueError, "requires out in"),
        (
            {"paged_kv_cache": (_PAGED["paged_kv_cache"][0], _PAGED["paged_kv_cache"][0].clone())},
            ValueError,
            r"paged_kv_cache\[1\] must have shape",
        ),
        ({"v": None}, ValueError, "v must be a tensor where k_rope has heads"),
        (
            {"v": None, "paged_kv_cache": torch.zeros(1)},
            TypeError,
            r"paged_kv_cache: a tuple \(ckv_cache, kpe_cache\) is required",
        ),
        ({"batch_indices": _INDEX[:3]}, ValueError, "batch_indices must have shape"),
        ({"positions": _INDEX.float()}, TypeError, "positions must be int32 or int64"),
        ({"kv_indices": torch.zeros(8, dtype=torch.int32)[::2]}, ValueError, "kv_indices must be contiguous"),
        ({"quantize_dtype": FP8[1]}, TypeError, "outputs must have one dtype, torch.float8_e5m2"),
        ({"q_nope_out": _WIDE[..., :32].to(FP8[1])}, TypeError, "outputs must have one dtype, torch.float8_e5m2"),
    ],
)
def test_append_rejects(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = _GOOD | _PAGED
    rope.rope_quantize_fp8_append_paged_kv_cache(**good)
    with pytest.raises(error, match=words):
        rope.rope_quantize_fp8_append_paged_kv_cache(**(good | change))


def _reference(definition: dict[str, Any]) -> Any:
    scope: dict[str, Any] = {}
    exec(definition["reference"], scope)
    return next(f for n, f in scope.items() if n.endswith("_reference"))


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=["gqa", "mla"])
def test_traces_describe_the_calls(shape: tuple[Any, ...]) -> None:
    parts, table, pos_ids = parts_of(15, shape, torch.float16, "cpu"), table_of(64, "cpu"), spots(15, "cpu")
    arguments: dict[str, Any] = {**parts, "cos_sin_cache": table, "pos_ids": pos_ids, "quant_scale_kv": 0.5}
    for function in (rope.rope_quantize_fp8, rope.mla_rope_quantize_fp8):
        if shape[1] is not None and function is rope.mla_rope_quantize_fp8:
            continue
        for y, want in zip(function(**arguments), _reference(function.fi_trace(**arguments))(**arguments)):
            assert_close(y, want)
    append = rope.rope_quantize_fp8_append_paged_kv_cache
    for layout in ("NHD",) if shape[1] is None else ("NHD", "HND"):
        pages = Pages(shape, layout, 16, FP8[0], "cpu")
        values = rand(17, shape[1], shape[4], dtype=torch.float16, device="cpu") if shape[1] else None
        paged = {
            **parts_of(17, shape, torch.float16, "cpu"),
            "v": values,
            "cos_sin_cache": table,
            "pos_ids": spots(17, "cpu"),
        }
        paged |= {"kv_indices": pages.indices, "kv_indptr": pages.indptr, "batch_indices": pages.batch,
                  "positions": pages.positions, "kv_layout": layout}  # fmt: skip
        copies = tuple(c.clone() for c in pages.caches)
        definition = append.fi_trace(**paged, paged_kv_cache=pages.caches)
        assert definition["outputs"]["k_cache"]["dtype"] == "float8_e4m3fn"
        want = _reference(definition)(**paged, k_cache=copies[0], v_cache=copies[1])
        got = append(**paged, paged_kv_cache=pages.caches) + pages.caches
        for y, expect in zip(got, want):
            assert_close(y, expect)
