"""CompilationContext: the listed architectures with their suffixes, else those of the visible GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fi_core.compat.compilation_context import CompilationContext, parse_target
from fi_core.runtime.build import driver
from fi_core.runtime.spec.target import CPU, Target, cuda_target

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def no_driver(fresh: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(driver, "LIBRARY", str(tmp_path / "none.so"))
    driver.driver.cache_clear()
    yield
    driver.driver.cache_clear()


@pytest.mark.parametrize(
    ("listed", "archs"),
    [
        ("8.0", {(8, "0")}),
        ("8.6 8.9", {(8, "6"), (8, "9")}),
        ("9.0", {(9, "0a")}),
        ("9.0a 8.0", {(9, "0a"), (8, "0")}),
        ("10.0 10.3", {(10, "0a"), (10, "3a")}),
        ("10.0f", {(10, "0f")}),
        ("11.0", {(11, "0a")}),
        ("12.0", {(12, "0f")}),
        ("12.0a", {(12, "0a")}),
        ("12.1", {(12, "1a")}),
    ],
)
def test_listed_architectures(
    listed: str, archs: set[tuple[int, str]], gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list overrides the GPUs; a missing suffix is added, a listed one is kept."""
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", listed)
    assert archs == CompilationContext().TARGET_CUDA_ARCHS


def test_alias_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    assert {(9, "0a")} == CompilationContext().TARGET_CUDA_ARCHS
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "nine")
    with pytest.raises(ValueError, match=r"FI_CUDA_ARCH_LIST: allowed are .*; got 'nine'"):
        CompilationContext()


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "12.0 9.0 8.9 8.0 10.7")
    context = CompilationContext()
    common = context.COMMON_NVCC_FLAGS

    def gencode(*archs: str) -> list[str]:
        return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]

    assert context.get_nvcc_flags_list() == [*gencode("80", "89", "90a", "107a", "120f"), *common]
    assert context.get_nvcc_flags_list([8]) == [*gencode("80", "89"), *common]
    assert context.get_nvcc_flags_list(supported_major_versions=[12, 9]) == [*gencode("90a", "120f"), *common]
    assert context.get_nvcc_flags_list([10], map_sm107_to_100f=True) == [*gencode("100f"), *common]
    assert "-std=c++17" in common
    with pytest.raises(RuntimeError, match=r"No supported CUDA architectures found for major versions \[11\]"):
        context.get_nvcc_flags_list([11])


def test_visible_gpus(gpus: None) -> None:
    found = driver.driver()
    assert found == driver.Driver((13, 0), (driver.Gpu(0, "Mock GPU", (9, 0)), driver.Gpu(1, "Mock GPU", (8, 9))), None)
    context = CompilationContext()
    assert {(9, "0a"), (8, "9")} == context.TARGET_CUDA_ARCHS
    assert context.targets() == (Target("cuda", "89"), Target("cuda", "90a"))


def test_targets_match_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets do not depend on the listed suffix: calls would not find a kernel that is prebuilt for another one."""
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "12.0 10.0f 9.0a 8.6")
    capabilities = ((8, 6), (9, 0), (10, 0), (12, 0))
    assert CompilationContext().targets() == tuple(cuda_target(*capability) for capability in capabilities)


def test_without_a_driver(no_driver: None) -> None:
    assert driver.driver() is None
    context = CompilationContext()
    assert set() == context.TARGET_CUDA_ARCHS
    assert context.targets() == ()
    with pytest.raises(RuntimeError, match="No supported CUDA architectures found"):
        context.get_nvcc_flags_list()


@pytest.mark.parametrize(
    ("status", "problem"),
    [("100", None), ("803", "cuInit failed with 803: system has unsupported display driver / cuda driver combination")],
    ids=["none", "broken"],
)
def test_a_driver_that_shows_nothing(
    status: str, problem: str | None, gpus: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A driver without devices is not a failure; a failing driver is logged. Both leave the set empty."""
    monkeypatch.setenv("FI_MOCK_STATUS", status)
    found = driver.driver()
    assert found is not None
    assert (found.version, found.gpus, found.problem) == ((13, 0), (), problem)
    assert set() == CompilationContext().TARGET_CUDA_ARCHS
    said = capfd.readouterr().err
    assert (problem in said and logging.getLevelName(logging.WARNING) in said) if problem else said == ""


@pytest.mark.parametrize(
    ("word", "target"),
    [
        ("cpu", CPU),
        ("sm_80", Target("cuda", "80")),
        ("sm_90a", Target("cuda", "90a")),
        ("90a", Target("cuda", "90a")),
        ("9.0", Target("cuda", "90a")),
        ("sm_90", Target("cuda", "90a")),
        ("12.0", Target("cuda", "120a")),
        ("120f", Target("cuda", "120f")),
        ("10.0a", Target("cuda", "100a")),
    ],
)
def test_parse_target(word: str, target: Target) -> None:
    assert parse_target(word) == target


@pytest.mark.parametrize("word", ["", "gpu", "sm_", "9", "sm_9.", "90b", "9.0.0", "sm-90", "CPU"])
def test_parse_target_rejects(word: str) -> None:
    with pytest.raises(ValueError, match="target: expected cpu, or an architecture such as sm_90a") as error:
        parse_target(word)
    assert repr(word) in str(error.value)
