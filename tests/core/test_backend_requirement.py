"""fi_core.compat.backend: which backends support a call, in what order, and the error texts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fi_core.compat import backend
from fi_core.compat.backend import (
    backend_requirement,
    experimental_backend,
    fi_experimental_api,
    supported_compute_capability,
)
from fi_core.runtime.errors import BackendSupportedError, ExperimentalWarning

X = torch.zeros(2, 8)


@supported_compute_capability([80, 90])
def cutlass(x: torch.Tensor, k: int = 1, backend: str = "auto") -> bool:
    return k < 100


@supported_compute_capability([90])
def cudnn(x: torch.Tensor, k: int = 1, backend: str = "auto") -> bool:
    if k % 2:
        raise ValueError(f"k: an even number is required, got {k}")
    return True


def cublas(x: torch.Tensor, k: int = 1, backend: str = "auto") -> bool:
    return k != 50


def by_name(suitable: list[str], x: torch.Tensor, k: int, backend: str) -> list[str]:
    return sorted(suitable)


CHECKS = {"cutlass": cutlass, "cudnn": cudnn, "cublas": cublas}


def make(heuristic: Callable[..., list[str]] | None = by_name, common: Callable[..., bool] | None = None) -> Any:
    @backend_requirement(CHECKS, common_check=common, heuristic_func=heuristic)
    def op(x: torch.Tensor, k: int = 1, backend: str = "auto") -> tuple[int, str]:
        """Doc."""
        return k, backend

    return op


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Makes tensors appear on a GPU of this compute capability."""

    def pretend(cc: int | None) -> None:
        monkeypatch.setattr(backend, "capability_of_first_tensor", lambda values: cc)

    return pretend


def test_supported_compute_capability() -> None:
    assert [cc for cc in range(70, 130) if cutlass.is_compute_capability_supported(cc)] == [80, 90]
    for wrong in ((80,), {80}, 80, [80, "90"], [True], [8.0]):
        with pytest.raises(TypeError, match="supported_ccs"):
            supported_compute_capability(wrong)  # type: ignore[arg-type]


def test_capability_of_the_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.capability_of_first_tensor((1, None, "x")) is None
    assert backend.capability_of_first_tensor((1, X)) is None, "a CPU tensor does not restrict"
    monkeypatch.setattr(backend, "get_compute_capability", lambda device: (9, 0))

    class OnGpu(torch.Tensor):
        device = torch.device("cuda:0")

    assert backend.capability_of_first_tensor(("x", torch.zeros(1).as_subclass(OnGpu), X)) == 90


def test_explicit_backend(capability: Callable[[int | None], None]) -> None:
    op = make()
    assert op(X, 2, backend="cudnn") == (2, "cudnn")
    assert op.__doc__ == "Doc."
    with pytest.raises(BackendSupportedError, match=r"^op does not support backend 'trtllm'$"):
        op(X, backend="trtllm")
    with pytest.raises(ValueError, match="Problem size is not supported for op"):
        op(X, 100, backend="cutlass")
    with pytest.raises(ValueError, match="k: an even number is required, got 1"):
        op(X, backend="cudnn")  # the default k reaches the checker
    capability(80)
    assert op(X, 2, backend="cutlass") == (2, "cutlass")
    assert op(X, 2, backend="cublas") == (2, "cublas"), "a checker without a list is not restricted"
    with pytest.raises(BackendSupportedError, match=r"^op does not support backend 'cudnn' with capability 80$"):
        op(X, 2, backend="cudnn")
    assert not hasattr(op, "suitable_auto_backends")


def test_auto_keeps_suitable_backends_in_the_order_of_the_heuristic(capability: Callable[[int | None], None]) -> None:
    op = make()
    assert op(X, 2) == (2, "auto")
    assert op.suitable_auto_backends == ["cublas", "cudnn", "cutlass"]
    op(X, 3)
    assert op.suitable_auto_backends == ["cublas", "cutlass"], "a ValueError of a checker means not suitable"
    op(X, k=102)
    assert op.suitable_auto_backends == ["cublas", "cudnn"]
    capability(80)
    op(X, 2)
    assert op.suitable_auto_backends == ["cublas", "cutlass"]


def test_auto_gives_the_heuristic_dict_order() -> None:
    seen: list[list[str]] = []

    def record(suitable: list[str], **kwargs: Any) -> list[str]:
        seen.append(suitable)
        assert kwargs.keys() == {"x", "k", "backend"}
        return suitable[:1]

    op = make(record)
    op(X, 2)
    assert seen == [["cutlass", "cudnn", "cublas"]]
    assert op.suitable_auto_backends == ["cutlass"]


def test_auto_without_any_says_why_for_each(capability: Callable[[int | None], None]) -> None:
    @backend_requirement({"cutlass": cutlass, "cudnn": cudnn}, heuristic_func=by_name)
    def narrow(x: torch.Tensor, k: int = 1, backend: str = "auto") -> None: ...

    capability(90)
    with pytest.raises(BackendSupportedError) as caught:
        narrow(X, 101)
    text = str(caught.value)
    assert text.startswith("No suitable auto backends found for narrow")
    assert "cutlass: does not support this problem size" in text
    assert "cudnn: k: an even number is required, got 101" in text
    capability(100)
    with pytest.raises(BackendSupportedError, match="cudnn: does not support compute capability 100"):
        narrow(X, 2)
    with pytest.raises(BackendSupportedError, match="cublas: not chosen by the heuristic"):
        make(lambda suitable, **_: [])(X, 2)


def test_auto_needs_a_heuristic() -> None:
    with pytest.raises(AssertionError, match="heuristic_func"):
        make(None)(X, 2)


def test_skip_check() -> None:
    seen: list[dict[str, Any]] = []

    def record(suitable: list[str], **kwargs: Any) -> list[str]:
        seen.append(kwargs)
        return suitable

    op = make(record)
    assert op(X, 100, backend="cutlass", skip_check=True) == (100, "cutlass")
    assert op(X, 1, backend="no such", skip_check=True) == (1, "no such")
    assert op(X, skip_check=True) == (1, "auto")
    assert [call.keys() for call in seen] == [{"x"}], "auto selection runs, with the raw arguments"


def test_common_check_without_backends(capability: Callable[[int | None], None]) -> None:
    @supported_compute_capability([90, 80])
    def even(x: torch.Tensor, k: int = 1) -> bool:
        return k % 2 == 0

    @backend_requirement({}, common_check=even)
    def op(x: torch.Tensor, k: int = 1) -> int:
        return k

    assert op(X, 2) == 2
    with pytest.raises(ValueError, match="Problem size is not supported for op"):
        op(X)
    assert op(X, skip_check=True) == 1
    capability(100)
    words = r"op does not support compute capability 100; supported compute capabilities: \[80, 90\]"
    with pytest.raises(BackendSupportedError, match=words):
        op(X, 2)
    assert not op.has_backend_choices()
    assert op.is_compute_capability_supported(90)
    assert not op.is_compute_capability_supported(100)
    with pytest.raises(ValueError, match="does not have backend choices"):
        op.is_backend_supported("cutlass")


def test_common_check_holds_for_backends_too() -> None:
    def small(x: torch.Tensor, k: int, backend: str) -> bool:
        return k < 10

    op = make(common=small)
    assert op(X, 2, "cutlass") == (2, "cutlass")
    with pytest.raises(ValueError, match="Problem size"):
        op(X, 12, "cutlass")
    with pytest.raises(BackendSupportedError, match="No suitable auto backends"):
        op(X, 12)


def test_queries_of_an_op() -> None:
    op = make()
    assert op.has_backend_choices()
    assert op.has_backend("cudnn")
    assert not op.has_backend("auto")
    assert op.is_backend_supported("cutlass")
    assert op.is_backend_supported("cutlass", 80)
    assert not op.is_backend_supported("cudnn", 80)
    assert not op.is_backend_supported("nothing")
    assert op.is_backend_supported("cublas")
    assert not op.is_backend_supported("cublas", 80), "no list, so no promise"
    assert op.is_compute_capability_supported(80)
    assert not op.is_compute_capability_supported(75)
    assert op.experimental_backends == frozenset()


def test_keywords_reach_the_checkers() -> None:
    def check(x: torch.Tensor, backend: str, mode: str = "a", **rest: Any) -> bool:
        return mode == "b" and rest == {"extra": 3}

    @backend_requirement({"one": check})
    def op(x: torch.Tensor, backend: str = "one", **kwargs: Any) -> str:
        return backend

    assert op(X, mode="b", extra=3) == "one"
    with pytest.raises(ValueError, match="Problem size"):
        op(X, mode="b")


def make_experimental() -> Any:
    fresh = experimental_backend(lambda x, backend: True)

    @backend_requirement({"fresh": fresh, "stable": lambda x, backend: True}, heuristic_func=lambda s, **_: s)
    def op(x: torch.Tensor, backend: str = "auto") -> str:
        return backend

    return op


def test_experimental_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backend.warn_experimental.cache_clear()
    op = make_experimental()
    assert op.experimental_backends == {"fresh"}
    op(X)
    assert op.suitable_auto_backends == ["stable"]
    with pytest.warns(ExperimentalWarning, match="'fresh' of .*op is experimental") as caught:
        op(X, "fresh")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(X, "fresh")  # once per API and backend
    monkeypatch.setenv("FLASHINFER_ALLOW_EXPERIMENTAL_AUTO_BACKENDS", "1")
    op(X)
    assert op.suitable_auto_backends == ["fresh", "stable"]


def test_experimental_api() -> None:
    backend.warn_experimental.cache_clear()

    @fi_experimental_api
    def op(x: int) -> int:
        return x + 1

    assert op.is_experimental
    with pytest.warns(ExperimentalWarning, match="op is experimental"):
        assert op(1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(2) == 3
