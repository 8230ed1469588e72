"""Descriptions of the GEMM functions, with fp64 references."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fi_core.observe.describe import with_sizes
from fi_core.observe.draw import Draw, dtype_of, nbytes
from fi_core.observe.trace import Scalar, Tensor, TraceTemplate, Work, axes_of, options, sized, tensors

_BLOCK, _INF, _NAN = 128, float("inf"), float("nan")


# Trace files hold the source of a reference, so each reference is whole in itself.
def _mm_bf16_reference(a, b, bias=None):  # type: ignore[no-untyped-def]
    out = a.double() @ b.double()
    return out if bias is None else out + bias.double()


def _bmm_bf16_reference(A, B):  # type: ignore[no-untyped-def]
    return A.double() @ B.double()


def _bmm_fp8_reference(A, B, A_scale, B_scale):  # type: ignore[no-untyped-def]
    return (A.double() @ B.double()) * (A_scale.double() * B_scale.double())


def _mm_fp8_reference(a, b, alpha=None, a_scale=None, b_scale=None):  # type: ignore[no-untyped-def]
    out = a.double() @ b.double().mT
    for scale in (alpha, a_scale if a_scale is None else a_scale.reshape(-1, 1), b_scale):
        out = out if scale is None else out * scale.double()
    return out


def _tinygemm_reference(input, weight, out, bias=None):  # type: ignore[no-untyped-def]
    result = input.double() @ weight.double().mT
    return result if bias is None else result + bias.double()


def _groups_reference(a, b, ends):  # type: ignore[no-untyped-def]
    """Rows from an end to the next meet a matrix of their own; rows of no group are zero."""
    import torch

    out = a.new_zeros(len(a), b.shape[1], dtype=torch.float64)
    for begin, end, own in zip(ends.tolist(), ends[1:].tolist(), b):
        out[begin:end] = a[begin:end].double() @ own.double().mT
    return out


def _grouped_reference(a, b, m_indptr, alpha=None):  # type: ignore[no-untyped-def]
    out = _groups_reference(a, b, m_indptr)
    return out if alpha is None else out * alpha.double()


def _segment_reference(x, weights, weight_column_major, seg_indptr, weight_indices):  # type: ignore[no-untyped-def]
    b = weights.double()[weight_indices]
    return _groups_reference(x, b if weight_column_major else b.mT, seg_indptr)


def _dequantized(x, scale, mode="K"):  # type: ignore[no-untyped-def]
    scale = (scale if mode == "K" else scale.mT).double()
    rows, k = x.shape[-2:]
    if scale.shape[-2] != rows:
        scale = scale.repeat_interleave(128, -2)[..., :rows, :]
    return x.double() * scale.repeat_interleave(128, -1)[..., :k]


def _groupwise_reference(a, b, a_scale, b_scale, scale_major_mode="K"):  # type: ignore[no-untyped-def]
    return _dequantized(a, a_scale, scale_major_mode) @ _dequantized(b, b_scale, scale_major_mode).mT


def _group_groupwise_reference(a, b, a_scale, b_scale, m_indptr, scale_major_mode="MN"):  # type: ignore[no-untyped-def]
    a, b = _dequantized(a, a_scale, scale_major_mode), _dequantized(b, b_scale, scale_major_mode)
    return _groups_reference(a, b, m_indptr)


def _group_deepgemm_reference(a, b, a_scale, b_scale, m_indices):  # type: ignore[no-untyped-def]
    import torch

    a, b = _dequantized(a, a_scale), _dequantized(b, b_scale)
    return torch.cat([rows @ b[int(m_indices[i * 128])].mT for i, rows in enumerate(a.split(128))])


def _batch_deepgemm_reference(a, b, a_scale, b_scale, masked_m):  # type: ignore[no-untyped-def]
    return _dequantized(a, a_scale) @ _dequantized(b, b_scale).mT


def _quantized(x):  # type: ignore[no-untyped-def]
    import torch

    blocks = x.float().unflatten(-1, (-1, 128))
    scale = (blocks.abs().amax(-1).double() / 448.0).float()  # in fp32, torch on CUDA multiplies by 1 / 448
    quantized = blocks / scale.where(scale != 0, 1.0).unsqueeze(-1)
    return quantized.flatten(-2).to(torch.float8_e4m3fn), scale


def _blockscale_reference(input, weight, input_scale=None, weight_scale=None):  # type: ignore[no-untyped-def]
    a = _dequantized(*(_quantized(input) if input_scale is None else (input, input_scale)))
    b = _dequantized(*(_quantized(weight) if weight_scale is None else (weight, weight_scale)))
    return a @ b.mT


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def tokens(draw: Draw, shape: Sequence[int], dtype: Any) -> Any:
    """Tokens: strided rows, of which the last ends in NaN and, where the dtype has it, the one before in infinity."""
    x = draw.normal(shape, dtype)
    if draw.nasty and x.numel() > 2 * shape[-1]:
        x.view(-1)[-1:] = x.new_full((1,), _NAN)
        if x.dtype.itemsize == 2:
            x.view(-1)[-1 - shape[-1]] = _INF
    return draw.rows(x)


def _right(draw: Draw, shape: Sequence[int], dtype: Any) -> Any:
    """Weights, so small that products of 16 bits are N(0, 1); fp8 weights are N(0, 1) and have a scale."""
    return draw.rows(draw.normal(shape, dtype, shape[-1] ** -0.5 if dtype_of(dtype).itemsize == 2 else 1.0))


def _operands(draw: Draw, s: Any, left: str, right: str, *batch: int) -> tuple[Any, Any]:
    """Tokens and weights of a product, or of each of a batch, with their dtypes."""
    return tokens(draw, (*batch, s.m, s.k), left), _right(draw, (*batch, s.n, s.k), right)


def _scale(draw: Draw, shape: Sequence[int], k: int) -> Any:
    """Scales such that products of N(0, 1) values are about N(0, 1). If nasty the first is 0, else all are powers of
    two: libraries that dequantize to bf16 lose nothing then.
    """
    x = draw.normal(shape, "float32").abs().add_(0.1).mul_(k**-0.25)
    if not draw.nasty:
        return x.log2().round().exp2()
    if x.numel() > 1:
        x.view(-1)[0] = 0.0
    return draw.rows(x)


@sized(m=5, n=72, k=136, dtype="bfloat16", out_dtype="bfloat16", bias=False)
def _make_mm_bf16(draw: Draw, s: Any) -> dict[str, Any]:
    a, b = _operands(draw, s, s.dtype, s.dtype)
    found = {"a": a, "b": b.mT, "out_dtype": dtype_of(s.out_dtype)}
    return {**found, "bias": draw.normal((s.n,), s.out_dtype)} if s.bias else found


@sized(batch_size=3, m=5, n=72, k=136, dtype="bfloat16", out_dtype="bfloat16")
def _make_bmm_bf16(draw: Draw, s: Any) -> dict[str, Any]:
    a, b = _operands(draw, s, s.dtype, s.dtype, s.batch_size)
    return {"A": a, "B": b.mT, "out_dtype": dtype_of(s.out_dtype)}


@sized(batch_size=3, m=5, n=72, k=144, input_dtype="float8_e4m3fn", mat2_dtype="float8_e4m3fn", out_dtype="bfloat16")
def _make_bmm_fp8(draw: Draw, s: Any) -> dict[str, Any]:
    a, b = _operands(draw, s, s.input_dtype, s.mat2_dtype, s.batch_size)
    scales = {name: _scale(draw, (1,), s.k) for name in ("A_scale", "B_scale")}
    return {"A": a, "B": b.mT, **scales, "dtype": dtype_of(s.out_dtype)}


@sized(m=5, n=72, k=144, input_dtype="float8_e4m3fn", mat2_dtype="float8_e4m3fn", out_dtype="bfloat16", rowwise=False)
def _make_mm_fp8(draw: Draw, s: Any) -> dict[str, Any]:
    found = {"a": tokens(draw, (s.m, s.k), s.input_dtype), "b": _right(draw, (s.n, s.k), s.mat2_dtype)}
    if s.rowwise:
        found |= {"a_scale": _scale(draw, (s.m,), s.k), "b_scale": _scale(draw, (s.n,), s.k)}
    else:
        found["alpha"] = _scale(draw, (1,), s.k * s.k)
    return {**found, "out_dtype": dtype_of(s.out_dtype)}


def _make_tinygemm(draw: Draw, *, m: int = 5, n: int = 72, k: int = 136, bias: bool = True) -> dict[str, Any]:
    found = {"input": tokens(draw, (m, k), "bfloat16"), "weight": _right(draw, (n, k), "bfloat16")}
    found["out"] = draw.empty((m, n), "bfloat16")
    return {**found, "bias": draw.normal((n,), "bfloat16")} if bias else found


def groups_of(draw: Draw, groups: int, m: int, random: bool = False) -> Any:
    """Offsets of groups of m rows, or of that mean; if nasty the second is empty and the third has its rows too."""
    if random:
        return draw.int32([0, *sorted(draw.integers(0, groups * m + 1, (groups - 1,)).tolist()), groups * m])
    sizes = [m] * groups
    if draw.nasty and groups > 2:
        sizes[1:3] = [0, 2 * m]
    return draw.offsets(sizes)


@sized(group_size=4, m=5, n=72, k=144, dtype="bfloat16", out_dtype="bfloat16", random_groups=False)
def _make_grouped(draw: Draw, s: Any) -> dict[str, Any]:
    a, b = tokens(draw, (s.group_size * s.m, s.k), s.dtype), _right(draw, (s.group_size, s.n, s.k), s.dtype)
    indptr = groups_of(draw, s.group_size, s.m, s.random_groups)
    found = {"a": a, "b": b, "m_indptr": indptr, "out_dtype": dtype_of(s.out_dtype)}
    return found if a.dtype.itemsize == 2 else {**found, "alpha": _scale(draw, (1,), s.k * s.k)}


@sized(batch_size=5, m=7, n=72, k=136, num_weights=3, dtype="bfloat16", column_major=True)
def _make_segment(draw: Draw, s: Any) -> dict[str, Any]:
    weights = _right(draw, (s.num_weights, s.n, s.k) if s.column_major else (s.num_weights, s.k, s.n), s.dtype)
    found = {"x": tokens(draw, (s.batch_size * s.m, s.k), s.dtype), "weights": weights, "batch_size": s.batch_size}
    found |= {"weight_column_major": s.column_major, "seg_indptr": groups_of(draw, s.batch_size, s.m).long()}
    return {**found, "weight_indices": draw.integers(0, s.num_weights, (s.batch_size,), "int64")}


def _plan_segment(wrapper: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    return wrapper(arguments["x"].new_empty(0))


def _major(shape: tuple[int, int], mode: str) -> tuple[int, int]:
    return shape if mode == "K" else (shape[1], shape[0])


@sized(m=5, n=200, k=384, mode="MN", rows=1, out_dtype="bfloat16")
def _make_groupwise(draw: Draw, s: Any) -> dict[str, Any]:
    (a, b), blocks = _operands(draw, s, "float8_e4m3fn", "float8_e4m3fn"), _ceil(s.k, _BLOCK)
    rows = {"a_scale": _ceil(s.m, s.rows), "b_scale": _ceil(s.n, _BLOCK)}
    scales = {name: _scale(draw, _major((n, blocks), s.mode), s.k) for name, n in rows.items()}
    found = {"a": a, "b": b, **scales, "scale_major_mode": s.mode, "out_dtype": dtype_of(s.out_dtype)}
    return {**found, "scale_granularity_mnk": (s.rows, _BLOCK, _BLOCK)}


def _make_groups(draw: Draw, groups: int, m: int, n: int, k: int, mode: str = "K") -> dict[str, Any]:
    """Rows of groups, m each, with their weights and scales."""
    blocks, rows = _ceil(k, _BLOCK), groups * m
    found = {"a": tokens(draw, (rows, k), "float8_e4m3fn"), "b": _right(draw, (groups, n, k), "float8_e4m3fn")}
    found["a_scale"] = _scale(draw, _major((rows, blocks), mode), k)
    return {**found, "b_scale": _scale(draw, (groups, *_major((_ceil(n, _BLOCK), blocks), mode)), k)}


@sized(group_size=4, m=8, n=200, k=256, mode="MN", out_dtype="bfloat16", random_groups=False)
def _make_group_groupwise(draw: Draw, s: Any) -> dict[str, Any]:
    found = _make_groups(draw, s.group_size, s.m, s.n, s.k, s.mode)
    found["m_indptr"] = groups_of(draw, s.group_size, s.m, s.random_groups)
    return {**found, "scale_major_mode": s.mode, "out_dtype": dtype_of(s.out_dtype)}


@sized(group_size=3, m=128, n=200, k=256, out_dtype="bfloat16")
def _make_group_deepgemm(draw: Draw, s: Any) -> dict[str, Any]:
    """m is a multiple of 128."""
    groups = draw.permutation(s.group_size).repeat_interleave(s.m)
    found = _make_groups(draw, s.group_size, s.m, s.n, s.k)
    return {**found, "m_indices": groups, "out_dtype": dtype_of(s.out_dtype)}


@sized(group_size=3, m=6, n=200, k=256, out_dtype="bfloat16")
def _make_batch_deepgemm(draw: Draw, s: Any) -> dict[str, Any]:
    """All rows of a group exist, so that all of out is written."""
    blocks = _ceil(s.k, _BLOCK)
    a, b = _operands(draw, s, "float8_e4m3fn", "float8_e4m3fn", s.group_size)
    rows = {"a_scale": s.m, "b_scale": _ceil(s.n, _BLOCK)}
    scales = {name: _scale(draw, (s.group_size, n, blocks), s.k) for name, n in rows.items()}
    found = {"a": a, "b": b, **scales, "masked_m": draw.int32([s.m] * s.group_size)}
    return {**found, "expected_m": s.m, "out_dtype": dtype_of(s.out_dtype)}


@sized(m=5, n=192, k=384, input_dtype="bfloat16", mat2_dtype="float8_e4m3fn", out_dtype="bfloat16")
def _make_blockscale(draw: Draw, s: Any) -> dict[str, Any]:
    found = {"input": tokens(draw, (s.m, s.k), s.input_dtype), "weight": _right(draw, (s.n, s.k), s.mat2_dtype)}
    if dtype_of(s.input_dtype).itemsize == 1:
        found["input_scale"] = _scale(draw, (s.m, _ceil(s.k, _BLOCK)), s.k)
    if dtype_of(s.mat2_dtype).itemsize == 1:
        found["weight_scale"] = _scale(draw, (_ceil(s.n, _BLOCK), _ceil(s.k, _BLOCK)), s.k)
    return {**found, "out_dtype": dtype_of(s.out_dtype)}


def _work(left: str = "a", right: str = "b", transposed: bool = True) -> Callable[[Mapping[str, Any]], Work]:
    """Two operations for each product; every tensor once."""

    def work(arguments: Mapping[str, Any]) -> Work:
        a, b = arguments[left], arguments[right]
        column_major = arguments.get("weight_column_major", transposed)
        n, k = b.shape[-2 if column_major else -1], a.shape[-1]
        rows = a.numel() // max(k, 1)
        dtype = arguments.get("out_dtype") or arguments.get("dtype")
        size = 2 if dtype is None else dtype.itemsize
        tensors = (value for name, value in arguments.items() if name != "out")
        unit = "matmul_fp8" if b.element_size() == 1 else "matmul"
        return Work(2 * rows * n * k, nbytes(*tensors) + rows * n * size, unit)

    return work


_SHAPES = ((5, 72, 136), (1, 64, 512), (17, 33, 7), (130, 129, 100), (0, 64, 64), (64, 1, 1))
_FP8 = ("float8_e4m3fn", "float8_e5m2")


def sizes(shapes: Sequence[tuple[int, int, int]], **more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"m": m, "n": n, "k": k, **more} for m, n, k in shapes)


def _rows_of_groups(**given: Any) -> dict[str, Any]:
    import torch

    ends = given["m_indptr" if "m_indptr" in given else "seg_indptr"]
    rows = torch.arange(len(given["a" if "a" in given else "x"]), device=ends.device)
    return {"output": ((rows >= ends[0]) & (rows < ends[-1])).unsqueeze(-1)}


def _rows_of_indices(m_indices: Any, **_: Any) -> dict[str, Any]:
    return {"output": (m_indices >= 0).unsqueeze(-1)}


def _first_rows(a: Any, masked_m: Any, **_: Any) -> dict[str, Any]:
    import torch

    rows = torch.arange(a.shape[1], device=masked_m.device)
    return {"output": (rows < masked_m.unsqueeze(-1)).unsqueeze(-1)}


def template(
    name: str,
    inputs: Mapping[str, Tensor | Scalar],
    output: str,
    reference: Any,
    make: Callable[..., dict[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    description: str,
    **more: Any,
) -> TraceTemplate:
    """A product. output: its axes. Those of n and k are constant, as a model fixes them."""
    fixed = ("num_weights", "rows", "columns") if "weights" in inputs else ("n", "k", "k_bytes", "group_size")
    result = tensors(
        {"dtype_from_scalar": "dtype" if name.startswith("bmm_") and "bf16" not in name else "out_dtype"}, output=output
    )
    return TraceTemplate(
        name,
        axes_of({**inputs, **result}, **dict.fromkeys(fixed)),
        inputs,
        more.pop("outputs", result),
        reference=reference,
        op=more.pop("op", "gemm"),
        make=make,
        samples=samples,
        work=more.pop("work", _work()),
        description=description,
        tolerance={"float32": (2e-5, 2e-5)},
        **more,
    )


_SCALES = {"dtype": "float32", "optional": True}  # that a call may leave out
_BIAS = tensors({"optional": True}, bias="n")
_OF_GROUPS = tensors(a="cum_m k", b="group_size n k", m_indptr="num_offsets")
MM_BF16 = template(
    "mm_bf16",
    {**tensors(a="m k", b="k n"), **_BIAS},
    "m n",
    _mm_bf16_reference,
    _make_mm_bf16,
    (
        *sizes(_SHAPES),
        *sizes(_SHAPES[:3], dtype="float16", out_dtype="float32"),
        *sizes(_SHAPES[:1], bias=True),
    ),
    "The product of tokens and transposed weights.",
    work=_work(transposed=False),
)
BMM_BF16 = template(
    "bmm_bf16",
    tensors(A="batch_size m k", B="batch_size k n"),
    "batch_size m n",
    _bmm_bf16_reference,
    _make_bmm_bf16,
    sizes(_SHAPES),
    "Products of a batch of matrices.",
    work=_work("A", "B", False),
)
BMM_FP8 = template(
    "bmm_fp8",
    tensors(A="batch_size m k", B="batch_size k n", A_scale="one", B_scale="one"),
    "batch_size m n",
    _bmm_fp8_reference,
    _make_bmm_fp8,
    (*sizes(_SHAPES), *sizes(_SHAPES[:2], mat2_dtype=_FP8[1]), *sizes(_SHAPES[:2], input_dtype=_FP8[1])),
    "Products of a batch of fp8 matrices with one scale for each operand.",
    work=_work("A", "B", False),
    others=("use_fast_accum",),
)
MM_FP8 = template(
    "mm_fp8",
    {**tensors(a="m k", b="n k"), **tensors(_SCALES, alpha="one", a_scale="m", b_scale="n")},
    "m n",
    _mm_fp8_reference,
    _make_mm_fp8,
    (*sizes(_SHAPES), *sizes(_SHAPES[:3], rowwise=True)),
    "The product of fp8 tokens and weights, with one scale or scales of rows.",
    others=("use_fast_accum",),
)
TINYGEMM = template(
    "tinygemm_bf16",
    {**tensors(input="m k", weight="n k", out="m n"), **_BIAS},
    "m n",
    _tinygemm_reference,
    _make_tinygemm,
    (*sizes(_SHAPES[:4]), *sizes(_SHAPES[:2], bias=False)),
    "A linear layer of few tokens.",
    work=_work("input", "weight"),
    outputs=tensors({"param": "out", "dtype_from": "out"}, output="m n"),
)
GROUPED_BF16 = template(
    "grouped_mm_bf16",
    _OF_GROUPS,
    "cum_m n",
    (_groups_reference, _grouped_reference),
    _make_grouped,
    (*sizes(_SHAPES[:4]), {"group_size": 40, "m": 2, "random_groups": True}),
    "Groups of tokens times the weights of their experts.",
    written=_rows_of_groups,
)
GROUPED_FP8 = template(
    "grouped_mm_fp8",
    {**_OF_GROUPS, **tensors(_SCALES, alpha="one")},
    "cum_m n",
    (_groups_reference, _grouped_reference),
    with_sizes(_make_grouped, ("dtype",), dtype="float8_e4m3fn"),
    sizes(_SHAPES[:4]),
    "Groups of fp8 tokens times the weights of their experts.",
    written=_rows_of_groups,
)
SEGMENT = template(
    "segment_gemm",
    {
        **tensors(x="cum_m k", weights="num_weights rows columns", seg_indptr="num_offsets"),
        **tensors(weight_indices="num_segments"),
        "weight_column_major": Scalar("bool"),
    },
    "cum_m n",
    (_groups_reference, _segment_reference),
    _make_segment,
    ({}, {"column_major": False}, {"m": 1, "dtype": "float16"}, {"batch_size": 40, "m": 3, "n": 16, "k": 8}),
    "Segments of tokens times matrices that indices pick.",
    work=_work("x", "weights"),
    plan=_plan_segment,
    written=_rows_of_groups,
    others=("seg_lens",),
    outputs=tensors({"dtype_from": "x"}, output="cum_m n"),
)
_MODE = options(string="scale_major_mode")
GROUPWISE = template(
    "gemm_fp8_nt_groupwise",
    {
        **tensors(a="m k", b="n k", a_scale="a_scale_rows a_scale_columns", b_scale="b_scale_rows b_scale_columns"),
        **_MODE,
    },
    "m n",
    (_dequantized, _groupwise_reference),
    _make_groupwise,
    ({}, {"mode": "K"}, {"m": 1, "n": 128, "k": 128}, {"m": 300, "rows": 128}, {"m": 0}, {"m": 130, "n": 129}),
    "The product of fp8 operands with a scale for every 128 values of k.",
)
GROUP_GROUPWISE = template(
    "group_gemm_fp8_nt_groupwise",
    {
        **_OF_GROUPS,
        **tensors(a_scale="a_scale_rows a_scale_columns", b_scale="group_size b_scale_rows b_scale_columns"),
        **_MODE,
    },
    "cum_m n",
    (_dequantized, _groups_reference, _group_groupwise_reference),
    _make_group_groupwise,
    ({}, {"mode": "K", "m": 3}, {"group_size": 40, "m": 2, "random_groups": True}),
    "As gemm_fp8_nt_groupwise for groups of tokens.",
    written=_rows_of_groups,
)
GROUP_DEEPGEMM = template(
    "group_deepgemm_fp8_nt_groupwise",
    {
        **tensors(a="cum_m k", b="group_size n k", a_scale="cum_m k_blocks", b_scale="group_size n_blocks k_blocks"),
        **tensors(m_indices="cum_m"),
    },
    "cum_m n",
    (_dequantized, _group_deepgemm_reference),
    _make_group_deepgemm,
    ({}, {"m": 256, "n": 64}),
    "As gemm_fp8_nt_groupwise where each row has the index of its weights.",
    written=_rows_of_indices,
)
BATCH_DEEPGEMM = template(
    "batch_deepgemm_fp8_nt_groupwise",
    {
        **tensors(a="group_size m k", b="group_size n k", masked_m="group_size"),
        **tensors(a_scale="group_size m k_blocks", b_scale="group_size n_blocks k_blocks"),
    },
    "group_size m n",
    (_dequantized, _batch_deepgemm_reference),
    _make_batch_deepgemm,
    ({}, {"group_size": 40, "m": 1, "k": 128}),
    "As gemm_fp8_nt_groupwise for the first rows of each group.",
    written=_first_rows,
)
BLOCKSCALE_SM90 = template(
    "fp8_blockscale_gemm_sm90",
    {
        **tensors(input="m k", weight="n k"),
        **tensors(_SCALES, input_scale="m k_blocks", weight_scale="n_blocks k_blocks"),
    },
    "m n",
    (_dequantized, _quantized, _blockscale_reference),
    _make_blockscale,
    ({}, {"mat2_dtype": "bfloat16"}, {"input_dtype": "float8_e4m3fn"}, {"m": 0}, {"m": 130, "n": 64, "k": 128}),
    "The product of operands that are quantised to fp8 with a scale for every 128 values of k.",
    work=_work("input", "weight"),
)
