"""single_decode_with_kv_cache against fp64, on every device and implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fi_core
from families.attention_reference import attention
from families.harness import TOLERANCE, assert_close, assert_guards, guarded, impls, rand, strided, using
from fi_core.attention import choose, single_attention

HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LSE = (1e-4, 1e-4)


def make(
    kv_len: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: str,
    kv_dtype: torch.dtype | None = None, kv_layout: str = "NHD",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens = (kv_len, heads[1]) if kv_layout == "NHD" else (heads[1], kv_len)
    kv_dtype = kv_dtype or dtype
    q = rand(heads[0], dims[0], dtype=dtype, device=device)
    k = rand(*tokens, dims[0], dtype=kv_dtype, device=device, seed=1)
    return q, k, rand(*tokens, dims[1], dtype=kv_dtype, device=device, seed=2)


def each_impl(device: str) -> Iterator[None]:
    for impl in impls("single_attention", device):
        with using("single_attention", impl):
            yield


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    reference = {name: x for name, x in options.items() if name not in ("q_scale", "use_tensor_cores")}
    reference["k_scale"] = options.get("k_scale", 1.0) * options.get("q_scale", 1.0)
    want, want_lse = attention(q[None], k, v, **reference)
    for _ in each_impl(str(q.device.type)):
        out, lse = fi_core.single_decode_with_kv_cache(q, k, v, return_lse=True, **options)
        assert out.dtype == q.dtype and lse.dtype == torch.float32
        assert_close(out, want[0], tolerance=TOLERANCE[q.dtype])
        assert_close(lse, want_lse[0], tolerance=LSE)
        assert torch.equal(fi_core.single_decode_with_kv_cache(q, k, v, **options), out)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    ("kv_len", "heads", "dims"),
    [
        (0, (4, 2), (64, 64)),
        (1, (1, 1), (128, 128)),
        (63, (4, 4), (64, 64)),
        (300, (8, 2), (128, 128)),
        (129, (6, 2), (256, 256)),  # three heads a kv head
        (200, (5, 1), (72, 40)),
        (150, (17, 1), (64, 128)),
        (20, (2, 1), (512, 512)),
        (1000, (2, 2), (128, 64)),
    ],
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode(
    kv_len: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, kv_layout: str, device: str
) -> None:
    check(*make(kv_len, heads, dims, dtype, device, kv_layout=kv_layout), kv_layout=kv_layout)


OPTIONS: list[dict[str, Any]] = [
    {"sm_scale": 0.3},
    {"q_scale": 0.5},
    {"k_scale": 1.7},
    {"q_scale": 0.5, "k_scale": 1.7},
    {"v_scale": 0.4},
    {"logits_soft_cap": 1.5},
    {"window_left": 0},
    {"window_left": 140},
    {"pos_encoding_mode": "ALIBI"},
    {"pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 4.0, "rope_theta": 500.0},
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_decode_options(options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Also where the keys are split: 300 keys are three chunks."""
    q, k, v = make(300, (6, 3), (72, 64), dtype, device)
    assert choose(1, 6, 3, 300, 72, -1, dtype == torch.float32) == (True, 3)
    check(q, k, v, **options)
    if "q_scale" not in options:
        assert (
            max((a - b).abs().max() for a, b in zip(attention(q[None], k, v, **options), attention(q[None], k, v)))
            > 0.05
        )


def test_tensor_cores_are_a_hint(device: str) -> None:
    check(*make(40, (8, 1), (64, 64), torch.float16, device), use_tensor_cores=True)


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("dtype", HALVES)
def test_decode_fp8_keys(dtype: torch.dtype, kv_dtype: torch.dtype, device: str) -> None:
    q, k, v = make(150, (4, 2), (128, 128), dtype, device, kv_dtype)
    check(q, k, v, k_scale=1.3, v_scale=0.7)
    check(strided(q, 1), strided(k, 8), strided(v, 3))


@pytest.mark.parametrize("dtype", FP8)
def test_decode_fp8(dtype: torch.dtype, device: str) -> None:
    check(*make(70, (4, 2), (64, 64), dtype, device), q_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("padding", [8, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_reads_its_keys_only(dtype: torch.dtype, padding: int, device: str) -> None:
    """NaN lies between the rows, beyond the last key, and before the window."""
    q, k, v = (strided(x, padding) for x in make(330, (6, 2), (64, 128), dtype, device))
    check(q, k[:300], v[:300])
    k[:100], v[:100] = float("nan"), float("nan")
    want, want_lse = attention(q[None], k[100:300], v[100:300])
    for _ in each_impl(device):
        out, lse = fi_core.single_decode_with_kv_cache(q, k[:300], v[:300], window_left=199, return_lse=True)
        assert_close(out, want[0])
        assert_close(lse, want_lse[0], tolerance=LSE)


def test_bad_heads_spoil_themselves_only(device: str) -> None:
    q, k, v = make(200, (6, 2), (64, 64), torch.float16, device)
    q[1, 7], v[50, 1, 3] = float("nan"), float("inf")
    want, _ = attention(q[None], k, v)
    for _ in each_impl(device):
        assert_close(fi_core.single_decode_with_kv_cache(q, k, v), want[0])


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (7, 1)])
def test_decode_is_prefill_of_one_row(heads: tuple[int, int], device: str) -> None:
    q, k, v = make(260, heads, (64, 64), torch.float32, device)
    for _ in each_impl(device):
        one = fi_core.single_decode_with_kv_cache(q, k, v, return_lse=True)
        row = fi_core.single_prefill_with_kv_cache_return_lse(q[None], k, v, causal=True)
        for a, b in zip(one, row):
            assert torch.equal(a, b[0])


@pytest.mark.parametrize("chunks", [None, 1, 2, 7, 40])
def test_any_number_of_chunks(chunks: int | None, device: str) -> None:
    """More chunks than keys too: the empty ones count for nothing. Nothing is written outside the buffers."""
    q, k, v = make(25, (6, 2), (64, 72), torch.float32, device)
    want, want_lse = attention(q[None], k, v)
    for _ in each_impl(device):
        out, lse = guarded((6, 72), torch.float32, device), guarded((6,), torch.float32, device)
        workspace = None if chunks is None else guarded((chunks, 6, 74), torch.float32, device)
        arguments = (None, None, None, None, None, 0, 0, False, -1, 0.0, 64**-0.5, 1.0, 1.0, 1e4, True)
        single_attention(out, lse, workspace, q, k, v, *arguments)
        assert_close(out, want[0])
        assert_close(lse, want_lse[0], tolerance=LSE)
        for buffer in (out, lse, workspace):
            if buffer is not None:
                assert_guards(buffer)


@pytest.mark.parametrize("kv_len", [0, 1, 128, 129, 4096, 10**6])
@pytest.mark.parametrize("heads", [(1, 1), (32, 8), (128, 1), (64, 64), (4096, 4096)])
def test_the_workspace_is_bounded(heads: tuple[int, int], kv_len: int) -> None:
    few, chunks = choose(1, *heads, kv_len, 128, -1, False)
    assert few and 1 <= chunks <= max(1, -(-kv_len // 128))
    assert chunks == 1 or chunks * heads[0] <= 4 * 528


@pytest.mark.parametrize(
    ("shape", "few", "split"),
    [
        ((1, 32, 8, 10**6, 128, -1, False), True, True),
        ((1, 32, 8, 10**6, 128, 127, False), True, False),  # 128 keys are seen
        ((4, 32, 8, 10**6, 128, -1, False), True, True),
        ((5, 32, 8, 10**6, 128, -1, False), False, False),  # 20 rows a kv head
        ((1, 128, 1, 10**6, 128, -1, False), True, True),
        ((1, 32, 8, 10**6, 512, -1, False), False, False),
        ((1, 32, 8, 10**6, 512, -1, True), True, True),
        ((64, 32, 8, 10**6, 128, -1, True), True, False),  # no tensor core product in fp32
        ((0, 32, 8, 10**6, 128, -1, False), True, True),
    ],
)
def test_choice_of_kernel(shape: tuple[int, int, int, int, int, int, bool], few: bool, split: bool) -> None:
    chosen, chunks = choose(*shape)
    assert (chosen, chunks > 1) == (few, split)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_layout": "HDN"}, KeyError, "kv_layout: allowed are NHD, HND; got 'HDN'"),
        ({"pos_encoding_mode": "alibi"}, KeyError, "pos_encoding_mode: allowed are .* got 'alibi'"),
        ({"q": torch.ones(1, 4, 64)}, ValueError, "q must have shape .num_qo_heads, head_dim.; got .1, 4, 64"),
        ({"q": torch.ones(4, 60)}, ValueError, "k must have shape .*head_dim_qk = 60"),
        ({"q": torch.ones(5, 64)}, ValueError, "multiple of k's heads"),
        ({"k": torch.ones(8, 2, 64).half()}, TypeError, "k must have the dtype of q, float32; got float16"),
        ({"k": torch.ones(8, 2, 64).to(torch.float8_e5m2)}, TypeError, "k must have the dtype of q, float32"),
        ({"sm_scale": "1"}, TypeError, "sm_scale must be a number"),
    ],
)
def test_decode_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {"q": torch.ones(4, 64), "k": torch.ones(8, 2, 64), "v": torch.ones(8, 2, 64)}
    with pytest.raises(error, match=words):
        fi_core.single_decode_with_kv_cache(**(good | change))


def test_decode_compiles_to_one_graph(device: str) -> None:
    q, k, v = make(300, (4, 2), (64, 64), torch.float32, device)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = fi_core.single_decode_with_kv_cache(q, k, v, return_lse=True)
        return out * lse[:, None]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), step(q, k, v))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode_trace(kv_layout: str, device: str) -> None:
    q, k, v = make(9, (4, 2), (64, 72), torch.float32, device, kv_layout=kv_layout)
    function = fi_core.single_decode_with_kv_cache
    definition = function.fi_trace(q=q, k=k, v=v, kv_layout=kv_layout)  # type: ignore[attr-defined]
    assert definition["axes"]["num_kv_heads"]["value"] == 2 and set(definition["outputs"]) == {"output"}
    space: dict[str, Any] = {}
    exec(definition["reference"], space)
    options = {"window_left": 3, "logits_soft_cap": 2.0, "kv_layout": kv_layout, "sm_scale": 0.2}
    for got, want in zip(function(q, k, v, return_lse=True, **options), space["_reference"](q, k, v, **options)):
        assert_close(got, want, tolerance=LSE)
