"""single_decode_with_kv_cache against fp64, on every device and implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.attention_reference import attention
from families.harness import TOLERANCE, assert_close, assert_guards, guarded, rand, strided
from fi_core.attention.ops import single
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.spec.target import cuda_target

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


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    reference = {name: x for name, x in options.items() if name not in ("q_scale", "use_tensor_cores")}
    reference["k_scale"] = options.get("k_scale", 1.0) * options.get("q_scale", 1.0)
    want, want_lse = attention(q[None], k, v, **reference)
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
    """Also with split-KV: 300 keys are three chunks."""
    q, k, v = make(300, (6, 3), (72, 64), dtype, device)
    assert single.chunks_of(2, 3, 300, 1, -1) == 3
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
    """NaN between the rows, after the last key, and before the window is not read."""
    q, k, v = (strided(x, padding) for x in make(330, (6, 2), (64, 128), dtype, device))
    check(q, k[:300], v[:300])
    k[:100], v[:100] = float("nan"), float("nan")
    want, want_lse = attention(q[None], k[100:300], v[100:300])
    out, lse = fi_core.single_decode_with_kv_cache(q, k[:300], v[:300], window_left=199, return_lse=True)
    assert_close(out, want[0])
    assert_close(lse, want_lse[0], tolerance=LSE)


def test_bad_heads_spoil_themselves_only(device: str) -> None:
    q, k, v = make(200, (6, 2), (64, 64), torch.float16, device)
    q[1, 7], v[50, 1, 3] = float("nan"), float("inf")
    want, _ = attention(q[None], k, v)
    assert_close(fi_core.single_decode_with_kv_cache(q, k, v), want[0])


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (7, 1)])
def test_decode_is_prefill_of_one_row(heads: tuple[int, int], device: str) -> None:
    q, k, v = make(260, heads, (64, 64), torch.float32, device)
    one = fi_core.single_decode_with_kv_cache(q, k, v, return_lse=True)
    row = fi_core.single_prefill_with_kv_cache_return_lse(q[None], k, v, causal=True)
    for a, b in zip(one, row):
        assert torch.equal(a, b[0])


@pytest.mark.parametrize("chunks", [None, 1, 2, 7, 40])
def test_any_number_of_chunks(chunks: int | None, device: str) -> None:
    """Empty chunks do not change the result, and no write leaves the buffers."""
    q, k, v = make(25, (6, 2), (64, 72), torch.float32, device)
    want, want_lse = attention(q[None], k, v)
    out, lse = guarded((6, 72), torch.float32, device), guarded((6,), torch.float32, device)
    workspace = None if chunks is None else guarded((chunks, 6, 74), torch.float32, device)
    single.single_attention(out, lse, workspace, q, k, v, 0, sm_scale=64**-0.5)
    assert_close(out, want[0])
    assert_close(lse, want_lse[0], tolerance=LSE)
    for buffer in (out, lse, workspace):
        if buffer is not None:
            assert_guards(buffer)


@pytest.mark.parametrize("kv_len", [0, 1, 128, 129, 4096, 10**6])
@pytest.mark.parametrize("heads", [(1, 1), (32, 8), (128, 1), (64, 64), (4096, 4096)])
def test_the_workspace_is_bounded(heads: tuple[int, int], kv_len: int) -> None:
    chunks = single.chunks_of(heads[0] // heads[1], heads[1], kv_len, 1, -1)
    assert 1 <= chunks <= max(1, -(-kv_len // 128))
    assert chunks == 1 or chunks * heads[0] <= 4 * 528


@pytest.mark.parametrize(
    ("facts", "implementation"),
    [
        ({"qo_len": 1, "group_size": 4}, "cuda_core"),
        ({"qo_len": 1, "group_size": 128}, "cuda_core"),
        ({"qo_len": 4, "group_size": 4}, "cuda_core"),
        ({"qo_len": 5, "group_size": 4}, "mma_sm80"),  # 20 rows a kv head
        ({"qo_len": 1, "head_dim_qk": 512, "head_dim_vo": 512}, "mma_sm80"),
        ({"qo_len": 1, "q": "f32", "kv": "f32", "head_dim_qk": 512}, "cuda_core"),
        ({"qo_len": 64, "q": "f32", "kv": "f32"}, "cuda_core"),  # no tensor core product in fp32
        ({"qo_len": 1, "decode": True}, "batch_decode"),
        ({"qo_len": 1, "decode": True, "alignment": 8}, "cuda_core"),
        ({"qo_len": 1, "decode": True, "pos_encoding": "ROPE_LLAMA"}, "cuda_core"),
    ],
)
def test_choice_of_kernel(facts: dict[str, Any], implementation: str) -> None:
    request = Request.of(single.SINGLE_ATTENTION, cuda_target(8, 0), facts)
    assert choose(request).implementation == implementation


@pytest.mark.parametrize(
    ("rows", "kv_len", "qo_len", "window_left", "split"),
    [(4, 10**6, 1, -1, True), (4, 10**6, 1, 127, False), (16, 10**6, 4, -1, True), (128, 10**6, 1, -1, True)],
)
def test_keys_of_few_rows_are_split(rows: int, kv_len: int, qo_len: int, window_left: int, split: bool) -> None:
    assert (single.chunks_of(rows, 8, kv_len, qo_len, window_left) > 1) == split


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
