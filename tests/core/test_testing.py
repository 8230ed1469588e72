"""fi_core.testing: the result of bench_gpu_time, cache rotation, attention counts and fp8 casts."""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fi_core import testing
from fi_core.testing import l2, utils
from fi_core.testing.quantize import dequantize_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8, quantize_fp8
from fi_core.testing.timing import BenchTimes, bench_cpu_time, bench_gpu_time


def test_import_leaves_torch_alone() -> None:
    code = "import sys, fi_core.testing, fi_core.testing.timing; print('torch' in sys.modules, 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_every_export_resolves() -> None:
    for name in testing.__all__:
        assert callable(getattr(testing, name))
    with pytest.raises(AttributeError, match="no_such"):
        _ = testing.no_such


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_times_unpack_and_are_samples_for_numpy(samples: list[float]) -> None:
    times = BenchTimes(samples)
    median, std = times
    assert median == statistics.median(samples)
    assert np.median(times) == pytest.approx(median)
    assert std == pytest.approx(np.std(times))
    for q in (0, 10, 50, 95, 100):
        assert np.percentile(times, q) == np.percentile(samples, q)
    for name in ("mean", "std", "var", "min", "max", "sum", "sort", "quantile"):
        extra = (0.3,) if name == "quantile" else ()
        np.testing.assert_allclose(getattr(np, name)(times, *extra), getattr(np, name)(np.array(samples), *extra))
    assert np.asarray(times, dtype=np.float32).shape == (len(samples),)
    assert times.samples == samples
    assert (len(times), times[0], times[1]) == (2, median, std)
    assert pickle.loads(pickle.dumps(times)).samples == samples


def test_cpu_function_is_timed_by_the_wall_clock() -> None:
    x = torch.ones(4)
    times = bench_gpu_time(lambda t: time.sleep(0.002), args=(x,), num_iters=4, dry_run_iters=1)
    assert len(times.samples) == 4
    assert 2.0 <= times.median_ms < 200
    assert bench_cpu_time(time.sleep, 0.001).median_ms >= 1.0


def test_aliases_of_arguments() -> None:
    seen: list[tuple[object, ...]] = []
    x = torch.ones(2)

    def fn(*a: object, **k: object) -> None:
        seen.append((a, k))

    assert len(bench_gpu_time(fn, input_args=(x,), input_kwargs={"b": 1}, repeat_iters=3, dry_run_iters=0).samples) == 3
    assert seen[0] == ((x,), {"b": 1})
    with pytest.raises(TypeError, match="repeat_iters is given twice"):
        bench_gpu_time(fn, args=(x,), repeat_iters=3, num_iters=3)
    with pytest.raises(TypeError, match="input_args is given twice"):
        bench_gpu_time(fn, args=(x,), input_args=(x,))
    with pytest.raises(ValueError, match="repeat_iters must be at least 1, got 0"):
        bench_gpu_time(fn, args=(x,), num_iters=0)
    with pytest.warns(DeprecationWarning, match="l2_flush"):
        bench_gpu_time(fn, args=(x,), l2_flush=True, num_iters=1, dry_run_iters=0)


def test_timers_take_their_arguments_in_the_order_of_flashinfer() -> None:
    """Positional calls bind what they mean: 1 warm-up call, 4 samples, and the arguments of the function."""
    usual = 1, 4, 25, 100
    rest = None, None, None, False
    inputs = (torch.ones(2),), {"scale": 3}
    seen = []

    def call(x: torch.Tensor, scale: int = 1) -> None:
        seen.append((x.shape, scale))

    for timer, arguments in (
        (testing.bench_gpu_time_with_cuda_event, (*usual, *rest, *inputs)),
        (testing.bench_gpu_time_with_cudagraph, (*usual, 10, *rest, *inputs)),
        (testing.bench_gpu_time_with_cupti, (*usual, *rest, False, *inputs)),
    ):
        assert len(np.asarray(timer(call, *arguments))) == 4, timer
    assert set(seen) == {(torch.Size([2]), 3)}
    with pytest.raises(TypeError, match="enable_cupti"):
        testing.bench_gpu_time_with_cuda_event(call, enable_cupti=True)


def test_calls_are_warmup_plus_estimate_plus_samples() -> None:
    calls = []
    bench_gpu_time(lambda t: calls.append(1), args=(torch.ones(1),), num_iters=7, dry_run_iters=3)
    assert len(calls) == 1 + 5 + 3 + 7


def test_clone_keeps_strides_and_sharing() -> None:
    base = torch.arange(48, dtype=torch.float32).view(6, 8)
    tree = {"a": base[:, :4], "b": (base[:, 4:], [base.t()]), "n": 3}
    twin = l2.clone_tree(tree)
    assert twin["a"].stride() == (8, 1)
    assert twin["n"] == 3
    torch.testing.assert_close(twin["b"][1][0], base.t())
    twin["a"][0, 0] = -1
    assert twin["b"][1][0][0, 0] == -1, "views of one storage share one copy"
    assert base[0, 0] == 0


def test_copies_of_a_tree_are_freed_at_once() -> None:
    """Weights of a large layer fit twice on a GPU, not three times."""
    gc.collect()
    gc.disable()
    try:
        copied = l2.clone_tree({"weights": [torch.ones(4)]})
        del copied
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_touched_bytes_count_views_not_pools() -> None:
    pool = torch.zeros(1 << 20, dtype=torch.uint8)
    assert l2.touched_bytes([pool[:100], pool[200:300]]) == 200
    assert l2.touched_bytes([pool, pool[:100]]) == 1 << 20
    assert l2.touched_bytes(torch.zeros(1, 4).expand(1000, 4)) == 16
    assert l2.touched_bytes([torch.empty(0), None, 3]) == 0


def test_rotation_count_exceeds_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2, "get_l2_cache_size", lambda device=None: 1000)
    x = torch.zeros(100, dtype=torch.uint8)
    n = utils.calculate_rotation_count([x])
    assert n == 51
    assert (n - 1) * 100 >= 5 * 1000
    assert utils.calculate_rotation_count([torch.zeros(5000, dtype=torch.uint8)]) == 1
    assert utils.calculate_rotation_count([torch.zeros(4000, dtype=torch.uint8)]) == 3


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_agree_with_counting(causal: bool) -> None:
    q, kv, h, dk, dv = 3, 7, 2, 5, 4
    pairs = sum(1 for i in range(q) for j in range(kv) if not causal or j <= kv - q + i)
    exact = 2 * pairs * h * (dk + dv)
    counted = testing.attention_flops(2, q, kv, dk, dv, h, causal)
    # the usual causal formula counts half of the diagonal
    assert counted == 2 * (exact - (q * h * (dk + dv) if causal else 0))
    lens = torch.full((2, 1, 1, 1), q, dtype=torch.int32), torch.full((2, 1, 1, 1), kv, dtype=torch.int32)
    assert testing.attention_flops_with_actual_seq_lens(*lens, dk, dv, h, causal) == counted
    assert testing.attention_tflops_per_sec(2, q, kv, dk, dv, h, causal, 2.0) == pytest.approx(counted / 2e-3 / 1e12)
    assert testing.attention_tflops_per_sec(2, q, kv, dk, dv, h, causal, float("nan")) == 0.0


def test_attention_bytes_and_errors() -> None:
    got = testing.attention_tb_per_sec(2, 1, 100, 128, 64, 8, 2, 1.0, torch.float16, torch.float8_e4m3fn)
    want = 2 * (8 * 128 * 2 + 100 * 2 * 128 * 1 + 100 * 2 * 64 * 2 + 8 * 64 * 2)
    assert got == pytest.approx(want / 1e-3 / 1e12)
    with pytest.raises(ValueError, match="qo_seqlen must be at most kv_seqlen"):
        testing.attention_flops(1, 5, 4, 8, 8, 1, False)
    with pytest.raises(ValueError, match="request 1"):
        testing.attention_flops_with_actual_seq_lens([1, 5], [1, 4], 8, 8, 1, True)
    assert testing.attention_flops_with_actual_seq_lens([5], [4], 8, 8, 1, False) == 2 * 20 * 16
    big = [2**25 + 1] * 3  # a float32 dot product would lose the ones
    assert testing.attention_flops_with_actual_seq_lens([1] * 3, big, 1, 1, 1, False) == 4 * sum(big)


@pytest.mark.parametrize("mode", ["K", "MN"])
@pytest.mark.parametrize(
    ("tile", "shape"), [((1, 128), (5, 384)), ((128, 128), (200, 130)), ((1, 64, 32), (3, 70, 96))]
)
def test_quantize_round_trip(tile: tuple[int, ...], shape: tuple[int, ...], mode: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10
    scale_shape = [-(-s // t) for s, t in zip(shape, tile, strict=True)]
    if mode == "MN":
        scale_shape[-2:] = scale_shape[:-3:-1]
    q, scale = quantize_fp8(x, tuple(scale_shape), tile, mode)
    assert q.dtype == torch.float8_e4m3fn
    assert torch.equal(scale, torch.exp2(torch.log2(scale).round())), "scales are powers of two"
    torch.testing.assert_close(dequantize_fp8(q, scale, mode), x, rtol=0.0625, atol=float(scale.max()) / 256)
    with pytest.raises(ValueError, match="scale_shape must be"):
        quantize_fp8(x, (1,), tile, mode)
    with pytest.raises(ValueError, match="scale_major_mode"):
        dequantize_fp8(q, scale, "N")


def test_token_and_block_casts() -> None:
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(2))
    for cast, shape in ((per_token_cast_to_fp8, (130, 2)), (per_block_cast_to_fp8, (2, 2))):
        q, scale = cast(x)
        assert tuple(scale.shape) == shape
        torch.testing.assert_close(dequantize_fp8(q, scale, "K"), x, rtol=0.0625, atol=float(scale.max()) / 256)
        assert q.float().abs().max() > 112, "the range of fp8 is used"
    with pytest.raises(ValueError, match="multiple of 128"):
        per_token_cast_to_fp8(torch.ones(2, 100))


def test_seed_and_bytes() -> None:
    utils.set_seed(3)
    first = torch.rand(2), np.random.rand()
    utils.set_seed(3)
    assert torch.equal(first[0], torch.rand(2))
    assert first[1] == np.random.rand()
    assert utils.count_bytes(torch.ones(3), [torch.ones(2, dtype=torch.int8), None], (torch.ones(1),)) == 18
