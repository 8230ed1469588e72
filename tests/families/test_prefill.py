"""single_prefill_with_kv_cache against fp64, on every device and implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.attention_reference import attention
from families.harness import TOLERANCE, assert_close, assert_guards, guarded, rand, strided
from fi_core.attention.ops.single import single_attention
from fi_core.runtime.errors import UnsupportedError

HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LSE = (1e-4, 1e-4)


def make(
    qo_len: int, kv_len: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: str,
    kv_dtype: torch.dtype | None = None, kv_layout: str = "NHD",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens = (kv_len, heads[1]) if kv_layout == "NHD" else (heads[1], kv_len)
    kv_dtype = kv_dtype or dtype
    q = rand(qo_len, heads[0], dims[0], dtype=dtype, device=device)
    k = rand(*tokens, dims[0], dtype=kv_dtype, device=device, seed=1)
    return q, k, rand(*tokens, dims[1], dtype=kv_dtype, device=device, seed=2)


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: torch.dtype | None = None, **options: Any
) -> None:
    """Output and LSE in fp64; `rounding` is the dtype of softmax weights, where the output is wider."""
    reference = {name: x for name, x in options.items() if name not in ("o_dtype", "packed_custom_mask", "backend")}
    want, want_lse = attention(q, k, v, **reference)
    tolerance = TOLERANCE[rounding] if rounding else None
    lse_tolerance = (2e-2, 2e-2) if options.get("pos_encoding_mode") == "ROPE_LLAMA" and q.dtype in HALVES else LSE
    out, lse = fi_core.single_prefill_with_kv_cache_return_lse(q, k, v, **options)
    assert out.dtype == options.get("o_dtype", q.dtype) and lse.dtype == torch.float32
    assert_close(out, want, tolerance=tolerance)
    assert_close(lse, want_lse, tolerance=lse_tolerance)
    assert torch.equal(fi_core.single_prefill_with_kv_cache(q, k, v, **options), out)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    ("qo_len", "kv_len", "heads", "dims", "causal"),
    [
        (1, 1, (1, 1), (64, 64), True),
        (17, 90, (6, 2), (128, 128), True),  # append; 51 packed rows
        (70, 70, (4, 1), (64, 72), True),  # several tiles, an odd head dim
        (40, 65, (2, 2), (200, 264), False),  # dims in more than one piece, neither a multiple of 16
        (33, 140, (3, 3), (192, 128), True),
        (90, 20, (2, 1), (128, 64), False),  # more queries than keys
        (12, 3, (2, 2), (512, 512), False),
        (0, 5, (2, 1), (64, 64), False),
        (3, 0, (2, 1), (64, 64), False),  # no keys: zeros and -inf
    ],
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_prefill(
    qo_len: int, kv_len: int, heads: tuple[int, int], dims: tuple[int, int], causal: bool, dtype: torch.dtype,
    kv_layout: str, device: str,
) -> None:  # fmt: skip
    q, k, v = make(qo_len, kv_len, heads, dims, dtype, device, kv_layout=kv_layout)
    check(q, k, v, causal=causal, kv_layout=kv_layout)


@pytest.mark.parametrize("padding", [8, 1])
@pytest.mark.parametrize("dtype", HALVES)
def test_prefill_strided(dtype: torch.dtype, padding: int, device: str) -> None:
    """Slices of a fused qkv: NaN between the rows; with padding 1 the rows are not aligned for vector loads."""
    q, k, v = make(30, 75, (4, 2), (64, 128), dtype, device)
    q, k, v = (strided(x, padding) for x in (q, k, v))
    check(q, k, v, causal=True)
    check(q, k[:60], v[:60], window_left=11)  # what lies beyond the last key is not read


# Each option, with the values that must make a difference.
OPTIONS: list[dict[str, Any]] = [
    {"sm_scale": 0.3},
    {"k_scale": 1.7},
    {"v_scale": 0.4},
    {"logits_soft_cap": 1.5},
    {"causal": True},
    {"window_left": 0},
    {"window_left": 13},
    {"window_left": 13, "causal": True},
    {"window_left": 2**40},
    {"pos_encoding_mode": "ALIBI"},
    {"pos_encoding_mode": "ALIBI", "causal": True, "window_left": 30},
    {"pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 4.0},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 500.0, "causal": True},
    {"logits_soft_cap": 2.0, "pos_encoding_mode": "ROPE_LLAMA", "window_left": 20, "causal": True, "sm_scale": 0.2},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
@pytest.mark.parametrize(("heads", "dims"), [((6, 3), (64, 64)), ((3, 1), (136, 64))])
def test_prefill_options(
    options: dict[str, Any], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    q, k, v = make(37, 70, heads, dims, dtype, device)
    check(q, k, v, **options)
    if options != {"window_left": 2**40}:
        want = attention(q, k, v, **options)
        plain = attention(q, k, v)
        differences = [(a - b).nan_to_num(0.0).abs().max() for a, b in zip(want, plain)]
        assert max(differences) > 0.1, "the option would not be missed"


def test_soft_cap_off(device: str) -> None:
    q, k, v = make(5, 9, (2, 1), (64, 64), torch.float32, device)
    for cap in (None, 0.0, -3.0):
        check(q, k, v, logits_soft_cap=cap)


def masks(qo_len: int, kv_len: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A random mask with one empty row, and its packed form."""
    mask = torch.rand(qo_len, kv_len, generator=torch.Generator().manual_seed(5)) < 0.4
    mask[qo_len // 2] = False
    bits = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
    packed = (bits.int() << torch.arange(8)).sum(-1).to(torch.uint8)
    return mask.to(device), packed.to(device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("qo_len", [3, 45])
def test_prefill_custom_mask(qo_len: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = make(qo_len, 71, (4, 2), (64, 64), dtype, device)
    mask, packed = masks(qo_len, 71, device)
    check(q, k, v, custom_mask=mask)
    check(q, k, v, custom_mask=mask, causal=True)  # the mask takes the place of causal
    check(q, k, v, custom_mask=mask, window_left=9)
    wide = torch.zeros(qo_len, 80, dtype=torch.bool, device=device)
    wide[:, :71] = mask
    check(q, k, v, custom_mask=wide[:, :71])
    want, want_lse = attention(q, k, v, custom_mask=mask)
    for custom in (None, ~mask):  # packed wins
        out, lse = fi_core.single_prefill_with_kv_cache_return_lse(
            q, k, v, custom_mask=custom, packed_custom_mask=packed, causal=True
        )
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=LSE)
        assert out[qo_len // 2].eq(0).all() and lse[qo_len // 2].isneginf().all()


def test_custom_mask_with_more_queries_than_keys(device: str) -> None:
    """A custom mask replaces causal, so there may be fewer keys than queries."""
    q, k, v = make(9, 4, (2, 1), (64, 64), torch.float16, device)
    check(q, k, v, custom_mask=masks(9, 4, device)[0], causal=True, window_left=2)


@pytest.mark.parametrize("qo_len", [2, 40])
@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("dtype", HALVES)
def test_prefill_fp8_keys(dtype: torch.dtype, kv_dtype: torch.dtype, qo_len: int, device: str) -> None:
    q, k, v = make(qo_len, 70, (4, 2), (64, 136), dtype, device, kv_dtype)
    check(q, k, v, causal=True, k_scale=1.3, v_scale=0.7)
    check(strided(q, 8), strided(k, 24), strided(v, 1), causal=True)


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.bfloat16, torch.float32, *FP8])
@pytest.mark.parametrize("dtype", FP8)
def test_prefill_fp8(dtype: torch.dtype, o_dtype: torch.dtype, device: str) -> None:
    q, k, v = make(21, 50, (6, 2), (64, 64), dtype, device)
    for seed, option in enumerate(("scale_q", "scale_k", "scale_v")):
        scale = rand(6 if option == "scale_q" else 2, dtype=torch.float32, device=device, seed=seed).abs() + 0.5
        check(q, k, v, torch.float16 if o_dtype == torch.float32 else None, o_dtype=o_dtype, **{option: scale})
    scales = {
        s: rand(n, dtype=torch.float32, device=device, seed=9).abs() + 0.5 for s, n in (("scale_q", 6), ("scale_k", 2))
    }
    check(q, k, v, torch.float16 if o_dtype == torch.float32 else None, o_dtype=o_dtype, causal=True, **scales)


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.bfloat16, torch.float32, *FP8])
def test_output_dtype(o_dtype: torch.dtype, device: str) -> None:
    q, k, v = make(30, 50, (2, 2), (64, 64), torch.float16, device)
    check(q, k, v, torch.float16 if o_dtype == torch.float32 else None, o_dtype=o_dtype)
    if o_dtype not in FP8:
        return
    want, largest = attention(q, k, v, v_scale=1e7)[0], torch.finfo(o_dtype).max
    too_large = want.abs() > 1.1 * largest
    assert too_large.any()
    out = fi_core.single_prefill_with_kv_cache(q, k, v, o_dtype=o_dtype, v_scale=1e7).cpu().double()
    assert torch.equal(out[too_large], want[too_large].sign() * largest)


def test_bad_rows_spoil_themselves_only(device: str) -> None:
    q, k, v = make(40, 60, (2, 2), (64, 64), torch.bfloat16, device)
    q[3, 1, 5] = float("nan")
    want, _ = attention(q, k, v, causal=True)
    assert want.isnan().any(-1).sum() == 1
    assert_close(fi_core.single_prefill_with_kv_cache(q, k, v, causal=True), want)


def test_large_scores(device: str) -> None:
    """Scores of +-1e4: the softmax is one-hot, and no exponential overflows."""
    q, k, v = make(20, 70, (2, 1), (64, 64), torch.float32, device)
    check(q * 100, k * 100, v, causal=True)


def test_no_kernel_writes_outside_its_outputs(device: str) -> None:
    """No write leaves the outputs, neither of the kernel for many rows nor of the kernel for few rows."""
    q, k, v = make(19, 40, (4, 2), (64, 72), torch.float16, device)
    want, want_lse = attention(q, k, v, causal=True)
    out, lse = guarded((19, 4, 72), torch.float16, device, row_padding=8), guarded((19, 4), torch.float32, device)
    single_attention(out, lse, None, q, k, v, 0, causal=True, sm_scale=64**-0.5)
    assert_close(out, want)
    assert_close(lse, want_lse, tolerance=LSE)
    assert_guards(out)
    assert_guards(lse)


@pytest.mark.parametrize("backend", ["auto", "fa2", "fa3"])
def test_backends_are_accepted(backend: str, device: str) -> None:
    q, k, v = make(3, 4, (2, 1), (64, 64), torch.float16, device)
    if backend == "fa3" and (device == "cpu" or torch.cuda.get_device_capability() != (9, 0)):
        with pytest.raises(UnsupportedError, match=r"batch_prefill: requires (device|capability)"):
            fi_core.single_prefill_with_kv_cache(q, k, v, backend=backend)
        return
    check(q, k, v, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{"pos_encoding_mode": "ALIBI"}, {"custom_mask": torch.ones(3, 4, dtype=torch.bool)}, {"o_dtype": torch.float32}],
    ids=["alibi", "mask", "fp32 output"],
)
def test_a_backend_that_is_named_runs_or_raises(options: dict[str, Any]) -> None:
    q, k, v = make(3, 4, (2, 1), (64, 64), torch.float16, "cuda")
    with pytest.raises(UnsupportedError, match="batch_prefill: requires"):
        fi_core.single_prefill_with_kv_cache(q, k, v, backend="fa3", **options)
    odd = torch.empty(3 * 2 * 64 + 1, dtype=torch.float16, device="cuda")[1:].view(3, 2, 64)
    with pytest.raises(UnsupportedError, match="batch_prefill: requires"):
        fi_core.single_prefill_with_kv_cache(odd, k, v, backend="fa3")


HALF = torch.float16


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_layout": "NDH"}, KeyError, "kv_layout: allowed are NHD, HND; got 'NDH'"),
        ({"pos_encoding_mode": "ROPE"}, KeyError, "pos_encoding_mode: allowed are NONE, ROPE_LLAMA, ALIBI; got 'ROPE'"),
        ({"backend": "fa4"}, ValueError, "backend: allowed are auto, fa2, fa3; got 'fa4'"),
        ({"kv_cache_sf": ()}, ValueError, "kv_cache_sf: k of uint8"),
        (
            {"causal": True, "q": torch.ones(9, 4, 64, dtype=HALF)},
            ValueError,
            "at least as many tokens.* 9, kv_len = 8",
        ),
        ({"q": torch.ones(4, 64, dtype=HALF)}, ValueError, "q must have shape .* got .4, 64"),
        (
            {"q": torch.ones(5, 3, 64, dtype=HALF)},
            ValueError,
            "multiple of k's heads: num_qo_heads = 3, num_kv_heads = 2",
        ),
        ({"k": torch.ones(8, 2, 72, dtype=HALF)}, ValueError, "k must have shape .*head_dim_qk = 64; got .8, 2, 72"),
        ({"v": torch.ones(7, 2, 64, dtype=HALF)}, ValueError, "v must have shape .*kv_len = 8.*got .7, 2, 64"),
        ({"v": torch.ones(8, 2, 68, dtype=HALF)}, ValueError, "Unsupported head_dim.* of v .*multiple of 8 .* got 68"),
        ({"v": torch.ones(8, 2, 520, dtype=HALF)}, ValueError, "Unsupported head_dim"),
        ({"v": torch.ones(8, 128, dtype=HALF)}, ValueError, "3 dimensions"),
        ({"k": torch.ones(8, 2, 64)}, TypeError, "k must have the dtype of q, float16; got float32"),
        ({"v": torch.ones(8, 2, 64)}, TypeError, "v must have the dtype of k, float16; got float32"),
        ({"k": torch.ones(8, 64, 2, dtype=HALF).transpose(1, 2)}, ValueError, "k must be contiguous in its last"),
        ({"custom_mask": torch.ones(5, 9, dtype=torch.bool)}, ValueError, "custom_mask must have shape .*got .5, 9"),
        ({"custom_mask": torch.ones(5, 8)}, TypeError, "custom_mask must be bool; got float32"),
        ({"packed_custom_mask": torch.ones(4, dtype=torch.uint8)}, ValueError, "packed_custom_mask .* = 5; got .4"),
        ({"packed_custom_mask": torch.ones(5, dtype=torch.int32)}, TypeError, "packed_custom_mask must be uint8"),
        ({"scale_q": torch.ones(2)}, ValueError, "scale_q must have shape .*num_qo_heads = 4; got .2"),
        ({"scale_k": torch.ones(2, dtype=HALF)}, TypeError, "scale_k must be float32"),
        ({"rope_theta": 0.0}, ValueError, "rope_theta must be positive"),
        ({"o_dtype": torch.int32}, TypeError, "out must be .* got int32"),
        ({"v_scale": torch.ones(1)}, TypeError, "v_scale must be a number"),
    ],
)
def test_prefill_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {
        "q": torch.ones(5, 4, 64, dtype=HALF),
        "k": torch.ones(8, 2, 64, dtype=HALF),
        "v": torch.ones(8, 2, 64, dtype=HALF),
    }
    with pytest.raises(error, match=words):
        fi_core.single_prefill_with_kv_cache(**(good | change))


def test_prefill_refuses_other_dtypes() -> None:
    q, k, v = (torch.ones(2, 1, 64, dtype=torch.int32) for _ in range(3))
    with pytest.raises(ValueError, match="requires q in"):
        fi_core.single_prefill_with_kv_cache(q, k, v)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_prefill_trace(kv_layout: str, device: str) -> None:
    """The definition names the axes of the layout, and its reference agrees with the kernel."""
    q, k, v = make(6, 9, (4, 2), (64, 72), torch.float32, device, kv_layout=kv_layout)
    function = fi_core.single_prefill_with_kv_cache
    definition = function.fi_trace(q=q, k=k, v=v, kv_layout=kv_layout, return_lse=True)  # type: ignore[attr-defined]
    assert definition["axes"]["num_kv_heads"]["value"] == 2 and definition["axes"]["head_dim_vo"]["value"] == 72
    assert set(definition["outputs"]) == {"output", "lse"}
    space: dict[str, Any] = {}
    exec(definition["reference"], space)
    options = {"causal": True, "window_left": 3, "logits_soft_cap": 2.0, "kv_layout": kv_layout, "sm_scale": 0.2}
    for got, want in zip(function(q, k, v, return_lse=True, **options), space["_reference"](q, k, v, **options)):
        assert_close(got, want, tolerance=LSE)
