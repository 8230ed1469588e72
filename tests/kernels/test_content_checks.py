"""CUDA launchers with FI_CHECK=1: they read index tensors of the device, and refuse what lies, before they launch."""

from __future__ import annotations

import pytest

from kernels.mock_driver import Gpu, Tensor, launches
from kernels.test_mock_driver import Start, driver, start  # noqa: F401  (fixtures)

X, Y, INDPTR, NEW = 0x7F000100000, 0x7F000200000, 0x7F000300000, 0x7F000400000


def call(gpu: Gpu, elements: int) -> list[str]:
    """The driver calls of packbits for two segments, less those of binding it."""
    arguments = {
        "x": Tensor(X, (elements,), "u8"), "y": Tensor(Y, (16,), "u8"), "indptr": Tensor(INDPTR, (3,), "i32"),
        "new_indptr": Tensor(NEW, (3,), "i32"),
    }  # fmt: skip
    made = gpu.call("packbits", {}, arguments)
    assert len(launches(made)) == 1
    return [c["call"] for c in made if c["call"] in ("copy_to_host", "synchronize")]


def test_tables_of_the_device_are_read_and_refused(start: Start) -> None:  # noqa: F811
    """Every word of the mock is 7: offsets [7, 7, 7]."""
    gpu = start(FI_CHECK="1", FI_MOCK_WORD="7")
    assert call(gpu, 7) == ["copy_to_host", "synchronize"] * 2
    with pytest.raises(ValueError, match="packbits: indptr must end at 6 or less; got 7"):
        call(gpu, 6)
    assert not launches(gpu.calls()), "what is refused is not launched"


@pytest.mark.parametrize("switches", [{}, {"FI_CHECK": "0"}, {"FI_CHECK": "1", "FI_MOCK_CAPTURE": "1"}], ids=str)
def test_nothing_is_read_by_default_or_under_capture(start: Start, switches: dict[str, str]) -> None:  # noqa: F811
    assert call(start(FI_MOCK_WORD="7", **switches), 6) == []
