"""fi_core.utils: devices, dtypes, rounding, checks, paged cache forms, and the choice of attention kernels."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fi_core import utils
from fi_core.compat import backend
from fi_core.utils import (  # FlashInfer's names, which engines import
    MaskMode,
    PosEncodingMode,
    TensorLayout,
    _cache_buf,
    _ceil_pow2,
    _expand_4d,
    _expand_5d,
    _get_range_buf,
    _unpack_paged_kv_cache,
)

CPU = torch.device("cpu")
CUDA, CUDA_UNNAMED = torch.device("cuda:0"), torch.device("cuda")
Device = Callable[..., None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Makes cuda:0 a GPU of this capability, under this CUDA version."""

    def pretend(major: int, minor: int = 0, cuda: str | None = "13.0") -> None:
        backend.capability_of.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (major, minor))
        monkeypatch.setattr(torch.version, "cuda", cuda)

    yield pretend
    backend.capability_of.cache_clear()


def test_import_needs_no_torch() -> None:
    code = "import sys, fi_core.utils, fi_core.compat.autotuner, fi_core.observe.log; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_export_exists() -> None:
    assert [name for name in utils.__all__ if not hasattr(utils, name)] == []


def test_compute_capability(device: Device) -> None:
    device(9)
    assert utils.get_compute_capability(CUDA) == (9, 0)
    torch.cuda.get_device_capability = lambda index: (10, 0)  # the fixture restores the real one
    assert utils.get_compute_capability(CUDA) == (9, 0), "cached"
    with pytest.raises(ValueError, match="CUDA device, got cpu"):
        utils.get_compute_capability(CPU)


CHECKS = {
    "is_sm90a_supported": [((9, 0, "12.3"), True), ((9, 0, "12.2"), False), ((10, 0, "13.0"), False)],
    "is_sm100a_supported": [((10, 0, "12.8"), True), ((10, 3, "12.8"), True), ((10, 0, "12.7"), False)],
    "is_sm100f_supported": [((10, 0, "12.9"), True), ((10, 0, "12.8"), False), ((9, 0, "13.0"), False)],
    "is_sm110a_supported": [((11, 0, "13.0"), True), ((11, 0, "12.9"), False)],
    "is_sm120a_supported": [((12, 0, "12.8"), True), ((12, 1, "12.9"), False), ((12, 0, "12.7"), False)],
    "is_sm120f_supported": [((12, 1, "12.9"), True), ((12, 0, "12.8"), False)],
    "is_sm121a_supported": [((12, 1, "12.9"), True), ((12, 0, "12.9"), False), ((12, 1, "12.8"), False)],
    "is_sm12x_supported": [((12, 0, "12.8"), True), ((12, 1, "12.8"), False), ((12, 1, "13.0"), True)],
}


@pytest.mark.parametrize(
    ("name", "target", "expected"),
    [(name, target, expected) for name, cases in CHECKS.items() for target, expected in cases],
)
def test_architecture_checks(
    device: Device, name: str, target: tuple[int, int, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(*target)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert getattr(utils, name)(CUDA) is getattr(utils, name)() is expected


def test_architecture_check_without_cuda_in_torch(device: Device) -> None:
    device(9, 0, None)
    assert not utils.is_sm90a_supported(CUDA)


def test_checks_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks whether to skip gets an answer, whatever torch raises."""

    def no_gpu() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", no_gpu)
    assert [name for name in CHECKS if getattr(utils, name)(CUDA_UNNAMED) or getattr(utils, name)()] == []
    assert not utils.device_support_pdl(CUDA_UNNAMED)
    with pytest.raises(RuntimeError, match="get_compute_capability: torch sees no GPU cuda: Torch not compiled"):
        utils.get_compute_capability(CUDA_UNNAMED)


def test_pdl(device: Device) -> None:
    assert not utils.device_support_pdl(CPU)
    device(8, 9)
    assert not utils.device_support_pdl(CUDA)
    device(9)
    assert utils.device_support_pdl(CUDA)


def test_sm_count(monkeypatch: pytest.MonkeyPatch) -> None:
    utils.sm_count_of.cache_clear()
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert utils.get_device_sm_count(CUDA) == 132
    utils.sm_count_of.cache_clear()
    with pytest.raises(ValueError, match="get_device_sm_count"):
        utils.get_device_sm_count(CPU)


@pytest.mark.parametrize(
    ("version", "base", "expected"),
    [("12.10", "12.9", True), ("12.9", "12.10", False), ("13", "13.0.0", True), ("2.13.0+cpu", "2.13", True)],
)
def test_version_at_least(version: str, base: str, expected: bool) -> None:
    assert utils.version_at_least(version, base) is expected


def test_version_must_be_one() -> None:
    with pytest.raises(ValueError, match="'nightly'"):
        utils.version_at_least("nightly", "1.0")


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20))
def test_rounding(x: int, y: int) -> None:
    up = utils.round_up(x, y)
    assert up % y == 0
    assert x <= up < x + y
    assert utils.ceil_div(x, y) == up // y
    low, high = utils.last_positive_power_of_2(x), utils.next_positive_power_of_2(x)
    assert low <= x <= high < 2 * x
    assert low > x // 2
    assert low.bit_count() == high.bit_count() == 1


def test_powers_below_one() -> None:
    assert utils.next_positive_power_of_2(0) == utils.last_positive_power_of_2(-3) == 1


def test_enums_are_the_codes_of_the_contract() -> None:
    assert {e.name: e.value for e in TensorLayout} == {"NHD": 0, "HND": 1}
    assert {e.name: e.value for e in MaskMode} == {"NON_CAUSAL": 0, "CAUSAL": 1, "CUSTOM": 2, "MULTIITEMSCORING": 3}
    assert {e.name: e.value for e in PosEncodingMode} == {"NONE": 0, "ROPE_LLAMA": 1, "ALIBI": 2}


def test_canonicalize_dtype() -> None:
    assert utils.canonicalize_torch_dtype("bfloat16") is torch.bfloat16
    assert utils.canonicalize_torch_dtype(torch.float16) is torch.float16
    with pytest.raises(TypeError, match="got int"):
        utils.canonicalize_torch_dtype(16)  # type: ignore[arg-type]
    for wrong in ("bf16", "nn"):  # torch.nn exists, but is not a dtype
        with pytest.raises(ValueError, match=wrong):
            utils.canonicalize_torch_dtype(wrong)


def test_is_float8() -> None:
    of = {dtype: utils.is_float8(torch.empty(1, dtype=dtype)) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    assert all(of.values())
    assert not utils.is_float8(torch.empty(1, dtype=torch.float16))


@pytest.mark.parametrize(
    ("shape", "dtype", "where", "words"),
    [
        ((2, 4), None, None, r"x: shape must be \(2, 4\), got \(2, 3\)"),
        (None, torch.int32, None, "x: dtype must be torch.int32, got torch.float32"),
        (None, None, torch.device("meta"), "x: device must be meta, got cpu"),
    ],
)
def test_check_shape_dtype_device(
    shape: tuple[int, ...] | None, dtype: torch.dtype | None, where: torch.device | None, words: str
) -> None:
    x = torch.zeros(2, 3)
    utils.check_shape_dtype_device(x, None, None, None, "x")
    utils.check_shape_dtype_device(x, torch.Size([2, 3]), torch.float32, CPU, "x")
    with pytest.raises(ValueError, match=words):
        utils.check_shape_dtype_device(x, shape, dtype, where, "x")


def test_default_generator() -> None:
    assert utils.get_default_generators(CPU) is torch.default_generator


def test_set_log_level(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("fi_core.jit")
    handlers, level = log.handlers[:], log.level
    stream = logging.StreamHandler()
    try:
        log.handlers[:] = [stream]
        utils.set_log_level("warning")
        log.setLevel(logging.DEBUG)
        assert stream.level == logging.WARNING
        with pytest.raises(ValueError, match="'loud'"):
            utils.set_log_level("loud")
        log.handlers.clear()
        utils.set_log_level("Error")
        assert log.level == logging.ERROR, "kept for when the build logger is set up"
    finally:
        log.handlers[:] = handlers
        log.setLevel(level)


def test_fp4_tensor_checks_its_parts() -> None:
    data, scale = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.float8_e4m3fn)
    tensor = utils.FP4Tensor(data, scale, original_shape=(4, 16))
    assert (tensor.dtype, tensor.scale_start_index, tensor.original_shape) == ("nvfp4", 0, (4, 16))
    with pytest.raises(ValueError, match=r"data must be torch\.uint8"):
        utils.FP4Tensor(scale, scale)
    with pytest.raises(ValueError, match=r"scale must be torch\.float8_e4m3fn"):
        utils.FP4Tensor(data, data)


# Paged KV cache forms: pages 3, page_size 4, heads 2, dim 8


@pytest.mark.parametrize(("layout", "page"), [("NHD", (4, 2)), ("HND", (2, 4))])
def test_unpack_paged_kv_cache(layout: str, page: tuple[int, int]) -> None:
    fused = torch.arange(3 * 2 * 4 * 2 * 8).view(3, 2, *page, 8)
    k, v = _unpack_paged_kv_cache(fused, layout)
    assert k.shape == v.shape == (3, *page, 8)
    assert torch.equal(k, fused[:, 0])
    assert torch.equal(v, fused[:, 1])
    assert k.data_ptr() == fused.data_ptr(), "a view"
    again = _unpack_paged_kv_cache((k, v), layout)
    assert again[0] is k
    assert again[1] is v


@pytest.mark.parametrize(("layout", "shape"), [("NHD", (3, 1, 2, 8)), ("HND", (3, 2, 1, 8))])
def test_pages_of_one_token(layout: str, shape: tuple[int, ...]) -> None:
    k, v = _unpack_paged_kv_cache((torch.zeros(3, 2, 8), torch.zeros(3, 2, 16)), layout)
    assert k.shape == shape
    assert v.shape == (*shape[:3], 16)
    k, v = _unpack_paged_kv_cache(torch.zeros(3, 2, 2, 8), layout)
    assert k.shape == v.shape == shape


def test_paged_cache_rejects() -> None:
    cache = torch.zeros(3, 4, 2, 8)
    with pytest.raises(KeyError, match="got list"):
        _unpack_paged_kv_cache([cache, cache], "NHD")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"^kv_layout: allowed are NHD, HND; got 'DHN'"):
        _unpack_paged_kv_cache((cache, cache), "DHN")
    with pytest.raises(ValueError, match="3 or 4 dimensions"):
        _expand_4d(torch.zeros(3, 8), "NHD")
    with pytest.raises(ValueError, match="4 or 5 dimensions"):
        _expand_5d(torch.zeros(3, 8, 1), "NHD")


def test_range_buf_is_cached() -> None:
    first = _get_range_buf(5, CPU)
    assert first.dtype is torch.int32
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert _get_range_buf(8, CPU).data_ptr() == first.data_ptr()
    big = _get_range_buf(3000, CPU)
    assert big.tolist() == list(range(3000))
    assert _get_range_buf(5, CPU).data_ptr() == first.data_ptr(), "a bigger one does not replace it"
    _get_range_buf(5, "cpu")
    assert _cache_buf[f"range_{_ceil_pow2(5)}", "cpu"].tolist() == list(range(8)), "where engines pin it"


def test_is_graph_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not utils.is_graph_capturing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert utils.is_graph_capturing()


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2.0**-8]),
        (8, [2.0**-k for k in range(1, 9)]),
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
        (12, [2.0**-k for k in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]),
    ],
)
def test_alibi_slopes(heads: int, slopes: list[float]) -> None:
    made = utils.get_alibi_slopes(heads)
    assert made.dtype is torch.float32
    torch.testing.assert_close(made, torch.tensor(slopes), rtol=1e-7, atol=0)


E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.mark.parametrize(
    ("posenc", "fp16_reduction", "mask", "q", "kv", "expected"),
    [
        (0, False, False, BF16, BF16, True),
        (0, False, False, E4M3, E4M3, True),
        (1, False, False, BF16, BF16, False),
        (2, False, False, BF16, BF16, False),
        (0, True, False, BF16, BF16, False),
        (0, False, True, BF16, BF16, False),
        (0, False, False, BF16, E4M3, False),
        (0, False, False, BF16, torch.uint8, False),
        (0, False, False, E4M3, torch.uint8, False),
    ],
)
def test_fa3_options(
    device: Device, posenc: int, fp16_reduction: bool, mask: bool, q: torch.dtype, kv: torch.dtype, expected: bool
) -> None:
    options = (posenc, fp16_reduction, mask, q, kv)
    assert utils.is_fa3_backend_supported(*options) is expected
    device(9)
    assert utils.determine_attention_backend(CUDA, *options) == ("fa3" if expected else "fa2")
    for other in (8, 10):
        device(other)
        assert utils.determine_attention_backend(CUDA, *options) == "fa2"


@pytest.mark.parametrize(
    ("qk", "vo", "expected"),
    [(64, 64, "fa3"), (192, 128, "fa3"), (256, 256, "fa3"), (128, 64, "fa2"), (96, 96, "fa2"), (96, None, "fa3")],
)
def test_fa3_head_dims(device: Device, qk: int, vo: int | None, expected: str) -> None:
    device(9)
    options = (CUDA, 0, False, False, BF16, BF16)
    assert utils.determine_attention_backend(*options, head_dim_qk=qk, head_dim_vo=vo) == expected
