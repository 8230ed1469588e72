"""The launcher of gemm_fp32_weights without a GPU: clusters that share k, and loads, seen by the mock driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches

OUT, A, B = (0x7F001000000 * (i + 1) for i in range(3))
Product = Callable[..., Call]


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The launch of a product of an implementation; a_at, b_stride: what is not aligned."""
    folder = tmp_path_factory.mktemp("gemm_fp32_weights")
    gpu = Gpu(build_driver(folder), folder / "log", 90)

    def call(m: int, n: int, k: int, implementation: str = "cluster", a_at: int = A, b_stride: int = 0) -> Call:
        arguments = {
            "out": Tensor(OUT, (m, n), "f32"),
            "a": Tensor(a_at, (m, k), "bf16"),
            "b": Tensor(B, (n, k), "f32", (b_stride or k, 1)),
        }
        (launch,) = launches(gpu.call("gemm_fp32_weights", {}, arguments, implementation=implementation))
        return launch

    yield call
    gpu.close()


@pytest.mark.parametrize(
    ("n", "k", "ctas"),
    [(256, 7168, 4), (384, 6144, 2), (896, 7168, 1), (64, 7168, 8), (64, 1024, 2), (64, 512, 1), (8, 4096, 8)],
)
def test_ctas_of_a_cluster_share_k_while_sms_are_left_over(product: Product, n: int, k: int, ctas: int) -> None:
    """Whatever m; each CTA has a block of k for each of its warps."""
    for m in (1, 16, 100):
        launch = product(m, n, k)
        assert (launch["name"], launch["cluster"]) == ("gemm_fp32_weights_4", [ctas, 1, 1])
        assert launch["grid"] == [n // 8 * ctas, -(-m // 16), 1] and launch["pdl"]


def test_without_clusters_a_cta_has_all_of_k(product: Product) -> None:
    launch = product(16, 256, 7168, "mma_sm80")
    assert (launch["cluster"], launch["grid"]) == ([1, 1, 1], [32, 1, 1])


@pytest.mark.parametrize("change", [{"a_at": A + 2}, {"b_stride": 7170}, {"k": 7166}])
def test_rows_that_are_not_aligned_are_loaded_by_elements(product: Product, change: dict[str, Any]) -> None:
    assert product(**{"m": 16, "n": 256, "k": 7168} | change)["name"] == "gemm_fp32_weights_1"
